"""Checks of a user's own family by blocks that are built and run before anything starts.

    check_own_family(shape_of(config.model))    # raises ConfigError

What a block does to shapes, which operators it calls and which tensors these read and write shows
on the meta device, before there is a process group or a device. Whether its results depend on
anything else shows in numbers: blocks of the flavor debug are run on the CPU. docs/contributing.md
lists what is refused.
"""

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from titan_lite.config import ConfigError
from titan_lite.config.errors import shown
from titan_lite.config.families import ModelConfig, Shape, find_family, run_file
from titan_lite.logging import logger
from titan_lite.models.experts import experts_of, routers_of
from titan_lite.models.fqns import is_of_experts
from titan_lite.models.shapes import block_weights
from titan_lite.models.transformer import Transformer

TOKENS = 16  # of the sequence that a block is run with
RUN = 2  # blocks, which are alike; the second one shows what it takes from the first
MAX_WEIGHTS = 2**26  # of a block that is run on the CPU: 256 MiB, and as much for gradients
# of a result, relative to the largest number; products of experts are rounded by their sizes
TOLERANCE = 1e-5


def check_own_family(config: ModelConfig, *, masks_documents: bool = False) -> None:
    """Build the blocks of a user's own family on the meta device, and run them; run those of its
    flavor debug on the CPU. Raises ConfigError if that fails, or if they are none that can be
    trained.

    masks_documents: training.mask_documents, which gives blocks a mask.
    """
    subject = f"model.name = {shown(config.family)}: build_block"
    _check_defaults(config)
    with _one_line(subject), torch.device("meta"):
        model = Transformer(replace(config, max_seq_len=TOKENS))
    check_modules(model, subject)
    check_tensors(model, subject)
    check_attributes(model, subject)
    for number in list(model.layers)[RUN:]:
        del model.layers[number]
    with _one_line(subject), torch.device("meta"):
        _check_runs(model, subject)
    if masks_documents:
        with torch.device("meta"):
            _check_that_masks_are_read(model, subject)
    _check_numbers(config, subject)
    _check_defaults(config)  # which forward may have changed, too


def _check_defaults(config: ModelConfig) -> None:
    """Raise ConfigError for a default of torch that the file has changed, which is restored."""
    dtype = torch.get_default_dtype()
    if dtype != torch.float32:
        torch.set_default_dtype(torch.float32)
        raise ConfigError(
            f"model.name = {shown(config.family)}: the file sets torch's default dtype to"
            f" {_words(dtype)}, which is that of the process and not of the family; leave it out,"
            ' and use training.mixed_precision_param = "bfloat16" or training.dtype'
        )


@contextmanager
def _one_line(subject: str) -> Iterator[None]:
    """Return a context in which an error of a block is a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
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
            if isinstance(value, Tensor):
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
    if parameter.dtype != torch.float32:
        raise ConfigError(
            f"{subject}'s block has {fqn} in {_words(parameter.dtype)}; parameters are float32, and"
            " training.mixed_precision_param is what blocks compute in"
        )
    if _is_more_than_data(parameter):
        raise ConfigError(
            f"{subject}'s block has {fqn} with a hook, an attribute or a class of its own, which is"
            " lost where a rank's shard is in its place; compute in forward, such as by a"
            " torch.autograd.Function"
        )
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


def _is_more_than_data(parameter: nn.Parameter) -> bool:
    hooks = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return type(parameter) is not nn.Parameter or bool(vars(parameter)) or any(hooks)


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shapes_of(block: nn.Module) -> dict[str, Shape]:
    return {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}


# --- State ----------------------------------------------------------------------------------------


def check_attributes(model: Transformer, subject: str) -> None:
    """Raise ConfigError for blocks that differ in what their modules keep beside tensors."""
    first = _attributes(model.layers["0"])
    for number, block in model.layers.items():
        found = _attributes(block)
        for name in first | found:
            values = (first.get(name, "not there"), found.get(name, "not there"))
            pickled = [_pickled(value) for value in values]
            if pickled[0] != pickled[1] and None not in pickled:
                raise ConfigError(
                    f"{subject}'s blocks differ: layers.0.{name} is {_short(values[0])}, and"
                    f" layers.{number}.{name} is {_short(values[1])}; build_block is not given"
                    " a number, and a model that is built again, as generate does, would have"
                    " others; make all blocks alike"
                )


def _attributes(block: nn.Module) -> dict[str, object]:
    """Return what the modules of a block keep beside tensors and modules, and their classes."""
    values: dict[str, object] = {}
    for fqn, module in block.named_modules():
        prefix = f"{fqn}." if fqn else ""
        values[f"{prefix}__class__"] = f"{type(module).__module__}.{type(module).__qualname__}"
        for name, value in vars(module).items():
            if name not in OF_EVERY_MODULE:
                values[f"{prefix}{name}"] = value
    return values


OF_EVERY_MODULE = {*vars(nn.Module()), "fqn"}  # a Transformer sets the FQN of routers and experts


def _pickled(value: object) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:  # any code of the user's
        return None


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 60 else f"{text[:56]} ..."


def _state(block: nn.Module, number: str, family: str) -> dict[str, object]:
    """Return what forward may change beside tensors, by name: attributes of modules, and globals of
    the family's file.
    """
    values = {f"layers.{number}.{name}": value for name, value in _attributes(block).items()}
    for name, value in vars(run_file(family)).items():
        if not name.startswith("__"):
            values[f"the global {name}"] = value
    return {name: _pickled(value) or id(value) for name, value in values.items()}


def _generators() -> dict[str, object]:
    """Return the states of the process's generators of random numbers beside torch's."""
    return {
        "Python's random": random.getstate(),
        "numpy.random": pickle.dumps(np.random.get_state()),
    }


# --- Runs on the meta device ----------------------------------------------------------------------


def _check_runs(model: Transformer, subject: str) -> None:
    """Run each block as training does, forward and backward, twice, and as validation does.

    Raises ConfigError.
    """
    running = RunningModules(model.layers)
    reads = _Reads(model.layers)
    generators = _generators()
    earlier: dict[int, Tensor] = {}
    for number, block in model.layers.items():
        _refuse_other_parameters(block, number, subject)
        states = []
        for _ in range(2):
            registered = _registered(block, number)
            inputs = _inputs(model, torch.empty(1, TOKENS, model.config.dim))
            with _CheckedOperators(subject, running, inputs | registered, earlier) as operators:
                _train(block, inputs, subject)
            earlier |= operators.seen
            _check_registered(registered, _registered(block, number), subject)
            reads.check_data(subject)
            states.append(_state(block, number, model.config.family))
        # what the first forward sets and others keep is no state
        before, after = states
        if changed := [name for name in after if before.get(name) != after[name]]:
            raise ConfigError(
                f"{subject}'s block changes {changed[0]} in every forward; recomputation and the"
                " layout decide how often a forward runs, and no checkpoint has it; compute from"
                " the arguments of the block and its parameters alone"
            )
        _check_gradients(block, number, subject)
        operators = _CheckedOperators(subject, running, inputs | registered, earlier)
        with operators, torch.no_grad():
            block.eval()(*inputs.values(), None)
    for name, state in _generators().items():
        if state != generators[name]:  # such as for layers that are left out
            raise ConfigError(_draws(subject, f"forward calls {name}"))


def _inputs(model: Transformer, x: Tensor) -> dict[str, Tensor]:
    """Return the arguments of a block but its mask. x is no leaf, as in training."""
    x = x.requires_grad_().clone()
    x.retain_grad()
    return {"x": x, "cos": model.rope_cos, "sin": model.rope_sin}


def _train(block: nn.Module, inputs: dict[str, Tensor], subject: str) -> tuple[Tensor, Tensor]:
    """Run a block forward and backward. Return its result and the gradient of x.

    Raises ConfigError.
    """
    x = inputs["x"]
    block.zero_grad()
    y = block.train()(*inputs.values(), None)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        found = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ConfigError(
            f"{subject}'s block returns {found} for x {tuple(x.shape)}; it has to return a tensor"
            " of that shape"
        )
    y.backward(x.detach())
    return y.detach(), torch.zeros_like(x) if x.grad is None else x.grad


def _registered(block: nn.Module, number: str) -> dict[str, Tensor]:
    tensors = (*block.named_parameters(), *block.named_buffers())
    return {f"layers.{number}.{name}": tensor.detach() for name, tensor in tensors}


def _check_registered(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], subject: str
) -> None:
    """Raise ConfigError for parameters and buffers that a forward has made or replaced."""
    for name, tensor in after.items():
        if name not in before:
            raise ConfigError(
                f"{subject}'s block makes {name} in its first forward, which would not be saved;"
                " make it in __init__"
            )
        if _storage(tensor) != _storage(before[name]):
            raise _replaces_data(name, subject)


def _replaces_data(name: str, subject: str) -> ConfigError:
    return ConfigError(
        f"{subject}'s block replaces the data of {name} in forward, of which ranks have a shard;"
        " compute with a new tensor"
    )


def _check_gradients(block: nn.Module, number: str, subject: str) -> None:
    """Raise ConfigError for a parameter without a gradient."""
    for name, parameter in block.named_parameters():
        if parameter.grad is None:
            raise ConfigError(
                f"{subject}'s block computes no gradient of layers.{number}.{name}; all parameters"
                " are trained: use it in forward, without detach, or leave it out"
            )


def _refuse_other_parameters(block: nn.Module, number: str, subject: str) -> None:
    """Let modules of a block raise ConfigError if their forward begins with other parameters."""

    def refuse(fqn: str, own: dict[str, nn.Parameter], module: nn.Module, _inputs: object) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if own.get(name, parameter) is not parameter:
                raise ConfigError(
                    f"{subject}'s block calls {fqn} with another tensor as its {name}, such as by"
                    " torch.func.functional_call, and a rank computes with its own; call a"
                    " function such as torch.nn.functional.linear with that tensor"
                )

    for name, module in block.named_modules():
        fqn = f"layers.{number}.{name}".removesuffix(".")
        own = dict(module.named_parameters(recurse=False))
        module.register_forward_pre_hook(partial(refuse, fqn, own))


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


def replace_reads(module: nn.Module, names: Iterable[str], read: Callable[..., object]) -> None:
    """Let `module.NAME` be read(module, NAME), as the class of a sharded module does.

    Other ways to a parameter, such as `parameters()`, lead to it as before.
    """
    cls: Any = type(module)
    members: dict[str, Any] = {name: property(partial(read, name=name)) for name in names}
    module.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **members})


class _Reads:
    """Reads of the parameters of blocks as attributes of their modules, each a tensor of its own,
    as on a rank, which gathers the weight.

    An operator that is given a parameter itself has it from elsewhere.
    """

    def __init__(self, layers: nn.ModuleDict):
        self.made: list[tuple[str, nn.Parameter, Tensor]] = []
        for fqn, module in layers.named_modules():
            names = [name for name, value in module._parameters.items() if value is not None]
            if names:
                replace_reads(module, names, partial(self._read, f"layers.{fqn}"))

    def _read(self, fqn: str, module: nn.Module, name: str) -> Tensor:
        parameter = module._parameters[name]
        assert parameter is not None
        with _disable_current_modes():
            tensor = parameter.view_as(parameter)
        self.made.append((f"{fqn}.{name}", parameter, tensor))
        return tensor

    def check_data(self, subject: str) -> None:
        """Raise ConfigError for a read whose data has been replaced. Forget all reads."""
        for name, parameter, tensor in self.made:
            if _storage(tensor) != _storage(parameter):
                raise _replaces_data(name, subject)
        self.made.clear()


class _Watched(TorchDispatchMode):
    """A context that calls a function with each operator and its arguments, before it runs."""

    def __init__(self, see: Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any]], None]):
        super().__init__()
        self.see = see
        self.seen: dict[int, Tensor] = {}  # arguments and results by storage, which stay in memory

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,  # noqa: ANN401 torch's
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 torch's
        kwargs = kwargs or {}
        self.see(func, args, kwargs)
        result = func(*args, **kwargs)
        for tensor in _tensors((args, kwargs, result)):
            self.seen[_storage(tensor)] = tensor
        return result


class _CheckedOperators(_Watched):
    """A context in which operators raise ConfigError that draw random numbers, write into tensors
    of `own`, read others than these that an earlier context has seen, or a parameter that is no
    attribute's.
    """

    def __init__(
        self,
        subject: str,
        running: "RunningModules",
        own: Mapping[str, Tensor],
        earlier: Mapping[int, Tensor],
    ):
        super().__init__(self.check)
        self.subject = subject
        self.running = running
        self.earlier = earlier
        self.own = {_storage(tensor): name for name, tensor in own.items()}

    def check(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        call = f"{self.running.innermost} calls {func}"
        arguments = list(_arguments(func, args, kwargs))
        # a kernel of attention with dropout_p = 0 draws nothing
        draws = all(value for argument, value in arguments if argument.name == "dropout_p")
        if torch.Tag.nondeterministic_seeded in func.tags and draws:
            raise ConfigError(_draws(self.subject, call))
        for argument, value in arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                name = self.own.get(_storage(tensor))
                if name and writes:
                    raise ConfigError(
                        f"{self.subject}'s block changes {name} in place: {call}; recomputation"
                        " would begin with what is changed, and a rank changes a copy of its"
                        " parameters; use an operator that returns a new tensor"
                    )
                if name and isinstance(tensor, nn.Parameter):
                    raise ConfigError(
                        f"{self.subject}'s block reads {name} in another way than as an attribute"
                        f" of its module: {call}; parameters(), state_dict() and what __init__"
                        " keeps in a list lead to the shard of a rank, where the attribute is the"
                        " gathered weight; read the attribute, such as self.gate.weight"
                    )
                if not name and _storage(tensor) in self.earlier:
                    raise ConfigError(
                        f"{self.subject}'s block reads a tensor that is none of its arguments and"
                        f" parameters, and not of this forward alone: {call} with one of shape"
                        f" {tuple(tensor.shape)}; what a list, a dict, a cache or another block"
                        " keeps is not moved, sharded, trained or traced with the block; register"
                        " modules (torch.nn.ModuleList), and compute tensors in every forward"
                    )


def _arguments(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch.Argument, Any]]:
    """Yield the arguments of an operator's schema with what it is called with."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        yield argument, argument.default_value if value is None else value


def _tensors(values: object) -> Iterable[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> int:
    """Return what views of a tensor share: on the meta device no storage has an address."""
    return tensor.untyped_storage()._cdata


def _draws(subject: str, call: str) -> str:
    return (
        f"{subject}'s block draws random numbers: {call}; recomputation, the ranks of a layout and"
        " a resumed run would draw others, so leave it out: dropout and noise are not supported"
    )


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


# --- Numbers --------------------------------------------------------------------------------------


def small_shape(config: ModelConfig) -> ModelConfig | None:
    """Return a shape of a family with two blocks and TOKENS tokens that any CPU computes: its
    flavor debug, or `config` where there is none. None: blocks are too large.
    """
    shape = replace(
        find_family(config.family).flavors.get("debug", config),
        family=config.family,
        n_layers=RUN,
        max_seq_len=TOKENS,
        vocab_size=TOKENS,
    )
    weights = block_weights(shape)
    return shape if weights.dense + weights.experts <= MAX_WEIGHTS else None


def _check_numbers(config: ModelConfig, subject: str) -> None:
    """Run blocks of the flavor debug on the CPU. Raises ConfigError unless the result of a sequence
    depends on this sequence alone.
    """
    shape = small_shape(config)
    if shape is None:
        logger.warning(
            f"{subject}'s blocks have not been run with numbers, since its Family has no small"
            " flavor debug: that sequences of a batch do not mix is not verified"
        )
        return
    with _one_line(f"{subject} of flavor debug"), torch.device("cpu"):
        model = Transformer(shape)
        # what a run of this process counts has other routers and experts
        for router in routers_of(model).values():
            router.fqn = ""
        for experts in experts_of(model).values():
            experts.fqn = ""
        model.init_weights(0)
        model.layers["1"].load_state_dict(model.layers["0"].state_dict())
        generator = torch.Generator().manual_seed(0)
        first, second, other = torch.randn(3, TOKENS, shape.dim, generator=generator)
        later = torch.cat((first[:-1], other[-1:]))  # another last token
        batches = ((first, second), (first, second), (first, 3 * other), (later, second))
        of_blocks = []
        for number, block in model.layers.items():
            found = [_train(block, _inputs(model, torch.stack(each)), subject) for each in batches]
            # of the first sequence: the result and the gradient
            of_first = [torch.stack((y[0], gradient[0])) for y, gradient in found]
            once, again, in_other_batch = of_first[:3]
            if not _are_equal(once, again):
                raise ConfigError(
                    f"{subject}'s block layers.{number} computes other numbers from equal ones: it"
                    " draws random numbers that are not torch's, counts its calls or reads a"
                    " clock; recomputation, the ranks of a layout and a resumed run would have"
                    " others, so compute from its arguments and parameters alone"
                )
            if not _are_equal(once, in_other_batch):
                raise ConfigError(
                    f"{subject}'s block layers.{number} mixes the sequences of a batch, which are"
                    " dimension 0 of x: results would depend on training.local_batch_size and the"
                    " number of ranks; compute each sequence by itself, as norms over the last"
                    " dimension do and BatchNorm does not"
                )
            before_last = [y[0, :-1] for y, _ in found]
            if not _are_equal(before_last[0], before_last[3]):
                raise ConfigError(
                    f"{subject}'s block layers.{number} computes a token from later ones, which a"
                    " model that is trained to predict them must not see; compute it from itself"
                    " and those before it, as self.attend does"
                )
            of_blocks.append(once)
        if not _are_equal(*of_blocks):
            raise ConfigError(
                f"{subject}'s blocks differ: from equal parameters and inputs layers.0 and layers.1"
                " compute other numbers; a compiled run traces one for all, so make them alike"
            )


def _are_equal(a: Tensor, b: Tensor) -> bool:
    within = TOLERANCE * float(a.abs().max())
    return torch.allclose(a, b, rtol=0, atol=within, equal_nan=True)
