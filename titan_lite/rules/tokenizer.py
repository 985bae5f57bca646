"""Rules of model.tokenizer_path: a tokenizer that fits the model and the weights it begins with."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from titan_lite.config import Config, ConfigError
from titan_lite.config.errors import shown
from titan_lite.config.weights_folder import TOKENIZER_FILES
from titan_lite.models.shapes import shape_of
from titan_lite.rules.mistakes import Inputs, Mistake, rule_of_inputs, rule_of_keys, told
from titan_lite.rules.model import initial_weights

if TYPE_CHECKING:
    from titan_lite.data.tokenizer import Tokenizer


# text that two tokenizers are compared on
SAMPLE = "The 7 quick foxes' den\n\tdef f(x): return x ** 2  # naïve, 汉字, привет"


@rule_of_keys
def there_is_a_tokenizer(config: Config) -> Iterator[Mistake]:
    path = config.model.tokenizer_path
    weights = config.checkpoint.initial_load_path
    if not path:
        why = "names no file"
        if weights and Path(weights).is_dir():  # whose tokenizer would stand for the empty path
            names = " nor ".join(TOKENIZER_FILES[:2])
            why += f", and {weights} (checkpoint.initial_load_path) has neither {names}"
        instead = (
            "the model's tokenizer.json or tokenizer.model (docs/first-real-run.md, step 2), or"
            ' "../assets/tokenizer/debug.model"'
        )
        yield Mistake("model.tokenizer_path", path, why, instead)


def read_tokenizer(config: Config) -> tuple["Tokenizer | None", list[Mistake]]:
    """Return the tokenizer, or None and why there is none; a missing path is told by a rule."""
    from titan_lite.data.tokenizer import load_tokenizer

    try:
        path = config.model.tokenizer_path
        mistakes = list(only_the_weights_have_a_tokenizer(config))
        return (load_tokenizer(path) if path and not mistakes else None), mistakes
    except ConfigError as error:
        return None, told(error, "model.tokenizer_path")


@rule_of_inputs
def the_vocabulary_is_large_enough(config: Config, inputs: Inputs) -> Iterator[Mistake]:
    tokenizer = inputs.tokenizer
    model = inputs.layout.model if inputs.layout else shape_of(config.model)
    if tokenizer and tokenizer.vocab_size > model.vocab_size:
        size = model.vocab_size
        named = "model.vocab_size" if config.model.vocab_size else f"flavor {config.model.flavor}"
        yield Mistake(
            key="model.tokenizer_path",
            value=config.model.tokenizer_path,
            why=f"has {tokenizer.vocab_size} tokens, but {named} has room for {size}",
            instead=(
                "that flavor's tokenizer, a flavor with room, or model.vocab_size ="
                f" {tokenizer.vocab_size}"
            ),
        )


def only_the_weights_have_a_tokenizer(config: Config) -> Iterator[Mistake]:
    path = config.model.tokenizer_path
    weights = None if Path(path).exists() else initial_weights(config)
    if weights is not None and Path(weights.tokenizer).is_file():
        yield Mistake(
            key="model.tokenizer_path",
            value=path,
            why=f"is not there, but checkpoint.initial_load_path has {weights.tokenizer}",
            instead='that, or tokenizer_path = ""',
        )


@rule_of_inputs
def the_tokenizer_is_that_of_the_weights(config: Config, inputs: Inputs) -> Iterator[Mistake]:
    """Text has the ids that the initial weights know.

    One tokenizer may be two files, such as Llama's tokenizer.model and tokenizer.json.
    """
    from titan_lite.data.tokenizer import load_tokenizer

    tokenizer = inputs.tokenizer
    if tokenizer is None:
        return
    weights = initial_weights(config)
    path = config.model.tokenizer_path
    if weights is None or weights.tokenizer in ("", path) or not Path(weights.tokenizer).is_file():
        return
    try:
        theirs = load_tokenizer(weights.tokenizer)
    except ConfigError:  # such as SentencePiece's, which is not read
        return
    if theirs.sha256 == tokenizer.sha256:
        return
    other = _other_token(tokenizer, theirs)
    if other or theirs.encode(SAMPLE) != tokenizer.encode(SAMPLE):
        yield Mistake(
            key="model.tokenizer_path",
            value=path,
            why=(
                "gives text other ids than the tokenizer of checkpoint.initial_load_path,"
                f" {weights.tokenizer}{other}"
            ),
            instead='that, or tokenizer_path = ""',
        )


def _other_token(tokenizer: "Tokenizer", theirs: "Tokenizer") -> str:
    """Return words for the first id that is another token of text there, "" if none is.

    Special tokens may have other names, as Llama 3's reserved ones, and one may have more tokens.
    """
    ours = tokenizer.pieces()
    others = theirs.pieces()
    ids = [id for id, piece in others.items() if ours.get(id, piece) != piece]
    if not ids:
        return ""
    first = min(ids)
    return f" (first {first}: {shown(ours[first])}, and there {shown(others[first])})"
