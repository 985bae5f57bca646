#!/usr/bin/env bash
# Trains a recipe on this machine's GPUs, or on CPU processes where there are none. The first run makes .venv if need be.
#
#   ./run_train.sh                                            # the debug model
#   NGPU=4 CONFIG_FILE=train_configs/llama3_8b.toml ./run_train.sh --training.steps 100
#   ./run_train.sh --print-config                             # the resolved recipe; --help: every key
#   ./run_train.sh --checkpoint.explain                       # the step that a run would go on from, and what differs since
#
# NGPU           processes on this node (default: its GPUs, else 2 CPU processes)
# CONFIG_FILE    recipe, looked up from the current folder, then from here (default: train_configs/debug_model.toml)
# LOG_RANK       ranks that print, such as 0,3 (default: 0)
# NNODES         nodes (default: 1); with more, RDZV_ENDPOINT=HOST:PORT of one of them, the same on all
# NODE_RANK      0 on the node that RDZV_ENDPOINT names, not 0 on the others; only where host names do not tell
# LOCAL_ADDR     this node's address, where its host name does not tell the others
# RDZV_ID        name of the run, the same on all nodes (default: titan_lite)
# MAX_RESTARTS   times that all processes are started again after a failure, from the newest step saved (default: 0)
#
# SIGTERM, SIGUSR1 or Ctrl-C, to this script or to any rank: the step is ended and saved. Exit code 0: trained; 1: failed; 2: wrong
# recipe, option or data; 3: the same step failed again after a restart; 75: stopped by a signal, and saved, to be started again.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
source "$root/scripts/setup.sh"
trap 'exit 75' TERM USR1 INT # until the launcher listens: nothing has been started

wrong_usage() {
    echo "error: $*" >&2
    exit 2
}

titan_lite_recipe() { # PYTHON ARGUMENT...
    PYTHONSAFEPATH=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$1" -m titan_lite.recipe "${@:2}" || exit $?
}

# A wrong recipe or option ends here: one line, before anything is installed or started.
check_recipe() { # PYTHON ARGUMENT...
    titan_lite_recipe "$1" "$recipe" "${@:2}"
    local argument
    for argument in "${@:2}"; do
        case $argument in
            --print-config | --help | -h) exit 0 ;;
            --checkpoint.explain) explain=yes ;;
        esac
    done
}

torch_and_driver() {
    local build='cuda = torch.version.cuda; print(f"torch {torch.__version__}, built", f"for CUDA {cuda}" if cuda else "without CUDA")'
    echo "$("$python" -c "import torch; $build"), driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)"
}

count_gpus() { # those that titan_lite may use
    local listed
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} && ! $CUDA_VISIBLE_DEVICES =~ ^[^-,] ]]; then
        gpus=0 # empty or -1: the CPU is wanted
    elif listed=$(nvidia-smi -L 2>/dev/null) || [[ -e /dev/kfd ]]; then
        gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
        ((gpus > 0)) || wrong_usage "torch cannot use the GPUs of this node (${listed:-/dev/kfd}): $(torch_and_driver); CUDA 13 needs driver" \
            "580 or newer, CUDA 12 525: install a torch built for this driver, or set CUDA_VISIBLE_DEVICES= for CPU processes"
    else
        gpus=0
    fi
}

recipe=${CONFIG_FILE:-train_configs/debug_model.toml}
[[ ! -e $recipe && -e $root/$recipe ]] && recipe="$root/$recipe"
nodes=${NNODES:-1} restarts=${MAX_RESTARTS:-0} rendezvous=()

[[ -z ${OMP_NUM_THREADS:-} || $OMP_NUM_THREADS =~ ^[1-9][0-9]{0,5}$ ]] ||
    wrong_usage "OMP_NUM_THREADS=$OMP_NUM_THREADS: expected a number of threads, such as OMP_NUM_THREADS=1"
[[ ${NGPU:-1} =~ ^[1-9][0-9]{0,5}$ ]] || wrong_usage "NGPU=$NGPU: expected the number of processes, at least 1, such as NGPU=2"
[[ $nodes =~ ^[1-9][0-9]{0,5}(:[1-9][0-9]{0,5})?$ ]] || wrong_usage "NNODES=$nodes: expected the number of nodes, such as NNODES=2"
[[ ${NODE_RANK:-0} =~ ^[0-9]+$ ]] || wrong_usage "NODE_RANK=$NODE_RANK: expected 0 on one node, and such as 1 on another"
[[ $restarts =~ ^[0-9]{1,6}$ ]] || wrong_usage "MAX_RESTARTS=$restarts: expected a number, such as MAX_RESTARTS=0"
if [[ $nodes != 1 ]]; then
    [[ -n ${RDZV_ENDPOINT:-} ]] || wrong_usage "NNODES=$nodes needs RDZV_ENDPOINT=HOST:PORT of a node, such as node0:29500"
    [[ -z ${LOCAL_ADDR:-} ]] || rendezvous=(--local-addr "$LOCAL_ADDR")
    if [[ -n ${NODE_RANK:-} ]]; then
        rendezvous+=(--rdzv-conf "is_host=$([[ $NODE_RANK == 0 ]] && echo true || echo false)")
    fi
fi

find_python
checked= explain=
if "$base" -c 'import tomllib' 2>/dev/null; then # Python 3.10 has no TOML reader before the set-up
    check_recipe "$base" "$@"
    checked=yes
fi
setup_python run
[[ -n $checked ]] || check_recipe "$python" "$@"

if [[ $nodes != 1 ]] && # else every node would wait for it, with a wall of warnings
    ! "$python" -c 'import socket, sys; socket.getaddrinfo(sys.argv[1].strip("[]"), None)' "${RDZV_ENDPOINT%:*}" 2>/dev/null; then
    wrong_usage "RDZV_ENDPOINT=$RDZV_ENDPOINT: this node knows no host ${RDZV_ENDPOINT%:*}; use a name or an address that it knows"
fi

count_gpus
processes=${NGPU:-$((gpus > 0 ? gpus : 2))}
((gpus == 0 || processes <= gpus)) ||
    wrong_usage "NGPU=$processes is more than the $gpus GPUs here; NGPU=$gpus works, or CUDA_VISIBLE_DEVICES= for CPU processes"

if [[ -z ${OMP_NUM_THREADS:-} ]]; then # the processes of a node share its cores
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=$((cores > processes ? cores / processes : 1))
fi
# Without fixed segments less memory is lost to gaps.
((gpus == 0)) || [[ -n ${PYTORCH_CUDA_ALLOC_CONF:-} ]] || export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

((gpus < 2)) || numa=$(numa_options /sys/devices/system/node)

# What a run would load is said by one process, in the place of all.
if [[ -n $explain ]]; then
    export RANK=0 LOCAL_RANK=0 WORLD_SIZE=$((${nodes##*:} * processes))
    exec "$python" -m titan_lite.train "$recipe" "$@"
fi

# What files and the number of ranks decide, where it is known, is told before ranks are started.
[[ $nodes == *:* ]] || titan_lite_recipe "$python" --world-size $((nodes * processes)) "$recipe" "$@"
say "starting $processes $( ((gpus > 0)) && echo GPU || echo CPU) process$( ((processes == 1)) || echo es): $recipe"

# What a run that stops names to go on: this command.
again=
for name in NGPU CONFIG_FILE LOG_RANK NNODES NODE_RANK RDZV_ENDPOINT LOCAL_ADDR RDZV_ID MAX_RESTARTS; do
    [[ -z ${!name:-} ]] || again+="$name=$(printf %q "${!name}") "
done
again+=$(printf '%q ' "$0" "$@")
export TITAN_LITE_COMMAND=${again% } LOG_RANK=${LOG_RANK:-0}

# A signal that comes while Python starts waits for the launcher, where `env` knows how (coreutils 8.31).
waiting=(env --block-signal=TERM,USR1,INT)
"${waiting[@]}" true 2>/dev/null || waiting=()

# exec: an interrupt or a scheduler's signal reaches the launcher itself. Port 0 is a free one.
exec ${waiting[@]+"${waiting[@]}"} "$python" -m titan_lite.launch --nnodes "$nodes" --nproc-per-node "$processes" --max-restarts "$restarts" \
    --rdzv-backend c10d --rdzv-endpoint "${RDZV_ENDPOINT:-localhost:0}" --rdzv-id "${RDZV_ID:-titan_lite}" \
    ${rendezvous[@]+"${rendezvous[@]}"} ${numa:-} -m titan_lite.train "$recipe" "$@"
