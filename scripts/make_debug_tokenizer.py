"""Train the debug flavor's tokenizer: byte-pair encoding on the running Python's standard library,
in tiktoken's format.

    python scripts/make_debug_tokenizer.py [--output assets/tokenizer/debug.model] [--ranks 1792]

1,792 ranks (256 bytes and 1,536 merges) and the 256 special tokens that follow them are the 2,048
of the debug flavor. The text is the training documents of `data.dataset = "stdlib"`, so the same
version of Python gives the same file; the one in assets/ was made with Python 3.11. Needs the
package `tokenizers`, which comes with the extra `test`. Takes seconds.
"""

import argparse
import base64
import itertools
from pathlib import Path

from titan_lite.config import Data
from titan_lite.data.documents import build_source
from titan_lite.data.special_tokens import CHARACTERS
from titan_lite.data.tokenizer import PATTERN, load_tokenizer


def train(texts: list[str], ranks: int) -> list[bytes]:
    """The bytes of each token, in the order of the merges."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=ranks, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    byte_of = {character: byte for byte, character in CHARACTERS.items()}
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merged = [bytes(byte_of[char] for char in token) for token, _ in learned if len(token) > 1]
    return [bytes([byte]) for byte in range(256)] + merged


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent.parent / "assets/tokenizer/debug.model"
    )
    parser.add_argument("--ranks", type=int, default=1792)
    arguments = parser.parse_args()

    source = build_source(Data(shuffle=False), split="train", seed=0)
    documents = source.documents(0, lambda ordinal: True)
    texts = [text for _, text in itertools.islice(documents, len(source.names))]
    tokens = train(texts, arguments.ranks)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    )

    tokenizer = load_tokenizer(arguments.output)
    ids = [tokenizer.encode(text) for text in texts]
    assert all(tokenizer.decode(some) == text for some, text in zip(ids, texts, strict=True))
    size, count = sum(len(text.encode()) for text in texts), sum(map(len, ids))
    print(f"{arguments.output}: a vocabulary of {tokenizer.vocab_size}")
    print(
        f"{len(texts)} documents of {size} bytes are {count} tokens: {size / count:.2f} bytes a"
        " token"
    )


if __name__ == "__main__":
    main()
