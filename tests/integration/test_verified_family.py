"""The launcher verifies a user's own family before a run: what no structure shows is found, and what
is right is verified once.
"""

import os
import re
from pathlib import Path

import pytest
from commands import torchrun
from tiny import DEBUG, DEBUG_TOKENIZER, NO_VALIDATION, SMALL, steps

from titan_lite import launch
from titan_lite.config import ConfigError, load_config
from titan_lite.config.families import file_digest
from titan_lite.tools.verify import command as program
from titan_lite.tools.verify.own_family import Verification
from titan_lite.tools.verify.twin import parse_layout

pytestmark = pytest.mark.ranks(2)

GATED = (Path(__file__).parents[1] / "own_families/gated.py").read_text()
TP = ["--parallelism.tensor_parallel_degree=2"]


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
# Gate and up in one matrix, of which a rank has rows of the gate alone, or of up.
GATE_AND_UP = changed(
    (
        "def build_block(config):\n    return TransformerBlock(config, GatedAttention(config))\n",
        "class FeedForward(nn.Module):\n"
        "    def __init__(self, config):\n"
        "        super().__init__()\n"
        "        self.w1 = nn.Linear(config.dim, 2 * config.hidden_dim, bias=False)\n"
        "        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)\n\n"
        "    def forward(self, x):\n"
        "        gate, up = self.w1(x).chunk(2, -1)\n"
        "        return self.w2(torch.sigmoid(gate) * up)\n\n\n"
        "def build_block(config):\n"
        "    block = TransformerBlock(config, GatedAttention(config))\n"
        "    block.feed_forward = FeedForward(config)\n"
        "    return block\n",
    ),
    (
        "        **feed_forward_parameters(config),\n",
        '        "feed_forward.w1.weight": (2 * config.hidden_dim, config.dim),\n'
        '        "feed_forward.w2.weight": (config.dim, config.hidden_dim),\n',
    ),
    ('"attention.gate": "columns"', '"attention.gate": "columns", "feed_forward.w1": "columns"'),
)


def recipe_of(file, text, *options):
    file.write_text(text)
    return load_config(
        DEBUG, [f"--model.name={file}", f"--model.tokenizer_path={DEBUG_TOKENIZER}", *options]
    )


@pytest.mark.parametrize(
    ("text", "layout", "module"),
    [
        (TOKEN_SHIFT, "tp=2", "layers.0.attention.wq"),
        pytest.param(TOKEN_SHIFT, "cp=2", "layers.0.attention_norm", marks=pytest.mark.release),
        pytest.param(GATE_AND_UP, "tp=2", "layers.0.feed_forward.w2", marks=pytest.mark.slow),
    ],
)
def test_the_twin_finds_what_no_structure_shows(text, layout, module, tmp_path, capfd):
    config = recipe_of(tmp_path / "family.py", text)
    assert not program.verify(config, [parse_layout(layout)], steps=1)
    (line,) = re.findall(rf"^{layout} .*$", capfd.readouterr().out, re.M)
    assert re.search(rf"  {re.escape(module)} +DIFFERS$", line)


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Variables that the launcher may change, and an empty cache."""
    monkeypatch.setattr(os, "environ", {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")})
    os.environ |= {"NGPU": "2", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ


def launched(file, *options):
    words = [f"--model.name={file}", f"--job.dump_folder={file.parent / 'run'}", *options]
    return launch.launcher_options([str(DEBUG), *words])


@pytest.mark.slow
def test_the_launcher_verifies_once_and_again_what_has_changed(environment, tmp_path, capfd):
    file = tmp_path / "family.py"
    file.write_text(GATED)
    assert "-m" in launched(file, *TP)
    lines = capfd.readouterr().err
    assert (
        f'titan_lite: model.name = "{file}" is not one of titan_lite\'s: verifying it on' in lines
    )
    assert re.search(
        r"titan_lite: tp=2 computes what one process does: verified in \d+ s with sequences of 32"
        r" tokens\n",
        lines,
    )
    launched(file, *TP, "--optimizer.lr=1e-3")
    launched(file)  # data parallelism alone
    assert "verifying" not in capfd.readouterr().err
    changed = tmp_path / "changed.py"
    changed.write_text(NORM_OVER_HEADS)
    launched(changed, *TP, "--model.no-verify")
    assert "verifying" not in capfd.readouterr().err
    with pytest.raises(ConfigError) as error:
        launched(changed, *TP)
    assert str(error.value).startswith(
        f'model.name = "{changed}": on tp=2 it does not compute what'
    )
    assert re.search(
        r"^tp=2 .*  layers\.0\.attention\.q_norm +DIFFERS$", capfd.readouterr().err, re.M
    )


def test_a_family_that_cannot_be_verified_is_refused(environment, tmp_path):
    file = tmp_path / "family.py"
    file.write_text(changed(('flavors={"debug": ', 'flavors={"small": ')))
    with pytest.raises(ConfigError, match="has no flavor debug, which verify trains; add a small"):
        launched(file, *TP, "--model.flavor=small")
    assert "-m" in launched(file, *TP, "--model.flavor=small", "--model.no-verify")


def test_a_verdict_is_of_the_sources_the_layout_and_the_versions(
    environment, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "gates").mkdir()
    (tmp_path / "gates/__init__.py").write_text("from .sigmoid import gate\n")
    sigmoid = tmp_path / "gates/sigmoid.py"
    sigmoid.write_text("from torch import sigmoid as gate\n")
    text = changed(
        ("import torch\n", "import torch\nfrom gates import gate\n"), ("torch.sigmoid(", "gate(")
    )
    file = tmp_path / "family.py"
    config = recipe_of(file, text, *TP)
    verdict = Verification(config, 2).path
    assert Verification(config, 2).path == verdict
    others = {Verification(config, 4).path}
    compiled = config.compile.replace(enable=True)
    others.add(Verification(config.replace(compile=compiled), 2).path)
    monkeypatch.setattr("titan_lite.__version__", "0.9")
    others.add(Verification(config, 2).path)
    monkeypatch.undo()
    monkeypatch.setattr(os, "environ", environment)
    sigmoid.write_text("from torch import tanh as gate\n")
    file_digest.cache_clear()  # as in another process
    others.add(Verification(config, 2).path)
    assert len(others - {verdict}) == 4


def test_other_nodes_wait_for_the_first(monkeypatch, capfd):
    monkeypatch.setattr(launch.endpoint, "CONNECT_LIMIT", 0.2)
    monkeypatch.setattr(launch, "VERIFY_LIMIT", 0.3)
    with pytest.raises(launch.endpoint.EndpointError, match=r"tried to connect for 0\.5 s"):
        launch.check_endpoint("127.0.0.1", 9, "1", verifies=True)
    assert (
        "the node of RDZV_ENDPOINT=127.0.0.1:9 verifies the family first: waiting for it, at most"
        " 0.5 s" in capfd.readouterr().err
    )


@pytest.mark.release
def test_ranks_without_the_launcher_say_that_nothing_was_verified(tmp_path):
    file = tmp_path / "family.py"
    file.write_text(GATED)
    options = [*SMALL, *NO_VALIDATION, *steps(1), *TP, f"--model.name={file}"]
    done = torchrun(2, DEBUG, tmp_path / "run", *options)
    assert done.returncode == 0
    line = f"nothing has verified that {file} computes on this layout what it does in one process"
    assert f"{line}, since titan-lite train has not started this run: titan-lite" in done.stdout
