"""Train a small recipe in new CPU processes, and return what it computed.

observed = run(proxy(config, layout, steps=5), model)
observed.gradients["layers.0.attention.wq.weight"]       # of the first step, unsharded
"""

import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from titan_lite.config import Config
from titan_lite.config.families import ModelConfig
from titan_lite.distributed.layout import AXES, DEGREES
from titan_lite.environment import loopback_port, use_loopback
from titan_lite.hooks import Hook
from titan_lite.metrics.deferred import StepMetrics
from titan_lite.metrics.run_files import read_metrics
from titan_lite.models.experts import LOADS, Load, Router, routers_of
from titan_lite.processes import end_with_program, fork_server
from titan_lite.trainer import Trainer

Prepare = Callable[[Trainer], None]

# Imported once for all processes of all runs: this module, and what a Trainer imports late.
PRELOADED = [
    __name__,
    "titan_lite.compile.compile",
    "torch._inductor.compile_fx",
    "torch.distributed.pipelining",
    "torch.utils.tensorboard",
]


@dataclass
class Choices:
    """The experts that a router chose in the first step, of all sequences in their order in it."""

    experts: Tensor  # (sequences, T, K) int64; -1: tokens of other ranks
    gaps: Tensor  # (sequences, T), from the least probability that was chosen to the next one

    def add(self, other: "Choices") -> None:
        """Add the tokens of another rank."""
        found = other.experts >= 0
        self.experts = torch.where(found, other.experts, self.experts)
        self.gaps = torch.where(found[..., 0], other.gaps, self.gaps)


@dataclass
class Observed:
    """The results of a run."""

    # (rank, step): (loss, gradient norm)
    losses: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)  # step: loss
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step, by FQN
    # Outputs in the first step's forward, by the module's FQN: (number of elements, sum, sum of
    # squares), in float64
    activations: dict[str, Tensor] = field(default_factory=dict)
    choices: dict[str, Choices] = field(default_factory=dict)  # by the router's FQN

    def add_activation(self, fqn: str, sums: Tensor) -> None:
        """Add the sums of another part of a module's output: another microbatch or rank."""
        before = self.activations.get(fqn, torch.zeros(3, dtype=torch.float64))
        self.activations[fqn] = before + sums


def run(config: Config, model: ModelConfig, *, prepare: Prepare | None = None) -> Observed:
    """Train `config` in new CPU processes, and return what they computed.

    prepare: called in each with its Trainer, before training. Raises ProcessRaisedException or
    ProcessExitedException of torch.multiprocessing if one of them fails.
    """
    processes = math.prod(getattr(config.parallelism, key) for key in DEGREES.values())
    with tempfile.TemporaryDirectory() as folder:
        config = config.replace(job=config.job.replace(dump_folder=folder))
        arguments = (processes, loopback_port(), config, model, prepare)
        fork_server(PRELOADED)
        mp.start_processes(_train, arguments, processes, start_method="forkserver")
        result = Observed()
        for rank in range(processes):
            _add_rank(result, torch.load(_file(folder, rank), weights_only=False))
        for step, metrics in read_metrics(Path(folder) / "metrics.jsonl").items():
            if "validation_loss" in metrics:
                result.validation[step] = metrics["validation_loss"]
        return result


def _add_rank(result: Observed, part: Observed) -> None:
    result.losses.update(part.losses)
    result.gradients.update(part.gradients)
    for fqn, sums in part.activations.items():
        result.add_activation(fqn, sums)
    for fqn, choices in part.choices.items():
        if fqn in result.choices:
            result.choices[fqn].add(choices)
        else:
            result.choices[fqn] = choices


def _file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.pt"


def _train(
    rank: int,
    processes: int,
    port: int,
    config: Config,
    model: ModelConfig,
    prepare: Prepare | None,
) -> None:
    """Run in each process: train, and write what was observed."""
    end_with_program()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(processes)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    os.environ["NO_COLOR"] = "1"
    use_loopback()
    # a warning about gathering a full gradient over two axes, which only this program does
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    recorder = Recorder(prepare)
    Trainer(config, model=model, hooks=[recorder]).train()
    torch.save(recorder.observed, _file(config.job.dump_folder, rank))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class ChoicesOfRank:
    """The Load of a router (models/experts.py) in the first step: records choices, and passes them
    on.

    Microbatches come in the order of the step's sequences, of which a data-parallel rank has every
    n-th (data/streams.py).
    """

    def __init__(self, trainer: Trainer, load: Load | None):
        self.load = load
        self.recorded: Choices | None = None
        self.sequences_seen = 0
        layout = trainer.layout
        self.first = trainer.dp_rank
        self.stride = trainer.dp_degree
        self.shape = (layout.sequences_per_step, layout.seq_len)
        positions = torch.tensor(trainer.model.stages[0].model.positions)
        self.positions = positions.chunk(layout.degrees["tp"])[trainer.mesh["tp"].get_local_rank()]

    def __call__(self, probabilities: Tensor, choices: Tensor, counts: Tensor) -> None:
        if self.load is not None:
            self.load(probabilities, choices, counts)
        number, _, k = choices.shape
        if self.recorded is None:
            experts = torch.full((*self.shape, k), -1)
            self.recorded = Choices(experts, torch.zeros(self.shape, dtype=torch.float64))
        own = torch.arange(self.sequences_seen, self.sequences_seen + number)
        self.sequences_seen += number
        where = ((self.first + self.stride * own)[:, None], self.positions)
        ordered = probabilities.double().sort(-1, descending=True)[0]
        ordered = torch.cat((ordered, torch.zeros_like(ordered[..., :1])), -1)  # if all are chosen
        self.recorded.experts[where] = choices
        self.recorded.gaps[where] = ordered[..., k - 1] - ordered[..., k]


class Recorder(Hook):
    """Record the losses of every step, and the gradients, module outputs and choices of experts of
    the first.
    """

    def __init__(self, prepare: Prepare | None):
        self.prepare = prepare
        self.observed = Observed()
        self.handles: list[RemovableHandle] = []  # of the hooks that see module outputs
        self.choices: dict[str, ChoicesOfRank] = {}  # by the router's FQN

    def on_train_start(self, trainer: Trainer) -> None:
        # A proxy's sequences are shorter than documents; for training.mask_documents each full stop
        # begins a document.
        trainer.bos_id = trainer.tokenizer.encode(".")[0]
        if self.prepare is not None:
            self.prepare(trainer)
        self.rank = trainer.rank
        self.is_first_of_stage = all(
            trainer.mesh[axis].get_local_rank() == 0 for axis in AXES if axis != "pp"
        )
        self.modules = list(_modules_with_output(trainer))
        for stage in trainer.model.stages:
            for fqn in routers_of(stage.model):
                self.choices[fqn] = ChoicesOfRank(trainer, LOADS.get(fqn))
        LOADS.update(self.choices)

    def on_metrics(self, metrics: StepMetrics) -> None:
        self.observed.losses[self.rank, metrics.step] = metrics.loss, metrics.grad_norm

    def on_step_start(self, step: int) -> None:
        if step == 1:
            self.handles = [
                module.register_forward_hook(self._summing(fqn)) for fqn, module in self.modules
            ]

    def _summing(self, fqn: str) -> Callable[[nn.Module, Any, Tensor], None]:
        """Return a forward hook that sums the output of the module `fqn`."""

        def add_output(module: nn.Module, inputs: Any, output: Tensor) -> None:  # noqa: ANN401 torch's
            if torch._C._current_graph_task_id() != -1:
                return  # recomputed by activation checkpointing, within backward
            numbers = output.detach().double()
            count = torch.tensor(float(numbers.numel()))
            sums = torch.stack((count, numbers.sum(), numbers.square().sum()))
            self.observed.add_activation(fqn, sums)

        return add_output

    def on_gradients(self, step: int, parameters: Mapping[str, nn.Parameter]) -> None:
        if step != 1:
            return
        for handle in self.handles:
            handle.remove()
        for fqn, of_rank in self.choices.items():
            del LOADS[fqn]
            if of_rank.load is not None:
                LOADS[fqn] = of_rank.load
            if of_rank.recorded is not None:
                self.observed.choices[fqn] = of_rank.recorded
        for fqn, parameter in parameters.items():
            gradient = parameter.grad.full_tensor().clone()  # type: ignore[union-attr]
            if self.is_first_of_stage:
                self.observed.gradients[fqn] = gradient


def _modules_with_output(trainer: Trainer) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules, by FQN, whose outputs are compared: none of a compiled model."""
    if trainer.config.compile.enable:
        return
    without_output = {"", "layers", "output"}  # the last one returns the loss
    for stage in trainer.model.stages:
        for fqn, module in stage.model.named_modules():
            if fqn not in without_output and not isinstance(module, Router):
                yield fqn, module
