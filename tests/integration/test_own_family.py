"""A model family in a user's own file: it trains on any layout as in one process, and an error says
what the file lacks.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from commands import train
from pages import PAGES, blocks
from tiny import DEBUG, DEBUG_TOKENIZER, NO_VALIDATION, SMALL, steps

from titan_lite.checkpoint.weights import open_weights
from titan_lite.config import ConfigError, load_config
from titan_lite.distributed.layout import Layout
from titan_lite.models.shapes import shape_of
from titan_lite.rules import check
from titan_lite.tools import convert, generate
from titan_lite.tools.verify.compare import FLOAT32, LOW_PRECISION, compare
from titan_lite.tools.verify.observe import run
from titan_lite.tools.verify.proxy import parse_layout, proxy, proxy_model, reference

pytestmark = pytest.mark.ranks(2)

GATED = Path(__file__).parents[1] / "own_families/gated.py"
SHARED_EXPERT = GATED.with_name("shared_expert.py")


def configured(file, *options):
    names = [f"--model.name={file}", f"--model.tokenizer_path={DEBUG_TOKENIZER}"]
    return load_config(DEBUG, [*names, *options])


@pytest.mark.slow
def test_a_family_of_ones_own_with_experts_trains_as_in_one_process():
    config = configured(SHARED_EXPERT, "--training.global_batch_size=-1")
    model = proxy_model(shape_of(config.model), 4)
    alone = run(reference(proxy(config, parse_layout("dp_shard=1"), 3)), model)
    found = run(proxy(config, parse_layout("tp=2"), 3), model)
    assert found.gradients["layers.0.moe.experts.w1"].norm() > 0
    assert len(found.choices) == 4
    result = compare(found, alone)
    assert result.agrees, result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dp_shard=2,tp=2", []),
        pytest.param("dp_shard=2,tp=2", ["--compile.enable"], marks=pytest.mark.release),
        pytest.param("pp=2,cp=2", [], marks=pytest.mark.release),
    ],
)
def test_a_family_of_ones_own_trains_as_in_one_process(layout, options):
    config = configured(GATED, *options, "--training.global_batch_size=-1")
    model = proxy_model(shape_of(config.model), 4)
    alone = reference(proxy(config, parse_layout("dp_shard=1"), 3))
    found = run(proxy(config, parse_layout(layout), 3), model)
    assert found.gradients["layers.0.attention.gate.weight"].norm() > 0
    result = compare(found, run(alone, model))
    assert result.agrees, result


# One norm for queries and keys, whose gradients differ, one for attention and feed-forward, which lie
# behind one another, and a gate that is called twice alike, so that a graph could merge both.
READ_TWICE = (
    ("import TransformerBlock,", "import RMSNorm, TransformerBlock,"),
    (
        "        self.gate = ",
        "        self.qk_norm = RMSNorm(config.head_dim, config.norm_eps)\n        self.gate = ",
    ),
    (
        "        cos, sin = ",
        "        q, k = self.qk_norm(q), self.qk_norm(k)\n        cos, sin = ",
    ),
    ("torch.sigmoid(self.gate(x))", "torch.sigmoid(self.gate(x) + self.gate(x))"),
    (
        '        "attention.gate.weight"',
        '        "attention.qk_norm.weight": (config.head_dim,),\n        "attention.gate.weight"',
    ),
    (
        '"attention.gate": "columns"',
        '"attention.gate": "columns", "attention.qk_norm": "replicated"',
    ),
    (
        "    return TransformerBlock(config, GatedAttention(config))\n",
        "    block = TransformerBlock(config, GatedAttention(config))\n"
        "    block.ffn_norm = block.attention_norm\n"
        "    return block\n",
    ),
    ("**norm_parameters(config)", '"attention_norm.weight": (config.dim,)'),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dp_shard=2", ["--compile.enable"]),
        ("pp=2", ["--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"]),
        *(
            pytest.param(layout, options, marks=pytest.mark.release)
            for layout, options in (
                ("dp_shard=2,tp=2", ["--parallelism.fsdp_communication=microbatch"]),
                ("dp_shard=2", ["--compile.enable", "--float8.enable"]),
                (
                    "pp=2",
                    ["--parallelism.pipeline_parallel_schedule=ZBVZeroBubble", "--compile.enable"],
                ),
            )
        ),
    ],
)
def test_a_weight_that_a_block_reads_twice_has_both_gradients(layout, options, tmp_path):
    text = GATED.read_text()
    for old, new in READ_TWICE:
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "twice.py"
    file.write_text(text)
    config = configured(file, *options)
    small = proxy(config, parse_layout(layout), 2)
    model = proxy_model(shape_of(config.model), 4)
    within = LOW_PRECISION if config.float8.enable else FLOAT32
    result = compare(run(small, model), run(reference(small), model), within)
    assert result.agrees, result


def test_the_family_of_the_pages_trains_and_its_steps_speak(tmp_path, capsys):
    (block,) = blocks(PAGES["docs/contributing.md"], "toml")
    recipe = tmp_path / "own.toml"
    recipe.write_text(f'extends = "{DEBUG}"\n{block}')
    file = tmp_path / "my_models/gated.py"
    file.parent.mkdir()
    file.write_text(GATED.read_text())
    first = train(2, recipe, tmp_path / "run", *SMALL, *NO_VALIDATION, *steps(1))
    assert first.returncode == 0
    line = f"the family in {file} is not verified on this layout; `titan-lite verify RECIPE"
    assert f"{line} --world-size 2` does it" in first.stdout
    assert open_weights(tmp_path / "run").config.family == str(file)
    capsys.readouterr()
    words = [str(tmp_path / "run"), "--prompt", "import ", "--max-new-tokens", "4"]
    assert generate.main([*words, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("import ")
    assert convert.main([str(tmp_path / "run"), str(tmp_path / "exported")]) == 2
    assert "its Family has no huggingface" in capsys.readouterr().err
    # the file may be elsewhere when another run begins with its weights
    moved = file.rename(tmp_path / "gated.py")
    weights = [f"--checkpoint.initial_load_path={tmp_path / 'run'}", "--model.flavor=from_weights"]
    config = load_config(recipe, [f"--model.name={moved}", *weights])
    assert shape_of(config.model).family == str(moved)
    # a changed file is told
    assert "has changed" not in "".join(capsys.readouterr())
    changed = tmp_path / "changed/gated.py"
    changed.parent.mkdir()
    changed.write_text(GATED.read_text().replace("torch.sigmoid", "torch.tanh"))
    config = open_weights(tmp_path / "run").config
    open_weights(tmp_path / "run", model=replace(config, family=str(changed)))
    words = f"{changed} has changed since {tmp_path / 'run/checkpoint/step-1'} was saved"
    assert words in "".join(capsys.readouterr())


GATE = '    styles={"attention.gate": "columns"},\n'
WRONG = {
    "no build_block": (
        ("def build_block(config):", "def block(config):"),
        "has no attribute 'build_block'; it has to return a torch.nn.Module for any shape",
    ),
    "no style": (
        (GATE, ""),
        "layers.0.attention.gate.weight has no tensor-parallel style; give attention.gate one of",
    ),
    "another style": (
        (GATE, GATE.replace("columns", "colwise")),
        'the style of attention.gate is "colwise"; use one of replicated, columns, rows, gathers',
    ),
    "a parameter left out": (
        ('        "attention.gate.weight": (config.n_heads * config.head_dim, config.dim),\n', ""),
        "attention.gate.weight is (128, 128) in build_block's block, and not in block_parameters",
    ),
    "a block that fails": (
        ("self.wq = nn.Linear(config.dim, width, bias=False)", "self.wq = config.wq"),
        "build_block fails in line 28: AttributeError: 'ModelConfig' object has no attribute 'wq'",
    ),
    "a forward that fails": (
        ("torch.sigmoid(self.gate(x))", "torch.sigmoid(self.gates(x))"),
        " = 2 fails in line 38: AttributeError: 'GatedAttention' object has no attribute 'gates'",
    ),
    "shapes that fail": (
        ("def block_parameters(config):\n", "def block_parameters(config):\n    config.none\n"),
        "block_parameters of its Family fails: AttributeError: 'ModelConfig' object has no",
    ),
    "a file that ends": (
        ("import torch\n", "raise SystemExit(3)\n"),
        "SystemExit: 3; the file has",
    ),
}


def mistake(file, text, *options):
    file.write_text(text)
    config = configured(file, *options)
    with pytest.raises(ConfigError) as error:
        check(config, Layout.from_config(config, 2))
    assert str(error.value).startswith(f'model.name = "{file}"')
    return str(error.value)


@pytest.mark.parametrize("name", WRONG)
def test_what_a_file_lacks_is_told_before_anything_starts(name, tmp_path):
    (old, new), words = WRONG[name]
    text = GATED.read_text()
    assert old in text
    text = text.replace(old, new)
    assert words in mistake(tmp_path / "family.py", text, "--parallelism.tensor_parallel_degree=2")


def test_a_block_of_another_form_is_refused(tmp_path):
    text = GATED.read_text()
    block = "    return TransformerBlock(config, GatedAttention(config))\n"
    pair = (
        "    class Pair(TransformerBlock):\n"
        "        def forward(self, *inputs):\n"
        "            return super().forward(*inputs), None\n\n"
        "    return Pair(config, GatedAttention(config))\n"
    )
    assert (
        "fails: AttributeError: 'tuple' object has no attribute 'shape'; it has to return what x is"
        in mistake(tmp_path / "pair.py", text.replace(block, pair))
    )
    without = text.replace("attend = staticmethod(attend)", "pass").replace(
        "self.attend(", "attend("
    )
    assert "layers.0 has no module `attention` with a function `attend`" in mistake(
        tmp_path / "attend.py", without, "--parallelism.context_parallel_degree=2"
    )


def test_a_file_that_is_not_there_is_named(tmp_path):
    config = configured(tmp_path / "none.py")
    with pytest.raises(ConfigError, match=r"none.py\": .*none.py is no file; put"):
        Layout.from_config(config, 1)
