#!/usr/bin/env bash
# Installs /sbin/umount.fuse.wbcache, through which a plain `umount` flushes everything before it
# returns, as `wbcache umount` does. Needs root.
# Usage: install-umount-helper.sh [PYTHON]    (an interpreter that has wbcache; default: .venv's)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

python=$(command -v "${1:-$PYTHON}") || fail "no Python at ${1:-$PYTHON}"
python=$(cd "$(dirname "$python")" && pwd -P)/$(basename "$python")
(cd / && "$python" -I -c 'import wbcache.cli.umount_helper') ||
    fail "$python does not have wbcache installed"
[ "$(id -u)" -eq 0 ] || fail "run as root: sudo $0 $python"

helper=${WBCACHE_HELPER:-/sbin/umount.fuse.wbcache}
quoted=$(printf '%q' "$python")
new=$(mktemp "$helper.XXXXXXXX")
cat >"$new" <<END
#!/bin/sh
# umount(8) runs this for wbcache mounts. Installed by wbcache's install-umount-helper.sh.
python=$quoted
if [ -x "\$python" ]; then
    exec "\$python" -I -m wbcache.cli.umount_helper "\$@"
fi
echo "wbcache: \$python cannot be run; unmounting without waiting for the flush, which goes on" >&2
exec umount -i "\$@"
END
chmod 755 "$new"
mv -f "$new" "$helper"
say "a plain umount now waits for wbcache's flush ($helper)"
