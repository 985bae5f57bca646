"""Gather weights once for all microbatches of an optimizer step, and reduce gradients once.

    with stage.gathered_for_step(len(microbatches)):        # stage.py
        for input, label in microbatches:
            loss(stage(input), label).backward()            # gradients accumulate, unreduced
    parameter.grad                                          # reduced

Llama 3 was trained this way (arXiv 2407.21783, section 3.3.2). Weights are gathered in the first
forward and gradients reduced in the last backward, a block at a time, in the buckets of eager mode:

    microbatch       0 forward    0 backward   1 forward   1 backward
    communication    all-gather                            reduce-scatter

k microbatches cost the communication of one, and the memory of the rank's unsharded weights and
gradients. With more than two ranks, a library may sum in an order that depends on the offset in a
bucket.

The way of a weight's gradient, once a microbatch down to the sum, and from there once a step:

    eager                                   compiled
    autograd accumulates it into a leaf     take_gradient(gradient, fqn), an operator of the graph
      |                                       |
      | OncePerStepGatherer                   | STEP_READERS: the StepReader of this FQN
      |   ._take_gradient                     |   .receive: adds up both gradients of a tied weight
      +------------------+--------------------+
                         v
    StepGradients.add    sum over microbatches, in reduce_dtype
                         |  after the last one
                         v
    PrefetchGatherer.reduce    the sum over ranks, in the bucket of the weight's block
                         v
    parameter.grad       this rank's rows, which their first use waits for
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Work, _register_work
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import _disable_current_modes

from titan_lite.collectives import collectives
from titan_lite.distributed.buckets import Bucket, Specs, gather_buckets
from titan_lite.distributed.param_collectives import InFlight, ShardSpec, Weight
from titan_lite.distributed.prefetch import PrefetchGatherer
from titan_lite.dtensor import as_shard_of, local
from titan_lite.sinks import Sinks

# Buckets allocated at once, beside weights and gradients: one is communicated while another is
# copied. The planner counts their memory.
IN_FLIGHT = 2


class StepGradients:
    """The unreduced gradients of a step, summed over its microbatches in reduce_dtype."""

    def __init__(self, specs: Specs, prefetch: PrefetchGatherer, microbatches: int):
        self.parameters = {spec.fqn: parameter for parameter, spec in specs.items()}
        self.prefetch = prefetch  # reduces gradients, in its buckets
        self.microbatches = microbatches  # of the step
        self.sums: dict[str, Tensor] = {}  # by FQN, until the last microbatch
        self.added: Counter[str] = Counter()  # microbatches in the sums

    def add(self, spec: ShardSpec, gradient: Tensor, *, copy: bool) -> None:
        """Add a microbatch's gradient. The last one starts the reduction into `parameter.grad`.

        copy: the caller uses the gradient's memory again.
        """
        if spec.fqn in self.sums:
            self.sums[spec.fqn] += gradient
        else:
            self.sums[spec.fqn] = gradient.to(spec.reduce_dtype, copy=copy)
        self.added[spec.fqn] += 1
        assert self.added[spec.fqn] <= self.microbatches, "more backwards than microbatches"
        if self.added[spec.fqn] == self.microbatches:
            parameter = self.parameters[spec.fqn]
            rows = self.prefetch.reduce(self.sums.pop(spec.fqn), spec, parameter.dtype)
            parameter.grad = as_shard_of(parameter, rows)

    def check_complete(self) -> None:
        """Raise RuntimeError for gradients that wait for a microbatch that did not run."""
        for fqn in self.sums:
            raise RuntimeError(
                f"{fqn} has gradients of {self.added[fqn]} of the step's {self.microbatches}"
                " microbatches, and was not reduced"
            )


class OncePerStepGatherer:
    """Gathers a block at its first read in a step and keeps it: for a model in eager mode.

    A kept weight, or its stand-in, is a leaf of autograd.
    """

    def __init__(self, prefetch: PrefetchGatherer, gradients: StepGradients):
        self.prefetch = prefetch  # gathers blocks, one ahead
        self.gradients = gradients
        self.weights: dict[str, Tensor] = {}  # full weights, by FQN
        self.leaves: dict[str, Tensor] = {}  # that autograd accumulates their gradients into
        self.specs: dict[str, ShardSpec] = {}  # of the weights

    def read(self, parameter: nn.Parameter, spec: ShardSpec) -> Weight:
        """Return the full weight, a leaf of autograd."""
        if spec.fqn not in self.weights:
            self._gather_block(spec)
        return self.read_inputs(self.graph_inputs(parameter, spec), spec)

    def graph_inputs(self, parameter: nn.Parameter, spec: ShardSpec) -> tuple[Tensor, ...]:
        """Return what graphs have as inputs for a parameter, when they are priced as eager mode."""
        stand_in = (self.leaves[spec.fqn],) if spec.has_stand_in else ()
        return (self.weights[spec.fqn], *spec.scales, *stand_in)

    def read_inputs(self, inputs: Sequence[Tensor], spec: ShardSpec) -> Weight:
        """Return the full weight, an input of the graph."""
        weight, *scales = inputs
        stand_in = scales.pop() if spec.has_stand_in else None
        return spec.transport.receive(weight, stand_in, *scales)

    @_disable_current_modes()
    @torch.no_grad()
    def _gather_block(self, spec: ShardSpec) -> None:
        """Gather the block of a weight, while the next one is in flight."""
        for bucket in self.prefetch.blocks[self.prefetch.block_of[spec.fqn]]:
            for parameter, member in zip(bucket.parameters, bucket.specs, strict=True):
                weight = self.prefetch.gather(local(parameter), member)
                leaf = self.keep(weight.detach(), member, parameter.requires_grad)
                if parameter.requires_grad:
                    take_gradient = functools.partial(self._take_gradient, member)
                    leaf.register_post_accumulate_grad_hook(take_gradient)

    def keep(self, weight: Tensor, spec: ShardSpec, requires_grad: bool) -> Tensor:
        """Keep a gathered weight, which modules read from now on. Returns its leaf."""
        stand_in = spec.stand_in(weight)
        leaf = weight if stand_in is None else stand_in
        leaf.requires_grad_(requires_grad)
        self.weights[spec.fqn] = weight
        self.leaves[spec.fqn] = leaf
        self.specs[spec.fqn] = spec
        return leaf

    def _take_gradient(self, spec: ShardSpec, leaf: Tensor) -> None:
        """Move the gradient that autograd has accumulated in a leaf to the sum of the step."""
        assert leaf.grad is not None
        gradient = leaf.grad
        leaf.grad = None
        self.gradients.add(spec, gradient, copy=False)

    def leaf(self, parameter: nn.Parameter, spec: ShardSpec) -> Tensor:
        """Return the kept weight or its stand-in; the parameter, if it was not read yet."""
        return self.leaves.get(spec.fqn, parameter)

    def take_gradients(self) -> None:
        """Take all gradients, after a backward that has set `.grad` and run no hook."""
        for fqn, leaf in self.leaves.items():
            if leaf.grad is not None:
                self._take_gradient(self.specs[fqn], leaf)

    def finish(self) -> None:
        """End the step after its last backward."""
        self.gradients.check_complete()

    def close(self) -> None:
        """Drop the weights.

        Otherwise, cycles of references keep them until Python collects garbage.
        """
        self.weights.clear()
        self.leaves.clear()


class StepReader:
    """Gathers the weights of a compiled model once per step, while its graph runs.

    One graph serves all microbatches: full weights are inputs, allocated before they are gathered.
    The graph waits for a weight where it uses it first (`_ArrivingWeight`), which finishes the
    weight's bucket and starts the next one, in the first microbatch alone. Backward hands each
    gradient over as soon as it has computed it (`take_gradient`). Autograd sees an empty handle in
    place of the weight, whose gradient keeps `take_gradient` in the graph.
    """

    @torch.no_grad()
    def __init__(self, specs: Specs, gradients: StepGradients, reads: Counter[str]):
        self.gradients = gradients
        self.specs = {spec.fqn: spec for spec in specs.values()}
        self.reads = reads  # of a weight in a graph's forward, by FQN: two of the tied table
        self.first_reads: dict[str, Tensor] = {}  # a tied weight's first gradient in a microbatch
        self.weights: dict[str, Tensor] = {}  # full weights, by FQN
        self.handles: dict[str, Tensor] = {}  # (0,), by FQN
        self.buckets: list[_BucketGather] = []  # those that are sharded
        self.started = 0  # of the buckets
        self.finished = 0
        self.arrivals: list[_Arrival] = []  # kept until graphs wait for them
        for bucket in gather_buckets(specs):
            self._allocate(bucket)
        self._start_next()

    def graph_inputs(self, parameter: nn.Parameter, spec: ShardSpec) -> tuple[Tensor, ...]:
        """Return what graphs have as inputs for a parameter."""
        return (self.weights[spec.fqn], self.handles[spec.fqn], *spec.scales)

    def read_inputs(self, inputs: Sequence[Tensor], spec: ShardSpec) -> Weight:
        """Return the full weight, as nodes of a graph with these inputs that wait for it."""
        weight, handle, *scales = inputs
        weight, stand_in = _ArrivingWeight.apply(weight, handle, spec)
        return spec.transport.receive(weight, stand_in, *scales)

    def _allocate(self, bucket: Bucket) -> None:
        """Allocate the weights of a bucket, and their handles."""
        if bucket.specs[0].axis.degree > 1:
            tables = bucket.allocate_tables()
            weights = bucket.weights_of(tables)
            finish = functools.partial(self._finish_gathers, len(self.buckets))
            for weight in weights:
                arrival = _Arrival(finish)
                _register_work(weight, arrival)
                self.arrivals.append(arrival)
            self.buckets.append(_BucketGather(bucket, tables))
        else:
            weights = bucket.finish_gather(bucket.start_gather())
        for parameter, spec, weight in zip(bucket.parameters, bucket.specs, weights, strict=True):
            handle = weight.new_empty(0, dtype=spec.param_dtype)
            self.weights[spec.fqn] = weight.detach()
            self.handles[spec.fqn] = handle.requires_grad_(parameter.requires_grad)
            assert spec.fqn not in STEP_READERS, "two models with the same FQNs in a step"
            STEP_READERS[spec.fqn] = self

    def _start_next(self) -> None:
        if self.started < len(self.buckets):
            gather = self.buckets[self.started]
            gather.in_flight = gather.bucket.start_gather(gather.tables)
            self.started += 1

    @_disable_current_modes()
    @torch.no_grad()
    def _finish_gathers(self, last: int) -> None:
        """Wait for the buckets up to number `last`, in the same order on all ranks.

        The next one is then in flight.
        """
        while self.finished <= last:
            self._start_next()
            gather = self.buckets[self.finished]
            assert gather.in_flight is not None
            gather.bucket.finish_gather(gather.in_flight, gather.tables)
            gather.in_flight = None  # before the next bucket needs memory
            self.finished += 1

    def receive(self, fqn: str, gradient: Tensor) -> None:
        """Take a microbatch's gradient from backward, which uses its memory again.

        The two gradients of a tied weight are added up first, as autograd does.
        """
        spec = self.specs[fqn]
        if self.reads[fqn] == 1:
            self.gradients.add(spec, gradient, copy=True)
        elif fqn not in self.first_reads:
            self.first_reads[fqn] = gradient.clone()
        else:
            self.gradients.add(spec, self.first_reads.pop(fqn).add_(gradient), copy=False)

    def finish(self) -> None:
        """End the step after its last backward."""
        for weight in self.weights.values():
            collectives.wait_tensor(weight)  # no graph may have read it
        self.gradients.check_complete()

    def close(self) -> None:
        """Drop the weights, as OncePerStepGatherer does, and take no more gradients."""
        for fqn in self.handles:
            del STEP_READERS[fqn]
        self.weights.clear()
        self.handles.clear()
        self.arrivals.clear()
        self.buckets.clear()


@dataclass
class _BucketGather:
    """The gather of a bucket into memory that graphs have as inputs."""

    bucket: Bucket
    tables: list[Tensor]  # of Bucket.finish_gather
    in_flight: InFlight | None = None


class _Arrival(Work):
    """Work that `wait_tensor` finds by the storage of its input: calls a function.

    A graph can so wait for a collective that was started outside of it. Torch registers its own
    asynchronous collectives in the same table (`allow_inflight_collective_as_graph_input_ctx`);
    there is no public function for other work. A wait removes the entry, and without one it returns
    its input: so the graph waits in the first microbatch alone.
    """

    def __init__(self, finish: functools.partial[None]):
        super().__init__()
        self.finish = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.finish()
        return True


class _ArrivingContext(FunctionCtx):
    """The values that a wait keeps for backward."""

    spec: ShardSpec


class _ArrivingWeight(torch.autograd.Function):
    """(weight, its handle (0,)) -> the results of GatheredWeight (param_collectives.py).

    Backward gives their gradient to the StepReader.
    """

    @staticmethod
    def forward(
        ctx: _ArrivingContext, weight: Tensor, handle: Tensor, spec: ShardSpec
    ) -> tuple[Tensor, Tensor | None]:
        ctx.spec = spec
        ctx.set_materialize_grads(False)  # bytes have no gradient, for which autograd makes zeros
        weight = collectives.wait_tensor(weight)
        return weight, spec.stand_in(weight)

    @staticmethod
    def backward(
        ctx: _ArrivingContext, of_weight: Tensor | None, of_stand_in: Tensor | None
    ) -> tuple[None, Tensor, None]:
        gradient = ctx.spec.gradient_of(of_weight, of_stand_in)
        return None, take_gradient(gradient, ctx.spec.fqn), None


# The StepReader of each weight in the step that runs: one for a pipeline stage
STEP_READERS = Sinks[StepReader]("titan_lite::take_gradient")


@torch.library.custom_op("titan_lite::take_gradient", mutates_args=())
def take_gradient(gradient: Tensor, fqn: str) -> Tensor:
    """Give the gradient of a weight to its StepReader. Returns that of the weight's handle."""
    STEP_READERS[fqn].receive(fqn, gradient)
    return gradient.new_empty(0)


@take_gradient.register_fake
def _(gradient: Tensor, fqn: str) -> Tensor:
    return gradient.new_empty(0)
