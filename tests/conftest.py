"""Tests that need hardware or a scheduler are skipped where it is absent, with the reason in pytest's summary."""

import shutil

import hypothesis
import pytest

# The same examples on every run, none kept on disk, and no time limits: a machine may be busy.
hypothesis.settings.register_profile("titan_lite", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("titan_lite")


def pytest_collection_modifyitems(items):
    absent = {}
    if any(item.get_closest_marker("gpu") for item in items):
        import torch  # a second, so only where it is asked for

        if not torch.cuda.is_available():
            absent["gpu"] = "needs a GPU: torch sees none"
    if shutil.which("sbatch") is None:
        absent["slurm"] = "needs Slurm: no sbatch here"
    for item in items:
        for marker, reason in absent.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
