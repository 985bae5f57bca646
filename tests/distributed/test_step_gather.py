"""A step of several microbatches in buckets: the numbers of parameters that travel alone, to the
bit, in few collectives and little memory.
"""

import gc
import time
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity import batch, build, gathered_apart, make_mesh, my_microbatches, step
from ranks import run_ranks
from test_buckets import BUCKETS, CONFIG, LAYOUTS
from test_simple_fsdp import Rows
from torch.multiprocessing.reductions import StorageWeakRef

from titan_lite.collectives import all_gather_single, collectives
from titan_lite.distributed import buckets, param_collectives
from titan_lite.distributed.buckets import Bucket
from titan_lite.distributed.mesh import parameter_mesh
from titan_lite.distributed.param_collectives import ShardSpec
from titan_lite.distributed.simple_fsdp import (
    FSDPOptions,
    apply_simple_fsdp,
)
from titan_lite.distributed.stage import Stage
from titan_lite.distributed.step_gather import IN_FLIGHT
from titan_lite.dtensor import local
from titan_lite.features.float8.keys import Float8Keys

TIED = replace(CONFIG, tied_embeddings=True)


@contextmanager
def parameter_collectives():
    """Counts of the collectives of parameters that start within, and not those of tokens."""
    counts = Counter()

    class Counted:
        def __getattr__(self, name):
            def call(*args):
                counts[name] += name != "wait_tensor"
                return getattr(collectives, name)(*args)

            return call

    def all_gather(*args, **kwargs):
        counts["all_gather"] += 1
        return all_gather_single(*args, **kwargs)

    with (
        mock.patch.object(param_collectives, "collectives", Counted()),
        mock.patch.object(param_collectives, "all_gather_single", all_gather),
    ):
        yield counts


def uneven():
    """Rows so few that some ranks have none, all in one bucket; whole numbers, of which there is
    one sum in any order.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    exact = Rows(8, 7, 5, 3, 1)
    model = Rows(8, 7, 5, 3, 1)
    of_ranks = [
        torch.randint(100, (world, *parameter.shape), generator=generator).float()
        for parameter in exact.parameters()
    ]
    with mock.patch.object(buckets, "block_of", return_value="all"):
        mesh = parameter_mesh(make_mesh(1, world))
        stage = Stage(model, apply_simple_fsdp(model, mesh, FSDPOptions()))
    with stage.gathered_for_step(1), parameter_collectives() as counts:
        with torch.no_grad():
            model(torch.ones(3))
        losses = []
        for (name, parameter), gradients in zip(exact.named_parameters(), of_ranks, strict=True):
            weight = getattr(model, name)
            assert torch.equal(weight, parameter)
            losses.append((weight * gradients[rank]).sum())
        sum(losses).backward()
    assert +counts == {"all_gather": 1, "reduce_scatter_tensor": 1}
    for parameter, gradients in zip(model.parameters(), of_ranks, strict=True):
        assert torch.equal(parameter.grad.full_tensor(), gradients.sum(0))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.release)])
def test_ranks_without_rows(world_size):
    run_ranks(world_size, uneven)


def memory(param):
    """Return the most tensors alive at once: flat buckets, and gradients of buckets that have
    started, when another is started; weights after a step. A thread of gloo may hold a finished one
    a moment longer.
    """

    def alive(storages, expected):
        for _ in range(6000):
            count = sum(not storage.expired() for storage in storages)
            if count <= expected:
                break
            time.sleep(0.01)
        return count

    def reference(tensor):
        return StorageWeakRef(tensor.untyped_storage())

    start_gather, start_reduce = ShardSpec.start_gather_of, Bucket.start_reduce
    flat, gradients, weights = [], [], []
    most = {"flat": 0, "gradients": 0, "weights": 0}

    def watched_gather(spec, shard, out=None):
        result = start_gather(spec, shard, out)
        if " " in spec.fqn:  # what is alone is not copied
            most["flat"] = max(most["flat"], alive(flat, IN_FLIGHT - 1))
            flat.append(reference(result.tensor))
        return result

    def watched_reduce(bucket, full):
        most["gradients"] = max(most["gradients"], alive(gradients, 0))
        result = start_reduce(bucket, full)
        if len(bucket.specs) > 1:
            gradients.extend(map(reference, full))
        return result

    mesh = make_mesh(1, 2)
    tokens, labels = batch()
    mine = my_microbatches(mesh, tokens, labels, count=2)
    stage = build(CONFIG, mesh, param=param)
    with (
        mock.patch.object(ShardSpec, "start_gather_of", watched_gather),
        mock.patch.object(Bucket, "start_reduce", watched_reduce),
    ):
        for _ in range(2):  # before prefetch has learnt the order, and after
            with stage.gathered_for_step(len(mine)):
                step(stage, mesh, mine, (labels != -100).sum(), gradient=False)
                weights += map(reference, stage.sharding.eager.weights.values())
            most["weights"] = max(most["weights"], alive(weights, 0))
    assert alive(flat, 0) == alive(gradients, 0) == 0
    assert len(flat) == 2 * (BUCKETS - 2)  # embedding and output are alone
    return most


@pytest.mark.parametrize(
    "param", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.release)]
)
def test_few_flat_buffers_live_beside_weights_and_gradients(param):
    for most in run_ranks(2, memory, param):
        assert most["flat"] <= IN_FLIGHT - 1
        assert most["gradients"] == most["weights"] == 0


def overlapped(layout, cases):
    """Per case: (tensors of two steps, events of the last, buckets of gathers and of reductions)
    with all communication before and after, and with overlap.
    """
    mesh = make_mesh(*LAYOUTS[layout])
    tokens, labels = batch()
    mine = my_microbatches(mesh, tokens, labels, count=2)
    every = []
    for config, options in cases:
        found = []
        for way in (gathered_apart, Stage.gathered_for_step):
            events = []
            stage = build(config, mesh, **options)
            stage.model.norm._parameters["weight"].requires_grad_(False)
            optimizer = torch.optim.AdamW(stage.model.parameters(), lr=1e-2)
            tensors = []
            for _ in range(2):
                optimizer.zero_grad()
                events.clear()
                with (
                    watched(ShardSpec, "start_gather_of", events),
                    watched(ShardSpec, "start_reduce", events),
                    way(stage, len(mine)),
                ):
                    for number, (input, label) in enumerate(mine):
                        events.append(f"forward {number}")
                        loss = stage(input, labels=label).sum() / (labels != -100).sum()
                        events.append(f"backward {number}")
                        loss.backward()
                    events.append("end")
                tensors += [
                    loss.detach(),
                    *(
                        local(each.grad).clone()
                        for each in stage.model.parameters()
                        if each.grad is not None
                    ),
                ]
                optimizer.step()
            specs = stage.sharding.specs
            trained = {each: spec for each, spec in specs.items() if each.requires_grad}
            few = {
                "start_gather_of": len(buckets.gather_buckets(specs)),
                "start_reduce": len(buckets.reduce_buckets(trained)),
            }
            found.append((tensors, list(events), few))
        every.append(found)
    return every


@contextmanager
def watched(cls, name, events):
    function = getattr(cls, name)

    def noted(*arguments):
        events.append(name)
        return function(*arguments)

    with mock.patch.object(cls, name, noted):
        yield


FLOAT8 = Float8Keys(enable=True, all_gather=True)
OVERLAPPED = {
    "float32": (CONFIG, {}),
    "tied, bfloat16": (TIED, dict(param=torch.bfloat16)),
    "full": (CONFIG, dict(checkpointing="full")),
    "selective": (CONFIG, dict(checkpointing="selective", reshard=False)),
    "float8": (
        replace(CONFIG, dim=32, hidden_dim=64, n_heads=8, n_kv_heads=4),
        dict(param=torch.bfloat16, float8=FLOAT8),
    ),
}


def compiled(config, backend="aot_eager", **options):
    return config, dict(compiled=backend, **options)


IN_EAGER_MODE = OVERLAPPED
COMPILED = {name: compiled(config, **options) for name, (config, options) in OVERLAPPED.items()}
OVERLAPPED = {
    "eager": IN_EAGER_MODE,
    "compiled": {
        "tied, bfloat16, selective": compiled(TIED, param=torch.bfloat16, checkpointing="selective")
    },
    "all compiled": COMPILED,
    "inductor": {
        "float32, full": compiled(CONFIG, "inductor", checkpointing="full", reshard=False),
        "bfloat16": compiled(CONFIG, "inductor", param=torch.bfloat16),
    },
}
CASES = [("FSDP-2", "eager"), pytest.param("FSDP-2", "compiled", marks=pytest.mark.slow)]
RELEASE = [
    ("HSDP-2x2", "eager"),
    ("FSDP-2", "all compiled"),
    ("FSDP-2", "inductor"),
    ("HSDP-2x2", "compiled"),
]


@pytest.mark.parametrize(
    ("layout", "mode"),
    [*CASES, *(pytest.param(*each, marks=pytest.mark.release) for each in RELEASE)],
)
def test_overlap_with_the_first_forward_and_the_last_backward_changes_no_number(layout, mode):
    replicate, shard, _ = LAYOUTS[layout]
    for ranks in run_ranks(replicate * shard, overlapped, layout, [*OVERLAPPED[mode].values()]):
        for name, ((expected, *_), (tensors, events, few)) in zip(
            OVERLAPPED[mode], ranks, strict=True
        ):
            assert len(tensors) == len(expected) > 2
            first_step = len(tensors) // 2
            for number, (tensor, other) in enumerate(zip(tensors, expected, strict=True)):
                if name == "bfloat16":  # waits part the graph; a fused kernel rounds less often
                    share = 0.02 if number < first_step else 0.1  # AdamW enlarges differences
                    assert (tensor - other).norm() < share * other.norm(), name
                else:
                    assert torch.equal(tensor, other), name
            begin, last, end = (events.index(each) for each in ("backward 0", "backward 1", "end"))
            assert events.count("start_reduce") == few["start_reduce"]
            # the frozen norm is gathered with the last layer; tied, the output is the embedding
            assert few["start_reduce"] == BUCKETS - ("tied" in name)
            assert name == "float8" or few["start_gather_of"] == few["start_reduce"], name
            if shard > 1:
                assert events.count("start_gather_of") == few["start_gather_of"]
                assert "start_gather_of" not in events[begin:]
                assert events[: events.index("forward 0")].count("start_gather_of") == (
                    mode != "eager"
                )  # the first bucket
            assert "start_reduce" not in [*events[:last], *events[end:]]


def order_of_compiled():
    """The matmuls and collectives of a step of two microbatches, in the order they start."""
    mesh = make_mesh(1, 2)
    tokens, labels = batch()
    mine = my_microbatches(mesh, tokens, labels, count=2)
    stage = build(CONFIG, mesh, compiled="aot_eager")
    for last in (False, True):
        with (
            torch.profiler.profile() if last else nullcontext() as profiler,
            stage.gathered_for_step(len(mine)),
        ):
            step(stage, mesh, mine, (labels != -100).sum(), gradient=False)
    kinds = {"aten::mm": "matmul", "_c10d_functional::reduce_scatter_tensor": "reduction"}
    kinds |= {
        each.name: "gather"
        for each in profiler.events()
        if each.name.startswith("c10d::") and "allgather_base" in each.name
    }
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [kinds[event.name] for event in events if event.name in kinds]


@pytest.mark.slow
def test_a_compiled_model_gathers_and_reduces_between_its_matmuls():
    for order in run_ranks(2, order_of_compiled):
        assert order.count("gather") == order.count("reduction") == BUCKETS
        matmuls = [number for number, kind in enumerate(order) if kind == "matmul"]
        # embedding, the first layer, and the next one in flight
        assert order[: matmuls[0]].count("gather") <= 3
        assert order[matmuls[-1] :].count("reduction") <= 2  # the first layer, and the embedding
        first_reduction = order.index("reduction")
        last_gather = max(number for number, kind in enumerate(order) if kind == "gather")
        # in the first microbatch, and in the last one
        assert last_gather < matmuls[len(matmuls) // 2] < first_reduction


def storages_of_weights(stage):
    weights = stage.sharding.reader.weights.values()
    return [StorageWeakRef(each.untyped_storage()) for each in weights]


def told_of_failure():
    """A step that fails after its first microbatch leaves nothing behind, and neither does one
    without microbatches.
    """
    mesh = make_mesh(1, 2)
    tokens, labels = batch()
    mine = my_microbatches(mesh, tokens, labels, count=2)
    stage = build(CONFIG, mesh, compiled="aot_eager")
    count = (labels != -100).sum()
    with stage.gathered_for_step(2):
        pass  # gathers, and computes nothing
    assert all(parameter.grad is None for parameter in stage.model.parameters())
    gc.disable()
    with suppress(ZeroDivisionError), stage.gathered_for_step(2):
        step(stage, mesh, mine[:1], count, gradient=False)
        weights = storages_of_weights(stage)
        raise ZeroDivisionError
    with stage.gathered_for_step(2):
        step(stage, mesh, mine, count, gradient=False)
        weights += storages_of_weights(stage)
    assert all(each.expired() for each in weights)
    parameters = [*stage.model.parameters()]
    gradients = [local(parameter.grad) for parameter in parameters]
    with gathered_apart(stage):
        for parameter in parameters:
            parameter.grad = None
        step(stage, mesh, mine, count, gradient=False)
    assert all(map(torch.equal, gradients, (local(parameter.grad) for parameter in parameters)))


@pytest.mark.slow
def test_compiled_steps_leave_no_weights_behind():
    run_ranks(2, told_of_failure)


def a_microbatch_less():
    mesh = make_mesh(1, 1)
    tokens, _ = batch()
    stage = build(CONFIG, mesh)
    with (
        pytest.raises(RuntimeError, match="1 of the step's 2 microbatches"),
        stage.gathered_for_step(2),
    ):
        stage(tokens).sum().backward()


def test_gradients_that_wait_for_a_microbatch_are_an_error():
    run_ranks(1, a_microbatch_less)
