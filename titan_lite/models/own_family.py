"""Checks of a user's own family by blocks that are built and run without memory.

    check_own_family(shape_of(config.model))    # raises ConfigError

What a block does to shapes, and which operators it calls, shows on the meta device, before there is
a process group or a device. docs/contributing.md lists what is refused.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from titan_lite.config import ConfigError
from titan_lite.config.errors import shown
from titan_lite.config.families import ModelConfig, Shape
from titan_lite.models.experts import routers_of
from titan_lite.models.fqns import is_of_experts
from titan_lite.models.transformer import Transformer

TOKENS = 16  # of the sequence that a block is run with


def check_own_family(config: ModelConfig, *, masks_documents: bool = False) -> None:
    """Build the blocks of a user's own family on the meta device, and run them. Raises ConfigError
    if that fails, or if they are none that can be trained.

    masks_documents: training.mask_documents, which gives blocks a mask.
    """
    subject = f"model.name = {shown(config.family)}: build_block"
    with _one_line(subject), torch.device("meta"):
        model = Transformer(replace(config, max_seq_len=TOKENS))
    check_modules(model, subject)
    check_tensors(model, subject)
    names = _names_of_tensors(model.layers)
    with _one_line(subject), torch.device("meta"), refusing_random_numbers(model.layers):
        for number in model.layers:
            _run(model, number, subject)
    if masks_documents:
        with torch.device("meta"):
            _check_that_masks_are_read(model, subject)
    if new := [name for name in _names_of_tensors(model.layers) if name not in names]:
        raise ConfigError(
            f"{subject}'s block makes {new[0]} in its first forward, which would not be saved; make"
            " it in __init__"
        )


@contextmanager
def _one_line(subject: str) -> Iterator[None]:
    """Return a context in which an error of a block is a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except DrawsNumbers as error:
        raise ConfigError(
            f"{subject}'s block draws random numbers: {error}; recomputation, the ranks of a layout"
            " and a resumed run would draw others, so leave it out: dropout and noise are not"
            " supported"
        ) from None
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{subject} fails: {type(error).__name__}: {reason}; it has to return a block as a"
            " torch.nn.Module for any shape, which is called as block(x, cos, sin, mask)"
        ) from error


def check_modules(model: Transformer, subject: str) -> None:
    """Raise ConfigError for a module whose forward or tensors a run would not find."""
    for fqn, module in model.layers.named_modules():
        name = f"layers.{fqn}"
        if "forward" in vars(module):
            raise ConfigError(
                f"{subject}'s block has {name} with a forward of its own beside that of its class,"
                " which runs replace (activation checkpointing, tensor parallelism, float8); make"
                " it the forward of a class"
            )
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ConfigError(
                    f"{subject}'s block has the tensor {name}.{attribute}, which nothing fills or"
                    " saves; compute it in forward, or make it a parameter"
                )


def check_tensors(model: Transformer, subject: str) -> None:
    """Raise ConfigError for a buffer of a module that is no router, and for a parameter of another
    form, of some blocks alone or of several.
    """
    of_routers = {
        f"{fqn}.{name}"
        for fqn, router in routers_of(model.layers).items()
        for name, _ in router.named_buffers()
    }
    buffers = [name for name, _ in model.layers.named_buffers() if name not in of_routers]
    if buffers:
        raise ConfigError(
            f"{subject}'s block has the buffer layers.{buffers[0]}, which nothing fills or saves;"
            " compute it in forward, or make it a parameter"
        )
    _check_experts(model, subject)
    first = _shapes_of(model.layers["0"])
    owners: dict[nn.Parameter, str] = {}
    for number, block in model.layers.items():
        for name, parameter in block.named_parameters(remove_duplicate=False):
            fqn = f"layers.{number}.{name}"
            owner = owners.setdefault(parameter, fqn)
            if owner.split(".")[1] != number:
                raise ConfigError(
                    f"{subject}'s blocks share {fqn} with {owner}, and a pipeline stage would have"
                    " a copy of its own; make a module for each block"
                )
            check_parameter(parameter, fqn, subject)
        shapes = _shapes_of(block)
        if differing := [name for name in first | shapes if first.get(name) != shapes.get(name)]:
            name = differing[0]
            raise ConfigError(
                f"{subject}'s blocks differ: layers.0.{name} is {first.get(name, 'not there')}, and"
                f" layers.{number}.{name} is {shapes.get(name, 'not there')}; make all blocks alike"
            )


def _check_experts(model: Transformer, subject: str) -> None:
    """Raise ConfigError for two routers of a block, and for a parameter with three dimensions that
    is not of the experts.
    """
    count = model.config.n_experts
    for number, block in model.layers.items():
        routers = [f"layers.{number}.{name}" for name in routers_of(block)]
        if len(routers) > 1:
            raise ConfigError(
                f"{subject}'s block has the routers {' and '.join(routers)}, of which one alone"
                " would be balanced; leave the others out"
            )
        for name, parameter in block.named_parameters():
            if is_of_experts(parameter.shape) and (not count or parameter.shape[0] != count):
                raise ConfigError(
                    f"{subject}'s block has layers.{number}.{name} of shape"
                    f" {tuple(parameter.shape)}; three dimensions are for a matrix of each expert,"
                    f" and n_experts is {count}"
                )


def check_parameter(parameter: nn.Parameter, fqn: str, subject: str) -> None:
    """Raise ConfigError for a parameter that is not trained as it should be."""
    if not parameter.requires_grad:
        raise ConfigError(
            f"{subject}'s block has {fqn} without requires_grad; all parameters are trained"
        )
    if parameter.ndim not in ((1,) if "norm" in fqn else (2, 3)):
        raise ConfigError(
            f"{subject}'s block has {fqn} of shape {tuple(parameter.shape)}; a parameter is a"
            ' vector that starts at 1, with "norm" in its name, or without a matrix, or one for'
            " each expert"
        )
    if fqn.endswith(".bias"):
        raise ConfigError(
            f"{subject}'s block has {fqn}, which would start at 1 as norms do; use bias=False"
        )


def _shapes_of(block: nn.Module) -> dict[str, Shape]:
    return {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}


def _names_of_tensors(layers: nn.ModuleDict) -> list[str]:
    return [f"layers.{name}" for name, _ in (*layers.named_parameters(), *layers.named_buffers())]


def _run(model: Transformer, number: str, subject: str) -> None:
    """Run a block as training does, forward and backward, and as validation does.

    Raises ConfigError, and DrawsNumbers.
    """
    block = model.layers[number]
    x = torch.empty(1, TOKENS, model.config.dim, requires_grad=True)
    y = block.train()(x, model.rope_cos, model.rope_sin, None)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        found = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ConfigError(
            f"{subject}'s block returns {found} for x {tuple(x.shape)}; it has to return a tensor"
            " of that shape"
        )
    y.sum().backward()
    with torch.no_grad():
        block.eval()(x, model.rope_cos, model.rope_sin, None)


def _check_that_masks_are_read(model: Transformer, subject: str) -> None:
    """Raise ConfigError for a block whose operators do not read its mask."""
    x = torch.empty(1, TOKENS, model.config.dim)
    mask = torch.empty(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    for number, block in model.layers.items():
        readers: list[OpOverload] = []

        def note_reader(func: OpOverload, *arguments: object) -> None:
            if any(leaf is mask for leaf in pytree.tree_leaves(arguments)):
                readers.append(func)  # noqa: B023 - called within this turn alone

        with torch.no_grad(), _Watched(note_reader):
            block(x, model.rope_cos, model.rope_sin, mask)
        if not readers:
            raise ConfigError(
                f"{subject}'s block layers.{number} does not read its argument mask, by which"
                " training.mask_documents = true keeps attention within documents; give it to"
                " self.attend, or use training.mask_documents = false"
            )


class _Watched(TorchDispatchMode):
    """A context that calls a function with each operator and its arguments, before it runs."""

    def __init__(self, see: Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any]], None]):
        super().__init__()
        self.see = see

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,  # noqa: ANN401 torch's
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 torch's
        kwargs = kwargs or {}
        self.see(func, args, kwargs)
        return func(*args, **kwargs)


# --- Random numbers -------------------------------------------------------------------------------


class DrawsNumbers(Exception):
    """A module draws random numbers. Its text names both."""


class RunningModules:
    """The modules within blocks whose forward runs, the innermost last.

    Make it once for a model's `layers`: it adds hooks to their modules.
    """

    def __init__(self, layers: nn.ModuleDict):
        self.names: list[str] = []
        for name, module in layers.named_modules():
            module.register_forward_pre_hook(self._entering(f"layers.{name}"))
            module.register_forward_hook(self._leave)

    @property
    def innermost(self) -> str:
        """Its FQN, or the word for what runs else."""
        return self.names[-1] if self.names else "backward"

    def _entering(self, name: str) -> Any:  # noqa: ANN401 torch's hook
        def enter(_module: nn.Module, _inputs: object) -> None:
            self.names.append(name)

        return enter

    def _leave(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        self.names.pop()


@contextmanager
def refusing_random_numbers(layers: nn.ModuleDict) -> Iterator[None]:
    """Return a context in which blocks that draw random numbers raise DrawsNumbers."""
    before = random.getstate()
    running = RunningModules(layers)

    def refuse(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws and not _drops_nothing(func, args, kwargs):
            raise DrawsNumbers(f"{running.innermost} calls {func}")

    with _Watched(refuse):
        yield
    if random.getstate() != before:  # such as for layers that are left out
        raise DrawsNumbers("forward calls Python's random")


def _drops_nothing(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True for a kernel of attention with dropout_p = 0, which draws nothing."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p")
            return not (argument.default_value if given is None else given)
    return False
