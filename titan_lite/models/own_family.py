"""Checks of a user's own family by blocks that are built and run without memory.

    check_own_family(shape_of(config.model))    # raises ConfigError

What a block does to shapes, and which operators it calls, shows on the meta device, before there is
a process group or a device. docs/contributing.md lists what is refused.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from titan_lite.config import ConfigError
from titan_lite.config.errors import shown
from titan_lite.config.families import ModelConfig
from titan_lite.models.transformer import Transformer

TOKENS = 8  # of the sequence that a block is run with


def check_own_family(config: ModelConfig) -> None:
    """Build a block of a user's own family on the meta device, and run it. Raises ConfigError if
    that fails, or if the block is none that can be trained.
    """
    subject = f"model.name = {shown(config.family)}: build_block"
    try:
        with torch.device("meta"):
            model = Transformer(replace(config, n_layers=1, max_seq_len=TOKENS))
            block = model.layers["0"]
            x = torch.empty(1, TOKENS, config.dim, requires_grad=True)
            y = _run(model.layers, x, model.rope_cos, model.rope_sin)
    except ConfigError:
        raise
    except DrawsNumbers as error:
        raise ConfigError(
            f"{subject}'s block draws random numbers: {error}; recomputation, the ranks of a layout"
            " and a resumed run would draw others, so leave it out: dropout and noise are not"
            " supported"
        ) from None
    except Exception as error:
        raise ConfigError(
            f"{subject} fails: {type(error).__name__}: {error}; it has to return a block as a"
            " torch.nn.Module for any shape, which is called as block(x, cos, sin, mask)"
        ) from error
    if not isinstance(y, Tensor) or y.shape != x.shape:
        found = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ConfigError(
            f"{subject}'s block returns {found} for x {tuple(x.shape)}; it has to return a tensor"
            " of that shape"
        )
    if buffers := [name for name, _ in block.named_buffers()]:
        raise ConfigError(
            f"{subject}'s block has the buffer {', '.join(buffers)}, which nothing fills or saves;"
            " compute it in forward, or make it a parameter"
        )
    for name, parameter in block.named_parameters():
        if not parameter.requires_grad:
            raise ConfigError(
                f"{subject}'s block has {name} without requires_grad; all parameters are trained"
            )
        if parameter.ndim != (1 if "norm" in name else 2):
            raise ConfigError(
                f"{subject}'s block has {name} of shape {tuple(parameter.shape)}; a parameter is a"
                ' vector that starts at 1, with "norm" in its name, or a matrix, without'
            )


def _run(layers: nn.ModuleDict, x: Tensor, cos: Tensor, sin: Tensor) -> object:
    """Run a block as training does, forward and backward, and as validation does. Return what it
    returns in training. Raises DrawsNumbers.
    """
    block = layers["0"]
    with refusing_random_numbers(layers):
        y = block.train()(x, cos, sin, None)
        if isinstance(y, Tensor) and y.requires_grad:
            y.sum().backward()
        with torch.no_grad():
            block.eval()(x, cos, sin, None)
    return y


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
    with _RefuseRandomNumbers(RunningModules(layers)):
        yield
    if random.getstate() != before:  # such as for layers that are left out
        raise DrawsNumbers("forward calls Python's random")


class _RefuseRandomNumbers(TorchDispatchMode):
    def __init__(self, running: RunningModules):
        super().__init__()
        self.running = running

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,  # noqa: ANN401 torch's
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 torch's
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(
            func, args, kwargs
        ):
            raise DrawsNumbers(f"{self.running.innermost} calls {func}")
        return func(*args, **kwargs)


def _drops_nothing(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True for a kernel of attention with dropout_p = 0, which draws nothing."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p")
            return not (argument.default_value if given is None else given)
    return False
