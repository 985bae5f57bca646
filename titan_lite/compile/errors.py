"""Explain what cannot be compiled, with the keys to change."""

from collections.abc import Iterator
from contextlib import contextmanager

from titan_lite.config import Compile, ConfigError


class CompileError(RuntimeError):
    """A failed compilation. The message names the reason and the keys to change."""


@contextmanager
def compile_errors(config: Compile, *, in_backend: bool) -> Iterator[None]:
    """Return a context in which errors are raised as CompileError.

    in_backend: another backend may do better.
    """
    try:
        yield
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(explain(error, config, in_backend=in_backend)) from error


def explain(error: BaseException, config: Compile, *, in_backend: bool) -> str:
    """Return one line: the reason and the keys to change."""
    cause = error
    while hasattr(cause, "inner_exception"):  # of Inductor: what a pass or its compiler raised
        cause = cause.inner_exception
    if isinstance(cause, ConfigError):  # raised by a pass, with the key
        return str(cause)

    changes = []
    if in_backend and config.backend == "inductor":
        changes.append('compile.backend = "aot_eager"')
    changes.append("compile.enable = false")

    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    reason = lines[0] if lines else ""
    if not reason or not isinstance(cause, RuntimeError):  # such as KeyError, whose text is a key
        reason = f"{type(cause).__name__} {reason}".strip()
    return (
        f'compile.backend = "{config.backend}" cannot compile the model ({reason}); '
        f"use {' or '.join(changes)}"
    )
