"""Few cases of many options: each two values of two options meet in one of them.

cases = all_pairs({"layout": ["dp_shard=2", "tp=2"], "mode": ["eager", "compiled"]})
cases[0]["layout"]
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

Case = dict[str, str]


def all_pairs(
    options: Mapping[str, Sequence[str]], is_possible: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Return cases that have a value of every option, by the option's name; always the same ones.

    is_possible: whether these values of some options can be together, and are wanted. A case is
    begun with two values that have not met, and gets of each other option the value that has met
    fewest of those before it.
    """
    met: set[tuple] = set()
    cases = []
    for one, other in itertools.combinations(options, 2):
        for values in itertools.product(options[one], options[other]):
            case = dict(zip((one, other), values, strict=True))
            if not is_possible(case) or met.issuperset(pairs_of(case)):
                continue
            for name in options:
                if name not in case:
                    wider = [{**case, name: value} for value in options[name]]
                    case = max(
                        filter(is_possible, wider), key=lambda each: len({*pairs_of(each)} - met)
                    )
            met.update(pairs_of(case))
            cases.append(case)
    return cases


def pairs_of(case: Case) -> Iterable[tuple]:
    return itertools.combinations(sorted(case.items()), 2)
