"""Threads, precision and determinism of a rank's device."""

import pytest
import torch

from titan_lite.config import Debug
from titan_lite.distributed.device import init_device


@pytest.mark.parametrize(("command", "threads"), [("./run_train.sh", 3), (None, 1)])
def test_threads_are_those_of_the_environment_where_run_train_sh_or_the_user_has_set_them(
    command, threads, monkeypatch
):
    before = torch.get_num_threads()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    monkeypatch.delenv("TITAN_LITE_COMMAND", raising=False)
    if command:
        monkeypatch.setenv("TITAN_LITE_COMMAND", command)
    try:
        torch.set_num_threads(3)  # as OMP_NUM_THREADS does
        init_device(Debug())
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_the_precision_of_float32_matmuls_is_set(precision, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    threads = torch.get_num_threads()
    init_device(Debug(), precision)
    torch.set_num_threads(threads)
    assert torch.get_float32_matmul_precision() == precision


def test_deterministic_does_not_fill_new_tensors(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(torch.get_num_threads()))
    threads = torch.get_num_threads()
    try:
        init_device(Debug(deterministic=True))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.set_num_threads(threads)
