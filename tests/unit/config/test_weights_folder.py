"""The kind of a folder, by the names of its files."""

import pytest

from titan_lite.config.weights_folder import (
    HUGGING_FACE,
    STEP,
    TORCHTITAN,
    folder_kind,
    tokenizer_in,
)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["manifest.json", "state.json", ".metadata"], STEP),
        (["manifest.json"], STEP),  # damaged, which its reader says
        (["state.json", "config.json"], STEP),
        ([".metadata", "__0_0.distcp"], TORCHTITAN),
        (["config.json", "model.safetensors"], HUGGING_FACE),
        (["model.safetensors"], ""),
        ([], ""),
    ],
)
def test_a_folder_is_of_the_kind_that_its_files_are_of(names, kind, tmp_path):
    for name in names:
        (tmp_path / name).touch()
    assert folder_kind(tmp_path) == kind


def test_a_folder_has_a_tokenizer_and_a_file_has_none(tmp_path):
    (tmp_path / "tokenizer_config.json").touch()
    assert tokenizer_in(tmp_path) == ""
    (tmp_path / "tokenizer.json").touch()
    assert tokenizer_in(tmp_path) == str(tmp_path / "tokenizer.json")
    assert tokenizer_in(tmp_path / "tokenizer.json") == ""
