"""ConfigError, MachineError, and the words of their messages.

ConfigError("recipe.toml: training.steps = 0: expected an integer at least 1")   # one mistake
ConfigError(*messages)                                          # several, a line each
error_because_of(error, f"{path} cannot be read: {error.strerror}")      # either, by what failed
"""

import difflib
import errno
import json
import math
import socket
from collections.abc import Iterable

from pydantic import BaseModel

from titan_lite.text import one_line


class ConfigError(ValueError):
    """A recipe or command line that cannot be run.

    Each message names the key, the value and a value to use.
    """

    def __str__(self) -> str:
        # A value may have line breaks and control characters; a list of ours is indented.
        lines = [
            "\n  ".join(one_line(part, 10**6) for part in str(line).split("\n  "))
            for line in self.args
        ]
        if len(lines) == 1:
            return lines[0]
        return "\n  ".join(("invalid configuration:", *lines))


class MachineError(RuntimeError):
    """The network or the machine has failed, and no recipe would help: another start may.

    A program ends with exit code 1, where it ends with 2 after a ConfigError.
    """

    __str__ = ConfigError.__str__


# Errors of a machine, a disk or a network. Others, such as ENOENT and EACCES, are of what was named
FAULTS = {
    getattr(errno, name)
    for name in (
        *("EIO", "ESTALE", "ENOSPC", "EDQUOT", "EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "EBUSY"),
        *("ENODEV", "ENXIO", "ENOBUFS", "EREMOTEIO", "EPIPE", "ECONNABORTED", "ECONNREFUSED"),
        *("ECONNRESET", "ETIMEDOUT", "ENETDOWN", "ENETUNREACH", "ENETRESET", "EHOSTDOWN"),
        *("EHOSTUNREACH", "ENOTCONN", "ESHUTDOWN"),
    )
    if hasattr(errno, name)  # some are Linux's
}


def is_of_machine(error: BaseException) -> bool:
    """Return True for an error of the system that is no mistake in what was named: of the disk, its
    room, memory, numbers of open files, or the network.
    """
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN  # else the host is not known
    return isinstance(error, ConnectionError | TimeoutError) or (
        isinstance(error, OSError) and error.errno in FAULTS
    )


def error_because_of(error: BaseException, message: str) -> ConfigError | MachineError:
    """Return the error to raise where another one was raised."""
    return MachineError(message) if is_of_machine(error) else ConfigError(message)


class SharedConfigError(ConfigError):
    """Wrong input that is raised on all ranks, although one may have found it alone: the first one
    prints it.
    """

    everywhere = True


def shown(value: object) -> str:
    """Return a value for a message: short, and as in TOML if it has a form there."""
    return one_line(in_toml(value), 100)


def alternatives(values: Iterable[object]) -> str:
    """Return [1, 2, 4] as "1 or 2 or 4"."""
    return " or ".join(str(value) for value in values)


def nearest_multiples(value: int, factor: int) -> list[int]:
    """Return the multiples of `factor`, above 0, that are next to `value`."""
    below = max(factor, value // factor * factor)
    above = math.ceil(value / factor) * factor
    return sorted({below, above})


def in_toml(value: object) -> str:
    """Return a value as it is written in a TOML file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # a JSON string is a TOML basic string, except for DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_toml, value))}]"
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {in_toml(part)}' for name, part in value.items())}}}"
    return str(value)


def did_you_mean(word: str, known: Iterable[str], *, within: str = "", otherwise: str = "") -> str:
    """Return the end of a message about an unknown word: the nearest known one, or `otherwise`."""
    close = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.5)
    return f"; did you mean {within}{close[0]}?" if close else otherwise
