"""Find where documents begin in packed sequences.

doc_starts(tokens, bos_id)        # for attention within documents
"""

import torch
from torch import Tensor


def doc_starts(tokens: Tensor, bos_id: int) -> Tensor:
    """Return for each token (B, T) the position where its document begins, int64.

    It is 0 for a document that began in an earlier sequence.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(tokens == bos_id, positions, 0).cummax(dim=1).values


def doc_stats(tokens: Tensor, bos_id: int) -> Tensor:
    """Return for each sequence of tokens (B, T) the documents in it and the length of the longest.

    (B, 2) int64. Documents that are cut at the ends of the sequence count, too.
    """
    starts = doc_starts(tokens, bos_id)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    documents = (starts == positions).sum(dim=1)
    longest = (positions - starts).amax(dim=1) + 1
    return torch.stack((documents, longest), dim=1)
