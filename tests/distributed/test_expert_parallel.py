"""Expert parallelism on every layout is the run of one process: losses, gradients, choices.

Matmuls leave NaN in the rows that are of no expert, so a result that reads one is found. What
passes do to its collectives is seen in the compile report.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from poisoned import poisoned
from ranks import run_ranks
from tiny import DEBUG, DEBUG_TOKENIZER, NO_VALIDATION, SMALL, steps

from titan_lite.config import load_config
from titan_lite.dtensor import local
from titan_lite.hooks import Hook
from titan_lite.models.experts import experts_of
from titan_lite.models.fqns import is_of_experts
from titan_lite.models.shapes import shape_of
from titan_lite.tools.verify.compare import compare
from titan_lite.tools.verify.observe import run
from titan_lite.tools.verify.proxy import parse_layout, proxy, proxy_model, reference
from titan_lite.trainer import Trainer

pytestmark = pytest.mark.ranks(2)
STEPS = 3
COMPILED = ["--compile.enable"]
FULL = ["--activation_checkpoint.mode=full"]
SELECTIVE = ["--activation_checkpoint.mode=selective"]
EVERY_TIME = ["--parallelism.fsdp_communication=microbatch"]
MASKED = ["--training.mask_documents"]


def schedule(name):
    return [f"--parallelism.pipeline_parallel_schedule={name}"]


DEFAULT = ("dp_shard=2,ep=2", SELECTIVE)
SLOW = [
    ("tp=2,ep=2", [*COMPILED, *FULL]),
    ("cp=2,ep=2", [*MASKED, *FULL]),
    ("dp_shard=2,pp=2,ep=2", [*schedule("ZBVZeroBubble"), *COMPILED]),
]
RELEASE = [  # compiled layouts are evaluated, in tests/unit/tools/verify
    ("dp_replicate=2,dp_shard=2,ep=2", []),
    ("dp_shard=2,cp=2,tp=2,ep=4", []),
    ("pp=2,tp=2,ep=2", FULL),
    ("dp_shard=8,ep=4", FULL),
    ("dp_shard=2,pp=2,ep=2", [*schedule("GPipe"), *EVERY_TIME]),
    ("dp_shard=2,pp=2,ep=2", [*schedule("InterleavedZeroBubble"), *COMPILED, *FULL]),
    ("dp_shard=2,pp=2,ep=2", [*schedule("DualPipeV"), *EVERY_TIME]),
]


def proxy_of(layout, *options):
    keys = ["--model.name=qwen3_moe", f"--model.tokenizer_path={DEBUG_TOKENIZER}", *options]
    return proxy(load_config(DEBUG, keys), parse_layout(layout), STEPS)


@functools.cache
def alone(*options):
    kept = [key for key in options if "mask_documents" in key or key.startswith("--experts")]
    config = reference(proxy_of("dp_shard=1", "--training.global_batch_size=-1", *kept))
    return run(config, proxy_model(shape_of(config.model), 4))


class HasItsExperts(Hook):
    """Fails unless a rank has its experts alone."""

    def on_train_end(self, trainer):
        layout = trainer.layout
        assert layout.expert_parallel > 1
        for stage in trainer.model.stages:
            for experts in experts_of(stage.model).values():
                assert len(experts.own) == 8 // layout.expert_parallel
        for fqn, parameter in trainer.parameters.items():
            if is_of_experts(parameter.shape):
                assert local(parameter).shape[0] == 8 // layout.expert_ranks, fqn


def poison(trainer):
    """Grouped GEMMs leave NaN in the rows past the last end, as kernels may."""
    F.grouped_mm = poisoned(F.grouped_mm)
    trainer.hooks.append(HasItsExperts())


CASES = [
    DEFAULT,
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    *(pytest.param(*case, marks=pytest.mark.release) for case in RELEASE),
]


@pytest.mark.parametrize(("layout", "options"), CASES)
def test_expert_parallelism_is_the_run_of_one_process(layout, options):
    config = proxy_of(layout, *options)
    found = run(config, proxy_model(shape_of(config.model), 4), prepare=poison)
    result = compare(found, alone(*options))
    assert result.agrees, result
    assert result.loss < 1e-5, result
    assert result.flips == 0, result


@pytest.mark.release
def test_expert_parallelism_compiled_by_inductor_is_the_run_of_one_process():
    config = proxy_of("dp_shard=2,tp=2,ep=2", *COMPILED, *EVERY_TIME)
    config = config.replace(compile=config.compile.replace(backend="inductor"))
    found = run(config, proxy_model(shape_of(config.model), 4), prepare=poison)
    result = compare(found, alone())
    assert result.agrees, result


@pytest.mark.release
@pytest.mark.parametrize("options", [[], ["--optimizer.name=Muon"]])
def test_experts_of_a_rank_that_its_shards_do_not_divide(options):
    """Four experts of each half over three ranks: 2, 2 and none."""
    config = proxy_of("dp_shard=6,ep=2", *options)
    model = proxy_model(shape_of(config.model), 4)
    result = compare(run(config, model), run(reference(config), model))
    assert result.agrees, result


def all_to_one(trainer):
    """Every token chooses experts 0 and 1 in all layers."""
    for stage in trainer.model.stages:
        for block in stage.model.layers.values():
            block.moe.router.expert_bias += torch.tensor([5.0, 5.0, *[0.0] * 6])


def poison_and_all_to_one(trainer):
    poison(trainer)
    all_to_one(trainer)


@pytest.mark.slow
def test_a_rank_without_a_token_takes_part():
    config = proxy_of("dp_shard=2,ep=2")
    model = proxy_model(shape_of(config.model), 4)
    expected = run(reference(config), model, prepare=all_to_one)
    result = compare(run(config, model, prepare=poison_and_all_to_one), expected)
    assert result.agrees, result
    gradient = expected.gradients["layers.0.moe.experts.w1"]
    assert gradient[:2].any()
    assert not gradient[2:].any()


# Reports


MOE = [*SMALL, "--model.name=qwen3_moe", *NO_VALIDATION, *steps(1)]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data_parallel_shard", "tensor_parallel"])
def test_reports_name_its_collectives(axis, tmp_path):
    """Also where tensor parallelism has the same ranks."""
    options = [
        *MOE,
        f"--parallelism.{axis}_degree=2",
        "--parallelism.expert_parallel_degree=2",
        "--parallelism.fsdp_communication=microbatch",
        "--compile.enable",
        "--compile.backend=aot_eager",
        "--compile.machine=H100",
    ]
    lanes = run_ranks(2, groups_of_graphs, tmp_path, options, init=False)[0]
    other = "dp_shard" if axis == "data_parallel_shard" else "tp"
    for graph in ("forward", "backward"):
        # gathers and scatters of each of two layers: tokens, weights, choices
        assert lanes[graph].count("ep") == (2 * 4 if graph == "forward" else 2 * 3), lanes
        assert other in lanes[graph]


def groups_of_graphs(folder, options):
    """The axis of each collective, by graph."""
    config = load_config(DEBUG, ["--job.dump_folder", str(folder), *options])
    trainer = Trainer(config)
    trainer.train()
    return {
        report.graph: [span.group for span in report.timeline.spans if span.group]
        for report in trainer.model.compile_reports
    }
