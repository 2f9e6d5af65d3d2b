#!/bin/sh
# Prints what the kernel and the image say of a guest. Arguments: the tools to look for.
cat /proc/self/status
echo boot:
cat /proc/sys/kernel/random/boot_id
echo devices:
cat /proc/net/dev
echo routes:
cat /proc/net/route
echo root:
(: >/usr/belljar-probe) 2>&1 || echo refused
echo tools:
for one; do command -v "$one"; done
echo end:
