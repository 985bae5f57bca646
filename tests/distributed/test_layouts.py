"""Every layout is the training run of one process: losses, gradient norms, validation, and every
gradient of the first step.

Float32: loss within 1e-4 of one process and each gradient within 1e-4 of its norm
(tools/verify/compare.py), measured 1e-7 and 1e-6; bfloat16 weights against float32 ones: 2e-3 and 5e-2.
"""

import functools

import pytest
from packed_attention import packed_attention
from tiny import DEBUG, DEBUG_TOKENIZER, FIRST_FAMILY, OF_FAMILY

from titan_lite.config import load_config
from titan_lite.features.async_tp import token_chunks as chunking
from titan_lite.models.shapes import shape_of
from titan_lite.tools.verify.compare import compare
from titan_lite.tools.verify.observe import run
from titan_lite.tools.verify.proxy import parse_layout, proxy, proxy_model, reference

pytestmark = pytest.mark.ranks(2)
STEPS = 3
NOTHING: list[str] = []
FULL, SELECTIVE, SECOND = (
    ["--activation_checkpoint.mode=full"],
    ["--activation_checkpoint.mode=selective"],
    ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"],
)
AT_ONCE = [
    "--training.global_batch_size=-1"
]  # where the others accumulate gradients over two microbatches, or pipelines
EVERY_TIME = ["--parallelism.fsdp_communication=microbatch"]
KEPT = [*EVERY_TIME, "--parallelism.fsdp_reshard_after_forward=never"]
COMPILED = ["--compile.enable"]
CHUNKED = ["--training.loss_chunk_tokens=100"]  # the reference has the loss of all logits


def schedule(name):
    return [f"--parallelism.pipeline_parallel_schedule={name}"]


MASKED = ["--training.mask_documents"]
TIED = ["--model.tied_embeddings=yes"]
ZBV, INTERLEAVED, GPIPE = schedule("ZBVZeroBubble"), schedule("Interleaved1F1B"), schedule("GPipe")
DUAL = schedule("DualPipeV")
INTERLEAVED_HALVES = schedule("InterleavedZeroBubble")
OF_EVERY_FAMILY = [
    ("cp=2", [*SELECTIVE, *MASKED]),
    ("pp=2,tp=2", [*INTERLEAVED, *SECOND, *MASKED, *CHUNKED]),
    ("dp_shard=2,pp=2", [*TIED, *COMPILED]),
]
DEFAULT = [
    ("llama3", "pp=2", DUAL),
    ("llama3", "dp_shard=2,pp=2", [*TIED, *COMPILED]),
    ("llama3", "cp=2", [*SELECTIVE, *MASKED]),
    ("qwen3", "cp=2", [*SELECTIVE, *MASKED]),
]
SLOW = [  # of every kind and of every two kinds one, and every schedule
    ("pp=2", GPIPE),
    ("pp=2", ZBV),
    ("pp=2", DUAL),
    ("pp=2", INTERLEAVED_HALVES),
    ("dp_shard=2", [*COMPILED, *EVERY_TIME, *CHUNKED]),
    ("dp_shard=2,pp=2", FULL),
    ("pp=2", [*TIED, *ZBV]),  # the first and the last stage have one rank
    ("dp_shard=2,tp=2", FULL),
    *OF_EVERY_FAMILY,
]


# Of a release: large layouts, of which the smaller ones are a part, with what evaluated graphs do not
# cover, and in eager mode. Compiled ones: tests/unit/tools/verify/test_random_layouts_evaluated.py.
RELEASE = [
    ("cp=2,tp=2", [*EVERY_TIME, *MASKED, *TIED]),
    ("dp_shard=2,cp=2", KEPT),
    ("dp_replicate=2,dp_shard=2,tp=2", AT_ONCE),
    ("pp=4", MASKED),
    ("pp=4", [*ZBV, *AT_ONCE, *TIED]),
    ("pp=2,cp=2", [*DUAL, *EVERY_TIME, *MASKED]),
    ("dp_replicate=2,pp=2", [*GPIPE, *AT_ONCE, *MASKED, *TIED]),
    ("dp_replicate=2,pp=2", [*INTERLEAVED_HALVES, *KEPT]),
    ("pp=2,dp_shard=2,tp=2", [*INTERLEAVED, *EVERY_TIME]),
]


def proxy_of(layout, options, **training):
    config = load_config(DEBUG, [f"--model.tokenizer_path={DEBUG_TOKENIZER}", *options])
    small = proxy(config, parse_layout(layout), STEPS)
    return small.replace(training=small.training.replace(**training))


def named(family):
    return [f"--model.name={family}"]


@functools.cache
def expected(layers, masked, tied=False, family="llama3"):
    options = [*named(family), *AT_ONCE]
    options += [*(MASKED if masked else NOTHING), *(TIED if tied else NOTHING)]
    config = reference(proxy_of("dp_shard=1", options))
    return run(config, proxy_model(shape_of(config.model), layers))


def trained(config, layers=4, prepare=None):
    shape = shape_of(config.model)
    found = run(config, proxy_model(shape, layers), prepare=prepare)
    masked = config.training.mask_documents
    return compare(found, expected(layers, masked, shape.tied_embeddings, shape.family))


# A family has its own block: one slow row for each axis, and all of them for the first.
OF_ALL = [
    *((FIRST_FAMILY, *case) for case in SLOW),
    *(
        (family, *case)
        for family in OF_FAMILY
        for case in OF_EVERY_FAMILY
        if family != FIRST_FAMILY
    ),
]
CASES = [
    *(pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.slow) for case in OF_ALL),
    *(pytest.param(FIRST_FAMILY, *case, marks=pytest.mark.release) for case in RELEASE),
]


@pytest.mark.parametrize(("family", "layout", "options"), CASES)
def test_a_layout_is_the_run_of_one_process(family, layout, options):
    layers = 8 if layout == "pp=4" else 4
    result = trained(proxy_of(layout, [*named(family), *options]), layers)
    assert result.agrees, result


@pytest.mark.release
@pytest.mark.parametrize(("name", "recomputed"), [(INTERLEAVED, FULL), (DUAL, SELECTIVE)])
def test_a_pipeline_compiled_by_inductor_is_the_run_of_one_process(name, recomputed):
    config = proxy_of("dp_shard=2,pp=2", [*name, *COMPILED, *recomputed])
    result = trained(config.replace(compile=config.compile.replace(backend="inductor")))
    assert result.agrees, result
    assert result.loss < 1e-5, result


FORWARD, WHOLE, HALVES = ["forward"], ["backward"], ["backward_input", "backward_weight"]


def expect_graphs(trainer, backwards):
    """Fail unless each stage compiles these graphs for training, and the first one a whole
    backward.
    """
    forward_backward = trainer.model.forward_backward
    rank = trainer.model.mesh["pp"].get_local_rank()
    expected = [*FORWARD, *(WHOLE if rank == 0 else backwards), *FORWARD, *backwards]

    def checked(batches, tokens):
        losses = forward_backward(batches, tokens)
        graphs = [
            report.graph
            for report in trainer.model.compile_reports
            if report.graph != "inference" and report.pp_rank in (None, rank)
        ]
        assert graphs == expected
        return losses

    trainer.model.forward_backward = checked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backwards"), [(ZBV, HALVES), (DUAL, [*WHOLE, *HALVES])], ids=["ZBV", "DualPipeV"]
)
def test_a_stage_compiles_the_backwards_that_it_runs(name, backwards):
    prepare = functools.partial(expect_graphs, backwards=backwards)
    result = trained(proxy_of("pp=2", [*name, *COMPILED, *SELECTIVE]), prepare=prepare)
    assert result.agrees, result


@pytest.mark.slow
def test_a_proxy_has_documents_to_mask():
    masked, whole = (
        expected(4, masked).gradients["layers.0.attention.wq.weight"] for masked in (True, False)
    )
    assert (masked - whole).norm() > 0.05 * whole.norm()


def as_on_gpus(trainer):
    """Documents by a kernel and no mask, or what stands for it on a CPU."""
    trainer.model.needs_doc_stats, trainer.kernel = True, packed_attention()
    trainer.kernel.__enter__()


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("pp=2", [*INTERLEAVED, *SELECTIVE]),
        pytest.param("pp=2,tp=2", [*INTERLEAVED, *SELECTIVE], marks=pytest.mark.release),
        pytest.param("dp_shard=2", [*COMPILED, *SELECTIVE], marks=pytest.mark.release),
        pytest.param("pp=2", ZBV, marks=pytest.mark.release),
    ],
)
def test_documents_by_a_kernel_are_those_by_a_mask(layout, options):
    result = trained(proxy_of(layout, [*options, *MASKED]), prepare=as_on_gpus)
    assert result.agrees, result


@pytest.mark.release
@pytest.mark.parametrize("layout", ["dp_shard=2,pp=2", "dp_shard=2,cp=2,tp=2"])
@pytest.mark.parametrize("options", [ZBV, EVERY_TIME])
def test_bfloat16_weights_with_float32_reduction_are_near(layout, options):
    result = trained(
        proxy_of(
            layout, options if "pp" in layout else EVERY_TIME, mixed_precision_param="bfloat16"
        )
    )
    assert 1e-4 < result.gradient < 5e-2, result
    assert result.loss < 5e-3, result


def count_chunks(trainer):
    """Fail unless the four collectives of each block are cut in forward, and some in backward,
    whose matmuls hide others. Half of them in float8, where some take less time whole, and of
    experts, whose two are no collectives beside a matmul.
    """
    cut = chunking.cut_into_chunks
    halves = trainer.config.float8.enable or trainer.layout.model.n_experts
    least = iter([8, 2] if halves else [16, 4])

    def counted(graph, chunks, chosen):
        found = cut(graph, chunks, chosen)
        assert found >= next(least, 0)
        return found

    chunking.cut_into_chunks = counted


def in_chunks(folder, *options, chunks=4):
    """A run whose collectives of tensor parallelism are cut, and how it differs from one float32
    process.
    """
    machine = folder / "slow.toml"  # so slow that launches do not matter
    link = "{ bandwidth = 1e-3, latency = 1e-3 }"
    lines = [
        f"intra_node = {link}",
        f"inter_node = {link}",
        "tflops = { float32 = 1e-5 }",
        "memory = 8",
        "memory_bandwidth = 1",
    ]
    machine.write_text("\n".join(lines) + "\n")
    keys = [
        f"--compile.tensor_parallel_chunks={chunks}",
        f"--compile.machine={machine}",
        *COMPILED,
        *FULL,
        *AT_ONCE,
        *options,
    ]
    proxy = proxy_of("tp=2", [*keys, "--parallelism.tensor_parallel_degree=2"])
    return trained(proxy, prepare=count_chunks if chunks > 1 else None)


# SELECTIVE saves what is reduced
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        (FIRST_FAMILY, SELECTIVE),
        pytest.param(FIRST_FAMILY, NOTHING, marks=pytest.mark.release),
        pytest.param("qwen3_moe", SELECTIVE, marks=pytest.mark.release),
    ],
)
def test_tokens_in_chunks_are_the_run_of_one_process(family, options, tmp_path):
    result = in_chunks(tmp_path, *named(family), *options)
    assert result.agrees, result


@pytest.mark.release
def test_tokens_in_float8_chunks_are_the_run_without_chunks(tmp_path):
    assert in_chunks(tmp_path, "--float8.enable") == in_chunks(
        tmp_path, "--float8.enable", chunks=1
    )
