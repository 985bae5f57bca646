"""SimpleFSDP against one process and against FSDP2: the loss and every gradient, and what is
communicated for them.
"""

import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity import (
    assert_same,
    batch,
    build,
    counted,
    make_mesh,
    my_microbatches,
    one_process,
    step,
)
from ranks import run_ranks
from tiny import TIED, UNTIED
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_lite.compile.compile import compile_model
from titan_lite.compile.graph_passes import GraphPasses
from titan_lite.compile.model_parts import TraceableModel
from titan_lite.compile.settings import PassSettings
from titan_lite.config import Compile
from titan_lite.distributed.buckets import Bucket
from titan_lite.distributed.mesh import parameter_mesh
from titan_lite.distributed.simple_fsdp import (
    FSDPOptions,
    apply_simple_fsdp,
)
from titan_lite.distributed.stage import Stage
from titan_lite.dtensor import shard_of
from titan_lite.models.loss import Loss, VocabularyShard
from titan_lite.models.transformer import Transformer

F32 = torch.float32
LAYOUTS = {"FSDP-2": (1, 2), "FSDP-4": (1, 4), "HSDP-2x2": (2, 2), "DDP-2": (2, 1)}
SLOW = pytest.mark.release


def build_fsdp2(config, mesh, param=torch.float32):
    model = Transformer(config)
    model.init_weights(seed=0)
    model.output.loss = Loss(VocabularyShard(config.vocab_size))
    options = dict(
        mesh=mesh["dp_replicate", "dp_shard"], mp_policy=MixedPrecisionPolicy(param, torch.float32)
    )
    for layer in model.layers.values():
        fully_shard(layer, **options)
    return Stage(fully_shard(model, **options), sharding=None)


RESHARD, KEEP = dict(reshard=True), dict(reshard=False)
VARIANTS = {
    "eager, reshard": RESHARD,
    "eager, keep": KEEP,
    "aot_eager, reshard": dict(reshard=True, compiled="aot_eager"),
    "eager, reshard, full checkpointing": dict(reshard=True, checkpointing="full"),
    "eager, keep, selective checkpointing": dict(reshard=False, checkpointing="selective"),
    "eager, reshard, loss in chunks": dict(reshard=True, chunk=24),
}
CONFIGS = {"untied": UNTIED, "tied": TIED}
CASES = [("untied", variant) for variant in VARIANTS]
CASES += [("tied", each) for each in ("eager, reshard", "eager, keep", "aot_eager, reshard")]


def compare(layout):
    mesh = make_mesh(*LAYOUTS[layout])
    tokens, labels = batch()
    counted_tokens = (labels != -100).sum()
    mine = my_microbatches(mesh, tokens, labels)
    found = {}
    for name, config in CONFIGS.items():
        for variant in [variant for model, variant in CASES if model == name]:
            stage = build(config, mesh, **VARIANTS[variant])
            loss, grads = step(stage, mesh, mine, counted_tokens)
            stage.model.zero_grad()
            with (
                counted() as counts
            ):  # and a second step is another code path: prefetch has learnt the order
                second_loss, second_grads = step(stage, mesh, mine, counted_tokens, whole=False)
            found[name, variant] = (loss, grads, counts)
            assert second_loss == loss
            assert all(
                torch.equal(second_grads[fqn], own_rows(stage.model, fqn, grad))
                for fqn, grad in grads.items()
            ), variant
        oracle = build_fsdp2(config, mesh)
        found[name, "FSDP2"] = step(oracle, mesh, mine, counted_tokens, scale=dist.get_world_size())
    return found


def own_rows(model, fqn, whole):
    rows, offset = shard_of(dict(model.named_parameters())[fqn])
    return whole[offset[0] : offset[0] + rows.shape[0]]


@pytest.fixture(
    scope="module",
    params=["FSDP-2", pytest.param("HSDP-2x2", marks=SLOW)],
)
def compared(request):
    """A layout, and what `compare` returns of it on each rank."""
    layout = request.param
    replicate, shard = LAYOUTS[layout]
    return layout, run_ranks(replicate * shard, compare, layout)


def test_the_loss_and_every_gradient_are_those_of_one_process_and_of_fsdp2(compared):
    _, ranks = compared
    exact = {model: one_process(config, *batch()) for model, config in CONFIGS.items()}
    for found in ranks:
        for model, variant in CASES:
            loss, grads, _ = found[model, variant]
            for oracle_loss, oracle in (exact[model], found[model, "FSDP2"]):
                assert loss == pytest.approx(oracle_loss, abs=1e-6), variant
                assert_same(grads, oracle)


def test_what_one_step_communicates(compared):
    layout, ranks = compared
    for found in ranks:
        for model, variant in CASES:
            expected = expected_collectives(layout, model, variant)
            assert found[model, variant][2] == expected, variant


def expected_collectives(layout, model, variant):
    """A parameter is gathered where it is read, again in backward where it was not kept, and
    reduced for every read. In eager mode it travels in its bucket.
    """
    options = VARIANTS[variant]
    in_blocks = 18 if "compiled" in options else 2
    beside = 3 if "compiled" in options else 2  # embedding, norm (in the last bucket) and output
    read = in_blocks + beside
    gathered = read - ("compiled" in options and model == "tied")  # a graph reads tied weights once
    if options["reshard"]:
        gathered += (
            read - 1 - ("chunk" in options)
        )  # backward of the embedding, or of a loss in chunks, needs no weight
    replicate, shard = LAYOUTS[layout]
    expected = {"all_gather": gathered, "reduce_scatter": read} if shard > 1 else {}
    return expected | ({"all_reduce": read} if replicate > 1 else {})


def mixed(layout):
    mesh = make_mesh(*LAYOUTS[layout])
    tokens, labels = batch()
    mine = my_microbatches(mesh, tokens, labels)
    found = {}
    for compiled in (None, "aot_eager"):
        stage = build(UNTIED, mesh, param=torch.bfloat16, compiled=compiled)
        assert stage.model.output.weight.dtype == stage(mine[0][0]).dtype == torch.bfloat16
        found[compiled] = step(stage, mesh, mine, (labels != -100).sum())
        assert {grad.dtype for grad in found[compiled][1].values()} == {torch.float32}
    oracle = build_fsdp2(UNTIED, mesh, param=torch.bfloat16)
    found["FSDP2"] = step(oracle, mesh, mine, (labels != -100).sum(), scale=dist.get_world_size())
    return found


@pytest.mark.parametrize("layout", ["FSDP-2", pytest.param("HSDP-2x2", marks=SLOW)])
def test_bfloat16_weights_with_float32_reduction_are_as_in_fsdp2(layout):
    replicate, shard = LAYOUTS[layout]
    exact = one_process(UNTIED, *batch())[1]
    for found in run_ranks(replicate * shard, mixed, layout):
        oracle = found["FSDP2"]
        for compiled in (None, "aot_eager"):
            loss, grads = found[compiled]
            assert loss == pytest.approx(oracle[0], abs=2e-3)
            for (
                fqn,
                grad,
            ) in grads.items():  # as far from the exact gradient as FSDP2's is, by rounding alone
                error, expected = (
                    (g - exact[fqn]).norm() / exact[fqn].norm() for g in (grad, oracle[1][fqn])
                )
                assert error < 1.5 * expected + 0.003, fqn


class Rows(nn.Module):
    """Weights of so few rows that some ranks hold none of them."""

    def __init__(self, *rows):
        super().__init__()
        for n in rows:
            values = torch.arange(2.0 * n).reshape(n, 2) / 10
            self.register_parameter(f"w{n}", nn.Parameter(values))
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (
            sum((getattr(self, f"w{n}") * x[0] ** n).sin().sum() for n in (8, 7, 5, 3, 1))
            + (self.bias * x).sum()
        )


def uneven():
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = make_mesh(1, world)
    inputs = torch.linspace(0.5, 1.5, 3 * world).reshape(world, 3)
    exact = Rows(8, 7, 5, 3, 1)
    sum(exact(x) for x in inputs).backward()
    for reshard in (True, False):
        for compiled in (False, True):
            model = Rows(8, 7, 5, 3, 1)
            options = FSDPOptions(keep_gathered=() if reshard else None)
            stage = Stage(model, apply_simple_fsdp(model, parameter_mesh(mesh), options))
            if compiled:
                torch._dynamo.reset()
                config = Compile(enable=True, backend="aot_eager", bucketing="none")
                schedule = GraphPasses(PassSettings(config))
                stage.compiled = compile_model(TraceableModel(model, stage.sharding), schedule)
            stage(inputs[rank]).backward()
            for fqn, parameter in exact.named_parameters():
                sharded = dict(model.named_parameters())[fqn]
                assert torch.equal(sharded.full_tensor(), parameter)
                assert sharded.to_local().shape[0] <= -(-parameter.shape[0] // world)
                torch.testing.assert_close(sharded.grad.full_tensor(), parameter.grad)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=SLOW)])
def test_rows_that_the_world_does_not_divide(world_size):
    run_ranks(world_size, uneven)


def names():
    for config in (UNTIED, TIED):
        names_of(config)


def names_of(config):
    plain = Transformer(config)
    stage = build(config, make_mesh(1, 2))
    with counted() as counts:
        state = stage.model.state_dict()
        assert list(state) == list(plain.state_dict())
        assert [fqn for fqn, _ in stage.model.named_parameters()] == [
            fqn for fqn, _ in plain.named_parameters()
        ]
        assert all(
            isinstance(value, DTensor) and value.shape == plain.state_dict()[fqn].shape
            for fqn, value in state.items()
        )
        assert {type(m).__name__ for m in stage.model.modules()} == {
            type(m).__name__ for m in plain.modules()
        }
        assert isinstance(stage.model, Transformer)
        assert isinstance(stage.model.layers["1"].attention.wq, nn.Linear)
        changed = {fqn: torch.full_like(value, 0.5) for fqn, value in state.items()}
        stage.model.load_state_dict(changed)
    assert counts == {}
    assert (stage.model.output.weight == 0.5).all()
    if config.tied_embeddings:
        assert (
            stage.model.output._parameters["weight"]
            is stage.model.tok_embeddings._parameters["weight"]
        )
        assert (
            state["output.weight"].to_local().data_ptr()
            == state["tok_embeddings.weight"].to_local().data_ptr()
        )
        assert "output.weight" not in dict(stage.model.named_parameters())


def test_names_and_state_dict_are_those_of_the_plain_model():
    run_ranks(2, names)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest storage that any operator makes outside of the meta device."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                type(tensor) is torch.Tensor and tensor.device.type != "meta"
            ):  # a DTensor makes none
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def no_rank_holds_the_full_model():
    config = replace(
        UNTIED, dim=256, vocab_size=16_384
    )  # weights of 16 MiB, filled in blocks of 4 MiB
    mesh = make_mesh(1, 4)
    with LargestTensor() as seen:
        stage = build(config, mesh)
    assert seen.largest == 4 * 2**20
    mine = sum(parameter.to_local().numel() for parameter in stage.model.parameters())
    whole = sum(parameter.numel() for parameter in Transformer(config).parameters())
    assert mine <= whole / 4 * 1.01
    plain = Transformer(config)
    plain.init_weights(seed=0)
    assert torch.equal(stage.model.tok_embeddings.weight, plain.tok_embeddings.weight)


def test_no_rank_holds_the_full_model_while_it_is_made():
    run_ranks(4, no_rank_holds_the_full_model)


def gathered_weights_alive():
    """Count gathered weights after forward and after backward, of 21; backward does not need the
    embedding.
    """
    for reshard, keep, kept in ((True, (), 0), (True, ("layers.1", "output"), 10), (False, (), 20)):
        with mock.patch.object(Bucket, "finish_gather", Bucket.finish_gather):
            found = alive_with(reshard, keep, kept)
        assert found == [(kept, 0), (kept, 0)], (reshard, keep)


def alive_with(reshard, keep, kept):

    def alive(expected):
        for _ in range(6000):  # a thread of gloo may hold the last one a little longer
            count = sum(not weight.expired() for weight in gathered)
            if count == expected:
                break
            time.sleep(0.01)
        return count

    gathered = []
    finish_gather = Bucket.finish_gather

    def watched(bucket, started):
        weights = finish_gather(bucket, started)
        gathered.extend(StorageWeakRef(weight.untyped_storage()) for weight in weights)
        return weights

    Bucket.finish_gather = watched
    stage = build(UNTIED, make_mesh(1, 2), reshard=reshard, keep=keep)
    found = []
    for _ in range(2):  # before prefetch has learnt the order, and after
        gathered.clear()
        loss = stage(batch()[0]).sum()
        after_forward = alive(kept)
        loss.backward()
        found.append((after_forward, alive(0)))
    return found


def test_resharding_in_eager_mode_frees_gathered_weights_after_forward_but_for_those_to_keep():
    run_ranks(2, gathered_weights_alive)


def change_between_forward_and_backward():
    stage = build(UNTIED, make_mesh(1, 2))
    loss = stage(batch()[0]).sum()
    with torch.no_grad():
        stage.model.norm._parameters["weight"].mul_(2)
    with pytest.raises(
        RuntimeError, match=r"norm\.weight was changed between its forward and its backward"
    ):
        loss.backward()


def test_a_weight_changed_between_forward_and_backward_is_an_error_and_not_a_wrong_gradient():
    run_ranks(2, change_between_forward_and_backward)
