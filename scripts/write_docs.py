"""Write what is made from the sources: keys of docs/recipes.md, a table of docs/plan.md, the
drawing of docs/design.md.

    python scripts/write_docs.py            # writes the parts into their pages
    python scripts/write_docs.py --check    # writes nothing; exit code 1 if a page would change

The keys are made from the docstrings of titan_lite/config/sections.py; the table of published runs
from titan_lite/tools/plan/published.csv; the drawing from the imports of the package, and its
layers from tests/unit/test_layers.py. A part stands between two comments of its page, and the rest
of the page is written by hand.
"""

import argparse
import ast
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic.fields import FieldInfo

from titan_lite.config import SECTIONS
from titan_lite.config.effects import Effect, OnlyWith
from titan_lite.config.errors import in_toml
from titan_lite.config.help import doc_of
from titan_lite.config.sections import choices_of
from titan_lite.tools.plan.published import PublishedRun, evidence_among, published_runs

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "titan_lite"
DOCS = ROOT / "docs"
LAYERS_FILE = ROOT / "tests/unit/test_layers.py"
BEGIN = "<!-- written by scripts/write_docs.py -->\n"
END = "<!-- end of what scripts/write_docs.py wrote -->\n"


# --- docs/recipes.md ------------------------------------------------------------------------------


def keys_of_sections() -> str:
    """Return a list for each section of a recipe, with a line for each key."""
    lines = []
    for section, cls in SECTIONS.items():
        lines += [f"## [{section}]", "", doc_of(section), ""]
        for name, field in cls.model_fields.items():
            key = f"`{name} = {in_toml(field.default)}`{other_values(field)}"
            lines.append(f"- {key}: {purpose(field).replace('<', '&lt;')}")
        lines.append("")
    return "\n".join(lines)


def other_values(field: FieldInfo) -> str:
    """Return the words that a key accepts beside its default, "" if its docstring has them all."""
    others = [word for word in choices_of(field.annotation) if word != field.default]
    if all(word in (field.description or "") for word in others):
        return ""
    return f" or {', '.join(f'`{in_toml(word)}`' for word in others)}"


AT_RESUME = {  # effects of a new value in few words, which the page explains
    Effect.RESTARTS_DATA: "Restarts data",
    Effect.RESTARTS_OPTIMIZER: "Restarts optimizer",
    Effect.ROUNDING: "Rounding",
}


def purpose(field: FieldInfo) -> str:
    """Return the docstring of a key in one line, and what a new value does at a resume."""
    words = " ".join((field.description or "").split())
    effect = next((mark for mark in field.metadata if isinstance(mark, Effect)), None)
    if effect is None:
        return words
    conditions = [
        f", if {mark.key} = {in_toml(mark.value)}"
        for mark in field.metadata
        if isinstance(mark, OnlyWith)
    ]
    return f"{words} *{AT_RESUME[effect]}{''.join(conditions)}*"


# --- docs/design.md -------------------------------------------------------------------------------

Graph = dict[str, set[str]]  # part of the package, a folder or a module -> parts that it imports


def layers() -> list[list[str]]:
    """Return the parts of each layer, the lowest layer first, as the test of layers has them."""
    tree = ast.parse(LAYERS_FILE.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return [
                [name for name in layer if "." not in name and name != "__init__"]
                for layer in ast.literal_eval(node.value)
            ]
    raise ValueError(f"{LAYERS_FILE}: no LAYERS")


def part_of(path: Path) -> str:
    """Return the folder of a module below titan_lite/, or its own name."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports() -> Graph:
    """Return every import of one part by another, but those for type checking alone."""
    paths = sorted(PACKAGE.rglob("*.py"))
    graph: Graph = {part_of(path): set() for path in paths if part_of(path) != "__init__"}
    for path in paths:
        importer = part_of(path)
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module or id(node) in for_types:
                continue
            for alias in node.names:
                package, imported = f"{node.module}.{alias.name}".split(".")[:2]
                if package == "titan_lite" and imported in graph and imported != importer:
                    graph[importer].add(imported)
    return graph


def reached(graph: Graph, start: str) -> set[str]:
    """Return all parts that arrows lead to from `start`."""
    seen: set[str] = set()
    pending = [start]
    while pending:
        new = graph[pending.pop()] - seen
        seen |= new
        pending += new
    return seen


def shortened(graph: Graph) -> Graph:
    """Return the graph without the arrows that a longer way replaces.

    Raises ValueError where parts import each other in a circle.
    """
    circle = sorted(part for part in graph if part in reached(graph, part))
    if circle:
        raise ValueError(f"these parts import each other in a circle: {', '.join(circle)}")
    return {
        part: {end for end in ends if not any(end in reached(graph, other) for other in ends)}
        for part, ends in graph.items()
    }


def drawing() -> str:
    """Return the imports as a Mermaid diagram: a box for each layer, the highest one on top.

    An arrow points at the part that is imported. The lowest layer is not drawn.
    """
    lowest, *drawn = layers()
    graph = imports()
    above_lowest = {part: ends - {*lowest} for part, ends in graph.items() if part not in lowest}
    arrows = shortened(above_lowest)
    lines = ["```mermaid", "flowchart TD"]
    for number, layer in reversed([*enumerate(drawn, start=1)]):
        lines.append(f'    subgraph layer{number}[" "]')
        for part in layer:
            name = f"{part}/" if (PACKAGE / part).is_dir() else f"{part}.py"
            lines.append(f'        {part}["{name}"]')
        lines.append("    end")
    for part, ends in sorted(arrows.items()):
        lines += [f"    {part} --> {end}" for end in sorted(ends)]
    return "\n".join([*lines, "```", ""])


# --- docs/plan.md ---------------------------------------------------------------------------------


def published_table() -> str:
    """Return the errors of plans of published runs: a row for each class, for all, and for those
    that were planned blind.
    """
    runs = [run for run in published_runs() if run.published]
    classes: dict[str, list[PublishedRun]] = {}
    for run in runs:
        kind = run.kind
        words = (kind.device, kind.precision, *(["MoE"] if kind.is_moe else []))
        classes.setdefault(", ".join(words), []).append(run)
    blind = [run for run in runs if run.role == "blind"]
    rows = [
        (
            "| runs | | planned / published | median error | in the range |"
            " GiB planned / published |"
        ),
        "|---|--:|--:|--:|--:|--:|",
        *(class_row(words, of_class, runs) for words, of_class in sorted(classes.items())),
        class_row("all", runs, runs),
        class_row("blind", blind, runs),
        "",
    ]
    return "\n".join(rows)


def class_row(words: str, of_class: Sequence[PublishedRun], runs: Sequence[PublishedRun]) -> str:
    """Return the row of some runs. runs: those that ranges follow from."""
    ranges = [left_out_range(run, runs) for run in of_class]
    held = sum(
        slow <= run.published <= fast for run, (slow, fast) in zip(of_class, ranges, strict=True)
    )
    memory = [run.memory for run in of_class if run.published_gib]
    cells = (
        words,
        len(of_class),
        least_to_most(run.speed for run in of_class),
        f"{statistics.median(abs(run.speed - 1) for run in of_class):.0%}",
        f"{held} of {len(of_class)}",
        least_to_most(memory) if memory else "-",
    )
    return f"| {' | '.join(map(str, cells))} |"


def left_out_range(run: PublishedRun, runs: Sequence[PublishedRun]) -> tuple[float, float]:
    """Return the range that a plan of a run has if the run itself is no evidence."""
    others = [other for other in runs if other is not run]
    error = evidence_among(others, run.kind).error
    return run.planned / error, run.planned * error


def least_to_most(ratios: Iterable[float]) -> str:
    values = sorted(ratios)
    return f"{values[0]:.2f} to {values[-1]:.2f}" if len(values) > 1 else f"{values[0]:.2f}"


PARTS: dict[str, Callable[[], str]] = {
    "recipes.md": keys_of_sections,
    "design.md": drawing,
    "plan.md": published_table,
}


def as_of_today(page: Path) -> str:
    """Return the text of the page with its part rewritten.

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
