"""Blocks of a user's own family that are refused before anything starts, by what they show without
memory; tests/integration/test_own_family.py trains those that are admitted.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pages import PAGES, blocks
from tiny import DEBUG, DEBUG_TOKENIZER, ROOT
from torch import nn

from titan_lite.config import ConfigError, load_config
from titan_lite.config.families import LLAMA3
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.parallelize import ParallelModel
from titan_lite.features.float8.linear import Float8Linear, apply_float8
from titan_lite.models.decoder import Decoder, decoding
from titan_lite.models.transformer import Transformer, takes_documents
from titan_lite.rules import check

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


def test_attention_that_leaves_out_its_mask_is_refused_with_mask_documents(tmp_path):
    without = ("apply_rope(k, cos, sin), v, mask)", "apply_rope(k, cos, sin), v, None)")
    masked = ["--training.mask_documents"]
    message = mistake(tmp_path / "own.py", without, options=masked)
    assert "its block does not read its argument mask" in message
    checked(tmp_path / "own.py", without)
    checked(tmp_path / "with.py", options=masked)


def test_attention_by_a_function_of_its_own_gets_a_mask_and_no_documents():
    """A kernel's Documents are for `attend` alone."""
    model = Transformer(LLAMA3.flavors["debug"])
    assert takes_documents(model)
    model.layers["3"].attention.attend = lambda q, k, v, mask: q
    assert not takes_documents(model)


RANDOM = {
    "a module": (
        [
            (GATE, f"{GATE}        self.noise = nn.Dropout(0.1)\n"),
            result(f"self.noise({RESULT})"),
        ],
        "aten.bernoulli_.float",
    ),
    "noise on the host": (
        [result(f'{RESULT} + torch.rand(1, device="cpu").item()')],
        "aten.rand.default",
    ),
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
        "aten.rand_like",
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
    model = Transformer(layout.model)
    with decoding(model, 4):
        assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.modules())


# What the user wrote, and a run replaces

TP = ["--parallelism.tensor_parallel_degree=2"]
CP = ["--parallelism.context_parallel_degree=2"]
FLOAT8 = ["--float8.enable"]
CLASS = "class GatedAttention(nn.Module):\n"
ATTEND = "    attend = staticmethod(attend)\n"
WQ = "        self.wq = nn.Linear(config.dim, width, bias=False)\n"
WO = "        self.wo = nn.Linear(width, config.dim, bias=False)\n"
SCALED = (
    CLASS,
    "class Scaled(nn.Linear):\n"
    "    def forward(self, x):\n"
    "        return super().forward(x) * 0.5\n\n\n"
    f"{CLASS}",
)
SLIDING = (
    CLASS,
    f"def slide(q, k, v, mask):\n    return attend(q, k, v, mask)\n\n\n{CLASS}",
)


def scaled(line):
    return (line, line.replace("nn.Linear", "Scaled"))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_linear_layer_with_a_forward_of_its_own_is_not_for_float8(recipe, tmp_path):
    file = tmp_path / "family.py"
    options = [*FLOAT8, f"--float8.recipe={recipe}"]
    message = mistake(file, SCALED, scaled(WQ), options=options)
    assert "layers.0.attention.wq.weight is of a Scaled, which has a forward of its own" in message
    assert message.endswith('use a torch.nn.Linear, or float8.filter_fqns = ["attention.wq"]')


def test_a_matrix_of_no_linear_layer_is_not_for_float8(tmp_path):
    parameter = GATE.replace("nn.Linear(config.dim, width, bias=False)", "Gate(width, config.dim)")
    gate = (
        CLASS,
        "class Gate(nn.Module):\n"
        "    def __init__(self, *shape):\n"
        "        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.empty(shape))\n\n"
        "    def forward(self, x):\n"
        "        return x @ self.weight.T\n\n\n"
        f"{CLASS}",
    )
    changes = [gate, (GATE, parameter)]
    assert "attention.gate.weight is of a Gate" in mistake(
        tmp_path / "family.py", *changes, options=FLOAT8
    )
    checked(tmp_path / "without.py", *changes)
    filtered = [*FLOAT8, "--float8.filter_fqns", "attention.gate"]
    checked(tmp_path / "filtered.py", *changes, options=filtered)


def test_a_layout_that_cannot_be_is_told_by_its_rule_alone(tmp_path):
    with pytest.raises(ConfigError) as error:
        checked(tmp_path / "own.py", options=[*FLOAT8, "--model.hidden_dim=680"])
    (message,) = error.value.args
    assert "layers.0.feed_forward.w1.weight is 680 x" in message


def test_float8_leaves_a_forward_of_its_own_as_it_is():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 0.5

    model = nn.Module()
    model.layers = nn.ModuleList([Scaled(16, 16, bias=False), nn.Linear(16, 16, bias=False)])
    apply_float8(model, "tensorwise")
    assert [type(layer) for layer in model.layers] == [Scaled, Float8Linear]


def test_a_function_attend_of_its_own_is_not_replaced(tmp_path):
    changes = [SLIDING, (ATTEND, ATTEND.replace("(attend)", "(slide)"))]
    message = mistake(tmp_path / "family.py", *changes, options=CP)
    assert "layers.0.attention.attend is slide; parallelism.context_parallel_degree = 2" in message
    assert message.endswith("or use parallelism.context_parallel_degree = 1")
    layout = checked(tmp_path / "alone.py", *changes)
    with pytest.raises(ConfigError, match=r"layers.0.attention.attend is slide; generate keeps"):
        Decoder(Transformer(layout.model), 4, padding=None)


def test_attention_calls_what_is_replaced(tmp_path):
    call = "self.attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, mask)"
    past = (call, call.removeprefix("self."))
    message = mistake(tmp_path / "family.py", past, options=CP)
    assert "layers.0.attention does not call self.attend" in message
    twice = (call, f"{call} + {call}")
    for number, change in enumerate((past, twice)):
        layout = checked(tmp_path / f"{number}.py", change)
        model = Transformer(replace(layout.model, max_seq_len=4))
        model.init_weights(0)
        expected = pytest.raises(ConfigError, match=r"attention does not call self.attend once")
        with decoding(model, 4) as decoder, expected:
            decoder(torch.zeros(1, 3, dtype=torch.int64))


# Styles of tensor parallelism


def styled(**styles):
    words = ", ".join(f'"attention.{name}": "{style}"' for name, style in styles.items())
    return ('    styles={"attention.gate": "columns"},\n', f"    styles={{{words}}},\n")


def test_a_style_that_does_not_fit_shows_without_ranks(tmp_path):
    message = mistake(tmp_path / "family.py", styled(gate="replicated"), options=TP)
    assert "parallelism.tensor_parallel_degree = 2 fails in line 38: RuntimeError" in message
    assert "give its modules other styles in `styles` of the Family" in message
    checked(tmp_path / "alone.py", styled(gate="replicated"))
    checked(tmp_path / "right.py", options=[*TP, *FLOAT8])
    checked(tmp_path / "right.py", options=[*TP, *FLOAT8, "--compile.enable"])
    checked(tmp_path / "compiled.py", options=[*TP, *CP, "--compile.enable"], ranks=4)


def test_a_norm_over_all_heads_is_not_split(tmp_path):
    norm = "        self.q_norm = RMSNorm(width, config.norm_eps)\n"
    changes = [
        ("import TransformerBlock", "import RMSNorm, TransformerBlock"),
        (GATE, GATE + norm),
        (
            "        cos, sin = cos[",
            "        q = self.q_norm(q.flatten(-2)).view_as(q)\n        cos, sin = cos[",
        ),
        (
            "        **feed_forward_parameters",
            '        "attention.q_norm.weight": (config.n_heads * config.head_dim,),\n'
            "        **feed_forward_parameters",
        ),
    ]
    checked(tmp_path / "alone.py", *changes)
    split = styled(gate="columns", q_norm="columns")
    message = mistake(tmp_path / "split.py", *changes, split, options=TP)
    assert (
        "layers.0.attention.q_norm.weight is a vector, and the style of attention.q_norm" in message
    )
    message = mistake(
        tmp_path / "all.py", *changes, styled(gate="columns", q_norm="replicated"), options=TP
    )
    assert "parallelism.tensor_parallel_degree = 2 fails in line 37: RuntimeError" in message


def test_a_style_by_name_is_for_the_usual_shape(tmp_path):
    fused = [
        (
            CLASS,
            "class FusedFeedForward(nn.Module):\n"
            "    def __init__(self, config):\n"
            "        super().__init__()\n"
            "        self.w1 = nn.Linear(config.dim, 2 * config.hidden_dim, bias=False)\n"
            "        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)\n\n"
            "    def forward(self, x):\n"
            "        gate, up = self.w1(x).chunk(2, -1)\n"
            "        return self.w2(torch.sigmoid(gate) * up)\n\n\n"
            f"{CLASS}",
        ),
        (
            "    return TransformerBlock(config, GatedAttention(config))\n",
            "    block = TransformerBlock(config, GatedAttention(config))\n"
            "    block.feed_forward = FusedFeedForward(config)\n"
            "    return block\n",
        ),
        (
            "        **feed_forward_parameters(config),\n",
            '        "feed_forward.w1.weight": (2 * config.hidden_dim, config.dim),\n'
            '        "feed_forward.w2.weight": (config.dim, config.hidden_dim),\n',
        ),
    ]
    checked(tmp_path / "alone.py", *fused)
    message = mistake(tmp_path / "family.py", *fused, options=TP)
    assert "layers.0.feed_forward.w1.weight is (512, 128), and the style that" in message
    assert "is for (256, 128)" in message


def test_rows_are_of_a_linear_layer(tmp_path):
    message = mistake(tmp_path / "family.py", SCALED, scaled(WO), options=TP)
    assert "layers.0.attention.wo.weight is of a Scaled" in message
    assert "it has to be a torch.nn.Linear" in message
    checked(tmp_path / "alone.py", SCALED, scaled(WO))


def test_a_result_of_another_dtype_is_refused(tmp_path):
    options = ["--training.mixed_precision_param=bfloat16"]
    message = mistake(tmp_path / "family.py", result(f"({RESULT}).float()"), options=options)
    assert "it returns (1, 16, 128) in float32 for x (1, 16, 128) in bfloat16" in message


# Blocks, and what they are at first

BLOCK = "    return TransformerBlock(config, GatedAttention(config))\n"
COUNT = ("FAMILY = Family(", "import itertools\n\nnumbers = itertools.count()\nFAMILY = Family(")


def later(line):
    """Change the blocks after the first."""
    return [
        COUNT,
        (
            BLOCK,
            "    block = TransformerBlock(config, GatedAttention(config))\n"
            "    if next(numbers) % config.n_layers:\n"
            f"        {line}\n"
            "    return block\n",
        ),
    ]


STRUCTURE = {
    "shared": (
        [
            (
                BLOCK,
                "    global shared\n"
                "    shared = globals().get('shared') or GatedAttention(config)\n"
                "    return TransformerBlock(config, shared)\n",
            )
        ],
        "layers.1.attention.wq.weight is not there, and (128, 128) by block_parameters of its Family",
    ),
    "a buffer of some": (
        later('block.register_buffer("scale", torch.ones(4))'),
        "block has the buffer layers.1.scale",
    ),
    "frozen ones": (
        later("block.attention.gate.weight.requires_grad_(False)"),
        "layers.1.attention.gate.weight is (128, 128) in float32, requires_grad = False",
    ),
    "another parameter": (
        later("block.more = nn.Linear(4, 4, bias=False)"),
        "layers.1.more.weight is (4, 4), and not there by block_parameters of its Family",
    ),
    "another shape": (
        later("block.attention.gate = nn.Linear(config.dim, 4, bias=False)"),
        "layers.1.attention.gate.weight is (4, 128), and (128, 128) by block_parameters",
    ),
    "another dtype": (
        [(GATE, GATE.replace("bias=False", "bias=False, dtype=torch.float64"))],
        "layers.0.attention.gate.weight is (128, 128) in float64, requires_grad = True; parameters are",
    ),
    "a bias": (
        [
            (GATE, f"{GATE}        self.norm = nn.LayerNorm(config.dim)\n"),
            (
                "        **feed_forward_parameters",
                '        "attention.norm.weight": (config.dim,),\n'
                '        "attention.norm.bias": (config.dim,),\n'
                "        **feed_forward_parameters",
            ),
        ],
        "layers.0.attention.norm.bias is (128,); a parameter is a matrix, one for each of",
    ),
    "no gradient": (
        [(RESULT, RESULT.replace("self.gate(x)", "self.gate(x).detach()"))],
        "block computes no gradient of layers.0.attention.gate.weight",
    ),
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_a_parameter_that_would_not_be_trained_as_it_should_is_refused(name, tmp_path):
    changes, words = STRUCTURE[name]
    assert words in mistake(tmp_path / "family.py", *changes)


def test_the_family_of_the_page_is_admitted_in_every_layout(tmp_path):
    (page,) = (
        block for block in blocks(PAGES["docs/contributing.md"], "python") if "FAMILY" in block
    )
    file = tmp_path / "page.py"
    file.write_text(page)
    names = [f"--model.name={file}", f"--model.tokenizer_path={DEBUG_TOKENIZER}"]
    for options in ([], TP, CP, [*TP, *FLOAT8], ["--parallelism.pipeline_parallel_degree=2"]):
        config = load_config(DEBUG, [*names, *options])
        check(config, Layout.from_config(config, 2))


def of_experts(text):
    """A family of the shared expert with other text in its block."""
    return (ROOT / "tests/own_families/shared_expert.py").read_text().replace(*text)


def test_a_matrix_of_another_number_of_experts_is_refused(tmp_path):
    """Even where block_parameters agrees with the block."""
    moe = "        self.moe = MixtureOfExperts(config)\n"
    text = of_experts(
        (moe, f"{moe}        self.moe.experts.w1 = nn.Parameter(self.moe.experts.w1[:3])\n")
    )
    parameters = "        **expert_parameters(config),\n"
    assert parameters in text
    of_three = '        "moe.experts.w1": (3, config.hidden_dim, config.dim),\n'
    file = tmp_path / "three.py"
    file.write_text(text.replace(parameters, parameters + of_three))
    names = [f"--model.name={file}", f"--model.tokenizer_path={DEBUG_TOKENIZER}"]
    config = load_config(DEBUG, names)
    with pytest.raises(
        ConfigError, match=r"w1 is \(3, 64, 128\); a parameter is a matrix, one for"
    ):
        check(config, Layout.from_config(config, 2))


def test_expert_parallelism_splits_the_module_that_it_knows_alone(tmp_path):
    text = of_experts(
        (
            "class Block(nn.Module):",
            """class Scaled(Experts):
    def forward(self, x, weights, choices):
        return 2 * super().forward(x, weights, choices)


class Block(nn.Module):""",
        )
    )
    text = text.replace("import MixtureOfExperts", "import Experts, MixtureOfExperts")
    moe = "        self.moe = MixtureOfExperts(config)\n"
    text = text.replace(moe, f"{moe}        self.moe.experts = Scaled(config)\n")
    file = tmp_path / "scaled.py"
    file.write_text(text)
    for degree in (1, 2):
        names = [f"--model.name={file}", f"--model.tokenizer_path={DEBUG_TOKENIZER}"]
        config = load_config(DEBUG, [*names, f"--parallelism.expert_parallel_degree={degree}"])
        layout = Layout.from_config(config, 2)
        if degree == 1:
            check(config, layout)
            continue
        with pytest.raises(ConfigError, match=r"moe\.experts\.w1 is of a Scaled, and expert"):
            check(config, layout)
