"""Ask a server of documents again for a while, and say in one line what it does not give.

    info = retried(lambda: fs.info(path), url)       # raises MachineError after RETRY_LIMIT seconds

A server that starts again, a network that is away, and an answer such as 503 may pass: they are
tried again with growing waits. An answer such as 404 is raised at once. fsspec itself tries nothing
again for http; of s3:// and gs:// its libraries do, for 2 s and for a minute.
"""

import re
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from titan_lite.config.errors import MachineError, is_of_machine
from titan_lite.logging import OF_GROUP, logger
from titan_lite.text import error_line

CONNECT_LIMIT = 30  # seconds to connect to a server of http
ANSWER_LIMIT = 60  # seconds without a byte of its answer
RETRY_LIMIT = 60  # seconds from the first failure on; comm.train_timeout_seconds is 100
FIRST_WAIT = 0.5  # seconds; each further wait is twice as long
BUSY = (408, 425, 429)  # answers of http that may pass, beside 500 and above: too slow, too many
# classes of errors of libraries that are none of Python's own, and may pass
OF_NETWORK = re.compile(
    "Timeout|Connection|Connect(or)?Error|Transport|Payload|IncompleteRead|RemoteProtocol|Chunked"
    "|ProxyError|HTTPClientError|ServiceRe(quest|sponse)Error|ReadError"
)
OF_SETTINGS = re.compile("SSL|Certificate|Offline")  # which are errors of connections, too

T = TypeVar("T")


class RefusedError(OSError):
    """A server answers, and does not give a file."""


def retried(ask: Callable[[], T], url: str) -> T:
    """Return what `ask` returns. It is called again after an error that may pass.

    Raises MachineError after RETRY_LIMIT seconds of such errors, and any other error at once.
    """
    deadline = 0.0
    wait = FIRST_WAIT
    while True:
        try:
            return ask()
        except Exception as error:  # each library has errors of its own
            if not may_pass(error):
                raise
            why = why_not_at_url(error)
            now = time.monotonic()
            if not deadline:
                deadline = now + RETRY_LIMIT
                if RETRY_LIMIT:
                    logger.warning(
                        f"{url} cannot be read ({why}): it is tried again for {RETRY_LIMIT} s",
                        extra=OF_GROUP,
                    )
            if now >= deadline:
                raise MachineError(
                    f"{url} cannot be read ({why}), and was tried for {RETRY_LIMIT} s: start again"
                    " when its server answers, or use a copy on disk"
                ) from error
        time.sleep(min(wait, deadline - now))
        wait *= 2


def may_pass(error: BaseException) -> bool:
    """Return True for an error of the network, the server or the machine, without which another try
    may succeed.
    """
    if isinstance(error, MachineError):  # was tried
        return False
    error = _reason(error)
    status = _status(error)
    if status is not None:
        return _is_passing(status)
    if isinstance(error, FileNotFoundError | PermissionError | ValueError):
        return False
    names = [each.__name__ for each in type(error).__mro__]
    if any(map(OF_SETTINGS.search, names)):
        return False
    lookup = getattr(error, "os_error", None)  # of aiohttp, for a host
    if isinstance(lookup, socket.gaierror):
        return is_of_machine(lookup)
    if any(map(OF_NETWORK.search, names)):
        return True
    # s3fs has EIO for each answer that it does not know
    status = None if error.__cause__ is None else _status(error.__cause__)
    return is_of_machine(error) if status is None else _is_passing(status)


def _reason(error: BaseException) -> BaseException:
    """Return the error itself, or what caused it: for http, fsspec says of every failure that there
    is no such file.
    """
    is_hidden = isinstance(error, FileNotFoundError) and error.__cause__ is not None
    return error.__cause__ if is_hidden and error.__cause__ is not None else error


def _status(error: BaseException) -> int | None:
    """Return the status of the answer of http that an error is about."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    for holder in (error, response):
        for name in ("status", "status_code", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return None


def _is_passing(status: int) -> bool:
    return status in BUSY or status >= 500


def why_not_at_url(error: BaseException) -> str:
    """Return in one line why something at a URL cannot be read."""
    error = _reason(error)
    status = getattr(error, "status", None)  # of an answer of http
    if type(error).__name__ == "TooManyRedirects":
        return "the server redirects again and again"
    if isinstance(status, int):
        why = f"the server answers {status} {getattr(error, 'message', '')}".rstrip()
        if status in (401, 403):
            why += ": it may want a user and a password before the host of the URL, or a token"
        return why
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return f"no answer within {ANSWER_LIMIT} s"
    words = error_line(error)
    if type(error) in (ValueError, ConnectionError):
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def serves_no_ranges(error: BaseException) -> bool:
    """Return True for the errors of fsspec where a server of http serves complete files alone."""
    return isinstance(error, ValueError) and any(
        words in str(error) for words in ("range requests", "Cannot seek streaming HTTP file")
    )
