#!/usr/bin/env bash
# All checks on this checkout: lint, format, types, tests. Installs what they need and is missing.
# Arguments go to pytest, for example: run-tests.sh tests/cli -k config
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

mapfile -t packages < <(
    missing_basics
    missing_programs sshfs:sshfs sshd:openssh-server strace:strace setfattr:attr setfacl:acl \
        git:git fuser:psmisc
)
install_packages "${packages[@]}"
install_wbcache test

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
stage "pytest" "$PYTHON" -m pytest --basetemp "$workspace/pytest" "$@"
