#!/bin/sh
# Keeps a sandbox's folders mounted until its stdin is closed.
read -r _
