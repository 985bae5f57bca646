"""Runs whose standard output is full, or read by a program that ends: they go on."""

import json
import os
import shlex

import pytest
from commands import python, run
from tiny import DEBUG, NO_VALIDATION, NO_WORKERS, SMALL, steps

from titan_lite.metrics.run_files import read_metrics

pytestmark = pytest.mark.ranks(2)

# A program that ends after a line; the run begins when nobody reads its pipe any more.
HEAD = "| { head -n 1; exec <&-; echo >GATE; }"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "told"),
    [
        pytest.param(HEAD, "Broken pipe", id="head"),
        pytest.param(f"2>&1 {HEAD}", "", id="head-of-both"),
        (">/dev/full", "No space left on device"),
        (">/dev/full 2>&1", ""),
    ],
)
def test_a_run_goes_on_without_its_output(redirection, told, tmp_path):
    options = [*SMALL, *steps(2), *NO_VALIDATION, *NO_WORKERS, "--checkpoint.no-enable"]
    command = python(
        "-m", "titan_lite.launch", DEBUG, "--job.dump_folder", tmp_path / "run", *options
    )
    line = shlex.join(map(str, command))
    if HEAD in redirection:
        os.mkfifo(tmp_path / "gate")
        line = f"{{ echo a line; read <GATE; {line}; }}"
    line = f"{line} {redirection}; exit ${{PIPESTATUS[0]}}"
    done = run("bash", "-c", line.replace("GATE", shlex.quote(str(tmp_path / "gate"))))
    assert done.returncode == 0
    assert list(read_metrics(tmp_path / "run/metrics.jsonl")) == [1, 2]
    events = (tmp_path / "run/events.jsonl").read_text().splitlines()
    assert json.loads(events[-1])["event"] == "done"
    assert done.stdout.count("Logging error") == (1 if told else 0)
    assert told in done.stdout
