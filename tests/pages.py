"""The pages for readers, README.md and docs/*.md, and what is looked for in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = "README.md"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / README, *sorted(ROOT.glob("docs/*.md")))
}
ALL = "\n".join(PAGES.values())
FAULTS = (ROOT / "tests/FAULTS.md").read_text(encoding="utf-8")  # each with its test


def blocks(text: str, language: str = r"\w*") -> list[str]:
    """The content of fenced blocks, of one language or of any."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchor(heading: str) -> str:
    """The fragment that GitHub gives a heading: `## Your own data` -> your-own-data."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


def anchors(text: str) -> set[str]:
    """The fragments that links to a page may have."""
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", prose(text), re.M)}


def links(text: str) -> list[str]:
    """The targets of links and pictures that are no web addresses."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)) if "://" not in target]
