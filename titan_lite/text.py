"""Short texts for messages and logs.

one_line("a\nb", 100)               # "a\\nb"; a longer text loses its middle
without_secrets("http://me:pw@host/a.jsonl")       # "http://***@host/a.jsonl"
error_line(error)                   # the text of an error, which may quote a complete file
first_names(["a", "b", "c"], 2)     # "a, b and 1 more"
first_lines(["a", "b", "c"], 2)     # ["a", "b", "and 1 more"]
name_ranks([0, 1, 2, 5])            # "ranks 0-2, 5"
"""

import itertools
import re
from collections.abc import Collection, Sequence

MAX_ERROR = 300  # characters of another library's error

MASK = "***"
# user and password of a URL; github:// and git:// have a repository there
_USER = re.compile(r"(?<!github)(?<!\bgit)://[^\s/]*@")
# values of a query that give access, or that differ from one signed URL of a file to the next
_ACCESS = re.compile(
    r"([?&](?:[^=&?#\s]*(?:token|secret|signature|passw|credential|api[-_]?key|access[-_]?key"
    r"|key-pair)[^=&?#\s]*|sig|key|auth|pwd|policy|x-(?:amz|goog)-[\w-]+|expires|se|st)=)"
    r"[^&#\s\"']+",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """Return a text with *** for users, passwords and tokens in its URLs.

    Everything that is written or shown passes through here: log and events, messages, config.toml
    and what else has the recipe, identities, lists of documents.
    """
    if "://" in text:
        text = _USER.sub(f"://{MASK}@", text)
    return _ACCESS.sub(rf"\1{MASK}", text) if "=" in text else text


def one_line(text: str, most: int) -> str:
    """Mask secrets, escape unprintable characters, and cut the middle of a text above `most`
    characters.
    """
    text = without_secrets(text)
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def error_line(error: BaseException) -> str:
    """Return the text of an error in one line, its middle cut above MAX_ERROR characters."""
    return one_line(" ".join(str(error).split()), MAX_ERROR)


def first_names(names: Sequence[str], most: int) -> str:
    """Return the first `most` names with commas, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def first_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return the first `most` lines, and one with the number of the others."""
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return [*lines[:most], *more]


def name_ranks(ranks: Collection[int]) -> str:
    """Return [0, 1, 2, 5] as "ranks 0-2, 5"."""
    # Within a run of consecutive numbers, number - index is the same.
    runs = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda item: item[1] - item[0]):
        numbers = [number for _, number in run]
        first, last = numbers[0], numbers[-1]
        runs.append(str(first) if first == last else f"{first}-{last}")
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(runs)}"
