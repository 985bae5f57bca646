"""Measure once how long a program takes to the end of the first step; print it as JSON.

    python scripts/first_step.py titan_lite --blocks 6 --backend inductor --steps 6
    python scripts/first_step.py torchtitan --blocks 6            # with a Python that has it
    python scripts/first_step.py titan_lite --recipe qwen3_moe_debug --expert-parallel 2

benchmark_compile.py and benchmark_experts.py call this, and say what is measured. Two ranks train a
model of the debug flavor's width on the CPU, on random tokens, in steps of forward, backward and
AdamW. A program is imported by the ranks only, so that any Python with torch and that program can
run this file.

torchtitan is its package of that name (0.3.0): its model, FSDP2 and its own way to compile, by
block, of its `debugmodel`, or of an MoE model with the sizes of ours, with SDPA in place of
FlexAttention, which has no CPU kernel for backward, without activation checkpointing and
validation, in float32 as the other one, experts of eager mode included; compiled, they are in
bfloat16.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

SEQ_LEN = 512
LOCAL_BATCH_SIZE = 4
RANKS = 2
TOKENS = RANKS * LOCAL_BATCH_SIZE * SEQ_LEN  # of a step
VOCABULARY = 256  # of the random tokens
MOE = "qwen3_moe_debug"

Step = Callable[[Tensor, Tensor], None]  # trains on (input, label), both (B, T)


@dataclasses.dataclass(frozen=True)
class Options:
    """The program of a measurement, and its sizes."""

    program: str
    recipe: str
    blocks: int
    backend: str  # "eager": not compiled
    bucketing: str  # of titan_lite
    expert_parallel: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Times of rank 0, in seconds."""

    first_step: float  # from the start of the ranks' processes to the end of the first step
    imports: float  # of that: until the process group is there, and a model is built next
    step: float  # median of the other steps
    segments: str  # titan_lite: "8 of 19, 11 of 51", different ones and all, forward and backward


def measure(rank: int, options: Options, folder: str, spawned: float) -> None:
    """Train on one rank; rank 0 writes its Measurement into `folder`."""
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))  # as a launcher
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    build = {"titan_lite": titan_lite_step, "torchtitan": torchtitan_step}[options.program]
    step, imported, describe = build(options)
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, VOCABULARY, (LOCAL_BATCH_SIZE, SEQ_LEN + 1), generator=generator)
    input = ids[:, :-1].contiguous()
    label = ids[:, 1:].contiguous()

    ends = []
    for _ in range(options.steps):
        step(input, label)
        ends.append(time.time())
    seconds = [end - begin for begin, end in itertools.pairwise(ends)]
    if rank == 0:
        result = Measurement(
            ends[0] - spawned, imported - spawned, statistics.median(seconds), describe()
        )
        Path(folder, "measurement").write_text(json.dumps(dataclasses.asdict(result)))
    dist.destroy_process_group()


def titan_lite_step(options: Options) -> tuple[Step, float, Callable[[], str]]:
    """Return a step of titan_lite, when it was imported, and what describes its segments."""
    from titan_lite.config import load_config
    from titan_lite.distributed.layout import Layout
    from titan_lite.distributed.mesh import build_mesh
    from titan_lite.distributed.parallelize import parallelize
    from titan_lite.distributed.pipeline_schedule import PipelineSchedule

    imported = time.time()
    blocks = options.blocks
    compiled = [
        "--compile.enable",
        f"--compile.backend={options.backend}",
        f"--compile.bucketing={options.bucketing}",
    ]
    config = load_config(
        options.recipe,
        [
            *(["--compile.no-enable"] if options.backend == "eager" else compiled),
            f"--parallelism.expert_parallel_degree={options.expert_parallel}",
            f"--training.local_batch_size={LOCAL_BATCH_SIZE}",
            f"--training.seq_len={SEQ_LEN}",
        ],
    )
    layout = Layout.from_config(config, RANKS)
    names = ("tok_embeddings", *(f"layers.{number}" for number in range(blocks)), "norm", "output")
    layout = dataclasses.replace(
        layout,
        model=dataclasses.replace(layout.model, n_layers=blocks),
        pipeline=PipelineSchedule((names,), (0,), layout.pipeline.microbatches),
    )
    model = parallelize(config, layout, build_mesh(layout.degrees, "cpu"))
    model.materialize(torch.device("cpu"))
    model.init_weights(seed=0)
    optimizer = torch.optim.AdamW(model.parameters.values(), lr=1e-3)
    tokens = torch.tensor(float(TOKENS))

    def step(input: Tensor, label: Tensor) -> None:
        batch = model.to_device(input, label, bos_id=0, eos_id=1)
        model.forward_backward([batch], tokens)
        optimizer.step()
        optimizer.zero_grad()

    def describe() -> str:
        return ", ".join(
            f"{report.different_segments} of {report.segments}"
            for report in model.compile_reports
            if report.graph != "inference"
        )

    return step, imported, describe


def torchtitan_step(options: Options) -> tuple[Step, float, Callable[[], str]]:
    """Return a step of torchtitan, when it was imported, and what describes nothing."""
    from torchtitan.tools import utils

    utils.device_type = "cpu"  # it takes "cuda" where there is no accelerator
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models.common.attention import ScaledDotProductAttention

    if options.recipe == MOE:
        import torchtitan.models.qwen3  # noqa: F401 - so that its time is one of imports

        build_spec = functools.partial(torchtitan_moe, options)
    else:
        from torchtitan.models.llama3 import model_registry

        build_spec = functools.partial(model_registry, "debugmodel")
    imported = time.time()
    spec = build_spec()
    training = TrainingConfig(mixed_precision_param="float32")
    # "spmd_types", the default, needs a newer torch than 2.13 for FSDP2
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor", expert_parallel_degree=options.expert_parallel
    )
    compile = CompileConfig(
        enable=options.backend != "eager",
        components=["model"],
        backend="inductor" if options.backend == "eager" else options.backend,
    )
    attention = spec.model.layers[0].attention
    attention.inner_attention = ScaledDotProductAttention.Config()
    attention.rope = dataclasses.replace(attention.rope, max_seq_len=SEQ_LEN)
    spec.model.layers = [dataclasses.replace(spec.model.layers[0]) for _ in range(options.blocks)]

    parallel_dims = ParallelDims.from_config(parallelism, RANKS)
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=training,
        parallelism=parallelism,
        compile_config=compile,
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo does not scale what it sums
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    loss_fn = CrossEntropyLoss.Config().build(compile_config=compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    context = dist_utils.get_spmd_context(parallel_dims=parallel_dims, spmd_typechecking=False)
    tokens = torch.tensor(float(TOKENS))

    def step(input: Tensor, label: Tensor) -> None:
        with context():
            loss, _ = loss_fn(model(input), label, tokens)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, imported, str


def torchtitan_moe(options: Options) -> Any:
    """Return torchtitan's spec of a Qwen3-MoE with the sizes of qwen3_moe_debug.toml."""
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    spec = qwen3.model_registry("debugmodel_moe", moe_comm_backend="standard")
    spec.model.layers = qwen3._build_qwen3_moe_layers(
        n_layers=options.blocks,
        dim=256,
        n_heads=8,
        n_kv_heads=4,
        head_dim=48,
        moe_hidden_dim=192,
        num_experts=8,
        top_k=2,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=48, max_seq_len=SEQ_LEN, theta=1e6),
    )
    is_split = options.expert_parallel > 1
    set_qwen3_sharding_config(spec.model, enable_sp=False, enable_ep=is_split)
    if options.backend == "eager":  # the compiler refuses grouped GEMMs in float32
        torch.Tensor.bfloat16 = lambda tensor: tensor  # which experts are cast to
    return spec


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", choices=["titan_lite", "torchtitan"])
    parser.add_argument("--recipe", default="debug_model", choices=["debug_model", MOE])
    parser.add_argument("--blocks", type=int, default=6)
    backends = ["inductor", "aot_eager", "eager"]
    parser.add_argument("--backend", default="inductor", choices=backends)
    parser.add_argument("--bucketing", default="block", help="of titan_lite")
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    options = Options(**vars(parser.parse_args()))
    if options.steps < 2:
        parser.error("--steps: at least 2, since the first one compiles")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(options, folder, time.time()), nprocs=RANKS)
        print(Path(folder, "measurement").read_text())


if __name__ == "__main__":
    main()
