#!/usr/bin/env bash
# From a fresh Debian or Ubuntu to a measured run: installs what is missing, then writes like a
# training run, once straight to a slow share (built in, 30 ms a call) and once through wbcache.
# Leaves nothing mounted. Arguments are passed on to quickstart_demo.py.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

mapfile -t packages < <(missing_basics)
install_packages "${packages[@]}"
install_wbcache ""
if [ "$(id -u)" -eq 0 ]; then
    bash "$ROOT/mount-scripts/install-umount-helper.sh" "$PYTHON"
fi
[ -e /dev/fuse ] || fail "/dev/fuse is missing: load the fuse module, or start the container with" \
    "--device /dev/fuse --cap-add SYS_ADMIN"

workspace=$(make_workspace)
trap 'remove_workspace "$workspace"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
"$PYTHON" "$ROOT/mount-scripts/quickstart_demo.py" --workspace "$workspace" "$@" </dev/null
