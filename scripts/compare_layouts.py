"""Train one small model on six layouts, and draw their losses: six curves that are one.

    python scripts/compare_layouts.py                 # writes assets/same_loss.png
    python scripts/compare_layouts.py --steps 4 --layouts "one process" "CP 2" --output small.png

Every layout trains the debug recipe, made smaller, with the same global batch in float32, on
processes of this machine. The last one changes its layout in the middle: it resumes its checkpoint
on another one. Losses are read from each run's metrics.jsonl. The picture has the curves, their
relative difference from one process, and the largest difference of all.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

try:
    import matplotlib
except ImportError:
    sys.exit("error: this script needs matplotlib; use pip install matplotlib")

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from titan_lite.metrics.run_files import read_metrics

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "train_configs/debug_model.toml"
SMALL = """\
model.n_layers=4 model.dim=64 model.hidden_dim=128 training.seq_len=64 optimizer.lr=1e-2
metrics.log_freq=1 metrics.no-enable_tensorboard validation.no-enable
"""


class Part(NamedTuple):
    """A part of a run. options: those of [parallelism], and others with their section."""

    ranks: int
    options: str = ""


FSDP = Part(2)
TP = Part(2, "tensor_parallel_degree=2")
HSDP_TP = Part(8, "data_parallel_replicate_degree=2 tensor_parallel_degree=2")
PP = Part(
    2,
    "pipeline_parallel_degree=2 pipeline_parallel_schedule=ZBVZeroBubble"
    " training.local_batch_size=4",
)
CP = Part(2, "context_parallel_degree=2")
REFERENCE = "one process"
LAYOUTS = {
    REFERENCE: (Part(1),),
    "FSDP 2": (FSDP,),
    "HSDP 2 x 2, TP 2": (HSDP_TP,),
    "PP 2, ZBVZeroBubble": (PP,),
    "CP 2": (CP,),
    "FSDP 2, resumed as TP 2": (FSDP, TP),  # each for an equal part of the steps
}


def losses(parts: tuple[Part, ...], steps: int, folder: Path) -> list[float]:
    """Train `steps` steps into `folder`, and return the loss of each."""
    for number, part in enumerate(parts, start=1):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(part.ranks), "-m", "titan_lite.train", str(RECIPE)]
        command += [f"--{option}" for option in SMALL.split()]
        command += [
            f"--{option}" if option.startswith("training.") else f"--parallelism.{option}"
            for option in part.options.split()
        ]
        command += [f"--job.dump_folder={folder}", f"--lr_scheduler.decay_begin={steps // 2}"]
        command += [f"--lr_scheduler.decay_length={steps - steps // 2}"]
        command += [f"--lr_scheduler.warmup_steps={steps // 4}"]
        command += [f"--training.steps={steps * number // len(parts)}"]
        command += [] if len(parts) > 1 else ["--checkpoint.no-enable"]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "PYTHONSAFEPATH": "1",
            "OMP_WAIT_POLICY": "passive",  # threads of several processes share the cores
        }
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ended.returncode != 0:
            output = (ended.stdout + ended.stderr)[-3000:]
            sys.exit(f"{part}: exit code {ended.returncode}\n{output}")
    found = read_metrics(folder / "metrics.jsonl")
    return [found[step]["loss"] for step in range(1, steps + 1)]


def differences(curve: list[float], reference: list[float]) -> list[float]:
    """Return the relative difference of each loss from that of one process."""
    return [abs(loss - one) / one for loss, one in zip(curve, reference, strict=True)]


def draw(curves: dict[str, list[float]], output: Path) -> float:
    """Draw the curves and their differences, and return the largest difference."""
    reference = curves[REFERENCE]
    largest = max(max(differences(curve, reference)) for curve in curves.values())
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 4.6), height_ratios=(3, 2), layout="constrained"
    )
    steps = range(1, len(reference) + 1)
    for number, (name, curve) in enumerate(curves.items()):
        # The first line is the widest one, so that those on it can be seen.
        width = 1.2 * (len(curves) - number)
        above.plot(steps, curve, linewidth=width, label=name, color=f"C{number}")
        if name != REFERENCE:
            # A difference of 0 has no place on this axis.
            shown = [value or float("nan") for value in differences(curve, reference)]
            below.plot(steps, shown, ".", markersize=4, color=f"C{number}")
    above.set_ylabel("loss")
    above.legend(fontsize="small", frameon=False)
    above.set_title(
        f"One recipe on {len(curves)} layouts: relative difference at most {largest:.1e}"
    )
    below.set_yscale("log")
    below.set_ylabel("relative difference\nfrom one process", fontsize="small")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=100)
    plt.close(figure)
    return largest


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="an even number")
    parser.add_argument("--layouts", choices=LAYOUTS, nargs="+", default=list(LAYOUTS))
    parser.add_argument("--output", type=Path, default=ROOT / "assets/same_loss.png")
    options = parser.parse_args()
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in dict.fromkeys((REFERENCE, *options.layouts)):
            curves[name] = losses(LAYOUTS[name], options.steps, Path(folder, name))
            difference = max(differences(curves[name], curves[REFERENCE]))
            print(
                f"{name}: last loss {curves[name][-1]:.4f}, differs by {difference:.1e}", flush=True
            )
    largest = draw(curves, options.output)
    print(f"{options.output}: {len(curves)} layouts, relative difference at most {largest:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
