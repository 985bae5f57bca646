#!/usr/bin/env bash
# Runs the default tests with other versions of torch, each in an environment of its own: .versions/VERSION, made once.
#
#   scripts/test_versions.sh 2.11.0 2.14.1              # arguments after -- go to pytest: ... -- tests/unit -k optimizer
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
source "$root/scripts/setup.sh"
cd "$root" || exit

versions=()
while (($#)) && [[ $1 != -- ]]; do
    [[ $1 =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || { echo "error: $1: expected a version of torch, such as 2.11.0" >&2 && exit 2; }
    versions+=("$1")
    shift
done
((${#versions[@]})) || { echo "error: no version; scripts/test_versions.sh 2.11.0 2.14.1 would work" >&2 && exit 2; }
(($#)) && shift

find_python
failed=0
for version in "${versions[@]}"; do
    folder="$root/.versions/$version"
    if [[ ! -f $folder/complete ]]; then
        say "making $folder"
        # what torch pins itself is left to it
        "$base" -m venv --clear "$folder" || fail "$base cannot make a virtual environment"
        grep -vE '^(torch|setuptools|triton)==' constraints.txt >"$folder/constraints.txt"
        "$folder/bin/python" -m pip install --quiet --no-input --disable-pip-version-check \
            -c "$folder/constraints.txt" -e '.[dev]' "torch==$version" >&2 || fail "pip failed, see above"
        touch "$folder/complete"
    fi
    # UTF-8 and no current folder, as scripts/setup.sh has it
    if PATH="$folder/bin:$PATH" PYTHONPATH="$root" PYTHONSAFEPATH=1 PYTHONUTF8=1 "$folder/bin/python" -m pytest "$@"; then
        say "torch $version: passed"
    else
        say "torch $version: FAILED"
        failed=1
    fi
done
exit "$failed"
