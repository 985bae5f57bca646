"""Numbers of a recipe on a number of ranks: the batch of a step, chunks of the loss, shapes."""

import math

import pytest
import torch
from tiny import DEBUG, RECIPES

from titan_lite.config import ConfigError, load_config
from titan_lite.distributed.layout import Layout, least_state_bytes
from titan_lite.distributed.pipeline import keep_modules
from titan_lite.models.fqns import parameters_within
from titan_lite.models.shapes import parameter_shapes
from titan_lite.models.transformer import Transformer


def layout(*options, ranks=2):
    return Layout.from_config(load_config(DEBUG, options), ranks)


def test_a_step_has_the_local_batches_of_its_sequences():
    found = layout("--training.global_batch_size=16")
    assert (found.accumulation, found.sequences_per_step, found.tokens) == (4, 16, 16 * 256)


def test_a_batch_that_ranks_cannot_share_is_named_with_those_next_to_it():
    with pytest.raises(ConfigError) as error:
        layout("--training.global_batch_size=10")
    assert str(error.value) == (
        "training.global_batch_size = 10 is not a multiple of training.local_batch_size x"
        " data-parallel degree = 2 x 2 = 4; use 8 or 12"
    )


@pytest.mark.parametrize(
    ("recipe", "ranks", "options", "chunk"),
    [
        ("debug_model", 2, "", 0),
        ("debug_model", 2, "--training.loss_chunk_tokens=-1", 0),
        ("debug_model", 2, "--training.loss_chunk_tokens=32", 32),  # of 2 x 256 tokens: 16 chunks
        ("debug_model", 2, "--training.loss_chunk_tokens=511", 511),
        (
            "llama3_8b",
            8,
            "--training.local_batch_size=1",
            1024,
        ),  # 12 bytes x 128,256 x 1,024 tokens are 1.47 GiB
        ("llama3_8b", 8, "", 2048),  # at most 8 chunks
        ("llama3_8b", 8, "--training.loss_chunk_tokens=-1", 0),
        (
            "llama3_8b",
            8,
            "--parallelism.tensor_parallel_degree=2 --training.local_batch_size=2",
            2048,
        ),
        ("llama3_8b", 8, "--parallelism.tensor_parallel_degree=8 --training.local_batch_size=1", 0),
        ("llama3_8b", 8, "--training.loss_chunk_tokens=1024", 1024),
    ],
)
def test_tokens_of_a_chunk_of_the_loss(recipe, ranks, options, chunk):
    found = Layout.from_config(load_config(RECIPES / f"{recipe}.toml", options.split()), ranks)
    assert found.loss_chunk == chunk


@pytest.mark.parametrize("options", [[], ["--model.tied_embeddings=yes"], ["--model.n_heads=2"]])
def test_the_shapes_without_torch_are_those_of_the_model(options):
    options = [*options, "--model.n_kv_heads=2"]
    model = Layout.from_config(load_config(DEBUG, options), 2).model
    with torch.device("meta"):
        transformer = Transformer(model)
    expected = {fqn: tuple(p.shape) for fqn, p in transformer.named_parameters()}
    assert list(parameter_shapes(model).items()) == list(expected.items())
    for modules in (["output"], ["layers.1.attention", "norm"], ["layers.1"], ["layers"], ["wq"]):
        assert {*parameter_shapes(model, modules)} == {*parameters_within(transformer, modules)}


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("tied", ["yes", "no"])
def test_a_pipeline_rank_has_the_parameters_of_its_stages_and_perhaps_a_copy(schedule, tied):
    options = [
        f"--model.tied_embeddings={tied}",
        "--model.n_layers=7",
        "--parallelism.pipeline_parallel_degree=2",
        f"--parallelism.pipeline_parallel_schedule={schedule}",
    ]
    found = Layout.from_config(load_config(DEBUG, options), 2)
    copies = []
    totals = []
    for rank in range(2):
        shapes = {}
        for stage in found.pipeline.stages_of(rank):
            with torch.device("meta"):
                transformer = Transformer(found.model)
            keep_modules(transformer, found.pipeline.modules[stage])
            shapes |= {fqn: tuple(p.shape) for fqn, p in transformer.named_parameters()}
        totals.append(sum(map(math.prod, shapes.values())))
        copies.append(0)
        if tied == "yes" and "output.weight" in shapes:
            copies[rank] = math.prod(shapes.pop("output.weight"))
        assert found.shapes_on(rank) == shapes
        assert found.copied_on(rank) == copies[rank]
    largest = totals.index(max(totals))
    assert found.parameters_of_rank + found.copied_of_rank == totals[largest]
    assert found.copied_of_rank == copies[largest]
    assert any(copies) == found.copies_table == (tied == "yes")
    assert found.sends_table == (tied == "yes" and schedule != "ZBVZeroBubble")
    names = [fqn for rank in range(2) for fqn in found.shapes_on(rank)]
    assert sorted(names) == sorted(parameter_shapes(found.model))


def layout_on(recipe, ranks, gib, *options):
    config = load_config(RECIPES / f"{recipe}.toml", options)
    return Layout.from_config(config, ranks, device_memory=gib * 2**30)


@pytest.mark.parametrize(
    ("gib", "options", "once"),
    [
        # 8.03e9 parameters on 8 ranks: 16 bytes of each in shards, 15 GiB, and 8 gathered, 60 GiB
        (80, (), False),
        (141, (), True),
        (80, ("--parallelism.fsdp_communication=step",), True),
        (141, ("--parallelism.fsdp_communication=microbatch",), False),
        (141, ("--compile.bucketing=greedy",), False),
        (141, ("--parallelism.fsdp_reshard_after_forward=always",), False),
        (141, ("--training.global_batch_size=8",), False),
    ],
)
def test_weights_are_gathered_once_a_step_where_that_fits(gib, options, once):
    accumulates = [
        "--training.local_batch_size=1",
        "--training.global_batch_size=32",
        "--compile.bucketing=block",
    ]
    found = layout_on("llama3_8b", 8, gib, *accumulates, *options)
    assert found.gathers_once == once


def test_the_parameters_of_a_rank_are_those_of_the_stages_with_most():
    found = layout_on(
        "llama3_8b",
        8,
        80,
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.tensor_parallel_degree=2",
    )
    halves = (
        32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) / 2 + 4096 * 128_256
    )  # and norms
    assert found.parameters_of_rank == pytest.approx(halves / 2, rel=1e-2)
    assert found.own_parameters == found.parameters_of_rank / 2
    assert found.gathered_bytes == 8 * found.parameters_of_rank


@pytest.mark.parametrize(("optimizer", "tensors"), [("AdamW", 4), ("Lion", 3), ("Muon", 3)])
def test_what_a_rank_keeps_has_the_moments_of_its_optimizer(optimizer, tensors):
    options = [f"--optimizer.name={optimizer}", "--model.tied_embeddings=yes"]
    options += ["--model.n_layers=7", "--parallelism.pipeline_parallel_degree=2"]
    config = load_config(DEBUG, options)
    found = Layout.from_config(config, 4)
    assert found.copied_of_rank == 2048 * 256  # the table that the last stage has again
    own = (found.parameters_of_rank + found.copied_of_rank) / 2
    assert least_state_bytes(config, found) == 4 * tensors * own
