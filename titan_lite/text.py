"""Short texts for messages and logs.

one_line("a\nb", 100)               # "a\\nb"; a longer text loses its middle
error_line(error)                   # the text of an error, which may quote a complete file
first_names(["a", "b", "c"], 2)     # "a, b and 1 more"
first_lines(["a", "b", "c"], 2)     # ["a", "b", "and 1 more"]
"""

from collections.abc import Sequence

MAX_ERROR = 300  # characters of another library's error


def one_line(text: str, most: int) -> str:
    """Escape unprintable characters, and cut the middle of a text above `most` characters."""
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
