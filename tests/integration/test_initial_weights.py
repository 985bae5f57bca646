"""Weights of transformers into a run on any layout, and a run's out to transformers: the same
losses as theirs.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from commands import train
from in_transformers import in_ours
from pages import ALL, blocks
from tiny import DEBUG, DEBUG_TOKENIZER, OF_FAMILY, SHORT, every, steps

from titan_lite.checkpoint.weights import open_weights
from titan_lite.config import ConfigError, load_config
from titan_lite.config.families import FAMILIES
from titan_lite.data.loader import build_loader
from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.data.tokenizer_json import to_json
from titan_lite.distributed.layout import Layout
from titan_lite.metrics.writer import read_metrics
from titan_lite.models.huggingface import config_to_hf
from titan_lite.models.loss import IGNORE_INDEX
from titan_lite.rules.machine import check_machine
from titan_lite.tools import convert
from titan_lite.tools import generate as generate_command

OPTIONS = [
    *SHORT,
    *steps(1, schedule=100),
    *every(50, validated=1),
    "--lr_scheduler.warmup_steps=0",
    "--training.seq_len=64",
]
OPTIONS += ["--training.global_batch_size=4", "--optimizer.lr=5e-4"]


def saved_by_transformers(path, family, tied=False):
    """A model of a debug flavor's shape as transformers makes and saves it, in several files."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    shape = replace(FAMILIES[family].flavors["debug"], tied_embeddings=tied)
    config = transformers.AutoConfig.for_model(**config_to_hf(shape, torch.float32))
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path, max_shard_size="10MB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_by_transformers(tmp_path_factory.mktemp("theirs"), "llama3")


OF_EACH = [
    pytest.param(family, marks=() if family == "qwen3_moe" else pytest.mark.slow)
    for family in OF_FAMILY
]


@pytest.fixture(scope="module", params=OF_EACH)
def family_and_folder(request, tmp_path_factory):
    return request.param, saved_by_transformers(tmp_path_factory.mktemp("theirs"), request.param)


def batches_of(config, split="train"):
    """Yield the global batches of a recipe with 4 sequences of 64 tokens."""
    return build_loader(
        config.data.replace(num_workers=0),
        load_tokenizer(config.model.tokenizer_path),
        split=split,
        streams=4,
        batch_size=4,
        seq_len=64,
        dp_rank=0,
        dp_degree=1,
        seed=config.debug.seed,
    )


@torch.no_grad()
def their_losses(folder, config=None):
    """Return the losses of transformers on the first global batch of training and of validation."""
    import transformers

    config = config or load_config(DEBUG, OPTIONS)
    model, losses = transformers.AutoModelForCausalLM.from_pretrained(folder), []
    for split in ("train", "validation"):
        batch = next(batches_of(config, split))
        logits = model(batch.input).logits
        losses.append(
            float(
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch.label.flatten(), ignore_index=IGNORE_INDEX
                )
            )
        )
    return losses


def test_a_run_goes_on_from_transformers_weights_and_transformers_from_the_runs(
    family_and_folder, tmp_path, capsys
):
    family, folder = family_and_folder
    run = tmp_path / "run"
    options = [f"--model.name={family}", f"--checkpoint.initial_load_path={folder}"]
    result = train(2, DEBUG, run, *OPTIONS, *options)
    assert result.returncode == 0
    assert f"weights from {folder}, a Hugging Face folder in float32" in result.stdout
    metrics = read_metrics(run / "metrics.jsonl")
    assert [metrics[1]["loss"], metrics[0]["validation_loss"]] == pytest.approx(
        their_losses(folder), rel=1e-5
    )
    assert metrics[1]["validation_loss"] < metrics[0]["validation_loss"] - 1e-3

    assert convert.main([str(run), str(tmp_path / "exported")]) == 0
    assert metrics[1]["validation_loss"] == pytest.approx(
        their_losses(tmp_path / "exported")[1], rel=1e-5
    )
    # The recipe's tokenizer went along.
    import transformers

    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "exported"),
        load_tokenizer(DEBUG_TOKENIZER),
    )
    assert theirs("import os")["input_ids"] == ours.encode("import os", bos=True)
    assert (
        json.loads((tmp_path / "exported/generation_config.json").read_text())["eos_token_id"]
        == ours.eos_id
    )
    capsys.readouterr()
    texts = []
    for checkpoint in (run, run / "checkpoint/step-1", tmp_path / "exported"):
        arguments = [
            str(checkpoint),
            "--prompt",
            "import ",
            "--max-new-tokens",
            "8",
            "--device",
            "cpu",
        ]
        assert generate_command.main(arguments) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("import ")
    assert texts == texts[:1] * 3


def test_a_recipe_of_the_pages_goes_on_from_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    (block,) = (part for part in blocks(ALL, "toml") if "Llama-3.1-8B" in part)
    recipe = tmp_path / "train_configs/mine.toml"
    recipe.parent.mkdir()
    recipe.write_text(f'extends = "{DEBUG}"\n{block}')
    weights = tmp_path / "Llama-3.1-8B"
    # shape, rotary settings and norm of no flavor
    theirs = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2048,
        max_position_embeddings=512,
        rms_norm_eps=1e-3,
        initializer_range=0.2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 20_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 16,
        },
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(theirs).save_pretrained(weights)
    tokenizer = weights / "tokenizer.json"
    tokenizer.write_text(json.dumps(to_json(load_tokenizer(DEBUG_TOKENIZER))))
    (tmp_path / "books").mkdir()
    lines = [
        json.dumps({"text": f"Chapter {n}. It was the best of times. " * 9}) for n in range(99)
    ]
    (tmp_path / "books/one.jsonl").write_text("\n".join(lines))

    run = tmp_path / "run"
    result = train(2, recipe, run, *OPTIONS)
    assert result.returncode == 0
    metrics = read_metrics(run / "metrics.jsonl")
    config = load_config(recipe, OPTIONS)
    assert config.model.tokenizer_path == str(tokenizer)
    assert [metrics[1]["loss"], metrics[0]["validation_loss"]] == pytest.approx(
        their_losses(weights, config), rel=1e-5
    )
    # What is resolved is in config.toml, with which the run goes on.
    assert load_config(run / "config.toml").model == config.model
    more = train(2, run / "config.toml", run, *OPTIONS, *steps(2))
    assert more.returncode == 0
    assert "has no effect: the run resumes from its own step-1" in more.stdout
    assert "weights from" not in more.stdout
    assert convert.main([str(run), str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported/tokenizer.json").read_text() == tokenizer.read_text()
    exported = transformers.AutoConfig.from_pretrained(tmp_path / "exported")
    assert exported.rope_parameters == theirs.rope_parameters
    assert exported.rms_norm_eps == 1e-3


def ten_steps_of_transformers(folder, config):
    """Train by a plain loop; return (the loss of each step, the model)."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=config.optimizer.lr,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
    )
    losses = []
    for batch, _ in zip(batches_of(config), range(10), strict=False):
        logits = model(batch.input).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, batch.label.flatten(), ignore_index=IGNORE_INDEX)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("llama3", False),
        ("qwen3", True),
        ("qwen3_moe", False),
        pytest.param("llama3", True, marks=pytest.mark.release),
        pytest.param("qwen3", False, marks=pytest.mark.release),
    ],
)
def test_ten_steps_are_those_of_a_plain_loop_with_transformers(family, tied, tmp_path):
    folder = saved_by_transformers(tmp_path / "theirs", family, tied)
    options = [
        *OPTIONS,
        *steps(10),
        "--validation.no-enable",
        "--lr_scheduler.decay_begin=",
        "--lr_scheduler.decay_length=0",
        # AdamW divides by the gradient's size, and so makes rounding of the smallest gradients large
        "--optimizer.eps=1e-5",
        "--optimizer.lr=1e-3",
        f"--model.name={family}",
        *(["--experts.balance=none"] if family == "qwen3_moe" else []),
        f"--model.tied_embeddings={'yes' if tied else 'no'}",
        f"--checkpoint.initial_load_path={folder}",
    ]
    assert train(2, DEBUG, tmp_path / "run", *options).returncode == 0
    metrics = read_metrics(tmp_path / "run/metrics.jsonl")
    losses, model = ten_steps_of_transformers(folder, load_config(DEBUG, options))
    assert losses[9] < losses[0] - 0.3
    assert [metrics[step]["loss"] for step in range(1, 11)] == pytest.approx(losses, rel=1e-5)
    ours = open_weights(tmp_path / "run")
    theirs = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for fqn, expected in in_ours(theirs, ours.config).items():
        difference = ours.read(fqn) - expected
        assert difference.norm() < 1e-5 * expected.norm(), fqn


def test_weights_that_do_not_fit_are_told_before_anything_starts(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 4096}))
    options = ["--model.vocab_size=4096", f"--checkpoint.initial_load_path={copy}"]
    recipe = load_config(DEBUG, ["--job.dump_folder", str(tmp_path / "run"), *options])
    words = (
        r"2 things do not fit:\n  model.embed_tokens.weight is \[2048, 256\], where \[4096, 256\]"
    )
    with pytest.raises(ConfigError, match=words):
        check_machine(recipe, Layout.from_config(recipe, 2))
    assert not (tmp_path / "run").exists()
