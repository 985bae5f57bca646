"""Read weights in eager mode: gather one block ahead, and reshard after forward.

    gatherer = PrefetchGatherer(specs, resharded)               # one for a model
    with gatherer.forward(reshard=True):                        # autograd saves no resharded weight
        weight = gatherer.read(parameter, spec)                 # while the next block is in flight

    computation          embedding         layers.0         layers.1
    all-gather           layers.0          layers.1         layers.2

In graphs, passes do both, as in SimpleFSDP's compiler (arXiv 2411.00284). Eager mode has no graph
to look ahead in, so it records the order of blocks.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from titan_lite.distributed.activation_checkpoint import kept_weights
from titan_lite.distributed.buckets import Specs, gather_blocks
from titan_lite.distributed.gradient_reducer import GradientReducer
from titan_lite.distributed.param_collectives import GatheredWeight, InFlight, ShardSpec, Weight
from titan_lite.dtensor import as_shard_of, local

# weights: the half of a backward that computes gradients of weights; None: outside of forward and
# backward, where nothing stays gathered
Phase = Literal["forward", "backward", "weights"] | None


class SavedWeight(NamedTuple):
    """A stand-in that autograd saves for a view of a resharded weight."""

    parameter: nn.Parameter
    spec: ShardSpec
    version: int  # of the parameter
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int


class WeightRead(NamedTuple):
    """A gathered weight that is resharded after forward."""

    weight: weakref.ref[Tensor]
    parameter: nn.Parameter
    spec: ShardSpec


class PrefetchGatherer:
    """Gathers the weights of one model in eager mode.

    Resharding: autograd saves no gathered weight that is resharded; backward gathers it again. A
    weight is recognised by the address of its storage, because autograd saves views of it (the
    transpose in a matmul). The entry is valid while the weight is alive: later, an
    activation may have its address.

    A weight that is not resharded is kept for backward by autograd, or, for a block that activation
    checkpointing recomputes, by `kept_weights`.

    Prefetch: a forward or backward keeps the block of its last read gathered. Blocks are read in
    the same order every time, so the next one is in flight meanwhile: two are alive at once.
    """

    def __init__(self, specs: Specs, resharded: frozenset[str]):
        self.resharded = resharded  # FQNs of weights that are dropped after forward
        self.reducer = GradientReducer(specs)
        self.blocks = gather_blocks(specs)
        self.block_of = {
            spec.fqn: name
            for name, buckets in self.blocks.items()
            for bucket in buckets
            for spec in bucket.specs
        }

        self.phase: Phase = None
        self.order: list[str] = []  # blocks gathered in this phase so far
        # blocks gathered in the last phase of each kind
        self.last_order: dict[Phase, list[str]] = defaultdict(list)
        self.gathered: dict[str, Tensor] = {}  # weights of the last block, by FQN
        self.gathering: dict[str, list[InFlight]] = {}  # the buckets of the next block
        # by the address of the storage, only during a forward that reshards
        self.reads: dict[int, WeightRead] | None = None
        # True if the last forward has read weights to be resharded
        self.backward_gathers = False

    def read(self, parameter: nn.Parameter, spec: ShardSpec) -> Weight:
        """Return the full weight; its backward reduces the gradient."""
        # The parameter itself: DTensor's way to its local tensor and back takes 0.1 ms.
        weight, stand_in = GatheredWeight.apply(
            parameter, spec, self._full_weight, self._reduce_to_shard
        )
        if self.reads is not None and spec.fqn in self.resharded:
            self._remember(weight, parameter, spec)
        return spec.transport.receive(weight, stand_in, *spec.scales)

    def leaf(self, parameter: nn.Parameter, spec: ShardSpec) -> Tensor:
        """Return the tensor that autograd accumulates the gradient into: the parameter."""
        return parameter

    def take_gradients(self) -> None:
        """Do nothing: backward has left the gradients where the optimizer reads them."""

    def _full_weight(self, parameter: Tensor, spec: ShardSpec) -> Tensor:
        """Return the full weight: gathered, or for a recomputation the one that forward kept."""
        kept = kept_weights()
        if kept is None or spec.fqn in self.resharded or spec.axis.degree == 1:
            return self.gather(local(parameter), spec)
        if spec.fqn not in kept:
            kept[spec.fqn] = self.gather(local(parameter), spec)
        return kept[spec.fqn]

    # Gathering one block ahead

    def gather(self, shard: Tensor, spec: ShardSpec) -> Tensor:
        """Return the full weight, with its block gathered in a forward or backward."""
        if spec.axis.degree == 1 or not self._in_phase():
            return spec.start_gather(shard).wait()
        if spec.fqn not in self.gathered:
            self._gather_block(self.block_of[spec.fqn])
        return self.gathered[spec.fqn]

    # Hidden from dispatch modes: selective checkpointing counts operators, and a read may find its
    # block gathered or not.
    @_disable_current_modes()
    @torch.no_grad()
    def _gather_block(self, block: str) -> None:
        """Gather a block in place of the last one, and start the one that followed it last time."""
        self.gathered.clear()
        self._start_gather(block)
        in_flight = self.gathering.pop(block)
        for bucket, started in zip(self.blocks[block], in_flight, strict=True):
            weights = bucket.finish_gather(started)
            for spec, weight in zip(bucket.specs, weights, strict=True):
                self.gathered[spec.fqn] = weight
        del in_flight, started  # before the next block needs memory

        position = len(self.order)
        self.order.append(block)
        last_order = self.last_order[self.phase]
        if position + 1 < len(last_order) and last_order[position] == block:
            self._start_gather(last_order[position + 1])

    @_disable_current_modes()
    @torch.no_grad()
    def _start_gather(self, block: str) -> None:
        if block not in self.gathering:
            self.gathering[block] = [bucket.start_gather() for bucket in self.blocks[block]]

    # Reducing gradients

    def reduce(self, gradient: Tensor, spec: ShardSpec, dtype: torch.dtype) -> Tensor:
        """Return this rank's rows of the sum over ranks, which their first use waits for."""
        if not spec.reduce_groups:
            return spec.start_reduce(gradient).to(dtype)
        self._in_phase()
        return self.reducer.add(gradient, spec, dtype)

    def _reduce_to_shard(self, gradient: Tensor, spec: ShardSpec, parameter: Tensor) -> Tensor:
        """Return the gradient of the parameter, as `reduce` does."""
        return as_shard_of(parameter, self.reduce(gradient, spec, parameter.dtype))

    # Resharding after forward

    def _remember(self, weight: Tensor, parameter: nn.Parameter, spec: ShardSpec) -> None:
        assert self.reads is not None
        if weight.data_ptr() != local(parameter).data_ptr():  # else it takes no memory
            self.reads[_storage_address(weight)] = WeightRead(weakref.ref(weight), parameter, spec)

    def _pack(self, tensor: Tensor) -> Tensor | SavedWeight:
        """Return what autograd saves for a tensor."""
        if not self.reads or type(tensor) is not Tensor:
            return tensor
        read = self.reads.get(_storage_address(tensor))
        if read is None or read.weight() is None:
            return tensor
        return SavedWeight(
            read.parameter,
            read.spec,
            read.parameter._version,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def _unpack(self, saved: Tensor | SavedWeight) -> Tensor:
        """Return the tensor in backward, gathered again."""
        self._in_phase()
        if isinstance(saved, Tensor):
            return saved
        if saved.parameter._version != saved.version:
            raise RuntimeError(
                f"{saved.spec.fqn} was changed between its forward and its backward; update it"
                " after backward"
            )
        weight = self.gather(local(saved.parameter).detach(), saved.spec)
        return weight.as_strided(saved.size, saved.stride, saved.storage_offset)

    # Phases

    @contextmanager
    def forward(self, reshard: bool) -> Iterator[None]:
        """Run one forward of the model inside this context."""
        self._begin("forward")
        self.reads = {} if reshard else None
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        try:
            with hooks if reshard else nullcontext():
                yield
        finally:
            self._begin(None)
            self.backward_gathers = bool(self.reads)
            self.reads = None

    @contextmanager
    def backward_of_weights(self) -> Iterator[None]:
        """Run the half of a backward that computes gradients of weights, by several runs of
        autograd's engine.
        """
        self._begin("weights")
        yield
        self._end_backward()

    def _in_phase(self) -> bool:
        """Return True in a forward or backward. Autograd's engine begins a backward unannounced."""
        if self.phase is None and torch._C._current_graph_task_id() != -1:
            self._begin("backward")
            if self.backward_gathers and self.last_order["backward"]:
                # under the backward of what is kept, such as the output
                self._start_gather(self.last_order["backward"][0])
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return self.phase is not None

    def _end_backward(self) -> None:
        self.reducer.finish_backward()
        self._begin(None)

    def _begin(self, phase: Phase) -> None:
        """End the last phase and begin another."""
        for buckets in self.gathering.values():  # not read
            for started in buckets:
                started.wait()
        self.gathering.clear()
        if self.order:
            self.last_order[self.phase] = self.order
        self.phase = phase
        self.order = []
        self.gathered.clear()
        self.reducer.reset()


def _storage_address(tensor: Tensor) -> int:
    return int(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())
