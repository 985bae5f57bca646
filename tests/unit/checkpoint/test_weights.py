"""Weights from every kind of folder to every other: bit for bit, and all that does not fit told at
once.
"""

import dataclasses
import json
import os
import re
import shutil
import weakref
from pathlib import Path

import pytest
import tokenizers
import torch
import torch.distributed as dist
from checkpoints import Given, flip
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tokenizers import processors

from titan_lite import manifest
from titan_lite.checkpoint import weights as weights_module
from titan_lite.checkpoint.run_identity import RunIdentity
from titan_lite.checkpoint.state import RunState, write_state
from titan_lite.checkpoint.weights import (
    CheckpointFolder,
    HuggingFaceFolder,
    load,
    load_initial,
    open_weights,
    shapes,
)
from titan_lite.config import ConfigError
from titan_lite.config.errors import MachineError
from titan_lite.config.families import LLAMA3, ModelConfig, RopeScaling
from titan_lite.config.from_weights import read_model
from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.models.transformer import Transformer
from titan_lite.tools import convert
from titan_lite.tools.convert import write_hf, write_step

TOKENIZER = Path(__file__).parents[3] / "assets/tokenizer/debug.model"
TINY = ModelConfig(
    dim=48, n_layers=2, n_heads=6, n_kv_heads=2, hidden_dim=64, vocab_size=320, max_seq_len=8192
)
TIED = dataclasses.replace(
    TINY, tied_embeddings=True, rope_scaling=RopeScaling(factor=8.0), max_seq_len=131_072
)


def model_of(config):
    model = Transformer(dataclasses.replace(config, max_seq_len=32)).to(torch.bfloat16)
    model.init_weights(seed=1)
    return model


def given(config):
    return Given(config, dict(model_of(config).named_parameters()), special_tokens=(64, 65))


UNTIED_ONLY = pytest.mark.parametrize(
    "config", [TINY], indirect=True, ids=["untied"], scope="module"
)
TIED_ONLY = pytest.mark.parametrize("config", [TIED], indirect=True, ids=["tied"], scope="module")


@pytest.fixture(
    scope="module",
    params=[TINY, TIED],
    ids=lambda shape: "tied" if shape.tied_embeddings else "untied",
)
def config(request):
    return request.param


@pytest.fixture(scope="module")
def expected(config):
    return dict(model_of(config).named_parameters())


@pytest.fixture(scope="module")
def step(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("step") / "initial"
    write_step(path, given(config))
    return path


@pytest.fixture(scope="module")
def folder(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "exported"
    write_hf(path, given(config), shard_bytes=40e3)
    return path


def same(weights, config, expected):
    assert weights.config == config
    assert weights.dtypes == dict.fromkeys(expected, torch.bfloat16)
    assert all(torch.equal(weights.read(fqn), tensor) for fqn, tensor in expected.items())


def tensors_of(folder):
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


# From one kind to the other


def test_a_step_has_what_was_imported(step, config, expected):
    weights = open_weights(step, every_byte=True)
    assert isinstance(weights, CheckpointFolder)
    same(weights, config, expected)
    files = {f"__0_{number}.distcp" for number in range(len(shapes(config)))}
    small = {".metadata", "manifest.json", "state.json"}
    assert {path.name for path in step.iterdir()} == files | small
    assert weights.special_tokens == {"bos_token_id": 64, "eos_token_id": 65}


def test_a_hugging_face_folder_has_it_in_files_of_the_size_asked_for(folder, config, expected):
    weights = open_weights(folder)
    assert isinstance(weights, HuggingFaceFolder)
    same(weights, config, expected)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 1
    assert all(sum(t.nbytes for t in load_file(folder / name).values()) <= 40e3 for name in files)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert index["weight_map"].keys() == tensors_of(folder).keys()


def test_exported_again_it_is_the_same_to_the_bit(folder, tmp_path):
    write_step(tmp_path / "step", open_weights(folder))
    write_hf(tmp_path / "again", open_weights(tmp_path / "step"), shard_bytes=40e3)
    assert {path.name for path in folder.iterdir()} == {
        path.name for path in (tmp_path / "again").iterdir()
    }
    for path in folder.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


@torch.no_grad()
def test_transformers_opens_what_is_exported_and_what_it_saves_comes_back_to_the_bit(
    folder, config, tmp_path
):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype is torch.bfloat16
    tokens = torch.randint(
        0, config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0)
    )
    model = Transformer(dataclasses.replace(config, max_seq_len=24))
    load(open_weights(folder), dict(model.named_parameters()))
    torch.testing.assert_close(model(tokens), theirs.float()(tokens).logits, rtol=1e-4, atol=1e-4)

    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    write_step(tmp_path / "step", open_weights(tmp_path / "theirs"))
    write_hf(tmp_path / "again", open_weights(tmp_path / "step"))
    found, saved = tensors_of(tmp_path / "again"), tensors_of(tmp_path / "theirs")
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).float()
        for name in ("theirs", "again")
    ]
    assert torch.equal(models[0](tokens).logits, models[1](tokens).logits)


def test_who_may_read_an_exported_folder_may_read_its_weights(folder):
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


@UNTIED_ONLY
def test_another_dtype_is_rounded_to(step, expected, tmp_path):
    write_hf(tmp_path / "out", open_weights(step), torch.float16)
    weights = open_weights(tmp_path / "out")
    assert all(torch.equal(weights.read(fqn), tensor.half()) for fqn, tensor in expected.items())
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "float16"


@UNTIED_ONLY
def test_two_tensors_or_one_files_tensors_are_held_at_a_time(step, config, tmp_path, monkeypatch):
    """Most bytes that are held just after a tensor was read."""
    held, most, read = weakref.WeakSet(), 0, CheckpointFolder.read

    def reading(self, fqn):
        nonlocal most
        held.add(tensor := read(self, fqn))
        most = max(most, sum(other.nbytes for other in held))
        return tensor

    monkeypatch.setattr(CheckpointFolder, "read", reading)
    sizes = sorted(shape.numel() * 2 for shape in shapes(config).values())
    write_step(tmp_path / "step", open_weights(step))
    assert sizes[-1] <= most <= sum(sizes[-2:])

    most = 0
    write_hf(tmp_path / "hf", open_weights(step), shard_bytes=40e3)
    assert sizes[-1] <= most <= 40e3


@UNTIED_ONLY
def test_special_tokens_and_tokenizer_go_along(folder, tmp_path):
    source = shutil.copytree(folder, tmp_path / "source")
    (source / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 9], "temperature": 0.6})
    )
    (source / "tokenizer.json").write_text("{}")
    assert convert.main([str(source), str(tmp_path / "copy"), "--to", "hf"]) == 0
    assert convert.main([str(source), str(tmp_path / "step")]) == 0
    assert convert.main([str(tmp_path / "step"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "copy/tokenizer.json").read_text() == "{}"
    for name in ("copy", "out"):
        for file in ("config.json", "generation_config.json"):
            assert json.loads((tmp_path / name / file).read_text())["eos_token_id"] == [7, 9]
            assert json.loads((tmp_path / name / file).read_text())["bos_token_id"] == 64


FILES = {  # of a tokenizer in a Hugging Face folder
    "tokenizer.json": json.dumps(
        {
            "version": "1.0",
            "model": {
                "type": "BPE",
                "vocab": {"a": 0, "<s>": 1, "</s>": 2, "<unk>": 3},
                "merges": [],
                "unk_token": "<unk>",
            },
            "added_tokens": [],
        }
    ),
    "tokenizer_config.json": '{"eos_token": "a"}',
    "special_tokens_map.json": "{}",
    "chat_template.jinja": "{{ messages }}",
}


@UNTIED_ONLY
@pytest.mark.parametrize("middle", ["step", "torchtitan"])
def test_a_tokenizer_is_kept_there_and_back(folder, tmp_path, middle):
    source = shutil.copytree(folder, tmp_path / "source")
    for name, text in FILES.items():
        (source / name).write_text(text)
    there, back = tmp_path / "there", tmp_path / "back"
    assert convert.main([str(source), str(there), "--to", middle]) == 0
    assert {name: (there / name).read_text() for name in FILES} == FILES
    if middle == "step":
        assert read_model(str(there)).tokenizer == str(there / "tokenizer.json")
        assert open_weights(there, every_byte=True).config == TINY
        assert convert.main([str(there), str(back)]) == 0
    else:  # which has not the shape that convert needs
        weights = open_weights(there, model=TINY)
        write_hf(back, weights, tokenizer=convert.TokenizerFiles(weights.tokenizer_files()))
    assert {name: (back / name).read_text() for name in FILES} == FILES
    first_tensors, last_tensors = tensors_of(source), tensors_of(back)
    assert all(torch.equal(last_tensors[name], each) for name, each in first_tensors.items())


@UNTIED_ONLY
def test_a_tokenizer_that_is_named_goes_into_a_step_too(step, tmp_path):
    (tmp_path / "mine.json").write_text(FILES["tokenizer.json"])
    options = ["--to", "step", "--tokenizer", str(tmp_path / "mine.json")]
    assert convert.main([str(step), str(tmp_path / "out"), *options]) == 0
    assert (tmp_path / "out/tokenizer.json").read_text() == FILES["tokenizer.json"]
    open_weights(tmp_path / "out", every_byte=True)  # its manifest has the file


@UNTIED_ONLY
@pytest.mark.parametrize(
    ("names", "begin", "end"),
    [(("<s>", "</s>"), "<s>", "</s>"), (("<|endoftext|>", "z"), "<|endoftext|>", "<|endoftext|>")],
    ids=["two tokens", "one for both"],
)
def test_a_lone_tokenizer_json_is_exported_with_the_tokens_that_begin_and_end(
    step, tmp_path, names, begin, end
):
    path, out = tmp_path / "mine.json", tmp_path / "out"
    content = json.loads(FILES["tokenizer.json"])
    content["model"]["vocab"] = {"a": 0, names[0]: 1, names[1]: 2, "<unk>": 3}
    path.write_text(json.dumps(content))
    assert convert.main([str(step), str(out), "--tokenizer", str(path)]) == 0
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (written["bos_token"], written["eos_token"]) == (begin, end)
    assert load_tokenizer(out / "tokenizer.json").sha256 == load_tokenizer(path).sha256
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert (theirs.bos_token, theirs.eos_token) == (begin, end)
    assert theirs("aa")["input_ids"] == load_tokenizer(path).encode("aa")


ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {  # what a tokenizer.json puts around a text
    "nothing": None,
    "byte level": processors.ByteLevel(trim_offsets=False),
    "EOS": processors.TemplateProcessing("$A </s>", None, [("</s>", 2)]),
    "BOS": processors.TemplateProcessing("<s> $A", None, [("<s>", 1)]),
}


def trained_weights(step, tokenizer):
    """Return the weights of a step that a run has saved which trained with this tokenizer."""
    weights = open_weights(step)
    identity = dataclasses.replace(weights.state.identity, tokenizer=tokenizer.sha256)
    weights.state = dataclasses.replace(weights.state, identity=identity)
    return weights


NONE_ADDED = ENDS | {"add_bos_token": False}


@UNTIED_ONLY
@pytest.mark.parametrize(
    ("around", "beside"),
    [
        ("nothing", None),
        ("nothing", NONE_ADDED),
        ("byte level", ENDS),
        ("byte level", NONE_ADDED | {"add_eos_token": False}),
        ("EOS", {"bos_token": None, "eos_token": "</s>"}),
        ("EOS", ENDS | {"add_eos_token": False}),
        ("BOS", ENDS),
        ("BOS", NONE_ADDED),
    ],
)
def test_the_exported_tokenizer_begins_a_text_as_training_did(
    around, beside, step, tmp_path, caplog
):
    theirs = tokenizers.Tokenizer.from_str(FILES["tokenizer.json"])
    theirs.add_special_tokens(["<s>", "</s>", "<unk>"])
    if TEMPLATES[around] is not None:
        theirs.post_processor = TEMPLATES[around]
    path, out = tmp_path / "tokenizer.json", tmp_path / "out"
    theirs.save(str(path))
    paths = [path]
    if beside is not None:
        paths.append(tmp_path / "tokenizer_config.json")
        paths[1].write_text(json.dumps(beside))
    ours = load_tokenizer(path)
    *trained_on, end = ours.encode_document("aaa").tolist()
    assert trained_on == [1, 0, 0, 0]
    with caplog.at_level("INFO"):
        write_hf(out, trained_weights(step, ours), tokenizer=convert.TokenizerFiles(paths))
    users = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")).encode("aaa").ids
    assert users == [*trained_on, *([end] if around == "EOS" else [])]
    transformers = pytest.importorskip("transformers")
    users = transformers.AutoTokenizer.from_pretrained(out)("aaa")["input_ids"]
    assert users[: len(trained_on)] == trained_on
    assert load_tokenizer(out / "tokenizer.json").encode_document("aaa").tolist() == [
        *trained_on,
        end,
    ]
    if around != "BOS":
        assert "put <s> before a text, as training did" in caplog.text


@UNTIED_ONLY
def test_an_exported_tokenizer_that_begins_a_text_with_another_token_is_told(
    step, tmp_path, caplog
):
    theirs = tokenizers.Tokenizer.from_str(FILES["tokenizer.json"])
    theirs.add_special_tokens(["<s>", "</s>", "<unk>"])
    theirs.post_processor = processors.TemplateProcessing("<unk> $A", None, [("<unk>", 3)])
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(ENDS))
    files = [tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"]
    weights = trained_weights(step, load_tokenizer(files[0]))
    write_hf(tmp_path / "out", weights, tokenizer=convert.TokenizerFiles(files))
    assert (tmp_path / "out/tokenizer.json").read_text() == files[0].read_text()
    assert "it puts <unk> before a text, and training put <s>" in caplog.text


@UNTIED_ONLY
def test_a_tokenizer_that_is_named_must_be_understood(step, tmp_path, capsys):
    path, out = tmp_path / "mine.json", tmp_path / "out"
    path.write_text("{}")
    assert convert.main([str(step), str(out), "--tokenizer", str(path)]) == 2
    assert (
        f'error: --tokenizer "{path}": cannot be read as a tokenizer.json'
        in capsys.readouterr().err
    )
    assert os.listdir(tmp_path) == ["mine.json"]
    vocab = {"a": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    small = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>"}
    path.write_text(json.dumps({"version": "1.0", "model": small, "added_tokens": []}))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": "a"}'
    )  # which has a say in what ends a text
    assert convert.main([str(step), str(out), "--tokenizer", str(path)]) == 0
    assert (out / "tokenizer.json").read_text() == path.read_text()
    assert (out / "tokenizer_config.json").read_text() == '{"eos_token": "a"}'


@TIED_ONLY
def test_tied_weights_that_are_stored_twice_must_be_the_same(tmp_path, config):
    write_hf(tmp_path / "hf", given(config))
    path = tmp_path / "hf/model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    for copy in (embedding.clone(), embedding.float()):
        save_file(tensors | {"lm_head.weight": copy}, path)
        assert open_weights(tmp_path / "hf").dtypes.keys() == shapes(config).keys()
    for other in (embedding + 1, embedding.float() * (1 + 2**-12), embedding[1:].clone()):
        save_file(tensors | {"lm_head.weight": other}, path)
        with pytest.raises(
            ConfigError, match=r"tie_word_embeddings = true, but lm_head\.weight is not"
        ):
            open_weights(tmp_path / "hf")


@TIED_ONLY
def test_tied_weights_may_be_stored_under_the_outputs_name_alone(tmp_path, config, expected):
    write_hf(tmp_path / "hf", given(config))
    path = tmp_path / "hf/model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path)
    same(open_weights(tmp_path / "hf"), config, expected)


# What does not fit


def damaged(folder, tmp_path, change):
    copy = shutil.copytree(folder, tmp_path / "copy")
    change(copy)
    with pytest.raises(ConfigError) as error:
        open_weights(copy, "checkpoint.initial_load_path", every_byte=True)
    assert str(error.value).startswith(f'checkpoint.initial_load_path = "{copy}"')
    return str(error.value)


@UNTIED_ONLY
def test_names_and_shapes_that_do_not_fit_are_all_told_at_once(folder, tmp_path):
    def change(copy):
        for path in copy.glob("*.safetensors"):
            tensors = load_file(path)
            tensors.pop("model.layers.1.mlp.up_proj.weight", None)
            tensors.pop("model.norm.weight", None)
            if "model.layers.0.mlp.down_proj.weight" in tensors:
                tensors |= {
                    "model.layers.0.mlp.down_proj.weight": torch.zeros(3, 5),
                    "model.layers.7.bias": torch.zeros(1),
                }
            save_file(tensors, path)

    text = damaged(folder, tmp_path, change)
    assert "4 things do not fit" in text
    for line in (
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.norm.weight is missing",
        "model.layers.7.bias is unexpected",
        "model.layers.0.mlp.down_proj.weight is [3, 5], where [48, 64] is expected",
    ):
        assert f"\n  {line}" in text


def cut_short(path):
    os.truncate(path, path.stat().st_size - 100)


def first(copy, pattern):
    return sorted(copy.glob(pattern))[0]


@UNTIED_ONLY
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda copy: first(copy, "*.safetensors").unlink(),
            "model-00001-of-.* is missing, which model.safetensors.index.json",
        ),
        (lambda copy: cut_short(first(copy, "*.safetensors")), "model-00001-of-.* cannot be read"),
        (
            lambda copy: (copy / "config.json").write_text("[]"),
            "config.json is not a JSON object",
        ),
        (
            lambda copy: (copy / "model.safetensors.index.json").write_text("{}"),
            "model.safetensors.index.json has no 'weight_map'",
        ),
        *(
            (
                lambda copy, name=name: (copy / "model.safetensors.index.json").write_text(
                    json.dumps({"weight_map": {"model.norm.weight": name}})
                ),
                f"index.json has model.norm.weight in {name!r}: expected a file in the folder",
            )
            for name in ("../model.safetensors", 5)
        ),
        (
            lambda copy: save_file(
                {"model.norm.weight": torch.zeros(48, dtype=torch.int8)},
                first(copy, "*.safetensors"),
            ),
            "is missing",
        ),
    ],
)
def test_a_hugging_face_folder_that_is_not_whole(folder, tmp_path, change, words):
    assert re.search(words, damaged(folder, tmp_path, change), re.DOTALL)


@UNTIED_ONLY
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda copy: cut_short(copy / "__0_0.distcp"), "__0_0.distcp has .* bytes of"),
        (lambda copy: flip(copy / "__0_0.distcp"), "__0_0.distcp was altered"),
        (
            lambda copy: rewrite(copy, {"model": dataclasses.asdict(LLAMA3.flavors["debug"])}),
            "things do not fit",
        ),
        (
            lambda copy: rewrite(copy, {}),
            r"state.json does not say which model this is \(identity.model\)",
        ),
    ],
)
def test_a_step_that_is_not_whole(step, tmp_path, change, words):
    assert re.search(words, damaged(step, tmp_path, change))


def rewrite(step, identity):
    """Another state.json, under a manifest that fits."""
    write_state(step, 0, ["model"], RunState(RunIdentity(**identity)))
    manifest.write(
        step,
        0,
        {path.name: manifest.digest(path) for path in step.iterdir() if path.name != manifest.NAME},
    )


@UNTIED_ONLY
def test_weights_without_config_json_are_told(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "config.json").unlink()
    for read in (open_weights, lambda path: read_model(str(path))):
        with pytest.raises(ConfigError, match=r"has \*.safetensors, but not config.json, which"):
            read(copy)


def test_no_folder_of_any_kind(tmp_path):
    for path, words in ((tmp_path, "has no weights"), (tmp_path / "nowhere", "is not a folder")):
        with pytest.raises(ConfigError) as error:
            open_weights(path)
        assert words in str(error.value)
        assert "a run's folder, a checkpoint of torchtitan, or a Hugging Face folder" in str(
            error.value
        )


@UNTIED_ONLY
def test_the_newest_whole_step_of_a_run_is_taken(step, tmp_path):
    for number in (3, 10):
        shutil.copytree(step, tmp_path / f"checkpoint/step-{number}")
    shutil.copytree(step, tmp_path / "checkpoint/unfinished-step-20")
    assert open_weights(tmp_path).folder.name == "step-10"
    assert open_weights(tmp_path / "checkpoint").folder.name == "step-10"
    flip(tmp_path / "checkpoint/step-10/__0_0.distcp")
    assert open_weights(tmp_path, every_byte=True).folder.name == "step-3"
    cut_short(tmp_path / "checkpoint/step-3/__0_0.distcp")
    with pytest.raises(ConfigError, match="all of its 2 checkpoints are damaged"):
        open_weights(tmp_path, every_byte=True)


# Writing


@UNTIED_ONLY
def test_nothing_is_overwritten_and_nothing_is_left_of_a_failure(step, tmp_path, monkeypatch):
    weights = open_weights(step)
    (tmp_path / "there").mkdir()
    for write in (write_step, write_hf):
        with pytest.raises(ConfigError, match="nothing is overwritten"):
            write(tmp_path / "there", weights)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "save_file", full)
    monkeypatch.setattr(convert.manifest, "write_text", full)
    for write in (write_step, write_hf):
        with pytest.raises(MachineError, match=r"new cannot be written: .*No space left on device"):
            write(tmp_path / "new", weights)
    assert os.listdir(tmp_path) == ["there"]

    (tmp_path / "unfinished-new").mkdir()  # a person's own
    with pytest.raises(MachineError, match="No space left on device"):
        write_hf(tmp_path / "new", weights)
    assert sorted(os.listdir(tmp_path)) == ["there", "unfinished-new"]


@UNTIED_ONLY
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nowhere", "out"], "nowhere is not a folder"),
        (["STEP", "STEP"], "nothing is overwritten"),
        (["STEP", "out", "--max-shard-size", "0"], "--max-shard-size 0.0: use GB above 0"),
        (
            ["STEP", "out", "--to", "step", "--max-shard-size", "1"],
            "--max-shard-size 1.0: a checkpoint has a file for each tensor",
        ),
        (["STEP", "out", "--tokenizer", "nowhere"], "--tokenizer nowhere: no such file"),
        (
            ["STEP", "out", "--tokenizer", "STEP"],
            "no such file; use a file, or a folder with tokenizer.json or tokenizer.model",
        ),
        (["STEP", "out", "--tokenizer", "README.md"], '--tokenizer "README.md" is not in tiktoken'),
        (
            ["STEP", "out", "--tokenizer", str(TOKENIZER)],
            "debug.model has 2048 tokens, and the model 320",
        ),
    ],
)
def test_wrong_options_are_one_line(options, words, step, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text("# A model\n")
    kept = sorted(os.listdir(step))
    assert convert.main([option.replace("STEP", str(step)) for option in options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words.replace("STEP", str(step)) in line
    assert sorted(os.listdir()) == ["README.md"]
    assert sorted(os.listdir(step)) == kept


@UNTIED_ONLY
def test_two_that_write_one_folder_do_not_touch_each_others_work(
    step, expected, tmp_path, monkeypatch
):
    weights, save = open_weights(step), convert.save_file

    def save_and_be_overtaken(*arguments, **options):
        save(*arguments, **options)
        monkeypatch.setattr(convert, "save_file", save)
        write_hf(tmp_path / "new", weights)

    monkeypatch.setattr(convert, "save_file", save_and_be_overtaken)
    with pytest.raises(ConfigError, match="new cannot be written: "):
        write_hf(tmp_path / "new", weights)
    assert os.listdir(tmp_path) == ["new"]
    assert all(
        torch.equal(open_weights(tmp_path / "new").read(fqn), tensor)
        for fqn, tensor in expected.items()
    )


# Into a run


def initial_weights(paths, run_folder):
    """For every (path of rank 0, path of rank 1), each called by its last part, what this rank then
    has, or says.
    """
    found = []
    for by_rank in paths:
        own = by_rank[dist.get_rank()]
        os.chdir(own.parent)
        parameters = {fqn: torch.zeros(shape) for fqn, shape in shapes(TINY).items()}
        try:
            load_initial(own.name, TINY, parameters, run_folder)
            found.append(parameters)
        except ConfigError as error:
            found.append(str(error))
    return found


@UNTIED_ONLY
def test_all_ranks_start_from_the_same_weights_or_none_does(step, folder, expected, tmp_path):
    damaged = shutil.copytree(step, tmp_path / "damaged")
    flip(damaged / "__0_0.distcp")  # which the second rank compares
    run, later = tmp_path / "run", tmp_path / "later"
    shutil.copytree(step, run / "step-1")
    shutil.copytree(step, later / "step-2")  # the run, a moment later
    copies, others = (
        [tmp_path / node / path.name for path in (step, folder)] for node in ("copy", "other")
    )
    for path, copy in zip((step, folder), copies, strict=True):
        shutil.copytree(path, copy)
    changed = given(TINY)
    changed.tensors = {fqn: each + 1 for fqn, each in changed.tensors.items()}
    others[0].parent.mkdir()
    write_step(others[0], changed)
    write_hf(others[1], changed, shard_bytes=40e3)
    pairs = [(step, copies[0]), (folder, copies[1]), (damaged, damaged), (run, later)]
    pairs += [(step, others[0]), (folder, others[1])]
    for loaded, exported, altered, differing, *refused in run_ranks(
        2, initial_weights, pairs, tmp_path / "mine"
    ):
        assert all(torch.equal(loaded[fqn], tensor.float()) for fqn, tensor in expected.items())
        assert all(torch.equal(exported[fqn], tensor.float()) for fqn, tensor in expected.items())
        assert (
            "damaged: __0_0.distcp was altered: its SHA-256 is not the one in manifest.json"
            in altered
        )
        assert "rank 1 finds other weights in later/step-2 than rank 0 in run/step-1" in differing
        for path, said in zip((step, folder), refused, strict=True):
            assert said == (
                f'checkpoint.initial_load_path = "{path.name}": rank 1 finds other weights in'
                f" {path.name} than rank 0 in {path.name}; use the same files on all nodes, and one"
                " checkpoint of a run"
            )


def started(path, run_folder):
    """Return the first number of the weights that a run begins with, or what it says."""
    parameters = {fqn: torch.zeros(shape) for fqn, shape in shapes(TINY).items()}
    try:
        load_initial(str(path), TINY, parameters, run_folder)
    except ConfigError as error:
        return str(error)
    return float(parameters["norm.weight"][0])


@UNTIED_ONLY
def test_a_run_that_starts_again_begins_from_the_step_of_its_first_start(
    tmp_path, config, monkeypatch
):
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(weights_module, "all_equal", lambda text: True)
    pretraining = tmp_path / "pretraining/checkpoint"
    for number in (1, 2):
        weights = given(config)
        weights.tensors = {fqn: each + number for fqn, each in weights.tensors.items()}
        write_step(pretraining / f"step-{number}", weights)
        if number == 1:
            first = started(tmp_path / "pretraining", tmp_path / "run")
            assert first == 2.0
    assert started(tmp_path / "pretraining", tmp_path / "run") == first
    assert started(tmp_path / "pretraining", tmp_path / "another run") == 3.0
    assert started(pretraining / "step-2", tmp_path / "run") == 3.0  # which the user names
    shutil.rmtree(pretraining / "step-1")
    refused = started(tmp_path / "pretraining", tmp_path / "run")
    assert refused == (
        f'checkpoint.initial_load_path = "{tmp_path}/pretraining": this run has begun from'
        f" {pretraining}/step-1, which is not there any more; remove {tmp_path}/run/"
        "initial_step.json to begin from the newest checkpoint"
    )
    (tmp_path / "run/initial_step.json").write_text("{}")
    assert "initial_step.json has no 'initial_load_path'; remove that file" in started(
        tmp_path / "pretraining", tmp_path / "run"
    )


# Rounding


def changed(folder, tmp_path, name, change):
    """Return a copy of a Hugging Face folder, in float32, of which a tensor is changed."""
    copy = shutil.copytree(folder, tmp_path / "changed")
    for path in copy.glob("*.safetensors"):
        tensors = {key: tensor.float() for key, tensor in load_file(path).items()}
        if name in tensors:
            change(tensors[name])
        save_file(tensors, path)
    return copy


@UNTIED_ONLY
@pytest.mark.parametrize("target", ["hf", "step"])
def test_a_dtype_that_has_not_the_numbers_is_refused(folder, tmp_path, capsys, target):
    name = "model.layers.1.mlp.up_proj.weight"
    source = changed(folder, tmp_path, name, lambda tensor: tensor[:2, 0].fill_(-1e5))
    convert_to = ["--to", target, "--dtype"]
    assert convert.main([str(source), str(tmp_path / "out"), *convert_to, "float16"]) == 2
    assert (
        "error: --dtype float16: layers.1.feed_forward.w3.weight: 2 of 3,072 numbers are above its"
        " largest, 65504; use --dtype bfloat16"
    ) in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["changed"]  # nothing half-written
    assert convert.main([str(source), str(tmp_path / "out"), *convert_to, "bfloat16"]) == 0


@UNTIED_ONLY
def test_an_overflow_of_bfloat16_names_the_dtype_that_has_the_number(folder, tmp_path, capsys):
    source = changed(folder, tmp_path, "model.norm.weight", lambda tensor: tensor.fill_(3.4e38))
    assert convert.main([str(source), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 2
    assert "use --dtype float32" in capsys.readouterr().err


@UNTIED_ONLY
def test_numbers_that_are_none_are_told(folder, tmp_path, capsys):
    def change(tensor):
        tensor[0] = float("nan")
        tensor[1] = float("inf")

    source = changed(folder, tmp_path, "model.norm.weight", change)
    assert convert.main([str(source), str(tmp_path / "out"), "--dtype", "float16"]) == 0
    assert "norm.weight: 2 of 48 numbers are NaN or infinite" in capsys.readouterr().out


# The file that has a weight


def other_weights(folder, path, names=None):
    """Write a safetensors file with the folder's tensors, or those named, as others: all 3."""
    tensors = tensors_of(folder)
    save_file({name: tensors[name] * 0 + 3 for name in names or tensors}, path)


@UNTIED_ONLY
@pytest.mark.parametrize(
    "change",
    [
        # beside shards and their index
        lambda copy: other_weights(copy, copy / "a.safetensors", ["model.norm.weight"]),
        # beside model.safetensors
        lambda copy: (one_file(copy), old_shards(copy)),
    ],
)
def test_each_weight_is_read_from_the_file_that_transformers_reads(
    folder, config, expected, tmp_path, change
):
    transformers = pytest.importorskip("transformers")
    copy = shutil.copytree(folder, tmp_path / "copy")
    change(copy)
    same(open_weights(copy), config, expected)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(copy)
    norm = theirs.get_parameter("model.norm.weight")
    assert torch.equal(norm, expected["norm.weight"])


def one_file(copy):
    """Replace shards and index by one file."""
    tensors = tensors_of(copy)
    for path in copy.glob("model*"):
        path.unlink()
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})


def old_shards(copy):
    """Add shards and index of an older save, whose numbers are all 3."""
    names = sorted(tensors_of(copy))
    halves = {"model-00001-of-00002.safetensors": names[:9]}
    halves["model-00002-of-00002.safetensors"] = names[9:]
    for file, half in halves.items():
        other_weights(copy, copy / file, half)
    weight_map = {name: file for file, half in halves.items() for name in half}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@UNTIED_ONLY
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda copy: (copy / "model.safetensors.index.json").unlink(),
            "there is neither model.safetensors nor model.safetensors.index.json; use save_pretrained",
        ),
        (lambda copy: move_norm(copy), "model.norm.weight is missing"),
        (
            lambda copy: (copy / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
            "adapter_config.json is there: weights with an adapter, such as LoRA's, are not read",
        ),
    ],
)
def test_a_folder_that_does_not_say_which_weights_is_refused(folder, tmp_path, change, words):
    assert re.search(words, damaged(folder, tmp_path, change))


def move_norm(copy):
    """Let the index have the last norm in the first file."""
    index = copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = first(copy, "model-*").name
    index.write_text(json.dumps(content))
