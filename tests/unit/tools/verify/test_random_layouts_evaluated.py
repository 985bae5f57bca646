"""Random legal layouts agree when their graphs are evaluated for all ranks."""

import math
import random

import pytest
from tiny import RECIPES

from titan_lite.config import ConfigError, load_config
from titan_lite.distributed.layout import DEGREES, Layout
from titan_lite.tools.verify import command
from titan_lite.tools.verify.check import check_layout

MOST_RANKS = 32
DRAWN = 20  # layouts of the test for a release
IN_DEFAULT_SUITE = 1  # the seed of one with few ranks
SIZES = [
    "--model.n_heads=24",
    "--model.n_kv_heads=24",
    "--model.head_dim=8",
    "--training.seq_len=1152",
    "--training.local_batch_size=4",
    "--training.global_batch_size=-1",
]
CHOICES = {
    "activation_checkpoint.mode": ("none", "selective", "full"),
    "activation_checkpoint.selective_ac_option": ("op", "1", "2", "op/2"),
    "compile.bucketing": ("none", "block", "greedy"),
    "compile.tensor_parallel_chunks": (1, 2),
    "parallelism.fsdp_communication": ("step", "microbatch"),
    "parallelism.fsdp_reshard_after_forward": ("default", "always", "never"),
    "parallelism.pipeline_parallel_schedule": ("1F1B", "GPipe", "ZBVZeroBubble"),
    "training.loss_chunk_tokens": (-1, 0, 100),
    "model.tied_embeddings": ("yes", "no"),
    "model.vocab_size": (2048, 2050),
    "model.hidden_dim": (96, 100),
}


def drawn_layout(generator):
    """Return (recipe, ranks, options), which may be illegal."""
    recipe = generator.choice(["debug_model", "qwen3_moe_debug"])
    degrees = {axis: generator.choice([1, 1, 2, 3, 4, 8]) for axis in DEGREES}
    degrees["pp"] = generator.choice([1, 1, 2])
    ranks = math.prod(degrees.values())
    options = [f"--parallelism.{key}={degrees[axis]}" for axis, key in DEGREES.items()]
    if recipe == "qwen3_moe_debug":
        options.append(f"--parallelism.expert_parallel_degree={generator.choice([1, 2, 4, 8])}")
    options += [f"--{key}={generator.choice(values)}" for key, values in CHOICES.items()]
    options.append(generator.choice(["--training.mask_documents", "--training.no-mask_documents"]))
    return recipe, ranks, [*SIZES, "--compile.enable", *options]


def legal_layout(seed):
    """Return the first legal layout of a seed: its config, its layout and its options."""
    generator = random.Random(seed)
    while True:
        recipe, ranks, options = drawn_layout(generator)
        if not 1 < ranks <= MOST_RANKS:
            continue
        try:
            config = load_config(RECIPES / f"{recipe}.toml", options)
            return config, Layout.from_config(config, ranks), [recipe, *options]
        except ConfigError:
            continue


@pytest.mark.parametrize(
    "seed",
    [
        seed if seed == IN_DEFAULT_SUITE else pytest.param(seed, marks=pytest.mark.release)
        for seed in range(DRAWN)
    ],
)
def test_a_random_legal_layout_agrees(seed):
    config, layout, options = legal_layout(seed)
    verdict = check_layout(config, layout)
    assert verdict.differences == [], " ".join(options)
    assert verdict.error < 1e-9


@pytest.mark.release
@pytest.mark.ranks(8)
@pytest.mark.parametrize("seed", range(DRAWN // 2))
def test_processes_agree_with_the_evaluation_of_a_random_legal_layout(seed):
    """Both say of the same layouts that they are right: the evaluation in the test above.

    Two steps: with tied embeddings the gradient's norm is 20, and rounding grows a hundredfold in
    five.
    """
    _, layout, (recipe, *options) = legal_layout(seed)
    command_line = [str(RECIPES / f"{recipe}.toml"), "--world-size", str(layout.world_size)]
    assert command.main([*command_line, "--processes", "--steps=2", *options]) == 0
