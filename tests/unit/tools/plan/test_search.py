"""The candidates of a search, their estimates by formula, and the reasons why candidates lost."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from commands import Job, python
from test_changes import H100, planned

from titan_lite.config import (
    Config,
    ConfigError,
    Model,
    Parallelism,
    Training,
    load_config,
)
from titan_lite.cost.machine import GIB
from titan_lite.features.moe.keys import ExpertsKeys
from titan_lite.tools.plan import search as searching
from titan_lite.tools.plan.command import (
    Subject,
    build_parser,
    lay_out,
    main,
    sequences_per_step,
)
from titan_lite.tools.plan.plan import make_plan
from titan_lite.tools.plan.search import (
    InFlight,
    Search,
    differing,
    in_flight_by_rank,
    least_bytes,
    space,
    step_seconds,
    why_lost,
    words_of,
)

RECIPES = Path(__file__).parents[4] / "train_configs"
SEVENTY = str(RECIPES / "llama3_70b.toml")
OF_256 = (
    "--world-size=64",
    "--training.global_batch_size=-1",
    "--training.local_batch_size=8",  # of 64
)


def changed(recipe, world_size, **changes):
    overrides = [f"--{key.replace('__', '.')}={value}" for key, value in changes.items()]
    return lay_out(load_config(RECIPES / f"{recipe}.toml", overrides), world_size)


def estimate(layout):
    return step_seconds(layout, H100), least_bytes(layout)


def test_the_space_keeps_the_tokens_of_a_step_and_the_ranks():
    config = Config(model=Model(flavor="8B"), training=Training(seq_len=8192))
    found = list(space(config, 16, H100, 32))
    assert len(found) == len({tuple(change.items()) for change in found})  # none twice
    for change in found:
        degree = {
            axis: int(change[f"parallelism.{axis}_degree"])
            for axis in ("tensor_parallel", "pipeline_parallel")
        }
        copies = int(change["parallelism.data_parallel_replicate_degree"])
        dp = int(change["parallelism.data_parallel_shard_degree"]) * copies
        assert degree["tensor_parallel"] * degree["pipeline_parallel"] * dp == 16
        assert 32 % (dp * int(change["training.local_batch_size"])) == 0
        assert change["parallelism.context_parallel_degree"] == "1"
    ways = {
        (
            change["activation_checkpoint.mode"],
            change.get("activation_checkpoint.selective_ac_option"),
        )
        for change in found
    }
    assert ways == {("none", None), ("selective", "op"), ("selective", "op/2"), ("full", None)}
    assert {change["parallelism.pipeline_parallel_schedule"] for change in found} == {
        "1F1B",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    }
    assert {change["parallelism.data_parallel_replicate_degree"] for change in found} >= {"1", "2"}


def test_long_sequences_may_be_split_and_tied_models_have_pipelines():
    config = Config(model=Model(flavor="1B"), training=Training(seq_len=131072))
    found = list(space(config, 16, H100, 16))
    assert {change["parallelism.context_parallel_degree"] for change in found} == {
        "1",
        "2",
        "4",
        "8",
        "16",
    }
    degrees = {change["parallelism.pipeline_parallel_degree"] for change in found}
    assert degrees == {"1", "2", "4", "8", "16"}


def test_experts_are_split_inside_a_node_or_not_at_all():
    mixture = Model(name="qwen3_moe", flavor="30B-A3B")
    config = Config(model=mixture, experts=ExpertsKeys(capacity_factor=1.5))
    found = list(space(config, 16, H100, 16))
    with_capacity = {
        (
            change["parallelism.expert_parallel_degree"],
            change.get("experts.capacity_factor", "1.5"),
        )
        for change in found
    }
    assert with_capacity == {("1", "0"), ("2", "1.5"), ("4", "1.5"), ("8", "1.5")}
    assert any(words_of(change).get("experts") == "experts over 8" for change in found)
    dense = list(space(Config(model=Model(flavor="8B")), 16, H100, 16))
    assert not any("parallelism.expert_parallel_degree" in change for change in dense)


@pytest.mark.parametrize(
    ("turned_on", "degree", "key", "off"),
    [
        (
            ["--compile.enable", "--parallelism.enable_async_tensor_parallel"],
            "parallelism.tensor_parallel_degree",
            "parallelism.enable_async_tensor_parallel",
            "false",
        ),
        (
            ["--parallelism.replicate_compression=powersgd"],
            "parallelism.data_parallel_replicate_degree",
            "parallelism.replicate_compression",
            "none",
        ),
    ],
    ids=["async", "powersgd"],
)
def test_what_a_layout_turns_off_is_among_the_keys_of_the_best(turned_on, degree, key, off):
    config = load_config("llama3_8b", [*turned_on, f"--{degree}=2"])
    found = list(space(config, 16, H100, 32))
    assert {change[degree] for change in found} >= {"1", "2"}
    for change in found:
        assert differing(config, change).get(key) == (off if change[degree] == "1" else None)
    assert all(key not in change for change in space(load_config("llama3_8b", []), 16, H100, 32))


def test_pipelines_have_16_ranks_at_most_or_as_many_as_the_recipes():
    for own, longest in ((1, 16), (32, 32)):
        parallelism = Parallelism(pipeline_parallel_degree=own)
        config = Config(model=Model(flavor="405B"), parallelism=parallelism)
        degrees = {
            int(change["parallelism.pipeline_parallel_degree"])
            for change in space(config, 512, H100, 512)
        }
        assert max(degrees) == longest


def test_formulas_know_what_costs_memory_and_time():
    seconds, nbytes = estimate(changed("llama3_8b", 8))
    more_seconds, more_bytes = estimate(changed("llama3_8b", 8, training__local_batch_size=4))
    assert more_bytes > nbytes
    assert more_seconds == pytest.approx(2 * seconds, rel=0.1)
    recomputed_seconds, recomputed_bytes = estimate(
        changed("llama3_8b", 8, activation_checkpoint__mode="full")
    )
    assert recomputed_bytes < nbytes
    assert recomputed_seconds > 1.2 * seconds
    assert nbytes < H100.memory * GIB
    seventy = changed("llama3_70b", 8, parallelism__data_parallel_shard_degree=-1)
    assert least_bytes(seventy) > H100.memory * GIB  # 850 GB of states alone


def test_a_layout_in_words_and_what_of_it_a_recipe_has_to_say():
    config = Config(
        model=Model(flavor="8B"),
        training=Training(seq_len=8192, local_batch_size=1, global_batch_size=32),
    )
    change = next(
        each
        for each in space(config, 16, H100, 32)
        if each["parallelism.pipeline_parallel_degree"] == "2"
        and each["parallelism.tensor_parallel_degree"] == "4"
    )
    words = ", ".join(words_of(change).values())
    assert words.startswith("pp 2 x dp_shard 2 x tp 4, batch ")
    assert "1F1B" in words
    keys = differing(config, change)
    assert keys["parallelism.pipeline_parallel_degree"] == "2"
    assert "parallelism.context_parallel_degree" not in keys
    assert "training.global_batch_size" not in keys


def test_those_that_lost_are_told_why():
    best, slow, large = (
        planned(1.0, compute=0.9, bubble=0.1),
        planned(1.5, compute=0.9, bubble=0.6),
        planned(memory=90.0),
    )
    assert why_lost(slow, best).startswith("50.0% slower: waiting for other pipeline ranks +0.5 s")
    assert why_lost(large, best).startswith("12.0 GiB too many, mostly activations")
    tight = planned(0.9, memory=77.7)
    assert why_lost(tight, best) == "tight, 0.3 GiB free; it would take 10.0% less time"


def processes_of(session):
    """Numbers of processes that are not zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, own, *_ = path.read_text().rpartition(") ")[2].split()
            found += [path.parent.name] if int(own) == session and state != "Z" else []
    return found


@pytest.mark.release
@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_a_search_that_is_stopped_shows_the_best_and_leaves_nothing_behind(name, tmp_path):
    keys = [f"--{key}" for key in ("training.global_batch_size=16", "training.seq_len=64")]
    command = python(
        "-m",
        "titan_lite",
        "plan",
        RECIPES / "debug_model.toml",
        "--world-size",
        4,
        *keys,
        "--search",
        30,
    )
    with Job(tmp_path / "output", *command, session=True) as job:
        session = job.process.pid
        job.until(
            r" [1-9]\d*/30 .*best .* tokens/s per GPU: ",
            seconds=400,
        )
        if name == "SIGKILL":
            job.process.kill()
        else:  # as a terminal does, or timeout
            os.killpg(session, getattr(signal, name))
        assert job.process.wait(60) == (-9 if name == "SIGKILL" else 130)
        deadline = time.monotonic() + 60
        while processes_of(session):
            assert time.monotonic() < deadline, processes_of(session)
            time.sleep(0.1)
        if name != "SIGKILL":
            assert "tokens/s per GPU: " in job.output.splitlines()[-2]  # the last is empty
            assert not re.search("Traceback|resource_tracker", job.output)


def test_no_recipe_is_told(capsys):
    assert main([]) == 2
    assert "no recipe" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        changed("llama3_8b", 7, parallelism__tensor_parallel_degree=2)


# What is planned: memory first, then the fastest, until enough fit


class Bench:
    """A search over layouts of one second to as many, whose memory by formula and by plan is
    given.
    """

    def __init__(self, monkeypatch, layouts, modes=("full",)):
        """layouts: (GiB by formula, GiB as planned)."""
        self.planned = []
        self.layouts = layouts
        self.changes = []
        for change in space(Config(model=Model(flavor="8B")), 16, H100, 32):
            mode = modes[len(self.changes) % len(modes)]
            change = change | {"activation_checkpoint.mode": mode}
            if len(self.changes) < len(layouts) and change not in self.changes:
                self.changes.append(change)
        monkeypatch.setattr(searching, "step_seconds", lambda number, machine: 1.0 + number)
        monkeypatch.setattr(searching, "least_bytes", self.least_bytes)
        monkeypatch.setattr(searching, "plan_changes", self.plan)
        monkeypatch.setattr(
            searching,
            "kind_of",
            lambda number: (self.changes[number]["activation_checkpoint.mode"],),
        )

    def least_bytes(self, number, in_flight=True):
        return self.layouts[number][0] * GIB

    def plan(self, lay_out, changes, *_):
        for change in changes:
            number = self.changes.index(change)
            self.planned.append(number)
            # 2 GiB of a plan are outside of tensors
            yield change, planned(1.0 + number, memory=self.layouts[number][1] - 2)

    def search(self, count):
        search = Search(self.changes.index, H100)
        search.run(self.changes, count)
        return search.lines(Config())


def test_a_search_goes_on_until_one_fits_and_counts_the_rest(monkeypatch):
    """As for 70B on 64 A100: the fastest by formula do not fit, and slower ones do."""
    bench = Bench(monkeypatch, [(90, 99), (75, 93), (60, 88), (70, 85), (50, 70), (40, 60)])
    lines = bench.search(1)
    # the first cannot fit; the fourth would not if it needs 1.24 times as much, as the second does
    assert bench.planned == [1, 2, 4, 5]
    assert lines[0] == (
        "6 layouts: 0 cannot run, 1 cannot fit, 4 planned, 1 not (slower or too large, by formula)"
    )
    assert lines[-1].startswith("best: --")
    assert lines[-2].startswith("plans of 3 published runs (8B, inductor, bfloat16, H100 at 500 W)")
    assert not any("no layout fits" in line for line in lines)


def test_a_search_stops_when_enough_fit_with_room(monkeypatch):
    bench = Bench(monkeypatch, [(50, 79.7), (50, 70), (50, 60), (50, 60), (50, 60)])
    lines = bench.search(2)
    assert bench.planned == [0, 1, 2, 3]  # two at a time
    assert lines[2] == "all: dp_shard 16, batch 1, block buckets"
    assert not any("buckets" in line for line in lines[3:])
    assert lines[4].endswith("; computation; longest wait: clipping and optimizer, 0%")
    assert lines[5].endswith(": computation +1 s per step")
    fits = [line.split()[7] for line in lines[4:8]]
    assert fits == ["yes", "yes", "yes", "tight"]  # the fastest is tight, and not the best
    assert "4 planned, 1 not" in lines[0]


def test_a_layout_waits_for_one_of_its_kind_alone(monkeypatch):
    layouts = [(50, 90), (60, 60), (55, 90), (70, 70), (60, 85)]
    bench = Bench(monkeypatch, layouts, modes=("none", "full"))
    bench.search(3)
    assert bench.planned == [0, 1, 2, 3]  # the last needs more than the first, in mode none


def test_a_layout_that_is_not_expected_to_fit_is_planned_where_no_other_does(monkeypatch):
    """It may need less beyond the formula than the others of its kind."""
    bench = Bench(monkeypatch, [(50, 90), (50, 90), (60, 79.5), (70, 90)])
    assert bench.search(1)[-1].startswith("best: --")
    assert bench.planned == [0, 1, 2]
    bench = Bench(monkeypatch, [(50, 90)] * 4 + [(60, 79.5)] + [(44, 90)] * 99)
    assert bench.search(1)[-1].startswith("best: --")
    assert bench.planned[:13] == [0, 1, 5, 6, 7, 8, 2, 9, 10, 3, 11, 12, 4]  # beside the fastest
    assert len(bench.planned) == 17  # it fits without room, and others do not


def test_only_what_was_planned_does_not_fit(monkeypatch):
    bench = Bench(monkeypatch, [(50, 90), (50, 90), *[(gib, 90) for gib in (60, 64, 63, 62, 61)]])
    assert bench.search(1)[-1] == "none of the 6 planned fits"
    assert bench.planned == [0, 1, 2, 6, 5, 4]  # the smallest of the others
    lines = Bench(monkeypatch, [(50, 90), (40, 90), (90, 90)]).search(1)
    assert lines[-1] == "no layout fits"


def sequences(arguments):
    options, overrides = build_parser().parse_with_overrides(arguments)
    config = load_config(options.recipe, overrides)
    subject = Subject(options.recipe, overrides, config, options.world_size, H100)
    return sequences_per_step(subject)


def test_the_tokens_of_a_step_are_the_recipes():
    # the recipe's FSDP 64 x TP 4 do not run on 64 ranks, and need not
    seventy = [SEVENTY, *OF_256]
    assert sequences(seventy) == (512, "the recipe's, on 256 ranks")
    eight = str(RECIPES / "llama3_8b.toml")
    assert sequences([eight, "--world-size=64"]) == (128, "the recipe's, on 64 ranks")
    given = [eight, "--world-size=64", "--training.global_batch_size=96"]
    assert sequences(given) == (96, "training.global_batch_size")
    with pytest.raises(ConfigError, match=r"use --training.global_batch_size=N"):
        sequences([*seventy, "--parallelism.tensor_parallel_degree=3"])


# The bound excludes no layout whose plan fits

QUICK = ("FSDP", "1F1B", "ZBVZeroBubble, full")
STAGES = "parallelism.pipeline_parallel_degree=2 training.local_batch_size=4"
BOUNDED = {  # name: (ranks, options)
    "FSDP": (4, ""),
    "selective": (4, "activation_checkpoint.mode=selective"),
    "compressed": (
        4,
        "parallelism.data_parallel_replicate_degree=2 parallelism.replicate_compression=powersgd",
    ),
    "TP": (4, "parallelism.tensor_parallel_degree=2"),
    "1F1B": (4, STAGES),
    "tied, 1F1B": (4, f"{STAGES} model.tied_embeddings=yes model.vocab_size=128256"),
    "ZBVZeroBubble, full": (
        4,
        f"{STAGES} parallelism.pipeline_parallel_schedule=ZBVZeroBubble"
        " activation_checkpoint.mode=full",
    ),
    "float8 gathered": (2, "float8.enable float8.all_gather training.global_batch_size=16"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.release) for case in BOUNDED],
)
def test_by_formula_a_layout_never_needs_more_than_its_plan(case):
    ranks, words = BOUNDED[case]
    options = [f"--{word}" for word in words.split()]
    shrunk = [
        f"--model.tokenizer_path={RECIPES.parent / 'assets/tokenizer/debug.model'}",
        "--model.flavor=debug",
        "--training.seq_len=4096",
        "--compile.backend=inductor",
        "--activation_checkpoint.mode=none",
        "--parallelism.data_parallel_shard_degree=-1",
        "--training.local_batch_size=1",
    ]
    config = load_config(RECIPES / "llama3_8b.toml", [*shrunk, *options])
    layout = lay_out(config, ranks)
    memory = make_plan(layout, H100).memory
    in_tensors = memory.peak - memory.parts["workspaces of cuBLAS"]
    bound = least_bytes(layout)
    assert 0.2 * in_tensors < bound - memory.outside <= in_tensors


def test_moments_of_a_schedule_with_most_in_flight():
    parallelism = Parallelism(pipeline_parallel_degree=2)
    first, last = in_flight_by_rank(parallelism, (0, 1), 4)
    # after the second forward; after the first backward and the forward behind it
    assert max(first) == (InFlight(2, 0, True),)
    assert max(last) == (InFlight(1, 0, True),)
    zbv = parallelism.replace(pipeline_parallel_schedule="ZBVZeroBubble")
    _, last = in_flight_by_rank(zbv, (0, 1, 1, 0), 4)
    # 2p - 1 second halves are left for the end of a step
    assert max(sum(stage.halves for stage in moment) for moment in last) == 3
