"""Tensor parallelism, alone and with FSDP, HSDP and DDP, against one process: the loss and every
gradient.
"""

import dataclasses

import pytest
import torch
from parity import (
    assert_same,
    batch,
    build,
    gradients,
    make_mesh,
    my_microbatches,
    one_process,
    step,
)
from ranks import run_ranks
from tiny import FIRST_FAMILY, HEADS, OF_FAMILY, of_family
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_lite.config import ConfigError
from titan_lite.distributed.mesh import axis_of
from titan_lite.distributed.tensor_parallel import STYLES, apply_tensor_parallel
from titan_lite.models.loss import VocabularyShard, cross_entropy, cross_entropy_on_ranks
from titan_lite.models.transformer import Transformer

TIED = dataclasses.replace(HEADS, tied_embeddings=True)


LAYOUTS = {  # dp_replicate, dp_shard, tp
    "tp4": (1, 1, 4),
    "dp2tp2": (1, 2, 2),
    "ddp2tp2": (2, 1, 2),
    "hsdp2x2tp2": (2, 2, 2),
}
VARIANTS = {
    "eager": dict(reshard=True),
    "eager, keep, full checkpointing": dict(reshard=False, checkpointing="full"),
    "eager, selective checkpointing": dict(reshard=True, checkpointing="selective"),
    "aot_eager": dict(reshard=True, compiled="aot_eager"),
    "aot_eager, selective checkpointing": dict(
        reshard=True, compiled="aot_eager", checkpointing="selective"
    ),
    "tied, eager": dict(reshard=True),
    "bfloat16, eager": dict(reshard=True, param=torch.bfloat16),
}


# On every layout for the first family; test_layouts.py has the other ones on each.
OF_EVERY_FAMILY = ("eager", "aot_eager", "step")
REST = tuple(variant for variant in VARIANTS if variant not in OF_EVERY_FAMILY)


def compare(layout, family, variants):
    mesh = make_mesh(*LAYOUTS[layout])
    heads, tied = of_family(family, HEADS), of_family(family, TIED)
    tokens, labels = batch()
    counted_tokens = (labels != -100).sum()
    plain = Transformer(heads)
    plain.init_weights(seed=0)
    found = {}
    for variant in variants:
        if variant == "step":
            found[variant] = of_two_microbatches(build(heads, mesh), mesh)
            continue
        stage = build(tied if "tied" in variant else heads, mesh, **VARIANTS[variant])
        if variant == "eager":
            for fqn, parameter in plain.named_parameters():
                assert torch.equal(
                    dict(stage.model.named_parameters())[fqn].full_tensor(), parameter
                ), fqn
        found[variant] = step(stage, mesh, my_microbatches(mesh, tokens, labels), counted_tokens)
    return found


def of_two_microbatches(stage, mesh):
    """(loss, gradients) of a step whose weights are gathered once."""
    tokens, labels = batch()
    halves = my_microbatches(mesh, tokens, labels, count=2)
    with stage.gathered_for_step(2):
        loss, _ = step(stage, mesh, halves, (labels != -100).sum(), gradient=False)
    return loss, gradients(stage)


SLOW = [
    ("dp2tp2", FIRST_FAMILY, REST),
    ("ddp2tp2", FIRST_FAMILY, OF_EVERY_FAMILY[1:]),
    *(("dp2tp2", family, OF_EVERY_FAMILY) for family in OF_FAMILY if family != FIRST_FAMILY),
]
RELEASE = [
    (layout, FIRST_FAMILY, variants)
    for layout in ("tp4", "hsdp2x2tp2")
    for variants in (OF_EVERY_FAMILY, REST)
]


@pytest.mark.parametrize(
    ("layout", "family", "variants"),
    [
        ("dp2tp2", FIRST_FAMILY, OF_EVERY_FAMILY),
        ("ddp2tp2", FIRST_FAMILY, OF_EVERY_FAMILY[:1]),  # gradients of norms are summed twice
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(*case, marks=pytest.mark.release) for case in RELEASE),
    ],
)
def test_the_loss_and_every_gradient_are_those_of_one_process(layout, family, variants):
    replicate, shard, tp = LAYOUTS[layout]
    for ranks in run_ranks(replicate * shard * tp, compare, layout, family, variants):
        for variant, (found_loss, found) in ranks.items():
            shape = of_family(family, TIED if "tied" in variant else HEADS)
            loss, grads = one_process(shape, *batch())
            if "bfloat16" in variant:
                assert found_loss == pytest.approx(loss, rel=2e-3)
                for fqn, gradient in grads.items():
                    assert (found[fqn] - gradient).norm() < 0.03 * gradient.norm(), fqn
            else:
                assert found_loss == pytest.approx(loss, abs=1e-6), variant
                assert_same(found, grads, atol=1e-7, rtol=1e-4)


class Shapes(TorchDispatchMode):
    """The shapes of all that operators make."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen |= {tuple(x.shape) for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        return result


def what_a_rank_holds():
    mesh = make_mesh(1, 1, 2)
    tokens, labels = batch()
    stage = build(HEADS, mesh)
    with Shapes() as shapes:
        stage(tokens, labels=labels).sum().backward()
    held, whole = {}, {}
    for fqn, parameter in stage.model.named_parameters():
        storages = (each.to_local().untyped_storage() for each in (parameter, parameter.grad))
        (nbytes,) = {storage.nbytes() for storage in storages}
        held[fqn], whole[fqn] = nbytes / 4, parameter.numel()
    return shapes.seen, held, whole


def test_no_rank_holds_full_logits_and_each_holds_half_of_the_weights_and_gradients():
    for rank, (shapes, held, whole) in enumerate(run_ranks(2, what_a_rank_holds)):
        own = 31 if rank == 0 else 30
        assert (8, 16, own) in shapes
        assert not any(shape[-1:] == (61,) for shape in shapes)
        assert (8, 8, 32) in shapes  # tokens between blocks
        for fqn, numbers in held.items():
            if "norm" in fqn:
                assert numbers == whole[fqn]
            elif fqn in ("tok_embeddings.weight", "output.weight"):
                assert numbers == own * 32
            else:
                assert numbers == whole[fqn] / 2


def loss_alone():
    mesh = make_mesh(1, 1, 4)
    tp = axis_of(mesh["tp"])
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 61, generator=generator) * 30
    labels = torch.randint(61, (3, 5), generator=generator)
    labels[0, :2] = -100
    for dtype in (torch.float32, torch.bfloat16):
        whole = logits.to(dtype).clone().requires_grad_()
        part = whole.detach().tensor_split([16, 32, 48], dim=-1)[tp.rank].clone().requires_grad_()
        expected = cross_entropy(whole, labels)
        shard = VocabularyShard(61, tp)
        found = cross_entropy_on_ranks(part, labels, shard)
        (2 * expected).sum().backward()
        (2 * found).sum().backward()
        torch.testing.assert_close(found, expected)
        assert part.grad.dtype == dtype
        torch.testing.assert_close(
            part.grad, whole.grad.tensor_split([16, 32, 48], dim=-1)[tp.rank]
        )


def test_the_loss_of_split_logits_is_that_of_whole_ones():
    run_ranks(4, loss_alone)


def a_module_that_the_plan_does_not_know():
    model = Transformer(HEADS)
    model.layers["0"].attention.gate = nn.Linear(4, 4)
    with pytest.raises(
        ConfigError,
        match=r"layers\.0\.attention\.gate\.weight has no tensor-parallel style; give"
        r" attention\.gate one of replicated, columns, rows",
    ):
        apply_tensor_parallel(model, make_mesh(1, 1, 2)["tp"], "llama3")


def test_a_parameter_without_a_style_is_an_error():
    run_ranks(2, a_module_that_the_plan_does_not_know)


def test_the_plan_names_modules_of_the_model():
    names = [name.replace(".1.", ".*.") for name, _ in Transformer(HEADS).named_modules()]
    assert set(STYLES) <= set(names)
