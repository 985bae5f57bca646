"""Objects over ranks, which all tests with more than one process show over several; and errors
about another rank.
"""

import pytest
import torch
import torch.distributed as dist

from titan_lite.config import Debug
from titan_lite.distributed.process_group import gather_objects, init_device, is_communication


def test_a_process_without_a_group_has_its_own_alone():
    assert gather_objects("value") == ["value"]


def caused_by(cause):
    error = ValueError("a checkpoint")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (
            RuntimeError(
                "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
                " [127.0.0.1]:10673"
            ),
            True,
        ),
        (dist.DistBackendError("NCCL error"), True),
        (caused_by(dist.DistNetworkError("gone")), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
        (caused_by(OSError("no space")), False),
    ],
)
def test_errors_of_communication_are_told_from_others(error, is_one):
    assert is_communication(error) == is_one


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
def test_the_precision_of_float32_products_is_set(precision, monkeypatch):
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
