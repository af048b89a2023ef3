#!/bin/sh
# llmgw @VERSION@
# linux-@ARCHITECTURE@
#
# One file: this script, and behind it a packed folder with Python and all that llmgw needs. The first start unpacks
# that folder, once, under a name that no other build has; later ones only go there. Nothing lies in a temporary
# directory, and nothing is set for the loader of libraries: what llmgw starts finds the machine as it is.
set -u
umask 022
build=@BUILD@
system=/usr/local/lib/llmgw
PATH=${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}
export PATH

refuse() {
    echo "llmgw @VERSION@: $1" >&2
    exit 1
}

run() {
    # What is set for another Python is not for this one.
    unset PYTHONHOME PYTHONPATH PYTHONSTARTUP PYTHONUSERBASE PYTHONPLATLIBDIR PYTHONEXECUTABLE
    folder=$1
    shift
    exec "$folder/bin/python3.11" -s -P -m llmgw "$@"
}

case $0 in
/*) LLMGW_FILE=$0 ;;
*) LLMGW_FILE=$(pwd)/$0 ;;
esac
export LLMGW_FILE

# What root has unpacked serves all users.
[ -x "$system/$build/bin/python3.11" ] && run "$system/$build" "$@"
if [ "$(id -u)" = 0 ]; then
    base=$system
else
    [ -n "${HOME:-}" ] || HOME=$(getent passwd "$(id -u)" | cut -d: -f6)
    export HOME
    base=${XDG_CACHE_HOME:-$HOME/.cache}/llmgw
    [ -x "$base/$build/bin/python3.11" ] && run "$base/$build" "$@"
fi

machine=$(uname -s)-$(uname -m)
[ "$machine" = @MACHINE@ ] || refuse "this file is for linux-@ARCHITECTURE@, and this machine is $machine: take its own"
sum=$(tail -c +@OFFSET@ "$0" | sha256sum | cut -d' ' -f1)
[ "$sum" = @SHA256@ ] || refuse "$0 is damaged or not whole: its sha256 is not what its head says: fetch it again"
mkdir -p "$base" || refuse "it unpacks itself into $base once, and that can't be made"
part=$(mktemp -d "$base/.$build.XXXXXX") || refuse "it unpacks itself into $base once, and can't write there"
trap 'rm -rf "$part"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
chmod 755 "$part"
if ! said=$(tail -c +@OFFSET@ "$0" | tar -xzf - -C "$part" --no-same-owner 2>&1); then
    free=$(df -Pm "$base" | tail -n 1 | tr -s ' ' | cut -d' ' -f4)
    refuse "it can't be unpacked into $base (needs @MIB@ MiB, $free are free): $(echo "$said" | head -n 3)"
fi
# On the disk before it has its name: a folder that is there is whole.
sync -f "$part" 2>/dev/null || sync
if ! said=$(mv -T "$part" "$base/$build" 2>&1); then
    # Another start was quicker.
    [ -x "$base/$build/bin/python3.11" ] || refuse "it can't be unpacked into $base: $said"
    rm -rf "$part"
fi
trap - EXIT INT TERM HUP
"$base/$build/bin/python3.11" -c '' || refuse "what it unpacked into $base does not run: is $base mounted noexec?"
run "$base/$build" "$@"
