"""`titan-lite verify` finds what no structure of a user's own family shows."""

import re
from pathlib import Path

import pytest
from tiny import DEBUG, DEBUG_TOKENIZER

from titan_lite.tools.verify import command as program
from titan_lite.tools.verify.proxy import KEYS

pytestmark = pytest.mark.ranks(2)

GATED = (Path(__file__).parents[1] / "own_families/gated.py").read_text()


def changed(*pairs):
    """The source of the family with other lines."""
    text = GATED
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


# A block that mixes each token with the one before it, outside of attention: a rank has only its own
# tokens there.
TOKEN_SHIFT = changed(
    (
        "def build_block(config):\n    return TransformerBlock(",
        "class Shifted(TransformerBlock):\n"
        "    def forward(self, x, cos, sin, mask=None):\n"
        "        before = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]\n"
        "        return super().forward((x + before) / 2, cos, sin, mask)\n\n\n"
        "def build_block(config):\n    return Shifted(",
    )
)
# A norm over all heads of the queries, of which a rank has its own: the mean square is of those.
NORM_OVER_HEADS = changed(
    (
        "class GatedAttention",
        "class HeadsNorm(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * x.square().mean(-1, keepdim=True).add(1e-5).rsqrt()\n\n\n"
        "class GatedAttention",
    ),
    ("        self.gate = ", "        self.q_norm = HeadsNorm()\n        self.gate = "),
    (
        "        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))\n",
        "        q, k, v = self.q_norm(self.wq(x) ** 2), self.wk(x), self.wv(x)\n"
        "        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))\n",
    ),
)


@pytest.mark.parametrize(
    ("text", "layout", "module"),
    [
        (TOKEN_SHIFT, "tp=2", "layers.0.attention.wq"),
        pytest.param(TOKEN_SHIFT, "cp=2", "layers.0.attention_norm", marks=pytest.mark.release),
    ],
)
def test_the_proxy_finds_what_no_structure_shows(text, layout, module, tmp_path, capfd):
    file = tmp_path / "family.py"
    file.write_text(text)
    names = [f"--model.name={file}", f"--model.tokenizer_path={DEBUG_TOKENIZER}"]
    degree = f"--parallelism.{KEYS[layout.removesuffix('=2')]}=2"
    options = ["--processes", "--world-size", "2", "--steps", "1", *names, degree]
    assert program.main([str(DEBUG), *options]) == 1
    (line,) = re.findall(rf"^{layout} .*$", capfd.readouterr().out, re.M)
    assert re.search(rf"  {re.escape(module)} +DIFFERS$", line)


@pytest.mark.slow
def test_the_first_wrong_line_of_a_family_is_named(tmp_path, capsys):
    file = tmp_path / "family.py"
    file.write_text(NORM_OVER_HEADS)
    before, _ = NORM_OVER_HEADS.split("return x * x.square().mean")
    names = [f"--model.name={file}", f"--model.tokenizer_path={DEBUG_TOKENIZER}"]
    degree = f"--parallelism.{KEYS['tp']}=2"
    assert program.main([str(DEBUG), "--world-size", "2", *names, degree]) == 1
    (named,) = re.findall(r"^first wrong value: .*$", capsys.readouterr().out, re.M)
    assert named.endswith(f" at {file}:{1 + before.count(chr(10))}")
