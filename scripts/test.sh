#!/usr/bin/env bash
# Lint, format, types, tests; the first failure ends it. Tests run on all cores. Other arguments go to pytest.
#
#   scripts/test.sh                           # six minutes on two cores: shows that this checkout works
#   scripts/test.sh --all                     # half an hour: also the tests marked `slow`, all that CI runs
#   scripts/test.sh --rest                    # these alone, after scripts/test.sh
#   scripts/test.sh --release                 # hours: also those marked `release`
#   scripts/test.sh tests/unit -k config
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
source "$root/scripts/setup.sh"
setup_python dev

cd "$root"
case ${1-} in
    --all) set -- -m 'not release' "${@:2}" ;;
    --rest) set -- -m 'slow and not release' "${@:2}" ;;
    --release) set -- -m '' "${@:2}" ;;
esac
"$python" -m ruff check
"$python" -m ruff format --check
"$python" -m mypy titan_lite
"$python" -m pytest --numprocesses auto --dist worksteal "$@"
