"""Check and measure what needs a GPU, and print Markdown tables, each row as soon as it is known.

    python scripts/gpu_day.py                 # on the first GPU
    python scripts/gpu_day.py --only checks   # or: --only speed
    python scripts/gpu_day.py --device cpu    # the debug model, shrunk: shows that this script runs

A turn of the speeds took eight minutes on an H200 with nothing compiled before.

First correctness, side by side: the tests marked `gpu`; ten steps of the debug models, dense and a
MoE model, against the CPU, in float32 and in bfloat16; compiled against eager; float8 against
bfloat16; each optimizer against the CPU; a run that is killed and resumed. Then speed and memory
of 1B, of 8B and of an MoE model with as many blocks as fit, in turn: eager, compiled, and a plain
FSDP2 loop of the same model, batch and precision, beside the prediction of `plan`. Exit code 1: a
check failed. No network is needed: the text is the running Python's, the tokenizer the debug
model's.
"""

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from titan_lite.metrics.run_files import read_metrics

ROOT = Path(__file__).resolve().parent.parent
DENSE, MOE = "debug_model", "qwen3_moe_debug"
STEPS = 10
BFLOAT16 = "--training.mixed_precision_param=bfloat16"
SMALL = ["--training.seq_len=64"]  # on a CPU, where the figures mean nothing
OFFLINE = [
    "--data.dataset=stdlib",
    f"--model.tokenizer_path={ROOT}/assets/tokenizer/debug.model",
    "--validation.no-enable",
]
OFFLINE += ["--metrics.log_freq=1", "--metrics.no-enable_tensorboard", "--checkpoint.interval=1000"]
BLOCKS_OF_8B = 8  # with which weights, gradients and AdamW's state take 41 GiB
BLOCKS_OF_30B = 3  # of the MoE model, likewise
SIDE_BY_SIDE = max(1, (os.cpu_count() or 1) // 2)  # checks, which run on one thread each


def command(*words: str, device: str) -> dict[str, Any]:
    """The arguments for a process on the device."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "NGPU": "1",
        "LOG_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return {
        "args": words,
        "env": environment,
        "cwd": ROOT,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }


def run(*words: str, device: str) -> str:
    """The output of a command. Raises RuntimeError with its last lines where it fails."""
    done = subprocess.run(**command(*words, device=device))
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(words)}: exit code {done.returncode}: "
            + " | ".join(done.stdout.splitlines()[-3:])
        )
    return done.stdout


def training(recipe: str, folder: Path, *options: str) -> list[str]:
    start = ["env", f"CONFIG_FILE=train_configs/{recipe}.toml", "./run_train.sh"]
    return [*start, f"--job.dump_folder={folder}", *OFFLINE, *options]


def losses(folder: Path, device: str, *options: str, recipe: str = DENSE) -> list[float]:
    run(*training(recipe, folder, f"--training.steps={STEPS}", *options), device=device)
    return [read_metrics(folder / "metrics.jsonl")[step]["loss"] for step in range(1, STEPS + 1)]


def furthest(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))


# Correctness


def test_suite(folder: Path, device: str) -> tuple[bool, str]:
    done = subprocess.run(
        **command(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/unit", device=device)
    )
    closing = done.stdout.strip().splitlines()[-1].strip("= ")
    return done.returncode == 0, closing


def against_the_cpu(recipe: str, folder: Path, device: str) -> tuple[bool, str]:
    folder /= recipe
    expected = losses(folder / "cpu", "cpu", recipe=recipe)
    exact = furthest(losses(folder / "float32", device, recipe=recipe), expected)
    half = furthest(losses(folder / "bfloat16", device, BFLOAT16, recipe=recipe), expected)
    return (
        exact < 1e-4 and half < 2e-2,
        f"float32 within {exact:.1e} (1e-4 allowed), bfloat16 within {half:.1e} (2e-2)",
    )


def compiled_against_eager(recipe: str, folder: Path, device: str) -> tuple[bool, str]:
    folder /= f"compiled-{recipe}"
    parts = []
    good = True
    for precision, options, allowed in (("float32", [], 1e-4), ("bfloat16", [BFLOAT16], 1e-2)):
        eager = losses(folder / f"{precision}-eager", device, *options, recipe=recipe)
        words = ["--compile.enable", *options]
        found = furthest(losses(folder / precision, device, *words, recipe=recipe), eager)
        good &= found < allowed
        parts.append(f"{precision} within {found:.1e} ({allowed:.0e} allowed)")
    return good, ", ".join(parts)


def float8_against_bfloat16(folder: Path, device: str) -> tuple[bool, str]:
    expected = losses(folder / "float8-none", device, BFLOAT16)
    parts = []
    good = True
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        words = [BFLOAT16, "--float8.enable", f"--float8.recipe={recipe}"]
        found = furthest(losses(folder / f"float8-{recipe}", device, *words), expected)
        good &= found < 2e-2
        parts.append(f"{recipe} within {found:.1e}")
    return good, ", ".join(parts) + " (2e-2 allowed)"


def optimizers_against_the_cpu(folder: Path, device: str) -> tuple[bool, str]:
    parts = []
    good = True
    changes = {"Muon": ["--optimizer.ns_dtype=float32"], "Shampoo": [], "Lion": []}
    for name, options in changes.items():
        words = [f"--optimizer.name={name}", "--optimizer.lr=0.0005", *options]
        expected = losses(folder / f"{name}-cpu", "cpu", *words)
        found = furthest(losses(folder / name, device, *words), expected)
        good &= found < 1e-3
        parts.append(f"{name} within {found:.1e}")
    return good, ", ".join(parts) + " (1e-3 allowed)"


def rank_of(launcher: int) -> int:
    """Return the process of the one rank that a launcher has started. Linux alone lists them."""
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"titan_lite.train" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise RuntimeError(f"the launcher {launcher} has no rank")


def killed_and_resumed(folder: Path, device: str) -> tuple[bool, str]:
    options = ["--checkpoint.interval=5", "--debug.deterministic"]
    expected = losses(folder / "uninterrupted", device, *options)
    words = training(DENSE, folder / "killed", f"--training.steps={STEPS}", *options)
    with subprocess.Popen(
        **{**command(*words, device=device), "stdout": subprocess.DEVNULL}
    ) as process:
        was_killed = False
        while process.poll() is None:  # until it has done a step after a save
            if (folder / "killed/metrics.jsonl").exists() and max(
                read_metrics(folder / "killed/metrics.jsonl"), default=0
            ) > 6:
                os.kill(rank_of(process.pid), signal.SIGKILL)
                process.wait()
                was_killed = True
            time.sleep(0.01)
    if not was_killed:
        raise RuntimeError("the run ended before it was killed")
    found = losses(folder / "killed", device, *options)
    if found != expected:
        return False, f"{found} instead of {expected}"
    return True, "all losses equal to the bit"


CHECKS = {
    "tests marked `gpu`": test_suite,
    "ten losses against the CPU's": partial(against_the_cpu, DENSE),
    "those of an MoE model": partial(against_the_cpu, MOE),
    "compiled against eager": partial(compiled_against_eager, DENSE),
    "an MoE model, compiled against eager": partial(compiled_against_eager, MOE),
    "float8 against bfloat16": float8_against_bfloat16,
    "optimizers against the CPU": optimizers_against_the_cpu,
    "killed and resumed against uninterrupted": killed_and_resumed,
}


# Speed


def speed(recipe: str, folder: Path, device: str, *options: str) -> dict[str, float]:
    """Median tokens a second, MFU in percent, peak GiB of a run of 12 steps, without the first
    four.
    """
    run(
        *training(recipe, folder, "--training.steps=12", "--checkpoint.no-enable", *options),
        device=device,
    )
    late = [values for step, values in read_metrics(folder / "metrics.jsonl").items() if step > 4]
    names = {"tokens_per_second": "tps", "mfu": "mfu", "memory": "memory_gib"}
    return {
        name: statistics.median(values[key] for values in late)
        for name, key in names.items()
        if key in late[0]
    }


def fsdp2(recipe: str, options: Sequence[str], compiles: bool) -> dict[str, float]:
    """The same model, batch and precision in a plain loop with FSDP2 and fused AdamW, on random
    tokens, in this process.
    """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from titan_lite.config import load_config
    from titan_lite.distributed.device import init_device
    from titan_lite.distributed.layout import Layout
    from titan_lite.dtensor import shard_of
    from titan_lite.models.transformer import Transformer

    config = load_config(f"train_configs/{recipe}.toml", [*OFFLINE, *options])
    layout = Layout.from_config(config, 1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    device = init_device(config.debug)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    with torch.device("meta"):
        model = Transformer(layout.model)
    precision = MixedPrecisionPolicy(
        getattr(torch, config.training.mixed_precision_param), torch.float32
    )
    for block in model.layers.values():
        if compiles:
            block.compile()
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    model.to_empty(device=device)
    model.init_weights(0, shard_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = layout.local_batch_size, layout.seq_len + 1
    seconds = []
    for _ in range(12):
        started = time.perf_counter()
        for _ in range(layout.accumulation):
            tokens = torch.randint(layout.model.vocab_size, shape, device=device)
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {"tokens_per_second": layout.tokens / statistics.median(seconds[4:]), "memory": memory}


def planned(recipe: str, options: Sequence[str], device: str) -> dict[str, float]:
    """The prediction of `plan` for one GPU of this kind; nothing where its prices are not known."""
    if device == "cpu":
        return {}
    name = run(
        sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())", device=device
    )
    hardware = next((known for known in ("h200", "h100", "a100") if known in name.casefold()), "")
    if not hardware:
        return {}
    words = [
        f"train_configs/{recipe}.toml",
        "--world-size",
        "1",
        "--hardware",
        hardware,
        "--json",
        *options,
    ]
    plan = json.loads(run(sys.executable, "-m", "titan_lite", "plan", *words, device=device))
    memory = plan["memory"]["peak"] / 2**30
    return {
        "tokens_per_second": plan["tokens_per_second"]["stated"],
        "mfu": 100 * plan["mfu"]["stated"],
        "memory": memory,
    }


def in_plain_loop(
    recipe: str, options: Sequence[str], variant: str, device: str
) -> dict[str, float]:
    """`fsdp2` in a process of its own."""
    words = [__file__, "--fsdp2", variant, "--device", device, recipe, *options]
    return json.loads(run(sys.executable, *words, device=device).strip().splitlines()[-1])


def measure(name: str, recipe: str, options: Sequence[str], folder: Path, device: str) -> bool:
    """Print a row for each variant, as soon as it ended. Return whether all of them ran."""
    good = True
    base = 0.0
    for variant in ("eager", "compiled"):
        words = [*options, "--compile.enable" if variant == "compiled" else "--compile.no-enable"]
        measurements: dict[str, Callable[[], dict[str, float]]] = {
            f"FSDP2 loop, {variant}": partial(in_plain_loop, recipe, options, variant, device),
            variant: partial(
                speed, recipe, folder / f"{name}-{variant}".replace(" ", "-"), device, *words
            ),
            f"planned, {variant}": partial(planned, recipe, words, device),
        }
        for label, find in measurements.items():
            try:
                values = find()
            except RuntimeError as error:
                good = False
                print(f"| {name} | {label} | FAILED: {error} | | | |", flush=True)
                continue
            if not values:
                continue
            tokens = values["tokens_per_second"]
            base = base or tokens
            mfu = f"{values['mfu']:.1f}%" if values.get("mfu") else "-"
            memory = f"{values['memory']:.2f}" if values["memory"] else "-"
            row = f"| {name} | {label} | {tokens:,.0f} | {tokens / base:.2f} | {mfu} | {memory} |"
            print(row, flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=("checks", "speed"))
    parser.add_argument("--rounds", type=int, default=1, help="turns of each variant (1)")
    parser.add_argument(
        "--fsdp2", choices=("eager", "compiled"), help=argparse.SUPPRESS
    )  # one row, in a process of its own
    parser.add_argument("recipe", nargs="?", help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args()
    if options.device == "cpu":
        OFFLINE.extend(SMALL)
    if options.fsdp2:
        print(json.dumps(fsdp2(options.recipe, overrides, options.fsdp2 == "compiled")))
        return 0
    if overrides or options.recipe:
        parser.error(f"unknown arguments: {options.recipe or ''} {' '.join(overrides)}")
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; use --device cpu")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(
        f"{datetime.date.today()}, {name}, torch {torch.__version__}: `python"
        f" {' '.join(map(str, sys.argv))}`\n",
        flush=True,
    )
    one = ["--training.local_batch_size=1", "--training.global_batch_size=1"]
    models: dict[str, tuple[str, list[str]]] = {
        "debug": (DENSE, ["--training.global_batch_size=2"])
    }
    if options.device == "cuda":
        models = {
            "1B": ("llama3_1b", one),
            f"8B, {BLOCKS_OF_8B} blocks": ("llama3_8b", [*one, f"--model.n_layers={BLOCKS_OF_8B}"]),
            f"30B-A3B, {BLOCKS_OF_30B} blocks": (
                "qwen3_30b_a3b",
                [*one, f"--model.n_layers={BLOCKS_OF_30B}"],
            ),
        }
    with tempfile.TemporaryDirectory() as folder:
        good = options.only == "speed" or checked(Path(folder), options.device)
        if options.only != "checks":
            good &= measured(models, options.rounds, Path(folder), options.device)
    return 0 if good else 1


def checked(folder: Path, device: str) -> bool:
    """Print a table of CHECKS, which run side by side where there are cores for it."""

    def row(check: str) -> tuple[bool, str]:
        started = time.perf_counter()
        try:
            passed, words = CHECKS[check](folder, device)
        except RuntimeError as error:
            passed, words = False, str(error)
        words = f"{'passed' if passed else 'FAILED'}: {words}"
        return passed, f"| {check} | {words} | {time.perf_counter() - started:.0f} |"

    print("| check | result | s |\n|---|---|--:|")
    good = True
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        for done in as_completed([threads.submit(row, check) for check in CHECKS]):
            passed, line = done.result()
            good &= passed
            print(line, flush=True)
    return good


def measured(
    models: dict[str, tuple[str, list[str]]], rounds: int, folder: Path, device: str
) -> bool:
    """Print a table of the models' speeds, and as many rows of a variant as there are rounds."""
    print(
        "\n| model | variant | tokens/s | / FSDP2 eager | MFU | peak GiB"
        " |\n|---|---|--:|--:|--:|--:|"
    )
    good = True
    for turn in range(rounds):
        for model, (recipe, changes) in models.items():
            good &= measure(model, recipe, changes, folder / f"turn-{turn}", device)
    return good


if __name__ == "__main__":
    sys.exit(main())
