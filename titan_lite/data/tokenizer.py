"""Convert text to token ids and back, with Llama 3's tokenizer.model or a tokenizer.json.

    tokenizer = load_tokenizer("assets/tokenizer/debug.model")
    tokenizer.encode("import os", bos=True)      # [1792, 759, 665]
    tokenizer.decode([759, 665])                 # "import os"

A line in tiktoken's format is a token's bytes in base64, a space and its rank. The rank is the
order of merges in byte-pair encoding, and the token's id. Llama 3's `tokenizer.model` is such a
file. 256 special tokens follow the ranks, so that a file of 1,792 ranks makes a vocabulary of
2,048. Names, ids and the splitting pattern are those of
https://github.com/meta-llama/llama-models/blob/main/models/llama3/tokenizer.py

A file whose name ends in .json is read by the package `tokenizers`. The tokens that begin and end a
document are those of tokenizer_config.json beside it, else those that the file itself puts around a
text, else those with the names of Llama's or GPT-2's.
"""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers
from tiktoken.load import load_tiktoken_bpe

from titan_lite.config import ConfigError
from titan_lite.config.errors import error_because_of, shown
from titan_lite.data.special_tokens import CHARACTERS, text_encoder, text_fault
from titan_lite.logging import logger
from titan_lite.text import error_line

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL_NAMES = [
    "begin_of_text",
    "end_of_text",
    "reserved_special_token_0",
    "reserved_special_token_1",
    "finetune_right_pad_id",
    "step_id",
    "start_header_id",
    "end_header_id",
    "eom_id",
    "eot_id",
    "python_tag",
    "image",
    *(f"reserved_special_token_{number}" for number in range(2, 246)),
]
SPECIAL_TOKENS = [f"<|{name}|>" for name in _SPECIAL_NAMES]

# tiktoken's matcher recurses: it panics on very long texts, and its time is quadratic in the length
# of a run of one class (https://github.com/openai/tiktoken/issues/195). Texts are cut where Llama
# 3's tokenizer cuts, so that the ids are the same.
_MAX_CHARACTERS = 400_000  # of a text
_MAX_RUN = 25_000  # spaces, or characters that are no spaces, next to each other
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_MAX_RUN + 1},}}|(?<!\s)\s{{{_MAX_RUN + 1},}}")
# A long run covers a stretch of half its length that starts at a multiple of that length: checking
# these stretches is fast.
_HALF_LENGTH = _MAX_RUN // 2
_HALF_RUN = re.compile(rf"\S{{{_HALF_LENGTH}}}|\s{{{_HALF_LENGTH}}}")
# Another tokenizer.json may join what such a cut parts: the characters on both sides of a cut are
# encoded together and apart before a text is cut there.
_BOUNDARY = re.compile(r"\b")
_AROUND_CUT = 200  # characters on each side of a cut, more than a token has
_MAX_TRIES = 1000  # places at which a text is tried to be cut, before the rest stays in one piece


# A text with letters of both cases, accents, digits, spaces, tabs and lines.
SAMPLE = "Some words, 3.14:\n\tdef f(x):\n\n    return 'Caf\u00e9 \u6f22\u5b57'  # The end\n"


class TiktokenTokenizer:
    """A tokenizer of a file in tiktoken's format.

    It has `vocab_size`, `bos_id`, `eos_id` and the file's `sha256`. Pickles.
    """

    def __init__(self, ranks: dict[bytes, int], sha256: str):
        special = {token: id for id, token in enumerate(SPECIAL_TOKENS, start=len(ranks))}
        self.ranks = ranks
        self.special_tokens = special
        self._encoding = tiktoken.Encoding(
            name=f"titan_lite-{sha256}",
            pat_str=PATTERN,
            mergeable_ranks=ranks,
            special_tokens=special,
        )
        self.vocab_size = len(ranks) + len(special)
        self.bos_id = special["<|begin_of_text|>"]
        self.eos_id = special["<|end_of_text|>"]
        self.sha256 = sha256

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Return the ids of any text; the name of a special token in it is plain text."""
        ids = self.encode_document(text)[:-1].tolist()
        return ids if bos else ids[1:]

    def encode_document(self, text: str) -> np.ndarray:
        """Return the ids between BOS and EOS, as uint32.

        An array takes 10% less time and a ninth of the memory of a list.
        """
        pieces = cut_text(text) if len(text) > _MAX_RUN else (text,)
        ids = [self._ids(piece) for piece in pieces]
        return np.concatenate(
            ([self.bos_id], *ids, [self.eos_id]), dtype=np.uint32, casting="unsafe"
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids in [0, vocab_size).

        Invalid UTF-8 becomes U+FFFD, special tokens become their names.
        """
        return self._encoding.decode(ids)

    def pieces(self) -> dict[int, str]:
        """Return the tokens of text by id, with a character for each byte as in tokenizer.json."""
        return {
            id: token.decode("latin-1").translate(CHARACTERS) for token, id in self.ranks.items()
        }

    def _ids(self, text: str) -> np.ndarray:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self._encoding.encode_to_numpy(_without_halves(text), disallowed_special=())


class JsonTokenizer:
    """A tokenizer of a tokenizer.json. Its `sha256` is of the file and of the ids of BOS and EOS.

    tokenizer: as the library reads the file. content: its text. where: the beginning of errors,
    which says how the user named the file. Pickles.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        content: str,
        bos_id: int,
        eos_id: int,
        where: str,
    ):
        # one text is encoded at a time: threads gain nothing, and warn of forks
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.content = content
        self._where = where
        self.bos_id = bos_id
        self.eos_id = eos_id
        self._tokenizer = tokenizer
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if len(set(vocabulary.values())) < len(vocabulary):
            raise ValueError("has several tokens with one id")
        self.vocab_size = 1 + max(vocabulary.values())
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: id for id, token in added.items() if token.special}
        for id in (bos_id, eos_id):  # which the file may have as ordinary tokens
            name = added[id].content if id in added else self._tokenizer.id_to_token(id)
            if name is None:  # the library numbers added tokens by the vocabulary, which has gaps
                raise ValueError(f"begins or ends documents with the id {id}, which no token has")
            self.special_tokens[name] = id
        self._encoder = text_encoder(self._tokenizer, content, self.special_tokens)
        self.sha256 = hashlib.sha256(f"{content}\n{bos_id} {eos_id}".encode()).hexdigest()
        self._is_llama_3 = json.dumps(PATTERN) in content
        # A text may be encoded in pieces, unless the tokenizer adds a prefix to each piece, like
        # Llama 2's.
        try:
            self._may_cut = self.decode(self._ids("a") + self._ids("a")) == "aa"
        except ConfigError:  # it has no token for "a"
            self._may_cut = False

    def __reduce__(self) -> tuple[Callable, tuple[str, int, int, str]]:
        # the library's own pickle loses encode_special_tokens
        return _read_again, (self.content, self.bos_id, self.eos_id, self._where)

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Return the ids of any text; the name of a special token in it is plain text.

        Raises ConfigError if the tokenizer has no token for a part of it, nor one for what is
        unknown, or if it gives a part the token that begins or ends a document.
        """
        ids: list[int] = []
        for piece in self._pieces_of(text):
            ids += self._ids(piece)
        if self.bos_id in ids or self.eos_id in ids:
            raise ConfigError(
                f"{self._where} gives a part of the text {shown(text)} the token that begins or"
                " ends a document; use another tokenizer"
            )
        return [self.bos_id, *ids] if bos else ids

    def encode_document(self, text: str) -> np.ndarray:
        """Return the ids between BOS and EOS, as uint32."""
        return np.array([*self.encode(text, bos=True), self.eos_id], dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids in [0, vocab_size).

        Invalid UTF-8 becomes U+FFFD, special tokens become their names.
        """
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def pieces(self) -> dict[int, str]:
        """Return the tokens of text by id, as they are written in the file."""
        special = set(self.special_tokens.values())
        vocabulary = sorted(self._tokenizer.get_vocab(with_added_tokens=True).items())
        return {id: piece for piece, id in vocabulary if id not in special}

    def check_texts(self) -> None:
        """Raise ConfigError if texts would lose characters, or have tokens that end documents."""
        ends = {self.bos_id, self.eos_id}
        fault = text_fault(self._encoder, self.content, self.special_tokens, ends)
        if fault:
            raise ConfigError(f"{self._where} {fault}; use another tokenizer")

    def _pieces_of(self, text: str) -> Iterator[str]:
        """Cut a text into pieces whose ids are those of the text, or where Llama 3's rule cuts."""
        if self._may_cut and self._is_llama_3:
            yield from cut_text(text)
            return
        start = 0
        while self._may_cut and len(text) - start > _MAX_CHARACTERS:
            end = self._next_cut(text, start + _MAX_CHARACTERS)
            yield text[start:end]
            start = end
        yield text[start:]

    def _next_cut(self, text: str, start: int) -> int:
        """Return the first place from `start` on at which a cut does not change the ids.

        It is the end of the text if there is none.
        """
        for boundary in itertools.islice(_BOUNDARY.finditer(text, start), _MAX_TRIES):
            cut = boundary.start()
            before = text[max(0, cut - _AROUND_CUT) : cut]
            after = text[cut : cut + _AROUND_CUT]
            if self._ids(before) + self._ids(after) == self._ids(before + after):
                return cut
        return len(text)

    def _ids(self, text: str) -> list[int]:
        """Return the ids of a piece. Raises ConfigError."""
        encode = self._encoder.encode_batch_fast  # `encode` stores offsets, in twice the time
        try:
            try:
                return encode([text], add_special_tokens=False)[0].ids
            except (UnicodeEncodeError, TypeError):  # as for half of a surrogate pair
                return encode([_without_halves(text)], add_special_tokens=False)[0].ids
        except Exception as error:  # the library raises no subclass of it
            raise ConfigError(
                f"{self._where} cannot encode the text {shown(text)} ({error_line(error)}); use a"
                " tokenizer with a token for unknown text, or with tokens for all bytes"
            ) from None


def _read_again(content: str, bos_id: int, eos_id: int, where: str) -> JsonTokenizer:
    """Return a JsonTokenizer that was pickled."""
    tokenizer = tokenizers.Tokenizer.from_str(content)
    return JsonTokenizer(tokenizer, content, bos_id, eos_id, where)


Tokenizer = TiktokenTokenizer | JsonTokenizer


def warn_of_lost_text(tokenizer: Tokenizer, path: str) -> None:
    """Warn once if a sample text is another one after it was encoded and decoded.

    Some files lower letters, remove accents, or leave out spaces and lines.
    """
    try:
        text = tokenizer.decode(tokenizer.encode(SAMPLE))
    except ConfigError:  # of a vocabulary for other texts, which is an error for these alone
        return
    if text == SAMPLE:
        return
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, SAMPLE, strict=False))
    begin = max(0, len(list(pairs)) - 10)
    logger.warning(
        f'model.tokenizer_path = "{path}": a text is not the same after it was encoded and'
        f" decoded: {shown(SAMPLE[begin : begin + 30])} is {shown(text[begin : begin + 30])}; use"
        " another tokenizer to keep it"
    )


USUAL_TOKENS = {  # of Llama 3, of Llama 2, and of GPT-2, which has one token for both
    "bos_token": ("<|begin_of_text|>", "<s>", "<|endoftext|>"),
    "eos_token": ("<|end_of_text|>", "</s>", "<|endoftext|>"),
}

_FIX = (
    "use a file in tiktoken's format, such as assets/tokenizer/debug.model or Llama 3's"
    " original/tokenizer.model, or a tokenizer.json"
)


def load_tokenizer(path: str | os.PathLike, key: str = "model.tokenizer_path =") -> Tokenizer:
    """Load a file in tiktoken's format, or a tokenizer.json if the name ends in .json.

    key: the beginning of errors, which says how the user named the file. Raises ConfigError if the
    file cannot be read, is not a tokenizer, or does not say which tokens begin and end a document.
    """
    if os.fspath(path).endswith(".json"):
        return _load_json(Path(path), key)
    return load_tiktoken(path, key)


def load_tiktoken(
    path: str | os.PathLike, key: str = "model.tokenizer_path ="
) -> TiktokenTokenizer:
    """Load a file in tiktoken's format.

    Raises ConfigError if it cannot be read, or has another format.
    """
    where = f'{key} "{os.fspath(path)}"'
    sha256 = hashlib.sha256(_read(Path(path), where)).hexdigest()
    try:
        # the hash, since tiktoken keeps a copy by path, and would go on reading that
        ranks = load_tiktoken_bpe(os.fspath(path), expected_hash=sha256)
    except ValueError as error:
        raise ConfigError(
            f"{where} is not in tiktoken's format ({error_line(error)}); {_FIX}"
        ) from None
    # tiktoken would panic at the first text with a byte that has no token
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ConfigError(f"{where} has no token for {len(missing)} of the 256 bytes; {_FIX}")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(f"{where}: its ranks are not 0 to {len(ranks) - 1}; {_FIX}")
    return TiktokenTokenizer(ranks, sha256)


def _load_json(path: Path, key: str) -> JsonTokenizer:
    where = f'{key} "{path}"'
    content = _read(path, where)
    try:
        text = content.decode()
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises no subclass of it
        raise ConfigError(
            f"{where}: cannot be read as a tokenizer.json ({error_line(error)}); {_FIX}"
        ) from None
    bos_id, eos_id = _ends_of_documents(tokenizer, path, where)
    try:
        read = JsonTokenizer(tokenizer, text, bos_id, eos_id, where)
    except ValueError as error:
        raise ConfigError(f"{where} {error}; use another tokenizer") from None
    read.check_texts()
    return read


def _ends_of_documents(tokenizer: tokenizers.Tokenizer, path: Path, where: str) -> tuple[int, int]:
    """Return the ids of the tokens that begin and end a document.

    They are those of tokenizer_config.json, else those that the tokenizer puts around a text, else
    those with the usual names. Raises ConfigError if none of these says which they are.
    """
    configured = _tokens_beside(path, where)
    around = tokens_around_text(tokenizer)
    ids = {}
    for name in ("bos_token", "eos_token"):
        if name in configured:
            ids[name] = _configured_id(tokenizer, name, configured[name], where)
        elif len(around[name]) == 1:
            ids[name] = around[name][0]
        else:
            ids[name] = _usual_id(tokenizer, name, where)
    return ids["bos_token"], ids["eos_token"]


def tokens_around_text(tokenizer: tokenizers.Tokenizer) -> dict[str, list[int]]:
    """Return the ids that a tokenizer puts before and after a text, by bos_token and eos_token."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    plain: list[int] = []
    whole: list[int] = []
    with suppress(Exception):  # the library raises no subclass of it: it has no token for "a"
        plain = tokenizer.encode("a", add_special_tokens=False).ids
        whole = tokenizer.encode("a").ids
    for start in range(len(whole) - len(plain) + 1) if plain else ():
        end = start + len(plain)
        if whole[start:end] == plain:
            return {"bos_token": whole[:start], "eos_token": whole[end:]}
    return {"bos_token": [], "eos_token": []}


def _configured_id(tokenizer: tokenizers.Tokenizer, name: str, token: str, where: str) -> int:
    """Return the id of a token of tokenizer_config.json. Raises ConfigError."""
    id = tokenizer.token_to_id(token)
    if id is None:
        raise ConfigError(
            f"{where} has no token {token!r}, which tokenizer_config.json beside it calls {name};"
            " correct one of them"
        )
    return id


def _usual_id(tokenizer: tokenizers.Tokenizer, name: str, where: str) -> int:
    """Return the id of the first token with one of the usual names. Raises ConfigError."""
    for token in USUAL_TOKENS[name]:
        id = tokenizer.token_to_id(token)
        if id is not None:
            return id
    what = {"bos_token": "begins", "eos_token": "ends"}[name]
    raise ConfigError(
        f"{where} does not say what {what} a document; use a tokenizer_config.json beside it with"
        f' "{name}", or a token called {" or ".join(USUAL_TOKENS[name])}'
    )


def _tokens_beside(path: Path, where: str) -> dict[str, str]:
    """Return bos_token and eos_token of the tokenizer_config.json beside the file, if it has them.

    Raises ConfigError.
    """
    config = path.with_name("tokenizer_config.json")
    if not config.exists():
        return {}
    texts = {}
    try:
        content = json.loads(_read(config, f"{where}: {config}"))
        for name in ("bos_token", "eos_token"):
            token = content.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                texts[name] = text
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {config} cannot be read ({error_line(error)}); repair or remove it"
        ) from None
    return texts


def _read(path: Path, where: str) -> bytes:
    if path.is_dir():
        fix = _FIX
        for name in ("original/tokenizer.model", "tokenizer.model", "tokenizer.json"):
            if Path(path, name).is_file():
                fix = f"use its {name}"
        raise ConfigError(f"{where} cannot be read: it is a folder; {fix}")
    if path.exists() and not path.is_file():  # which would be waited for
        raise ConfigError(f"{where} cannot be read: it is a pipe or a device; {_FIX}")
    try:
        return path.read_bytes()
    except OSError as error:
        why = f"{where}: cannot be read ({error.strerror}); {_FIX}"
        raise error_because_of(error, why) from None


def _without_halves(text: str) -> str:
    """Replace each half of a surrogate pair by U+FFFD, as tiktoken's `encode` does."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def cut_text(text: str) -> Iterator[str]:
    """Cut a text into pieces that can be encoded apart.

    A piece has at most 400,000 characters, and runs of at most 25,000 spaces or other characters.
    """
    for start in range(0, len(text), _MAX_CHARACTERS):
        piece = text[start : start + _MAX_CHARACTERS]
        begin = 0
        if _may_have_long_run(piece):
            for run in _LONG_RUN.finditer(piece):
                for end in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                    yield piece[begin:end]
                    begin = end
        yield piece[begin:]


def _may_have_long_run(text: str) -> bool:
    stretches = range(0, len(text) - _HALF_LENGTH, _HALF_LENGTH)
    return any(_HALF_RUN.match(text, start) for start in stretches)
