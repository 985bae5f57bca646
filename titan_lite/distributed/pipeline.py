"""Pipeline parallelism: stages of consecutive modules are on different ranks, and microbatches pass
through all stages.

    keep_modules(model, schedule.modules[0])    # removes other stages' modules; FQNs do not change
    runner = Pipeline(stages, schedule, mesh["pp"], ...)    # SingleStage(stage) for one
    losses = runner.forward_backward(batch, tokens)

torch.distributed.pipelining has the schedules and runs them. This package adds the split
(pipeline_schedule.py) and SimpleFSDP's gathered weights under a split backward.
A microbatch's loss is divided by the number of tokens of the step, so gradients are summed, never
averaged, and do not depend on the number of microbatches.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_weight
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    get_schedule_class,
)

from titan_lite.distributed.pipeline_schedule import PipelineSchedule
from titan_lite.distributed.stage import Stage
from titan_lite.models.shapes import module_fqns

if TYPE_CHECKING:  # with Inductor, a second to import
    from titan_lite.compile.compiled_model import SecondHalf


def keep_modules(model: nn.Module, fqns: Sequence[str]) -> None:
    """Remove all modules of `model` but `fqns`, in place: a layer is deleted from `layers`, any
    other module becomes None.
    """
    for fqn in module_fqns(len(list(model.get_submodule("layers").children()))):
        if fqn not in fqns:
            parent, _, name = fqn.rpartition(".")
            if parent:
                del model.get_submodule(parent)._modules[name]
            else:
                setattr(model, name, None)


class DeviceBatch(NamedTuple):
    """A local batch of a data-parallel rank, with this rank's t tokens of every sequence."""

    input: Tensor  # (B, t) int64
    label: Tensor  # (B, t) int64
    # arguments of the model beside tokens and labels (models/transformer.py), with a row for each
    # sequence
    model_kwargs: dict[str, Tensor]


class SingleStage:
    """The methods of Pipeline for an unsplit model."""

    def __init__(self, stage: Callable[..., Tensor]):
        self.stage = stage

    def forward_backward(self, batch: DeviceBatch, tokens: Tensor) -> Tensor:
        """Run backward of the loss of a local batch, divided by the step's `tokens`; return that
        loss of each sequence, (B,).
        """
        losses = self._losses(batch) / tokens
        losses.sum().backward()
        return losses.detach()

    @torch.no_grad()
    def evaluate(self, batch: DeviceBatch) -> Tensor:
        """Return the summed loss of each sequence of a local batch, (B,), without gradients."""
        return self._losses(batch)

    def _losses(self, batch: DeviceBatch) -> Tensor:
        return self.stage(batch.input, labels=batch.label, **batch.model_kwargs)


@dataclass(frozen=True)
class MicrobatchShapes:
    """Shapes of a microbatch on this rank."""

    tokens: tuple[int, int]  # (B, T): input of the first stage
    hidden: tuple[int, int, int]  # (B, t, C): sent between stages
    dtype: torch.dtype  # of hidden states


class Pipeline:
    """This rank's stages, and torch's schedule that runs them.

    stages: in the order of split.stages_of(rank). schedule_name: one of torch's.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        split: PipelineSchedule,
        mesh: DeviceMesh,
        schedule_name: str,
        shapes: MicrobatchShapes,
        device: torch.device,
    ):
        self.split = split
        self.shapes = shapes
        self.device = device
        self.rank = mesh.get_local_rank()
        self.group = mesh.get_group()
        self.stages = dict(zip(split.stages_of(self.rank), stages, strict=True))  # by number
        self.last_stage = len(split.rank_of) - 1
        self.has_last = self.last_stage in self.stages
        # of the step that runs
        self.tokens = torch.ones((), device=device)
        self.losses: list[Tensor] = []  # in the order of microbatches

        torch_stages = [self._torch_stage(number) for number in self.stages]
        schedule_class: Any = get_schedule_class(schedule_name)
        is_single = issubclass(schedule_class, PipelineScheduleSingle)  # one stage a rank
        self.schedule: Any = schedule_class(
            torch_stages[0] if is_single else torch_stages,
            n_microbatches=split.microbatches,
            loss_fn=self._microbatch_loss,
            scale_grads=False,
        )

    def _torch_stage(self, number: int) -> PipelineStage:
        shapes = self.shapes
        is_last = number == self.last_stage
        tokens = torch.empty(shapes.tokens, dtype=torch.int64, device="meta")
        hidden = torch.empty(shapes.hidden, dtype=shapes.dtype, device="meta", requires_grad=True)
        losses = torch.empty(shapes.tokens[0], device="meta", requires_grad=True)  # of sequences
        return _TorchStage(
            _StageModule(self.stages[number]),
            number,
            self.last_stage + 1,
            self.device,
            input_args=tokens if number == 0 else hidden,
            output_args=losses if is_last else hidden,
            group=self.group,
        )

    def forward_backward(self, batch: DeviceBatch, tokens: Tensor) -> Tensor:
        """Run backward of the loss of a local batch, divided by the step's `tokens`; return that
        loss of each sequence, (B,), zero except on the rank of the last stage.
        """
        self.tokens = tokens
        self.losses = []
        inputs = (batch.input,) if 0 in self.stages else ()
        self.schedule.step(
            *inputs,
            target=batch.label if self.has_last else None,
            return_outputs=False,
            labels=batch.label,
            **batch.model_kwargs,
        )
        return torch.cat(self.losses) if self.has_last else self._no_losses(batch)

    def _no_losses(self, batch: DeviceBatch) -> Tensor:
        return torch.zeros(len(batch.label), device=self.device)

    def _microbatch_loss(self, output: Tensor, _: Tensor) -> Tensor:
        losses = output / self.tokens
        self.losses.append(losses.detach())
        return losses.sum()

    @torch.no_grad()
    def evaluate(self, batch: DeviceBatch) -> Tensor:
        """Return the summed loss of each sequence of a local batch, (B,), without gradients; zero
        except on the rank of the last stage.

        Microbatches go through the stages one by one, so that no two ranks wait for each other,
        whatever the schedule. Torch's own evaluation does not work without backward where
        neighbouring stages share a rank.
        """
        losses: list[Tensor] = []
        sends: list[tuple[dist.Work, Tensor]] = []
        model_kwargs = {"labels": batch.label, **batch.model_kwargs}
        chunks = [
            tensor.chunk(self.split.microbatches)
            for tensor in (batch.input, *model_kwargs.values())
        ]
        for tokens, *values in zip(*chunks, strict=True):
            kwargs = dict(zip(model_kwargs, values, strict=True))
            calls = [functools.partial(stage, **kwargs) for stage in self.stages.values()]
            output, sent = self.forward(calls, tokens, self.shapes.hidden)
            sends += sent
            if self.has_last:
                losses.append(output)
        for work, _ in sends:
            work.wait()
        return torch.cat(losses) if self.has_last else self._no_losses(batch)

    def forward(
        self, stages: Sequence[Callable[[Tensor], Tensor]], x: Tensor, hidden: Sequence[int]
    ) -> tuple[Tensor, list[tuple[dist.Work, Tensor]]]:
        """Run tokens x through all stages, with `stages` in the place of this rank's.

        hidden: the shape of hidden states. Returns the output of this rank's last stage, and what
        has to be waited for: the hidden states that are sent.
        """
        sends = []
        for number, stage in zip(self.stages, stages, strict=True):
            if number > 0 and self.split.rank_of[number - 1] != self.rank:
                x = self._receive_hidden(self.split.rank_of[number - 1], hidden)
            x = stage(x)
            if number < self.last_stage and self.split.rank_of[number + 1] != self.rank:
                sends.append(self._send_hidden(x, self.split.rank_of[number + 1]))
        return x, sends

    def _receive_hidden(self, rank: int, shape: Sequence[int]) -> Tensor:
        hidden = torch.empty(shape, dtype=self.shapes.dtype, device=self.device)
        dist.recv(hidden, group=self.group, group_src=rank)
        return hidden

    def _send_hidden(self, hidden: Tensor, rank: int) -> tuple[dist.Work, Tensor]:
        """Start to send. The tensor is returned, too, to be kept alive until it is sent."""
        hidden = hidden.contiguous()
        work = dist.isend(hidden, group=self.group, group_dst=rank)
        assert work is not None
        return work, hidden


class _StageModule(nn.Module):
    """A stage as the module that torch's schedules run.

    Its parameters are the current `gradient_leaves`: what a split backward computes gradients
    of.
    """

    def __init__(self, stage: Stage):
        super().__init__()
        self.stage = stage

    def forward(self, *args: Tensor, **model_kwargs: Tensor) -> Tensor:
        return self.stage(*args, **model_kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter(self.stage.sharding.gradient_leaves())


class _TorchStage(PipelineStage):
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Omit operations with a neighbour stage on the same rank: torch 2.11 makes them, and gloo
        does not support them.
        """
        return [
            op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank
        ]

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict] | None]:
        """Run a backward ("full"), or a half of it: "input", then "weight".

        It has the name by which torch's schedules call it, and their arguments. A compiled stage
        has graphs of the halves; of others, torch cuts the autograd graph. What "input" returns
        beside gradients, torch gives to "weight" as `param_groups`.
        """
        backward = super().backward_maybe_with_nosync
        assert isinstance(self.submod, _StageModule)
        stage = self.submod.stage
        if backward_type == "full" or (backward_type == "input" and stage.compiled is None):
            return backward(backward_type, bwd_kwargs, last_backward)
        if stage.compiled is None:
            with stage.sharding.backward_of_weights():
                _backward_of_weights(self.submod.parameters(), bwd_kwargs["param_groups"])
            return (), None
        if backward_type == "input":
            if bwd_kwargs["output_grads"] is None:  # the loss, in a tuple
                (loss,) = bwd_kwargs["stage_output"]
                bwd_kwargs = {**bwd_kwargs, "stage_output": loss}
            with stage.compiled.first_halves() as left:
                of_input, _ = backward("full", bwd_kwargs, last_backward)
            return of_input, left  # type: ignore[return-value]
        second_halves: list[SecondHalf] = bwd_kwargs["param_groups"]
        while second_halves:
            second_halves.pop(0).run()
        return (), None


def _backward_of_weights(weights: Iterator[Any], groups: list[dict[str, Any]]) -> None:
    """Compute the gradients of weights from what the half of inputs has recorded.

    groups: weights, the nodes of the autograd graph that read them, and the gradients there.
    """
    # A weight that is read at two places behind one another, such as one norm for attention and
    # feed-forward: from the later one, autograd passes again through all that lies between. So the
    # graph is kept, and the gradient at the earlier one is that recorded, not added to it.
    several = [group for group in groups if len(group["intermediates"]) > 1]
    with ExitStack() as stack:
        for group in several:
            for node, recorded in zip(group["intermediates"], group["grads"], strict=True):
                handle = node.register_prehook(lambda _, recorded=recorded: recorded)
                stack.callback(handle.remove)
        # torch's backward of a stage gives no retain_graph
        stage_backward_weight(weights, groups, retain_graph=bool(several))
