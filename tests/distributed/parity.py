"""One process, and ranks of any layout: the same batch, the loss over it, every gradient, and the
collectives it took.
"""

import functools
from collections import Counter
from contextlib import contextmanager

import torch

from titan_lite.compile.graph_passes import GraphPasses, choose_passes
from titan_lite.compile.settings import PassSettings
from titan_lite.config import (
    ActivationCheckpoint,
    Compile,
    Config,
    Parallelism,
    Training,
)
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.mesh import build_mesh, data_rank, sum_over_tokens
from titan_lite.distributed.parallelize import parallelize
from titan_lite.distributed.pipeline_schedule import PipelineSchedule
from titan_lite.distributed.stage_ranks import stage_ranks
from titan_lite.distributed.step_gather import OncePerStepGatherer
from titan_lite.dtensor import as_shard_of, local
from titan_lite.features.float8.keys import Float8Keys
from titan_lite.models.loss import cross_entropy
from titan_lite.models.shapes import module_fqns
from titan_lite.models.transformer import Transformer


def make_mesh(replicate, shard, tp=1):
    return build_mesh(dict(pp=1, dp_replicate=replicate, dp_shard=shard, cp=1, tp=tp), "cpu")


def batch(vocab_size=61, seq_len=16, sequences=8):
    """tokens and labels (B, T)."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab_size, (sequences, seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[3, :7] = -100  # ranks do not have the same number of tokens
    return tokens[:, :-1], labels


def one_process(config, tokens, labels, dtype=torch.float32):
    """(loss, {FQN: gradient}) of the whole batch."""
    model = Transformer(config)
    model.init_weights(seed=0)
    model.to(dtype)
    loss = cross_entropy(model(tokens), labels).sum() / (labels != -100).sum()
    loss.backward()
    return loss.item(), {fqn: parameter.grad for fqn, parameter in model.named_parameters()}


def build(
    config,
    mesh,
    *,
    reshard=True,
    keep=(),
    param=torch.float32,
    compiled=None,
    checkpointing="none",
    bucketing="none",
    machine=None,
    reports=None,
    float8=None,
    chunk=0,
    powersgd=0,
):
    """The stage of an unsplit model as the trainer builds it, without a recipe.

    compiled: a backend; reports: a list that gets those of the passes;
    chunk: tokens whose loss is computed at a time; powersgd: columns of factors between copies,
    whose sums are left out.
    """
    between = dict(replicate_compression="powersgd", replicate_rank=powersgd) if powersgd else {}
    recipe = Config(
        training=Training(
            seq_len=config.max_seq_len,
            mixed_precision_param=str(param).removeprefix("torch."),
            mixed_precision_reduce="float32",
        ),
        parallelism=Parallelism(
            fsdp_reshard_after_forward="default" if reshard else "never",
            fsdp_keep_gathered=keep,
            **between,
        ),
        activation_checkpoint=ActivationCheckpoint(mode=checkpointing, memory_budget=0.3),
        float8=float8 or Float8Keys(),
        compile=Compile(enable=bool(compiled), backend=compiled or "inductor", bucketing=bucketing),
    )
    layout = Layout(
        model=config,
        degrees={axis: mesh[axis].size() for axis in mesh.mesh_dim_names},
        pipeline=PipelineSchedule((tuple(module_fqns(config.n_layers)),), (0,), 1),
        local_batch_size=1,
        accumulation=1,
        gathers_once=False,
        loss_chunk=chunk,
    )
    graph_passes = None
    if compiled:
        torch._dynamo.reset()
        fused = compiled == "inductor"
        settings = PassSettings(recipe.compile, machine, fused=fused, ranks=stage_ranks(mesh))
        graph_passes = GraphPasses(settings, choose_passes(recipe))
        if reports is not None:
            graph_passes.reports = reports
    model = parallelize(recipe, layout, mesh, graph_passes=graph_passes)
    model.materialize(torch.device("cpu"))
    model.init_weights(seed=0)
    model.parameters_have_changed()
    return model.stages[0]


def my_microbatches(mesh, tokens, labels, count=1):
    """This rank's share of the batch, in `count` pieces."""
    rank, degree = data_rank(mesh)
    mine = slice(rank * len(tokens) // degree, (rank + 1) * len(tokens) // degree)
    return list(zip(tokens[mine].chunk(count), labels[mine].chunk(count), strict=True))


def step(stage, mesh, microbatches, tokens, scale=1, whole=True, gradient=True):
    """(loss over all ranks, {FQN: gradient}); scale: what a loop that averages over ranks
    multiplies with.
    """
    total = torch.zeros(())
    for input, label in microbatches:
        mean = stage(input, labels=label).sum() / tokens
        (mean * scale).backward()
        total += mean.detach()
    sum_over_tokens(total, mesh)
    return total.item(), gradients(stage, whole) if gradient else None


def gradients(stage, whole=True):
    grads = {fqn: parameter.grad for fqn, parameter in stage.model.named_parameters()}
    return {
        fqn: (grad.full_tensor() if whole else grad.to_local()).clone()
        for fqn, grad in grads.items()
    }


@contextmanager
def counted():
    """Counts of the collectives that run within, in eager mode and in compiled code."""
    counts = Counter()
    with torch.profiler.profile() as profiler:
        yield counts
    for event in profiler.events():
        namespace, _, name = event.name.partition("::")
        if (
            namespace == "c10d" and "allgather_base" in name
        ):  # by which all of them go: distributed/gloo.py
            counts["all_gather"] += 1
        for kind in ("reduce_scatter", "all_reduce") if namespace == "_c10d_functional" else ():
            if kind in name:
                counts[kind] += 1


def assert_same(grads, oracle, **tolerance):
    assert grads.keys() == oracle.keys()
    for fqn, gradient in oracle.items():
        torch.testing.assert_close(
            grads[fqn].float(), gradient.float(), **tolerance or dict(atol=1e-7, rtol=1e-4)
        )


class GathererOfEach:
    """The reference of OncePerStepGatherer: gathers every parameter alone before the first forward,
    and reduces every gradient alone after the last backward.
    """

    def __init__(self, sharding):
        self.sharding = sharding
        self.weights, self.leaves, self.sums = {}, {}, {}
        for parameter, spec in sharding.specs.items():
            weight = spec.start_gather(local(parameter)).wait().detach()
            stand_in = spec.stand_in(weight)
            leaf = weight if stand_in is None else stand_in
            leaf.requires_grad_(parameter.requires_grad)
            if parameter.requires_grad:
                leaf.register_post_accumulate_grad_hook(functools.partial(self.add, spec))
            self.weights[spec.fqn], self.leaves[spec.fqn] = weight, leaf

    graph_inputs = OncePerStepGatherer.graph_inputs
    read_inputs = OncePerStepGatherer.read_inputs

    def read(self, parameter, spec):
        return self.read_inputs(self.graph_inputs(parameter, spec), spec)

    def add(self, spec, leaf):
        if spec.fqn in self.sums:
            self.sums[spec.fqn] += leaf.grad
        else:
            self.sums[spec.fqn] = leaf.grad.to(spec.reduce_dtype)
        leaf.grad = None

    def reduce(self):
        for parameter, spec in self.sharding.specs.items():
            if spec.fqn in self.sums:
                rows = spec.finish_reduce(spec.start_reduce(self.sums.pop(spec.fqn)))
                parameter.grad = as_shard_of(parameter, rows.to(parameter.dtype))


@contextmanager
def gathered_apart(stage, microbatches=0):
    """In place of Stage.gathered_for_step: no buckets, and no communication between the first forward and
    the last backward.
    """
    sharding = stage.sharding
    gatherer = GathererOfEach(sharding)
    sharding.eager = sharding.reader = gatherer
    yield
    gatherer.reduce()
    sharding.eager = sharding.prefetch
    sharding.reader = sharding.shard_reader
