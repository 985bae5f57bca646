"""`scripts/benchmark_schedule.py`: what it predicts of a small part of 8B, and what cannot be
asked.
"""

import sys

import pytest
from commands import python, run
from tiny import ROOT

SCRIPT = ROOT / "scripts/benchmark_schedule.py"


def table(text):
    """{first cell of a line: {column: cell}} of the one table in `text`."""
    head, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    return {line[0]: dict(zip(head[1:], line[1:], strict=True)) for line in lines}


@pytest.mark.release
def test_two_blocks_of_8B_are_predicted_without_hardware():
    options = [
        "--layers=2",
        "--world-sizes=128",
        "--batch-sizes=1",
        "--modes",
        "none",
        "block",
        "greedy",
    ]
    result = run(
        *python(SCRIPT, "predict", *options), PYTHONSAFEPATH=None
    )  # it imports its neighbour
    assert result.returncode == 0
    assert (
        "8B (2 of 32 layers): 128 ranks of H100 (80 GiB), estimated, each 1 x 8192 tokens"
        in result.stdout
    )
    modes = table(result.stdout)
    assert list(modes) == ["none", "block", "greedy"]
    # 9 parameters a block, embedding, norm and output; in backward those of blocks are gathered
    # again
    assert modes["none"]["collectives"] == "21 + 39"
    assert modes["block"]["collectives"] == "4 + 6"
    for figures in modes.values():
        exposed, bound, communication = (
            float(figures[f"{what} ms"]) for what in ("exposed", "bound", "communication")
        )
        assert 0.99 * bound <= exposed < communication
        assert float(figures["exposed/bound"]) == pytest.approx(exposed / bound, abs=0.01)
        assert 0 < float(figures["passes s"]) <= float(figures["compile s"])
    assert float(modes["greedy"]["exposed/bound"]) <= 1.25
    assert float(modes["greedy"]["peak GiB"]) <= float(modes["block"]["peak GiB"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "--machine", "H101"], '"H101" is not a profile; use GB200, '),
        (
            ["predict", "--modes", "blocks"],
            "argument --modes: invalid choice: 'blocks' (choose from ",
        ),
        (["predict", "--layers", "33"], "8B has 32 layers"),
        (
            ["predict", "--world-sizes", "1"],
            "argument --world-sizes: 1 is no whole number of 2 or more",
        ),
        (["measure", "--backends", "eager"], "argument --backends: invalid choice: 'eager'"),
        ([], "predict | measure"),
    ],
)
def test_wrong_arguments_end_with_one_line_and_exit_code_2(arguments, message, capsys, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import benchmark_schedule

    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *arguments])
    with pytest.raises(SystemExit) as ended:
        benchmark_schedule.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
