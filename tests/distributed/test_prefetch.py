"""Buckets in eager mode overlap with computation on every layout, in one order on all ranks, and
change no number.
"""

import functools
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from parity import batch, build, gradients, make_mesh, my_microbatches
from ranks import run_ranks
from tiny import HEADS, TIED, UNTIED

from titan_lite.distributed import param_collectives as gather
from titan_lite.distributed.buckets import Bucket
from titan_lite.distributed.prefetch import PrefetchGatherer

SCATTER, ALL = "reduce_scatter_tensor", "all_reduce"
LAYOUTS = {"DDP": ((2, 1), [ALL]), "FSDP": ((1, 2), [SCATTER]), "HSDP": ((2, 2), [SCATTER, ALL])}
BUCKETS = 4  # two blocks, embedding and output


class Watched:
    """The collectives' operators; calls: sums that are started and waited for, and what else is
    noted there.
    """

    def __init__(self):
        self.operators, self.calls, self.started = gather.collectives, [], {}

    def __getattr__(self, name):
        operator = getattr(self.operators, name)

        def call(tensor, *args):
            result = operator(tensor, *args)
            if name in (SCATTER, ALL):
                self.started[result.data_ptr()] = name
                self.calls.append((name, args[-1], tuple(tensor.shape)))
            elif name == "wait_tensor" and tensor.data_ptr() in self.started:
                self.calls.append((f"wait for {self.started.pop(tensor.data_ptr())}",))
            return result

        return call


def train(stage, mesh, count, waits_at_once=False):
    """(gradients of `count` microbatches; calls, with the end of each backward among them)."""

    reduce = PrefetchGatherer.reduce

    def at_once(eager, gradient, plan, dtype):
        return plan.finish_reduce(plan.start_reduce(gradient)).to(dtype)

    def noted(eager, gradient, plan, dtype):
        watched.calls.append(("gradient",))
        return reduce(eager, gradient, plan, dtype)

    tokens, labels = batch()
    stage.model.zero_grad()
    watched = Watched()
    with (
        mock.patch.object(gather, "collectives", watched),
        mock.patch.object(PrefetchGatherer, "reduce", at_once if waits_at_once else noted),
    ):
        for input, label in my_microbatches(mesh, tokens, labels, count=count):
            (stage(input, labels=label).sum() / (labels != -100).sum()).backward()
            watched.calls.append(("end",))
        return gradients(stage, whole=False), watched.calls


def two_microbatches(layout):
    mesh = make_mesh(*LAYOUTS[layout][0])
    return train(build(UNTIED, mesh), mesh, 2)[1]


@functools.cache
def of_two_microbatches(layout):
    replicate, shard = LAYOUTS[layout][0]
    return run_ranks(replicate * shard, two_microbatches, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bucket_is_reduced_under_the_backward_of_the_next_one(layout):
    kinds = LAYOUTS[layout][1]
    for calls in of_two_microbatches(layout):
        names = [name for name, *_ in calls]
        ends = [place for place, name in enumerate(names) if name == "end"]
        for begin, end in ((0, ends[0]), (ends[0] + 1, ends[1])):
            backward = names[begin:end]
            for kind in kinds:
                assert backward.count(kind) == BUCKETS
                for number in range(
                    1, BUCKETS - (kind != kinds[0])
                ):  # the last all-reduces of HSDP are started at the end
                    start, following = (nth(backward, kind, each) for each in (number - 1, number))
                    wait = backward.index(f"wait for {kind}", start)
                    assert start < wait < following
                    assert "gradient" in backward[start:wait] or kind != kinds[0]
        assert set(names[ends[1] + 1 :]) == {
            f"wait for {kinds[-1]}"
        }  # a look at a gradient starts nothing


def nth(names, name, number):
    """Place of the occurrence with this number."""
    return [place for place, each in enumerate(names) if each == name][number]


def reads():
    return [reads_of(reshard) for reshard in (True, False)]


def reads_of(reshard):
    """[(event, FQNs or FQN)] of gathers in a second step: "start" and "wait" of a bucket, "read" of
    a weight, "backward".
    """
    mesh, calls = make_mesh(1, 2), []
    stage = build(UNTIED, mesh, reshard=reshard)
    tokens, labels = batch()
    start, finish, read = Bucket.start_gather, Bucket.finish_gather, PrefetchGatherer.gather

    def noted(function, event, name):
        def call(first, *args):
            if event != "read":
                calls.append((event, first.as_one.fqn))
            result = function(first, *args)
            if event == "read":
                calls.append((event, args[1].fqn))
            return result

        return mock.patch.object(*name, call)

    for _ in range(2):
        calls.clear()
        with (
            noted(start, "start", (Bucket, "start_gather")),
            noted(finish, "wait", (Bucket, "finish_gather")),
            noted(read, "read", (PrefetchGatherer, "gather")),
        ):
            loss = stage(tokens[:4], labels=labels[:4]).sum()
            calls.append(("backward", ""))
            loss.backward()
    return calls


def test_a_bucket_is_gathered_while_weights_of_the_one_before_are_read():
    first, second = run_ranks(2, reads)
    assert first == second
    for reshard, calls in zip((True, False), first, strict=True):
        check_reads(calls, reshard)


def check_reads(first, reshard):
    turn = first.index(("backward", ""))
    for phase, gathers in (
        (first[:turn], BUCKETS),
        (first[turn + 1 :], BUCKETS - 1 if reshard else 0),
    ):
        events = [event for event, _ in phase]
        order = [name for event, name in phase if event == "wait"]
        assert len(order) == gathers == events.count("start")
        for current, following in itertools.pairwise(order):
            wait, start, later = (
                phase.index(("wait", current)),
                phase.index(("start", following)),
                phase.index(("wait", following)),
            )
            assert wait < start < later  # two buckets at once
            assert {name for event, name in phase[start:later] if event == "read"} & {
                *current.split()
            }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_of_a_group_sum_in_one_order(layout):
    by_group = {}
    for calls in of_two_microbatches(layout):
        mine = [call for call in calls if len(call) == 3]
        for group in {group for _, group, _ in mine}:
            by_group.setdefault(group, []).append([call for call in mine if call[1] == group])
    assert all(len(ranks) == 2 and ranks[0] == ranks[1] for ranks in by_group.values())


def gradients_held_on_one_rank(layout):
    """The same with gradients that somebody else refers to, such as a thread that has looked at the
    stack: autograd then copies a gradient, and does not take it over.
    """
    held = []
    reduce = PrefetchGatherer._reduce_to_shard

    def holding(*arguments):
        gradient = reduce(*arguments)
        if torch.distributed.get_rank() == 0:
            held.append(gradient)
        return gradient

    mesh = make_mesh(*LAYOUTS[layout][0])
    # to copy a DTensor of uneven shards, torch 2.11 gathers it
    stage = build(replace(UNTIED, vocab_size=64), mesh)
    expected, expected_calls = train(stage, mesh, 2)
    with mock.patch.object(PrefetchGatherer, "_reduce_to_shard", holding):
        found, calls = train(stage, mesh, 2)
    assert all(torch.equal(found[fqn], gradient) for fqn, gradient in expected.items())
    assert calls == expected_calls


@pytest.mark.parametrize("layout", ["HSDP", pytest.param("FSDP", marks=pytest.mark.slow)])
def test_a_reference_to_a_gradient_on_one_rank_starts_no_sum_there(layout):
    replicate, shard = LAYOUTS[layout][0]
    run_ranks(replicate * shard, gradients_held_on_one_rank, layout)


def ways(layout):
    mesh = make_mesh(*layout)
    cases = dict(
        f32=(UNTIED, {}),
        tied=(TIED, {}),
        bf16=(UNTIED, dict(param=torch.bfloat16)),
        full=(UNTIED, dict(checkpointing="full")),
    )
    for config, options in [(HEADS, {})] if layout[2:] else cases.values():
        stage = build(config, mesh, **options)
        for count in (1, 3):
            expected, found = (
                train(stage, mesh, count, waits_at_once=True)[0],
                train(stage, mesh, count)[0],
            )
            assert all(torch.equal(found[fqn], gradient) for fqn, gradient in expected.items())
            assert {gradient.dtype for gradient in found.values()} == {torch.float32}


@pytest.mark.parametrize(
    "layout",
    [
        (2, 2),
        pytest.param((1, 2, 2), marks=pytest.mark.slow),
        pytest.param((2, 1), marks=pytest.mark.release),
    ],
)
def test_gradients_are_to_the_bit_those_of_sums_that_are_waited_for_at_once(layout):
    world_size = layout[0] * layout[1] * (layout[2] if layout[2:] else 1)
    run_ranks(world_size, ways, layout)
