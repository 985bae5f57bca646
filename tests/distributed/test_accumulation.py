"""A step of several microbatches in buckets: the numbers of parameters that travel alone, to the
bit, in few collectives and little memory.
"""

import gc
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity import batch, build, counted, make_mesh, my_microbatches, step
from ranks import run_ranks
from test_buckets import BUCKETS, CONFIG, LAYOUTS
from test_simple_fsdp import Rows
from torch.multiprocessing.reductions import StorageWeakRef

from titan_lite.config import Float8
from titan_lite.distributed import arriving, buckets
from titan_lite.distributed import step_gather as accumulation
from titan_lite.distributed.mesh import parameter_mesh
from titan_lite.distributed.param_collectives import ShardSpec
from titan_lite.distributed.simple_fsdp import apply_simple_fsdp, as_shard_of, model_of
from titan_lite.distributed.step_gather import IN_FLIGHT, gathered_for_step, gradient_leaves
from titan_lite.dtensor import local
from titan_lite.models.loss import cross_entropy_sum

TIED = replace(CONFIG, tied_embeddings=True)
MODELS = {
    "untied": (CONFIG, torch.float32),
    "tied": (TIED, torch.float32),
    "bfloat16": (CONFIG, torch.bfloat16),
    "tied, bfloat16": (TIED, torch.bfloat16),
}


@contextmanager
def each_alone(root):
    """The reference for gathered_for_step: gather and reduce each parameter by its own plan,
    without buckets.
    """
    model = model_of(root)
    for parameter, plan in model.plans.items():
        whole = plan.start_gather(local(parameter)).wait().detach()
        model.gathered[plan.fqn] = whole.requires_grad_(parameter.requires_grad)
    accumulation._sum_in_reduce_dtype(root)
    yield
    for parameter, plan in model.plans.items():
        gradient = model.sums.get(plan.fqn, model.gathered[plan.fqn].grad)
        if gradient is not None:
            rows = plan.finish_reduce(plan.start_reduce(gradient))
            parameter.grad = as_shard_of(parameter, rows.to(parameter.dtype))
    model.gathered, model.sums = {}, {}


def train(way, mesh, config, param):
    """Return losses, gathered weights and this rank's gradients of two steps, and collectives of
    the last outside the model.
    """
    tokens, labels = batch()
    mine = my_microbatches(mesh, tokens, labels, count=2)
    model = build(config, mesh, param=param)
    model.norm._parameters["weight"].requires_grad_(False)  # what has no gradient travels one way
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for last in (False, True):
        optimizer.zero_grad()
        gathered = way(model)
        with counted() if last else nullcontext() as gathers:
            gathered.__enter__()
        weights = [weight.detach().clone() for weight in gradient_leaves(model)]
        loss, _ = step(model, mesh, mine, (labels != -100).sum(), gradient=False)
        with counted() if last else nullcontext() as reductions:
            gathered.__exit__(None, None, None)
        gradients = [
            local(parameter.grad).clone()
            for parameter in model.parameters()
            if parameter.grad is not None
        ]
        optimizer.step()
        found.append((torch.tensor(loss), *weights, *gradients))
    return found, (gathers, reductions)


def compare(layout):
    mesh = make_mesh(*LAYOUTS[layout])
    found = {}
    for name, (config, param) in MODELS.items():
        alone, each = train(each_alone, mesh, config, param)
        buckets, few = train(gathered_for_step, mesh, config, param)
        tensors = list(zip(sum(alone, ()), sum(buckets, ()), strict=True))
        assert all(
            one.dtype == other.dtype and torch.equal(one, other) for one, other in tensors
        ), name
        found[name] = len(tensors), each, few
    return found


# the frozen norm is gathered with the last layer and not reduced; tied, the output is the embedding
@pytest.mark.parametrize(
    "layout",
    [
        "FSDP-2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "FSDP-2"),
    ],
)
def test_buckets_change_no_number_and_are_few(layout):
    replicate, shard, tp = LAYOUTS[layout]
    for found in run_ranks(replicate * shard * tp, compare, layout):
        for name, (tensors, each, few) in found.items():
            parameters = 29 if "tied" in name.split(", ") else 30
            assert tensors == 2 * (1 + parameters + parameters - 1)
            buckets = BUCKETS - ("tied" in name.split(", "))
            # tensor-parallel ranks have the same norms and add up their gradients: a bucket more a
            # layer, with an all-reduce
            both = (
                ((parameters, parameters - 1, 6), each),
                ((buckets, buckets + 3 * (tp > 1), 3), few),
            )
            for (gathers, reductions, norms), counts in both:
                sums = reductions if replicate > 1 else norms if tp > 1 else 0
                expected = (
                    ({"all_gather": gathers} if shard > 1 else {}),
                    {"reduce_scatter": reductions} if shard > 1 else {},
                )
                assert counts[0] == expected[0]
                assert counts[1] == expected[1] | ({"all_reduce": sums} if sums else {})


def uneven():
    """Rows so few that some ranks have none, all in one bucket; whole numbers, of which there is
    one sum in any order.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    exact = Rows(8, 7, 5, 3, 1)
    model = Rows(8, 7, 5, 3, 1)
    dtypes = dict(param_dtype=torch.float32, reduce_dtype=torch.float32)
    apply_simple_fsdp(
        model, parameter_mesh(make_mesh(1, world)), **dtypes, reshard_after_forward=True
    )
    of_ranks = [
        torch.randint(100, (world, *parameter.shape), generator=generator).float()
        for parameter in exact.parameters()
    ]
    with mock.patch.object(buckets, "block_of", return_value="all"), gathered_for_step(model):
        for (name, parameter), leaf, gradients in zip(
            exact.named_parameters(), gradient_leaves(model), of_ranks, strict=True
        ):
            assert torch.equal(getattr(model, name), parameter)
            leaf.grad = gradients[rank]
    for parameter, gradients in zip(model.parameters(), of_ranks, strict=True):
        assert torch.equal(parameter.grad.full_tensor(), gradients.sum(0))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_without_rows(world_size):
    run_ranks(world_size, uneven)


def memory(param):
    """Return the most tensors alive at once: flat buckets when another is started; weights, and
    gradients of started buckets, while gradients are reduced. A thread of gloo may hold a finished
    one a moment longer.
    """

    def alive(storages, expected):
        for _ in range(500):
            count = sum(not storage.expired() for storage in storages)
            if count <= expected:
                break
            time.sleep(0.01)
        return count

    def reference(tensor):
        return StorageWeakRef(tensor.untyped_storage())

    start_gather, start_reduce = ShardSpec.start_gather_of, ShardSpec.start_reduce
    flat, weights, gradients, most = [], [], {}, {"flat": 0, "weights": 0, "gradients": 0}
    done = []

    def started(plan, bucket):
        if " " in plan.fqn:  # what is alone is not copied
            most["flat"] = max(most["flat"], alive(flat, IN_FLIGHT - 1))
            flat.append(reference(bucket))

    def watched_gather(plan, shard, out=None):
        result = start_gather(plan, shard, out)
        started(plan, result.tensor)
        return result

    def watched_reduce(plan, gradient):
        most["weights"] = max(most["weights"], alive(weights, 0))
        most["gradients"] = max(most["gradients"], alive(done, 0))
        done.extend(gradients[fqn] for fqn in plan.fqn.split() if " " in plan.fqn)
        started(plan, gradient)
        return start_reduce(plan, gradient)

    mesh = make_mesh(1, 2)
    tokens, labels = batch()
    model = build(CONFIG, mesh, param=param)
    ShardSpec.start_gather_of, ShardSpec.start_reduce = watched_gather, watched_reduce
    with gathered_for_step(model):
        assert alive(flat, 0) == 0
        step(
            model,
            mesh,
            my_microbatches(mesh, tokens, labels, count=2),
            (labels != -100).sum(),
            gradient=False,
        )
        shared = model_of(model)
        for fqn, whole in shared.gathered.items():
            weights.append(reference(whole))
            gradients[fqn] = reference(shared.sums.get(fqn, whole.grad))
        del whole
    assert alive(flat, 0) == 0
    assert len(flat) == 2 * (BUCKETS - 2)  # embedding and output are alone
    return most


@pytest.mark.parametrize(
    "param", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_few_flat_buffers_live_beside_weights_and_gradients(param):
    for most in run_ranks(2, memory, param):
        assert most == {"flat": IN_FLIGHT - 1, "weights": 0, "gradients": 0}


def overlapped(layout, cases):
    """Per case: (tensors of two steps, events of the last) with all communication before and after,
    and with overlap.
    """
    mesh = make_mesh(*LAYOUTS[layout])
    tokens, labels = batch()
    mine = my_microbatches(mesh, tokens, labels, count=2)
    every = []
    for config, options in cases:
        found = []
        for count in (0, len(mine)):
            events = []
            model = build(config, mesh, **options)
            model.norm._parameters["weight"].requires_grad_(False)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            tensors = []
            for _ in range(2):
                optimizer.zero_grad()
                events.clear()
                with (
                    watched(ShardSpec, "start_gather_of", events),
                    watched(ShardSpec, "start_reduce", events),
                    gathered_for_step(model, count),
                ):
                    for number, (input, label) in enumerate(mine):
                        events.append(f"forward {number}")
                        loss = cross_entropy_sum(model(input), label) / (labels != -100).sum()
                        events.append(f"backward {number}")
                        loss.backward()
                    events.append("end")
                tensors += [
                    loss.detach(),
                    *(
                        local(each.grad).clone()
                        for each in model.parameters()
                        if each.grad is not None
                    ),
                ]
                optimizer.step()
            found.append((tensors, list(events)))
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


FLOAT8 = Float8(enable=True, all_gather=True)
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
CASES = [("FSDP-2", "eager"), ("FSDP-2", "compiled")]
SLOW = [(name, "eager") for name in LAYOUTS if name not in ("FSDP-2", "dp2tp2")]
SLOW += [
    ("FSDP-2", "all compiled"),
    ("FSDP-2", "inductor"),
    *((name, "compiled") for name in ("FSDP-4", "HSDP-2x2", "DDP-2")),
]


@pytest.mark.parametrize(
    ("layout", "mode"), [*CASES, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_overlap_with_the_first_forward_and_the_last_backward_changes_no_number(layout, mode):
    replicate, shard, _ = LAYOUTS[layout]
    for ranks in run_ranks(replicate * shard, overlapped, layout, [*OVERLAPPED[mode].values()]):
        for name, ((expected, apart), (tensors, events)) in zip(
            OVERLAPPED[mode], ranks, strict=True
        ):
            assert len(tensors) == len(expected) > 2
            assert all(map(torch.equal, tensors, expected)), name
            begin, last, end = (events.index(each) for each in ("backward 0", "backward 1", "end"))
            for kind in ("start_gather_of", "start_reduce"):
                assert events.count(kind) == apart.count(kind)
            if shard > 1:
                assert "start_gather_of" not in events[begin:]
                assert events[: events.index("forward 0")].count("start_gather_of") == (
                    mode != "eager"
                )  # the first bucket
            assert "start_reduce" not in [*events[:last], *events[end:]]


def order_of_compiled():
    """{microbatches told: the products and collectives of a step of two microbatches, in the order
    they start}
    """
    mesh = make_mesh(1, 2)
    tokens, labels = batch()
    mine = my_microbatches(mesh, tokens, labels, count=2)
    found = {}
    model = build(CONFIG, mesh, compiled="aot_eager")
    for count in (0, 2):
        for last in (False, True):
            with (
                torch.profiler.profile() if last else nullcontext() as profiler,
                gathered_for_step(model, count),
            ):
                step(model, mesh, mine, (labels != -100).sum(), gradient=False)
        kinds = {"aten::mm": "product", "_c10d_functional::reduce_scatter_tensor": "reduction"}
        kinds |= {
            each.name: "gather"
            for each in profiler.events()
            if each.name.startswith("c10d::") and "allgather_base" in each.name
        }
        events = sorted(profiler.events(), key=lambda event: event.time_range.start)
        found[count] = [kinds[event.name] for event in events if event.name in kinds]
    return found


def test_a_compiled_model_gathers_and_reduces_between_its_products():
    for found in run_ranks(2, order_of_compiled):
        assert all(
            order.count("gather") == order.count("reduction") == BUCKETS for order in found.values()
        )
        apart, order = found[0], found[2]
        products = [number for number, kind in enumerate(apart) if kind == "product"]
        assert (
            apart[: products[0]].count("gather")
            == apart[products[-1] :].count("reduction")
            == BUCKETS
        )
        products = [number for number, kind in enumerate(order) if kind == "product"]
        assert (
            order[: products[0]].count("gather") <= 3
        )  # embedding, the first layer, and the next one in flight
        assert order[products[-1] :].count("reduction") <= 2  # the first layer, and the embedding
        first, last = (
            order.index("reduction"),
            max(number for number, kind in enumerate(order) if kind == "gather"),
        )
        assert (
            last < products[len(products) // 2] < first
        )  # in the first microbatch, and in the last one


def told_of_failure():
    """A step that fails after its first microbatch leaves nothing behind, and neither does one
    without microbatches.
    """
    mesh = make_mesh(1, 2)
    tokens, labels = batch()
    mine = my_microbatches(mesh, tokens, labels, count=2)
    model = build(CONFIG, mesh, compiled="aot_eager")
    count = (labels != -100).sum()
    with gathered_for_step(model, 2):
        pass  # gathers, and computes nothing
    assert all(parameter.grad is None for parameter in model.parameters())
    gc.disable()
    with suppress(ZeroDivisionError), gathered_for_step(model, 2):
        step(model, mesh, mine[:1], count, gradient=False)
        weights = [
            StorageWeakRef(each.untyped_storage()) for each in model_of(model).gathered.values()
        ]
        raise ZeroDivisionError
    with gathered_for_step(model, 2):
        step(model, mesh, mine, count, gradient=False)
        weights += [
            StorageWeakRef(each.untyped_storage()) for each in model_of(model).gathered.values()
        ]
    assert all(each.expired() for each in weights)
    assert not arriving.takes
    gradients = [local(parameter.grad) for parameter in model.parameters()]
    with gathered_for_step(model):
        for parameter in model.parameters():
            parameter.grad = None
        step(model, mesh, mine, count, gradient=False)
    assert all(
        map(torch.equal, gradients, (local(parameter.grad) for parameter in model.parameters()))
    )


def test_compiled_steps_leave_no_weights_behind():
    run_ranks(2, told_of_failure)
