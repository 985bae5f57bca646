"""A model whose shape stands in the recipe: trained, refused with another one, exported, gone on
from, and asked for text.
"""

import json

import torch
from commands import train
from tiny import DEBUG, DEBUG_TOKENIZER, NO_VALIDATION, SHORT, steps

from titan_lite.checkpoint.weights import open_weights
from titan_lite.config.families import ModelConfig
from titan_lite.tools import convert
from titan_lite.tools import generate as generate_command

RECIPE = """
extends = "{debug}"
[model]
flavor = ""
dim = 96
n_layers = 2
n_heads = 6
n_kv_heads = 2
hidden_dim = 100
vocab_size = 2048
max_seq_len = 64
tokenizer_path = "{tokenizer}"
"""
OPTIONS = [
    *SHORT,
    *NO_VALIDATION,
    "--training.global_batch_size=4",
    "--lr_scheduler.warmup_steps=0",
]


def test_a_shape_in_a_recipe_from_training_to_text(tmp_path, capsys):
    recipe, run, exported = tmp_path / "own.toml", tmp_path / "run", tmp_path / "exported"
    recipe.write_text(RECIPE.format(debug=DEBUG, tokenizer=DEBUG_TOKENIZER))
    result = train(2, recipe, run, *OPTIONS, *steps(1))
    assert result.returncode == 0
    assert (
        "model: llama3 custom with dim = 96, n_layers = 2, n_heads = 6, n_kv_heads = 2,"
        " hidden_dim = 100" in result.stdout
    )
    model = ModelConfig(
        dim=96, n_layers=2, n_heads=6, n_kv_heads=2, hidden_dim=100, vocab_size=2048, max_seq_len=64
    )
    assert open_weights(run).config == model

    result = train(1, recipe, run, *OPTIONS, *steps(2), "--model.n_layers=3")
    assert result.returncode == 2
    assert (
        "it cannot resume: the model's n_layers ([model]): 3, was 2; use the old value, or"
        in result.stdout
    )

    assert convert.main([str(run), str(exported)]) == 0
    assert open_weights(exported).config == model
    assert json.loads((exported / "config.json").read_text())["max_position_embeddings"] == 64
    capsys.readouterr()
    texts = []
    for folder in (run, exported):
        assert (
            generate_command.main(
                [str(folder), "--prompt", "import ", "--max-new-tokens", "8", "--device", "cpu"]
            )
            == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert generate_command.main([str(run), "--max-new-tokens", "64", "--device", "cpu"]) == 2
    assert "use at most 64, the model's max_seq_len" in capsys.readouterr().err

    result = train(
        1,
        recipe,
        tmp_path / "other",
        *OPTIONS,
        *steps(1),
        f"--checkpoint.initial_load_path={exported}",
    )
    assert result.returncode == 0
    assert f"weights from {exported}, a Hugging Face folder" in result.stdout
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert torch.equal(theirs.model.norm.weight, open_weights(run).read("norm.weight"))
