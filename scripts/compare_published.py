"""Planned against published: every row of public figures that says its layout.

A Markdown table.

    python scripts/compare_published.py                       # all; ten minutes on two cores
    python scripts/compare_published.py --rows 8B             # those whose name has this in it

No constant is fitted to a row. A machine is its datasheet; that of the TorchTitan rows is H100 with
96 GB of HBM2e at 2.4 TB/s, limited to 500 W. Efficiencies are those of cost/profiles.py for all
rows. What is not known of a run stands beside its row: such a row is not scored. The microbatches
of torchtitan's pipelines are not published, either: they are taken to be as many as the pipeline's
ranks, which was the default then. Its runs are planned with its model: keys and values for every
query head, complex rotary embeddings, and in 2024 an RMSNorm of several operators, torch's
loss_parallel, and pipelines that keep outputs.

    tok/s      a second and GPU: planned (slow to fast), published, nominal / published
    GiB        what CUDA's allocator reserves on the rank that needs most: planned, published; of
               torchtitan's FSDP2 runs, planned is with what they keep beside this project's
               (`kept_by_theirs`)
"""

import argparse
import dataclasses
import functools
import math
import multiprocessing as mp
import statistics
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

from titan_lite.collectives import all_reduce
from titan_lite.config import ConfigError, load_config
from titan_lite.cost.machine import GIB, Machine
from titan_lite.cost.profiles import load_machine, machine_from
from titan_lite.models import llama3, qwen3
from titan_lite.models.loss import VocabularyShard
from titan_lite.models.shapes import block_weights, flops_per_token
from titan_lite.models.transformer import RMSNorm
from titan_lite.tools.plan.allocator import CachingAllocator
from titan_lite.tools.plan.command import lay_out
from titan_lite.tools.plan.memory import Allocation, Replay
from titan_lite.tools.plan.plan import Plan, make_plan
from titan_lite.tools.plan.published import RATIOS
from titan_lite.tools.plan.tape import Stage
from titan_lite.tools.plan.trace import PROCESSES, PlannedLayout, start_fake_world

RECIPES = Path(__file__).parents[1] / "train_configs"
H100 = load_machine("H100")
H200 = load_machine("H200")
A100 = load_machine("A100")
TITAN = machine_from(
    {"like": "H100", "memory": 96e9 / GIB, "memory_bandwidth": 2400, "power": 500}, "H100-96GB-500W"
)
MACHINES = {machine.name: machine for machine in (H100, H200, A100, TITAN)}


@dataclass(frozen=True)
class Row:
    """A published run."""

    name: str
    recipe: str
    ranks: int
    machine: Machine
    published: float  # tokens a second and GPU or, with tflops, TFLOP/s
    memory: float = 0.0  # GiB; 0: not published
    keys: str = ""
    differs: str = ""  # what is not known of the run
    tflops: bool = False
    # With asynchronous tensor parallelism, also beside float8, where a run here refuses it.
    async_tp: bool = False


# In 2024 their compiler saw transformer blocks, and not the loss, whose float32 logits then exist.
BLOCKS = "--compile.components=model"
# no run computed its loss in chunks, or looked up tokens in columns
AS_THERE = (
    "--training.loss_chunk_tokens=-1",
    "--compile.no-defer_weight_grads",
    "--compile.tensor_parallel_chunks=1",
)
SELECTIVE = (
    "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op/2"
)
FULL = "--activation_checkpoint.mode=full"
# torch chose FlashAttention 2 in 2024, and in 2025-06 torchtitan did (models/attention.py at its
# commit e7c0cae)
FA2 = "--training.attention_kernel=FA2"
EAGER = f"--compile.no-enable {SELECTIVE} {FA2}"
COMPILED = f"{BLOCKS} {SELECTIVE} {FA2}"
AOT = f"{SELECTIVE} --compile.backend=aot_eager --training.local_batch_size=1"
BATCH1 = f"--training.local_batch_size=1 {SELECTIVE} {FA2}"
LLAMA = (
    "--training.local_batch_size={batch} --activation_checkpoint.mode=none"
    " --parallelism.data_parallel_shard_degree={shard}"
    " --parallelism.pipeline_parallel_schedule=Interleaved1F1B"
)
LONG = f"{BLOCKS} {FA2} {FULL} --training.local_batch_size=1"
CP2 = (
    "--training.seq_len=65536 --parallelism.data_parallel_shard_degree=4"
    " --parallelism.context_parallel_degree=2"
)
CP4 = (
    "--training.seq_len=131072 --parallelism.data_parallel_shard_degree=2"
    " --parallelism.context_parallel_degree=4"
)
NO_TP = "--parallelism.tensor_parallel_degree=1"
TP8 = "--parallelism.tensor_parallel_degree=8 --parallelism.data_parallel_shard_degree=-1"
TP8_OF_8B = f"{SELECTIVE} {FA2} {TP8} --training.local_batch_size=12"
# 16 sequences at once of each group of tensor parallelism
AT_ONCE = (
    f"{FULL} --training.local_batch_size=16 --training.global_batch_size=-1"
    " --parallelism.fsdp_communication=auto"
)
TP8_OF_70B = f"{FA2} {TP8} {AT_ONCE}"
WIDE = "--float8.no-all_gather"  # weights travel in bfloat16
# A local batch of 32 sequences. How many microbatches: not published; the default then was the
# degree of the pipeline.
PP16 = f"{BLOCKS} {FA2} {FULL} --parallelism.pipeline_parallel_microbatch_size=2"
DEGREES = (
    "--parallelism.pipeline_parallel_degree=8 --parallelism.data_parallel_shard_degree={shard}"
)
PP8 = (
    f"{BLOCKS} {FA2} {FULL} {DEGREES.format(shard=8)}"
    " --parallelism.pipeline_parallel_microbatch_size=4"
)
ONE = "--parallelism.pipeline_parallel_schedule=1F1B"
TWO = "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"
FOUR_D = (
    f"{BLOCKS} {FA2} {FULL} {DEGREES} {ONE}"
    " --training.local_batch_size=8 --training.seq_len={tokens}"
)
# pytorch/torchtitan: its issue 1881, docs/performance.md in 2024, and
# benchmarks/llama3_h100_202412_torchtitan.md, asyncTP_llama3_h100_2025-06_torchtitan.md and
# llama3-8b_h200_202506_trainy-whitefiber.md; its pull request 1690
PAPER = "TorchTitan paper"
RERUN = "torchtitan 1881"
DOCS = "torchtitan docs"
LLAMA3 = "Llama 3 paper"
UNKNOWN = "stages a rank, and how attention is counted: not published"
WINTER = "torchtitan 2024-12"
SUMMER = "torchtitan 2025-06"
H200S = "torchtitan 2025-06, H200"
ROWS = (
    Row(f"{PAPER}: 8B on 8, eager", "llama3_8b", 8, TITAN, 6258, 81.9, EAGER),
    Row(f"{PAPER}: 8B on 8, compiled", "llama3_8b", 8, TITAN, 6674, 77.0, COMPILED),
    Row(f"{PAPER}: 8B on 128, eager", "llama3_8b", 128, TITAN, 5645, 67.0, EAGER),
    Row(f"{PAPER}: 8B on 128, compiled", "llama3_8b", 128, TITAN, 6482, 62.1, COMPILED),
    Row(f"{PAPER}: 8B on 8, float8", "llama3_8b_float8", 8, TITAN, 9409, 76.8, COMPILED),
    Row(f"{PAPER}: 8B on 128, float8", "llama3_8b_float8", 128, TITAN, 9319, 61.8, COMPILED),
    Row(
        f"{PAPER}: 70B on 256, float8",
        "llama3_70b_float8",
        256,
        TITAN,
        897,
        70.3,
        f"{BLOCKS} {TP8_OF_70B}",
    ),
    Row(
        f"{PAPER}: 70B on 256, float8, async TP",
        "llama3_70b_float8",
        256,
        TITAN,
        1010,
        67.7,
        f"{BLOCKS} {TP8_OF_70B}",
        async_tp=True,
    ),
    Row(
        f"{PAPER}: 405B on 512, float8, 1F1B",
        "llama3_405b_float8",
        512,
        TITAN,
        100,
        78.0,
        f"{PP16} {ONE}",
        async_tp=True,
    ),
    Row(
        f"{PAPER}: 405B on 512, float8, interleaved",
        "llama3_405b_float8",
        512,
        TITAN,
        130,
        80.3,
        f"{PP16} {TWO}",
        async_tp=True,
    ),
    Row(f"{RERUN}: 8B, FSDP 8", "llama3_8b", 8, TITAN, 7227, 40.96, AOT),
    Row(
        f"{RERUN}: 8B, FSDP 4 x TP 2",
        "llama3_8b",
        8,
        TITAN,
        5881,
        28.28,
        f"{AOT} --parallelism.tensor_parallel_degree=2",
    ),
    Row(f"{WINTER}: 8B on 8, eager", "llama3_8b", 8, TITAN, 5762, 82.4, EAGER),
    Row(f"{WINTER}: 8B on 8, compiled", "llama3_8b", 8, TITAN, 6667, 77.0, COMPILED),
    Row(f"{WINTER}: 8B on 128, eager", "llama3_8b", 128, TITAN, 5605, 67.0, EAGER),
    Row(f"{WINTER}: 8B on 128, compiled", "llama3_8b", 128, TITAN, 6514, 62.0, COMPILED),
    Row(f"{WINTER}: 8B on 8, float8", "llama3_8b_float8", 8, TITAN, 8532, 76.8, COMPILED),
    Row(f"{WINTER}: 8B on 128, float8", "llama3_8b_float8", 128, TITAN, 8380, 61.8, COMPILED),
    Row(
        f"{WINTER}: 8B on 8, float8, 32k tokens",
        "llama3_8b_float8",
        8,
        TITAN,
        3890,
        83.9,
        f"{LONG} --training.seq_len=32768",
    ),
    Row(
        f"{WINTER}: 8B, float8, FSDP 4 x CP 2, 64k tokens",
        "llama3_8b_float8",
        8,
        TITAN,
        2540,
        84.2,
        f"{LONG} {CP2}",
    ),
    Row(
        f"{WINTER}: 8B, float8, FSDP 2 x CP 4, 128k tokens",
        "llama3_8b_float8",
        8,
        TITAN,
        1071,
        84.0,
        f"{LONG} {CP4}",
    ),
    Row(
        f"{WINTER}: 70B on 256, float8",
        "llama3_70b_float8",
        256,
        TITAN,
        829,
        71.9,
        f"{BLOCKS} {TP8_OF_70B}",
    ),
    Row(
        f"{WINTER}: 70B on 256, float8, async TP",
        "llama3_70b_float8",
        256,
        TITAN,
        876,
        67.6,
        f"{BLOCKS} {TP8_OF_70B}",
        async_tp=True,
    ),
    Row(
        f"{WINTER}: 405B on 512, float8, 1F1B",
        "llama3_405b_float8",
        512,
        TITAN,
        100,
        82.5,
        f"{PP8} {ONE}",
        async_tp=True,
    ),
    Row(
        f"{WINTER}: 405B on 512, float8, interleaved",
        "llama3_405b_float8",
        512,
        TITAN,
        128,
        72.7,
        f"{PP8} {TWO}",
        async_tp=True,
    ),
    *(
        Row(
            f"{WINTER}: 405B on 512, float8, CP {degree}, {degree * 32}k tokens",
            "llama3_405b_float8",
            512,
            TITAN,
            published,
            memory,
            f"{FOUR_D.format(shard=8 // degree, tokens=degree * 32768)}"
            f" --parallelism.context_parallel_degree={degree}",
            async_tp=True,
        )
        for degree, published, memory in ((1, 76, 75.3), (2, 47, 75.9), (4, 31, 77.1))
    ),
    Row(f"{SUMMER}: 8B on 64, FSDP 8 x TP 8", "llama3_8b", 64, TITAN, 4378, 0, TP8_OF_8B),
    Row(
        f"{SUMMER}: 8B on 64, FSDP 8 x TP 8, async TP",
        "llama3_8b",
        64,
        TITAN,
        4809.4,
        0,
        TP8_OF_8B,
        async_tp=True,
    ),
    Row(
        f"{SUMMER}: 8B on 64, float8",
        "llama3_8b_float8",
        64,
        TITAN,
        5078.1,
        0,
        f"{TP8_OF_8B} {WIDE}",
    ),
    Row(
        f"{SUMMER}: 8B on 64, float8, async TP",
        "llama3_8b_float8",
        64,
        TITAN,
        5570.1,
        0,
        f"{TP8_OF_8B} {WIDE}",
        async_tp=True,
    ),
    Row(f"{SUMMER}: 70B on 256, FSDP 32 x TP 8", "llama3_70b", 256, TITAN, 597.3, 0, TP8_OF_70B),
    Row(
        f"{SUMMER}: 70B on 256, FSDP 32 x TP 8, async TP",
        "llama3_70b",
        256,
        TITAN,
        652.4,
        0,
        TP8_OF_70B,
        async_tp=True,
    ),
    Row(
        f"{SUMMER}: 70B on 256, float8",
        "llama3_70b_float8",
        256,
        TITAN,
        809.8,
        0,
        f"{TP8_OF_70B} {WIDE}",
    ),
    Row(
        f"{SUMMER}: 70B on 256, float8, async TP",
        "llama3_70b_float8",
        256,
        TITAN,
        942.4,
        0,
        f"{TP8_OF_70B} {WIDE}",
        async_tp=True,
    ),
    Row(
        f"{H200S}: 8B on 32, float8",
        "llama3_8b_float8",
        32,
        H200,
        10938,
        48.0,
        f"{SELECTIVE} {FA2}",
    ),
    Row(
        f"{H200S}: 8B on 64, float8",
        "llama3_8b_float8",
        64,
        H200,
        10753,
        47.0,
        f"{SELECTIVE} {FA2}",
    ),
    Row(
        f"{DOCS}: 8B on 64 A100",
        "llama3_8b",
        64,
        A100,
        2973,
        0,
        BATCH1,
        "whether compiled: not published",
    ),
    Row(
        f"{DOCS}: 8B on 64 A100, every second block",
        "llama3_8b",
        64,
        A100,
        2904,
        0,
        f"{BATCH1} --activation_checkpoint.selective_ac_option=2",
        "whether compiled: not published",
    ),
    Row(
        f"{DOCS}: 70B on 64 A100",
        "llama3_70b",
        64,
        A100,
        331,
        0,
        f"{NO_TP} {AT_ONCE} --training.local_batch_size=1"
        " --parallelism.data_parallel_shard_degree=64",
        "whether compiled: not published",
    ),
    Row(
        f"{LLAMA3}: 405B on 8,192",
        "llama3_405b",
        8192,
        H100,
        430,
        0,
        LLAMA.format(batch=32, shard=64),
        UNKNOWN,
        True,
    ),
    Row(
        f"{LLAMA3}: 405B on 16,384",
        "llama3_405b",
        16384,
        H100,
        400,
        0,
        LLAMA.format(batch=16, shard=128),
        UNKNOWN,
        True,
    ),
    Row(
        f"{LLAMA3}: 405B on 16,384, 131,072 tokens",
        "llama3_405b",
        16384,
        H100,
        380,
        0,
        LLAMA.format(batch=16, shard=8)
        + " --training.seq_len=131072 --parallelism.context_parallel_degree=16",
        UNKNOWN,
        True,
    ),
    Row(
        "torchtitan 1690: Qwen3 32B on 8",
        "qwen3_32b",
        8,
        TITAN,
        1874,
        81.85,
        f"{BLOCKS} {FULL} {NO_TP} --parallelism.data_parallel_shard_degree=8"
        " --training.local_batch_size=2 --training.global_batch_size=-1",
        "length not published: planned with 4,096, which others of its table have",
    ),
)


@dataclass(frozen=True)
class Compared:
    """A row of the table, and its ratios of planned to published."""

    line: str
    speed: float
    memory: float | None  # None: not published
    # distance of the published speed from the nominal one, relative to that of the range's end (of
    # logarithms)
    away: float


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


def loss_parallel(
    logits: Tensor, labels: Tensor, vocabulary: VocabularyShard, *, by_sequence: bool = False
) -> Tensor:
    first = vocabulary.entries.start
    return LossParallel.apply(logits.flatten(0, 1), labels.flatten(), first, vocabulary.group).sum()


class ReplayOf2024(Replay):
    """Torch 2.6's stages keep the outputs and the gradients of inputs of all microbatches until the
    next step (stage.py).
    """

    def __init__(
        self,
        layout: PlannedLayout,
        stages: Mapping[int, Stage],
        backward_of: Mapping[tuple[int, int | None], str],
        allocator: CachingAllocator,
    ):
        super().__init__(layout, stages, backward_of, allocator)
        self.kept: list[Allocation] = []

    def gather_weights(self) -> None:
        self.free_all(self.kept)
        self.kept = []
        super().gather_weights()

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
        self.kept.append(self.allocate("kept by the pipeline", output))
        if number > 0:
            self.kept.append(self.allocate("kept by the pipeline", hidden))


def start_with_their_model(world_size: int, of_2024: bool) -> None:
    """Start a fake world in this process, with torchtitan's model
    (torchtitan/models/llama3/model.py at its commit e7c0cae).
    """
    patch("titan_lite.models.llama3.apply_rope", rotate).start()
    # which context parallelism replaces, as it does ours
    patch("titan_lite.models.transformer.attend", attend).start()
    for family in (llama3, qwen3):
        patch.object(family.Attention, "attend", staticmethod(attend)).start()
    if of_2024:
        patch.object(RMSNorm, "forward", normalize).start()
        patch("titan_lite.models.loss.vocabulary_parallel_cross_entropy_sum", loss_parallel).start()
    start_fake_world(world_size)


@contextmanager
def start_tracing_their_model(world_size: int, of_2024: bool) -> Iterator[ProcessPoolExecutor]:
    context, arguments = mp.get_context("fork"), (world_size, of_2024)
    with ProcessPoolExecutor(
        PROCESSES, context, initializer=start_with_their_model, initargs=arguments
    ) as processes:
        yield processes


@functools.lru_cache
def planned(recipe: str, ranks: int, machine: str, keys: str, async_tp: bool, model: str) -> Plan:
    config = load_config(RECIPES / f"{recipe}.toml", [*AS_THERE, *keys.split()])
    layout = lay_out(config, ranks, MACHINES[machine].memory * GIB)
    if async_tp:
        parallelism = config.parallelism.replace(enable_async_tensor_parallel=True)
        layout = dataclasses.replace(layout, config=config.replace(parallelism=parallelism))
    if model == "titan_lite":
        return make_plan(layout, MACHINES[machine].nominal_slow_fast())
    of_2024 = model == "torchtitan 2024"
    tracing = functools.partial(start_tracing_their_model, of_2024=of_2024)
    replay = ReplayOf2024 if of_2024 else Replay
    with (
        patch("titan_lite.tools.plan.plan.start_tracing", tracing),
        patch("titan_lite.tools.plan.memory.Replay", replay),
    ):
        return make_plan(layout, MACHINES[machine].nominal_slow_fast())


def kept_by_theirs(plan: Plan) -> float:
    """Return the bytes that torchtitan reserves beyond a plan.

    FSDP2's collectives allocate in streams of their own, whose memory no other stream gets: two
    all-gathers in bfloat16, with their shards, and gradients of shards in float32. The root keeps
    the embedding gathered (torch 2.13, _fsdp_collectives.py). In a pipeline, each stage keeps the
    input of its last reduction until the next step (torch 2.6, _fsdp_param_group.py and
    pipelining/stage.py). Selective checkpointing in eager mode keeps the result of each block's
    last product without need.
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
    if not config.compile.compiles("model") and config.activation_checkpoint.mode == "selective":
        tokens = layout.microbatch_size * layout.seq_len
        kept = 2.0 * tokens * model.dim * model.n_layers
    if pp > 1:
        kept += 4 * block * len(layout.pipeline.modules) / pp
    collectives = 4 * max(table, block) * (1 + 1 / layout.fsdp_degree)
    shards = 4 * stage / layout.fsdp_degree
    return kept + collectives + shards + 2 * table


def compare(row: Row) -> Compared:
    if row.name.startswith(LLAMA3):
        model = "titan_lite"
    elif row.name.startswith((PAPER, WINTER, DOCS)):
        model = "torchtitan 2024"
    else:
        model = "torchtitan"
    plan = planned(row.recipe, row.ranks, row.machine.name, row.keys, row.async_tp, model)
    published = row.published
    if row.tflops:
        published *= 1e12 / flops_per_token(plan.layout.model, plan.layout.seq_len)
    nominal, slow, fast = map(plan.tokens_per_second, plan.steps)
    theirs = not row.name.startswith((RERUN, LLAMA3))
    reserved = (plan.memory.reserved + (kept_by_theirs(plan) if theirs else 0.0)) / GIB
    memory = f"{reserved:.1f} | {row.memory:.1f}" if row.memory else f"{reserved:.1f} | -"
    speed = f"{slow:,.0f} to {fast:,.0f} | {published:,.0f} | {nominal / published:.2f}"
    kept = RATIOS.get(row.name, nominal / published)
    if abs(kept - nominal / published) > 0.005:
        print(f"{row.name}: titan_lite/tools/plan/published.py says {kept:.2f}", file=sys.stderr)
    line = f"| {row.name} | {speed} | {memory} | {row.differs} |"
    away = math.log(published / nominal) / math.log(
        (slow if published < nominal else fast) / nominal
    )
    return Compared(line, nominal / published, reserved / row.memory if row.memory else None, away)


def width(rows: Sequence[Compared]) -> float:
    """Return how much wider ranges would have to be to hold 80% of these rows."""
    return sorted(row.away for row in rows)[math.ceil(0.8 * len(rows)) - 1]


def score(name: str, rows: Sequence[Compared]) -> str:
    """Return the median and the largest error of some rows in words."""
    speeds = [row.speed for row in rows]
    memories = [row.memory for row in rows if row.memory]
    parts = [f"{name}: {len(rows)} rows", errors_in_words("speed", speeds, limit=15)]
    if memories:
        parts.append(errors_in_words("memory", memories, limit=10))
    in_range = sum(row.away <= 1 for row in rows)
    parts.append(f"published speed in the planned range for {in_range}")
    return "; ".join(parts)


def errors_in_words(what: str, ratios: Sequence[float], limit: int) -> str:
    """Return the median and the largest error of ratios that should be 1. limit: percent."""
    errors = [100 * abs(ratio - 1) for ratio in ratios]
    within = sum(error <= limit for error in errors)
    return (
        f"{what} off by {statistics.median(errors):.0f}% (median), {max(errors):.0f}% (most),"
        f" {within} of {len(errors)} within {limit}%"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", help="only those whose name has this in it")
    arguments = parser.parse_args()
    print("| run | tok/s planned | published | ratio | GiB planned | published | not alike |")
    print("|---|--:|--:|--:|--:|--:|---|", flush=True)
    known: list[Compared] = []
    aside: list[Compared] = []
    for row in ROWS:
        if arguments.rows not in row.name:
            continue
        try:
            compared = compare(row)
        except ConfigError as error:
            unplanned = f"{row.published:,.0f} | - | - | {row.memory:g} | {row.differs}"
            print(f"| {row.name} | {error} | {unplanned} |", flush=True)
            continue
        print(compared.line, flush=True)
        if not row.differs:
            (aside if row.name.startswith((WINTER, SUMMER)) else known).append(compared)
    if known:
        print(f"\n{score('rows known when the constants were chosen', known)}")
    if aside:
        print(f"\n{score('rows kept aside', aside)}")
    scored = [*known, *aside]
    if len(scored) > 1:
        others = [[other for other in scored if other is not row] for row in scored]
        held = sum(row.away <= width(rest) for row, rest in zip(scored, others, strict=True))
        print(f"\n{score('all scored rows', scored)}")
        print(
            f"\nranges {width(scored):.2f} times as wide would hold 80%; as wide as the other rows"
            f" need, they hold {held}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
