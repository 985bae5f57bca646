"""The page of a run: what it reads, how it looks in a browser, what it says where it is wrong, and
that nothing in a recipe becomes a part of the page.
"""

import html
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from titan_lite.config import ConfigError, load_config, to_toml
from titan_lite.tools.report.page import FRAME, main, name_runs, page
from titan_lite.tools.report.run_record import read_run
from titan_lite.tools.report.script_data import MARKED, MAX_ROWS, script_data, thin
from titan_lite.tools.report.sections import exposed_share

ROOT = Path(__file__).parents[4]
MEASURES = Path(__file__).with_name("measure_page.js")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
EVIL = "</script><script>alert('x')</script><img src=x onerror=alert(1)> {{data}} & \u2028"
COLLECTIVE = {"kind": "all_gather", "fqns": ["a.weight", "b.weight"], "nbytes": 2**21, "ranks": 2}
COMPILE_REPORT = {
    "graph": "forward",
    "before": {"all_gather": 9},
    "after": [{**COLLECTIVE, "seconds": 0.002, "under": 0.001, "exposed": 0.0005}],
    "timeline": {"exposed": 0.0005, "seconds": 0.004, "communication": 0.002},
}


@pytest.fixture
def run(tmp_path):
    """run(name, metrics=[...], events=[...], ...): a run's folder."""

    def run(
        name="run",
        metrics=None,
        events=(),
        reports=None,
        overrides=("--training.steps", "40"),
    ):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        if metrics is None:
            metrics = [row(step, loss=8 - step / 10) for step in (10, 20, 30, 40)]
        (folder / "metrics.jsonl").write_text(
            "".join(line if type(line) is str else json.dumps(line) + "\n" for line in metrics)
        )
        if events:
            (folder / "events.jsonl").write_text(
                "".join(json.dumps(event) + "\n" for event in events)
            )
        if reports is not None:
            (folder / "compile.json").write_text(json.dumps(reports))
        if overrides is not None:
            config = load_config(ROOT / "train_configs/debug_model.toml", overrides)
            (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
        return folder

    return run


def row(step, **values):
    return {
        "step": step,
        "tps": 1000.0,
        "data_wait": 1.0,
        "memory_gib": 0.5,
        "step_time": 2.0,
        "tokens_seen": 100 * step,
        **values,
    }


def event(name, step, text="", time="2026-11-21T20:15:30+00:00"):
    return {"time": time, "event": name, "step": step, "text": text}


class Elements(html.parser.HTMLParser):
    """The elements of a page, their text, and the addresses that they load."""

    def __init__(self, text):
        super().__init__()
        self.found, self.texts, self.addresses = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append(tag)
        self.addresses += [
            value
            for name, value in attributes
            if name in ("src", "href", "data", "action", "srcset")
        ]

    def handle_data(self, data):
        self.texts.append(data)


def embedded(text):
    """Return the data that the script draws."""
    return json.loads(
        re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)[1]
    )


# The page


def test_a_page_has_what_the_run_wrote_and_loads_nothing(run):
    events = [
        event("start", 0),
        event("checkpoint", 20, "checkpoint written to run/checkpoint/step-20"),
        event("skip", 31, "step 31 skipped: loss nan"),
        event("done", 40),
    ]
    folder = run(
        metrics=[
            *(row(s, loss=8 - s / 10, mfu=40.0) for s in (10, 20, 40)),
            {"step": 40, "validation_loss": 4.5},
        ],
        events=events,
    )
    text = page([read_run(folder, "run")])
    elements = Elements(text)
    assert elements.addresses == []
    assert (
        text.count("://") == text.count("http://www.w3.org/2000/svg") == 1
    )  # a name, and no address
    assert "default-src 'none'" in text
    assert 'name="viewport"' in text
    said = " ".join(elements.texts)
    for words in (
        "40 of 40",
        "4.0000",
        "4.5000",
        "1,000",
        "40.0%",
        "0.50 GiB",
        "step 31 skipped: loss nan",
        "checkpoints of steps 20",
    ):
        assert words in said, words
    (data,) = embedded(text)
    assert data["step"] == [10, 20, 40]
    assert data["tokens"] == [1000, 2000, 4000]
    assert data["values"]["loss"] == [7, 6, 4]
    assert data["values"]["validation_loss"] == [None, None, 4.5]
    assert data["hours"] == pytest.approx([20 / 3600, 40 / 3600, 80 / 3600])
    assert [(mark["kind"], mark["step"]) for mark in data["marks"]] == [
        ("checkpoint", 20),
        ("skip", 31),
    ]


def test_the_last_start_says_what_it_ran_on(run):
    facts = {
        "layout": "4 ranks = dp_shard 2 x tp 2",
        "device": "NVIDIA H100",
        "host": "node-3 and 1 other node",
        "torch": "2.13.0",
        "revision": f"{'0123456789abcdef' * 2}01234567+changes",
    }
    events = [
        event("start", 0) | {"facts": facts | {"host": "node-1"}},
        event("stop", 20),
        event("start", 20) | {"facts": facts},
    ]
    metrics = [row(10), row(20), {"resumed_from": 20}, row(30)]
    said = " ".join(Elements(page([read_run(run(metrics=metrics, events=events), "run")])).texts)
    for name, fact in (facts | {"revision": "0123456789ab+changes"}).items():
        assert f"{name} {fact}" in said
    assert "node-1" not in said


def test_an_event_of_another_version_is_marked_as_one(run):
    folder = run(events=[event("start", 0), event("upgrade", 20, "a kind of tomorrow")])
    text = page([read_run(folder, "run")])
    (data,) = embedded(text)
    assert [(mark["kind"], mark["text"]) for mark in data["marks"]] == [
        ("other", "a kind of tomorrow")
    ]
    assert "upgrade" in " ".join(Elements(text).texts)


def test_the_script_knows_every_kind_of_mark():
    script = FRAME.read_text(encoding="utf-8")
    table = script[script.index("const KINDS") : script.index("const AXES")]
    assert set(re.findall(r"(\w+): \[", table)) == {*MARKED, "other"}


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (None, "checkpoints of steps 10, 20, 30"),
        ([20, 30], "checkpoints of steps 20, 30; 1 more were saved, and are deleted or moved"),
        ([], "checkpoints none; 3 more were saved"),
    ],
)
def test_steps_that_were_deleted_are_not_listed(kept, words, run):
    folder = run(events=[event("checkpoint", step) for step in (10, 20, 30)])
    for step in kept or ():
        (folder / f"checkpoint/step-{step}").mkdir(parents=True)
    if kept is not None:
        (folder / "checkpoint").mkdir(exist_ok=True)
    said = " ".join(Elements(page([read_run(folder, "run")])).texts)
    assert words in said
    assert ("of steps 10" in said) == (kept is None)


def test_signs_of_marks_are_beside_each_other_and_within_the_chart():
    """At the right edge, of a stop and a resume at one step, and of checkpoints of every step."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node, to run the page's script")
    script = FRAME.read_text(encoding="utf-8")
    functions = script[script.index("const SIGN") : script.index("const visible")]
    marks = [{"x": x, "kind": kind} for x, kind in [(400, "stop"), (400, "resume"), (399, "skip")]]
    marks += [{"x": x, "kind": "warning"} for x in (20, *range(300, 340, 3))]
    program = f"{functions} console.log(JSON.stringify(groupsOfMarks({json.dumps(marks)}, 400)))"
    groups = json.loads(subprocess.check_output([node, "-e", program]))
    assert sum(len(group["marks"]) for group in groups) == len(marks)
    assert groups[0]["right"] == 400
    assert set(groups[0]["kinds"]) == {"stop", "resume", "skip"}
    starts = [group["right"] - 12 * len(group["kinds"]) for group in groups]
    assert all(group["right"] <= start for group, start in zip(groups[1:], starts, strict=False))


def test_what_a_recipe_or_an_event_says_is_text_and_never_a_part_of_the_page(run):
    quiet = Elements(page([read_run(run("quiet", events=[event("warning", 10, "x")]), "quiet")]))
    folder = run(
        "evil",
        events=[event("warning", 10, EVIL)],
        overrides=("--job.description", EVIL, "--job.dump_folder", EVIL),
    )
    text = page([read_run(folder, EVIL)])
    loud = Elements(text)
    assert sorted(set(loud.found)) == sorted(set(quiet.found))
    assert loud.found.count("script") == 2
    assert loud.found.count("img") == 0
    assert embedded(text)[0]["name"] == EVIL
    assert embedded(text)[0]["marks"][0]["text"] == EVIL
    assert EVIL in "".join(loud.texts)


def test_the_sources_of_a_mixture_have_a_table_and_figures_of_their_own(run):
    def of(step, web, code):
        return {
            "tokens_by_source/web": 700 * step,
            f"tokens_by_source/{EVIL}": 300 * step,
            "loss_by_source/web": web,
        } | {f"loss_by_source/{EVIL}": code}

    metrics = [
        row(10, **of(10, 3.0, 2.0)),
        row(20, **of(20, None, 1.5)),
        {"step": 20, "validation_loss_by_source/web": 2.5},
    ]
    text = page([read_run(run(metrics=metrics), "run")])
    table = text.partition("<h2>Sources</h2>")[2].partition("</table>")[0]
    cells = re.findall("<td[^>]*>(.*?)</td>", table)
    assert (cells[:5], cells[6:]) == (
        ["web", "14,000", "70.0%", "3.0000", "2.5000"],
        ["6,000", "30.0%", "1.5000", ""],
    )
    assert Elements(text).found.count("script") == 2
    assert "<h2>Sources</h2>" not in page([read_run(run("one"), "one")])


def test_sources_of_validation_alone_have_rows_of_their_own(run):
    """[[validation.sources]], beside one corpus to train on or several."""
    validated = {"step": 10, "validation_loss_by_source/books": 2.25}
    mixed = {"tokens_by_source/web": 700, "loss_by_source/web": 3.0}
    for name, trained, expected in (
        ("one", {}, ["books", "", "", "", "2.2500"]),
        ("two", mixed, ["web", "700", "100.0%", "3.0000", "", "books", "", "", "", "2.2500"]),
    ):
        text = page([read_run(run(name, metrics=[row(10, **trained), validated]), name)])
        table = text.partition("<h2>Sources</h2>")[2].partition("</table>")[0]
        assert re.findall("<td[^>]*>(.*?)</td>", table) == expected


def test_several_runs_show_where_their_recipes_differ(run):
    one = read_run(run("one", overrides=("--optimizer.lr", "0.001")), "one")
    two = read_run(run("two", overrides=("--optimizer.lr", "0.005", "--compile.enable")), "two")
    text = page([one, two])
    differing = text[text.index("Differences of the recipes") : text.index("every key")]
    assert set(re.findall(r"<td>([a-z_]+\.[a-z_]+)</td>", differing)) == {
        "optimizer.lr",
        "compile.enable",
    }
    assert "<td>0.001</td><td>0.005</td>" in differing
    assert [data["name"] for data in embedded(text)] == ["one", "two"]
    alone = page([one])
    own = alone[alone.index("The recipe, without defaults") : alone.index("every key")]
    assert "<td>optimizer.lr</td><td>0.001</td>" in own
    assert "compile.enable" not in own
    assert "The recipes are the same" in page([one, one])


def test_buckets(run):
    found = read_run(
        run(
            reports=[
                COMPILE_REPORT,
                {**COMPILE_REPORT, "graph": "inference"},
                {**COMPILE_REPORT, "pp_rank": 1},
            ],
        ),
        "run",
    )
    text = page([found])
    assert "forward: 9 all_gather → 1" in text
    assert "a.weight and 1 more" in text
    assert "1 of 8 ms" in text  # exposed, of both ranks
    alone = {**COMPILE_REPORT, "timeline": {"exposed": 0.0, "seconds": 0.004, "communication": 0.0}}
    assert [
        exposed_share(reports) for reports in ([], [alone], [{**COMPILE_REPORT, "timeline": None}])
    ] == [""] * 3


# How it looks


LONG = "a/run-with-a-name/of-many-parts/and_one_word_that_is_longer_than_any_card_or_column_is_wide"
METRICS = [
    {
        **row(step, loss=8 - step / 10, grad_norm=1.25, lr=3e-4, mfu=41.5, expert_balance=1.1),
        **{"seconds_validation": 20.0, "seconds_saving": 7.5, f"tokens_by_source/{LONG}": step},
        f"loss_by_source/{LONG}": 2.5,
        "a_metric_of_another_version": 1e-9,
    }
    for step in (10, 20, 30, 40)
]
EXPERTS = {"first_step": 1, "step": 40, "layers": [[0.5, 0.3, 0.2, 0.0]]}
EVENTS = [
    event("start", 0)
    | {
        "facts": {
            "layout": "4096 ranks = pp 16 x dp_replicate 4 x dp_shard 8 x cp 2 x tp 4, each 8 GPUs",
            "host": "node-3.a-cluster.of-a-centre.example and 511 other nodes",
            "revision": f"{'0123456789abcdef' * 2}01234567+changes",
        }
    },
    event("checkpoint", 20),
    event("failed", 31, "RuntimeError: " + LONG * 4 + "\n" + "and a second line " * 20),
    event("start", 20, time="2026-11-21T20:45:30+00:00"),
    event("done", 40, time="2026-11-21T20:55:30+00:00"),
]


@pytest.fixture
def looks(tmp_path):
    """looks(page, width): what a person sees in a browser's window, as measure_page.js has it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)} (Debian's package chromium)")

    def looks(text, width):
        path = tmp_path / "measured.html"
        script = f"<script>{MEASURES.read_text(encoding='utf-8')}</script></body>"
        path.write_text(text.replace("</body>", script), encoding="utf-8")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += [f"--user-data-dir={tmp_path}/browser", f"--window-size={width},900"]
        folders = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
        # the path of its socket has at most 108 bytes
        with tempfile.TemporaryDirectory(dir="/tmp") as short:
            shown = subprocess.run(
                [*command, path.as_uri()],
                env={**os.environ, **dict.fromkeys(folders, str(tmp_path)), "TMPDIR": short},
                capture_output=True,
                encoding="utf-8",
            )
        found = re.search(r'<pre id="found">(.*?)</pre>', shown.stdout, re.DOTALL)
        assert found, shown.stderr
        return json.loads(html.unescape(found[1]))

    return looks


@pytest.mark.parametrize(
    ("names", "width"),
    [
        (["run", LONG], 1400),
        pytest.param([f"run-{number}" for number in range(20)], 1400, marks=pytest.mark.slow),
        pytest.param(["run", LONG], 500, marks=pytest.mark.slow),
        pytest.param(["run"], 1400, marks=pytest.mark.slow),
        pytest.param(["run"], 500, marks=pytest.mark.slow),
    ],
)
def test_labels_are_whole_values_in_their_card_and_nothing_over_something_else(
    names, width, run, looks
):
    """In a wide window, and in the narrowest one that a browser opens."""
    overrides = ("--job.description", f"a description of what is tried, {LONG}")
    runs = []
    for number, name in enumerate(names):
        folder = run(
            f"folder-{number}",
            metrics=METRICS,
            events=EVENTS,
            reports=[COMPILE_REPORT],
            overrides=("--training.steps", str(40 + number), *overrides),
        )
        (folder / "experts.json").write_text(json.dumps(EXPERTS))
        runs.append(read_run(folder, name))
    found = looks(page(runs), width)
    assert found["wrong"] == []
    assert found["window"] <= width
    assert found["texts"] > 100
    assert len(found["cards"]) == len(names)
    assert max(found["cards"]) < 900  # as high as the window


def test_every_metric_has_a_title_in_words():
    script = FRAME.read_text(encoding="utf-8")
    titles = script[script.index("const TITLES") : script.index("const given")]
    table = (ROOT / "docs/metrics.md").read_text(encoding="utf-8").partition("## Report")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = re.findall(r"`(\w+)`", "".join(rows))  # those of sources have a slash
    assert len(names) > 20
    assert [name for name in names if not re.search(rf"\b{name}\b", titles)] == []


# metrics.jsonl


def test_a_resume_is_marked_and_what_it_repeats_counts(run):
    folder = run(
        metrics=[
            row(10, loss=3.0),
            row(20, loss=2.0),
            row(30, loss=1.0),
            {"resumed_from": 10},
            row(20, loss=2.5),
        ]
    )
    found = read_run(folder, "run")
    assert [(each["step"], each["loss"]) for each in found.rows] == [(10, 3.0), (20, 2.5)]
    (resume,) = [each for each in found.events if each["event"] == "resume"]
    assert (resume["step"], resume["text"]) == (
        10,
        "resumed from step 10; the earlier steps 11 to 30 do not count",
    )
    assert found.rows[-1]["hours"] == pytest.approx(40 / 3600)


def test_lines_torn_by_a_kill_are_left_out_and_told(run):
    lines = [
        row(10, loss=3.0),
        '{"step": 20, "lo\n',
        {"resumed_from": 10},
        row(20, loss=2.5),
        '{"st',
    ]
    found = read_run(run(metrics=lines), "run")
    assert [each["step"] for each in found.rows] == [10, 20]
    assert [re.search(r"line (\d)", note)[1] for note in found.notes] == ["2", "5"]
    assert "line 2, is not a step" in page([found])


def test_a_run_without_a_step_is_refused(run, capsys):
    folder = run(metrics=["\n", '{"loss": 1.0}\n'])
    assert main([str(folder)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {folder}/metrics.jsonl has no step yet")
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert not (folder / "report.html").exists()


def test_rows_without_any_value_or_a_number_that_json_lacks(run):
    found = read_run(
        run(metrics=[{"step": 0, "validation_loss": 8.0}, row(10, loss=None, grad_norm=None)]),
        "run",
    )
    data = script_data(found, 0)
    assert data["values"]["validation_loss"] == [8.0, None]
    assert "loss" not in data["values"]
    assert "8.0000" in page([found])


def test_a_long_run_keeps_its_spikes(monkeypatch):
    rows = [{"step": step, "loss": 1.0, "tps": 5.0} for step in range(100_000)]
    rows[12_345]["loss"], rows[54_321]["tps"], rows[77_777]["validation_loss"] = 9.0, 0.1, 2.0
    kept = thin(rows)
    assert len(kept) < MAX_ROWS
    assert {0, 12_345, 54_321, 77_777, 99_999} <= {each["step"] for each in kept}
    assert [each["step"] for each in kept] == sorted(each["step"] for each in kept)
    assert thin(rows[:MAX_ROWS]) == rows[:MAX_ROWS]


# events.jsonl


def test_events_of_several_runs_are_in_order_of_time(run):
    def at(name, minute):
        return event(name, 0, f"at {minute}", f"2026-11-21T20:{minute:02}:00+00:00")

    one = read_run(run("one", events=[at("start", 10), at("start", 30), at("done", 50)]), "one")
    two = read_run(run("two", events=[at("start", 20), at("done", 40)]), "two")
    text = page([one, two])
    table = text.partition("<h2>Starts")[2].partition("</table>")[0]
    cells = re.findall(r'<td class="lines">(.*?)</td>', table)
    # a kill between two starts has no time of its own
    lost = "ended without a message, such as by SIGKILL"
    assert cells == ["at 10", lost, "at 20", "at 30", "at 40", "at 50"]


def test_a_start_and_its_resume_are_one_and_a_kill_stands_where_the_metrics_end(run):
    metrics = [
        row(10),
        row(20),
        row(30),
        {"resumed_from": 20},
        row(40),
        {"resumed_from": 40},
        row(50),
    ]
    events = [
        event("start", 0),
        event("checkpoint", 20),
        event("start", 20),
        event("checkpoint", 40),
        event("stop", 40),
    ]
    found = read_run(
        run(metrics=metrics, events=[*events, event("start", 40), event("done", 50)]), "run"
    )
    assert [(each["event"], each["step"]) for each in found.events] == [
        ("start", 0),
        ("checkpoint", 20),
        ("failed", 30),
        ("resume", 20),
        ("checkpoint", 40),
        ("stop", 40),
        ("resume", 40),
        ("done", 50),
    ]
    assert found.events[3]["time"] == found.events[0]["time"]
    assert "2 times" in page([found])


def test_a_rank_that_was_killed_has_a_row_and_a_mark(run):
    events = [event("start", 0), event("killed", 8, "rank 1 was killed by SIGKILL")]
    text = page([read_run(run(events=[*events, event("start", 0)]), "run")])
    table = text.partition("<h2>Starts")[2].partition("</table>")[0]
    assert re.findall(r'<td class="whole">(.*?)</td>', table) == [
        "started",
        "rank killed",
        "started",
    ]
    assert [mark["kind"] for mark in embedded(text)[0]["marks"]] == ["failed"]


def test_a_copy_that_takes_over_the_files_has_not_resumed_the_run(run):
    """It writes a resume to the metrics, and no start."""
    metrics = [row(2), row(4), {"resumed_from": 4}, row(6), {"resumed_from": 4}, row(6), row(8)]
    metrics += [{"resumed_from": 8}, row(10)]
    events = [event("start", 0), event("copy killed", 4), event("copies", 4)]
    events += [event("start", 4), event("copies", 8)]
    found = read_run(run(metrics=metrics, events=events), "run")
    assert [(each["event"], each["step"]) for each in found.events] == [
        ("start", 0),
        ("copy killed", 4),
        ("copies", 4),
        ("failed", 6),
        ("resume", 4),
        ("copies", 8),
    ]


def test_a_run_of_before_there_were_events(run):
    found = read_run(run(overrides=None), "run")
    assert (found.events, found.recipe) == ([], {})
    text = page([found])
    assert "faults" not in re.sub(r"<script.*", "", text, flags=re.DOTALL)
    assert "recipe" not in re.sub(r"<script.*", "", text, flags=re.DOTALL)


# Wrong input


def test_a_folder_that_is_none_or_has_no_run(run, tmp_path, capsys):
    run("runs/a"), run("runs/b")
    for folder, words in (
        (tmp_path / "absent", "no such folder; use a run's job.dump_folder, such as"),
        (
            tmp_path / "runs",
            f"has no metrics.jsonl; use one of its runs: {tmp_path}/runs/a, {tmp_path}/runs/b",
        ),
        (tmp_path / "runs/a/metrics.jsonl", "no such folder"),
    ):
        assert main([str(folder)]) == 2
        assert f"error: {folder}" in (told := capsys.readouterr().err)
        assert words in told
        assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("compile.json", "[", "compile.json: not valid JSON (Expecting value: "),
        ("config.toml", "[training\n", "not valid TOML"),
    ],
)
def test_a_damaged_file_is_named(name, text, words, run, capsys):
    folder = run()
    (folder / name).write_text(text)
    assert main([str(folder)]) == 2
    told = capsys.readouterr().err
    assert name in told
    assert words in told
    assert told.count("\n") == 1


def test_runs_are_named_by_what_tells_them_apart(tmp_path):
    assert name_runs([Path("outputs/a"), Path("outputs/b")]) == ["a", "b"]
    assert name_runs([Path("x/a"), Path("y/a")]) == ["x/a", "y/a"]
    with pytest.raises(ConfigError, match="given twice"):
        name_runs([tmp_path / "a", tmp_path / "b" / ".." / "a"])


def test_the_command_writes_to_the_first_folder_or_where_it_is_told(run, tmp_path, capsys):
    one, two = run("one"), run("two")
    assert main([str(one), str(two)]) == 0
    assert capsys.readouterr().out == f"{one}/report.html written: open it in a browser\n"
    assert embedded((one / "report.html").read_text())[1]["name"] == "two"
    assert main([str(one), "--output", str(tmp_path / "page.html")]) == 0
    assert len(embedded((tmp_path / "page.html").read_text())) == 1
    assert main([str(one), "--output", str(tmp_path / "absent/page.html")]) == 2
    assert "absent/page.html: No such file" in capsys.readouterr().err


def test_no_torch_is_needed(run):
    code = (
        "import sys, titan_lite.tools.report.page as r; code = r.main(sys.argv[1:]); sys.exit(code"
        " or 'torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code, str(run())], cwd=ROOT, stdout=subprocess.DEVNULL
        ).returncode
        == 0
    )


def test_a_page_that_is_a_link_to_another_file_is_replaced(run, tmp_path):
    own = tmp_path / "own.html"
    own.write_text("of the user")
    folder = run()
    os.link(own, folder / "report.html")
    assert main([str(folder)]) == 0
    assert own.read_text() == "of the user"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_a_recipe_of_an_earlier_version_has_the_names_that_keys_have_now(run):
    folder = run()
    (folder / "config.toml").write_text("[fault_tolerance]\ncopies = 2\n")
    assert read_run(folder, "run").recipe == {"fault_tolerance.replica_groups": 2}
