# shellcheck shell=bash
# Sourced by run_train.sh and scripts/test.sh, which set `root`, the folder of this checkout.
#
#   find_python         base=PYTHON: the active Python, or the first one on the PATH that is new enough
#   setup_python EXTRA  python=PYTHON: one that has all that training (EXTRA=run) or also testing (EXTRA=dev) needs
#   installed_python EXTRA  python=PYTHON: the same; exit code 1 if an installation is needed
#
# An active Python that has it all is used as it is and never changed; else .venv is made, or completed.

say() { echo "titan_lite: $*" >&2; }
fail() {
    say "$*"
    exit 1
}

find_python() {
    local candidate unfit=''
    for candidate in python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
        base=$(command -v "$candidate") || continue
        "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && return
        unfit="$unfit $base"
    done
    [[ -z $unfit ]] || fail "needs Python 3.10 or newer on the PATH; too old, or not running:$unfit"
    fail "needs Python 3.10 or newer on the PATH; there is none"
}

setup_python() { # run|dev
    : "${root:?}"
    choose_python "$1"
    # This checkout is what runs, whatever titan_lite is installed or lies in the current folder, which `python -m` puts first.
    # UTF-8: torch reads files of its own by the locale's encoding, which may be ASCII.
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 PYTHONUTF8=1
}

choose_python() { # run|dev
    local lacks stamp extra=$1 venv="$root/.venv"
    installed_python "$extra" && return

    find_python
    if ! { mkdir -p "$venv" && exec 9>"$venv/setup.lock"; }; then
        fail "$venv cannot be written, and the active Python lacks ${lacks:-titan_lite}"
    fi
    # Two set-ups at once, perhaps of several nodes on one file system: the second waits, and finds the work done.
    if command -v flock >/dev/null && ! flock -n 9; then
        say "waiting for another set-up of $venv"
        flock 9 || say "this file system has no locks: make sure that nothing else is setting up $venv"
    fi
    if ! stamp_holds "$stamp $extra" && ! stamp_holds "$stamp dev"; then
        make_venv "$venv"
        echo "begun" >"$venv/titan_lite.stamp"
        fill_venv "$extra"
        echo "$stamp $extra" >"$venv/titan_lite.stamp"
    fi
    exec 9>&-
}

installed_python() { # run|dev
    local active extra=$1
    lacks='' venv="$root/.venv"
    for active in python3 python; do
        python=$(command -v "$active") || continue
        if lacks=$(lacking "$python" "$venv" "$extra" 2>/dev/null); then
            [[ -z $lacks ]] && return
            fail "the active Python ($python) has titan_lite and torch, but lacks $lacks: install that there, or deactivate it for .venv"
        fi
    done

    # The stamp is written last: without the right one, an installation is interrupted or outdated.
    python="$venv/bin/python"
    stamp="$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum) $root"
    stamp_holds "$stamp $extra" || stamp_holds "$stamp dev"
}

stamp_holds() {
    local file="$root/.venv/titan_lite.stamp"
    [[ -x $python && -f $file && $(<"$file") == "$1" ]]
}

# Prints what PYTHON lacks. Exit code 0: PYTHON is meant to be used, for it lacks nothing, or it has torch and also titan_lite,
# installed or by PYTHONPATH (that the current folder may hold one means nothing).
lacking() { # PYTHON VENV run|dev
    "$1" - "${@:2}" <<'PY'
import os, sys

sys.path = [folder for folder in sys.path if folder]  # "" is the current folder
from importlib import metadata
from importlib.util import find_spec

venv, extra = sys.argv[1:]
# the dependencies of pyproject.toml
needs = ["torch", "torchdata", "tiktoken", "tokenizers", "safetensors", "datasets", "fsspec", "aiohttp", "numpy", "pyarrow", "tensorboard", "networkx", "tqdm", "pydantic"]
needs += ["tomli"] if sys.version_info < (3, 11) else []
needs += ["pytest", "pytest_timeout", "xdist", "hypothesis", "ruff", "mypy"] if extra == "dev" else []
lacks = [name for name in needs if find_spec(name) is None]
meant = "torch" not in lacks and find_spec("titan_lite") is not None
if "torch" not in lacks:
    try:
        version = metadata.version("torch")
        if tuple(int(part) for part in version.split(".")[:2]) < (2, 11):
            lacks.append(f"torch >= 2.11 (it has {version})")
    except (metadata.PackageNotFoundError, ValueError):
        pass  # a build of one's own, whose owner knows
print(", ".join(lacks))
if os.path.exists(f"{venv}/titan_lite.stamp") and os.path.samefile(sys.prefix, venv):
    sys.exit(1)  # .venv as made here, and activated: its stamp decides
sys.exit(bool(lacks) and not meant)
PY
}

make_venv() {
    local venv=$1 output
    if ! "$python" -c '' 2>/dev/null; then
        say "making $venv, as the active Python lacks ${lacks:-titan_lite}"
        find "$venv" -mindepth 1 -maxdepth 1 ! -name setup.lock -exec rm -rf {} +
    else
        say "completing $venv, as an installation was interrupted, or constraints.txt or pyproject.toml changed, or for the tests"
    fi
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        output=$("$base" -m venv "$venv" 2>&1) || fail "$base cannot make a virtual environment: $output
titan_lite: on Debian and Ubuntu: apt-get install python3-venv"
    fi
}

fill_venv() { # run|dev
    local quiet=() what=$root
    [[ $1 == dev ]] && what="${root}[dev]"
    [[ -t 2 ]] || quiet=(--quiet) # no progress bars in a log
    say "installing torch and the rest of constraints.txt in .venv: some minutes, 2 GB on disk (with CUDA 8), only this once"
    # PIP_USER is set on some clusters, and does not go with a virtual environment
    PIP_USER=0 "$python" -m pip install --no-input --disable-pip-version-check ${quiet[@]+"${quiet[@]}"} \
        -c "$root/constraints.txt" -e "$what" >&2 || fail "pip failed, see above; the same command goes on from there"
    say "installed"
}
