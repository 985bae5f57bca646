"""Text <-> token ids, from a file in tiktoken's format, by the rules of Llama 3, or from Hugging Face's tokenizer.json.

    tokenizer = load_tokenizer("assets/tokenizer/debug.model")
    tokenizer.encode("import os", bos=True)      # [1792, 759, 665]
    tokenizer.decode([759, 665])                 # "import os"

A line in tiktoken's format is a token's bytes in base64, a space and its rank: the order in which byte-pair encoding merges,
and the token's id. Llama 3's own `tokenizer.model` is such a file. 256 special tokens follow the ranks, so that a file of
1,792 ranks makes a vocabulary of 2,048. Names, ids and the splitting pattern are those of
https://github.com/meta-llama/llama-models/blob/main/models/llama3/tokenizer.py

A file whose name ends in .json is read by the package `tokenizers`. Which of its tokens begin and end a document is what
tokenizer_config.json beside it says, else what the file itself puts around a text, else Llama's names.
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
SPECIAL_TOKENS = [f"<|{name}|>" for name in _NAMED + [f"reserved_special_token_{i}" for i in range(2, 246)]]

# tiktoken's matcher recurses: it panics on very long texts, and its time grows with the square of a run of one class
# (https://github.com/openai/tiktoken/issues/195). Cut where Llama 3's tokenizer cuts, so that the ids are the same.
_MAX_CHARS, _MAX_RUN = 400_000, 25_000
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_MAX_RUN + 1},}}|(?<!\s)\s{{{_MAX_RUN + 1},}}")
# A long run fills one of the stretches of half its length that start at multiples of it: looking there costs next to nothing.
_HALF = _MAX_RUN // 2
_HALF_RUN = re.compile(rf"\S{{{_HALF}}}|\s{{{_HALF}}}")


class TiktokenTokenizer:
    """`vocab_size` tokens, `bos_id` and `eos_id` among them; `sha256` of the file tells tokenizers apart. Pickles."""

    def __init__(self, ranks: dict[bytes, int], sha256: str):
        special = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        self.ranks, self.special_tokens = ranks, special
        self._encoding = tiktoken.Encoding(
            name=f"titan_lite-{sha256}", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size = len(ranks) + len(special)
        self.bos_id = special["<|begin_of_text|>"]
        self.eos_id = special["<|end_of_text|>"]
        self.sha256 = sha256

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Ids of any text; what looks like a special token in it is text as any other."""
        return self.encode_document(text)[0 if bos else 1 : -1].tolist()

    def encode_document(self, text: str) -> np.ndarray:
        """The same between BOS and EOS, as uint32: without a Python integer for each, a tenth quicker, a ninth of the memory."""
        parts = map(self._ids, _cut(text) if len(text) > _MAX_RUN else (text,))
        return np.concatenate(([self.bos_id], *parts, [self.eos_id]), dtype=np.uint32, casting="unsafe")

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids in [0, vocab_size); bytes that are no UTF-8 become U+FFFD, special tokens their names."""
        return self._encoding.decode(ids)

    def _ids(self, text: str) -> np.ndarray:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self._encoding.encode_to_numpy(_without_halves(text), disallowed_special=())


class JsonTokenizer:
    """The same of a tokenizer.json; its `sha256` is of the file and of the ids of BOS and EOS. Pickles."""

    def __init__(self, content: str, bos_id: int, eos_id: int):
        from tokenizers import Tokenizer as Theirs

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time: threads gain nothing, and warn of forks
        self._content, self.bos_id, self.eos_id = content, bos_id, eos_id
        self._theirs = Theirs.from_str(content)
        self._theirs.no_truncation()  # which some files ask for, silently
        self._theirs.no_padding()
        self._theirs.encode_special_tokens = True  # as the text that they are
        self.vocab_size = 1 + max(self._theirs.get_vocab(with_added_tokens=True).values())
        added = self._theirs.get_added_tokens_decoder()
        self.special_tokens = {token.content: id for id, token in added.items() if token.special}
        self.sha256 = hashlib.sha256(f"{content}\n{bos_id} {eos_id}".encode()).hexdigest()
        # Pieces are encoded as a whole would be, but where each is given a beginning of its own, as by Llama 2's.
        self._cuts = self._theirs.decode(self._ids("a") + self._ids("a"), skip_special_tokens=False) == "aa"

    def __reduce__(self) -> Any:  # theirs forget encode_special_tokens
        return JsonTokenizer, (self._content, self.bos_id, self.eos_id)

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Ids of any text; what looks like a special token in it is text as any other."""
        ids = (id for piece in (_cut(text) if self._cuts else (text,)) for id in self._ids(piece))
        return [*([self.bos_id] if bos else []), *ids]

    def encode_document(self, text: str) -> np.ndarray:
        """The same between BOS and EOS as uint32."""
        return np.array([*self.encode(text, bos=True), self.eos_id], dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids in [0, vocab_size); bytes that are no UTF-8 become U+FFFD, special tokens their names."""
        return self._theirs.decode(list(ids), skip_special_tokens=False)

    def _ids(self, text: str) -> list[int]:
        """Twice as fast as their encode, which keeps the place of every token in the text."""
        try:
            return self._theirs.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError):
            return self._theirs.encode_batch_fast([_without_halves(text)], add_special_tokens=False)[0].ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic is no Exception: a pattern that would look for hours ends in one
            words = " ".join(str(error).split())[:300]
            raise ConfigError(f"model.tokenizer_path: a text of {len(text):,} characters cannot be encoded ({words})") from None


Tokenizer = TiktokenTokenizer | JsonTokenizer

# bytes of a file, which is read whole: Llama 3's tokenizer.model has 2 MiB, Gemma 3's tokenizer.json 32
MOST_TIKTOKEN, MOST_JSON = 2**24, 2**26
_WORKS = (
    "name a file in tiktoken's format, such as assets/tokenizer/debug.model or Llama 3's original/tokenizer.model, "
    "or a tokenizer.json"
)


def load_tokenizer(path: str | os.PathLike, key: str = "model.tokenizer_path =") -> Tokenizer:
    """The tokenizer of a file in tiktoken's format, or of a tokenizer.json where the name ends in .json.

    key: how the user named the file, which errors begin with. Raises ConfigError: the file cannot be read, is no tokenizer, or
    does not say what begins and ends a document.
    """
    return _load_json(Path(path), key) if os.fspath(path).endswith(".json") else load_tiktoken(path, key)


def load_tiktoken(path: str | os.PathLike, key: str = "model.tokenizer_path =") -> TiktokenTokenizer:
    """Raises ConfigError for a file that cannot be read, or has a line that is not what tiktoken's format asks for."""
    wrong = f'{key} "{os.fspath(path)}"'
    content = _read(path, wrong, MOST_TIKTOKEN)
    others = {  # that go by such names
        "a SentencePiece model, as Llama 2's; the tokenizer.json of such a tokenizer": content[:1] == b"\n"
        and b"<unk>" in content,
        "a safetensors file, which has weights; a tokenizer's file": content[8:10] == b'{"',
        "JSON, and its name does not end in .json; one that does": content[:200].lstrip()[:1] == b"{",
    }
    for what, is_it in others.items():
        if is_it:
            raise ConfigError(f"{wrong} is {what} would work; {_WORKS}")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            text, rank_text = line.split()
            token, rank = base64.b64decode(text, validate=True), int(rank_text)
        except ValueError:
            shown = line[:40].decode(errors="replace")
            raise ConfigError(f"{wrong}, line {number}: {shown!r} is not a base64 token, a space and a rank; {_WORKS}") from None
        if rank != len(ranks):
            raise ConfigError(f"{wrong}, line {number}: rank {rank} where {len(ranks)} should follow; {_WORKS}")
        if token in ranks or not token:
            what = f"token {token!r} of rank {ranks[token]} again" if token else "an empty token"
            raise ConfigError(f"{wrong}, line {number}: {what}; {_WORKS}")
        ranks[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:  # tiktoken would panic at the first text that has such a byte
        raise ConfigError(
            f"{wrong}, line {len(ranks)}: the file ends without a token for {len(missing)} of the 256 bytes, "
            f"such as {bytes(missing[:1])!r}; {_WORKS}"
        )
    return TiktokenTokenizer(ranks, hashlib.sha256(content).hexdigest())


def _load_json(path: Path, key: str) -> JsonTokenizer:
    wrong = f'{key} "{path}"'
    try:
        from tokenizers import Tokenizer as Theirs
    except ImportError:
        raise ConfigError(
            f"{wrong}: a tokenizer.json needs the package tokenizers, which is not installed; "
            "pip install 'titan_lite[tokenizers]' brings it, and a file in tiktoken's format works without"
        ) from None
    raw = _read(path, wrong, MOST_JSON)
    try:
        content = raw.decode("utf-8")
        theirs = Theirs.from_str(content)
        plain, whole = (theirs.encode("a", add_special_tokens=special).ids for special in (False, True))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # theirs is Exception itself, and a panic is not even that
        raise _no_tokenizer(wrong, error) from None
    at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    said = _said_beside(path, wrong)
    ids = []
    for name, verb, around, usual in (
        ("bos_token", "begins", whole[:at], ("<|begin_of_text|>", "<s>")),
        ("eos_token", "ends", whole[at + len(plain) :], ("<|end_of_text|>", "</s>")),
    ):
        if name in said:
            known: Sequence[int | None] = [theirs.token_to_id(said[name])]
            lacks = f"has no token {said[name]!r}, which tokenizer_config.json beside it calls {name}"
        else:
            known = around if len(around) == 1 else [theirs.token_to_id(token) for token in usual]
            works = f'a tokenizer_config.json beside it with "{name}" would work, or a token called {" or ".join(usual)}'
            lacks = f"does not say what {verb} a document; {works}"
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
    return ConfigError(f"{wrong}: cannot be read as a tokenizer.json ({' '.join(str(error).split())[:300]}); {_WORKS}")


def _said_beside(path: Path, wrong: str) -> dict[str, str]:
    """bos_token and eos_token of the tokenizer_config.json beside it, those of them that it has."""
    config = path.with_name("tokenizer_config.json")
    if not config.exists():
        return {}
    raw = _read(config, f"{wrong}: {config}", MOST_TIKTOKEN)
    try:
        said = json.loads(raw)
        tokens = {key: said.get(key) for key in ("bos_token", "eos_token")}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{wrong}: {config} cannot be read ({error}); repair it or take it away") from None
    contents = {key: token.get("content") if isinstance(token, dict) else token for key, token in tokens.items()}
    return {key: content for key, content in contents.items() if isinstance(content, str) and content.isprintable()}


def _read(path: str | os.PathLike, wrong: str, most: int) -> bytes:
    """All of a file that has at most so many bytes. Raises ConfigError."""
    try:
        # without waiting for who might write to a pipe
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{wrong} is {kind_of_file(path)}, and no file; {_WORKS}")
            content = file.read(most + 1)
        if len(content) > most:
            raise ConfigError(f"{wrong} has more than {most >> 20} MiB, and is no tokenizer; {_WORKS}")
        return content
    except IsADirectoryError:
        names = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
        works = next((f"its {name} would work" for name in names if Path(path, name).is_file()), _WORKS)
        raise ConfigError(f"{wrong} is a folder, and cannot be read as a tokenizer; {works}") from None
    except OSError as error:
        raise ConfigError(f"{wrong}: cannot be read ({error.strerror}); {_WORKS}") from None


def _without_halves(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, as tiktoken's own encode makes it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _cut(text: str) -> Iterator[str]:
    """Pieces of at most 400,000 characters without a run of more than 25,000 of whitespace or of anything else."""
    for start in range(0, len(text), _MAX_CHARS):
        piece = text[start : start + _MAX_CHARS]
        begin = 0
        if any(_HALF_RUN.match(piece, at) for at in range(0, len(piece) - _HALF, _HALF)):
            for run in _LONG_RUN.finditer(piece):
                for end in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                    yield piece[begin:end]
                    begin = end
        yield piece[begin:]
