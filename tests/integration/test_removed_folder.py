"""`rm -rf` of a run's folder while it goes on: nothing is made again, and the run ends at its next
save.
"""

import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout

import torch.distributed as dist
from ranks import end_ranks, start_ranks
from tiny import DEBUG, NO_VALIDATION, NO_WORKERS, SMALL, every, steps

from titan_lite.hooks import Hook
from titan_lite.train import main

OPTIONS = [*SMALL, *steps(8), *every(3), *NO_VALIDATION, *NO_WORKERS]


def train_without_a_folder(folder, said):
    """Train in `folder`, which the first rank removes after step 4."""

    class Remove(Hook):
        def on_metrics(self, metrics):
            if metrics.step == 4 and dist.get_rank() == 0:
                shutil.rmtree(folder)

    with open(said, "a") as output, redirect_stdout(output), redirect_stderr(output):
        code = main([str(DEBUG), "--job.dump_folder", str(folder), *OPTIONS], hooks=[Remove()])
    sys.exit(code)


def test_a_folder_that_is_removed_ends_the_run_at_its_next_save(tmp_path):
    folder, said = tmp_path / "out", tmp_path / "said"
    assert end_ranks(start_ranks(2, train_without_a_folder, folder, said), 120, 60) == [1, 1]
    (line,) = [line for line in said.read_text().splitlines() if line.startswith("error: ")]
    why = "rank 0: the folder or its lock was removed during the run"
    assert line == f"error: step 6 was not saved in {folder}/checkpoint: {why}"
    assert not folder.exists()
