"""Runs of a model with tied embeddings in a pipeline: one tensor in checkpoints, a copy that is equal
to the bit, and the losses of a run without a pipeline.
"""

import pytest
import torch
from ranks import run_ranks
from resumed import OPTIONS, copy_at_step_2, losses
from tiny import AOT_EAGER, DEBUG, steps

from titan_lite.checkpoint.tensor_files import read_metadata
from titan_lite.config import load_config
from titan_lite.distributed.param_collectives import started_last
from titan_lite.dtensor import local
from titan_lite.hooks import Hook
from titan_lite.trainer import Trainer

SHAPE = ["--model.tied_embeddings=yes", "--model.dim=64", "--model.hidden_dim=96"]
PIPELINE = ["--parallelism.pipeline_parallel_degree=2"]
ZBV = [*PIPELINE, "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"]
DDP = ["--parallelism.data_parallel_replicate_degree=2"]
POWERSGD = ["--parallelism.replicate_compression=powersgd", "--parallelism.replicate_rank=4"]
POWERSGD += ["--parallelism.replicate_uncompressed_steps=1"]
LAYOUTS = {"one": (1, []), "1F1B": (2, PIPELINE), "ZBV": (2, ZBV)}  # (ranks, options)
TABLE = "tok_embeddings.weight"


class SpoilGradient(Hook):
    """Make a gradient of the second step infinite, so that the step is skipped."""

    def on_gradients(self, step, parameters):
        if step == 2 and "norm.weight" in parameters:
            local(parameters["norm.weight"].grad)[0] = float("inf")


def trained(folder, options, hooks=()):
    """Return what a rank has at the end: names of saved tensors, the shard of the table and that of
    its copy, None if the rank lacks it, and what the watchdog could name that it sent or received.
    """
    arguments = ["--job.dump_folder", str(folder), *OPTIONS, *SHAPE, *options]
    trainer = Trainer(load_config(DEBUG, arguments), hooks=[hook() for hook in hooks])
    trainer.train()
    tied = trainer.model.tied_table
    table, copy = (
        None if parameter is None else local(parameter.detach()).clone()
        for parameter in (trainer.parameters.get(TABLE), tied.copy)
    )
    group = tied.group.group_name
    transfers = [fqn for _, other, fqn in started_last if other == group]
    return [*trainer.tensors()], table, copy, transfers


def train(folder, ranks, *options, count=4, hooks=()):
    """Return the results of all ranks, and [loss, validation loss] by step."""
    return (
        run_ranks(ranks, trained, folder, [*steps(count), *options], hooks, init=False),
        losses(folder),
    )


def assert_copied(first, last):
    """Assert that a rank of the last stage has the shard of a rank of the first one."""
    _, table, *_ = first
    names, _, copy, _ = last
    assert table is not None
    assert torch.equal(table, copy)
    assert first is last or not any("tok_embeddings" in name for name in names)
    assert not any("output" in name for name in names)


CASES = {  # (options of the pipeline, options of both runs)
    "1F1B": (PIPELINE, []),
    "ZBV": (ZBV, []),
    "Muon": (PIPELINE, ["--optimizer.name=Muon"]),
    "compiled": ([*PIPELINE, *AOT_EAGER], []),
    "float8": (PIPELINE, ["--float8.enable", "--float8.all_gather"]),
}
# sequences of a microbatch of the pipeline: a scale of float8 is of a microbatch
ONE_BY_ONE = ["--training.local_batch_size=1"]


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.release] * (name != "1F1B")) for name in CASES]
)
def test_a_skipped_step_leaves_both_tables_as_they_were(case, tmp_path):
    pipeline, options = CASES[case]
    hooks = (SpoilGradient,)
    (first, last), found = train(tmp_path / "pipeline", 2, *options, *pipeline, hooks=hooks)
    assert_copied(first, first if case == "ZBV" else last)
    # the initial table, then a gradient and a table in each of four steps
    for *_, transfers in (first, last):
        assert transfers == ([] if case == "ZBV" else [TABLE] * 9)
    _, expected = train(tmp_path / "one", 1, *options, *ONE_BY_ONE, hooks=hooks)
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-5)
    _, other = train(tmp_path / "not skipped", 1, *options, *ONE_BY_ONE)
    assert other[3] != pytest.approx(expected[3], rel=1e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Runs of four steps, every second one saved: one process, and a pipeline."""
    folders = {}
    for name, (ranks, options) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name)
        folders[name] = folder, train(folder, ranks, *options)[1]
    return folders


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "ranks", "options"),
    [
        ("one", 2, PIPELINE),
        ("1F1B", 1, []),
        ("1F1B", 2, PIPELINE),
        ("1F1B", 4, PIPELINE),
        ("ZBV", 2, [*PIPELINE, "--checkpoint.async_mode=async"]),
        ("one", 2, ZBV),
    ],
    ids=["onto 1F1B", "onto one", "1F1B again", "onto more shards", "V to 1F1B", "onto V"],
)
def test_a_checkpoint_has_one_table_for_every_layout(before, ranks, options, saved, tmp_path):
    folder, expected = saved[before]
    stored = read_metadata(folder / "checkpoint/step-2").state_dict_metadata
    assert TABLE in stored
    assert f"optimizer.state.{TABLE}.exp_avg" in stored
    assert not any("output" in name for name in stored)

    copy_at_step_2(folder, tmp_path)
    results, found = train(tmp_path, ranks, *options)
    for step in (3, 4):
        assert found[step] == pytest.approx(expected[step], rel=1e-5)
    if ranks > 1:
        half = ranks // 2
        assert_copied(results[0], results[0 if options == ZBV else half])


@pytest.mark.release
def test_compressed_sums_over_replicas_are_those_without_a_pipeline(tmp_path):
    """Each replica's gradients of both stages are added up, and compressed as one."""
    options = [*DDP, *POWERSGD, "--training.compare_replicas_freq=1"]
    results, found = train(tmp_path / "pipeline", 4, *options, *PIPELINE)
    for replica in (0, 1):
        assert_copied(results[replica], results[2 + replica])
    assert any(name == f"between.{TABLE}.error" for name in results[0][0])
    one, expected = train(tmp_path / "one", 2, *options)
    assert {*one[0][0]} == {*results[0][0], *results[2][0]}
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-4)
