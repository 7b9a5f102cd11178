#!/usr/bin/env bash
# All checks on this checkout: lint, format, types, tests. Installs what they need and is missing.
# Without arguments, the tests run side by side, one process a core; arguments go to a single pytest,
# for example: run-tests.sh tests/cli -k config
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

mapfile -t packages < <(
    missing_basics
    missing_programs sshfs:sshfs sshd:openssh-server strace:strace setfattr:attr setfacl:acl \
        git:git fuser:psmisc rsync:rsync vim:vim
)
install_packages "${packages[@]}"
extra=test
case " $* " in *" -m libraries "*) extra=test,libraries ;; esac
install_wbcache "$extra"

workspace=$(make_workspace)
trap 'remove_workspace "$workspace"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
cd "$ROOT"

stage() {
    local name=$1 start=$SECONDS
    shift
    say "$name"
    "$@" </dev/null
    say "$name: $((SECONDS - start)) s"
}
stage "ruff check" "$PYTHON" -m ruff check
stage "ruff format" "$PYTHON" -m ruff format --check
stage "mypy" "$PYTHON" -m mypy
# In the order of the folders: sorted by their number of tests, the longest, a single one, would come last.
[ $# -gt 0 ] || set -- --numprocesses "$(nproc)" --maxprocesses 4 --dist loadfile --no-loadscope-reorder
stage "pytest" "$PYTHON" -m pytest --basetemp "$workspace/pytest" "$@"
