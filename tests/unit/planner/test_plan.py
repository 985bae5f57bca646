"""The command: what is wrong is one sentence, and the shipped recipes fit the clusters they are for."""

import json
from pathlib import Path

import pytest

from titan_lite.plan import main, world_size_of

RECIPES = Path(__file__).parents[3] / "train_configs"
EIGHT = str(RECIPES / "llama3_8b.toml")
SHIPPED = sorted(path.stem for path in RECIPES.glob("llama3_*.toml"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hardware", "h101"], ["--hardware h101", "H100", ".toml"]),
        (["--hardware", "mine.toml"], ["mine.toml", "no such file"]),
        (["--world-size", "0"], ["--world-size 0", "8 would work"]),
        (["--world-size", "6", "--set", "parallelism.tensor_parallel_degree=4"], ["tp 4", "6 ranks", "start 8 ranks"]),
        (["--set", "parallelism.tensor_parallel_degree=3", "--world-size", "9"], ["tensor_parallel_degree = 3", "8 would work"]),
        (["--set", "training.seq_length=1"], ["training.seq_length", "did you mean training.seq_len"]),
        (["--set", "training.seq_len"], ["training.seq_len", "no value"]),
        (["--set", "model.flavor=7B"], ['model.flavor = "7B"', "8B"]),
        (["--set", "compile.bucketing=measured"], ["compile.bucketing", "measured", "greedy"]),
        (
            ["--set", "parallelism.tensor_parallel_degree=2", "--set", "parallelism.enable_async_tensor_parallel=true"],
            ["enable_async_tensor_parallel", "not planned"],
        ),
        (["--tokens", "many"], ["--tokens", "many"]),
        (["--world-size", "many"], ["--world-size", "many"]),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, words, capsys):
    try:
        code = main([EIGHT, *arguments])
    except SystemExit as exit:
        code = exit.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_a_recipe_that_is_not_there_or_says_no_world_size(tmp_path, capsys):
    assert main([str(tmp_path / "none.toml")]) == 2
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "{EIGHT}"\n')
    assert main([str(path)]) == 2
    assert "--world-size 8" in capsys.readouterr().err


def test_no_tokenizer_and_no_data_are_looked_at(capsys):
    """The shipped tokenizer path has no file; a recipe of a mistake that comes later than it is found."""
    assert not Path(RECIPES / "../assets/tokenizer/llama3/tokenizer.model").exists()
    assert main([EIGHT, "--set", "training.seq_len=200000"]) == 2
    assert "training.seq_len = 200000" in capsys.readouterr().err


def test_a_small_recipe_is_planned(capsys):
    """For two ranks; as JSON."""
    overrides = ["--set", "activation_checkpoint.mode=none", "--set", "model.flavor=debug", "--world-size", "2"]
    assert main([EIGHT, *overrides, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["tokens_per_step"] == 2 * 2 * 8192
    seconds = plan["step_seconds"]
    assert seconds["fast"] < seconds["stated"] < seconds["slow"]
    assert sum(plan["parts_seconds"].values()) == pytest.approx(seconds["stated"])
    memory = plan["memory"]
    assert memory["fits"]
    assert memory["peak"] == pytest.approx(sum(memory["rows"].values()))
    assert plan["mfu"]["stated"] < plan["hfu"]["stated"] < 1  # FlashAttention computes its scores again


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_shipped_recipe_fits_the_cluster_it_is_for(recipe, capsys):
    assert main([str(RECIPES / f"{recipe}.toml"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["world_size"] == world_size_of(RECIPES / f"{recipe}.toml")
    assert plan["memory"]["fits"], plan["memory"]
