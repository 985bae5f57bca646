"""Text from a checkpoint: the memory changes no logits, sampling follows its options, the command
says what is wrong.
"""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from in_transformers import in_files
from json_tokenizers import bpe, byte_level, save, unigram, word_level, word_piece
from safetensors.torch import load_file, save_file
from tiny import OF_FAMILY, of_family

from titan_lite import manifest
from titan_lite.checkpoint.weights import open_weights
from titan_lite.config.families import ModelConfig, RopeScaling
from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.models.decoder import Sampling, decoding
from titan_lite.models.huggingface import config_to_hf
from titan_lite.models.transformer import Transformer
from titan_lite.tools import convert
from titan_lite.tools import generate as command
from titan_lite.tools.convert import write_step
from titan_lite.tools.generate import build_model, generate, prompt_as_read, text_of

TOKENIZER = Path(__file__).parents[3] / "assets/tokenizer/debug.model"
LIKELIEST = Sampling(temperature=0)
TINY = ModelConfig(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=2048, max_seq_len=512
)
SCALED = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16)


def model_of(config):
    model = Transformer(config)
    model.init_weights(seed=3)
    return model


def decoder_of(weights, max_tokens):
    return decoding(
        build_model(weights, max_tokens, torch.device("cpu"), torch.float32), max_tokens
    )


def save_hf(folder, config):
    model = model_of(config)
    save_file(in_files(model, config), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_to_hf(config, torch.float32)))


DEFAULT = [("llama3", False), ("qwen3_moe", True)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((family, tied), marks=() if (family, tied) in DEFAULT else pytest.mark.slow)
        for family in OF_FAMILY
        for tied in (False, True)
    ],
    ids=lambda param: f"{param[0]}, {'tied' if param[1] else 'untied'}",
)
def folder(request, tmp_path_factory):
    """A Hugging Face folder with a tokenizer of ours."""
    path = tmp_path_factory.mktemp("hf")
    family, tied = request.param
    shape = dataclasses.replace(TINY, tied_embeddings=tied, rope_scaling=SCALED)
    save_hf(path, of_family(family, shape))
    shutil.copyfile(TOKENIZER, path / "tokenizer.model")
    return path


whatever_the_model = pytest.mark.parametrize("folder", [("llama3", False)], indirect=True)


# The memory


@pytest.mark.parametrize(
    "chunks", [[23], [1] * 23, [7, 1, 1, 9, 5]], ids=["at once", "one by one", "in chunks"]
)
@torch.no_grad()
def test_logits_are_those_without_a_memory(folder, chunks):
    tokens = torch.randint(0, 2048, (2, 23), generator=torch.Generator().manual_seed(0))
    whole = model_of(dataclasses.replace(open_weights(folder).config, max_seq_len=32))(tokens)
    done = 0
    with decoder_of(open_weights(folder), 32) as decoder:
        for chunk in chunks:
            found = decoder(tokens[:, done : done + chunk])[:, 0]
            done += chunk
            torch.testing.assert_close(found, whole[:, done - 1], rtol=1e-4, atol=1e-5)


# Sampling

LOGITS = torch.tensor([0.5, 0.1, 0.2, 0.15, 0.05]).log()


def drawn(**options):
    """Tokens among 2,000 draws, and the share of each."""
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(**{"temperature": 1.0, "top_p": 1.0, **options})
    tokens = [sampling.draw(LOGITS, generator) for _ in range(2000)]
    return {token: tokens.count(token) / len(tokens) for token in sorted(set(tokens))}


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, {0: 0.5, 1: 0.1, 2: 0.2, 3: 0.15, 4: 0.05}),
        ({"top_k": 2}, {0: 5 / 7, 2: 2 / 7}),
        ({"top_p": 0.6}, {0: 5 / 7, 2: 2 / 7}),
        ({"top_p": 1e-9}, {0: 1.0}),
        ({"top_p": 0.8, "top_k": 2}, {0: 5 / 7, 2: 2 / 7}),
        ({"temperature": 0}, {0: 1.0}),
        ({"temperature": 0.5}, {0: 0.769, 1: 0.031, 2: 0.123, 3: 0.069, 4: 0.008}),
    ],
)
def test_tokens_are_drawn_as_the_options_say(options, shares):
    found = drawn(**options)
    assert found.keys() == shares.keys()
    assert found == pytest.approx(shares, abs=0.04)


class Scripted:
    """A decoder that wants these tokens, one after the other."""

    def __init__(self, tokens):
        self.device, self.tokens, self.seen = torch.device("cpu"), iter(tokens), []

    def __call__(self, tokens):
        self.seen += tokens[0].tolist()
        return torch.nn.functional.one_hot(torch.tensor([[next(self.tokens)]]), 2048) * 100.0


def test_it_ends_with_the_text_or_when_enough_was_drawn():
    options = dict(vocab_size=2048, sampling=LIKELIEST)
    decoder = Scripted([7, 8, 2000, 9])
    assert list(generate(decoder, [1, 2], max_new_tokens=9, stop={2000, 5}, **options)) == [
        7,
        8,
        2000,
    ]
    assert decoder.seen == [1, 2, 7, 8]  # each token once
    assert list(
        generate(Scripted([7, 8, 2000, 9]), [1, 2], max_new_tokens=2, stop={2000}, **options)
    ) == [7, 8]


def test_a_token_that_the_tokenizer_does_not_have_is_never_drawn():
    options = dict(max_new_tokens=1, stop=(), vocab_size=2000, sampling=Sampling(temperature=1.0))
    (token,) = generate(Scripted([2047]), [1], **options)
    assert token < 2000


EMOJI = [3 + byte for byte in "\U0001f600".encode()]  # tokens of its bytes, in `bpe`
NO_CHARACTER = 3 + 0xFF


@pytest.mark.parametrize("prompt", ["", "the cat", "the cat ", "the cat  ", "the \u20ac"])
@pytest.mark.parametrize(
    "kind",
    [unigram(byte_fallback=True), unigram(), word_level(), word_piece(), bpe(), byte_level()],
)
def test_text_is_the_end_of_the_whole_text_after_the_prompt(prompt, kind, tmp_path):
    tokenizer = load_tokenizer(save(kind, tmp_path))
    continuations = ["the cat", "sat", " sat", "s </s> the", "the \u20ac \U0001f600the", " "]
    for tokens in map(tokenizer.encode, continuations):
        before = tokenizer.encode(prompt)
        pieces = list(text_of(tokens, tokenizer, before))
        start, whole = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
        assert start + "".join(pieces) == whole
        assert all("\ufffd" not in piece or "\ufffd" in whole for piece in pieces)


def test_after_a_byte_that_is_no_character_the_text_goes_on(tmp_path):
    """Whatever the bytes of a run are, decoding all of it shows none of its characters."""
    tokenizer = load_tokenizer(save(bpe(), tmp_path))
    the = tokenizer.encode("the")
    assert tokenizer.decode([*EMOJI, NO_CHARACTER]) == "\ufffd" * 5
    tokens = [*the, *EMOJI, NO_CHARACTER, *the, *EMOJI[:2]]
    pieces = list(text_of(tokens, tokenizer, tokenizer.encode("\u20ac")))
    assert "".join(pieces) == " the\U0001f600\ufffd the\ufffd\ufffd"
    # many in a row, and a character whose first bytes are in the token before
    read = load_tokenizer(TOKENIZER)
    tokens = [*read.encode("a")[:1], *[255] * 5, *read.encode("\u00fc\U0001f600z")]
    assert "".join(text_of(tokens, read, [])) == read.decode(tokens)


@pytest.mark.parametrize(
    ("prompt", "kind", "expected"),
    [
        ("the cat", unigram(), "the cat sat"),
        ("the cat", word_level(), "the cat sat"),
        ("the cat ", word_level(), "the cat sat"),  # spaces that the tokenizer has left out
        ("the cat\n", unigram(byte_fallback=True), "the cat\n sat"),
        ("", unigram(), "sat"),
    ],
)
def test_the_prompt_is_continued_as_the_model_read_it(prompt, kind, expected, tmp_path):
    tokenizer = load_tokenizer(save(kind, tmp_path))
    tokens = tokenizer.encode(prompt)
    text = "".join(text_of(tokenizer.encode("sat"), tokenizer, tokens))
    assert prompt_as_read(prompt, tokens, tokenizer) + text == expected


# The command


@whatever_the_model
def test_the_text_alone_is_on_standard_output(folder, capsys):
    arguments = [str(folder), "--prompt", "def main(", "--max-new-tokens", "5", "--device", "cpu"]
    assert command.main(arguments) == 0
    first = capsys.readouterr()
    assert first.out.startswith("def main(")
    assert len(first.out) > len("def main(\n")
    assert "a Hugging Face folder; cpu, float32" in first.err
    assert "5 tokens" in first.err
    assert command.main(arguments) == 0
    assert capsys.readouterr().out == first.out
    assert command.main([*arguments, "--seed", "1"]) == 0
    assert capsys.readouterr().out != first.out


def save_step(path, folder, tokenizer, number=1):
    """As a run that had this tokenizer."""
    write_step(path, open_weights(folder))
    state = json.loads((path / "state.json").read_text())
    state["identity"]["recipe"] = {"model": {"tokenizer_path": str(tokenizer)}}
    state["identity"]["tokenizer"] = load_tokenizer(tokenizer).sha256
    (path / "state.json").write_text(json.dumps(state))
    files = {
        file.name: manifest.digest(file) for file in path.iterdir() if file.name != manifest.NAME
    }
    manifest.write(path, number, files)


@whatever_the_model
def test_of_a_run_the_newest_step_speaks_through_its_recipes_tokenizer(folder, tmp_path, capsys):
    named = shutil.copyfile(TOKENIZER, tmp_path / "a.tokenizer")
    for number in (2, 10):
        save_step(tmp_path / f"checkpoint/step-{number}", folder, named, number)
    assert (
        command.main(
            [str(tmp_path), "--max-new-tokens", "3", "--device", "cpu", "--dtype", "bfloat16"]
        )
        == 0
    )
    assert (
        f"{tmp_path}/checkpoint/step-10, a checkpoint of titan_lite; cpu, bfloat16"
        in capsys.readouterr().err
    )


@whatever_the_model
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["HF", "--max-new-tokens", "0"], "--max-new-tokens 0: expected 1 or more"),
        (
            ["HF", "--max-new-tokens", "600"],
            "601 tokens together; use at most 512, the model's max_seq_len",
        ),
        (["HF", "--temperature", "-1"], "--temperature -1.0: expected 0 or more"),
        (["HF", "--top-p", "0"], "--top-p 0.0: expected above 0, at most 1"),
        (["HF", "--top-k", "-3"], "--top-k -3: expected 0 or more"),
        (["HF", "--seed", "-1"], "--seed -1: expected 0 or more"),
        (
            ["HF", "--device", "meta"],
            "--device meta: Cannot copy out of meta tensor; no data!; use cpu",
        ),
        (["HF", "--tokenizer", "nowhere"], '--tokenizer "nowhere": cannot be read'),
        (["BARE"], "has no tokenizer that can be read; use --tokenizer FILE"),
    ],
)
def test_what_is_wrong_is_one_line(folder, options, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "tokenizer.model").unlink()
    (bare / "special_tokens_map.json").write_text("{}")
    names = {"HF": str(folder), "BARE": str(bare)}
    with pytest.raises(SystemExit) as left:  # by argparse, too
        sys.exit(command.main([names.get(option, option) for option in options]))
    assert left.value.code == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert not captured.out


def test_weights_that_are_no_numbers_are_named(tmp_path, capsys):
    save_hf(tmp_path, TINY)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copyfile(TOKENIZER, tmp_path / "tokenizer.model")
    assert command.main([str(tmp_path), "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == (
        "error: there is no next token, since weights are NaN or infinite:"
        " layers.1.feed_forward.w3.weight; use another checkpoint"
    )
    assert "\0" not in captured.out


@pytest.mark.parametrize(
    ("hidden_dim", "dtype", "said"),
    [
        (
            12,
            "bfloat16",
            "12 is not a multiple of 8, as grouped GEMMs of experts in bfloat16 need it; use --dtype float32",
        ),
        (
            30,
            "float32",
            "30 is not a multiple of 4, as grouped GEMMs of experts in float32 need it; use another model",
        ),
    ],
)
def test_experts_that_no_kernel_takes_are_refused(hidden_dim, dtype, said, tmp_path, capsys):
    save_hf(tmp_path, dataclasses.replace(of_family("qwen3_moe", TINY), hidden_dim=hidden_dim))
    shutil.copyfile(TOKENIZER, tmp_path / "tokenizer.model")
    assert command.main([str(tmp_path), "--dtype", dtype, "--device", "cpu"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: model.hidden_dim = {said}"


@whatever_the_model
def test_a_tokenizer_that_is_not_the_runs_is_refused(folder, tmp_path, capsys):
    mine, other = tmp_path / "mine.model", tmp_path / "other.model"
    shutil.copyfile(TOKENIZER, mine)
    lines = TOKENIZER.read_bytes().splitlines()
    (first, _), (second, _) = lines[-2].split(), lines[-1].split()
    other.write_bytes(
        b"\n".join([*lines[:-2], second + b" 1790", first + b" 1791"])
    )  # as many tokens, and two change places
    save_step(tmp_path / "step", folder, mine)
    run, out = str(tmp_path / "step"), str(tmp_path / "out")
    wrong = (
        f"error: tokenizer {other} has SHA-256 {load_tokenizer(other).sha256[:12]}, and {run} was"
        " trained with "
    )
    for main, arguments in ((command.main, [run, "--device", "cpu"]), (convert.main, [run, out])):
        assert main([*arguments, "--tokenizer", str(other)]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(wrong)
    other.replace(mine)  # the recipe's has become another
    for main, arguments in ((command.main, [run, "--device", "cpu"]), (convert.main, [run, out])):
        assert main(arguments) == 2
        assert f"error: tokenizer {mine} has SHA-256 " in capsys.readouterr().err
        assert not Path(out).exists()
    assert convert.main([run, out, "--tokenizer", str(TOKENIZER)]) == 0
    assert (Path(out) / "tokenizer.model").read_bytes() == TOKENIZER.read_bytes()
