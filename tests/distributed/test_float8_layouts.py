"""Float8 matmuls and gathers on every layout: the loss and gradients of one process, and tokens in
half the bytes.

A scale depends on all numbers that share it, so other ranks round activations and gradients
otherwise. With fixed scales, float32 gradients are within 1e-5 of one process; with real ones,
losses are within 1e-4 and gradients within 0.15 of their norm.
"""

import math
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from parity import batch, build, gradients, make_mesh, my_microbatches, step
from ranks import run_ranks
from tiny import FIRST_FAMILY, OF_FAMILY, of_family, slow_unless_first

from titan_lite.config.families import ModelConfig
from titan_lite.cost.profiles import PROFILES
from titan_lite.distributed import parallelize, tensor_parallel
from titan_lite.dtensor import local
from titan_lite.features.float8 import linear, weights
from titan_lite.features.float8 import tokens as float8_tokens
from titan_lite.features.float8.keys import Float8Keys

# three ranks divide no dimension, two and four divide heads and hidden units
CONFIG = ModelConfig(
    dim=32, n_layers=2, n_heads=8, n_kv_heads=4, hidden_dim=64, vocab_size=61, max_seq_len=16
)
GATHERED, CAST = Float8Keys(enable=True, all_gather=True), Float8Keys(enable=True)
ROWS, HIGH = (
    Float8Keys(enable=True, recipe="rowwise"),
    Float8Keys(enable=True, recipe="rowwise_with_gw_hp"),
)
ALL = [GATHERED, CAST, ROWS, HIGH]
AOT = dict(compiled="aot_eager")
MODES = [
    {},
    AOT,
    {**AOT, "bucketing": "block"},
    {**AOT, "bucketing": "greedy", "machine": PROFILES["H100"]},
]


def fixed(amax, dtype=linear.E4M3, *, power_of_two=False):
    return torch.full_like(amax, 64.0 if dtype == linear.E4M3 else 2.0**14, dtype=torch.float32)


def trained(mesh, options, count=1, once=False, family="llama3"):
    """[loss, gradients] of a step of the whole batch."""
    tokens, labels = batch()
    stage = build(of_family(family, CONFIG), mesh, **options)
    pieces = my_microbatches(mesh, tokens, labels, count)
    if not once:
        return step(stage, mesh, pieces, (labels != -100).sum())
    with stage.gathered_for_step(count):
        loss, _ = step(stage, mesh, pieces, (labels != -100).sum(), gradient=False)
    return loss, gradients(stage)


def several(degrees, cases, fix):
    """The results of each of `cases`: (arguments of `build`, arguments of `trained`)."""
    mesh = make_mesh(*degrees)
    with ExitStack() as patches:
        for module in (linear, weights, float8_tokens) if fix else ():
            patches.enter_context(mock.patch.object(module, "scale_of", fixed))
        return [trained(mesh, options, **how) for options, how in cases]


def with_fixed_and_real_scales(degrees, fixed_cases, real_cases):
    return several(degrees, fixed_cases, True), several(degrees, real_cases, False)


def results(degrees, cases):
    return run_ranks(math.prod(degrees), several, degrees, cases, False)[0]


def distance(found, expected):
    """(relative difference of the loss, largest relative difference of a gradient)."""
    apart = [
        (found[1][fqn] - gradient).norm() / gradient.norm() for fqn, gradient in expected[1].items()
    ]
    return abs(found[0] - expected[0]) / expected[0], max(float(each) for each in apart)


SLOW = [
    (FIRST_FAMILY, (1, 2, 2)),
    *((family, (1, 2, 1)) for family in OF_FAMILY if family != FIRST_FAMILY),
]
RELEASE = [(FIRST_FAMILY, each) for each in [(1, 3, 1), (2, 2, 1)]]
LAYOUTS = [
    (FIRST_FAMILY, (1, 2, 1)),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
    *(pytest.param(*each, marks=pytest.mark.release) for each in RELEASE),
]


@pytest.fixture(scope="module", params=slow_unless_first())
def family(request):
    return request.param


@pytest.fixture(scope="module")
def expected(family):
    """Of one process: the results of ALL, with fixed scales and with real ones, and of float32."""
    cases = [(dict(float8=each), dict(family=family)) for each in (*ALL, None)]
    return run_ranks(1, with_fixed_and_real_scales, (1, 1, 1), cases[:2], cases)[0]


@pytest.mark.parametrize(("family", "degrees"), LAYOUTS, indirect=["family"])
def test_a_layout_is_one_process(degrees, expected, family):
    fixed_scales, real_scales = expected
    cases = [(dict(float8=each), dict(family=family)) for each in ALL]
    world = math.prod(degrees)
    with_fixed, with_real = run_ranks(world, with_fixed_and_real_scales, degrees, cases[:2], cases)[
        0
    ]
    for number, found in enumerate(with_fixed):
        loss, gradient = distance(found, fixed_scales[number])
        assert loss < 1e-6, ALL[number]
        assert gradient < (1e-5 if degrees[2] == 1 else 0.02), ALL[
            number
        ]  # sums of tensor parallelism may round to another float8
    for number, found in enumerate(with_real):
        loss, gradient = distance(found, real_scales[number])
        assert loss < 1e-4, ALL[number]
        assert gradient < 0.15, ALL[number]


def test_float8_is_further_from_float32_than_from_one_process(expected):
    *rounded, exact = expected[1]
    assert all(0.02 < distance(found, exact)[1] < 0.5 for found in rounded)


QUICK = [
    (family, *case)
    for family in OF_FAMILY
    for case in [((1, 2, 1), GATHERED, [{}, MODES[3]]), ((1, 1, 2), CAST, MODES[0:3:2])]
]
THOROUGH = [
    (FIRST_FAMILY, (1, 2, 1), GATHERED, MODES),
    (FIRST_FAMILY, (1, 2, 1), HIGH, MODES),
    (FIRST_FAMILY, (1, 1, 2), CAST, MODES[:3]),
    (FIRST_FAMILY, (1, 1, 2), ROWS, MODES[:3]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "degrees", "float8", "modes"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.release) for case in THOROUGH)],
)
def test_compiled_is_eager_to_the_bit(family, degrees, float8, modes):
    how = dict(family=family)
    cases = [(dict(float8=float8, param=torch.bfloat16, **mode), how) for mode in modes]
    if len(modes) > 2:
        cases += [
            (dict(float8=float8, param=torch.bfloat16, checkpointing=each, **AOT), how)
            for each in ("full", "selective")
        ]
    eager, *others = results(degrees, cases)
    for (options, _), found in zip(cases[1:], others, strict=True):
        assert found[0] == eager[0], options
        assert all(torch.equal(found[1][fqn], gradient) for fqn, gradient in eager[1].items()), (
            options
        )


def test_resharding_and_checkpoints_change_nothing_in_eager_mode():
    cases = [
        (dict(float8=GATHERED, reshard=reshard, checkpointing=checkpointing), {})
        for reshard in (True, False)
        for checkpointing in ("none", "full", "selective")
    ]
    first, *others = results((1, 2, 1), cases)
    for found in others:
        assert all(torch.equal(found[1][fqn], gradient) for fqn, gradient in first[1].items())


def reductions(ways):
    """all-reduces that run in an eager step: not those whose results checkpointing has kept."""
    mesh, found = make_mesh(1, 1, 2), []
    tokens, labels = batch()
    for checkpointing in ways:
        stage = build(CONFIG, mesh, float8=CAST, checkpointing=checkpointing)
        with torch.profiler.profile() as profiler:
            step(
                stage,
                mesh,
                my_microbatches(mesh, tokens, labels),
                (labels != -100).sum(),
                gradient=False,
            )
        found.append(sum(event.name == "c10d::allreduce_" for event in profiler.events()))
    return found


@pytest.mark.slow
def test_selective_checkpointing_keeps_the_scales_of_tokens():
    none, selective, full = run_ranks(2, reductions, ("none", "selective", "full"))[0]
    assert 0 < none == selective < full


def test_gathering_once_a_step_sums_gradients_in_reduce_dtype():
    """Not in float8, which the weights are kept in.

    Microbatches have scales of their own in both.
    """
    dtypes = (torch.float32, torch.bfloat16)
    cases = [
        (dict(float8=GATHERED, param=param), dict(count=2, once=once))
        for param in dtypes
        for once in (False, True)
    ]
    found = results((1, 2, 1), cases)
    for param, every_time, once in zip(dtypes, found[::2], found[1::2], strict=True):
        assert all(gradient.dtype == torch.float32 for gradient in once[1].values())
        loss, gradient = distance(once, every_time)
        assert loss < 1e-6
        assert gradient < (1e-6 if param == torch.float32 else 0.01)


def scales_of(degrees):
    """{FQN: scale} as refreshed, of the whole weights, and of this rank's shards."""
    stage = build(CONFIG, make_mesh(*degrees), float8=GATHERED)
    with torch.no_grad():
        for parameter in stage.model.parameters():
            local(parameter).mul_(3)
    sharded = stage.sharding
    sharded.parameters_have_changed()
    found = {
        spec.fqn: float(spec.scales[0])
        for spec in sharded.specs.values()
        if spec.gather_dtype == torch.uint8
    }
    full = {
        fqn: 448 / float(parameter.full_tensor().abs().max())
        for fqn, parameter in stage.model.named_parameters()
        if fqn in found
    }
    own = {
        fqn: 448 / float(local(parameter).abs().max())
        for fqn, parameter in stage.model.named_parameters()
        if fqn in found
    }
    return found, full, own


@pytest.mark.parametrize("degrees", [(1, 2, 2)])
def test_a_scale_is_that_of_the_whole_weight(degrees):
    for found, full, own in run_ranks(degrees[0] * degrees[1] * degrees[2], scales_of, degrees):
        assert len(found) == 14
        assert found == pytest.approx(full, rel=1e-6)
        assert found != pytest.approx(own, rel=1e-3)


def token_gathers():
    """(dtype, bytes) of each all-gather of tokens or of their gradients in the operators of a
    compiled model; whether an eager one, which gathers gradients in bfloat16, computes the same.
    """
    mesh, gather, found = make_mesh(1, 1, 2), tensor_parallel.all_gather_tokens, []

    def noted(x, axis):
        found.append((x.dtype, x.nbytes))
        return gather(x, axis)

    # as a model is built that will be compiled, which this one is not
    not_compiled = mock.patch.object(parallelize, "compile_stages")
    with ExitStack() as patches:
        patches.enter_context(not_compiled)
        for module in (tensor_parallel, float8_tokens):
            patches.enter_context(mock.patch.object(module, "all_gather_tokens", noted))
        in_bytes = trained(mesh, dict(float8=CAST, param=torch.bfloat16, compiled="aot_eager"))
    wide = trained(mesh, dict(float8=CAST, param=torch.bfloat16))
    return found, in_bytes[0] == wide[0] and all(
        torch.equal(wide[1][fqn], each) for fqn, each in in_bytes[1].items()
    )


def test_tokens_and_their_gradients_travel_as_one_byte():
    """Two blocks: attention and feed-forward gather tokens in forward and gradients in backward.

    The output gathers tokens in bfloat16, and the gradient of the embedding's tokens comes so.
    """
    found, equal = run_ranks(2, token_gathers)[0]
    numbers = 8 * 16 // 2 * CONFIG.dim  # of eight sequences, on one of two ranks
    assert found.count((torch.uint8, numbers)) == 8
    assert found.count((torch.bfloat16, 2 * numbers)) == len(found) - 8 == 2
    assert equal  # the scale is that of all tokens, as after a gather
