"""tests/ranks.py: every rank is a new process that has imported everything already; what fails is
told.
"""

import os
import sys

import pytest
from ranks import run_ranks

from titan_lite.distributed.process_group import all_gather_objects


def process_and_modules():
    return os.getpid(), all_gather_objects(os.getpid()), "torch._inductor.compile_fx" in sys.modules


def test_a_rank_is_a_new_process_that_has_imported_torch():
    worlds = [run_ranks(2, process_and_modules) for _ in range(2)]
    for world in worlds:
        assert [everyone for _, everyone, _ in world] == [[process for process, *_ in world]] * 2
        assert all(imported for *_, imported in world)
    assert len({process for world in worlds for process, *_ in world}) == 4


def fail_on_rank_1(how):
    if os.environ["RANK"] == "1":
        how("out of luck")
    all_gather_objects(None)


def fail(message):
    raise RuntimeError(message)


def die(message):
    os._exit(7)


@pytest.mark.parametrize(
    ("how", "told"),
    [(fail, r"rank 1: Traceback (.*\n)+RuntimeError: out of luck\n"), (die, r"exit codes .*, 7\]")],
)
def test_a_rank_that_fails_ends_the_others_and_the_test(how, told):
    with pytest.raises(pytest.fail.Exception, match=told):
        run_ranks(2, fail_on_rank_1, how)
