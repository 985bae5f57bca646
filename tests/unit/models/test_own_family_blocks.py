"""Blocks of a user's own family that are refused before anything starts, by what they show without
memory; tests/integration/test_own_family.py trains those that are admitted.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import DEBUG, DEBUG_TOKENIZER, ROOT
from torch import nn

from titan_lite.config import ConfigError, load_config
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.parallelize import ParallelModel
from titan_lite.rules import check
from titan_lite.tools.generate import Decoder

GATED = ROOT / "tests/own_families/gated.py"
RESULT = "self.wo(out.flatten(-2) * torch.sigmoid(self.gate(x)))"
GATE = "        self.gate = nn.Linear(config.dim, width, bias=False)\n"


def checked(file: Path, *changes, options=(), ranks=2):
    """Check a run of the gated family, whose text is changed, and return its layout."""
    text = GATED.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    names = [f"--model.name={file}", f"--model.tokenizer_path={DEBUG_TOKENIZER}"]
    config = load_config(DEBUG, [*names, *options])
    layout = Layout.from_config(config, ranks)
    check(config, layout)
    return layout


def mistake(file: Path, *changes, options=(), ranks=2):
    with pytest.raises(ConfigError) as error:
        checked(file, *changes, options=options, ranks=ranks)
    message = str(error.value)
    assert message.startswith(f'model.name = "{file}"')
    assert "\n" not in message
    return message


def result(words):
    return (RESULT, words)


RANDOM = {
    "a function": (
        [result(f"torch.nn.functional.dropout({RESULT}, 0.1)")],
        "attention calls aten.bernoulli_.float",
    ),
    "a module": (
        [
            (GATE, f"{GATE}        self.noise = nn.Dropout(0.1)\n"),
            result(f"self.noise({RESULT})"),
        ],
        "attention.noise calls aten.bernoulli_.float",
    ),
    "attention": (
        [
            ("import torch\n", "import torch\nfrom torch.nn import functional as F\n"),
            (
                "self.attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, mask)",
                "F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)),"
                " dropout_p=0.1, enable_gqa=True).transpose(1, 2)",
            ),
        ],
        "attention calls aten.bernoulli_.float",
    ),
    "noise": ([result(f"{RESULT} + torch.randn_like(x)")], "attention calls aten.randn_like"),
    "noise on the host": (
        [result(f'{RESULT} + torch.rand(1, device="cpu").item()')],
        "attention calls aten.rand.default",
    ),
    "Python": ([result(f"{RESULT} * __import__('random').random()")], "calls Python's random"),
    "backward": (
        [
            (
                "class GatedAttention",
                "class Rounded(torch.autograd.Function):\n"
                "    @staticmethod\n"
                "    def forward(ctx, x):\n"
                "        return x.clone()\n\n"
                "    @staticmethod\n"
                "    def backward(ctx, grad):\n"
                "        return grad + torch.rand_like(grad)\n\n\n"
                "class GatedAttention",
            ),
            result(f"Rounded.apply({RESULT})"),
        ],
        "backward calls aten.rand_like",
    ),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_refused(name, tmp_path):
    changes, words = RANDOM[name]
    message = mistake(tmp_path / "family.py", *changes)
    assert "block draws random numbers" in message
    assert words in message
    assert "dropout and noise are not supported" in message


def test_dropout_of_nothing_draws_nothing(tmp_path):
    noise = (GATE, f"{GATE}        self.noise = nn.Dropout(0.0)\n")
    checked(tmp_path / "family.py", noise, result(f"self.noise({RESULT})"))


def test_validation_evaluates_and_training_goes_on():
    modes = []
    stage = SimpleNamespace(model=nn.Sequential(nn.Identity()))
    layer = stage.model[0]

    def evaluate(batch):
        modes.append(layer.training)
        if batch is None:
            raise ValueError
        return torch.zeros(())

    model = ParallelModel.__new__(ParallelModel)
    model.stages = [stage]
    model.runner = SimpleNamespace(evaluate=evaluate)
    model.evaluate("a batch")
    assert layer.training
    with pytest.raises(ValueError):
        model.evaluate(None)
    assert layer.training
    assert modes == [False, False]


def test_generate_evaluates(tmp_path):
    layout = checked(tmp_path / "family.py")
    decoder = Decoder(layout.model)
    assert not any(module.training for module in decoder.modules())
