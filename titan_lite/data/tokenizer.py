"""Convert text to token ids and back, with a file in tiktoken's format by the rules of Llama 3, or with a tokenizer.json.

    tokenizer = load_tokenizer("assets/tokenizer/debug.model")
    tokenizer.encode("import os", bos=True)      # [1792, 759, 665]
    tokenizer.decode([759, 665])                 # "import os"

A line in tiktoken's format is a token's bytes in base64, a space and its rank. The rank is the order of merges in byte-pair
encoding, and the token's id. Llama 3's `tokenizer.model` is such a file. 256 special tokens follow the ranks, so that a file of
1,792 ranks makes a vocabulary of 2,048. Names, ids and the splitting pattern are those of
https://github.com/meta-llama/llama-models/blob/main/models/llama3/tokenizer.py

A file whose name ends in .json is read by the package `tokenizers`. The tokens that begin and end a document are those of
tokenizer_config.json beside it, else those that the file itself puts around a text, else those with Llama's names.
"""

import base64
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from titan_lite.config import ConfigError
from titan_lite.data.files import kind_of_file

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# fmt: off
_NAMED = [
    "begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1", "finetune_right_pad_id", "step_id",
    "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag", "image",
]
# fmt: on
SPECIAL_TOKENS = [
    f"<|{name}|>" for name in _NAMED + [f"reserved_special_token_{i}" for i in range(2, 246)]
]

# tiktoken's matcher recurses: it panics on very long texts, and its time is quadratic in the length of a run of one class
# (https://github.com/openai/tiktoken/issues/195). Texts are cut where Llama 3's tokenizer cuts, so that the ids are the same.
_MAX_CHARS, _MAX_RUN = 400_000, 25_000
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_MAX_RUN + 1},}}|(?<!\s)\s{{{_MAX_RUN + 1},}}")
# A long run covers a stretch of half its length that starts at a multiple of that length: checking these stretches is fast.
_HALF = _MAX_RUN // 2
_HALF_RUN = re.compile(rf"\S{{{_HALF}}}|\s{{{_HALF}}}")


class TiktokenTokenizer:
    """A tokenizer of a file in tiktoken's format. It has `vocab_size`, `bos_id`, `eos_id` and the file's `sha256`. Pickles."""

    def __init__(self, ranks: dict[bytes, int], sha256: str):
        special = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        self.ranks, self.special_tokens = ranks, special
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
        return self.encode_document(text)[0 if bos else 1 : -1].tolist()

    def encode_document(self, text: str) -> np.ndarray:
        """Return the ids between BOS and EOS, as uint32, which takes 10% less time and a ninth of the memory of a list."""
        parts = map(self._ids, _cut(text) if len(text) > _MAX_RUN else (text,))
        return np.concatenate(
            ([self.bos_id], *parts, [self.eos_id]), dtype=np.uint32, casting="unsafe"
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids in [0, vocab_size); invalid UTF-8 becomes U+FFFD, special tokens their names."""
        return self._encoding.decode(ids)

    def _ids(self, text: str) -> np.ndarray:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self._encoding.encode_to_numpy(_without_halves(text), disallowed_special=())


class JsonTokenizer:
    """A tokenizer of a tokenizer.json. Its `sha256` is of the file and of the ids of BOS and EOS. Pickles."""

    def __init__(self, content: str, bos_id: int, eos_id: int):
        from tokenizers import Tokenizer as Theirs

        os.environ.setdefault(
            "TOKENIZERS_PARALLELISM", "false"
        )  # one text at a time: threads gain nothing, and warn of forks
        self._content, self.bos_id, self.eos_id = content, bos_id, eos_id
        self._theirs = Theirs.from_str(content)
        self._theirs.no_truncation()  # some files enable it
        self._theirs.no_padding()
        self._theirs.encode_special_tokens = True  # as plain text
        self.vocab_size = 1 + max(self._theirs.get_vocab(with_added_tokens=True).values())
        added = self._theirs.get_added_tokens_decoder()
        self.special_tokens = {token.content: id for id, token in added.items() if token.special}
        self.sha256 = hashlib.sha256(f"{content}\n{bos_id} {eos_id}".encode()).hexdigest()
        # A text may be encoded in pieces, unless the tokenizer adds a prefix to each piece, like Llama 2's.
        self._cuts = (
            self._theirs.decode(self._ids("a") + self._ids("a"), skip_special_tokens=False) == "aa"
        )

    def __reduce__(self) -> Any:  # a pickle of theirs loses encode_special_tokens
        return JsonTokenizer, (self._content, self.bos_id, self.eos_id)

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Return the ids of any text; the name of a special token in it is plain text."""
        ids = (id for piece in (_cut(text) if self._cuts else (text,)) for id in self._ids(piece))
        return [*([self.bos_id] if bos else []), *ids]

    def encode_document(self, text: str) -> np.ndarray:
        """Return the ids between BOS and EOS, as uint32."""
        return np.array([*self.encode(text, bos=True), self.eos_id], dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids in [0, vocab_size); invalid UTF-8 becomes U+FFFD, special tokens their names."""
        return self._theirs.decode(list(ids), skip_special_tokens=False)

    def _ids(self, text: str) -> list[int]:
        """Return the ids of a piece in half the time of their `encode`, which also stores offsets. Raises ConfigError."""
        try:
            return self._theirs.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError):
            return self._theirs.encode_batch_fast(
                [_without_halves(text)], add_special_tokens=False
            )[0].ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic is not an Exception; a pattern that backtracks for too long ends in one
            words = " ".join(str(error).split())[:300]
            wrong = f"model.tokenizer_path: a text of {len(text):,} characters cannot be encoded ({words})"
            raise ConfigError(f"{wrong}; use another tokenizer, or remove that text") from None


Tokenizer = TiktokenTokenizer | JsonTokenizer

# bytes of a file; Llama 3's tokenizer.model has 2 MiB, Gemma 3's tokenizer.json 32 MiB
MOST_TIKTOKEN, MOST_JSON = 2**24, 2**26
_FIX = (
    "use a file in tiktoken's format, such as assets/tokenizer/debug.model or Llama 3's original/tokenizer.model, "
    "or a tokenizer.json"
)


def load_tokenizer(path: str | os.PathLike, key: str = "model.tokenizer_path =") -> Tokenizer:
    """Load a file in tiktoken's format, or a tokenizer.json if the name ends in .json.

    key: the beginning of errors, which says how the user named the file. Raises ConfigError if the file cannot be read, is not a
    tokenizer, or does not say which tokens begin and end a document.
    """
    return (
        _load_json(Path(path), key)
        if os.fspath(path).endswith(".json")
        else load_tiktoken(path, key)
    )


def load_tiktoken(
    path: str | os.PathLike, key: str = "model.tokenizer_path ="
) -> TiktokenTokenizer:
    """Load a file in tiktoken's format. Raises ConfigError if it cannot be read, or has another format."""
    wrong = f'{key} "{os.fspath(path)}"'
    content = _read(path, wrong, MOST_TIKTOKEN)
    others = {  # files with such names
        "a SentencePiece model, like Llama 2's; use the tokenizer.json of that tokenizer": content[
            :1
        ]
        == b"\n"
        and b"<unk>" in content,
        "a safetensors file, which has weights; use the tokenizer's file": content[8:10] == b'{"',
        "JSON, and its name does not end in .json; rename it": content[:200].lstrip()[:1] == b"{",
    }
    for what, is_it in others.items():
        if is_it:
            raise ConfigError(f"{wrong} is {what}, or {_FIX}")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            text, rank_text = line.split()
            token, rank = base64.b64decode(text, validate=True), int(rank_text)
        except ValueError:
            shown = line[:40].decode(errors="replace")
            raise ConfigError(
                f"{wrong}, line {number}: {shown!r} is not a base64 token, a space and a rank; {_FIX}"
            ) from None
        if rank != len(ranks):
            raise ConfigError(
                f"{wrong}, line {number}: rank {rank} where {len(ranks)} should follow; {_FIX}"
            )
        if token in ranks or not token:
            what = f"token {token!r} of rank {ranks[token]} again" if token else "an empty token"
            raise ConfigError(f"{wrong}, line {number}: {what}; {_FIX}")
        ranks[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:  # tiktoken would panic at the first text that has such a byte
        raise ConfigError(
            f"{wrong}, line {len(ranks)}: the file ends without a token for {len(missing)} of the 256 bytes, "
            f"such as {bytes(missing[:1])!r}; {_FIX}"
        )
    return TiktokenTokenizer(ranks, hashlib.sha256(content).hexdigest())


def _load_json(path: Path, key: str) -> JsonTokenizer:
    wrong = f'{key} "{path}"'
    try:
        from tokenizers import Tokenizer as Theirs
    except ImportError:
        raise ConfigError(
            f"{wrong}: a tokenizer.json needs the package tokenizers, which is not installed; "
            "use pip install 'titan_lite[tokenizers]', or a file in tiktoken's format"
        ) from None
    raw = _read(path, wrong, MOST_JSON)
    try:
        content = raw.decode("utf-8")
        theirs = Theirs.from_str(content)
        plain, whole = (
            theirs.encode("a", add_special_tokens=special).ids for special in (False, True)
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except (
        BaseException
    ) as error:  # theirs is Exception itself, and a panic is only a BaseException
        raise _no_tokenizer(wrong, error) from None
    at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    beside = _tokens_beside(path, wrong)
    ids = []
    for name, verb, around, usual in (
        ("bos_token", "begins", whole[:at], ("<|begin_of_text|>", "<s>")),
        ("eos_token", "ends", whole[at + len(plain) :], ("<|end_of_text|>", "</s>")),
    ):
        if name in beside:
            known: Sequence[int | None] = [theirs.token_to_id(beside[name])]
            lacks = f"has no token {beside[name]!r}, which tokenizer_config.json beside it calls {name}; correct one of them"
        else:
            known = around if len(around) == 1 else [theirs.token_to_id(token) for token in usual]
            fix = f'use a tokenizer_config.json beside it with "{name}", or a token called {" or ".join(usual)}'
            lacks = f"does not say what {verb} a document; {fix}"
        id = next((id for id in known if id is not None), None)
        if id is None:
            raise ConfigError(f"{wrong} {lacks}")
        ids.append(id)
    try:
        return JsonTokenizer(content, *ids)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise _no_tokenizer(wrong, error) from None


def _no_tokenizer(wrong: str, error: BaseException) -> ConfigError:
    return ConfigError(
        f"{wrong}: cannot be read as a tokenizer.json ({' '.join(str(error).split())[:300]}); {_FIX}"
    )


def _tokens_beside(path: Path, wrong: str) -> dict[str, str]:
    """Return bos_token and eos_token of the tokenizer_config.json beside the file, if it has them. Raises ConfigError."""
    config = path.with_name("tokenizer_config.json")
    if not config.exists():
        return {}
    raw = _read(config, f"{wrong}: {config}", MOST_TIKTOKEN)
    try:
        content = json.loads(raw)
        tokens = {key: content.get(key) for key in ("bos_token", "eos_token")}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{wrong}: {config} cannot be read ({error}); repair or remove it"
        ) from None
    contents = {
        key: token.get("content") if isinstance(token, dict) else token
        for key, token in tokens.items()
    }
    return {
        key: name for key, name in contents.items() if isinstance(name, str) and name.isprintable()
    }


def _read(path: str | os.PathLike, wrong: str, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes. Raises ConfigError."""
    try:
        # O_NONBLOCK: opening a pipe without a writer does not block
        with open(
            path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)
        ) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{wrong} is {kind_of_file(path)}, not a file; {_FIX}")
            content = file.read(most + 1)
        if len(content) > most:
            raise ConfigError(
                f"{wrong} is larger than {most >> 20} MiB, the most that a tokenizer may have; {_FIX}"
            )
        return content
    except IsADirectoryError:
        names = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
        fix = next((f"use its {name}" for name in names if Path(path, name).is_file()), _FIX)
        raise ConfigError(f"{wrong} cannot be read: it is a folder; {fix}") from None
    except OSError as error:
        raise ConfigError(f"{wrong}: cannot be read ({error.strerror}); {_FIX}") from None


def _without_halves(text: str) -> str:
    """Replace each half of a surrogate pair by U+FFFD, as tiktoken's `encode` does."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _cut(text: str) -> Iterator[str]:
    """Cut a text into pieces of at most 400,000 characters, with runs of at most 25,000 spaces or of other characters."""
    for start in range(0, len(text), _MAX_CHARS):
        piece = text[start : start + _MAX_CHARS]
        begin = 0
        if any(_HALF_RUN.match(piece, at) for at in range(0, len(piece) - _HALF, _HALF)):
            for run in _LONG_RUN.finditer(piece):
                for end in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                    yield piece[begin:end]
                    begin = end
        yield piece[begin:]
