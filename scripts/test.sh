#!/usr/bin/env bash
# Lint, format, types, tests; the first failure ends it. Tests run on all cores; --all: the slow ones, too, which take hours.
# Arguments go to pytest: scripts/test.sh tests/unit -k config
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
source "$root/scripts/setup.sh"
setup_python dev

cd "$root"
"$python" -m ruff check
"$python" -m ruff format --check
"$python" -m mypy titan_lite
[[ ${1-} == --all ]] && set -- -m '' "${@:2}"
"$python" -m pytest --numprocesses auto --dist worksteal "$@"
