#!/bin/sh
# Unpacks an archive from stdin into a folder ($0), with its permissions, and says so when all is in place.
# Where the image has that folder, engines give ours its permissions: the keeper owns it, and opens it to the guest.
cd "$0" && { chmod 1777 . 2>/dev/null || :; } && umask 022 && tar -xpf - && exec echo laid
