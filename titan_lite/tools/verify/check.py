"""Check a recipe's layout at its number of ranks: evaluate its graphs for all of them, and compare
with the plain model in one process.

    verdict = check_layout(config, Layout.from_config(config, 512))
    verdict.differences         # none if all agree

Compared are the loss, and on every rank the gradient of every parameter (specification.py); what
the code of a run says of ranks (tokens, positions, tables, shapes of shards); and the order of
collectives on all ranks, each of which is waited for. It is an evaluation at random weights and
tokens in float64, not a proof.
"""

import dataclasses
import functools
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_lite.compile.errors import CompileError
from titan_lite.compile.model_parts import Value
from titan_lite.config import Config, ConfigError, flatten
from titan_lite.config.errors import shown
from titan_lite.config.families import find_family
from titan_lite.distributed.layout import AXES, Layout
from titan_lite.distributed.pipeline_schedule import order_of
from titan_lite.models.experts import routers_of
from titan_lite.models.transformer import Transformer
from titan_lite.text import error_line
from titan_lite.tools.plan.trace import blocks_in, modules_beside_blocks
from titan_lite.tools.verify import specification
from titan_lite.tools.verify.actions import wrong_actions, wrong_stages
from titan_lite.tools.verify.bridge import differences, not_alike, other_dtypes, real_sizes
from titan_lite.tools.verify.lockstep import InFloat64, evaluate, in_words
from titan_lite.tools.verify.naming import KnownValues, WatchedValues
from titan_lite.tools.verify.ranks import INNER, Divergence, Ranks
from titan_lite.tools.verify.small import SmallRecipe, small_recipe, with_data_parallelism_alone
from titan_lite.tools.verify.specification import Place
from titan_lite.tools.verify.trace_ranks import FirstRanksChoices, TracedStage, trace_stage
from titan_lite.tools.verify.variants import StageVariants

TOLERANCE = 1e-8  # relative; float64 leaves 1e-10
AT_ONCE = 8  # sequences that the plain model computes at a time
GRADIENT = 0.37  # of the loss of each sequence, with which backward begins
TABLE, COPY = "tok_embeddings.weight", "output.weight"  # of tied embeddings in a pipeline
OfParameters = dict[str, list[Any]]  # a tensor of each parameter, by FQN and rank


@dataclass(frozen=True)
class Verdict:
    """The result of a check."""

    ranks: int
    degrees: dict[str, int]  # by axis, and ep
    stages: Sequence[str]  # the kinds of stages that were evaluated, in words
    traces: int
    parameters: int  # whose gradients were compared
    error: float  # the largest relative one of all gradients and of the loss
    differences: Sequence[str]
    first_wrong: str  # the first wrong value of the graphs, in words
    not_covered: Sequence[str]
    seconds: float

    @property
    def agrees(self) -> bool:
        return not self.differences


def check_layout(config: Config, layout: Layout) -> Verdict:
    """Return the verdict on a recipe with a layout.

    Raises ConfigError for a family of a user's own that cannot be as small as what is evaluated.
    """
    started = time.perf_counter()
    small = small_recipe(config, layout)
    check = Check(small)
    order = order_of(config.parallelism, layout.pipeline)
    check.differences += wrong_stages(layout.pipeline, layout.model.n_layers)
    check.differences += wrong_actions(order, layout.pipeline)
    not_covered = [*small.without, *not_covered_of(config, layout)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small: more threads wait longer than they compute
    try:
        check.compute_reference()
        check.trace()
        if config.compile.buckets_across_blocks:
            not_covered.append("graphs at real sizes, which have other buckets by cost")
        else:
            compare_sizes(check, config, layout, not_covered)
        check.run()
    except Divergence as error:
        check.differences.append(str(error))
    except CompileError as error:
        cause = error.__cause__ or error
        check.differences.append(f"its graphs cannot be made: {error_line(cause)}")
    finally:
        torch.set_num_threads(threads)
    return Verdict(
        ranks=layout.world_size,
        degrees={**layout.degrees, "ep": layout.expert_parallel},
        stages=[f"a stage of {' and '.join(words_of(stage))}" for stage in small.chain],
        traces=sum(len(stage.traced) for stage in check.stages),
        parameters=check.parameters,
        error=check.error,
        differences=check.differences,
        first_wrong=check.first_wrong,
        not_covered=not_covered,
        seconds=time.perf_counter() - started,
    )


def not_covered_of(config: Config, layout: Layout) -> Iterator[str]:
    """Yield what evaluation of graphs does not see of a recipe, in words."""
    yield (
        "loader, division by the tokens of a step, clipping, optimizer, validation and eager mode"
        " (`--processes` trains a small model with them); initialization; checkpoints; asynchronous"
        " tensor parallelism; Inductor's kernels; rounding"
    )
    if layout.model.n_experts:
        yield "updates of the balance of experts, and its scale"
    if layout.degrees["pp"] > 1:
        yield "sends and receives between pipeline ranks"
    if layout.copies_table:
        yield "the exchange of a tied table's gradient between stages"
    if config.fault_tolerance.replica_groups > 1:
        yield "sums over replica groups"
    if not config.compile.enable:
        yield "eager mode, in which this recipe trains (compile.enable = false)"
    if config.training.attention_kernel != "auto":
        yield "training.attention_kernel"


def words_of(modules: Sequence[str]) -> list[str]:
    """Return the modules of a stage, with blocks counted."""
    blocks = blocks_in(modules)
    beside = modules_beside_blocks(modules)
    return [f"{blocks} blocks", *beside] if blocks else [*beside]


def compare_sizes(check: "Check", config: Config, layout: Layout, not_covered: list[str]) -> None:
    """Compare the graphs of the first rank with those at the recipe's own sizes."""
    small = check.small
    real = real_sizes(small, config, layout)
    for index, stage in enumerate(check.stages):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        of_real = trace_stage(real, index, 0, FirstRanksChoices(), mode)
        of_small = stage.first
        for name in of_small.once:
            check.differences += other_dtypes(name, of_small.graphs[name].graph, config)
        if of_small.once:  # the real sizes have the graphs that gather by themselves
            own = dataclasses.replace(small.layout, gathers_once=False)
            gathering = dataclasses.replace(small, layout=own)
            of_small = trace_stage(gathering, index, 0, FirstRanksChoices())
        check.differences += differences(of_small, of_real, config)
        not_covered += not_alike(of_small, of_real)


class Check:
    """A check of the stages of a small recipe."""

    def __init__(self, small: SmallRecipe):
        self.small = small
        self.layout = small.layout
        self.ranks = Ranks.of(self.layout.degrees, self.layout.expert_parallel)
        degrees = {**self.layout.degrees, "ep": self.layout.expert_parallel}
        self.places = [Place(degrees, self.ranks.by_axis(rank)) for rank in self.ranks]
        self.styles = find_family(self.layout.model.family).styles
        # set by `compute_reference`
        self.alone: Transformer  # the plain model
        self.reference: tuple[Tensor, dict[str, Tensor]]  # its loss and gradients
        self.stages: list[StageVariants] = []  # set by `trace`
        self.watcher: KnownValues | WatchedValues | None = None
        # tensors of a rank that several ranks share, by what they depend on
        self.shared: dict[Any, Tensor] = {}
        # results
        self.differences: list[str] = []
        self.wrong: set[str] = set()  # the parameters with a wrong gradient, and "loss"
        self.parameters = 0  # whose gradients were compared
        self.error = 0.0  # the largest relative one
        self.first_wrong = ""  # the first wrong value, in words

    def trace(self) -> None:
        """Trace the graphs of all stages on a few ranks."""
        self.stages = [self.trace_stage(index) for index in range(len(self.small.chain))]

    def run(self) -> None:
        """Compare the traced graphs with one process, and name the first wrong value."""
        before = len(self.differences)
        for stage in self.stages:
            for traced in stage.traced.values():
                self.compare_with_specification(traced)
        places_are_right = len(self.differences) == before
        self.evaluate()
        if self.wrong and places_are_right:
            self.first_wrong = self.name_first_wrong()

    def name_first_wrong(self) -> str:
        """Return the first wrong value of the graphs in words (naming.py), "" if none is found."""
        try:
            self.watcher = values = WatchedValues(self.ranks, self.known)
        except (Divergence, CompileError):  # the fault is in data parallelism alone, too
            return ""
        self.run_graphs()
        self.watcher = None
        found = values.first_wrong(self.wrong)
        return f"{found[0]}: {in_words(found[1])}" if found else ""

    @functools.cached_property
    def known(self) -> KnownValues:
        """The values of the same recipe with data parallelism alone."""
        right = Check(with_data_parallelism_alone(self.small))
        right.alone = self.alone
        right.trace()
        right.watcher = known = KnownValues()
        right.run_graphs()
        return known

    def evaluate(self) -> None:
        """Evaluate the graphs of all stages, and compare with one process."""
        loss, gradients = self.reference
        losses, found = self.run_graphs()
        self.compare_loss(losses, loss)
        self.compare_gradients(found, gradients)

    def compute_reference(self) -> None:
        """Make the plain model, and compute its loss and gradients.

        Raises ConfigError for a model that cannot be so small.
        """
        try:
            self.alone = plain_model(self.small)
            self.reference = self.gradients_alone()
        except Exception as error:
            model = self.layout.model
            raise ConfigError(
                f"model.name = {shown(model.family)}: at the small sizes that verify evaluates (dim"
                f" {model.dim}, {model.n_heads} heads of {model.head_dim}, hidden_dim"
                f" {model.hidden_dim}) it fails in one process: {error_line(error)}; use"
                " --processes, which trains the flavor debug"
            ) from error

    def run_graphs(self) -> tuple[list[Tensor], list["Gradients"]]:
        """Return the loss of each rank, and the gradients of each stage and kind of backward."""
        outputs: list[list[list[Any]]] = []  # of each stage's forward, by rank
        for stage in self.stages:
            hidden = [results[0] for results in outputs[-1]] if outputs else None
            weights = self.weights_of(stage)
            inputs = [
                [self.input_of(value, rank, hidden, weights) for value in stage.first.inputs]
                for rank in self.ranks
            ]
            outputs.append(self.run_graph(stage, "forward", inputs))
        losses = [results[0] for results in outputs[-1]]
        return losses, self.run_backward(outputs)

    def run_graph(
        self, stage: StageVariants, name: str, inputs: Sequence[Sequence[Any]]
    ) -> list[list[Any]]:
        """Return the results of a graph of a stage on each rank."""
        watch = None
        if self.watcher is not None:
            inputs_of_forward = [value.name for value in stage.first.inputs]
            results = {"forward": ["loss"], **stage.first.once}
            graph = stage.of[name][0].graph
            watch = self.watcher.watch(name, graph, results.get(name, inputs_of_forward))
        return evaluate(stage.of[name], stage.index, inputs, watch)

    def run_step_graph(self, stage: StageVariants, name: str, inputs: OfParameters) -> OfParameters:
        """Return the results of a graph that runs once a step."""
        fqns = stage.first.once[name]
        results = self.run_graph(
            stage, name, [[inputs[fqn][rank] for fqn in fqns] for rank in self.ranks]
        )
        return {fqn: [own[index] for own in results] for index, fqn in enumerate(fqns)}

    def trace_stage(self, index: int) -> StageVariants:
        """Return the graphs of a stage on all ranks."""
        names = [
            fqn
            for fqn, _ in self.alone.named_parameters(remove_duplicate=False)
            if any(fqn.startswith(module + ".") for module in self.small.chain[index])
        ]
        shapes: dict[int, Any] = {
            rank: tuple(self.shapes_of(fqn, rank) for fqn in names) for rank in self.ranks
        }
        if self.ranks.are_straddled(self.layout.expert_parallel):
            # Constants are not functions of coordinates: each rank is traced.
            shapes = {rank: rank for rank in self.ranks}
        choices = FirstRanksChoices()

        def trace(rank: int) -> TracedStage:
            return trace_stage(self.small, index, rank, choices)

        return StageVariants(self.ranks, trace, shapes.__getitem__)

    def shapes_of(self, fqn: str, rank: int) -> tuple[torch.Size, torch.Size]:
        """Return the shapes of what a rank computes with, and of its shard."""
        whole = self.unsharded(fqn, rank)
        return whole.shape, specification.rows(fqn, whole, self.places[rank]).shape

    def parameter(self, fqn: str) -> Tensor:
        return self.alone.get_parameter(fqn).detach()

    def unsharded(self, fqn: str, rank: int) -> Tensor:
        return specification.unsharded(fqn, self.parameter(fqn), self.places[rank], self.styles)

    def part(self, fqn: str, tensor: Tensor, rank: int) -> Tensor:
        return specification.part(fqn, tensor, self.places[rank], self.styles)

    # Inputs

    def weights_of(self, stage: StageVariants) -> OfParameters:
        """Return the weights that a stage has as inputs: shards, or those that a step gathers."""
        fqns = {value.name for value in stage.first.inputs if value.kind == "weight"}
        shards: OfParameters = {
            fqn: [self.part(fqn, self.parameter(fqn), rank).contiguous() for rank in self.ranks]
            for fqn in fqns
        }
        if not self.layout.gathers_once:
            return shards
        return self.run_step_graph(stage, "gather", shards)

    def input_of(
        self, value: Value, rank: int, hidden: Sequence[Tensor] | None, weights: OfParameters
    ) -> Tensor:
        """Return an input of a rank's forward.

        hidden: what the stage before gave each rank; weights: of this stage.
        """
        place = self.places[rank]
        if value.kind == "argument":
            if value.name == "tokens" and hidden is not None:
                return hidden[rank]
            key = (value.name, *(place.coordinates[axis] for axis in AXES[1:-1]))
            return self.once(key, lambda: self.argument(value.name, place))
        if value.kind == "buffer":
            key = (value.name, place.coordinates["cp"])
            return self.once(key, lambda: self.buffer(value.name, place))
        if value.index == 1:  # the handle of a weight that is gathered once a step
            return torch.empty(0, dtype=torch.float64)
        return weights[value.name][rank]

    def once(self, key: Any, make: Any) -> Tensor:  # noqa: ANN401
        if key not in self.shared:
            self.shared[key] = make().contiguous()
        return self.shared[key]

    def argument(self, name: str, place: Place) -> Tensor:
        """Return a rank's argument of the model, by name."""
        positions = specification.positions(self.layout.seq_len, place)
        return specification.sequences(self.small.batch[name], place)[:, positions]

    def buffer(self, name: str, place: Place) -> Tensor:
        positions = specification.positions(self.layout.seq_len, place)
        if name == "own_positions":
            return torch.tensor(positions)
        buffer = self.alone.get_buffer(name)
        return buffer[positions] if name.startswith("rope") else buffer

    def compare_with_specification(self, traced: TracedStage) -> None:
        """Compare what the code of a run says of a rank with the specification."""
        rank, place = traced.rank, self.places[traced.rank]
        found: dict[str, tuple[Any, Any]] = {
            "positions": (traced.positions, specification.positions(self.layout.seq_len, place)),
            "data-parallel rank": (traced.data_rank, place.along("dp_replicate", "dp_shard")[0]),
        }
        for fqn, shape in traced.shards.items():
            wanted = tuple(self.part(fqn, self.parameter(fqn), rank).shape)
            found[f"the shard of {fqn}"] = (shape, wanted)
        for what, (own, wanted) in found.items():
            if own != wanted:
                self.differ(f"rank {rank}: {what}: {shortened(own)}, not {shortened(wanted)}")
        assert traced.batch is not None
        arguments = {"tokens": traced.batch.input, "labels": traced.batch.label}
        arguments |= traced.batch.model_kwargs
        for name in self.small.batch:
            if name not in arguments:
                self.differ(f"rank {rank}: a run does not give the model {name}")
            elif not torch.equal(arguments[name], self.argument(name, place)):
                self.differ(f"rank {rank}: its {name} are not those of its place")
        for name, buffer in traced.buffers.items():
            if name.startswith("rope") or name == "own_positions":
                right = self.buffer(name, place)
                if not torch.allclose(buffer.double(), right.double(), rtol=0, atol=1e-6):
                    self.differ(f"rank {rank}: the buffer {name} is not that of its positions")

    # Evaluation

    def run_backward(self, outputs: list[list[list[Any]]]) -> list["Gradients"]:
        """Return the gradients of each stage and each kind of its backward, the last stage first.

        outputs: of each stage's forward, by rank; emptied.
        """
        loss = outputs[-1][0][0]
        tangents: list[Any] = [torch.full_like(loss, GRADIENT)] * len(self.ranks)
        found = []
        for stage in reversed(self.stages):
            values = stage.first.inputs
            results = outputs.pop()
            inputs = [[*own[1:], tangents[rank]] for rank, own in enumerate(results)]
            hidden = next(i for i, value in enumerate(values) if value.name == "tokens")
            for kind, of_inputs in self.backwards_of(stage, inputs):
                found.append(Gradients(kind, self.by_parameter(stage, of_inputs)))
                tangents = [own[hidden] for own in of_inputs]
                del of_inputs  # they have as much memory as the weights of all ranks
        return found

    def backwards_of(
        self, stage: StageVariants, inputs: list[list[Any]]
    ) -> Iterator[tuple[str, list[list[Any]]]]:
        """Yield each kind of backward, and the gradients of forward's inputs by rank."""
        if "backward" in stage.of:
            yield "backward", self.run_graph(stage, "backward", inputs)
        if "backward_input" in stage.of:
            halves = self.run_halves(stage, inputs, len(stage.first.inputs))
            yield "backward in halves", halves

    def by_parameter(
        self, stage: StageVariants, of_inputs: Sequence[Sequence[Any]]
    ) -> OfParameters:
        """Return the gradients of shards."""
        handle = int(self.layout.gathers_once)
        gradients = {
            value.name: [own[index] for own in of_inputs]
            for index, value in enumerate(stage.first.inputs)
            if value.kind == "weight" and value.index == handle
        }
        if not self.layout.gathers_once:
            return gradients
        for fqn, own in gradients.items():
            for rank in self.ranks:
                if own[rank] is None:  # nothing depends on the weight
                    own[rank] = torch.zeros_like(self.unsharded(fqn, rank))
        return self.run_step_graph(stage, "reduce", gradients)

    def run_halves(
        self, stage: StageVariants, inputs: list[list[Any]], count: int
    ) -> list[list[Any]]:
        """Return the gradients of inputs by a backward in halves."""
        first = self.run_graph(stage, "backward_input", inputs)
        kept = stage.first.kept
        between = [
            [*(inputs[rank][index] for index in kept), *first[rank][count:]] for rank in self.ranks
        ]
        second = self.run_graph(stage, "backward_weight", between)
        return [
            list(map(added, of_first[:count], of_second))
            for of_first, of_second in zip(first, second, strict=True)
        ]

    def gradients_alone(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of all sequences and its gradients, of the plain model in one process."""
        parameters = dict(self.alone.named_parameters())
        total = torch.zeros((), dtype=torch.float64)
        sums: dict[str, Tensor] = {}
        arguments = {name: tensor.flatten(0, 1) for name, tensor in self.small.batch.items()}
        for first in range(0, len(arguments["tokens"]), AT_ONCE):
            chosen = {name: each[first : first + AT_ONCE] for name, each in arguments.items()}
            labels = chosen.pop("labels")
            with InFloat64():
                logits = self.alone(**chosen)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                gradients = torch.autograd.grad(
                    GRADIENT * loss, list(parameters.values()), allow_unused=True
                )
            total += loss.detach()
            for fqn, found in zip(parameters, gradients, strict=True):
                gradient = torch.zeros_like(parameters[fqn]) if found is None else found
                sums[fqn] = gradient if fqn not in sums else sums[fqn] + gradient
        return total, sums

    # Comparison

    def compare_loss(self, losses: Sequence[Tensor], expected: Tensor) -> None:
        total = torch.zeros((), dtype=torch.float64)
        for rank, loss in enumerate(losses):
            index, _ = self.places[rank].along("tp")  # the innermost axis
            if not torch.allclose(loss, losses[rank - index], rtol=TOLERANCE):
                self.wrong.add("loss")
                self.differ(
                    f"the loss of rank {rank} is not that of rank {rank - index}, which has the"
                    " same tokens"
                )
                break
            if index == 0:
                total += loss.sum()
        error = float((total - expected).abs() / expected.abs())
        self.error = max(self.error, error)
        if not error <= TOLERANCE:
            self.wrong.add("loss")
            self.differ(f"the loss is {float(total):.9g}, and {float(expected):.9g} in one process")

    def compare_gradients(
        self, found: Sequence["Gradients"], expected: Mapping[str, Tensor]
    ) -> None:
        if self.layout.model.tied_embeddings and len(self.small.chain) > 1:
            found = with_gradient_of_table(found)
        compared = {fqn for gradients in found for fqn in gradients.by_parameter}
        for fqn in sorted(expected.keys() - compared):
            self.differ(f"no graph has a gradient of {fqn}")
        self.parameters = len(compared)
        for gradients in found:
            for fqn, own in gradients.by_parameter.items():
                wrong = list(self.wrong_ranks(fqn, own, expected[fqn]))
                if wrong:
                    self.wrong.add(fqn)
                    _, error, factor = max(wrong, key=lambda each: each[1])
                    self.differ(
                        f"{gradients.kind}: the gradient of {fqn} is wrong on {len(wrong)} of"
                        f" {len(self.ranks)} ranks, by {error:.2g}{factor}"
                        f"{self.unsummed(fqn, own, expected[fqn])}"
                    )

    def unsummed(self, fqn: str, gradients: Sequence[Tensor | None], expected: Tensor) -> str:
        """Return the axis over which wrong gradients are parts of a sum, in words; or ""."""
        for axis, (name, size) in enumerate(zip(self.ranks.axes, self.ranks.sizes, strict=True)):
            stride = self.ranks.stride(axis)
            parts = [gradients[index * stride] for index in range(size)]
            wanted = self.part(fqn, expected, 0)
            if any(part is None or part.shape != wanted.shape for part in parts):
                continue
            total = torch.stack(parts).sum(0)  # type: ignore[arg-type]
            if wanted.numel() and torch.allclose(total, wanted, rtol=TOLERANCE):
                return f": it is not summed over {name.removesuffix(INNER)}"
        return ""

    def wrong_ranks(
        self, fqn: str, gradients: Sequence[Tensor | None], expected: Tensor
    ) -> Iterator[tuple[int, float, str]]:
        """Yield (rank, relative error, factor in words) of wrong gradients."""
        scale = float(expected.abs().max()) or 1.0  # of a parameter that nothing depends on
        for rank, own in enumerate(gradients):
            wanted = self.part(fqn, expected, rank)
            if own is None:  # nothing depends on the weight
                own = torch.zeros_like(wanted)
            if own.shape != wanted.shape:
                yield rank, math.inf, ": it has another shape"
            elif wanted.numel():
                error = float((own - wanted).abs().max()) / scale
                self.error = max(self.error, error)
                if not error <= TOLERANCE:
                    yield rank, error, factor_of(own, wanted)

    def differ(self, text: str) -> None:
        self.differences.append(text)


@dataclass
class Gradients:
    """The gradients of a stage by one kind of backward."""

    kind: str
    by_parameter: OfParameters  # of shards


def with_gradient_of_table(found: Sequence[Gradients]) -> list[Gradients]:
    """Return gradients with that of a tied table's copy in the last stage added to the table's."""
    copies = [gradients for gradients in found if COPY in gradients.by_parameter]
    with_sum = []
    for gradients in found:
        own = {fqn: each for fqn, each in gradients.by_parameter.items() if fqn != COPY}
        if TABLE not in own:
            with_sum.append(Gradients(gradients.kind, own))
            continue
        for copy in copies:
            total = list(map(added, own[TABLE], copy.by_parameter[COPY]))
            kind = f"{gradients.kind}, {copy.kind} of the copy"
            with_sum.append(Gradients(kind, {**own, TABLE: total}))
    return with_sum


def added(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def factor_of(own: Tensor, wanted: Tensor) -> str:
    """Return the factor between two tensors in words, "" if there is none."""
    factor = float((own * wanted).sum() / (wanted * wanted).sum())
    if not torch.allclose(own, factor * wanted, rtol=1e-6, atol=1e-9 * float(wanted.abs().max())):
        return ""
    inverse = round(1 / factor) if factor else 0
    name = f"1/{inverse}" if inverse > 1 and abs(factor * inverse - 1) < 1e-6 else f"{factor:.6g}"
    return f": it is {name} of what it should be"


def shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:36] + "..."


def plain_model(small: SmallRecipe) -> Transformer:
    """Return the model of one process in float64, with random weights."""
    generator = torch.Generator().manual_seed(1)
    model = Transformer(small.layout.model)
    model.init_buffers()
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            # A matmul's results deviate as its inputs do, however many it sums: rounding does not
            # grow with the width.
            scale = 1.2 * parameter.shape[-1] ** -0.5
            parameter.copy_(1 + value if parameter.dim() == 1 else scale * value)
        for router in routers_of(model).values():
            router.balance = flatten(small.config).get("experts.balance", router.balance)
            for buffer, scale in ((router.expert_bias, 0.1), (router.expert_share, 1.0)):
                drawn = torch.rand(buffer.shape, generator=generator, dtype=torch.float64)
                buffer.copy_(scale * drawn)
            router.balance_scale.fill_(random.Random(0).random())
    return model
