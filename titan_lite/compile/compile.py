"""Compile the parallelized model as one graph. Passes on the graph replace the hooks of FSDP.

    schedule = Schedule(PassSettings(config.compile, machine))
    compile_model(model, schedule, reshard_after_forward=True)      # in place, at the first call
    loss_sum = compile_function(loss_sum, config.compile, "loss")   # without passes

Both backends run the same passes. Settings of the compiler apply to one compilation only. Code that
cannot be compiled raises CompileError, which names the keys to change.
"""

import functools
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.fx import GraphModule
from torch.utils._triton import has_triton

from titan_lite.compile.backends import (
    CachedPass,
    aot_eager_backend,
    compiled_at_first_call,
    inductor_backend,
)
from titan_lite.compile.passes.resharding import reshard_after_forward as reshard_graph
from titan_lite.compile.report import Compilation
from titan_lite.compile.schedule import Schedule
from titan_lite.config import Compile, ConfigError
from titan_lite.models.fqns import parameters_within

P = ParamSpec("P")
R = TypeVar("R")

# All stages of a pipeline call one function, and torch compiles at most 8 variants of it by
# default. Each stage has two, with and without gradients.
RECOMPILE_LIMIT = 256


class CompileError(RuntimeError):
    """A failed compilation. The message names the component, the reason and the keys to change."""


def compile_model(
    model: nn.Module,
    schedule: Schedule,
    *,
    reshard_after_forward: bool,
    keep_gathered: Sequence[str] = (),
    memory_budget: float = 1.0,
    async_tensor_parallel_group: str = "",
) -> None:
    """Compile `model` as one graph, in place. FQNs do not change.

    A graph break raises CompileError.

    schedule: the passes, run when a graph is compiled at the first call: forward, then backward.
    reshard_after_forward, keep_gathered: as in `apply_simple_fsdp` (distributed/simple_fsdp.py).
    memory_budget: share of the activations saved at 1.0 that may be saved; the partitioner
    recomputes the cheapest per byte.
    async_tensor_parallel_group: in which Inductor splits collectives to overlap them with
    neighbouring matrix products (arXiv 2410.06511, section 3.4). Raises CompileError if there are
    no such products.
    """
    config = schedule.settings.config
    kept = parameters_within(model, keep_gathered) if reshard_after_forward else None  # None: all
    reshard = CachedPass(reshard_graph, keep_gathered=kept)
    if config.backend == "inductor":
        backend = inductor_backend(schedule.compiling, reshard, async_tensor_parallel_group)
    else:
        backend = aot_eager_backend(schedule.compiling, reshard, schedule.priced_as)

    # Stages of a pipeline share code. With static shapes, inputs of other sizes are compiled anew,
    # and not for any size.
    model.compile(
        backend=compiled_at_first_call(backend, memory_budget), fullgraph=True, dynamic=False
    )
    compiled_call = model._compiled_call_impl
    assert compiled_call is not None
    model._compiled_call_impl = with_compile_errors(compiled_call, config, "model")


def compile_function(function: Callable[P, R], config: Compile, component: str) -> Callable[P, R]:
    """Return `function`, compiled if the recipe compiles `component`.

    It has a graph per shape of its tensors or lists of them. No passes run: each collective is
    waited for at once.
    """
    if not config.compiles(component):
        return function
    make_backend = inductor_backend if config.backend == "inductor" else aot_eager_backend
    backend = compiled_at_first_call(make_backend(without_passes))
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    return with_compile_errors(compiled, config, component)


def without_passes(graph: GraphModule, name: str) -> AbstractContextManager[Compilation]:
    """Return the context in which a function's graph is compiled."""
    return nullcontext(Compilation())


def with_compile_errors(
    compiled: Callable[P, R], config: Compile, component: str
) -> Callable[P, R]:
    """Return `compiled` with failures to compile raised as CompileError."""

    @functools.wraps(compiled)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
                return compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            raise CompileError(explain(error, config, component)) from error

    return call


def explain(error: BaseException, config: Compile, component: str) -> str:
    """Return one line: the component, the reason and the keys to change."""
    cause = error
    while isinstance(cause, BackendCompilerFailed):
        cause = cause.inner_exception
    if isinstance(cause, ConfigError):  # raised by a pass, with the key
        return str(cause)

    changes = []
    failed_in_backend = cause is not error  # errors of tracing are the same for any backend
    if failed_in_backend and config.backend == "inductor":
        changes.append('compile.backend = "aot_eager"')
    others = [f'"{other}"' for other in config.components if other != component]
    if others:
        changes.append(f"compile.components = [{', '.join(others)}]")
    changes.append("compile.enable = false")

    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    reason = lines[0] if lines else type(cause).__name__
    return (
        f'compile.backend = "{config.backend}" cannot compile the {component} ({reason}); '
        f"use {' or '.join(changes)}"
    )


# Compilers of this machine


def check_backend(config: Compile, device_type: str) -> None:
    """Raise ConfigError if the recipe's backend cannot generate code on this machine."""
    if not config.enable or config.backend != "inductor":
        return
    lacking = triton_lacks() if device_type == "cuda" else cpu_lacks()
    if lacking:
        raise ConfigError(
            f'compile.backend = "inductor"{lacking}; install it, or use compile.backend ='
            ' "aot_eager"'
        )


def triton_lacks() -> str:
    """Return what Triton lacks to make kernels for this GPU, or ""."""
    if not has_triton():
        return " needs triton for this GPU, and there is none here"
    # Triton compiles its launchers with the first one found
    compilers = [os.environ.get("CC"), "gcc", "clang"]
    if not any(shutil.which(compiler) for compiler in compilers if compiler):
        return " needs a C compiler for triton (gcc, clang, or CC)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        return f": triton needs {header} ({package} on Debian)"
    return ""


def cpu_lacks() -> str:
    """Return what Inductor lacks to make kernels for this CPU, or ""."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return " needs a C++ compiler for the CPU (g++, or CXX)"
    return ""
