"""The ranks of a group go on together: all with a quorum and a state of another group, or none."""

import os

import pytest
from ranks import run_ranks

pytest.importorskip("torchft")

from titan_lite.config import FaultTolerance
from titan_lite.features.replica_groups import quorum as module
from titan_lite.features.replica_groups.quorum import GroupState, Quorum

STATE = GroupState({}, {})


class Manager:
    """torchft's Manager as this package sees it. Its quorums are given, one after another:

    "living"   as many groups as there should be    "state"    also the state of one at step 9
    "alone"    one group                             "fault"    a state that did not arrive
    "silence"  no answer
    """

    def __init__(self, quorum, outcomes):
        self.quorum = quorum
        self.outcomes = list(outcomes)
        self.step = 7
        self.error = None
        self.commits = 0
        self._quorum_future = None

    def start_quorum(self):
        outcome = self.outcomes.pop(0)
        self.error = None
        self.living = 1 if outcome == "alone" else 2
        if outcome == "silence":
            raise TimeoutError("no answer")
        if outcome == "state":
            self.step = 9
            self.quorum.received = STATE
        if outcome == "fault":
            self.report_error(RuntimeError("cut off"))

    def num_participants(self):
        return self.living

    def participating_rank(self):
        return 1

    def current_step(self):
        return self.step

    def load_state_dict(self, state):
        self.step = state["step"]

    def report_error(self, error):
        self.error = type("Reported", (), {"original_exception": error})()

    def errored(self):
        return self.error

    def should_commit(self, timeout):
        assert self.error is not None
        self.commits += 1
        return False


def begin(outcomes, stops):
    rank = int(os.environ["RANK"])
    module.PAUSE = 0.0
    quorum = object.__new__(Quorum)
    quorum.settings = FaultTolerance(
        replica_groups=2, min_replica_groups=2, lighthouse="http://127.0.0.1:1"
    )
    quorum.received = None
    quorum.manager = Manager(quorum, outcomes[rank])
    asked = iter([*stops, *[False] * 9])
    has_quorum = quorum.begin_step(lambda: rank == 1 and next(asked))
    manager = quorum.manager
    return has_quorum, quorum.received is STATE, manager.step, manager.commits


def of_ranks(outcomes, stops=()):
    return run_ranks(2, begin, outcomes, stops)


@pytest.mark.parametrize(
    "first",
    [("state", "fault"), ("fault", "state"), ("state", "silence"), ("living", "fault")],
    ids="-".join,
)
def test_a_state_that_one_rank_lacks_is_taken_by_none(first):
    outcomes = [[first[0], "state"], [first[1], "state"]]
    assert of_ranks(outcomes) == [(True, True, 9, 1)] * 2


def test_a_rank_that_needs_no_state_beside_one_that_has_one_asks_again():
    outcomes = [["state", "living"], ["living", "living"]]
    assert of_ranks(outcomes) == [(True, False, 7, 1)] * 2


def test_fewer_groups_than_needed_are_no_quorum():
    outcomes = [["alone", "alone", "living"]] * 2
    assert of_ranks(outcomes) == [(True, False, 7, 2)] * 2


def test_a_signal_to_one_rank_ends_the_wait_of_all():
    outcomes = [["silence"] * 3] * 2
    assert of_ranks(outcomes, stops=[False, True]) == [(False, False, 7, 2)] * 2
