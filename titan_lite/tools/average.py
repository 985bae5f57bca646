"""Average the weights of several checkpoints, such as the last ones of a run or its branches.

    titan-lite average outputs/my_run/checkpoint/step-* --output averaged     # for transformers
    titan-lite average outputs/cooldown-1 outputs/cooldown-2 --output soup --to step

A checkpoint is a folder step-N; of a run's folder it is the newest. Each counts the same. Sums are
in float64, one tensor at a time: memory is needed for a tensor in float64 and two as stored, or
those of one safetensors file. Nothing is overwritten, as with convert.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from titan_lite.checkpoint.weights import CheckpointFolder, open_weights
from titan_lite.cli import Parser, command
from titan_lite.config import ConfigError
from titan_lite.logging import init_logging, logger
from titan_lite.tools.convert import add_options_of_target, write


class MeanOfCheckpoints(CheckpointFolder):
    """The mean of the weights of checkpoints, read as those of one. The rest is as in the first."""

    def __init__(self, parts: Sequence[CheckpointFolder]):
        super().__init__(parts[0].folder)
        self.kind = f"the mean of {len(parts)} checkpoints"
        self.parts = parts

    def read(self, fqn: str) -> Tensor:
        """Return the mean of a tensor, rounded once to the dtype of the first checkpoint."""
        total = self.parts[0].read(fqn).double()
        for part in self.parts[1:]:
            total += part.read(fqn)
        return (total / len(self.parts)).to(self.dtypes[fqn])


def open_mean(paths: Sequence[str]) -> MeanOfCheckpoints:
    """Open the checkpoints at these paths, each byte of which is compared with its manifest.

    Raises ConfigError if one is no checkpoint, or not of the first one's model and tokenizer.
    """
    parts: list[CheckpointFolder] = []
    for path in paths:
        weights = open_weights(path, every_byte=True)
        if not isinstance(weights, CheckpointFolder):
            raise ConfigError(
                f"{path}: {weights.kind} is not averaged; use the checkpoints of a run, or make one"
                " of it with titan-lite convert --to step"
            )
        if any(weights.folder.samefile(part.folder) for part in parts):
            raise ConfigError(f"{path}: {weights.folder} is named twice; name each checkpoint once")
        if parts:
            _check_alike(parts[0], weights)
        parts.append(weights)
    if len(parts) == 1:
        raise ConfigError(
            f"{paths[0]}: {parts[0].folder} is one checkpoint; name two or more, such as its other"
            f" ones in {parts[0].folder.parent}"
        )
    return MeanOfCheckpoints(parts)


def _check_alike(first: CheckpointFolder, other: CheckpointFolder) -> None:
    """Raise ConfigError unless both are of one model, with one tokenizer."""
    names = vars(first.config)
    differences = [
        f"{name} {getattr(other.config, name)} instead of {value}"
        for name, value in names.items()
        if getattr(other.config, name) != value
    ]
    if first.buffers != other.buffers:
        differences.append("other buffers of routers (experts.balance)")
    tokenizers = [each.state.identity.tokenizer for each in (first, other)]
    if all(tokenizers) and tokenizers[0] != tokenizers[1]:
        differences.append("another tokenizer")
    if differences:
        raise ConfigError(
            f"{other.folder} is of another model than {first.folder}: {', '.join(differences)}; use"
            " checkpoints of one model"
        )


@command()
def main(arguments: Sequence[str]) -> None:
    options = build_parser().parse_args(arguments)
    init_logging()
    mean = open_mean(options.checkpoints)
    for part in mean.parts:
        logger.info(f"averaged: {part.folder}")
    with torch.no_grad():
        write(options, mean, [part.folder for part in mean.parts])


def build_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument(
        "checkpoints", nargs="+", metavar="CHECKPOINT", help="a folder step-N, or a run's folder"
    )
    parser.add_argument(
        "--output", dest="target", type=Path, required=True, metavar="FOLDER", help="a new folder"
    )
    add_options_of_target(parser)
    return parser
