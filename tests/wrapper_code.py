"""Inductor's wrapper code, read without running it: what it launches, and what it allocates.

    replay = Replay(source, kernels)
    replay.launches     # [("triton", "triton_poi_fused_add_3"), ("matmul", "mm"), ...]
    replay.allocated    # bytes of each buffer

The statements of `call` are followed one by one. A statement that is not understood is an error.
"""

import ast
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

MATMULS = ("mm", "bmm", "addmm")
# What neither launches a kernel nor makes a buffer.
SILENT = (
    "assert_size_stride",
    "assert_alignment",
    "torch.cuda.set_device",
    "torch._C._cuda_setDevice",
    "args.clear",
    "get_raw_stream",
    "reinterpret_tensor",
    "copy_if_misaligned",
)
SILENT += ("assert_size_stride_grouped", "assert_tensor_metadata")  # of torch 2.14


class Replay:
    """source: the module that Inductor writes.

    kernels: for each buffer, the FX nodes of the operator that makes it.
    """

    def __init__(self, source: str, kernels: Mapping[str, Sequence[str]]):
        self.kernels = {buffer: iter(names) for buffer, names in kernels.items()}
        self.launches: list[tuple[str, str]] = []
        self.allocated: list[int] = []  # those that the code allocates, and no operator
        self.buffers: set[str] = set()  # results of operators
        module = ast.parse(source)
        self.triton = set(triton_kernels(module))
        (call,) = (
            node
            for node in ast.walk(module)
            if isinstance(node, ast.FunctionDef) and node.name == "call"
        )
        self._run(call.body)

    def _run(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.With(body=body):
                    self._run(body)
                case ast.Delete() | ast.Return():
                    pass
                case ast.Assign(targets=[ast.Tuple()], value=ast.Name(id="args")):
                    pass
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name() | ast.Subscript()):
                    self.buffers.add(name)  # reused, or one of several results of an operator
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                    self._call(call, name)
                case ast.Expr(value=ast.Call() as call):
                    self._call(call)
                case _:
                    raise ValueError(f"not understood: {_line(statement)}")

    def _call(self, call: ast.Call, result: str = "") -> None:
        function = ast.unparse(call.func)
        kernel, _, method = function.rpartition(".")
        self.buffers.add(result)
        if function in SILENT:
            return
        if function.startswith("empty_strided"):
            shape, _, dtype = map(ast.unparse, call.args)
            size = math.prod(ast.literal_eval(shape))
            self.allocated.append(size * getattr(torch, dtype.removeprefix("torch.")).itemsize)
        elif kernel in self.triton:
            assert method == "run"
            self.launches.append(("triton", kernel))
        elif kernel == "extern_kernels":
            (out,) = (keyword.value for keyword in call.keywords if keyword.arg == "out")
            (name,) = (
                node.id
                for node in ast.walk(out)
                if isinstance(node, ast.Name) and node.id in self.buffers
            )
            kind = "matmul" if method in MATMULS else method
            self.launches.append((kind, self._kernel(name)))
        elif function.startswith("torch.ops.") or function.partition("[")[0] in self.buffers:
            # or a method: buf3[...].view(...).sum(...)
            words = {
                "scaled_dot_product": "attention",
                "flash_attention": "attention",
                "matmul": "matmul",
            }
            kind = next((kind for word, kind in words.items() if word in function), "operator")
            self.launches.append((kind, self._kernel(result)))
        else:
            raise ValueError(f"not understood: {_line(call)}")

    def _kernel(self, buffer: str) -> str:
        return next(self.kernels.get(buffer, iter(())), buffer)


def triton_kernels(module: ast.Module) -> Iterator[str]:
    """Names of the kernels that the wrapper's module defines."""
    for node in ast.walk(module):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=function)):
                if ast.unparse(function) == "async_compile.triton":
                    yield name


def _line(node: ast.AST) -> str:
    return f"line {node.lineno}: {ast.unparse(node)[:160]}"  # type: ignore[attr-defined]
