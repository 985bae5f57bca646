"""Check the files that a recipe reads: its tokenizer and its data.

Needs no torch, so one process can check before a run.

tokenizer = check_inputs(config, layout)
"""

from titan_lite.config import Config, ConfigError
from titan_lite.data.documents import check_data
from titan_lite.data.prepared import check_prepared
from titan_lite.data.tokenizer import Tokenizer, load_tokenizer
from titan_lite.distributed.layout import Layout


def check_inputs(config: Config, layout: Layout) -> Tokenizer:
    """Check that the tokenizer fits the model and that documents can be read. Return the tokenizer.

    Raises ConfigError.
    """
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    if tokenizer.vocab_size > layout.model.vocab_size:
        wrong = (
            f'model.tokenizer_path = "{config.model.tokenizer_path}" has {tokenizer.vocab_size}'
            " tokens, but"
        )
        room = "model.vocab_size" if config.model.vocab_size else f"flavor {config.model.flavor}"
        fix = (
            "use that flavor's tokenizer, a flavor with room, or model.vocab_size ="
            f" {tokenizer.vocab_size}"
        )
        raise ConfigError(f"{wrong} {room} has room for {layout.model.vocab_size}; {fix}")
    check_data(config.data)
    for _, part in config.data.mixture():
        if part.dataset == "prepared":
            check_prepared(part, tokenizer.sha256, tokenizer.vocab_size)
    return tokenizer
