"""tests/pairs.py: each two values meet that may, in few cases, none of which is impossible."""

from itertools import combinations, product

from pairs import all_pairs

OPTIONS = {"layout": ["dp", "tp", "pp"], "schedule": ["", "1F1B", "GPipe"], "mode": ["a", "b"]}


def is_possible(case):
    """A pipeline alone has a schedule."""
    if not {"layout", "schedule"} <= case.keys():
        return True
    return bool(case["schedule"]) == (case["layout"] == "pp")


def test_each_two_values_meet_that_can_be_together():
    cases = all_pairs(OPTIONS, is_possible)
    assert all(case.keys() == OPTIONS.keys() and is_possible(case) for case in cases)
    for one, other in combinations(OPTIONS, 2):
        met = {(case[one], case[other]) for case in cases}
        for values in product(OPTIONS[one], OPTIONS[other]):
            pair = dict(zip((one, other), values, strict=True))
            assert (values in met) == is_possible(pair), pair
    assert len(cases) == 8  # of 18: each layout in both modes, and pp with either schedule
