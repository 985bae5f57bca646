"""Tensors that come from elsewhere: each is complete, its file is in the folder, and its list is
data.
"""

import json
import pickle
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
)

from titan_lite import manifest
from titan_lite.checkpoint import tensor_files
from titan_lite.checkpoint.weights import open_weights, shapes
from titan_lite.config import ConfigError
from titan_lite.config.families import ModelConfig
from titan_lite.manifest import CorruptFileError

TINY = ModelConfig(
    dim=16, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=32, vocab_size=64, max_seq_len=32
)
NAME = "output.weight"  # (64, 16)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "given"
    tensors = {fqn: torch.ones(shape) for fqn, shape in shapes(TINY).items()}
    dcp.save(tensors, checkpoint_id=path, no_dist=True)
    return path


def change_metadata(folder, change):
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def with_chunks(*boxes):
    """Return a change of metadata: tensor NAME is in parts of these offsets and sizes."""

    def change(metadata):
        chunks = [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in boxes]
        metadata.state_dict_metadata[NAME].chunks = chunks

    return change


COMPLETE = [([0, 0], [32, 16]), ([32, 0], [32, 8]), ([32, 8], [32, 8]), ([64, 0], [0, 16])]


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        (COMPLETE[:2], "has 768 of its 1,024 numbers: parts of it are missing"),
        ([], "has 0 of its 1,024 numbers"),
        ([COMPLETE[0], COMPLETE[0]], "has numbers twice"),
        ([*COMPLETE, COMPLETE[1]], "has numbers twice"),
        ([([0, 0], [64, 9]), ([0, 8], [64, 8])], "has 1,088 of its 1,024 numbers: .* or overlap"),
    ],
)
def test_a_tensor_that_is_not_complete_is_named(folder, boxes, words):
    change_metadata(folder, with_chunks(*boxes))
    with pytest.raises(ConfigError, match=f"{NAME} {words}"):
        open_weights(folder, model=TINY)
    target = torch.empty(64, 16)
    with pytest.raises(CorruptFileError, match=f"^{NAME} {words}"):
        tensor_files.load(folder, {NAME: target})


def test_a_tensor_in_any_parts_is_complete(folder):
    change_metadata(folder, with_chunks(*COMPLETE))
    assert open_weights(folder, model=TINY).shapes[NAME] == (64, 16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda metadata: setattr(metadata.state_dict_metadata[NAME], "properties", None),
            "is not as it was",
        ),
        (
            lambda metadata: setattr(metadata.state_dict_metadata[NAME].properties, "dtype", None),
            f"has no dtype of {NAME}",
        ),
    ],
)
def test_metadata_that_lack_a_field_are_one_line(folder, change, words):
    change_metadata(folder, change)
    with pytest.raises(ConfigError, match=rf"\.metadata {words}") as error:
        open_weights(folder, model=TINY)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
def test_weights_that_are_no_fractions_are_refused(tmp_path, dtype):
    tensors = {fqn: torch.ones(shape) for fqn, shape in shapes(TINY).items()}
    tensors[NAME] = tensors[NAME].to(dtype)
    dcp.save(tensors, checkpoint_id=tmp_path / "given", no_dist=True)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ConfigError, match=rf"{NAME} has dtype {name}: expected numbers with a"):
        open_weights(tmp_path / "given", model=TINY)


# Names of files


@pytest.mark.parametrize("where", ["../elsewhere", "{absolute}"])
def test_a_file_outside_of_the_folder_is_not_read(folder, tmp_path, where):
    (tmp_path / "elsewhere").mkdir()
    (file,) = folder.glob("*.distcp")
    file.rename(tmp_path / "elsewhere" / file.name)
    path = f"{where.format(absolute=tmp_path / 'elsewhere')}/{file.name}"

    def change(metadata):
        for info in metadata.storage_data.values():
            object.__setattr__(info, "relative_path", path)

    change_metadata(folder, change)
    words = rf"\.metadata names the file {re.escape(path)}, outside of the folder"
    with pytest.raises(ConfigError, match=words):
        open_weights(folder, model=TINY)


@pytest.mark.parametrize("name", ["../other", "/etc/hostname", "a/../../other"])
def test_a_manifest_names_files_of_its_folder_alone(tmp_path, name):
    (tmp_path / "step").mkdir()
    (tmp_path / "other").write_text("content")
    digest = manifest.digest(tmp_path / "other")
    content = {"step": 3, "files": {name: digest}}
    (tmp_path / "step/manifest.json").write_text(json.dumps(content))
    with pytest.raises(CorruptFileError, match=rf"names the file {re.escape(name)}, outside"):
        manifest.check_step(tmp_path / "step", 3)


# The pickle


def test_metadata_are_read_as_pickle_reads_them(folder):
    assert tensor_files.read_metadata(folder) == pickle.loads((folder / ".metadata").read_bytes())
