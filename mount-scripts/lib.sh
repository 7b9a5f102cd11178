# shellcheck shell=bash
# Shared by the scripts beside it: system packages, the virtual environment, what they leave mounted.
# Sourced by bash; sets ROOT (the checkout) and PYTHON (in the environment, once `prepare` has run).

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=${WBCACHE_VENV:-$ROOT/.venv}
PYTHON=$VENV/bin/python

say() { printf '== %s\n' "$*"; }

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

has() { command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || [ -x "/sbin/$1" ]; }

# What of a list of "PROGRAM:PACKAGE" is not there, as packages.
missing_programs() {
    local pair
    for pair in "$@"; do
        has "${pair%%:*}" || printf '%s\n' "${pair#*:}"
    done
}

# What building and running wbcache needs and this machine lacks, as packages.
missing_basics() {
    missing_programs fusermount3:fuse3 cc:gcc pkg-config:pkg-config python3:python3
    pkg-config --exists fuse3 2>/dev/null || echo libfuse3-dev
    if ! has python3; then
        printf '%s\n' python3-dev python3-venv
        return
    fi
    python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    python3 -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' \
        2>/dev/null || echo python3-dev
}

# Install packages, if there are any to install.
install_packages() {
    [ $# -gt 0 ] || return 0
    has apt-get || fail "please install first: $*"
    local -a root=()
    if [ "$(id -u)" -ne 0 ]; then
        has sudo || fail "please ask an administrator to install: $*"
        root=(sudo)
    fi
    say "installing: $*"
    "${root[@]}" apt-get update -q </dev/null >/dev/null || true
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
        "$@" </dev/null >/dev/null
}

# The virtual environment, with the package and the named extra ("" for none) from this checkout.
install_wbcache() {
    local extra=$1 stamp
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "Python 3.10 or newer is needed, python3 is $(python3 --version)"
    "$PYTHON" -c 'import pip' 2>/dev/null || python3 -m venv --clear "$VENV"
    stamp=$VENV/.wbcache-$(printf '%s' "$extra" | cat - "$ROOT/pyproject.toml" | cksum | tr ' ' -)
    if [ ! -e "$stamp" ]; then
        say "installing wbcache into $VENV"
        "$PYTHON" -m pip install -q --disable-pip-version-check -e "$ROOT${extra:+[$extra]}" </dev/null
        rm -f "$VENV"/.wbcache-*
        touch "$stamp"
    fi
}

# Detach every FUSE mount at or below a directory, the innermost first; then remove the directory.
remove_workspace() {
    local directory=$1 mountpoint
    [ -n "$directory" ] && [ -d "$directory" ] || return 0
    awk -v base="$directory/" 'index($5, base) == 1 && / - fuse/ { print $5 }' /proc/self/mountinfo |
        tac | while IFS= read -r mountpoint; do
        mountpoint=$(printf '%b' "${mountpoint//\\/\\0}")
        if [ "$(id -u)" -eq 0 ]; then
            umount -i -l "$mountpoint" || true
        else
            fusermount3 -uz "$mountpoint" || true
        fi
    done
    rm -rf --one-file-system "$directory"
}

# A temporary directory on a disk: a cache in memory is refused.
make_workspace() {
    local base=${TMPDIR:-/tmp}
    [ "$(stat -f -c %T "$base")" != tmpfs ] || base=/var/tmp
    mktemp -d "$base/wbcache.XXXXXXXX"
}
