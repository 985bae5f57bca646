"""Pipeline parallelism: stages of consecutive modules are on different ranks, and microbatches pass
through all stages.

    keep_modules(model, plan.modules[0])           # removes the modules of other stages; FQNs do not change
    pipeline = Pipeline(stages, plan, mesh["pp"], ...)                  # or SingleStage(model, loss_sum) for one stage
    loss = pipeline.forward_backward(input, label, documents, tokens)

torch.distributed.pipelining has the schedules and runs them. This package adds the split
(pipeline_plan.py), the loss, and SimpleFSDP's gathered weights under a backward in two halves. A
microbatch's loss is divided by the number of tokens of the step, so gradients are summed, never
averaged, and do not depend on the number of microbatches.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    get_schedule_class,
)

from titan_lite.config import Parallelism
from titan_lite.distributed.pipeline_schedule import PipelineSchedule
from titan_lite.distributed.simple_fsdp import sharded_model
from titan_lite.models.shapes import module_fqns


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


class SingleStage:
    """The methods of Pipeline for an unsplit model.

    loss_sum: (output, labels) -> summed loss, a scalar or (B,) (models/loss.py); losses returned
    have the same shape. documents: keyword arguments of the model beside tokens (models/llama3.py),
    with a row for each sequence; with labels, the output is the loss.
    """

    def __init__(self, model: nn.Module, loss_sum: Callable[[Tensor, Tensor], Tensor]):
        self.model, self.loss_sum = model, loss_sum

    def forward_backward(
        self, input: Tensor, label: Tensor, documents: dict[str, Tensor], tokens: Tensor
    ) -> Tensor:
        """Run backward of the loss of a local batch (B, T), divided by the step's `tokens`; return
        that loss.
        """
        losses = self.loss_sum(self.model(input, **documents), label) / tokens
        losses.sum().backward()
        return losses.detach()

    @torch.no_grad()
    def evaluate(self, input: Tensor, label: Tensor, documents: dict[str, Tensor]) -> Tensor:
        """Return the summed loss of a local batch (B, T), without gradients."""
        return self.loss_sum(self.model(input, **documents), label)


class Pipeline:
    """This rank's stages and their schedule.

    stages: models in the order of plan.stages_of(rank). tokens (B, T), hidden (B, t, C), output:
    shapes on this rank of a microbatch's input, activations sent between stages (of `dtype`) and
    output, logits (B, T, v) or losses. loss_sum: as for SingleStage.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        plan: PipelineSchedule,
        mesh: DeviceMesh,
        parallelism: Parallelism,
        *,
        tokens: tuple[int, int],
        hidden: tuple[int, int, int],
        output: tuple[int, ...],
        dtype: torch.dtype,
        loss_sum: Callable[[Tensor, Tensor], Tensor],
        device: torch.device,
    ):
        self.plan, self.loss_sum, self.device = plan, loss_sum, device
        self.hidden, self.dtype = hidden, dtype
        self.rank, self.group = mesh.get_local_rank(), mesh.get_group()
        self.models = dict(zip(plan.stages_of(self.rank), stages, strict=True))
        self.last = len(plan.rank_of) - 1
        self.has_last = self.last in self.models
        self.tokens = torch.ones((), device=device)
        with torch.device("meta"):
            first = torch.empty(tokens, dtype=torch.int64)
            between = torch.empty(hidden, dtype=dtype, requires_grad=True)
            last = torch.empty(
                output, dtype=dtype if len(output) == 3 else torch.float32, requires_grad=True
            )
        parts = [
            _Stage(
                _Leaves(model),
                index,
                self.last + 1,
                device,
                input_args=first if index == 0 else between,
                output_args=last if index == self.last else between,
                group=self.group,
            )
            for index, model in self.models.items()
        ]
        options: dict[str, Any] = dict(
            n_microbatches=plan.microbatches, loss_fn=self._loss, scale_grads=False
        )
        cls: Any = get_schedule_class(parallelism.pipeline_parallel_schedule)
        single = issubclass(cls, PipelineScheduleSingle)
        self.schedule: Any = cls(parts[0] if single else parts, **options)

    def forward_backward(
        self, input: Tensor, label: Tensor, documents: dict[str, Tensor], tokens: Tensor
    ) -> Tensor:
        """Run backward of the loss of a local batch (B, T) / the step's `tokens`; return it, zero
        except on the last stage.
        """
        self.tokens = tokens
        self.losses: list[Tensor] = []  # in the order of microbatches
        arguments = (input,) if 0 in self.models else ()
        target = label if self.has_last else None
        self.schedule.step(*arguments, target=target, return_outputs=False, **documents)
        if not self.has_last:
            return torch.zeros((), device=self.device)
        return torch.cat(self.losses) if self.losses[0].ndim else torch.stack(self.losses).sum()

    def _loss(self, logits: Tensor, label: Tensor) -> Tensor:
        losses = self.loss_sum(logits, label) / self.tokens
        self.losses.append(losses.detach())
        return losses.sum()

    @torch.no_grad()
    def evaluate(self, input: Tensor, label: Tensor, documents: dict[str, Tensor]) -> Tensor:
        """Return the summed loss of a local batch (B, T), without gradients; zero except on the
        rank of the last stage.

        Microbatches go through the stages one by one, so that no two ranks wait for each other,
        whatever the schedule. Torch's own evaluation does not work without backward where
        neighbouring stages share a rank.
        """
        losses: list[Tensor] = []
        sends = []
        number = self.plan.microbatches
        for tokens, labels, *parts in zip(
            *(each.chunk(number) for each in (input, label, *documents.values())), strict=True
        ):
            theirs = dict(zip(documents, parts, strict=True))
            output = torch.empty(0)
            for stage, model in self.models.items():
                if stage > 0 and self.plan.rank_of[stage - 1] != self.rank:
                    output = torch.empty(self.hidden, dtype=self.dtype, device=self.device)
                    dist.recv(output, group=self.group, group_src=self.plan.rank_of[stage - 1])
                output = model(output if stage > 0 else tokens, **theirs)
                if stage == self.last:
                    losses.append(self.loss_sum(output, labels))
                elif self.plan.rank_of[stage + 1] != self.rank:
                    output = output.contiguous()
                    work = dist.isend(
                        output, group=self.group, group_dst=self.plan.rank_of[stage + 1]
                    )
                    sends.append((work, output))  # keeps output alive until it is sent
        for work, _ in sends:
            assert work is not None
            work.wait()
        return (
            torch.cat(losses)
            if losses and losses[0].ndim
            else sum(losses, torch.zeros((), device=self.device))
        )


class _Leaves(nn.Module):
    """A model that returns the current `gradient_leaves` as its parameters, for torch's schedules."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.model(*args, **named)

    def parameters(self, recurse: bool = True) -> Any:
        return iter(sharded_model(self.model).gradient_leaves())


class _Stage(PipelineStage):
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Omit operations with a neighbour stage on the same rank: torch 2.11 makes them, and gloo
        does not support them.
        """
        return [
            op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank
        ]

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False
    ) -> Any:
        """Run the half of a backward that computes gradients of weights as one."""
        backward = functools.partial(
            super().backward_maybe_with_nosync, backward_type, bwd_kwargs, last_backward
        )
        if backward_type != "weight":
            return backward()
        assert isinstance(self.submod, _Leaves)
        with sharded_model(self.submod.model).backward_of_weights():
            return backward()
