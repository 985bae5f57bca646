"""The lines at a run's end."""

import json
from dataclasses import replace

from titan_lite.compile.report import CompileReport
from titan_lite.cost.timeline import Timeline
from titan_lite.metrics.end_lines import RunEnd, end_lines, log_compile_reports


def window(step, loss, tps, mfu, data_wait, memory_gib):
    speed = {"tps": tps, "mfu": mfu, "mfu_full_attention": 1.2 * mfu}
    return {"step": step, "loss": loss, **speed, "data_wait": data_wait, "memory_gib": memory_gib}


def test_the_end_has_the_last_losses_and_the_speed_since_the_last_resume(tmp_path):
    lines = [
        window(10, 3.0, 100.0, 10.0, data_wait=9.0, memory_gib=0.5),
        {"resumed_from": 10},
        window(20, 2.0, 300.0, 30.0, data_wait=1.0, memory_gib=0.7),
        window(30, 1.0, 200.0, 20.0, data_wait=2.0, memory_gib=0.6),
        {"step": 20, "validation_loss": 1.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = RunEnd(
        stopped=False,
        step=30,
        tokens=3000,
        skipped_steps=1,
        saved_steps=(10, 30),
        tensorboard=True,
    )
    assert end_lines(tmp_path, done) == [
        (
            "done: step 30, 3,000 tokens, 1 step skipped; loss 1.0000; validation loss 1.5000 at"
            " step 20"
        ),
        (
            "speed: 250 tokens per second and device, MFU 25.0% (30.0% with attention counted as"
            " full), waiting for data 1.5% (medians); peak memory 0.70 GiB"
        ),
        "checkpoints: step-10, step-30",
        f"to look at: python -m titan_lite report {tmp_path}; tensorboard --logdir {tmp_path}",
    ]
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "tps": 5.0, "data_wait": 0.0, "memory_gib": 0.1}\n'
    )
    stopped = RunEnd(
        stopped=True,
        step=1,
        tokens=9,
        skipped_steps=0,
        saved_steps=(),
        command="./run_train.sh --training.steps 9",
    )
    told = end_lines(tmp_path, stopped)
    assert told[0] == "stopped: step 1, 9 tokens, 0 steps skipped"
    assert (
        told[1]
        == "speed: 5 tokens per second and device, waiting for data 0.0% (medians); peak memory"
        " 0.10 GiB"
    )
    assert told[2:] == [
        "checkpoints: none",
        f"to look at: python -m titan_lite report {tmp_path}",  # without TensorBoard
        "to resume: ./run_train.sh --training.steps 9",
    ]
    with open(tmp_path / "metrics.jsonl", "a") as file:  # a run with nothing to do
        file.write('{"resumed_from": 1}\n')
    assert end_lines(tmp_path, replace(stopped, stopped=False))[1] == "checkpoints: none"
    (tmp_path / "metrics.jsonl").write_text("")
    nothing = RunEnd(stopped=False, step=0, tokens=0, skipped_steps=0, saved_steps=())
    assert len(end_lines(tmp_path, nothing)) == 3


def test_the_commands_to_look_at_a_run_may_be_pasted_whatever_its_folder_is_called(tmp_path):
    folder = tmp_path / "my runs"
    end = RunEnd(
        stopped=False,
        step=1,
        tokens=9,
        skipped_steps=0,
        saved_steps=(),
        tensorboard=True,
    )
    assert end_lines(folder, end)[-1] == (
        f"to look at: python -m titan_lite report '{folder}'; tensorboard --logdir '{folder}'"
    )


def test_the_end_of_a_run_whose_folder_is_gone_is_told_without_figures(tmp_path):
    done = RunEnd(stopped=False, step=3, tokens=9, skipped_steps=0, saved_steps=())
    told = end_lines(tmp_path / "gone", done)
    assert told[:2] == ["done: step 3, 9 tokens, 0 steps skipped", "checkpoints: none"]


def test_reports_that_cannot_be_written_cost_a_warning_and_not_the_run(tmp_path, caplog):
    reports = [
        CompileReport(
            "forward", {}, (), {}, "", Timeline("forward", (), 0.4, 0.3, 0.2, 0.1, 0.0, 0)
        )
    ]
    log_compile_reports(reports, tmp_path / "gone")
    path = tmp_path / "gone/compile.json"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"no compile.json or timeline.json: {path}: No such file or directory"
    ]
