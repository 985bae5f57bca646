"""Compare the graphs of a recipe at its real sizes with those of the small one that is evaluated.

    for what in differences(traced_small, traced_real, config): ...     # of rank 0, in words

They have the same collectives of activations in the same order, and the same ones of parameters,
over the same groups; as many matrix products and attentions of each kind; and no operator that the
others lack. What is saved for backward, and what is computed there, depends on sizes. Parameters
travel and are summed in the dtypes of the recipe: a reduction in bfloat16 that should be in float32
shows here.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from titan_lite.config import Config
from titan_lite.distributed.layout import Layout
from titan_lite.graph import (
    activation_collectives,
    is_all_gather,
    parameter_collectives,
    parameters_of,
)
from titan_lite.tools.verify.small import SmallRecipe, loss_chunk
from titan_lite.tools.verify.trace_ranks import TracedStage

# Words in the names of operators that the partitioner never recomputes in backward.
COUNTED = ("mm", "attention")
# Words in the names of operators whose number depends on sizes and strides.
COPIES_AND_VIEWS = ("_to_copy", "clone", "view", "reshape", "alias", "detach", "expand", "squeeze")


def real_sizes(small: SmallRecipe, config: Config, real: Layout) -> SmallRecipe:
    """Return the stages of a small recipe at the sizes and in the dtypes of the recipe."""
    own = config.training
    model = dataclasses.replace(real.model, n_layers=small.layout.model.n_layers)
    batch = real.microbatch_size
    training = small.config.training.replace(
        seq_len=own.seq_len,
        local_batch_size=batch,
        loss_chunk_tokens=loss_chunk(real, real.seq_len, batch),
    )
    large = small.config.replace(training=training)
    layout = Layout.from_config(large, small.layout.world_size, model)
    layout = dataclasses.replace(layout, gathers_once=False)
    return dataclasses.replace(small, config=large, layout=layout)


def differences(small: TracedStage, real: TracedStage, config: Config) -> Iterator[str]:
    """Yield how the real graphs of a rank differ from the small ones, in words."""
    counts, expected = (operators_in(stage) for stage in (real, small))
    for operator in sorted(counts.keys() | expected.keys()):
        own, wanted = counts[operator], expected[operator]
        if own != wanted and any(word in operator for word in COUNTED):
            yield (
                f"{operator} is in the graphs at its real sizes {own} times, and {wanted} times in"
                " what was evaluated"
            )
        elif not own or not wanted:
            where = "its real sizes" if own else "small sizes"
            yield f"the operator {operator} is in the graphs at {where} alone"
    for name, module in real.graphs.items():
        yield from _other_order(name, small.graphs[name].graph, module.graph)
        yield from other_dtypes(name, module.graph, config)


def not_alike(small: TracedStage, real: TracedStage) -> Iterator[str]:
    """Yield the parameters whose shards are even at one size and uneven at the other."""
    for fqn, is_even in real.is_even.items():
        if is_even != small.is_even[fqn]:
            yield f"{'even' if is_even else 'uneven'} shards of {fqn}"


def operators_in(stage: TracedStage) -> Counter[str]:
    """Return how often each operator is in a stage's graphs, but for casts and views."""
    return Counter(
        str(node.target)
        for module in stage.graphs.values()
        for node in module.graph.nodes
        if node.op == "call_function"
        and not any(word in str(node.target) for word in COPIES_AND_VIEWS)
    )


def _other_order(name: str, small: Graph, real: Graph) -> Iterator[str]:
    """Yield the first collective that is another one."""
    own, wanted = collectives_of(real), collectives_of(small)
    for of_real, of_small in zip(own, wanted, strict=False):
        if described(of_real) != described(of_small):
            yield (
                f"at its real sizes {name} has {of_real} ({' '.join(described(of_real))}), where"
                f" what was evaluated has {of_small} ({' '.join(described(of_small))})"
            )
            return
    if len(own) != len(wanted):
        yield f"at its real sizes {name} has {len(own)} collectives, not {len(wanted)}"


def collectives_of(graph: Graph) -> list[Node]:
    """Return the collectives of activations in order, then those of parameters by their names: a
    reduction starts when its gradient is computed, which sizes decide.
    """
    return [*activation_collectives(graph), *sorted(parameter_collectives(graph), key=described)]


def described(node: Node) -> list[str]:
    """Return an operator with its group and its parameters."""
    words = [arg for arg in node.args if isinstance(arg, str)]
    return [str(node.target), *words, *parameters_of(node)]


def other_dtypes(name: str, graph: Graph, config: Config) -> Iterator[str]:
    """Yield collectives of parameters in another dtype than the recipe's."""
    training = config.training
    for node in parameter_collectives(graph):
        gathers = is_all_gather(node)
        key = "mixed_precision_param" if gathers else "mixed_precision_reduce"
        wanted = getattr(torch, getattr(training, key))
        found = node.meta["val"].dtype
        if found != wanted:
            yield (
                f"{name}:{node} of {', '.join(parameters_of(node))} is in {found}, and"
                f" training.{key} is {wanted}"
            )
