"""Decide how many tokens' logits exist at a time in the loss.

Imports no torch, like distributed/layout.py, which asks.

loss_chunk(training, tokens=8192, vocabulary=128_256)        # 1024
"""

from titan_lite.config import ConfigError, Training

# Bytes of logits, copies and gradients together, above which loss_chunk_tokens = 0 computes the
# loss in chunks of tokens. LOGIT: theirs for a token and an entry of the vocabulary: logarithms of
# probabilities, their gradient and that of logits, in float32. FEW_CHUNKS: the most that 0 chooses,
# since each reads and writes the sum of the projection's gradient. MOST_CHUNKS bounds the graph, in
# which every chunk has its nodes.
LOGITS, LOGIT, MULTIPLE, FEW_CHUNKS, MOST_CHUNKS = 3 * 2**29, 12, 128, 8, 16


def loss_chunk(training: Training, tokens: int, vocabulary: int) -> int:
    """Return the tokens whose logits exist at a time, of `tokens` of a microbatch on a rank with
    `vocabulary` entries; 0: all.

    Raises ConfigError for a training.loss_chunk_tokens without effect, or with more than
    MOST_CHUNKS chunks.
    """
    chunk = training.loss_chunk_tokens
    if chunk == 0:
        fits = LOGITS // (LOGIT * vocabulary)
        chosen = max(fits - fits % MULTIPLE, MULTIPLE, -(-tokens // FEW_CHUNKS))
        return chosen if fits < tokens > chosen else 0
    wrong = f"training.loss_chunk_tokens = {chunk:,}: a rank has {tokens:,} tokens of a microbatch"
    if chunk >= tokens:
        raise ConfigError(f"{wrong}, so this has no effect; use -1, or less than {tokens}")
    if 0 < chunk < (least := -(-tokens // MOST_CHUNKS)):
        raise ConfigError(f"{wrong}, which is more than {MOST_CHUNKS} chunks; use at least {least}")
    return max(chunk, 0)
