"""Every file that somebody else may have written: its reader gives the data or one line, in bounded time and memory."""

import dataclasses
import io
import json
import math
import os
import pickle
import re
import shutil
import struct
import zipfile
from contextlib import suppress
from itertools import islice

import pytest
import torch
from forged import as_json, damaged, fuzz, mutated, nested, peak_mib
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny import DEBUG, DEBUG_TOKENIZER

from titan_lite import manifest
from titan_lite.checkpoint.resume import compare
from titan_lite.checkpoint.saving import Checkpointer
from titan_lite.checkpoint.weights import open_weights
from titan_lite.compiler.profiles import load_machine
from titan_lite.config import Checkpoint, ConfigError, Data
from titan_lite.config.recipe import load_config, to_toml
from titan_lite.convert import write_step
from titan_lite.data import prepare as preparing
from titan_lite.data.prepared import PreparedSource, check_prepared, prepared_fingerprint
from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.distributed.pipeline_plan import read_schedule
from titan_lite.faults.restart import RepeatedFault, Restarts
from titan_lite.metrics.records import RecordError, read_metrics, read_run, step_seconds
from titan_lite.models.hf import config_to_hf, hf_names
from titan_lite.models.llama3 import ModelConfig, Transformer
from titan_lite.outside import (
    COUNT,
    FILE,
    MOST,
    WORD,
    Damaged,
    check_form,
    maybe,
    optional,
    read_json,
    size_of,
)
from titan_lite.plan import calibrate
from titan_lite.plan.measure import machine_to_toml
from titan_lite.report.page import main as report
from titan_lite.report.page import page

TOKENIZER = load_tokenizer(DEBUG_TOKENIZER)
MODEL = ModelConfig(
    dim=8, n_layers=2, n_heads=2, n_kv_heads=1, hidden_dim=12, vocab_size=2048, max_seq_len=64
)
PARAMS = {
    "dim": 8,
    "n_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 1,
    "vocab_size": 2048,
    "multiple_of": 4,
    "ffn_dim_multiplier": 0.6,
}
PARAMS |= {"norm_eps": 1e-5, "rope_theta": 500_000.0, "use_scaled_rope": False}

examples = pytest.mark.parametrize("examples", [40, pytest.param(600, marks=pytest.mark.slow)])


# The reader itself


@pytest.mark.parametrize(
    ("text", "form", "words"),
    [
        ("[", WORD, "a.json is not JSON: Expecting value"),
        ("[" * 100_000, WORD, "a.json is not JSON: |a.json is nested deeper than 16"),
        (json.dumps(nested(17)), WORD, "a.json is nested deeper than 16 objects and lists"),
        ("9" * 5000, COUNT, "a.json is not JSON: Exceeds the limit"),
        ("-1", COUNT, r"a.json: its content = -1: expected a whole number from 0 to 2\*\*96"),
        ("true", COUNT, "a.json: its content = True: expected a whole number"),
        ("[1, NaN]", [COUNT], r"a.json: \[1\] = nan: expected a whole number"),
        ('{"a": {"b": []}}', {"a": {"b": WORD}}, r"a.json: a.b = \[\]: expected a string"),
        ("{}", {"a": WORD}, "a.json: a = None: expected a string"),
        ('{"a": null}', {"a": optional(WORD)}, "a.json: a = None: expected a string"),
        (
            '{"..": 1}',
            {FILE: COUNT},
            r"a.json: its content has '\.\.': expected the name of a file in this folder",
        ),
        (
            json.dumps({"x" * 9999: "y" * 9999}),
            {WORD: COUNT},
            r"a.json: 'x+\.\.\.x+' = 'y+\.\.\.y+': expected a whole number",
        ),
    ],
)
def test_json_of_another_form_is_one_line(text, form, words, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(Damaged, match=f"^({words})") as error:
        read_json(tmp_path / "a.json", form)
    assert len(str(error.value)) < 300


def test_what_has_the_form_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": null, "c": [1], "d": "x"}')
    found = read_json(
        path, {"a": maybe(WORD), "b": optional(WORD), "c": (COUNT, [COUNT]), WORD: WORD}
    )
    assert found == {"a": None, "c": [1], "d": "x"}
    with pytest.raises(Damaged, match="d = 'x': expected a whole number"):
        check_form(found, {WORD: maybe((COUNT, [COUNT]))}, "found")


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "long").open("wb") as file:
        file.truncate(MOST + 1)
    (tmp_path / "latin").write_bytes(b'"\xe9"')
    for name, words in (
        ("pipe", "pipe is not a file"),
        ("zero", "zero is not a file"),
        ("folder", "folder is not a file"),
        ("round", "round: Too many levels of symbolic links"),
        ("absent", "absent is missing"),
        ("long", "long is larger than 32 MiB"),
        ("latin", "latin is not UTF-8: 'utf-8' codec"),
    ):
        with pytest.raises(Damaged, match=f"^{words}"):
            read_json(tmp_path / name)


def test_no_link_leads_out_of_a_folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "foreign").write_text("secret")
    (folder / "own").write_text("12")
    (folder / "near").symlink_to("own")
    (folder / "far").symlink_to("../foreign")
    assert size_of(folder, "near") == 2
    for name in ("far", "../foreign", str(tmp_path / "foreign")):
        with pytest.raises(Damaged, match="leads out of this folder"):
            size_of(folder, name)


# Prepared folders


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(60))
    )
    data = Data(
        dataset="local", path=str(folder / "a.jsonl"), validation_fraction=0.2, num_workers=0
    )
    preparing.prepare(data, TOKENIZER, folder / "whole", workers=0, shard_tokens=150)
    return folder / "whole"


def read_prepared(folder, every_byte=False):
    data = Data(dataset="prepared", path=str(folder), num_workers=0)
    check_prepared(data, TOKENIZER.sha256, TOKENIZER.vocab_size)
    assert len(prepared_fingerprint(data)) == 64
    for split in ("train", "validation"):
        source = PreparedSource(data, split, seed=0)
        for _, tokens in islice(source.documents(0, lambda ordinal: True), 70):
            assert len(tokens) > 0
            assert tokens.max() < TOKENIZER.vocab_size


def sealed_prepared(folder, change):
    described = json.loads((folder / manifest.NAME).read_text())
    del described["sha256"]
    change(described)
    (folder / manifest.NAME).write_text(manifest.sealed(described))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda d: d["splits"]["train"][0].update(documents=-5),
            r"splits.train\[0\].documents = -5: expected a whole number",
        ),
        (
            lambda d: d["splits"]["train"][0].update(documents=2**61),
            "train-00000 has 2,305,843,009,213,693,952 documents",
        ),
        (
            lambda d: d["splits"]["train"][0].update(documents="many"),
            r"documents = 'many': expected a whole number",
        ),
        (
            lambda d: d["splits"]["train"][0].update(name="/etc/passwd"),
            r"name = '/etc/passwd': expected the name of a file in",
        ),
        (
            lambda d: d["splits"]["train"][0].update(name="../x"),
            r"name = '\.\./x': expected the name of a file in this folder",
        ),
        (
            lambda d: d["splits"]["train"].append(d["splits"]["train"][0]),
            "train-00000 is listed twice",
        ),
        (lambda d: d["splits"]["train"].append(7), r"splits.train\[\d+\] = 7: expected an object"),
        (lambda d: d.update(splits=[]), r"splits = \[\]: expected an object"),
        (lambda d: d["splits"].update(test=None), r"splits has 'test': expected no other key"),
        (lambda d: d.update(dtype="object"), "dtype = 'object': expected 'uint16' or 'uint32'"),
        (
            lambda d: d.update(dtype="uint32"),
            "train-00000 has .* documents and .* tokens, and no files of such sizes",
        ),
        (lambda d: d.update(vocab_size=2**29), "was made by another tokenizer"),
        (lambda d: d.update(files=None), "files = None: expected an object"),
        (
            lambda d: d["files"].update({"../x": {"sha256": "0" * 64, "size": 1}}),
            r"files has '\.\./x': expected the name of a file",
        ),
        (
            lambda d: next(iter(d["files"].values())).update(size="big"),
            "size = 'big': expected a whole number",
        ),
        (
            lambda d: d.update(data={"validation_fraction": "x"}),
            "validation_fraction = 'x': expected a number",
        ),
        (
            lambda d: d.update(bad=nested(14)),
            r"manifest.json: bad\[0\].file = None: expected a string",
        ),
        (lambda d: d.update(format=nested(10)), "manifest.json is in format "),
        (
            lambda d: d.update(other=nested(200)),
            "manifest.json is nested deeper than 16 objects and lists",
        ),
    ],
)
def test_a_prepared_manifest_that_is_forged_with_a_right_hash_is_one_line(
    change, words, prepared, tmp_path
):
    folder = shutil.copytree(prepared, tmp_path / "copy")
    sealed_prepared(folder, change)
    with pytest.raises(ConfigError, match=words) as error:
        read_prepared(folder)
    assert str(error.value).startswith(f'data.path = "{folder}"')


def test_nested_json_needs_no_right_hash_to_be_one_line(prepared, tmp_path):
    folder = shutil.copytree(prepared, tmp_path / "copy")
    for levels in (400, 900, 100_000):
        (folder / manifest.NAME).write_text("[" * levels + "]" * levels)
        with pytest.raises(ConfigError, match=r"manifest.json is (not JSON|nested deeper)"):
            read_prepared(folder)


@pytest.mark.parametrize("number", [2, 2**40, 2**64 - 1])
def test_documents_and_tokens_that_are_forged_are_one_line(number, prepared, tmp_path):
    """Their hashes are not compared at a start."""
    folder = shutil.copytree(prepared, tmp_path / "copy")
    path = folder / "train-00000.documents"
    path.write_bytes(path.read_bytes()[:8] + struct.pack("<Q", number) + path.read_bytes()[16:])
    tokens = folder / "train-00000.tokens"
    tokens.write_bytes(b"\xff\xff" + tokens.read_bytes()[2:])
    with pytest.raises(ConfigError, match=r"train-00000, document \d+: not of this tokenizer"):
        read_prepared(folder)


@examples
def test_any_prepared_manifest(examples, prepared, tmp_path):
    folder = shutil.copytree(prepared, tmp_path / "copy")
    path, described = folder / manifest.NAME, json.loads((prepared / manifest.NAME).read_text())
    del described["sha256"]
    forged = mutated(described).map(lambda value: sealed(value).encode()) | damaged(
        path.read_bytes()
    )
    fuzz(examples, forged, lambda content: (path.write_bytes(content), read_prepared(folder)))


@examples
def test_any_documents_and_tokens(examples, prepared, tmp_path):
    folder = shutil.copytree(prepared, tmp_path / "copy")
    names = [name for name in os.listdir(prepared) if name != manifest.NAME]

    def read(forged):
        name, content = forged
        (folder / name).write_bytes(content)
        try:
            read_prepared(folder)
        finally:
            shutil.copy(prepared / name, folder / name)

    one = st.sampled_from(names).flatmap(
        lambda name: st.tuples(st.just(name), damaged((prepared / name).read_bytes()))
    )
    fuzz(examples, one, read)


@examples
def test_any_progress_of_a_half_made_folder(examples, prepared, tmp_path):
    folder = shutil.copytree(prepared, tmp_path / "unfinished")
    described = json.loads((folder / manifest.NAME).read_text())
    (folder / manifest.NAME).unlink()
    about = {
        key: described[key]
        for key in (
            "format",
            "tokenizer",
            "vocab_size",
            "dtype",
            "data",
            "documents",
            "shard_tokens",
        )
    }
    progress = {
        "about": about,
        "left": ["validation"],
        "next": 0,
        **{key: described[key] for key in ("splits", "bad", "files")},
    }
    path = folder / preparing.PROGRESS

    def read(content):
        path.write_bytes(content)
        preparing._begun(folder, about)

    forged = mutated(progress).map(lambda value: json.dumps(value).encode()) | damaged(
        json.dumps(progress).encode()
    )
    fuzz(examples, forged, read)


def sealed(value):
    return manifest.sealed(value) if isinstance(value, dict) else json.dumps(value)


# Steps


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    model = Transformer(MODEL)
    model.init_weights(seed=0)
    names, state = hf_names(MODEL), model.state_dict()
    half = len(names) // 2
    shards = {"a.safetensors": [*names][:half], "b.safetensors": [*names][half:]}
    for file, fqns in shards.items():
        save_file({names[fqn]: state[fqn].clone() for fqn in fqns}, folder / file)
    index = {"weight_map": {names[fqn]: file for file, fqns in shards.items() for fqn in fqns}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    tokens = {"bos_token_id": 1, "eos_token_id": [2, 3]}
    (folder / "config.json").write_text(json.dumps(config_to_hf(MODEL, torch.float32) | tokens))
    (folder / "generation_config.json").write_text(json.dumps(tokens))
    return folder


def described(*overrides):
    config, _ = load_config(DEBUG, overrides)
    run = {
        "model": dataclasses.asdict(MODEL),
        "tokenizer": "a" * 64,
        "rows": 2,
        "documents": "b" * 64,
        "shares": [1.0],
    }
    run |= {
        "total_steps": 100,
        "world_size": 1,
        "mesh": {"tp": 1},
        "device": "CPU",
        "versions": {"torch": "2"},
        "git": "",
    }
    return {"recipe": dataclasses.asdict(config), "run": run}


@pytest.fixture(scope="module")
def step(hugging_face, tmp_path_factory):
    """As a run saves it, but for the optimizer."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint/step-5"
    folder.parent.mkdir()
    write_step(folder, open_weights(hugging_face))
    state = {
        "step": 5,
        "tokens_seen": 640,
        "tensors": ["model"],
        "validation_due": False,
        "skipped_steps": 0,
    }
    state |= {
        "skipped_in_a_row": 0,
        "spikes": {"accepted": [8.0, 7.5], "skipped": [{"step": 3, "loss": 99.0}]},
        **described(),
    }
    state |= {"loader": {"rows": {"0": [5, [2, 3]], "1": [5, [1, 0]]}, "of": 2}}
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder)
    return folder


def seal(folder):
    manifest.write(
        folder,
        5,
        {
            path.name: manifest.digest(path)
            for path in folder.iterdir()
            if path.name != manifest.NAME
        },
    )


def read_weights(folder):
    weights = open_weights(folder, every_byte=True)
    for fqn in weights.shapes:
        assert weights.read(fqn).shape == weights.shapes[fqn]


def read_step(folder):
    """As a run that goes on, and as `convert` and `generate` do. A damaged step has the same fault for both."""
    checkpointer = Checkpointer(Checkpoint(enable=True), folder.parents[1])
    if fault := checkpointer.fault(5):
        assert "\n" not in fault
        raise ConfigError(fault)
    state, now = checkpointer.read_state(5), described("--lr_scheduler.warmup_steps=3")
    changes = compare(json.loads(json.dumps(state)), now)
    changes.refuse_unless_accepted(folder, checkpointer.config)
    read_weights(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda s: s["run"]["model"].update(dim="x"),
            "state.json: run.model: dim = 'x': expected a whole number above 0",
        ),
        (
            lambda s: s["run"]["model"].update(n_heads=0),
            "state.json: run.model: n_heads = 0: expected a whole number above 0",
        ),
        (
            lambda s: s["run"]["model"].update(n_heads=3),
            "3 heads, 1 of keys and values, in 8 dimensions: heads must have an even size",
        ),
        (
            lambda s: s["run"]["model"].update(n_layers=10**6),
            "its shape has 1,000,000 layers, but it has 21 tensors",
        ),
        (
            lambda s: s["run"]["model"].update(rope_scaling={"factor": 8.0, "x": 1}),
            "rope_scaling.low_freq_factor = None",
        ),
        (
            lambda s: s["run"]["model"].update(experts=8),
            "state.json: run.model: its content has 'experts': expected no other key",
        ),
        (lambda s: s.update(run=None), "state.json: run = None: expected an object"),
        (lambda s: s.update(recipe=[]), r"state.json: recipe = \[\]: expected an object"),
        (
            lambda s: s["recipe"]["lr_scheduler"].update(decay_type="stairs"),
            "decay_type = 'stairs': expected 'linear' or 'cosine' or",
        ),
        (
            lambda s: s["loader"].update(of=3),
            "state.json: loader does not have the position of each row of the run in each",
        ),
        (
            lambda s: s["loader"]["rows"].update({"1": [5, [1, 0], [1, 0]]}),
            "loader does not have the position of each row of the run",
        ),
        (
            lambda s: s["loader"]["rows"].update({"1": [5, 7]}),
            r"loader.rows.1 = \[5, 7\]: expected \[windows, \[ordinal, tokens\]",
        ),
        (
            lambda s: s["spikes"].update(accepted=["x"]),
            r"spikes.accepted\[0\] = 'x': expected a number",
        ),
        (lambda s: s.update(step=6), "state.json is of another step"),
        (lambda s: s.update(tensors=["optimizer"]), "state.json: tensors has no model"),
        (
            lambda s: s["loader"].update(windows=2**95),
            r"loader.windows = \d+.*: expected a whole number from 0 to 2\*\*62",
        ),
        (
            lambda s: s["recipe"]["training"].update(global_batch_ramp=[1, -5]),
            r"global_batch_ramp\[0\] = 1: expected a string",
        ),
        (
            lambda s: s["recipe"].update({"\ud800": {"x": "1"}}),
            "expected a name that can be printed",
        ),
        (lambda s: s.pop("loader"), r"state.json of the step is incomplete \(no loader\)"),
    ],
)
def test_a_state_that_is_forged_is_one_line(change, words, step, tmp_path):
    folder = shutil.copytree(step, tmp_path / "checkpoint/step-5")
    state = json.loads((folder / "state.json").read_text())
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder)
    with pytest.raises(ConfigError, match=words):
        read_weights(folder), read_step(folder)


def test_a_forged_step_is_passed_over_and_named_where_it_was_asked_for(step, tmp_path):
    for number in (4, 5):
        shutil.copytree(step, tmp_path / f"checkpoint/step-{number}")
    state = json.loads((step / "state.json").read_text())
    (tmp_path / "checkpoint/step-4/state.json").write_text(json.dumps(state | {"step": 4}))
    manifest.write(tmp_path / "checkpoint/step-4", 4, {name: manifest.digest(tmp_path / "checkpoint/step-4" / name) for name in
                   (".metadata", "__0_0.distcp", "state.json")})  # fmt: skip
    entries = json.loads((step / manifest.NAME).read_text())["files"] | {
        "state.json": {"sha256": "0" * 64, "size": "big"}
    }
    manifest.write(tmp_path / "checkpoint/step-5", 5, entries)
    assert Checkpointer(Checkpoint(enable=True), tmp_path).step_to_load() == 4
    assert open_weights(tmp_path).folder.name == "step-4"
    words = "manifest.json: files.state.json.size = 'big': expected a whole number"
    with pytest.raises(
        ConfigError, match=rf"checkpoint.load_step = 5: the step is damaged: {words}"
    ):
        Checkpointer(Checkpoint(enable=True, load_step=5), tmp_path).step_to_load()
    with pytest.raises(ConfigError, match=rf"step-5: {words}"):
        open_weights(tmp_path / "checkpoint/step-5")


@examples
@pytest.mark.parametrize("name", ["state.json", manifest.NAME])
def test_any_state_and_manifest_of_a_step(name, examples, step, tmp_path):
    folder = shutil.copytree(step, tmp_path / "checkpoint/step-5")
    content = json.loads((step / name).read_text())
    content.pop("sha256", None)
    write = sealed if name == manifest.NAME else as_json

    def read(forged):
        (folder / name).write_bytes(forged)
        if name != manifest.NAME:
            seal(folder)
        read_step(folder)

    fuzz(
        examples,
        mutated(content).map(lambda value: write(value).encode())
        | damaged((step / name).read_bytes()),
        read,
        lines=60,
    )


@examples
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_any_metadata_and_tensors_of_a_step(name, examples, step, tmp_path):
    folder = shutil.copytree(step, tmp_path / "checkpoint/step-5")

    def read(content):
        (folder / name).write_bytes(content)
        seal(folder)
        read_step(folder)

    fuzz(examples, damaged((step / name).read_bytes()), read, lines=60)


def test_tensors_of_a_step_that_are_compressed_are_refused(step, tmp_path):
    folder = shutil.copytree(step, tmp_path / "checkpoint/step-5")
    buffer = io.BytesIO()
    torch.save(torch.zeros(2048, 8), buffer)
    with (
        zipfile.ZipFile(buffer) as whole,
        zipfile.ZipFile(folder / "__0_0.distcp", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, (folder / "__0_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with (folder / "__0_0.distcp").open("ab") as file:
        file.write(bytes(1 << 18))
    seal(folder)
    with pytest.raises(ConfigError, match=r"__0_0.distcp cannot be read: it is compressed"):
        read_weights(folder)


def test_a_place_in_the_memo_of_an_unpickler_takes_no_memory(step, tmp_path):
    folder = shutil.copytree(step, tmp_path / "checkpoint/step-5")
    for content in (b"\x80\x02Nr\xff\xff\xff\x0f.", b"Np268435455\n."):
        (folder / ".metadata").write_bytes(content)
        seal(folder)
        with pytest.raises(
            ConfigError, match="has an index into the unpickler's memo, which DCP does not"
        ):
            read_weights(folder)


# Folders of others


@examples
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json"]
)
def test_any_json_of_a_hugging_face_folder(name, examples, hugging_face, tmp_path):
    folder = shutil.copytree(hugging_face, tmp_path / "copy")
    content = (folder / name).read_bytes()
    forged = mutated(json.loads(content)).map(lambda value: json.dumps(value).encode()) | damaged(
        content
    )

    def read(some):
        (folder / name).write_bytes(some)
        read_weights(folder)

    fuzz(examples, forged, read, lines=60)


@examples
def test_any_safetensors_file(examples, hugging_face, tmp_path):
    folder = shutil.copytree(hugging_face, tmp_path / "copy")
    path, content = folder / "a.safetensors", (hugging_face / "a.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])

    def with_header(header):
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    forged = mutated(json.loads(content[8 : 8 + length])).map(with_header) | damaged(content)
    fuzz(examples, forged, lambda some: (path.write_bytes(some), read_weights(folder)), lines=60)


@pytest.mark.parametrize("layers", [10**5, 10**6, 2**30 - 1])
def test_more_layers_than_tensors_are_refused_before_a_model_is_made(
    layers, hugging_face, meta, tmp_path
):
    for source, name, key in (
        (hugging_face, "config.json", "num_hidden_layers"),
        (meta, "params.json", "n_layers"),
    ):
        folder = shutil.copytree(source, tmp_path / name)
        content = json.loads((folder / name).read_text()) | {key: layers, "use_scaled_rope": True}
        (folder / name).write_text(json.dumps(content))
        with pytest.raises(
            ConfigError, match=f"its shape has {layers:,} layers, but it has 21 tensors"
        ):
            open_weights(folder)


def test_files_that_are_none_are_not_waited_for(hugging_face, meta, tmp_path):
    for source, names in (
        (hugging_face, ("a.safetensors", "config.json")),
        (meta, ("consolidated.00.pth", "params.json")),
    ):
        for name in names:
            folder = shutil.copytree(source, tmp_path / name)
            (folder / name).unlink()
            (folder / "model.safetensors.index.json").unlink(missing_ok=True)
            os.mkfifo(folder / name)
            with pytest.raises(ConfigError):
                open_weights(folder)
            (folder / name).unlink()
            (folder / name).symlink_to("/dev/zero")
            with pytest.raises(ConfigError):
                open_weights(folder)


@pytest.fixture(scope="module")
def meta(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meta")
    model = Transformer(MODEL)
    model.init_weights(seed=0)
    torch.save(model.state_dict(), folder / "consolidated.00.pth")
    (folder / "params.json").write_text(json.dumps(PARAMS))
    return folder


@examples
@pytest.mark.parametrize("name", ["params.json", "consolidated.00.pth"])
def test_any_file_of_metas(name, examples, meta, tmp_path):
    folder = shutil.copytree(meta, tmp_path / "copy")
    content = (folder / name).read_bytes()
    forged = damaged(content)
    if name == "params.json":
        forged |= mutated(PARAMS).map(lambda value: json.dumps(value).encode())
    fuzz(
        examples,
        forged,
        lambda some: ((folder / name).write_bytes(some), read_weights(folder)),
        lines=60,
    )


def test_tensors_with_more_elements_than_bytes_and_compressed_ones_are_refused(meta, tmp_path):
    folder = shutil.copytree(meta, tmp_path / "copy")
    path = folder / "consolidated.00.pth"
    state = torch.load(path)
    torch.save(state | {"tok_embeddings.weight": torch.zeros(1, 1).expand(2**20, 2**20)}, path)
    with pytest.raises(
        ConfigError,
        match=r"tok_embeddings.weight has 1,099,511,627,776 elements, and 4 bytes are stored",
    ):
        open_weights(folder)
    with (
        zipfile.ZipFile(meta / path.name) as whole,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    with pytest.raises(
        ConfigError,
        match=r"consolidated.00.pth cannot be read: it is compressed, and torch saves tensors uncompressed",
    ):
        open_weights(folder)


# Machines and measurements


MACHINE = {
    "name": "mine",
    "memory": 80,
    "memory_bandwidth": 2000.5,
    "tflops": {"float32": 20, "bfloat16": 400.0},
    "launch": 3.0,
}
MACHINE |= {
    "intra_node": {"bandwidth": 300, "latency": 2},
    "inter_node": {"bandwidth": 25, "latency": 5},
    "ranks_per_node": 8,
}


def as_toml(value, top=True):
    """TOML has no null, and its numbers have other words for nan."""
    if isinstance(value, dict):
        items = [
            f"{json.dumps(key)} = {as_toml(each, False)}"
            for key, each in value.items()
            if each is not None
        ]
        return "\n".join(items) if top else f"{{ {', '.join(items)} }}"
    if isinstance(value, list):
        return f"[{', '.join(as_toml(each, False) for each in value if each is not None)}]"
    return repr(value) if isinstance(value, float) else json.dumps(value)


@examples
def test_any_machine(examples, tmp_path):
    path = tmp_path / "machine.toml"

    def read(content):
        path.write_bytes(content)
        for machine in load_machine(str(path)).spread():
            for nbytes in (1, 2**40):
                assert 0 < machine.collective("all_reduce", nbytes, range(16)) < math.inf
                assert 0 < machine.send(nbytes, 0, 9) < math.inf
                assert 0 < machine.memory_traffic(nbytes) < math.inf
            assert 0 < machine.flops(torch.bfloat16) < math.inf
            path.write_text(machine_to_toml(machine))
            assert load_machine(str(path)) == machine

    content = as_toml(MACHINE).encode()
    fuzz(
        examples,
        mutated(MACHINE).map(lambda value: as_toml(value).encode("utf-8", "replace"))
        | damaged(content),
        read,
    )


def test_a_machines_name_is_text(tmp_path):
    machine = dataclasses.replace(load_machine("H100"), name='a"\nmemory = 1')
    (tmp_path / "own.toml").write_text(machine_to_toml(machine))
    assert load_machine(str(tmp_path / "own.toml")) == machine


@examples
def test_any_measurements_of_a_run(examples, tmp_path, monkeypatch):
    """Up to what is planned from them."""
    monkeypatch.setattr(
        calibrate,
        "make_plan",
        lambda layout, machines: (_ for _ in ()).throw(ConfigError("planned")),
    )
    reached = {
        "matmul": 1e11,
        "attention": 1e10,
        "memory": 1e10,
        "launch": 1e-6,
        "latency": 1e-5,
        "bandwidth": 1e9,
        "reduction": 1.5,
    }
    record = {
        "world_size": 2,
        "nodes": 1,
        "device": "CPU",
        "profile": MACHINE,
        "reached": reached,
        "step_seconds": 0.5,
    }
    record |= {"windows": 3, "memory_bytes": 1e9, "memory_is": "resident"}
    config, _ = load_config(DEBUG)
    (tmp_path / "config.toml").write_text(to_toml(config))

    def read(content):
        (tmp_path / "measured.json").write_bytes(content)
        calibrate.calibrate_run(tmp_path, lambda config, world_size, memory: None)

    content = json.dumps(record).encode()
    fuzz(
        examples,
        mutated(record).map(lambda value: json.dumps(value).encode()) | damaged(content),
        read,
    )


@examples
def test_any_schedule_of_a_pipeline(examples, tmp_path):
    content = b"0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
    path = tmp_path / "schedule.csv"
    words = st.sampled_from(
        [
            "0F0",
            "0F1",
            "1I0",
            "1W0",
            "1B1",
            "999999F0",
            "9" * 5000 + "F0",
            "\0",
            '"',
            "x" * 200_000,
            "",
            "\u0663F0",
        ]
    )
    rows = st.lists(st.lists(words, max_size=9).map(",".join), max_size=4).map(
        lambda rows: "\n".join(rows).encode()
    )
    fuzz(
        examples,
        rows | damaged(content),
        lambda some: (path.write_bytes(some), read_schedule(path, 2, 2)),
    )


# What a run left in its folder


EVENT = {"time": "2026-11-21T20:15:30+00:00", "event": "start", "step": 0, "text": "x"}
TIMES = {"exposed": 0.0005, "seconds": 0.004, "communication": 0.002}
COLLECTIVE = {
    "kind": "all_gather",
    "fqns": ["a", "b"],
    "nbytes": 2**21,
    "ranks": 2,
    "seconds": 0.1,
    "under": None,
    "exposed": 0.1,
}
RECEIPT = {
    "graph": "forward",
    "before": {"all_gather": 9},
    "after": [COLLECTIVE],
    "timeline": TIMES,
    "pp_rank": None,
}
SPAN = {
    "ph": "X",
    "tid": 1,
    "name": "mm",
    "ts": 0,
    "dur": 5.0,
    "cat": "forward",
    "args": {"exposed_us": 1.0},
}
ROWS = [
    {
        "step": step,
        "loss": 8.0 - step,
        "tps": 9.0,
        "step_time": 1.0,
        "tokens_seen": 10 * step,
        "mfu": None,
    }
    for step in (1, 2, 3)
]
FILES = {
    "metrics.jsonl": [*ROWS, {"resumed_from": 1}, {"step": 2, "validation_loss": 7.0}],
    "events.jsonl": [
        EVENT,
        {**EVENT, "event": "skip", "step": 2},
        EVENT,
        {**EVENT, "event": "done", "step": 3},
    ],
    "compile.json": [RECEIPT, RECEIPT],
    "timeline.json": {"traceEvents": [SPAN, {"ph": "M", "name": "x"}, {**SPAN, "tid": 0}]},
    "restarts.json": {"0": 5, "1": 6},
}


@examples
@pytest.mark.parametrize("name", FILES)
def test_any_file_of_a_run(name, examples, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")

    def write(file, value):
        whole = (
            "".join(json.dumps(line) + "\n" for line in value)
            if file.endswith("l") and type(value) is list
            else json.dumps(value)
        )
        return whole.encode()

    for file, value in FILES.items():
        (tmp_path / file).write_bytes(write(file, value))
    content = (tmp_path / name).read_bytes()

    def read(forged):
        (tmp_path / name).write_bytes(forged)
        metrics = read_metrics(tmp_path / "metrics.jsonl")
        assert list(metrics) == sorted(metrics)
        assert all(seconds > -math.inf for seconds in step_seconds(tmp_path / "metrics.jsonl"))
        with suppress(RepeatedFault):
            Restarts(tmp_path).check()
        text = page([read_run(tmp_path, "run")])
        data = re.search(
            r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL
        )[1]
        json.loads(data, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        (tmp_path / "report.html").write_text(text, encoding="utf-8", errors="backslashreplace")
        raise RecordError("read, as the other files of a run may be left out")

    forged = mutated(FILES[name]).map(lambda value: write(name, value)) | damaged(content)
    fuzz(examples, forged, read, error=(ConfigError, RecordError))


def test_a_report_of_halves_of_surrogates_dates_and_words_for_numbers(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    event = {**EVENT, "text": "\ud800", "lost": 5, "time": "0001-01-01T00:00:00"}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n" + json.dumps(event) + "\n")
    (tmp_path / "config.toml").write_text(
        "[training]\nsteps = 'many'\n[job]\ndescription = 2026-11-22\n[x]\ny = 2026-11-22\n"
    )
    assert report([str(tmp_path)]) == 0, capsys.readouterr().err
    assert "<td>2026-11-22</td>" in (tmp_path / "report.html").read_text().replace("&quot;", "")


def test_a_line_without_an_end_takes_no_memory(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.write(b'{"step": 1, "loss": 1.0}\n')
        file.seek(3 << 30)
        file.write(b'\n{"resumed_from": 1}\n{"step": 2, "loss": 1.0}\n')
    before = peak_mib()
    assert list(read_metrics(path)) == [1, 2]
    assert peak_mib() - before < 100
