"""Every command of README.md and docs/ is run as it stands there, but for what makes it small
enough for any machine.
"""

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from commands import run
from pages import ALL, PAGES, blocks, prose
from tiny import ROOT

from titan_lite.metrics.run_files import read_metrics

SHORT = (
    "--training.steps 4 --training.seq_len 64 --checkpoint.interval 2 --metrics.log_freq 1"
    " --validation.freq 4"
)
SHORT += " --validation.steps 1"
SHRUNK = (
    "--model.flavor debug --model.tokenizer_path assets/tokenizer/debug.model --data.dataset stdlib"
    " --compile.no-enable"
)
SMALLEST = (
    f"{SHORT} --training.steps 1 --training.local_batch_size 1 --training.global_batch_size 2"
)
ONE_STEP = f"{SHRUNK} {SMALLEST}"


@dataclass(frozen=True)
class Run:
    """told: a part of what it prints. added: after the command.

    instead: words of the command -> what stands for them here. quick: needs no run before it.
    slow: has that mark.
    """

    told: str
    added: str = ""
    instead: dict[str, str] = field(default_factory=dict)
    quick: bool = False
    slow: bool = False


PREPARE = "titan-lite prepare"
BOOKS = "prepared/books --data.dataset local --data.path 'books/*.jsonl'"
PLANNER = "python -m titan_lite plan"
RECIPE = {"RECIPE": "train_configs/debug_model.toml"}
PLANNED_8B, PLANNED_405B = (
    {f"train_configs/llama3_{size}.toml": RECIPE["RECIPE"]} for size in ("8b", "405b")
)
PLAN = "--hardware h100 --world-size 8 --training.global_batch_size=64"
HERE = {
    "scripts/test.sh": Run("pytest 9", "--version"),
    "scripts/test.sh tests/unit -n 0 --messages all.txt": Run(
        "tests collected", "--collect-only --quiet"
    ),
    "python scripts/plant_faults.py": Run("groups.py", "--list", quick=True),
    "scripts/test.sh --release": Run(
        "tests collected", "--collect-only --quiet tests/unit/test_sharding.py"
    ),
    "scripts/test.sh --all": Run(
        "tests collected", "--collect-only --quiet tests/integration/test_numbers.py"
    ),
    "./run_train.sh --job.dump_folder outputs/fast --optimizer.lr=3e-3": Run("done: step 4", SHORT),
    "./run_train.sh --compile.enable --job.dump_folder outputs/compiled --parallelism.fsdp_communication microbatch": Run(
        "57 all_gather -> 8", f"{SHORT} --training.steps 1 --compile.backend aot_eager"
    ),
    "NGPU=1 ./run_train.sh --model.dim 128 --model.n_layers 2 --model.hidden_dim 256 --training.seq_len 64 --training.local_batch_size 8 --training.steps 2000 --validation.freq 500 --optimizer.lr 3e-3 --optimizer.state_dtype bfloat16": Run(
        "done: step 1",
        f"{SMALLEST} --training.local_batch_size 2 --job.dump_folder outputs/rounded",
    ),
    "./run_train.sh --training.steps 1": Run(
        "done: step 1", f"{SHORT} --training.steps 1 --job.dump_folder outputs/one"
    ),
    "./run_train.sh --training.steps 1 --job.dump_folder outputs/first": Run(
        "done: step 1", f"{SHORT} --training.steps 1"
    ),
    "NGPU=4 ./run_train.sh": Run(
        "layout: 4 ranks", f"{SHORT} --training.steps 1 --job.dump_folder outputs/four"
    ),
    "./run_train.sh --print-config": Run(
        "steps = 100  # train_configs/debug_model.toml", quick=True
    ),
    "./run_train.sh --help": Run("--training.steps", quick=True),
    "./run_train.sh --help checkpoint": Run("--checkpoint.interval", quick=True),
    "torchrun --nproc-per-node 8 -m titan_lite.train train_configs/llama3_8b.toml": Run(
        "done: step 1",
        f"{ONE_STEP} --job.dump_folder outputs/torchrun",
        {"--nproc-per-node 8": "--nproc-per-node 2"},
    ),
    f"{PREPARE} train_configs/llama3_8b.toml {BOOKS}": Run(
        ": 200 documents, ",
        "--model.tokenizer_path assets/tokenizer/debug.model --workers 1",
    ),
    "CONFIG_FILE=train_configs/llama3_8b.toml ./run_train.sh --data.dataset prepared --data.path prepared/books": Run(
        "done: step 1",
        f"{ONE_STEP.replace('--data.dataset stdlib', '')} --job.dump_folder outputs/prepared",
    ),
    "./run_train.sh --data.dataset local --data.path 'books/*.jsonl' --validation.path validation.jsonl": Run(
        "validation: local", f"{SHORT} --training.steps 1 --job.dump_folder outputs/validated"
    ),
    f"{PREPARE} --verify prepared/books": Run("every byte is as written"),
    "python -m titan_lite convert outputs/debug_model exported": Run("exported"),
    "python -m titan_lite convert Llama-3.1-8B initial": Run("initial"),
    "python -m titan_lite convert outputs/debug_model theirs --to torchtitan": Run("theirs"),
    "python -m titan_lite average outputs/debug_model/checkpoint/step-* --output averaged": Run(
        "averaged"
    ),
    'python -m titan_lite generate Llama-3.1-8B --prompt "The quick brown fox"': Run(
        "The quick brown fox", "--max-new-tokens 5"
    ),
    f"{PLANNER} train_configs/mine.toml --world-size 8": Run(
        "step time", "--hardware h100 --training.seq_len 64"
    ),
    "CONFIG_FILE=train_configs/mine.toml ./run_train.sh --metrics.log_freq 1": Run(
        "Llama-3.1-8B, a Hugging Face folder",
        f"{SMALLEST} --compile.no-enable --job.dump_folder outputs/continued",
    ),
    "python -m titan_lite convert outputs/mine exported": Run(
        "exported", instead={" exported": " exported_mine"}
    ),
    'python -m titan_lite generate outputs/debug_model --prompt "def main("': Run(
        "def main(", "--max-new-tokens 5"
    ),
    f"{PLANNER} train_configs/llama3_405b.toml": Run(
        "bottleneck: waiting for other pipeline ranks"
    ),
    f"{PLANNER} train_configs/llama3_405b.toml --sweep activation_checkpoint.mode=selective,full --sweep parallelism.pipeline_parallel_schedule=Interleaved1F1B,InterleavedZeroBubble,ZBVZeroBubble,DualPipeV": Run(
        "pipeline_parallel_schedule=DualPipeV",
        f"{PLAN} --parallelism.pipeline_parallel_degree=2 --training.local_batch_size=4 --compile.enable",
        PLANNED_405B,
    ),
    f"{PLANNER} train_configs/llama3_8b.toml --sweep parallelism.tensor_parallel_degree=1,2,4,8": (
        Run("tensor_parallel_degree=2", PLAN, PLANNED_8B)
    ),
    f"{PLANNER} train_configs/llama3_8b.toml --sweep activation_checkpoint.mode=none,selective,full": Run(
        "activation_checkpoint.mode=full", PLAN, PLANNED_8B
    ),
    f"{PLANNER} train_configs/llama3_8b.toml --optimizer.name Muon": Run(
        "whole matrices at their owners", PLAN, PLANNED_8B
    ),
    f"{PLANNER} RECIPE": Run("step time", PLAN, RECIPE),
    f"{PLANNER} RECIPE --world-size 128 --hardware h200 --training.local_batch_size 1": Run(
        "128 H200", "--training.global_batch_size=128", RECIPE
    ),
    f"{PLANNER} RECIPE --sweep compile.bucketing=block,greedy": Run(
        "compile.bucketing=greedy", PLAN, RECIPE
    ),
    f"{PLANNER} RECIPE --sweep parallelism.tensor_parallel_degree=1,2,4,8": Run(
        "tensor_parallel_degree=2", PLAN, RECIPE
    ),
    f"{PLANNER} RECIPE --world-size 64 --search 2": Run(
        "best: --", "--hardware h100 --training.global_batch_size=64", RECIPE
    ),
    f"{PLANNER} RECIPE --trace plan.json": Run("step time", PLAN, RECIPE),
    f"{PLANNER} RECIPE --tokens 1T --price-per-gpu-hour 2.5": Run(
        "of the time counts", PLAN, RECIPE
    ),
    f"{PLANNER} RECIPE --json": Run('"tokens_per_second', PLAN, RECIPE),
    f"{PLANNER} RECIPE --compare outputs/llama3_8b": Run(
        "planned / measured", "--training.seq_len 64", RECIPE
    ),
    "python -m titan_lite verify train_configs/llama3_405b.toml": Run("equal to one process"),
    "titan-lite verify llama3_405b": Run("equal to one process"),
    "CONFIG_FILE=train_configs/qwen3_moe_debug.toml ./run_train.sh": Run(
        "done: step 1", f"{SMALLEST} --job.dump_folder outputs/experts"
    ),
    "python -m titan_lite verify train_configs/qwen3_moe_debug.toml --processes --layouts tp=2 dp_shard=2,ep=2": Run(
        "agrees", "--steps 1"
    ),
    "python -m titan_lite plan train_configs/qwen3_30b_a3b.toml": Run("of 80 on the device"),
    "python -m titan_lite report outputs/debug_model": Run("report.html"),
    "python -m titan_lite report outputs/a outputs/b --output compare.html": Run("compare.html"),
    "MAX_RESTARTS=5 ./run_train.sh": Run(
        "done: step 1", f"{SHORT} --training.steps 1 --job.dump_folder outputs/restarts"
    ),
    "NCOPIES=2 ./run_train.sh": Run(
        "[group 0] done: step 1",
        f"{SHORT} --training.steps 1 --job.dump_folder outputs/groups",
    ),
    "python scripts/benchmark_faults.py": Run(
        "productive steps", "--minutes 0.2 --every 6 -- --training.seq_len=64"
    ),
    "python scripts/write_docs.py": Run("", quick=True, slow=True),
    "scripts/test_versions.sh 2.11.0 2.14.1": Run("torch 2.14.1: passed", "-- --version"),
    "python scripts/gpu_day.py --device cpu": Run("| debug | FSDP2 loop, compiled |"),
    "python scripts/benchmark_resume.py --megabytes 20 --rounds 1": Run(
        "parquet", "--megabytes 2 --rounds 1"
    ),
    "python scripts/benchmark_data.py --cpu --rounds 3 --characters 3000000 --tokens 8000000": Run(
        "Loader, local jsonl",
        "--characters 100000 --tokens 400000 --rounds 1 --seq-len 64 --mean-document 100",
    ),
    "python scripts/benchmark_experts.py --torchtitan PYTHON": Run(
        "| titan_lite | eager | 2 |",
        "--modes eager --rounds 1 --steps 2",
        {" --torchtitan PYTHON": ""},
    ),
    "python scripts/benchmark_checkpoint.py --saves 3": Run("async", "--flavor debug --saves 1"),
    "python scripts/benchmark_compile.py --blocks 6 32 --torchtitan PYTHON": Run(
        "| 1 | titan_lite | aot_eager |",
        "--blocks 1 --backends aot_eager --steps 2",
        {" --torchtitan PYTHON": ""},
    ),
    "python scripts/benchmark_fsdp.py --models debug": Run(
        "simple-eager-keep", "--rounds 1 --steps 1 --variants fsdp2-eager simple-eager-keep"
    ),
    "python scripts/compare_measured.py": Run("FSDP 4", "--layouts 'FSDP 4' --rounds 1 --steps 1"),
    "python scripts/compare_precision.py --whole --steps 600": Run(
        "| bfloat16 |", "--steps 2 --seeds 1 --ways bfloat16"
    ),
    "python scripts/compare_optimizers.py --whole": Run(
        "| AdamW | 0.001 | 4 |", "--steps 4 --seeds 1 --names AdamW --rates 1e-3"
    ),
    "python scripts/compare_optimizers.py --updates": Run("torch.optim.Muon", "--rounds 1"),
    "python scripts/compare_optimizers.py --whole --powersgd 8": Run(
        "loss with PowerSGD against none", "--steps 3 --seeds 1"
    ),
    "python scripts/compare_evaluation.py exported": Run(
        "| 4 loglikelihood |", "--documents 1 --turns 1", {"exported": "Llama-3.1-8B"}
    ),
    "python scripts/compare_published.py --write": Run(
        "TorchTitan paper: 8B on 8, eager", "--rows '8B on 8, eager'", {" --write": ""}
    ),
    "tensorboard --logdir outputs": Run("loss", "--inspect"),
    "titan-lite train debug_model --training.steps 20": Run(
        "done: step 1", f"{SHORT} --training.steps 1 --job.dump_folder outputs/installed"
    ),
    "titan-lite plan llama3_405b": Run("step time", PLAN, {"llama3_405b": "debug_model"}),
    "python -m titan_lite --help": Run("recipes: debug_model", quick=True),
}
FIRST = "./run_train.sh"  # the fixture
# What needs a cluster, the hub, or nothing but a package index; the tests that have these.
ELSEWHERE = {
    "./run_train.sh --evaluation.tasks hellaswag,arc_easy --evaluation.freq 1000 --evaluation.limit 200": (
        "test_training_is_the_same_with_and_without_evaluation_and_a_stop_in_one_repeats_it"
    ),
    **dict.fromkeys(
        (
            "python -m titan_lite evaluate outputs/debug_model --tasks hellaswag arc_easy --limit 200",
            "torchrun --nproc-per-node 8 -m titan_lite evaluate Llama-3.1-8B --tasks hellaswag --tp 2",
        ),
        "test_the_tool_scores_a_checkpoint_as_its_run_did_on_any_number_of_processes",
    ),
    "sbatch --nodes 2 --gpus-per-node 8 --exclusive --mem 0 --time 24:00:00 scripts/train.slurm train_configs/llama3_8b.toml": (
        "test_two_nodes_train_to_the_end_and_a_signal_requeues_the_job_which_goes_on_exactly"
    ),
    "tail -F slurm-JOB/0-*.log": (
        "test_two_nodes_train_to_the_end_and_a_signal_requeues_the_job_which_goes_on_exactly"
    ),
    "NNODES=2 RDZV_ENDPOINT=node0:29500 ./run_train.sh": (
        "test_with_restarts_both_meet_again_when_the_cable_is_mended"
    ),
    **dict.fromkeys(
        (
            "python -m titan_lite.lighthouse --port 29510",
            "NCOPIES=2 COPY=0 ./run_train.sh --fault_tolerance.lighthouse http://node0:29510",
            "NCOPIES=2 COPY=1 ./run_train.sh --fault_tolerance.lighthouse http://node0:29510",
        ),
        "test_groups_that_are_started_one_by_one_meet_at_a_lighthouse",
    ),
    "torchrun --nproc-per-node 2 -m titan_lite.train train_configs/debug_model.toml": (
        "test_a_launcher_that_is_killed_takes_the_ranks_along_which_save"
    ),
    **dict.fromkeys(
        (
            f"{PREPARE} train_configs/my_run.toml {BOOKS}",
            "titan-lite plan train_configs/my_run.toml --hardware h100",
            "titan-lite verify train_configs/my_run.toml",
            "CONFIG_FILE=train_configs/my_run.toml ./run_train.sh",
            "titan-lite report outputs/my_run",
            "CONFIG_FILE=train_configs/my_run.toml ./run_train.sh --training.steps 4000 --parallelism.tensor_parallel_degree 2",
            "titan-lite convert outputs/my_run exported",
        ),
        "test_its_commands_train_resume_and_export",
    ),
    "sbatch --nodes 2 --gpus-per-node 8 --exclusive --mem 0 --time 24:00:00 scripts/train.slurm train_configs/my_run.toml": (
        "test_two_nodes_train_to_the_end_and_a_signal_requeues_the_job_which_goes_on_exactly"
    ),
    "torchrun --nproc-per-node 2 my_run.py train_configs/debug_model.toml": (
        "test_a_hook_of_ones_own_writes_a_metric_on_any_layout"
    ),
    "python scripts/compare_layouts.py": "test_layouts_have_one_curve_which_is_drawn",
    "CONFIG_FILE=train_configs/my_run.toml ./run_train.sh --job.dump_folder outputs/cooldown --checkpoint.branch_from outputs/my_run/checkpoint/step-8000 --training.steps 10000 --lr_scheduler.decay_length 2000": "test_a_branch_with_nothing_changed_is_the_run_to_the_bit_and_a_cooldown_is_another",
    "titan-lite verify RECIPE --world-size N": "test_the_first_wrong_line_of_a_family_is_named",
}


def commands():
    """Lines of blocks and inline code that begin as a command does, once each."""
    programs = (
        r"\./run_train\.sh|scripts/\w+\.sh|titan-lite |python |torchrun |sbatch |tail |tensorboard "
    )
    begins = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{programs})")
    texts = PAGES.values()
    lines = [
        line.removeprefix("$ ")
        for text in texts
        for block in blocks(text)
        for line in block.splitlines()
    ]
    lines += [code for text in texts for code in re.findall(r"`([^`\n]+)`", prose(text))]
    found = [re.sub(r"\s+# .*", "", line).strip() for line in lines if begins.match(line)]
    return list(dict.fromkeys(found))


def test_every_command_of_the_pages_is_run_here_or_by_the_test_that_is_named():
    assert sorted({FIRST, *HERE, *ELSEWHERE}) == sorted(commands())
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    assert all(f"def {test}(" in sources for test in ELSEWHERE.values())


def typed(folder, command):
    """As typed in a shell whose Python has what is needed, and which finds this checkout's package
    there.
    """
    path = f"{folder}/.bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = run(
        "bash",
        "-c",
        command,
        cwd=folder,
        seconds=1800,
        PATH=path,
        PYTHONPATH=folder,
        PYTHONSAFEPATH=None,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of this checkout, beside which the commands' own input lies; its other versions of
    torch are this one.
    """
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("titan_lite", "train_configs", "scripts", "assets", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("run_train.sh", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for version in ("2.11.0", "2.14.1"):
        python = folder / ".versions" / version / "bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        (folder / ".versions" / version / "complete").touch()
    installed = folder / ".bin/titan-lite"  # tests/integration/test_wheel.py has the real one
    installed.parent.mkdir()
    installed.write_text('#!/bin/sh\nexec python -m titan_lite "$@"\n')
    installed.chmod(0o755)
    (folder / "books").mkdir()
    lines = [
        json.dumps({"text": f"Chapter {number}. It was the best of times. " * 9})
        for number in range(200)
    ]
    (folder / "books/one.jsonl").write_text("\n".join(lines))
    (folder / "validation.jsonl").write_text(lines[0].upper().replace("TEXT", "text", 1))
    return folder


@pytest.fixture(scope="module")
def trained(checkout):
    """After the first command of README.md; with the other folders that its commands name."""
    assert "done: step 4" in typed(checkout, f"{FIRST} {SHORT}")
    outputs = checkout / "outputs"
    assert len(read_metrics(outputs / "debug_model/metrics.jsonl")) >= 4
    for name in ("a", "b", "llama3_8b", "mine"):
        shutil.copytree(outputs / "debug_model", outputs / name)
    typed(checkout, "python -m titan_lite convert outputs/debug_model Llama-3.1-8B")
    (block,) = (part for part in blocks(ALL, "toml") if "Llama-3.1-8B" in part)
    (checkout / "train_configs/mine.toml").write_text(f'extends = "llama3_8b.toml"\n{block}')
    typed(checkout, f"{PREPARE} train_configs/debug_model.toml {BOOKS}")
    return checkout


def mark_of(here):
    if not here.quick:
        return pytest.mark.release
    return pytest.mark.slow if here.slow else ()


@pytest.mark.parametrize(
    "command", [pytest.param(c, id=c, marks=mark_of(here)) for c, here in HERE.items()]
)
def test_a_command_of_the_pages_does_what_it_says(command, checkout, request):
    wanted = HERE[command]
    if not wanted.quick:
        request.getfixturevalue("trained")
    if command.startswith(f"{PREPARE} train_configs"):
        shutil.rmtree(checkout / "prepared")
    words = command
    for written, here in wanted.instead.items():
        assert written in words
        words = words.replace(written, here)
    assert wanted.told in typed(checkout, f"{words} {wanted.added}")
