"""Inductor's wrapper code, read without running it: the order of its kernels, and the lifetimes of
its buffers.

    replay = Replay(source, kernels, nbytes)
    replay.order        # [("start", "all_gather"), ("product", "mm"), ("wait", "all_gather"), ...]
    replay.faults       # ["an input of all_gather is written in flight: line 312: ..."]
    replay.launches     # as order, with all other kernels: ("triton", "triton_poi_fused_add_3")
    replay.peak         # most bytes alive at once

The statements of `call` are followed one by one. Names share a storage where one is a view of the
other or takes its place; a storage is free when its last name is deleted. Between a collective's
start and its wait, its input must not be written or freed, nor its output read, written or freed. A
statement that is not understood is an error.
"""

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

COLLECTIVES = "torch.ops._c10d_functional."
PRODUCTS = ("mm", "bmm", "addmm")
# What neither launches a kernel nor makes a buffer.
SILENT = (
    "assert_size_stride",
    "assert_alignment",
    "torch.cuda.set_device",
    "torch._C._cuda_setDevice",
    "args.clear",
)
SILENT += ("assert_size_stride_grouped", "assert_tensor_metadata")  # of torch 2.14
HEAVY = ("start", "wait", "product", "attention")


@dataclass(frozen=True)
class Flight:
    name: str  # of the collective
    inputs: frozenset[int]  # storages
    outputs: frozenset[int]


class Replay:
    """source: the module that Inductor writes.

    kernels: for each buffer, the FX nodes of the operator that makes it and of the collectives in
    place on it, in their order. nbytes: of what is not allocated but an operator's result or an
    input.
    """

    def __init__(
        self, source: str, kernels: Mapping[str, Sequence[str]], nbytes: Mapping[str, int]
    ):
        self.kernels = {buffer: iter(names) for buffer, names in kernels.items()}
        self.nbytes = nbytes
        self.launches: list[tuple[str, str]] = []
        self.faults: list[str] = []
        # by name; several names of one are views, or take each other's place
        self.storages: dict[str, int] = {}
        self.sizes: list[int] = []  # of each storage, in bytes
        self.allocated: list[int] = []  # those that the code allocates, and no operator
        self.flights: dict[str, Flight] = {}
        self.alive = 0  # bytes
        self.peak = 0  # bytes
        module = ast.parse(source)
        self.writes = dict(_pointers_written(module))
        (call,) = (
            node
            for node in ast.walk(module)
            if isinstance(node, ast.FunctionDef) and node.name == "call"
        )
        self._run(call.body)
        self.faults += [f"{flight.name} is never waited for" for flight in self.flights.values()]

    @property
    def order(self) -> list[tuple[str, str]]:
        return [launch for launch in self.launches if launch[0] in HEAVY]

    def block(self) -> list[tuple[str, str]]:
        """The launches of one block: from the first attention to the second."""
        first, second, *_ = (
            index for index, (kind, _) in enumerate(self.launches) if kind == "attention"
        )
        return self.launches[first:second]

    def _run(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.With(body=body):
                    self._run(body)
                case ast.Delete(targets=targets):
                    for target in targets:
                        self._free(ast.unparse(target), statement)
                case ast.Assign(targets=[target], value=value):
                    self._assign(target, value, statement)
                case ast.Expr(value=ast.Call() as call):
                    self._call(call)
                case ast.Return():
                    pass
                case _:
                    raise ValueError(f"not understood: {_line(statement)}")

    def _assign(self, target: ast.expr, value: ast.expr, statement: ast.stmt) -> None:
        match target, value:
            case ast.Tuple(elts=names), ast.Name(id="args"):
                for name in names:
                    self._make(ast.unparse(name))
            case ast.Name(id=name), ast.Name(id=same):
                self.storages[name] = self.storages[same]
            case ast.Name(id=name), ast.Subscript() as part:
                self._make(name)  # one of several results of an operator
                flight = self.flights.get(ast.unparse(part))
                if flight is not None:
                    self.flights[ast.unparse(part)] = replace(
                        flight, outputs=frozenset({self.storages[name]})
                    )
            case ast.Name(id=name), ast.Call() as call:
                self._call(call, name)
            case _:
                raise ValueError(f"not understood: {_line(statement)}")

    def _call(self, call: ast.Call, result: str = "") -> None:
        function = ast.unparse(call.func)
        kernel, _, method = function.rpartition(".")
        if function in SILENT or function == "get_raw_stream":
            return
        if function.startswith("empty_strided"):
            shape, _, dtype = map(ast.unparse, call.args)
            self.allocated.append(
                math.prod(ast.literal_eval(shape))
                * getattr(torch, dtype.removeprefix("torch.")).itemsize
            )
            self._make(result, self.allocated[-1])
        elif function in ("reinterpret_tensor", "copy_if_misaligned"):
            (self.storages[result],) = self._read(call.args[0])
        elif kernel in self.writes:
            assert method == "run"
            written = [
                argument
                for number, argument in enumerate(call.args)
                if number in self.writes[kernel]
            ]
            self._launch("triton", kernel, call, self._read(*call.args), self._read(*written))
        elif kernel == "extern_kernels":
            (out,) = (keyword.value for keyword in call.keywords if keyword.arg == "out")
            name = self._kernel(*self._names(out))
            self._launch(
                "product" if method in PRODUCTS else method,
                name,
                call,
                self._read(*call.args),
                self._read(out),
            )
        elif function.startswith(COLLECTIVES):
            self._communicate(
                function.removeprefix(COLLECTIVES).removesuffix(".default"), call, result
            )
        elif function.startswith("torch.ops.") or function.partition("[")[0] in self.storages:
            # or a method: buf3[...].view(...).sum(...)
            words = {
                "scaled_dot_product": "attention",
                "flash_attention": "attention",
                "matmul": "product",
            }
            kind = next((kind for word, kind in words.items() if word in function), "operator")
            self._launch(kind, self._kernel(result), call)
            if result:
                self._make(result)
        else:
            raise ValueError(f"not understood: {_line(call)}")

    def _communicate(self, operator: str, call: ast.Call, result: str) -> None:
        reads = self._read(call.args[0])
        if operator == "wait_tensor":
            key = next((key for key, flight in self.flights.items() if reads <= flight.outputs), "")
            if key:
                flight = self.flights.pop(key)
            else:  # of an input of the graph
                flight = Flight(ast.unparse(call.args[0]), frozenset(), frozenset())
            self._launch("wait", flight.name, call)
            return
        out = [keyword.value for keyword in call.keywords if keyword.arg == "out"]
        if not out and operator.endswith("_"):  # in place
            out = call.args[:1]
        name = self._kernel(*(self._names(call.args[0]) if out else [result]))
        self._launch("start", name, call, reads, self._read(*out))
        if not out:
            self._make(result)
        self.flights[name] = Flight(
            name, reads, self._read(*out) if out else frozenset({self.storages[result]})
        )

    def _launch(
        self,
        kind: str,
        name: str,
        call: ast.Call,
        reads: frozenset[int] | None = None,
        writes: frozenset[int] = frozenset(),
    ) -> None:
        self.launches.append((kind, name))
        reads = self._read(call) if reads is None else reads
        for flight in self.flights.values():
            if flight.inputs & writes:
                self.faults.append(f"an input of {flight.name} is written in flight: {_line(call)}")
            if flight.outputs & (reads | writes):
                self.faults.append(f"an output of {flight.name} is used in flight: {_line(call)}")

    def _make(self, name: str, nbytes: int | None = None) -> None:
        self.storages[name] = len(self.sizes)
        self.sizes.append(self.nbytes.get(name, 0) if nbytes is None else nbytes)
        self.alive += self.sizes[-1]
        self.peak = max(self.peak, self.alive)

    def _free(self, name: str, statement: ast.stmt) -> None:
        storage = self.storages.pop(name)
        if storage in self.storages.values():
            return
        self.alive -= self.sizes[storage]
        for flight in self.flights.values():
            if storage in flight.inputs | flight.outputs:
                self.faults.append(
                    f"a buffer of {flight.name} is freed in flight: {_line(statement)}"
                )

    def _kernel(self, *buffers: str) -> str:
        (buffer,) = buffers
        return next(self.kernels.get(buffer, iter(())), buffer)

    def _read(self, *expressions: ast.expr) -> frozenset[int]:
        return frozenset(
            self.storages[name] for expression in expressions for name in self._names(expression)
        )

    def _names(self, expression: ast.expr) -> list[str]:
        return [
            node.id
            for node in ast.walk(expression)
            if isinstance(node, ast.Name) and node.id in self.storages
        ]


def triton_kernels(module: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, source) of the kernels that the wrapper's module defines."""
    for node in ast.walk(module):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=function, args=[_, ast.Constant(value=text), *_]),
            ):
                if ast.unparse(function) == "async_compile.triton":
                    yield name, text


def _pointers_written(module: ast.Module) -> Iterator[tuple[str, set[int]]]:
    """(kernel, the positions of arguments that it writes)"""
    for name, text in triton_kernels(module):
        (kernel,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
        names = [argument.arg for argument in kernel.args.args]
        yield (
            name,
            {
                number
                for number, argument in enumerate(names)
                if argument.startswith(("out_ptr", "in_out_ptr"))
            },
        )


def _line(node: ast.AST) -> str:
    return f"line {node.lineno}: {ast.unparse(node)[:160]}"  # type: ignore[attr-defined]
