"""Compile the parallelized model. Passes on its graphs replace the hooks of FSDP.

    graph_passes = GraphPasses(PassSettings(config.compile, machine), choose_passes(config))
    compiled = compile_model(traceable, graph_passes)                   # at its first call

    model -> joint.py, model_parts.py: a block of each kind, traced -> model_graph.py: forward and
    backward of the model -> graph_passes.py -> backends.py: kernels -> compiled_model.py

Both backends run the same passes. Code that cannot be compiled raises CompileError, which names the
keys to change.
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch._inductor import config as inductor_config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.cpu_vec_isa import x86_isa_checker
from torch._inductor.exc import InvalidCxxCompiler
from torch.utils._triton import has_triton

from titan_lite.compile.backends import aot_eager_backend, inductor_backend
from titan_lite.compile.compiled_model import CompiledModel
from titan_lite.compile.graph_passes import GraphPasses
from titan_lite.compile.joint import SplitBackward, TraceSettings
from titan_lite.compile.model_parts import TraceableModel
from titan_lite.config import Compile, ConfigError


def compile_model(
    traceable: TraceableModel,
    graph_passes: GraphPasses,
    *,
    memory_budget: float = 1.0,
    full_backward: bool = True,
    split_backward: SplitBackward | None = None,
    inductor_settings: Mapping[str, object] = MappingProxyType({}),
) -> CompiledModel:
    """Return what runs a model by compiled graphs. The model does not change.

    Graphs are made at the first call with arguments of new shapes; what cannot be traced raises
    CompileError then.

    graph_passes: run on forward, then on backward. memory_budget: share of the activations saved at
    1.0 that may be saved; the partitioner recomputes the cheapest per byte. full_backward: backward
    can run at once. split_backward: makes its halves, if it can run in halves
    (CompiledModel.first_halves). inductor_settings: beside Inductor's own.
    """
    config = graph_passes.settings.config
    is_inductor = config.backend == "inductor"
    if is_inductor:
        trust_vector_instructions()
    settings = TraceSettings(
        decomposes=graph_passes.decomposes,
        rewrites=is_inductor,
        keep_gathered=traceable.weights.kept,
        memory_budget=memory_budget,
        full_backward=full_backward,
        split_backward=split_backward,
        tag_joint=graph_passes.tag_joint,
    )
    if is_inductor:
        backend = inductor_backend(graph_passes, inductor_settings)
    else:
        backend = aot_eager_backend(graph_passes)
    return CompiledModel(traceable, config, settings, backend)


# Compilers of this machine


def trust_vector_instructions() -> None:
    """Let Inductor take the CPU's widest vector instructions without a trial, as torch does.

    With an empty cache, Inductor compiles torch's vector headers for each kind of instructions that
    the CPU has (AVX-512 VNNI, AVX-512, AVX2: 2 to 3 s for each), and uses the first one alone. At
    every start it loads the results in other processes. The trials find a torch whose own kernels
    lack a kind; torch knows its kind. TORCHINDUCTOR_VEC_ISA_OK, if set, decides.
    """
    flags = x86_isa_checker()
    widest = ""
    if "avx512" in flags:
        widest = "AVX512"
    elif "avx2" in flags:
        widest = "AVX2"
    trusted = torch.backends.cpu.get_cpu_capability() == widest
    if trusted and inductor_config.cpp.vec_isa_ok is None:
        inductor_config.cpp.vec_isa_ok = True


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
