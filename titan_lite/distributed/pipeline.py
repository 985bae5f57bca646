"""Pipeline parallelism: groups of ranks have consecutive modules each, and microbatches travel through them.

    keep_modules(model, plan.modules[0])           # a stage is a model without the others' modules; FQNs stay
    pipeline = Pipeline(stages, plan, mesh["pp"], ...)                  # or SingleStage(model, loss_sum) for one stage
    loss = pipeline.forward_backward(input, label, documents, tokens)

Schedules are those of torch.distributed.pipelining, which runs them; ours are the split (pipeline_plan.py), the loss, and the
handling of SimpleFSDP's gathered weights when backward is cut in two. A microbatch's loss is divided by the number of tokens of
the whole step, so gradients are summed, never averaged, and do not depend on the number of microbatches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineScheduleRuntime, get_schedule_class

from titan_lite.config import Parallelism
from titan_lite.distributed.accumulation import fold_gradients, gradient_leaves
from titan_lite.distributed.pipeline_plan import PipelinePlan, module_fqns, order_of


def keep_modules(model: nn.Module, fqns: Sequence[str]) -> None:
    """Make `model` the stage that has modules `fqns` of it, in place: a layer goes from `layers`, anything else becomes None."""
    for fqn in module_fqns(len(list(model.get_submodule("layers").children()))):
        if fqn not in fqns:
            parent, _, name = fqn.rpartition(".")
            if parent:
                del model.get_submodule(parent)._modules[name]
            else:
                setattr(model, name, None)


class SingleStage:
    """The whole model on every rank: the same methods as Pipeline, without one.

    loss_sum: (logits, labels) -> summed loss, a scalar or one for each sequence (B,), and such are the losses returned (loss.py).
    documents: by name, what the model takes beside tokens (models/llama3.py), a row for each sequence.
    """

    def __init__(self, model: nn.Module, loss_sum: Callable[[Tensor, Tensor], Tensor]):
        self.model, self.loss_sum = model, loss_sum

    def forward_backward(self, input: Tensor, label: Tensor, documents: dict[str, Tensor], tokens: Tensor) -> Tensor:
        """Gradients of the loss of a local batch (B, T) over the step's `tokens` tokens; returns the loss."""
        losses = self.loss_sum(self.model(input, **documents), label) / tokens
        losses.sum().backward()
        return losses.detach()

    @torch.no_grad()
    def evaluate(self, input: Tensor, label: Tensor, documents: dict[str, Tensor]) -> Tensor:
        """The summed loss of a local batch (B, T), without gradients."""
        return self.loss_sum(self.model(input, **documents), label)


class Pipeline:
    """This rank's stages and the schedule that sends microbatches through them.

    stages: models in the order of plan.stages_of(rank). tokens (B, T), hidden (B, t, C) and logits (B, T, v): shapes here,
    for one microbatch, of the input, of what travels between stages in `dtype`, and of the result. loss_sum: as of SingleStage.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        plan: PipelinePlan,
        mesh: DeviceMesh,
        parallelism: Parallelism,
        *,
        tokens: tuple[int, int],
        hidden: tuple[int, int, int],
        logits: tuple[int, int, int],
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
            between, last = (torch.empty(shape, dtype=dtype, requires_grad=True) for shape in (hidden, logits))
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
        options: dict[str, Any] = dict(n_microbatches=plan.microbatches, loss_fn=self._loss, scale_grads=False)
        self.schedule: Any
        if plan.order:
            self.schedule = _PipelineScheduleRuntime(parts, **options)
            self.schedule.pipeline_order = order_of(parallelism, plan)
            self.schedule._prepare_schedule_with_comms(self.schedule.pipeline_order)
        else:
            cls: Any = get_schedule_class(parallelism.pipeline_parallel_schedule)
            self.schedule = cls(parts[0] if issubclass(cls, PipelineScheduleSingle) else parts, **options)

    def forward_backward(self, input: Tensor, label: Tensor, documents: dict[str, Tensor], tokens: Tensor) -> Tensor:
        """Gradients of the loss of a local batch (B, T) over the step's `tokens` tokens; the loss, zero but on the last stage."""
        self.tokens = tokens
        self.losses: list[Tensor] = []  # in the order of the microbatches, as the schedule's own
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
        """The summed loss of a local batch (B, T), without gradients; zero but on the last stage.

        A microbatch goes through all stages of a rank before the next one does, so that no two ranks wait for each other to
        receive, whatever the schedule. Torch's own evaluation cannot leave backward out where neighbouring stages share a rank.
        """
        losses: list[Tensor] = []
        sends = []
        number = self.plan.microbatches
        for tokens, labels, *parts in zip(*(each.chunk(number) for each in (input, label, *documents.values())), strict=True):
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
                    work = dist.isend(output, group=self.group, group_dst=self.plan.rank_of[stage + 1])
                    sends.append((work, output))  # which must live until it is sent
        for work, _ in sends:
            assert work is not None
            work.wait()
        return torch.cat(losses) if losses and losses[0].ndim else sum(losses, torch.zeros((), device=self.device))


class _Leaves(nn.Module):
    """A model whose parameters are, for torch's runtime, what autograd accumulates into at the moment."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.model(*args, **named)

    def parameters(self, recurse: bool = True) -> Any:
        return iter(gradient_leaves(self.model))


class _Stage(PipelineStage):
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Without those to a neighbour on this very rank, which torch 2.11 has and gloo cannot do."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        """The second half of backward sets `.grad` by hand and runs no hooks, so what these do is done after it."""
        result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type == "weight":
            assert isinstance(self.submod, _Leaves)
            fold_gradients(self.submod.model)
        return result
