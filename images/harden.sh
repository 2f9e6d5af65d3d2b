#!/bin/sh
# Takes from an image what a guest has no use for and an attacker might. Run once, as root, while the image is built;
# what is left is copied into an empty image, so that nothing removed here stays behind in a layer below.
set -eu
user=65532

grep -q "^[^:]*:[^:]*:$user:" /etc/group || echo "belljar:x:$user:" >>/etc/group
grep -q "^[^:]*:[^:]*:$user:" /etc/passwd || echo "belljar:x:$user:$user::/workspace:/usr/sbin/nologin" >>/etc/passwd
mkdir -p /workspace
chown "$user:$user" /workspace
chmod 1777 /workspace # guests have uids of their own, and engines give a folder in memory the permissions of this one

# Package managers. The list of what is installed stays: scanners read it.
rm -rf /etc/apt /etc/dpkg /usr/lib/apt /usr/lib/dpkg /usr/libexec/dpkg /usr/share/dpkg /usr/share/bug /var/lib/apt \
    /var/cache/apt /var/cache/debconf
rm -f /usr/bin/apt /usr/bin/apt-* /usr/bin/dpkg /usr/bin/dpkg-* /usr/sbin/dpkg-* /usr/bin/debconf* /sbin/apk
find /var/lib/dpkg/info -type f ! -name '*.list' ! -name '*.md5sums' -delete 2>/dev/null || true
for name in "$@"; do # those of the language
    rm -rf "/usr/bin/${name:?}" "/usr/local/bin/${name:?}" "/usr/local/cargo/bin/$name" \
        "/usr/local/lib/node_modules/$name"
done
rm -f /usr/bin/pip /usr/bin/pip3* /usr/local/bin/pip /usr/local/bin/pip3*
find / -xdev -depth \( -path '*/site-packages/pip*' -o -path '*/site-packages/setuptools*' -o -path '*/dist-packages/pip*' \
    -o -path '*/dist-packages/setuptools*' -o -path '*/ensurepip/_bundled*' \) -delete 2>/dev/null || true

# Ways to become somebody else, and traces of how the base was made.
find / -xdev -perm /6000 \( -type f -o -type d \) -exec chmod a-s {} +
rm -rf /root/.[!.]* /root/* /tmp/* /var/tmp/* /var/log/* /run/* /etc/machine-id /var/lib/dbus/machine-id /etc/cron.*
rm -f "$0"
