"""Objects over ranks, which all tests with more than one process show over several; and errors
about another rank.
"""

import pytest
import torch.distributed as dist

from titan_lite.distributed.process_group import (
    all_equal,
    all_gather_objects,
    first_nonempty,
    gather_to_rank_0,
    is_communication_error,
    max_over_ranks,
    sum_over_ranks,
)


def test_a_process_without_a_group_has_its_own_alone():
    assert all_gather_objects("value") == ["value"]
    assert gather_to_rank_0("value") == ["value"]
    assert max_over_ranks(1, 2) == [1, 2]
    assert sum_over_ranks(1, 2) == [1, 2]
    assert first_nonempty("value") == "value"
    assert all_equal("value")


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
    assert is_communication_error(error) == is_one
