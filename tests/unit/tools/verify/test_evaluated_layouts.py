"""Right layouts agree when their graphs are evaluated for all ranks."""

import pytest
from tiny import DEBUG_TOKENIZER, RECIPES, ROOT

from titan_lite.config import ConfigError, load_config
from titan_lite.distributed import tensor_parallel
from titan_lite.distributed.layout import AXES, Layout
from titan_lite.tools.verify import command
from titan_lite.tools.verify.check import check_layout
from titan_lite.tools.verify.proxy import KEYS
from titan_lite.tools.verify.ranks import Ranks
from titan_lite.tools.verify.small import small_recipe
from titan_lite.tools.verify.variants import fitted

ALWAYS = "--parallelism.fsdp_reshard_after_forward=always"


def degrees(**keys):
    """Options for a recipe: the degrees by axis, 1 for others."""
    return [f"--parallelism.{key}={keys.get(axis, 1)}" for axis, key in KEYS.items()]


def checked(recipe, world_size, *options):
    config = load_config(RECIPES / f"{recipe}.toml", options)
    return check_layout(config, Layout.from_config(config, world_size))


@pytest.mark.parametrize(
    ("recipe", "world_size", "options"),
    [
        ("llama3_8b", 6, degrees(dp_shard=6)),  # uneven shards, a loss in chunks
        ("llama3_8b", 4, [*degrees(cp=2, tp=2), "--training.mask_documents"]),
        # backward gathers the output's weight again, or not: as sizes have it
        ("debug_model", 2, [*degrees(dp_shard=2), ALWAYS, "--training.loss_chunk_tokens=100"]),
        (
            "debug_model",
            4,
            [
                *degrees(dp_shard=2, pp=2),
                "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
                "--training.global_batch_size=16",
            ],
        ),
        pytest.param(  # buckets by cost, where some groups of tp are on two nodes of 8
            "debug_model",
            24,
            [
                *degrees(dp_replicate=4, dp_shard=2, tp=3),
                "--compile.enable",
                "--compile.bucketing=greedy",
                "--model.n_heads=6",
                "--model.n_kv_heads=3",
                "--training.seq_len=384",
                "--training.global_batch_size=-1",
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(  # empty shards from rank (2, 3) on
            "debug_model",
            16,
            [*degrees(dp_shard=4, cp=4), "--model.hidden_dim=100"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama3_8b", 8, degrees(dp_replicate=2, dp_shard=2, tp=2), marks=pytest.mark.slow
        ),
        pytest.param(
            "qwen3_moe_debug",
            8,
            [*degrees(dp_shard=4, tp=2, ep=4), "--experts.balance=sequence"],
            marks=pytest.mark.slow,
        ),
        pytest.param(  # 2 ranks of experts are no part of 3 of tp
            "qwen3_moe_debug",
            6,
            [
                *degrees(dp_shard=2, tp=3, ep=2),
                "--model.n_heads=6",
                "--model.n_kv_heads=3",
                "--training.seq_len=384",
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_right_layout_agrees(recipe, world_size, options):
    verdict = checked(recipe, world_size, *options)
    assert verdict.differences == []
    assert 0 < verdict.error < 1e-9
    assert verdict.ranks == world_size


def test_a_rank_has_several_sequences_on_any_number_of_ranks():
    """One alone would hide that tokens of sequences are mixed up."""
    config = load_config(RECIPES / "llama3_8b.toml")
    few, many = (small_recipe(config, Layout.from_config(config, ranks)) for ranks in (8, 512))
    assert few.layout.microbatch_size == many.layout.microbatch_size == 2
    assert few.layout.seq_len == 2 * many.layout.seq_len


def own_family(file, *changes, options=()):
    """The verdict on a changed family of a user's own with tensor parallelism."""
    text = (ROOT / "tests/own_families/gated.py").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    names = [f"--model.name={file}", f"--model.tokenizer_path={DEBUG_TOKENIZER}"]
    return checked("debug_model", 2, *names, *degrees(tp=2), *options)


def test_a_family_may_compute_the_width_of_a_head(tmp_path):
    change = ("config.head_dim", "(config.dim // config.n_heads)")
    assert own_family(tmp_path / "own.py", change).differences == []


@pytest.mark.parametrize("communication", ["step", "microbatch"])
def test_a_weight_that_nothing_reads_has_no_gradient_on_any_rank(communication, tmp_path):
    change = ("torch.sigmoid(self.gate(x))", "1")
    option = f"--parallelism.fsdp_communication={communication}"
    assert own_family(tmp_path / "own.py", change, options=[option]).differences == []


@pytest.mark.parametrize(
    "change",
    [
        ("q, k, v = (w(x)", "q, k, v = (w(x.unflatten(-1, (64, -1)).flatten(-2))"),
        (
            "        super().__init__()\n",
            "        super().__init__()\n        1 / (config.dim // 64)\n",
        ),
    ],
    ids=["forward", "constructor"],
)
def test_a_family_that_cannot_be_small_is_told_with_the_sizes(change, tmp_path):
    words = "at the small sizes that verify evaluates .dim 32, .* it fails in one process: "
    with pytest.raises(ConfigError, match=words):
        own_family(tmp_path / "own.py", change)


def test_a_layout_whose_graphs_cannot_be_made_differs(monkeypatch):
    def wrong(*arguments):
        raise RuntimeError("no such shape")

    monkeypatch.setattr(tensor_parallel, "all_gather_tokens", wrong)
    verdict = checked("debug_model", 2, *degrees(tp=2))
    assert verdict.differences == ["its graphs cannot be made: no such shape"]


@pytest.mark.parametrize(
    ("table", "coordinate", "constant"),
    [
        ({0: 10, 1: 13}, 3, 19),  # on a line
        ({0: 10, 1: 13, 4: 13}, 3, 13),  # in steps: as the sample before
        ({1: 13, 2: 20, 4: 13}, 0, 13),  # before all samples: as the first one
    ],
)
def test_a_constant_is_fitted_between_samples(table, coordinate, constant):
    assert fitted(table, coordinate) == constant


@pytest.mark.parametrize(
    ("degrees", "ep", "axes", "sizes", "straddled"),
    [
        (dict(dp_shard=2, tp=8), 4, ("dp_shard", "tp", "tp'"), (2, 2, 4), False),
        (dict(dp_shard=4, cp=2), 4, ("dp_shard", "dp_shard'", "cp"), (2, 2, 2), False),
        (dict(dp_shard=2, tp=3), 2, ("dp_shard", "tp"), (2, 3), True),
        (dict(cp=4, tp=3), 4, ("cp", "tp"), (4, 3), True),
    ],
)
def test_expert_parallelism_has_a_part_of_an_axis_or_straddles_it(
    degrees, ep, axes, sizes, straddled
):
    ranks = Ranks.of({**dict.fromkeys(AXES, 1), **degrees}, ep)
    assert (ranks.axes, ranks.sizes) == (axes, sizes)
    assert ranks.are_straddled(ep) == straddled


# Those that CI has the time for; others wait for a release.
IN_CI = {
    "debug_model",
    "llama3_1b",
    "llama3_3b",
    "llama3_8b",
    "qwen3_0.6b",
    "qwen3_8b",
    "qwen3_30b_a3b",
    "qwen3_moe_debug",
}


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(
            path.stem, marks=pytest.mark.slow if path.stem in IN_CI else pytest.mark.release
        )
        for path in sorted(RECIPES.glob("*.toml"))
    ],
)
def test_a_shipped_recipe_agrees_at_its_own_number_of_ranks(recipe, capsys):
    assert command.main([str(RECIPES / f"{recipe}.toml")]) == 0
    assert "equal to one process" in capsys.readouterr().out
