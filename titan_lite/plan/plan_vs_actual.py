"""Compare planned and measured step time and memory at the end of a run.

    compared = PlanVsActual("auto", dump_folder, device, machine, shapes)
    compared.start()                                           # after compiling; on GPUs starts a process that plans
    for line in compared.close(peak): ...                       # a collective; the lines are the first rank's

Planning takes about as long as the start of a run. On GPUs it runs beside training. On CPUs it would take the run's cores, so it
runs after training, and only on request. The run's folder keeps plan.json and measured.json, from which
`python -m titan_lite.plan --calibrate FOLDER` makes a profile of this machine.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from titan_lite.compiler.hardware import GIB, Machine
from titan_lite.metrics.records import step_seconds
from titan_lite.outside import POSITIVE, Damaged, read_json
from titan_lite.plan.measure import (
    RECORD,
    Shapes,
    against,
    calibrated,
    find_machine,
    machine_to_toml,
    measure,
)

LONGEST = 180  # seconds that the end of a run waits for its plan
_PLAN = {
    "step_seconds": dict.fromkeys(("stated", "fast", "slow"), POSITIVE),
    "memory": {"reserved": POSITIVE},
}


class PlanVsActual:
    """The comparison of one run.

    mode: metrics.compare_plan, "auto", "always" or "never". machine: the cost model of the compile stage, if any. after: the last
    step with another global batch than the planned one.
    """

    def __init__(
        self,
        mode: str,
        folder: Path,
        device: torch.device,
        machine: Machine | None,
        shapes: Shapes,
        after: int = 0,
    ):
        self.after = after
        self.folder, self.device, self.machine, self.shapes = folder, device, machine, shapes
        self.wanted = mode == "always" or (mode == "auto" and device.type == "cuda")
        self.planning: subprocess.Popen | None = None

    def start(self) -> None:
        """Start planning on the first rank, on GPUs only, after config.toml was written. For all ranks."""
        if self.wanted and self.device.type == "cuda" and dist.get_rank() == 0:
            with suppress(OSError):  # `close` reports it
                self._plan(self.machine or find_machine("", self.device))

    def _plan(self, machine: Machine | None) -> None:
        if machine is None:
            return
        profile = self.folder / "profile.toml"
        profile.write_text(machine_to_toml(machine), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "titan_lite.plan",
            str(self.folder / "config.toml"),
            "--json",
        ]
        command += ["--world-size", str(dist.get_world_size()), "--hardware", str(profile)]
        # without a GPU, to take no memory of it
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        with open(self.folder / "plan.json", "w", encoding="utf-8") as out:
            self.planning = subprocess.Popen(
                command, stdout=out, stderr=subprocess.PIPE, text=True, env=environment
            )
        os.setpriority(os.PRIO_PROCESS, self.planning.pid, 10)

    def close(self, peak: float) -> list[str]:
        """Return the lines of the comparison on the first rank, after the last step. A collective. peak: GiB of this device."""
        try:
            return self._close(peak)
        except OSError as error:  # of the first rank's files, after the last collective
            return [f"no plan to compare with: {error.filename}: {error.strerror}"]

    def _close(self, peak: float) -> list[str]:
        if not self.wanted:
            return []
        on_gpu = self.device.type == "cuda"
        machine = self.machine if on_gpu and self.machine else find_machine("", self.device)
        if machine is None:
            why = "no profile of this GPU; use compile.machine, with compile.enable = true, to name one, or a file with one"
            return [f"no plan to compare with: {why}"]
        try:
            reached = measure(self.shapes, self.device)
        except torch.OutOfMemoryError:
            return ["no plan to compare with: no memory is left to measure the machine"]
        most = torch.tensor(peak, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if dist.get_rank():
            return []
        nodes = -(
            -dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        )
        windows = step_seconds(self.folder / "metrics.jsonl", self.after)
        if not windows:
            ramp = " or before the end of training.global_batch_ramp" if self.after else ""
            why = f"all steps were in the first window (metrics.log_freq), in which code is compiled{ramp}"
            return [f"no plan to compare with: {why}"]
        record = {
            "world_size": dist.get_world_size(),
            "nodes": nodes,
            "device": torch.cuda.get_device_name(self.device) if on_gpu else "CPU",
            "profile": dataclasses.asdict(machine),
            "reached": reached,
            "step_seconds": statistics.median(windows),
            "windows": len(windows),
            "memory_bytes": float(most) * GIB,
            "memory_is": "reserved" if on_gpu else "resident, Python and torch included",
        }
        (self.folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if not on_gpu:  # a CPU has no profile, but was just measured
            self._plan(calibrated(machine, reached, self.shapes.dtype, nodes))
        return self.compare(record)

    def compare(self, record: dict) -> list[str]:
        if self.planning is None:
            return ["no plan to compare with: its process could not be started"]
        started = time.perf_counter()
        try:
            _, errors = self.planning.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            self.planning.kill()
            return [f"no plan to compare with: planning took longer than {LONGEST} s"]
        waited = time.perf_counter() - started
        if self.planning.returncode:
            why = (errors.strip() or "its process ended without a message").splitlines()[-1]
            return [f"no plan to compare with: {why.removeprefix('error: ')}"]
        try:
            plan = read_json(self.folder / "plan.json", _PLAN)
        except Damaged as damage:
            return [f"no plan to compare with: {damage}"]
        seconds, measured = plan["step_seconds"], record["step_seconds"]
        memory = against(plan["memory"]["reserved"], record["memory_bytes"])
        return [
            f"planned against measured: step {seconds['stated']:.3g} s ({seconds['fast']:.3g} to {seconds['slow']:.3g}) against "
            f"{measured:.3g} s, {100 * (seconds['stated'] / measured - 1):+.0f}%; memory {memory} {record['memory_is']}"
            + (f"; waited {waited:.0f} s for the plan" if waited > 1 else "")
        ]
