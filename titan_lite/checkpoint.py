"""Save and resume: tensors through torch.distributed.checkpoint, everything else as JSON.

    checkpoint/step-50/   .metadata, *.distcp      every parameter and optimizer state under its FQN, resharded on load
                          state.json               step, tokens, position of the data

A step is written into a folder with another name and renamed when it is whole.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from titan_lite.config import Checkpoint, ConfigError
from titan_lite.logging import logger


class Checkpointer:
    """The steps in one folder. All ranks call every method together."""

    def __init__(self, config: Checkpoint, dump_folder: Path):
        self.config = config
        self.folder = dump_folder / config.folder

    def steps(self) -> list[int]:
        """The steps that can be loaded, oldest first."""
        names = [path.parent.name for path in self.folder.glob("step-*/state.json")]
        return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name))

    def step_to_load(self) -> int | None:
        """The step a run starts from; None: from the beginning. Raises ConfigError, and needs no process group."""
        steps, wanted = self.steps() if self.config.enable else [], self.config.load_step
        if wanted == -1:
            return steps[-1] if steps else None
        if wanted not in steps:
            have = f"it has {', '.join(map(str, steps))}" if steps else "it has none"
            raise ConfigError(
                f"checkpoint.load_step = {wanted}: there is no such step in {self.folder}; {have}; -1 takes the newest"
            )
        if wanted != steps[-1]:
            raise ConfigError(
                f"checkpoint.load_step = {wanted}: {self.folder} has newer steps, up to {steps[-1]}, which this run would meet; "
                f"move them away, or copy step-{wanted} into the checkpoint folder of another job.dump_folder"
            )
        return wanted

    def save(self, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any]) -> None:
        """tensors: {name: tensor or DTensor}; state: JSON's types, only rank 0's is written."""
        unfinished, path = self.folder / f"unfinished-step-{step}", self.folder / f"step-{step}"
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        dist.barrier()
        dcp.save(dict(tensors), checkpoint_id=unfinished)
        if dist.get_rank() == 0:
            state = {**state, "tensors": sorted({name.partition(".")[0] for name in tensors})}  # ["model", "optimizer"]
            (unfinished / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
            unfinished.rename(path)
            logger.info(f"checkpoint written to {path}")
        dist.barrier()
        if dist.get_rank() == 0:  # nobody waits for it
            for old in self.steps()[: -self.config.keep_latest_k] if self.config.keep_latest_k else []:
                shutil.rmtree(self.folder / f"step-{old}")

    def read_state(self, step: int) -> dict[str, Any]:
        return json.loads((self.folder / f"step-{step}/state.json").read_text(encoding="utf-8"))

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill the tensors in place, on this rank's layout."""
        path = self.folder / f"step-{step}"
        dcp.load(dict(tensors), checkpoint_id=path)
        logger.info(f"resumed from {path}")
