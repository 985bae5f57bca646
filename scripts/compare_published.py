"""Plan every published run that says its layout, and compare.

    python scripts/compare_published.py                  # all; four minutes on two cores
    python scripts/compare_published.py --rows 8B        # those whose name has this in it
    python scripts/compare_published.py --new            # those that have no plan yet
    python scripts/compare_published.py --write          # and keep plans and figures

scripts/published.toml has the runs' settings and figures, and titan_lite/tools/plan/published.csv
their plans, which every plan looks at. Printed are a table of both, before and now, and what has
changed. `python scripts/write_docs.py` makes the tables of docs/benchmarks.md from the same file.

No constant of the planner is fitted to a speed here. A machine is its datasheet; efficiencies are
those of cost/profiles.py for all runs. torchtitan's runs are planned with its model: keys and
values for every query head, complex rotary embeddings, and in 2024 an RMSNorm of several operators,
torch's loss_parallel, and pipelines that keep outputs.
"""

import argparse
import csv
import dataclasses
import functools
import multiprocessing as mp
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from titan_lite.collectives import Axis, all_reduce
from titan_lite.config import load_config
from titan_lite.config.load import option, read_toml
from titan_lite.cost.machine import GIB, Machine
from titan_lite.cost.profiles import PROFILES, machine_from
from titan_lite.graph import is_fused_away
from titan_lite.models import llama3, qwen3
from titan_lite.models.loss import VocabularyShard, cross_entropy
from titan_lite.models.shapes import block_weights, flops_per_token
from titan_lite.models.transformer import RMSNorm
from titan_lite.tools.plan.command import lay_out
from titan_lite.tools.plan.memory import Replay
from titan_lite.tools.plan.plan import Plan, make_plan
from titan_lite.tools.plan.published import FILE, PublishedRun, kind_of_run, published_runs
from titan_lite.tools.plan.tape import ScheduledGraph, last_uses
from titan_lite.tools.plan.trace import PROCESSES, start_fake_world

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "scripts/published.toml"
CHANGED = 0.005  # least change of a plan that is printed, relative


@dataclass(frozen=True)
class Run:
    """The settings and figures of a published run; scripts/published.toml has their meaning."""

    name: str
    recipe: str
    ranks: int
    machine: Machine
    role: str
    model: str
    options: tuple[str, ...]  # of the recipe
    tokens_per_second: float = 0.0
    tflops: float = 0.0
    gib: float = 0.0
    async_tp: bool = False
    fsdp2: bool = False
    unknown: str = ""


def read_runs() -> list[Run]:
    """Return the runs of scripts/published.toml. Raises TypeError for a field that Run lacks."""
    file = read_toml(SETTINGS)
    machines = dict(PROFILES)
    for name, fields in file["machines"].items():
        machines[name] = machine_from(fields, name)
    runs = []
    for source in file["sources"]:
        of_source = {
            field: source[field]
            for field in ("role", "model", "fsdp2", "unknown")
            if field in source
        }
        for settings in source["runs"]:
            keys = {}
            for tables in (file["keys"], source.get("keys", {}), settings.pop("keys", {})):
                keys |= flat(tables)
            run = {**of_source, **settings}
            run["name"] = f"{source['name']}: {settings['name']}"
            run["machine"] = machines[source["machine"]]
            options = tuple(option(key, text_of(value)) for key, value in keys.items())
            runs.append(Run(**run, options=options))
    return runs


def flat(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of a recipe's tables by "section.key"."""
    return {
        f"{section}.{key}": value
        for section, table in tables.items()
        for key, value in table.items()
    }


def text_of(value: Any) -> str:
    """Return a value of TOML as a command line has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list) else str(value)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
    heads = q.shape[2]
    k, v = (
        x[:, :, :, None].expand(-1, -1, -1, heads // x.shape[2], -1).flatten(2, 3) for x in (k, v)
    )
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(-2).type_as(x)


def normalize(self: RMSNorm, x: Tensor) -> Tensor:
    in_float32 = x.float()
    mean_square = in_float32.pow(2).mean(-1, keepdim=True)
    return (in_float32 * torch.rsqrt(mean_square + self.eps)).type_as(x) * self.weight


class LossParallel(torch.autograd.Function):
    """The operators of torch 2.6's `loss_parallel` (torch/distributed/tensor/parallel/loss.py),
    which are not fused.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: str) -> Tensor:
        shifted = logits.float()
        shifted = shifted - all_reduce(shifted.amax(-1, keepdim=True), "max", group)
        result = shifted - all_reduce(shifted.exp().sum(-1, keepdim=True), "sum", group).log()
        own = labels - first
        inside = (own >= 0) & (own < logits.shape[-1])
        own = own.where(inside, 0).unsqueeze(-1)
        ctx.save_for_backward(result, own, inside)
        ctx.dtype = logits.dtype
        return -all_reduce(result.gather(-1, own).squeeze(-1) * inside, "sum", group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        result, own, inside = ctx.saved_tensors
        ones = torch.zeros_like(result).scatter(-1, own, -inside.unsqueeze(-1).float())
        return ((ones + result.exp()) * gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None


def loss_parallel(logits: Tensor, labels: Tensor, vocabulary: VocabularyShard) -> Tensor:
    if vocabulary.axis.degree == 1:
        return cross_entropy(logits, labels)
    first = vocabulary.entries.start
    losses = LossParallel.apply(
        logits.flatten(0, 1), labels.flatten(), first, vocabulary.axis.group
    )
    return losses.view(labels.shape).sum(1)


def is_of_loss(node: Node, logits: torch.Size) -> bool:
    """Return True for a tensor of the shape of a rank's logits."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.shape == logits


def is_never_stored(node: Node, logits: torch.Size) -> bool:
    """Return True if the compiler of 2024 fused a result away: it did not see the loss."""
    return is_fused_away(node) and not is_of_loss(node, logits)


def uses_with_loss_parallel(scheduled: ScheduledGraph, logits: torch.Size) -> dict[Node, int]:
    """Return the same as last_uses, but loss_parallel keeps its result until backward is done, the
    first part of which a compiler moves into forward.
    """
    uses = last_uses(scheduled)
    stored = [node for node in uses if is_of_loss(node, logits)]
    results = [node for node in stored if node.target == torch.ops.aten.sub.Tensor]
    if results:
        uses[results[-1]] = max(uses[results[-1]], uses[stored[-1]])
    return uses


class ReplayOf2024(Replay):
    """Torch 2.6's stages keep the outputs and the gradients of inputs of all microbatches until the
    next step (stage.py).
    """

    def run_graph(self, number: int, name: str, microbatch: int | None) -> None:
        super().run_graph(number, name, microbatch)
        if name != "backward" or microbatch is None:
            return
        layout = self.layout
        hidden = self.stages[number].hidden
        output: float = hidden
        if number == len(layout.pipeline.modules) - 1:  # logits
            tokens = layout.microbatch_size * layout.seq_len / layout.degrees["cp"]
            vocabulary = layout.model.vocab_size / layout.degrees["tp"]
            output = 2 * tokens * vocabulary
        self.allocate("kept by the pipeline", output)
        if number > 0:
            self.allocate("kept by the pipeline", hidden)


def start_with_their_model(world_size: int, of_2024: bool, logits: torch.Size) -> None:
    """Start a fake world in this process, with torchtitan's model
    (torchtitan/models/llama3/model.py at its commit e7c0cae).

    logits: the shape of a rank's.
    """
    patch("titan_lite.models.llama3.apply_rope", rotate).start()
    # which context parallelism replaces, as it does ours
    patch("titan_lite.models.transformer.attend", attend).start()
    for family in (llama3, qwen3):
        patch.object(family.Attention, "attend", staticmethod(attend)).start()
    if of_2024:
        patch.object(RMSNorm, "forward", normalize).start()
        patch("titan_lite.models.loss.cross_entropy_on_ranks", loss_parallel).start()
        never_stored = functools.partial(is_never_stored, logits=logits)
        patch("titan_lite.tools.plan.tape.is_fused_away", never_stored).start()
        uses = functools.partial(uses_with_loss_parallel, logits=logits)
        patch("titan_lite.tools.plan.tape.last_uses", uses).start()
    start_fake_world(world_size)


@contextmanager
def start_tracing_their_model(
    world_size: int, of_2024: bool, logits: torch.Size
) -> Iterator[ProcessPoolExecutor]:
    context, arguments = mp.get_context("fork"), (world_size, of_2024, logits)
    with ProcessPoolExecutor(
        PROCESSES, context, initializer=start_with_their_model, initargs=arguments
    ) as processes:
        yield processes


def planned(run: Run) -> Plan:
    config = load_config(ROOT / "train_configs" / f"{run.recipe}.toml", run.options)
    layout = lay_out(config, run.ranks, run.machine.memory * GIB)
    if run.async_tp:
        parallelism = config.parallelism.replace(enable_async_tensor_parallel=True)
        layout = dataclasses.replace(layout, config=config.replace(parallelism=parallelism))
    if run.model == "titan_lite":
        return make_plan(layout, run.machine)
    of_2024 = run.model == "torchtitan 2024"
    entries = VocabularyShard(layout.model.vocab_size, Axis(degree=layout.degrees["tp"])).entries
    logits = torch.Size((layout.tokens_per_microbatch, len(entries)))
    tracing = functools.partial(start_tracing_their_model, of_2024=of_2024, logits=logits)
    replay = ReplayOf2024 if of_2024 else Replay
    with (
        patch("titan_lite.tools.plan.plan.start_tracing", tracing),
        patch("titan_lite.tools.plan.memory.Replay", replay),
    ):
        return make_plan(layout, run.machine)


def kept_by_theirs(plan: Plan) -> float:
    """Return the bytes that torchtitan reserves beyond a plan.

    FSDP2's collectives allocate in streams of their own, whose memory no other stream gets: two
    all-gathers in bfloat16, with their shards, and gradients of shards in float32. The root keeps
    the embedding gathered (torch 2.13, _fsdp_collectives.py). In a pipeline, each stage keeps the
    input of its last reduction until the next step (torch 2.6, _fsdp_param_group.py and
    pipelining/stage.py). Selective checkpointing in eager mode keeps the result of each block's
    last matmul without need.
    """
    config = plan.layout.config
    layout = plan.layout
    model = layout.model
    tp = layout.degrees["tp"]
    pp = layout.degrees["pp"]
    table = model.vocab_size * model.dim / tp  # elements of the embedding, or of the output
    block = block_weights(model).dense / tp  # elements
    stage = (model.n_layers * block + 2 * table) / pp
    kept = 0.0
    if not config.compile.enable and config.activation_checkpoint.mode == "selective":
        tokens = layout.microbatch_size * layout.seq_len
        kept = 2.0 * tokens * model.dim * model.n_layers
    if pp > 1:
        kept += 4 * block * len(layout.pipeline.modules) / pp
    collectives = 4 * max(table, block) * (1 + 1 / layout.fsdp_degree)
    shards = 4 * stage / layout.fsdp_degree
    return kept + collectives + shards + 2 * table


def compare(run: Run) -> PublishedRun:
    """Plan a run, and return the figures of both."""
    plan = planned(run)
    layout = plan.layout
    published = run.tokens_per_second
    if run.tflops:
        published = run.tflops * 1e12 / flops_per_token(layout.model, layout.seq_len)
    kept = kept_by_theirs(plan) if run.fsdp2 else 0.0
    return PublishedRun(
        run.name,
        run.role,
        kind_of_run(layout, run.machine),
        published=published,
        planned=plan.tokens_per_second(plan.nominal),
        published_gib=run.gib,
        planned_gib=(plan.memory.reserved + kept) / GIB,
        unknown=run.unknown,
    )


def write_runs(runs: Sequence[PublishedRun]) -> None:
    """Write titan_lite/tools/plan/published.csv."""
    with FILE.open("w", encoding="utf-8", newline="") as file:
        rows = csv.DictWriter(file, row_of(runs[0]), lineterminator="\n")
        rows.writeheader()
        rows.writerows(map(row_of, runs))


def row_of(run: PublishedRun) -> dict[str, object]:
    """Return a run as a row of the file."""
    columns = {**vars(run), **vars(run.kind)}
    del columns["kind"]
    return {
        name: f"{value:.5g}" if isinstance(value, float) else value
        for name, value in columns.items()
    }


def line_of(now: PublishedRun, before: PublishedRun | None) -> str:
    """Return a row of the table: planned before and now, and published."""

    def figures(value: str, form: str) -> str:
        old = f"{getattr(before, value):{form}}" if before else "-"
        return f"{old} | {getattr(now, value):{form}}"

    speed = f"{now.published:,.0f} | {now.speed:.2f}" if now.published else "- | -"
    memory = f"{now.published_gib:.1f}" if now.published_gib else "-"
    return (
        f"| {now.name} | {figures('planned', ',.0f')} | {speed} |"
        f" {figures('planned_gib', '.1f')} | {memory} |"
    )


def with_figures(planned: PublishedRun, run: Run) -> PublishedRun:
    """Return a plan with what the settings say of its run today. `tflops` become tokens a second
    only where the run is planned.
    """
    return dataclasses.replace(
        planned,
        role=run.role,
        published=run.tokens_per_second or planned.published,
        published_gib=run.gib,
        unknown=run.unknown,
    )


def has_changed(now: PublishedRun, before: PublishedRun | None) -> bool:
    return before is None or any(
        abs(getattr(now, value) / getattr(before, value) - 1) > CHANGED
        for value in ("planned", "planned_gib")
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", help="only those whose name has this in it")
    parser.add_argument("--new", action="store_true", help="only those without a plan")
    parser.add_argument("--write", action="store_true", help="keep plans and figures")
    arguments = parser.parse_args()
    known = {run.name: run for run in published_runs()}
    runs = read_runs()
    print("| run | tok/s before | now | published | ratio | GiB before | now | published |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    found: dict[str, PublishedRun] = {}
    for run in runs:
        is_wanted = not (arguments.new and run.name in known)
        if is_wanted and arguments.rows in run.name:
            found[run.name] = compare(run)
            print(line_of(found[run.name], known.get(run.name)), flush=True)
    changed = [name for name, now in found.items() if has_changed(now, known.get(name))]
    print(f"\n{len(changed)} of {len(found)} plans changed: {', '.join(changed) or '-'}")
    if arguments.write:
        kept = {**known, **found}
        write_runs([with_figures(kept[run.name], run) for run in runs if run.name in kept])
    return 0


if __name__ == "__main__":
    sys.exit(main())
