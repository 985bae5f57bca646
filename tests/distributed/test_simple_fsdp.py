"""SimpleFSDP against one process and against FSDP2: the loss and every gradient, and what is communicated for them."""

import copy
import functools
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_lite.compiler.stage import compile_model
from titan_lite.config import Compile
from titan_lite.distributed.activation_checkpoint import apply_activation_checkpoint
from titan_lite.distributed.mesh import AXES
from titan_lite.distributed.simple_fsdp import apply_simple_fsdp, gathered_for_step, materialize, shard_of
from titan_lite.loss import cross_entropy_sum
from titan_lite.models.llama3 import FLAVORS, ModelConfig, Transformer

# 61, 30 and 10 rows: no world size here divides all of them
UNTIED = ModelConfig(dim=20, n_layers=2, n_heads=2, n_kv_heads=1, hidden_dim=30, vocab_size=61, max_seq_len=16)
TIED = ModelConfig(**{**vars(UNTIED), "tied_embeddings": True})
LAYOUTS = {"FSDP-2": (1, 2), "FSDP-4": (1, 4), "HSDP-2x2": (2, 2), "DDP-2": (2, 1)}
MICROBATCHES = 2
SEQUENCES = 8  # in all


def batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, UNTIED.vocab_size, (SEQUENCES, UNTIED.max_seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[3, :7] = -100  # ranks do not have the same number of tokens
    return tokens[:, :-1], labels


def one_process(config, tokens, labels, dtype=torch.float32):
    """(loss, {FQN: gradient}) of the whole batch."""
    model = Transformer(config)
    model.init_weights(seed=0)
    model.to(dtype)
    loss = cross_entropy_sum(model(tokens), labels) / (labels != -100).sum()
    loss.backward()
    return loss.item(), {fqn: parameter.grad for fqn, parameter in model.named_parameters()}


def make_mesh(replicate, shard):
    return init_device_mesh("cpu", (1, replicate, shard, 1, 1), mesh_dim_names=AXES)


def build(config, mesh, *, reshard=True, param=torch.float32, compiled=None, checkpointing="none"):
    with torch.device("meta"):
        model = Transformer(config)
    apply_activation_checkpoint(model.layers.values(), checkpointing)
    apply_simple_fsdp(model, mesh, param_dtype=param, reduce_dtype=torch.float32, reshard_after_forward=reshard)
    materialize(model, torch.device("cpu"))
    model.init_weights(0, shard_of)
    if compiled:
        torch._dynamo.reset()
        compile_model(model, Compile(enable=True, backend=compiled), reshard_after_forward=reshard)
    return model


def build_fsdp2(config, mesh, param=torch.float32):
    model = Transformer(config)
    model.init_weights(seed=0)
    options = dict(mesh=mesh["dp_replicate", "dp_shard"], mp_policy=MixedPrecisionPolicy(param, torch.float32))
    for layer in model.layers.values():
        fully_shard(layer, **options)
    return fully_shard(model, **options)


class CountCollectives(TorchDispatchMode):
    """What the running code asks of c10d, functional or not; {"all_gather": 3, ...}."""

    NAMES = {"all_gather_into_tensor": "all_gather", "_allgather_base_": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            name = func._opname
            self.counts[self.NAMES.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted():
    """Counts of the collectives that run within, in eager mode and in compiled code."""
    counts = Counter()
    with torch.profiler.profile() as profiler:
        yield counts
    for event in profiler.events():
        namespace, _, name = event.name.partition("::")
        if namespace == "_c10d_functional" or (namespace == "c10d" and "allgather_base" in name):
            for kind in ("all_gather", "allgather", "reduce_scatter", "all_reduce"):
                if kind in name:
                    counts[{"allgather": "all_gather"}.get(kind, kind)] += 1


def my_microbatches(tokens, labels, count=1):
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * SEQUENCES // world, (rank + 1) * SEQUENCES // world)
    return list(zip(tokens[mine].chunk(count), labels[mine].chunk(count), strict=True))


def step(model, microbatches, tokens, scale=1):
    """(loss over all ranks, {FQN: whole gradient}); scale: what a loop that averages over ranks multiplies with."""
    total = torch.zeros(())
    for input, label in microbatches:
        loss = cross_entropy_sum(model(input), label) / tokens
        (loss * scale).backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item(), gradients(model)


def gradients(model):
    return {fqn: parameter.grad.full_tensor().clone() for fqn, parameter in model.named_parameters()}


VARIANTS = {
    "eager, reshard": dict(reshard=True),
    "eager, keep": dict(reshard=False),
    "aot_eager, reshard": dict(reshard=True, compiled="aot_eager"),
    "aot_eager, keep": dict(reshard=False, compiled="aot_eager"),
    "eager, reshard, full checkpointing": dict(reshard=True, checkpointing="full"),
    "eager, keep, selective checkpointing": dict(reshard=False, checkpointing="selective"),
    "aot_eager, reshard, selective checkpointing": dict(reshard=True, compiled="aot_eager", checkpointing="selective"),
}


def compare(layout):
    mesh = make_mesh(*LAYOUTS[layout])
    found = {}
    for name, config in (("untied", UNTIED), ("tied", TIED)):
        tokens, labels = batch()
        counted_tokens = (labels != -100).sum()
        mine = my_microbatches(tokens, labels)
        for variant, options in VARIANTS.items():
            model = build(config, mesh, **options)
            found[name, variant] = step(model, mine, counted_tokens)
            model.zero_grad()
            # the second step is another code path: prefetch has learnt the order
            with counted() as counts:
                loss, grads = step(model, mine, counted_tokens)
            assert loss == found[name, variant][0]
            assert all(torch.equal(grads[fqn], grad) for fqn, grad in found[name, variant][1].items())
            found[name, variant] += (counts,)
        found[name, "FSDP2"] = (*step(build_fsdp2(config, mesh), mine, counted_tokens, scale=dist.get_world_size()), None)
    return found


@functools.cache
def compared(layout):
    replicate, shard = LAYOUTS[layout]
    return run_ranks(replicate * shard, compare, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", ["untied", "tied"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_and_every_gradient_are_those_of_one_process_and_of_fsdp2(layout, config, variant):
    loss, grads = one_process({"untied": UNTIED, "tied": TIED}[config], *batch())
    for found in compared(layout):
        for oracle_loss, oracle in ((loss, grads), found[config, "FSDP2"][:2]):
            assert found[config, variant][0] == pytest.approx(oracle_loss, abs=1e-6)
            assert found[config, variant][1].keys() == oracle.keys()
            for fqn, gradient in oracle.items():
                torch.testing.assert_close(found[config, variant][1][fqn], gradient, atol=1e-7, rtol=1e-4, msg=lambda m: f"{fqn}: {m}")  # noqa: B023
