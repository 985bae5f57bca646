#!/usr/bin/env bash
# Trains a recipe on this machine's GPUs, or on CPU processes where there are none. The first run makes .venv if need be.
#
#   ./run_train.sh                                            # the debug model
#   NGPU=4 CONFIG_FILE=train_configs/llama3_8b.toml ./run_train.sh --training.steps 100
#   ./run_train.sh --print-config                             # the resolved recipe; --help: every key
#
# CONFIG_FILE is the recipe: a file, or the name of one in train_configs/. --help lists the other variables: NGPU, NNODES, ...
#
# SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, here or to any rank: the step is ended and saved; Ctrl-C after it does not wait for that.
# Exit code 0: trained; 1: failed; 2: wrong recipe, option or data; 3: the same step failed again after a restart; 75: stopped by a
# signal, to be started again.
#
# This script finds or makes a Python that has all packages; titan_lite/launch.py does the rest.
set -euo pipefail

# Streams that are closed lead nowhere: what is opened next would take their place.
[[ -e /dev/fd/0 ]] || exec </dev/null
[[ -e /dev/fd/1 ]] || exec >/dev/null
[[ -e /dev/fd/2 ]] || exec 2>/dev/null

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
source "$root/scripts/setup.sh"
trap 'exit 75' TERM USR1 INT HUP # until Python listens: nothing has been started

for word; do
    # A question is answered without an installation, which takes minutes.
    if [[ $word == --help || $word == -h ]] && ! (installed_python run) 2>/dev/null; then
        cat "$root/titan_lite/help.txt"
        echo
        echo "Every key, with its default and values, is in docs/recipes.md. Once a run has made .venv, --help prints them, too."
        exit
    fi
done

# torchtitan's script reads these. Ignored, they would have another recipe trained, or have it trained at all.
for name in CONFIG MODULE; do
    [[ -z ${CONFIG_FILE:-} && -n ${!name:-} ]] || continue
    say "$name=${!name}: the recipe is named by CONFIG_FILE; use it, such as CONFIG_FILE=llama3_8b, or unset $name"
    exit 2
done
if [[ -n ${COMM_MODE:-} ]]; then
    say "COMM_MODE=$COMM_MODE: this script trains; to check a recipe use python -m titan_lite recipe RECIPE --world-size 8, or unset COMM_MODE"
    exit 2
fi

recipe=${CONFIG_FILE:-train_configs/debug_model.toml}
setup_python run

# What a run that stops names to go on: this command.
again="${CONFIG_FILE:+CONFIG_FILE=$(printf %q "$CONFIG_FILE") }$(printf '%q ' "$0" "$@")"
export TITAN_LITE_COMMAND=${again% }

# A signal that comes while Python starts waits until it listens, where `env` knows how (coreutils 8.31).
waiting=(env --block-signal=TERM,USR1,INT,HUP)
"${waiting[@]}" true 2>/dev/null || waiting=()

# exec: an interrupt or a scheduler's signal reaches the launcher itself.
exec ${waiting[@]+"${waiting[@]}"} "$python" -m titan_lite.launch "$recipe" "$@"
