"""The table of optimizers has all keys of [optimizer], and a file for each row."""

from pathlib import Path

import pytest

import titan_lite
from titan_lite.config import Optimizer
from titan_lite.config.optimizers import OPTIMIZERS

OF_ALL = {"name", "lr", "weight_decay"}


def test_every_key_has_an_optimizer_that_reads_it():
    read = {key for algorithm in OPTIMIZERS.values() for key in algorithm.keys}
    assert read == set(Optimizer.model_fields) - OF_ALL


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_the_file_of_its_name(name):
    folder = "optim" if OPTIMIZERS[name].is_elementwise else "features/*"
    (file,) = Path(titan_lite.__file__).parent.glob(f"{folder}/{name.lower()}.py")
    assert name in file.read_text(encoding="utf-8")
