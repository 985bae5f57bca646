"""Choose how many tokens' logits exist at a time in the loss.

Needs no torch, since distributed/layout.py asks.

    automatic_chunk(tokens=8192, vocab_size=128_256)        # 1024
"""

import math

MAX_LOGITS_BYTES = int(1.5 * 2**30)  # above this, the loss is computed in chunks of tokens
BYTES_PER_LOGIT = 12  # log-probabilities, their gradient and that of the logits, in float32
CHUNK_MULTIPLE = 128  # tokens
MAX_AUTOMATIC_CHUNKS = 8  # each chunk reads and writes the gradient of the output projection
MAX_CHUNKS = 16  # of training.loss_chunk_tokens: every chunk has its nodes in the graph


def automatic_chunk(tokens: int, vocab_size: int) -> int:
    """Return the tokens whose logits exist at a time; 0 if those of all `tokens` fit at once.

    tokens: of a microbatch on a rank; vocab_size: the entries of the vocabulary that the rank has.
    """
    fitting = MAX_LOGITS_BYTES // (BYTES_PER_LOGIT * vocab_size)
    if tokens <= fitting:
        return 0
    rounded = max(CHUNK_MULTIPLE, fitting // CHUNK_MULTIPLE * CHUNK_MULTIPLE)
    chunk = max(rounded, math.ceil(tokens / MAX_AUTOMATIC_CHUNKS))
    return chunk if chunk < tokens else 0
