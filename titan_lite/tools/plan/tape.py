"""List the allocations and frees of a microbatch in a pipeline stage, in the order of its scheduled
graphs, at any depth.

    lives = lives_of(graphs, blocks=4, period=1)                # {"forward": ScheduledGraph(...), ...}, of a stage of 4 blocks
    tape = tape_of(lives, n_layers=32, pipelined=False)         # blocks are alike: one in the middle is repeated
    tape.events["forward"]                                      # [0, 1, ~0, ...]: allocate 0, allocate 1, free 0

A moment is twice a node's place in its graph for what the node allocates, and one more for what is
freed after it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Graph, Node

from titan_lite.cost.collectives import nbytes_of
from titan_lite.cost.op_cost import flops_of
from titan_lite.cost.timeline import last_uses, own_bytes, storages

GRAPHS = ("forward", "loss_forward", "loss_backward", "backward")  # in the order they run


@dataclass(frozen=True)
class ScheduledGraph:
    graph: Graph
    fused: bool  # as in last_uses
    keeps_inputs: bool  # as in last_uses
    # each gradient is added up at once; else, the caller of a compiled backward gets all at its end
    at_once: bool


@dataclass(frozen=True, slots=True)
class Life:
    """A tensor from its allocation to its end."""

    nbytes: int
    born: tuple[str, int]  # graph, moment
    died: tuple[str, int]
    kind: str = ""  # "gradient" of a parameter; "output" of the stage
    itemsize: int = 1  # of a gradient


@dataclass(frozen=True)
class Section:
    """The part of a graph between the attention of one block and the same place of a later one:
    (begin, end], in moments.
    """

    begin: int
    end: int
    last: int  # moment of the graph

    def side(self, moment: int) -> int:
        """Return -1 before the section, 0 inside, 1 after it."""
        return (moment > self.begin) + (moment > self.end) - 1


@dataclass(frozen=True)
class Lives:
    """The tensors of a stage of `blocks` blocks, of which every `period` are alike."""

    blocks: int
    period: int
    tensors: tuple[Life, ...]
    ends: Mapping[str, int]  # last moment of each graph
    sections: Mapping[str, Section]  # of forward and backward, if there are enough blocks


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of a stage.

    The bucket numbers are those of gather_buckets and reduce_buckets (distributed/buckets.py).
    """

    held: int  # elements of this rank's shard
    whole: int  # elements when it is gathered
    block: int  # number of its transformer block; -1 for others
    gathered_with: int
    reduced_with: int
    copy: int = 0  # of a block that was not traced
    float8: bool = False  # gathered as float8
    matrix: bool = False  # within a block, and no norm (optim/state.py)
    factors: tuple[int, int] = (
        0,
        0,
    )  # numbers of P and Q, if its gradient is compressed between copies (powersgd.py)


@dataclass(frozen=True)
class Tensors:
    """The tensors of a pipeline stage, at a traced depth."""

    lives: Lives
    weights: Sequence[Weight]
    buffers: int  # bytes
    between: int  # bytes that travel between pipeline stages


@dataclass(frozen=True)
class Tape:
    """The allocations and frees of a microbatch. The first tensors are gradients of parameters."""

    sizes: list[int]  # bytes, of each tensor
    elements: list[int]  # of each gradient
    rows: list[str]  # part of the memory of each tensor
    events: dict[str, list[int]] = field(
        default_factory=dict
    )  # by graph: i allocates tensor i, ~i frees it


@dataclass(frozen=True)
class Stage:
    """The tensors of a pipeline stage, as they are allocated and freed."""

    tape: Tape
    weights: Sequence[Weight]
    buffers: int  # bytes
    between: int  # bytes that travel between pipeline stages


def stage_of(tensors: Tensors, n_layers: int, pipelined: bool) -> Stage:
    """Return a stage of `n_layers` blocks, as traced or with repeated blocks.

    pipelined: as in tape_of.
    """
    weights = weights_at(tensors.weights, tensors.lives.blocks, n_layers)
    return Stage(
        tape_of(tensors.lives, n_layers, pipelined), weights, tensors.buffers, tensors.between
    )


def lives_of(graphs: Mapping[str, ScheduledGraph], blocks: int, period: int) -> Lives:
    """Return the tensors that the graphs of a stage allocate.

    Results of one graph are inputs of a later one.
    """
    found: list[Life] = []
    received: dict[str, list[int | None]] = {}  # number of the tensor of each input, by graph
    ends: dict[str, int] = {}
    attention: dict[str, list[int]] = {}
    for name in filter(graphs.__contains__, GRAPHS):
        scheduled = graphs[name]
        nodes = list(scheduled.graph.nodes)
        order = {node: place for place, node in enumerate(nodes)}
        storage = storages(scheduled.graph)
        inputs = [node for node in nodes if node.op == "placeholder"]
        numbers: dict[Node, int | None] = dict(zip(inputs, received.get(name, ()), strict=False))
        uses = last_uses(
            scheduled.graph, fused=scheduled.fused, keeps_inputs=scheduled.keeps_inputs, sends=True
        )
        for node, last in uses.items():
            number = numbers.get(node)
            if number is not None:
                latest = (
                    max(found[number].died[1], 2 * last + 1)
                    if found[number].died[0] == name
                    else 2 * last + 1
                )
                found[number] = replace(found[number], died=(name, latest))
            elif node.op != "placeholder" and own_bytes(node):
                numbers[node] = len(found)
                found.append(Life(own_bytes(node), (name, 2 * order[node]), (name, 2 * last + 1)))
        ends[name] = 2 * len(nodes) - 1
        attention[name] = _attention(nodes)

        results: Sequence[Node | None] = nodes[-1].args[0]
        given = [numbers.get(storage[each]) if isinstance(each, Node) else None for each in results]
        if name == "forward":
            received["loss_forward"] = given[:1]
            if given[0] is not None:
                found[given[0]] = replace(found[given[0]], kind="output")
            weights = inputs
        if name.endswith("forward"):
            received[name.replace("forward", "backward")] = given[1:]
        elif name == "loss_backward":
            received.setdefault("backward", []).append(given[0])
        else:
            added = {}  # by storage: the place of the last node before the output that needs it
            for node in nodes[:-1]:
                for each in (node, *node.all_input_nodes):
                    added[storage[each]] = order[node]
            for weight, each, number in zip(weights, results, given, strict=False):
                if number is not None and isinstance(each, Node) and _is_weight(weight):
                    moment = 2 * added[storage[each]] + 1 if scheduled.at_once else ends[name]
                    itemsize = each.meta["val"].element_size()
                    found[number] = replace(
                        found[number], died=(name, moment), kind="gradient", itemsize=itemsize
                    )
    return Lives(blocks, period, tuple(found), ends, _sections(attention, ends, blocks, period))


def _is_weight(node: Node) -> bool:
    """Return whether an input of a forward is a weight, not the (B, T, C) of the stage before it."""
    return bool(nbytes_of(node)) and node.meta["val"].dim() <= 2


def _attention(nodes: Sequence[Node]) -> list[int]:
    """Return the places of attention, in a backward graph without those of recomputed forwards."""
    found = [
        (place, "backward" in str(node.target))
        for place, node in enumerate(nodes)
        if flops_of(node)[1]
    ]
    is_backward = any(backward for _, backward in found)
    return [place for place, backward in found if backward == is_backward]


def _sections(
    attention: Mapping[str, Sequence[int]], ends: Mapping[str, int], blocks: int, period: int
) -> dict[str, Section]:
    """Return the sections that more blocks repeat, from the middle, since the first and the last
    blocks are not like others.
    """
    if blocks <= period or "backward" not in ends:
        return {}
    first = (blocks - period + 1) // 2  # the section begins at this block, counted from 1
    found = {}
    for name in ("forward", "backward"):
        each = len(attention[name]) // blocks  # context parallelism has two per block
        if name == "forward":
            begin, end = (
                2 * attention[name][each * block - 1] + 1 for block in (first, first + period)
            )
        else:
            begin, end = (
                2 * attention[name][each * (blocks - block)] - 1
                for block in (first + period, first)
            )
        found[name] = Section(begin, end, ends[name])
    return found


def tape_of(lives: Lives, n_layers: int, pipelined: bool) -> Tape:
    """Return the tape of a stage of `n_layers` blocks.

    pipelined: torch's stages keep their output until backward is done.
    """
    more = -(-(n_layers - lives.blocks) // lives.period)
    assert more == 0 or (more > 0 and lives.sections), "a stage of fewer blocks is traced itself"
    last = (
        "backward" if pipelined else "loss_forward" if "loss_forward" in lives.ends else "forward"
    )
    tensors: list[Life] = []
    for life in lives.tensors:
        if life.kind == "output" and GRAPHS.index(life.died[0]) <= GRAPHS.index(
            last
        ):  # the caller has it, too
            life = replace(life, died=(last, lives.ends[last]))
        tensors += _repeated(life, lives, more)
    tensors.sort(key=lambda life: life.kind != "gradient")
    tape = Tape(
        [life.nbytes for life in tensors],
        [life.nbytes // life.itemsize for life in tensors if life.kind == "gradient"],
        [_row(life) for life in tensors],
    )
    for name in lives.ends:
        moments = [
            (life.born[1], number) for number, life in enumerate(tensors) if life.born[0] == name
        ]
        moments += [
            (life.died[1], ~number) for number, life in enumerate(tensors) if life.died[0] == name
        ]
        tape.events[name] = [event for _, event in sorted(moments, key=lambda entry: entry[0])]
    return tape


def _row(life: Life) -> str:
    if life.kind == "gradient":
        return "gradients"
    return (
        "activations"
        if life.born[0].endswith("forward") and life.died[0].endswith("backward")
        else "working"
    )


def _repeated(life: Life, lives: Lives, more: int) -> Iterator[Life]:
    """Yield a tensor as it is with `more` repetitions of the sections: one for each repetition of
    the section it is made in.

    Backward goes through the blocks in the other direction. What lives until the end of a graph
    does so at any depth.
    """
    (born_in, born), (died_in, died) = life.born, life.died
    made, ended = lives.sections.get(born_in), lives.sections.get(died_in)
    side = made.side(born) if made else 0
    for copy in range(more + 1) if made and side == 0 else (0,) if side < 0 else (more,):
        start = born + copy * (made.end - made.begin) if made else born
        times = 0
        if ended and died == ended.last:
            times = more
        elif ended and born_in == died_in:
            times = copy if side >= 0 else more * (ended.side(died) > 0)
        elif ended and made and side == 0:
            times = more - copy
        elif ended:
            times = more * (ended.side(died) > (-1 if side < 0 else 0))
        yield replace(
            life,
            born=(born_in, start),
            died=(died_in, died + times * (ended.end - ended.begin) if ended else died),
        )


def weights_at(weights: Sequence[Weight], blocks: int, n_layers: int) -> list[Weight]:
    """Return the weights of a stage of `n_layers` blocks, from those of one of `blocks`."""
    middle = [place for place, weight in enumerate(weights) if weight.block == blocks // 2]
    more = [
        replace(weights[place], copy=copy)
        for copy in range(1, n_layers - blocks + 1)
        for place in middle
    ]
    behind = middle[-1] + 1 if more else 0
    return [*weights[:behind], *more, *weights[behind:]]


def buckets_of(weights: Sequence[Weight], by: str) -> list[list[Weight]]:
    """Return the weights that travel together, in the order of the first ones.

    by: "gathered_with" or "reduced_with".
    """
    found: dict[tuple[int, int], list[Weight]] = {}
    for weight in weights:
        found.setdefault((getattr(weight, by), weight.copy), []).append(weight)
    return list(found.values())
