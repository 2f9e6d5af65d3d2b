#!/bin/sh
# Ends all that the guest's uid runs, then prints what the machine counted.
# A signal to -1 reaches all of them at once, so no fork outruns it; and nothing of any other uid.
kill -9 -1 2>/dev/null
at=/sys/fs/cgroup
own=$(sed -n "s/^0:://p" /proc/self/cgroup 2>/dev/null)
for one in "$at$own" "$at" "$at/memory" "$at/cpuacct"; do
    for file in memory.events memory.oom_control memory.peak memory.max_usage_in_bytes cpu.stat cpuacct.usage; do
        [ -r "$one/$file" ] && {
            echo "$file:"
            cat "$one/$file"
        }
    done
done 2>/dev/null
echo kernel:
sed -n "s/^oom_kill /oom_kill /p" /proc/vmstat
echo end:
