"""Names of what a checkpoint has.

section_of("optimizer.state.norm.weight.step")              # "optimizer"
"""

SECTIONS = ("optimizer", "between", "train_state")  # first words of names that are no parameters


def section_of(name: str) -> str:
    """Return the first word of a name in SECTIONS, and "model" for a parameter."""
    first, _, _ = name.partition(".")
    return first if first in SECTIONS else "model"
