"""Next-token cross-entropy as a sum, so that one division by the tokens of all ranks gives the same loss on every layout."""

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100  # a label that is not counted


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """logits (B, T, V) in any float type, labels (B, T) -> summed loss over the counted tokens, in nats, float32, scalar."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
