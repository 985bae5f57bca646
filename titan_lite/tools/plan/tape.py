"""List the allocations and frees of a microbatch in a pipeline stage, in the order of its scheduled
graphs, at any depth.

    lifetimes = lifetimes_of(graphs, blocks=4, period=1)    # of a traced stage of 4 blocks
    tape = tape_of(lifetimes, n_layers=32, pipelined=False) # one in the middle is repeated
    tape.events["forward"]              # [0, 1, ~0, ...]: allocate 0, allocate 1, free 0

A time in a graph is twice a node's position for what the node allocates, and one more for what is
freed after it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Graph, Node

from titan_lite.cost.op_cost import flops_of
from titan_lite.cost.timeline import own_bytes
from titan_lite.feature import KeptNumbers
from titan_lite.graph import KINDS, is_fused_away, nbytes_of, storages, waits_of
from titan_lite.tools.plan.costs import GRAPHS


@dataclass(frozen=True)
class ScheduledGraph:
    graph: Graph
    fused: bool  # as in `node_seconds`
    keeps_inputs: bool  # the graph's caller, until its end
    # Each gradient is added up at once; else, the caller of a compiled backward gets all at its
    # end.
    accumulates_at_once: bool


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A tensor from its allocation to its end."""

    nbytes: int
    allocated: tuple[str, int]  # graph, time in it
    freed: tuple[str, int]
    kind: str = ""  # "gradient" of a parameter; "output" of the stage
    itemsize: int = 1  # of a gradient


@dataclass(frozen=True)
class Section:
    """The part of a graph between the attention of one block and that of a later one.

    It is (begin, end], in times.
    """

    begin: int
    end: int
    last: int  # time in the graph

    @property
    def length(self) -> int:
        return self.end - self.begin

    def side(self, time: int) -> int:
        """Return -1 before the section, 0 inside, 1 after it."""
        if time <= self.begin:
            return -1
        return 0 if time <= self.end else 1


@dataclass(frozen=True)
class StageLifetimes:
    """The tensors of a traced stage of `blocks` blocks, of which every `period` are alike."""

    blocks: int
    period: int
    tensors: tuple[Lifetime, ...]
    ends: Mapping[str, int]  # last time in each graph
    sections: Mapping[str, Section]  # of forward and backward, if there are enough blocks


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of a stage.

    The bucket numbers are those of gather_buckets and reduce_buckets (distributed/buckets.py).
    """

    shard_elements: int  # of this rank
    full_elements: int  # when it is gathered
    block: int  # number of its transformer block; -1 for others
    gathered_itemsize: int  # bytes of an element when it is gathered
    gathered_with: int
    reduced_with: int
    copy: int = 0  # of a block that was not traced
    matrix: bool = False  # within a block, and no norm (models/fqns.py)
    of_experts: bool = False  # matrices of experts, of which a rank has some whole
    updated: bool = True  # by the optimizer; False: the copy of a tied table
    kept: KeptNumbers = field(default_factory=KeptNumbers)  # by features

    @property
    def is_sharded(self) -> bool:
        return self.shard_elements != self.full_elements


@dataclass(frozen=True)
class StageTensors:
    """The tensors of a pipeline stage, at a traced depth."""

    # by the kind of a microbatch's backward: B (full) or I (in halves)
    lifetimes: Mapping[str, StageLifetimes]
    weights: Sequence[Weight]
    buffers: int  # bytes
    hidden: int  # bytes that a microbatch sends to the next stage

    @property
    def blocks(self) -> int:
        """The number that was traced."""
        return next(iter(self.lifetimes.values())).blocks


@dataclass(frozen=True)
class Tape:
    """The allocations and frees of a microbatch. The first tensors are gradients of parameters."""

    sizes: list[int]  # bytes, of each tensor
    elements: list[int]  # of each gradient
    parts: list[str]  # of the memory: "gradients", "activations" or "working", of each tensor
    # By graph: i allocates tensor i, ~i frees it.
    events: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """The tensors of a pipeline stage, as they are allocated and freed."""

    tapes: Mapping[str, Tape]  # by the kind of a microbatch's backward, as in StageTensors
    weights: Sequence[Weight]
    buffers: int  # bytes
    hidden: int  # bytes that a microbatch sends to the next stage


def stage_of(tensors: StageTensors, n_layers: int, pipelined: bool) -> Stage:
    """Return a stage of `n_layers` blocks, as traced or with repeated blocks.

    pipelined: as in tape_of.
    """
    tapes = {
        kind: tape_of(lifetimes, n_layers, pipelined)
        for kind, lifetimes in tensors.lifetimes.items()
    }
    return Stage(
        tapes,
        weights_at(tensors.weights, tensors.blocks, n_layers),
        tensors.buffers,
        tensors.hidden,
    )


def lifetimes_of(graphs: Mapping[str, ScheduledGraph], blocks: int, period: int) -> StageLifetimes:
    """Return the tensors that the graphs of a stage allocate.

    Results of one graph are inputs of a later one.
    """
    recorder = _LifetimeRecorder()
    ends: dict[str, int] = {}
    for name in GRAPHS:
        if name in graphs:
            recorder.add_graph(name, graphs[name])
            ends[name] = 2 * len(graphs[name].graph.nodes) - 1
    sections = _sections(graphs, ends, blocks, period)
    return StageLifetimes(blocks, period, tuple(recorder.tensors), ends, sections)


class _LifetimeRecorder:
    """The tensors of the graphs so far, and which of them later graphs receive."""

    def __init__(self) -> None:
        self.tensors: list[Lifetime] = []
        # Index of the tensor of each input, by graph; None: it is not of the stage's graphs.
        self.received: dict[str, list[int | None]] = {}
        # Of a backward in halves, what the half that runs first has for the other one.
        self.saved: dict[str, int | None] = {}  # by name
        self.crossing: Sequence[int | None] = ()
        self.forward_inputs: list[Node] = []

    def add_graph(self, name: str, scheduled: ScheduledGraph) -> None:
        """Record what a graph allocates and frees, and hand its results on."""
        nodes = list(scheduled.graph.nodes)
        storage = storages(scheduled.graph)
        index_of = self._allocate(name, scheduled, nodes)
        results: Sequence[Node | None] = nodes[-1].args[0]
        returned = [
            index_of.get(storage[result]) if isinstance(result, Node) else None
            for result in results
        ]
        if name == "forward":
            self.forward_inputs = [node for node in nodes if node.op == "placeholder"]
            if returned[0] is not None:
                self._change(returned[0], kind="output")
            self.received["backward"] = returned[1:]
        else:
            self._mark_gradients(name, scheduled, results, returned)
        if name == "backward_input":
            inputs = scheduled.graph.find_nodes(op="placeholder")
            self.saved = {node.name: index_of.get(node) for node in inputs}
            self.crossing = returned[len(self.forward_inputs) :]

    def _received_by(self, name: str, inputs: Sequence[Node]) -> Sequence[int | None]:
        """Return the index of the tensor of each input of a graph, as in `received`."""
        if name == "backward_input":
            return self.received["backward"]
        if name == "backward_weight":
            saved = inputs[: len(inputs) - len(self.crossing)]
            return [*(self.saved[node.name] for node in saved), *self.crossing]
        return self.received.get(name, ())

    def _allocate(
        self, name: str, scheduled: ScheduledGraph, nodes: Sequence[Node]
    ) -> dict[Node, int | None]:
        """Record new tensors, and the ends of those that the graph receives.

        Return the index of the tensor that a node allocates or receives.
        """
        position = {node: index for index, node in enumerate(nodes)}
        inputs = [node for node in nodes if node.op == "placeholder"]
        index_of: dict[Node, int | None] = dict(
            zip(inputs, self._received_by(name, inputs), strict=False)
        )
        for node, last in last_uses(scheduled).items():
            freed = 2 * last + 1
            index = index_of.get(node)
            if index is not None:
                graph, earlier = self.tensors[index].freed
                self._change(index, freed=(name, max(earlier, freed) if graph == name else freed))
            elif node.op != "placeholder" and own_bytes(node):
                index_of[node] = len(self.tensors)
                allocated = 2 * position[node]
                self.tensors.append(Lifetime(own_bytes(node), (name, allocated), (name, freed)))
        return index_of

    def _mark_gradients(
        self,
        name: str,
        scheduled: ScheduledGraph,
        results: Sequence[Node | None],
        returned: Sequence[int | None],
    ) -> None:
        """Mark those results of the backward that are gradients of weights, and when they end."""
        nodes = list(scheduled.graph.nodes)
        storage = storages(scheduled.graph)
        # By storage: the position of the last node before the output that needs it.
        last_needed: dict[Node, int] = {}
        for index, node in enumerate(nodes[:-1]):
            for source in (node, *node.all_input_nodes):
                last_needed[storage[source]] = index
        for weight, result, tensor in zip(self.forward_inputs, results, returned, strict=False):
            if tensor is None or not isinstance(result, Node) or not is_of_weight(weight):
                continue
            end = 2 * len(nodes) - 1
            if scheduled.accumulates_at_once:
                end = 2 * last_needed[storage[result]] + 1
            itemsize = result.meta["val"].element_size()
            self._change(tensor, freed=(name, end), kind="gradient", itemsize=itemsize)

    def _change(self, index: int, **fields: object) -> None:
        self.tensors[index] = replace(self.tensors[index], **fields)  # type: ignore[arg-type]


def last_uses(scheduled: ScheduledGraph) -> dict[Node, int]:
    """Return for each node that allocates, or is an input, the position of the last node that needs
    its storage.

    A view shares the storage of its base. Results that are fused away (`is_fused_away`) are left
    out, and their inputs are kept until the last kernel that recomputes them. A collective keeps
    its inputs until it is waited for.
    """
    graph = scheduled.graph
    position = {node: index for index, node in enumerate(graph.nodes)}
    storage = storages(graph)
    fused_away = {node for node in graph.nodes if scheduled.fused and is_fused_away(node)}
    last_use = {storage[node]: position[storage[node]] for node in graph.nodes}
    for node in reversed(graph.nodes):
        used = last_use[node] if node in fused_away else position[node]
        if node.target in KINDS:
            used = max((position[wait] for wait in waits_of(node)), default=used)
        for source in (node, *node.all_input_nodes):
            last_use[storage[source]] = max(last_use[storage[source]], used)
    if scheduled.keeps_inputs:
        for node in graph.find_nodes(op="placeholder"):
            last_use[node] = len(position) - 1
    return {node: used for node, used in last_use.items() if node not in fused_away}


def is_of_weight(node: Node) -> bool:
    """Return True if an input of a forward that has a gradient is of a weight, and not the hidden
    states of a stage before, which are the model's argument `tokens`.
    """
    return bool(nbytes_of(node)) and node.name != "tokens"


def _attention_positions(nodes: Sequence[Node]) -> list[int]:
    """Return the positions of attention, in a backward graph without recomputed forwards."""
    backward: list[int] = []
    forward: list[int] = []
    for position, node in enumerate(nodes):
        _, attention_flops = flops_of(node)
        if attention_flops:
            (backward if "backward" in str(node.target) else forward).append(position)
    return backward or forward


def _matmul_positions(nodes: Sequence[Node], blocks: int) -> list[int]:
    """Return the position of the first matmul of each block, in the half of the weights.

    Matmuls of other modules come first, and are fewer than the blocks.
    """
    positions = [position for position, node in enumerate(nodes) if flops_of(node)[0]]
    others = len(positions) % blocks
    return positions[others :: len(positions) // blocks]


def _sections(
    graphs: Mapping[str, ScheduledGraph], ends: Mapping[str, int], blocks: int, period: int
) -> dict[str, Section]:
    """Return the sections that more blocks repeat, from the middle, since the first and the last
    blocks are not like others.
    """
    if blocks <= period:
        return {}
    sections = {}
    # A section begins after `first` blocks.
    first = (blocks - period + 1) // 2
    for graph in ends:
        nodes = list(graphs[graph].graph.nodes)
        if graph == "backward_weight":
            in_graph = _matmul_positions(nodes, blocks)
        else:
            in_graph = _attention_positions(nodes)
        # Context parallelism has two operators of attention per block.
        per_block = len(in_graph) // blocks
        if graph == "forward":
            begin = 2 * in_graph[per_block * first - 1] + 1
            end = 2 * in_graph[per_block * (first + period) - 1] + 1
        else:
            begin = 2 * in_graph[per_block * (blocks - first - period)] - 1
            end = 2 * in_graph[per_block * (blocks - first)] - 1
        sections[graph] = Section(begin, end, ends[graph])
    return sections


def tape_of(lifetimes: StageLifetimes, n_layers: int, pipelined: bool) -> Tape:
    """Return the tape of a stage of `n_layers` blocks.

    pipelined: torch's stages keep their output until backward is done.
    """
    repetitions = -(-(n_layers - lifetimes.blocks) // lifetimes.period)
    is_deeper = repetitions > 0 and bool(lifetimes.sections)
    assert repetitions == 0 or is_deeper, "a stage of fewer blocks is traced itself"
    tensors: list[Lifetime] = []
    for tensor in _with_output_kept(lifetimes, pipelined):
        tensors += _repeated(tensor, lifetimes.sections, repetitions) if is_deeper else [tensor]
    tensors.sort(key=lambda tensor: tensor.kind != "gradient")
    gradients = [tensor for tensor in tensors if tensor.kind == "gradient"]
    return Tape(
        sizes=[tensor.nbytes for tensor in tensors],
        elements=[tensor.nbytes // tensor.itemsize for tensor in gradients],
        parts=[_part_of_memory(tensor) for tensor in tensors],
        events={name: _events(tensors, name) for name in lifetimes.ends},
    )


def _with_output_kept(lifetimes: StageLifetimes, pipelined: bool) -> Iterable[Lifetime]:
    """Yield the tensors, of which the output lives as long as the stage's caller has it."""
    if pipelined:
        last = "backward_input" if "backward_input" in lifetimes.ends else "backward"
    else:
        last = "forward"
    for tensor in lifetimes.tensors:
        graph, _ = tensor.freed
        if tensor.kind == "output" and GRAPHS.index(graph) <= GRAPHS.index(last):
            tensor = replace(tensor, freed=(last, lifetimes.ends[last]))
        yield tensor


def _events(tensors: Sequence[Lifetime], graph: str) -> list[int]:
    """Return the events of a graph in the order of time."""
    events = [
        (tensor.allocated[1], index)
        for index, tensor in enumerate(tensors)
        if tensor.allocated[0] == graph
    ]
    events += [
        (tensor.freed[1], ~index)
        for index, tensor in enumerate(tensors)
        if tensor.freed[0] == graph
    ]
    events.sort(key=lambda timed: timed[0])
    return [event for _, event in events]


def _part_of_memory(tensor: Lifetime) -> str:
    if tensor.kind == "gradient":
        return "gradients"
    (allocated, _), (freed, _) = tensor.allocated, tensor.freed
    if allocated.endswith("forward") and "backward" in freed:
        return "activations"
    if allocated == "backward_input" and freed == "backward_weight":
        return "kept for gradients of weights"
    return "working"


def _repeated(
    tensor: Lifetime, sections: Mapping[str, Section], repetitions: int
) -> Iterator[Lifetime]:
    """Yield a tensor as it is with so many repetitions of the sections.

    There is one in each repetition of the section that it is allocated in. It ends in the same
    blocks, but what lives until the end of a graph does so at any depth.
    """
    (allocating, allocated), (freeing, freed) = tensor.allocated, tensor.freed
    section, ending = sections[allocating], sections[freeing]
    is_inside = section.side(allocated) == 0
    # Numbers of repetitions before each copy.
    copies = {-1: [0], 0: range(repetitions + 1), 1: [repetitions]}[section.side(allocated)]
    # Backward goes through the blocks in the other direction.
    is_reversed = (allocating == "forward") != (freeing == "forward")
    for copy in copies:
        same_blocks = repetitions - copy if is_reversed else copy
        sections_before = {-1: 0, 0: same_blocks, 1: repetitions}[ending.side(freed)]
        if is_inside and freed != ending.last:
            sections_before = same_blocks
        elif not is_reversed:  # it does not end before the blocks that it is allocated in
            sections_before = max(sections_before, copy)
        yield replace(
            tensor,
            allocated=(allocating, allocated + copy * section.length),
            freed=(freeing, freed + sections_before * ending.length),
        )


def weights_at(weights: Sequence[Weight], blocks: int, n_layers: int) -> list[Weight]:
    """Return the weights of a stage of `n_layers` blocks, from those of one of `blocks`."""
    middle = [index for index, weight in enumerate(weights) if weight.block == blocks // 2]
    repeated = [
        replace(weights[index], copy=copy)
        for copy in range(1, n_layers - blocks + 1)
        for index in middle
    ]
    if not repeated:
        return list(weights)
    behind = middle[-1] + 1
    return [*weights[:behind], *repeated, *weights[behind:]]


def buckets_of(weights: Sequence[Weight], by: str) -> list[list[Weight]]:
    """Return the weights that travel together, in the order of the first ones.

    by: "gathered_with" or "reduced_with".
    """
    buckets: dict[tuple[int, int], list[Weight]] = {}
    for weight in weights:
        buckets.setdefault((getattr(weight, by), weight.copy), []).append(weight)
    return list(buckets.values())
