"""What runs on the node, as root: POSIX shell, since there is nothing of llmgw there yet. Nothing is left in /tmp."""

from __future__ import annotations

LOOK = """\
set -u
echo "system=$(uname -s)"
echo "machine=$(uname -m)"
echo "host=$(hostname)"
echo "time=$(date +%s)"
[ -d /run/systemd/system ] && echo "systemd=yes"
[ -x /usr/local/bin/llmgw ] && echo "installed=$(sha256sum /usr/local/bin/llmgw | cut -c1-64)"
for folder in /usr/local /etc /var/lib; do
    echo "free=$folder $(df -Pk "$folder" | tail -n 1 | tr -s ' ' | cut -d' ' -f4)"
done
exit 0
"""
"""``name=value`` lines. ``free``: a folder, and the KiB that are free there."""

_ALONE = """\
set -eu
umask 022
lock=/run/llmgw-onboarding.lock
exec 9>"$lock"
flock -w 60 9 || {
    echo "another onboarding is at work there: run this again once it has ended (lslocks shows who holds $lock)" >&2
    exit 1
}
"""
"""Two that onboard one machine at once write to the same places, and so do one that was cut off and the next: each
script waits for the other's end."""

_PLACE = (
    _ALONE
    + """\
mkdir -p /usr/local/bin
part=/usr/local/bin/.llmgw.partial
rm -rf "$part"
mkdir -m 700 "$part"
trap 'rm -rf "$part"' EXIT
cd "$part"
place() {
    chmod 0755 "$1"
    chown 0:0 "$1"
    sync "$1" 2>/dev/null || sync
    mv -f "$1" /usr/local/bin/llmgw
}
"""
)

FETCH = (
    _PLACE
    + """\
url=$1 name=$2
get() {
    if command -v curl >/dev/null; then
        curl -fsSL --connect-timeout 15 --speed-limit 1000 --speed-time 60 --retry 2 -o "$2" "$1"
    elif command -v wget >/dev/null; then
        wget -nv -T 60 -t 3 -O "$2" "$1"
    else
        echo "there is neither curl nor wget here: install one of them" >&2
        return 1
    fi
}
get "$url/checksums.txt" checksums.txt || { echo "$url/checksums.txt can't be had" >&2; exit 1; }
while read -r sum file; do
    [ "${file#\\*}" = "$name" ] && echo "$sum  $name"
done <checksums.txt >wanted || true
[ -s wanted ] || { echo "$url/checksums.txt does not name $name" >&2; exit 1; }
sum=$(cut -c1-64 wanted)
if [ -x /usr/local/bin/llmgw ] && [ "$(sha256sum /usr/local/bin/llmgw | cut -c1-64)" = "$sum" ]; then
    echo unchanged
    exit 0
fi
get "$url/$name" "$name" || { echo "$url/$name can't be had" >&2; exit 1; }
found=$(sha256sum "$name" | cut -c1-64)
[ "$found" = "$sum" ] || {
    echo "$url/$name has sha256 $found, and checksums.txt beside it says $sum: it was not installed" >&2
    exit 1
}
place "$name"
echo "placed $sum"
"""
)
"""Parameters: the URL of the release, the name of its file. Says ``unchanged`` or ``placed SHA256``."""

COPY = (
    _PLACE
    + """\
cat >copy
found=$(sha256sum copy | cut -c1-64)
[ "$found" = "$1" ] || { echo "what arrived has sha256 $found, and $1 was sent: it was not installed" >&2; exit 1; }
place copy
"""
)
"""Parameter: the SHA-256 of what comes on standard input."""

WRITE = (
    _ALONE
    + """\
target=$1
mkdir -p "$(dirname "$target")"
chmod 0755 /etc/llmgw
chown 0:0 /etc/llmgw
part="$target.partial"
trap 'rm -f "$part"' EXIT
cat >"$part"
chmod 0644 "$part"
chown 0:0 "$part"
if [ -f "$target" ] && cmp -s "$part" "$target"; then
    echo unchanged
    exit 0
fi
if [ -f "$target" ] && ! grep -q "Written by $2" "$target"; then
    cp -p "$target" "$target.replaced"
    echo kept
fi
sync "$part" 2>/dev/null || sync
mv -f "$part" "$target"
"""
)
"""Parameters: the file, and who writes it. Says ``unchanged``; ``kept``: what somebody else wrote is beside it."""

TRUST = (
    _ALONE
    + """\
place=/usr/local/share/ca-certificates
mkdir -p "$place"
cat >"$place/.llmgw-ca.partial"
if cmp -s "$place/.llmgw-ca.partial" "$place/llmgw-ca.crt"; then
    rm -f "$place/.llmgw-ca.partial"
    [ -e /etc/ssl/certs/llmgw-ca.pem ] && exit 0
else
    mv -f "$place/.llmgw-ca.partial" "$place/llmgw-ca.crt"
fi
update-ca-certificates >/dev/null
"""
)

ENGINE = """\
set -u
program=$1 module=$2
[ -e "$program" ] || { echo "$program: there is no such file" >&2; exit 1; }
[ -x "$program" ] || { echo "$program is not executable" >&2; exit 1; }
if [ -n "$module" ]; then
    exec timeout 300 "$program" -c "import $module"
fi
timeout 300 "$program" --version >/dev/null 2>&1 || exec timeout 300 "$program" --help >/dev/null
"""
"""Parameters: the program, and the Python module that it must be able to import, or nothing."""

STATE = """\
set -u
systemctl show llmgw-agent -p ActiveState -p StatusText
journalctl _SYSTEMD_UNIT=llmgw-agent.service -o cat --no-pager -n 3 --since "@$1" | sed 's/^/said=/'
exit 0
"""
"""Parameter: since when, in Unix seconds. ``Name=value`` lines, then the last that the agent wrote."""
