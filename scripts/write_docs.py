"""Write the parts of docs/ that are made from the sources: the tables of docs/recipes.md and the
drawing of docs/design.md.

    python scripts/write_docs.py            # writes both parts into their pages
    python scripts/write_docs.py --check    # writes nothing; exit code 1 where a part is not that of today's sources

The tables are made from the docstrings of titan_lite/config/sections.py, the drawing from the
imports of the package. A part stands between two comments of its page, and the rest of the page is
written by hand.
"""

import argparse
import ast
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic.fields import FieldInfo

from titan_lite.config import SECTIONS
from titan_lite.config.errors import in_toml
from titan_lite.config.help import accepted, doc_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, DOCS = ROOT / "titan_lite", ROOT / "docs"
BEGIN, END = (
    "<!-- written by scripts/write_docs.py -->\n",
    "<!-- end of what scripts/write_docs.py wrote -->\n",
)


# docs/recipes.md


def key_tables() -> str:
    """A table for each section of a recipe, a line for each key."""
    lines = []
    for section, cls in SECTIONS.items():
        lines += [f"## [{section}]", "", doc_of(section), ""]
        lines += ["| key | default | values | purpose |", "|---|---|---|---|"]
        for name, field in cls.model_fields.items():
            cells = (f"`{name}`", f"`{in_toml(field.default)}`", accepted(field), purpose(field))
            escaped = [cell.replace("|", "&#124;").replace("<", "&lt;") for cell in cells]
            lines.append(f"| {' | '.join(escaped)} |")
        lines.append("")
    return "\n".join(lines)


def purpose(field: FieldInfo) -> str:
    """The docstring of a key in one line."""
    return " ".join((field.description or "").split())


# docs/design.md

# What nearly every part imports, and what imports nothing but each other: not drawn.
GROUND = {"cli", "config", "environment", "logging", "manifest", "processes", "sharding"}
Graph = dict[str, set[str]]  # part -> the parts that it imports


def part_of(path: Path) -> str:
    """The folder of a module below titan_lite/, or its own name."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports() -> Graph:
    """Every import of one part by another, but those for type checking alone."""
    parts = {part_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    found: Graph = {part: set() for part in parts}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        typing = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ]
        left_out = {id(inner) for node in typing for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and id(node) not in left_out:
                names = [f"{node.module}.{alias.name}".split(".") for alias in node.names]
                theirs = {name[1] for name in names if name[0] == "titan_lite"} & parts
                found.get(part_of(path), set()).update(theirs - {part_of(path)})
    return found


def reached(graph: Graph, start: str) -> set[str]:
    """All parts that arrows lead to from `start`."""
    seen: set[str] = set()
    left = [start]
    while left:
        new = graph[left.pop()] - seen
        seen |= new
        left += new
    return seen


def shortened(graph: Graph) -> Graph:
    """The graph without the arrows that a longer way replaces.

    Raises ValueError where parts import each other in a circle.
    """
    if circle := sorted(part for part in graph if part in reached(graph, part)):
        raise ValueError(f"these parts import each other in a circle: {', '.join(circle)}")
    return {
        part: {each for each in to if not any(each in reached(graph, other) for other in to)}
        for part, to in graph.items()
    }


def drawing() -> str:
    """The imports as a Mermaid diagram. An arrow points at the part that is imported."""
    found = imports()
    if outward := sorted(part for part in GROUND if found[part] - GROUND):
        raise ValueError(f"these parts of the ground import others: {', '.join(outward)}")
    arrows = shortened({part: to - GROUND for part, to in found.items() if part not in GROUND})
    names = {
        part: f'{part}["{part}/"]' if (PACKAGE / part).is_dir() else f'{part}["{part}.py"]'
        for part in sorted(arrows)
    }
    lines = ["```mermaid", "flowchart TD", *(f"    {name}" for name in names.values())]
    lines += [
        f"    {part} --> {each}" for part, to in sorted(arrows.items()) for each in sorted(to)
    ]
    return "\n".join([*lines, "```", ""])


PARTS: dict[str, Callable[[], str]] = {"recipes.md": key_tables, "design.md": drawing}


def as_of_today(page: Path) -> str:
    """The text of the page with its part written anew.

    Raises ValueError where the page has no place for it.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: no {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{PARTS[page.name]()}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 where a page would change"
    )
    options = parser.parse_args()
    stale = [
        page
        for page in (DOCS / name for name in PARTS)
        if as_of_today(page) != page.read_text(encoding="utf-8")
    ]
    for page in stale:
        if not options.check:
            page.write_text(as_of_today(page), encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {'not up to date' if options.check else 'written'}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
