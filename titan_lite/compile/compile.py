"""Compile the parallelized model as one graph. Passes on the graph replace the hooks of FSDP.

    compile_model(model, config.compile, reshard_after_forward=True)      # in place, compiled at the first call
    loss_sum = compile_function(loss_sum, config.compile, "loss")         # without passes

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
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor.codecache import FxGraphCachePickler
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule
from torch.utils._triton import has_triton
from torch.utils.checkpoint import CheckpointPolicy

from titan_lite.compile.passes import pin_order as pinning
from titan_lite.compile.passes import resharding
from titan_lite.compile.replacing import replaced
from titan_lite.compile.schedule import Schedule
from titan_lite.config import Compile, ConfigError
from titan_lite.cost import collectives
from titan_lite.models.fqns import parameters_within

Compiling = Callable[
    [GraphModule, str], AbstractContextManager
]  # (graph, name) -> context that compiles it
# All stages of a pipeline call one function, and torch compiles at most 8 variants of it by
# default. Each stage has two, with and without gradients.
RECOMPILE_LIMIT = 256
FUSED_PRODUCTS = (
    "symm_mem.fused_all_gather_matmul.default",
    "symm_mem.fused_matmul_reduce_scatter.default",
)


class CompileError(RuntimeError):
    """A failed compilation. The message names the component, the reason and the keys to change."""


def check_backend(config: Compile, device_type: str) -> None:
    """Raise ConfigError if the recipe's backend cannot generate code on this machine."""
    if not config.enable or config.backend != "inductor":
        return
    instead = 'install it, or use compile.backend = "aot_eager"'
    if device_type == "cuda":
        if not has_triton():
            raise ConfigError(
                'compile.backend = "inductor" needs triton for this GPU, and there is none here;'
                f" {instead}"
            )
        compilers = [
            os.environ.get("CC"),
            "gcc",
            "clang",
        ]  # Triton compiles its launchers with the first one found
        if not any(shutil.which(compiler) for compiler in compilers if compiler):
            raise ConfigError(
                'compile.backend = "inductor" needs a C compiler for triton (gcc, clang, or CC);'
                f" {instead}"
            )
        header = Path(sysconfig.get_path("include")) / "Python.h"
        if not header.exists():
            package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
            raise ConfigError(
                f'compile.backend = "inductor": triton needs {header} ({package} on Debian);'
                f" {instead}"
            )
    else:
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise ConfigError(
                'compile.backend = "inductor" needs a C++ compiler for the CPU (g++, or CXX);'
                f" {instead}"
            ) from None


def compile_model(
    model: nn.Module,
    config: Compile,
    *,
    reshard_after_forward: bool,
    keep_gathered: Sequence[str] = (),
    memory_budget: float = 1.0,
    async_tensor_parallel: str = "",
    schedule: Schedule | None = None,
    priced_as: str = "",
) -> None:
    """Compile `model` as one graph, in place. FQNs do not change.

    A graph break raises CompileError.

    reshard_after_forward, keep_gathered: as in `apply_simple_fsdp` (distributed/simple_fsdp.py).
    memory_budget: share of the activations saved at 1.0 that may be saved; the partitioner
    recomputes the cheapest per byte.
    async_tensor_parallel: group in which Inductor splits collectives to overlap them with
    neighbouring matrix products (arXiv
    2410.06511, section 3.4). Raises CompileError if there are no such products.
    schedule: the passes, run when a graph is compiled at the first call: forward, then backward.
    priced_as: with aot_eager, for graphs that are priced and not run. "inductor" decomposes
    operators as Inductor does, "eager" saves for backward what autograd saves.
    """
    kept = parameters_within(model, keep_gathered) if reshard_after_forward else None  # None: all
    reshard = _Pass(resharding.read_again, keep_gathered=kept)
    compiling = (schedule or Schedule(config)).compiling
    if config.backend == "inductor":
        backend = _inductor(reshard, compiling, async_tensor_parallel)
    else:
        backend = _aot_eager(reshard, compiling, priced_as)

    # Stages of a pipeline share code. With static shapes, inputs of other sizes are compiled anew,
    # and not for any size.
    model.compile(backend=_with_backward(backend, memory_budget), fullgraph=True, dynamic=False)
    assert model._compiled_call_impl is not None
    model._compiled_call_impl = _with_errors(model._compiled_call_impl, config, "model")


class _Pass(CustomGraphPass):
    """Run a graph pass of Inductor, with a key for its cache: name, arguments and sources."""

    def __init__(self, run: Callable[..., Any], **arguments: Any):
        self.run, self.arguments = run, arguments

    def __call__(self, graph: Graph) -> None:
        self.run(graph, **self.arguments)

    def uuid(self) -> Any:
        call = f"{self.run.__name__} {self.arguments}".encode()
        return call + get_hash_for_files(
            (__file__, collectives.__file__, pinning.__file__, resharding.__file__)
        )


def _aot_eager(reshard: _Pass | None, compiling: Compiling, priced_as: str = "") -> Callable:
    def partition(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
        if reshard is not None:
            reshard(joint.graph)
        if priced_as == "eager":
            _save_as_autograd(joint.graph)
        with _nothing_is_random():
            return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def run_as_is(name: str, graph: GraphModule, inputs: Sequence[Any]) -> Callable:
        with compiling(graph, name):
            return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=functools.partial(run_as_is, "forward"),
        bw_compiler=functools.partial(run_as_is, "backward"),
        inference_compiler=functools.partial(run_as_is, "inference"),
        partition_fn=partition,
        decompositions=select_decomp_table() if priced_as == "inductor" else None,
    )


def _save_as_autograd(graph: Graph) -> None:
    """Let forward save all activations but those within checkpointed blocks, and compute nothing of
    backward.
    """
    forward = [node for node in graph.nodes if node.meta.get("partitioner_tag") == "is_forward"]
    plain = {node for node in forward if not node.meta.get("recompute")}
    for node in graph.nodes:
        is_read_outside = (
            node.meta.get("ac_graph_id", resharding.REGION) != resharding.REGION
            and plain & node.users.keys()
        )
        if node in plain or is_read_outside:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif node.op == "call_function" and node.meta.get("partitioner_tag") != "is_forward":
            node.meta["partitioner_tag"] = "must_be_in_backward"


def _inductor(
    reshard: _Pass | None, compiling: Compiling, async_tensor_parallel: str = ""
) -> Callable:
    # Inductor's own reordering would change the order of our passes.
    orders = ("reorder_for_peak_memory", "reorder_for_compute_comm_overlap", "reorder_for_locality")
    patches: dict[str, Any] = {
        "_pre_fusion_custom_pass": pinning.PinnedOrder(),
        **dict.fromkeys(orders, False),
    }
    if hasattr(inductor_config.aten_distributed_optimizations, "enable_simple_overlap"):
        # torch >= 2.14 moves collectives by default, after our passes
        patches["aten_distributed_optimizations.enable_simple_overlap"] = False
    if reshard is not None:
        patches["joint_custom_post_pass"] = reshard
    if async_tensor_parallel:
        enable_symm_mem_for_group(async_tensor_parallel)  # type: ignore[arg-type]
        patches |= {
            "_micro_pipeline_tp": True,
            "post_grad_custom_post_pass": _Pass(check_fused_products),
        }

    def compile_one(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Run the passes here, since graphs from Inductor's cache skip its own hooks for passes."""
        name = (
            "backward"
            if options.get("is_backward")
            else "inference"
            if options.get("is_inference")
            else "forward"
        )
        with compiling(graph, name), _meshes_in_keys():
            pinning.record_order(graph.graph)
            return compile_fx_inner(graph, inputs, **options)

    def backend(graph: GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        with _nothing_is_random():
            return compile_fx(graph, inputs, inner_compile=compile_one, config_patches=patches)

    return backend


def check_fused_products(graph: Graph) -> None:
    """Raise as expect_fused_products does, and restore the order that fusing changed."""
    expect_fused_products(graph)
    pinning.restore_order(graph)


def expect_fused_products(graph: Graph) -> int:
    """Return the number of matrix products that overlap with a neighbouring collective.

    Raises ConfigError if there are none.
    """
    fused = [
        node
        for node in graph.nodes
        if node.op == "call_function" and str(node.target) in FUSED_PRODUCTS
    ]
    if not fused:
        raise ConfigError(
            "parallelism.enable_async_tensor_parallel = true: Inductor found no collective beside a"
            " matrix product to overlap it with; use false"
        )
    return len(fused)


def _meshes_in_keys() -> AbstractContextManager:
    """Return a context in which the keys of Inductor's cache identify a mesh, an input of graphs
    with DTensors, by its ranks.

    torch 2.13 pickles it in a mode that depends on the identity of equal strings, so that no key
    matches another run's.
    """
    reduce: Any = FxGraphCachePickler._reduce_fake_script_object

    def reduced(self: FxGraphCachePickler, value: Any) -> Any:
        mesh = value.real_obj
        if not isinstance(mesh, DeviceMesh):
            return reduce(self, value)
        return str, (f"{mesh.device_type} {mesh.mesh_dim_names} {mesh.mesh.tolist()}",)

    return replaced(FxGraphCachePickler, "_reduce_fake_script_object", reduced)


def _nothing_is_random() -> AbstractContextManager:
    """Return a context in which the partitioner saves no random-number state for operators that it
    recomputes.

    Attention operators count as random because of dropout, which Llama does not use. torch 2.13
    confuses saved states with the meshes of DTensors, which it saves as well.
    """
    return replaced(partitioners, "has_recomputable_rng_ops", lambda graph: False)


def compile_function(function: Callable, config: Compile, component: str) -> Callable:
    """Return `function`, compiled to a graph per shape of its tensors or lists of them if the
    recipe compiles `component`.
    """
    if not config.compiles(component):
        return function
    # no passes: each collective is waited for at once
    backend = (_inductor if config.backend == "inductor" else _aot_eager)(
        None, lambda graph, name: nullcontext()
    )
    compiled = torch.compile(
        function, backend=_with_backward(backend), fullgraph=True, dynamic=False
    )
    return _with_errors(compiled, config, component)


def _with_backward(backend: Callable, memory_budget: float = 1.0) -> Callable:
    """Return a backend that also compiles backward at the first call.

    Otherwise an error of the compiler would come in the first backward, like an error of the run.
    """
    settings = {
        "activation_memory_budget": memory_budget,
        "force_non_lazy_backward_lowering": True,
        # Its key does not include our passes, and a hit would run none. Inductor's own cache comes
        # after them.
        "enable_autograd_cache": False,
    }
    if hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size"):  # torch >= 2.13
        settings["unsafe_treat_script_objects_as_zero_size"] = True  # the meshes of DTensors

    def compile_both(graph: GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        with functorch_config.patch(settings):
            return backend(graph, inputs)

    return compile_both


def _with_errors(compiled: Callable, config: Compile, component: str) -> Callable:
    """Return `compiled` with failures to compile raised as CompileError."""

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
                return compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            cause: BaseException = error
            while isinstance(cause, BackendCompilerFailed):
                cause = cause.inner_exception
            raise CompileError(_message(error, cause, config, component)) from error

    return call


def _message(error: Exception, cause: BaseException, config: Compile, component: str) -> str:
    if isinstance(cause, ConfigError):  # raised by a pass, with the key
        return str(cause)
    changes = []
    if (
        cause is not error and config.backend == "inductor"
    ):  # errors of tracing are the same for any backend
        changes.append('compile.backend = "aot_eager"')
    others = [f'"{other}"' for other in config.components if other != component]
    if others:
        changes.append(f"compile.components = [{', '.join(others)}]")
    why = next(filter(None, map(str.strip, str(cause).splitlines())), "") or type(cause).__name__
    return (
        f'compile.backend = "{config.backend}" cannot compile the {component} ({why}); '
        f"use {' or '.join([*changes, 'compile.enable = false'])}"
    )
