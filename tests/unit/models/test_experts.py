"""A router and its experts beside loops over tokens: results, gradients, counts, and that nothing is
routed or counted twice.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from plain_weights import PlainWeights
from poisoned import poisoned
from tiny import UNTIED, of_family

from titan_lite import sinks
from titan_lite.compile.compile import compile_model
from titan_lite.compile.graph_passes import GraphPasses
from titan_lite.compile.model_parts import TraceableModel
from titan_lite.compile.settings import PassSettings
from titan_lite.config import Compile
from titan_lite.distributed.activation_checkpoint import (
    apply_activation_checkpoint,
    checkpoint_rule,
)
from titan_lite.models.experts import (
    LOADS,
    ROOM_NEEDED,
    Experts,
    MixtureOfExperts,
    Router,
    choose_experts,
    grouped_mm,
    grouped_mm_of_weights,
    routers_of,
    rows_of_experts,
)
from titan_lite.models.transformer import Transformer

# 5 experts, 2 of them for a token. A GPU's grouped kernels take rows of a multiple of 16 bytes.
CONFIG = dataclasses.replace(of_family("qwen3_moe", UNTIED), dim=24)


class Count:
    """A Load that adds up."""

    def __init__(self):
        self.calls = 0
        self.counts = 0

    def __call__(self, probabilities, choices, counts):
        self.calls += 1
        self.counts = self.counts + counts.sum(0)


@pytest.fixture(autouse=True)
def no_loads():
    yield
    sinks.close()


def filled(moe, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return moe


def tokens(sequences=2, length=12):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sequences, length, CONFIG.dim, generator=generator, requires_grad=True)


def loop(moe, x, bias=0.0):
    """Each token through each of its experts, by plain matmuls."""
    router, experts = moe.router, moe.experts
    probabilities = F.linear(x, router.weight).softmax(-1)
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            p = probabilities[b, t]
            chosen = (p + bias).topk(CONFIG.experts_per_token)[1]
            weights = p[chosen] / p[chosen].sum()
            for weight, n in zip(weights, chosen, strict=True):
                hidden = F.silu(experts.w1[n] @ x[b, t]) * (experts.w3[n] @ x[b, t])
                out[b, t] = out[b, t] + weight * (experts.w2[n] @ hidden)
    return out


def counts_of(choices):
    """Tokens of each sequence that an expert has: (B, E)."""
    return F.one_hot(choices, CONFIG.n_experts).sum((1, 2))


def gradients(moe, x, out):
    generator = torch.Generator().manual_seed(2)
    (out * torch.randn(out.shape, generator=generator)).sum().backward()
    found = [x.grad, *(parameter.grad for parameter in moe.parameters())]
    x.grad = None
    moe.zero_grad()
    return found


def assert_same_as_loop(moe, x, bias=0.0):
    found = moe(x)
    expected = loop(moe, x, bias)
    assert_near(found, expected, relative=1e-6)
    for one, other in zip(gradients(moe, x, found), gradients(moe, x, expected), strict=True):
        assert_near(one, other)


def assert_near(one, other, relative=1e-5):
    """Compare by the norm: single numbers differ by the rounding of a processor's matmuls."""
    assert (one - other).norm() <= relative * other.norm()


def test_a_mixture_is_a_loop_over_tokens_and_their_experts():
    assert_same_as_loop(filled(MixtureOfExperts(CONFIG)), tokens())


def test_a_bias_chooses_and_has_no_part_in_weights():
    moe = filled(MixtureOfExperts(CONFIG))
    before = moe.router(tokens()).choices
    moe.router.expert_bias = torch.tensor([0.0, 0.3, 0.0, -0.3, 0.1])
    assert not torch.equal(moe.router(tokens()).choices, before)
    assert_same_as_loop(moe, tokens(), moe.router.expert_bias)


def test_an_expert_without_tokens_has_a_gradient_of_zeros():
    """And one that all tokens choose, those of all."""
    moe = filled(MixtureOfExperts(CONFIG))
    moe.router.expert_bias = torch.tensor([5.0, 0.0, 0.0, -5.0, 0.0])
    x = tokens()
    assert_same_as_loop(moe, x, moe.router.expert_bias)
    counts = counts_of(moe.router(x).choices).sum(0)
    assert counts[3] == 0
    assert counts[0] == 24
    moe(x).sum().backward()
    for weight in moe.experts.parameters():
        assert not weight.grad[3].any()
        assert weight.grad[0].any()


def test_of_equal_probabilities_the_lower_numbers_are_chosen():
    probabilities = torch.full((1, 3, 8), 1 / 8)
    probabilities[0, 1, 6] = 0.2
    choices, counts = choose_experts(probabilities, torch.zeros(8), 3, "")
    assert choices[0].tolist() == [[0, 1, 2], [6, 0, 1], [0, 1, 2]]
    assert counts.tolist() == [[3, 3, 2, 0, 0, 0, 1, 0]]


def test_counts_are_of_each_sequence():
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(3, 7, 5, generator=generator)
    choices, counts = choose_experts(probabilities, torch.zeros(5), 2, "")
    for sequence in range(3):
        assert torch.equal(counts[sequence], choices[sequence].flatten().bincount(minlength=5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_matmuls_are_a_loop_of_matmuls(dtype):
    rows, weights = torch.randn(20, 16).to(dtype), torch.randn(4, 16, 24).to(dtype)
    ends = torch.tensor([3, 3, 15, 20], dtype=torch.int32)
    parts = rows.split([3, 0, 12, 5])
    found = grouped_mm(rows, weights, ends, 0)
    expected = torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])
    torch.testing.assert_close(found, expected)
    of_weights = grouped_mm_of_weights(found, rows, ends)
    expected = [y.t() @ x for y, x in zip(found.split([3, 0, 12, 5]), parts, strict=True)]
    torch.testing.assert_close(of_weights, torch.stack(expected))
    assert not of_weights[1].any()


def test_operators_are_what_torch_asks_of_them():
    """Fake results have the shapes, strides and dtypes of real ones."""
    ends = torch.tensor([3, 3, 15, 20], dtype=torch.int32)
    tests = ("test_schema", "test_faketensor")
    rows, weights = torch.randn(20, 16), torch.randn(4, 16, 24)
    transposed = weights.transpose(1, 2).contiguous().transpose(1, 2)
    for factor in (weights, transposed):
        torch.library.opcheck(grouped_mm, (rows, factor, ends, 0), test_utils=tests)
    of_weights = (rows, torch.randn(20, 8), ends)
    torch.library.opcheck(grouped_mm_of_weights, of_weights, test_utils=tests)
    probabilities = torch.rand(2, 6, 5)
    torch.library.opcheck(choose_experts, (probabilities, torch.zeros(5), 2, ""), test_utils=tests)
    choices = torch.tensor([[0, 3], [1, 2], [3, 0]])
    for experts, room, spare in ((4, 6, 0), (2, 6, 1), (2, 1, 1)):
        arguments = (choices, 0, experts, room, spare, "")
        torch.library.opcheck(rows_of_experts, arguments, test_utils=tests)


# Some of the experts


@pytest.fixture
def rows_of_no_expert_are_nan(monkeypatch):
    monkeypatch.setattr(F, "grouped_mm", poisoned(F.grouped_mm))


def test_rows_of_some_experts_are_side_by_side_in_the_order_of_tokens():
    choices = torch.tensor([[0, 3], [1, 2], [3, 2], [4, 1]])
    choice, row, ends = rows_of_experts(choices, 2, 2, 6, 1, "")
    assert ends.tolist() == [2, 4]
    assert choice[:4].tolist() == [3, 5, 1, 4]  # of expert 2: tokens 1 and 2; of 3: 0 and 2
    assert row.tolist() == [6, 2, 6, 0, 3, 1, 6, 6]


def split(moe, parts):
    """The experts of `moe` in parts, as ranks have them."""
    found = []
    count = CONFIG.n_experts // parts
    for number in range(parts):
        own = range(number * count, (number + 1) * count)
        part = Experts(CONFIG)
        part.own = own
        for name, weight in moe.experts.named_parameters():
            setattr(part, name, torch.nn.Parameter(weight.detach()[own.start : own.stop].clone()))
        found.append(part)
    return found


@pytest.mark.parametrize("bias", [[0.0] * 5, [9.0, 9.0, 0.0, 0.0, 0.0]], ids=["any", "one part"])
def test_parts_of_the_experts_add_up_to_all_of_them(bias, rows_of_no_expert_are_nan):
    """Forward and every gradient; also where one part gets all tokens, and others get none."""
    moe = filled(MixtureOfExperts(CONFIG))
    moe.router.expert_bias = torch.tensor(bias)
    x = tokens()
    expected = moe(x)
    of_x, _, *of_experts = gradients(moe, x, expected)
    parts = split(moe, 5)
    routing = moe.router(x)
    weights, choices = routing.weights.flatten(0, 1), routing.choices.flatten(0, 1)
    found = sum(part(x.flatten(0, 1), weights, choices) for part in parts).view_as(x)
    assert_near(found, expected, relative=1e-6)
    assert_near(gradients(moe, x, found)[0], of_x)
    for name, whole in zip(("w1", "w2", "w3"), of_experts, strict=True):
        joined = torch.cat([getattr(part, name).grad for part in parts])
        assert joined.isfinite().all()
        assert_near(joined, whole)


def test_without_room_choices_are_as_those_of_other_experts(rows_of_no_expert_are_nan):
    """And the rows that all choices need are known, relative to the room."""
    moe = filled(MixtureOfExperts(CONFIG))
    x = tokens()
    (part, *_) = split(moe, 5)
    part.fqn = "here"
    part.capacity_factor = 1.0
    routing = moe.router(x)
    weights, choices = routing.weights.flatten(0, 1), routing.choices.flatten(0, 1)
    needed = int((choices == 0).sum())
    room = 24 * 2 // 5
    assert needed > room
    ROOM_NEEDED["here"] = most = torch.zeros((), dtype=torch.float64)
    found = part(x.flatten(0, 1), weights, choices)
    assert float(most) == needed / room
    with_room = (choices == 0).any(1).nonzero().flatten()[:room]
    assert found.isfinite().all()
    assert found.any(1).nonzero().flatten().tolist() == with_room.tolist()
    found.sum().backward()
    assert all(weight.grad.isfinite().all() for weight in part.parameters())
    assert x.grad.isfinite().all()

    part.eval()  # validation has room for all
    most.zero_()
    assert int(part(x.flatten(0, 1), weights, choices).any(1).sum()) == needed
    assert float(most) == 0


# Balance


def term(router, x, shares, coefficient):
    """coefficient x E x sum_i f_i P_i of the tokens, with P in autograd's sight."""
    probabilities = F.linear(x, router.weight).softmax(-1)
    experts = probabilities.shape[-1]
    return coefficient * experts * (shares * probabilities.mean((0, 1))).sum()


@pytest.mark.parametrize("balance", ["step", "sequence"])
def test_backward_adds_the_gradient_of_the_term(balance):
    moe = filled(MixtureOfExperts(CONFIG))
    router = moe.router
    x = tokens()
    plain = gradients(moe, x, moe(x))
    count = x.shape[0] * x.shape[1]
    router.balance = balance
    router.balance_scale.fill_(0.7 * 5 / count)
    router.expert_share = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.1])
    balanced = gradients(moe, x, moe(x))
    if balance == "step":
        expected = term(router, x, router.expert_share, 0.7)
    else:
        counts = counts_of(router(x).choices).float()
        of_sequences = [
            term(router, x[n : n + 1], counts[n] / counts[n].sum(), 0.7) for n in range(len(x))
        ]
        expected = sum(of_sequences) / len(of_sequences)
    of_x, of_router = torch.autograd.grad(expected, (x, router.weight))
    assert of_router.norm() > 1e-3
    assert (balanced[0] - plain[0] - of_x).norm() < 1e-3 * of_x.norm()
    assert (balanced[1] - plain[1] - of_router).norm() < 1e-3 * of_router.norm()
    for one, other in zip(balanced[2:], plain[2:], strict=True):
        assert torch.equal(one, other)


# Nothing is routed or counted twice


def trained(mode="none", option="op", compiled=False, budget=1.0):
    """(tokens of each expert, by router; gradients) of a forward and backward."""
    config = dataclasses.replace(CONFIG, n_layers=2)
    model = Transformer(config)
    model.init_weights(seed=0)
    loads = {fqn: Count() for fqn in routers_of(model)}
    LOADS.update(loads)
    apply_activation_checkpoint(model.layers, mode, option, compiled=compiled)
    run = model
    if compiled:
        settings = PassSettings(Compile(enable=True, backend="aot_eager"), None)
        traceable = TraceableModel(model, PlainWeights(model), model.layers, checkpoint_rule)
        run = compile_model(traceable, GraphPasses(settings), memory_budget=budget)
    ids = torch.arange(2 * config.max_seq_len).view(2, -1) * 7 % config.vocab_size
    run(ids).square().mean().backward()
    assert {load.calls for load in loads.values()} == {1}
    counts = {fqn: load.counts.tolist() for fqn, load in loads.items()}
    return counts, {name: parameter.grad for name, parameter in model.named_parameters()}


MODES = [
    ("full", "op", 1.0),
    ("selective", "op", 1.0),
    ("selective", "op/2", 1.0),
    ("selective", "2", 1.0),
    ("memory_budget", "op", 0.5),
    ("memory_budget", "op", 0.0),
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("mode", "option", "budget"), MODES)
def test_recomputation_neither_routes_nor_counts_again(mode, option, budget, compiled):
    counts, expected = trained()
    found, gradients = trained(mode, option, compiled, budget)
    assert found == counts
    assert all(sum(of_router) == 2 * 16 * 2 for of_router in counts.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)


def test_a_recomputation_that_would_choose_otherwise_takes_the_choices_of_forward(monkeypatch):
    """As where probabilities are nearly equal, and a matmul of another shape rounds otherwise."""
    _, expected = trained("full")
    monkeypatch.setattr(Router, "forward", noisy(Router.forward))
    _, found = trained("full")
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)


NUDGE = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])


def noisy(forward):
    """Make the bias another one in every call after the first of each router."""
    seen = set()

    def call(self, x):
        if id(self) in seen:
            self.expert_bias = self.expert_bias + NUDGE
        seen.add(id(self))
        return forward(self, x)

    return call


def test_validation_counts_nothing():
    model = Transformer(dataclasses.replace(CONFIG, n_layers=1))
    model.init_weights(seed=0)
    LOADS["layers.0.moe.router"] = load = Count()
    ids = torch.zeros(1, 4, dtype=torch.int64)
    model.eval()(ids)
    assert load.calls == 0
    model.train()(ids)
    assert load.calls == 1


# On a GPU


@pytest.mark.gpu
def test_on_a_gpu_grouped_matmuls_are_a_loop_and_an_empty_group_has_zeros():
    rows = torch.randn(400, 64, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(4, 64, 96, device="cuda", dtype=torch.bfloat16)
    sizes = [130, 0, 262, 8]
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    found = grouped_mm(rows, weights, ends, 0)
    parts = rows.split(sizes)
    expected = torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    transposed = weights.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(grouped_mm(rows, transposed, ends, 0), found, rtol=2e-2, atol=2e-2)
    of_weights = grouped_mm_of_weights(found, rows, ends)
    for part, x, matmul in zip(found.split(sizes), parts, of_weights, strict=True):
        torch.testing.assert_close(matmul, part.t() @ x, rtol=2e-2, atol=0.5)
    assert not of_weights[1].any()


@pytest.mark.gpu
def test_on_a_gpu_a_mixture_is_that_of_a_cpu_and_nothing_waits_for_the_host():
    moe = filled(MixtureOfExperts(CONFIG))
    x = tokens()
    expected = moe(x)
    on_gpu = MixtureOfExperts(CONFIG)
    on_gpu.load_state_dict(moe.state_dict())
    on_gpu = on_gpu.to("cuda", torch.bfloat16)
    on_gpu.router.init_buffers()
    given = x.detach().to("cuda", torch.bfloat16).requires_grad_()
    on_gpu(given).sum().backward()  # kernels are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = on_gpu(given)
        found.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    difference = found.detach().cpu().float() - expected.detach()
    assert difference.norm() < 0.1 * expected.norm()


@pytest.mark.gpu
def test_on_a_gpu_parts_of_the_experts_add_up_to_all_of_them():
    moe = filled(MixtureOfExperts(CONFIG))
    x = tokens()
    expected = moe(x).flatten(0, 1).detach()
    routing = moe.router(x)
    weights, choices = (each.flatten(0, 1).cuda().detach() for each in routing)
    weights.requires_grad_()
    given = x.detach().flatten(0, 1).to("cuda", torch.bfloat16).requires_grad_()
    parts = [part.to("cuda", torch.bfloat16) for part in split(moe, 5)]
    found = sum(part(given, weights, choices) for part in parts)
    found.sum().backward()
    assert (found.detach().cpu().float() - expected).norm() < 0.05 * expected.norm()
    results = [given, weights, *(weight for part in parts for weight in part.parameters())]
    assert all(tensor.grad.isfinite().all() for tensor in results)
