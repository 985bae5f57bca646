"""Blocks of a user's own family that are refused before anything starts, by what they show without
memory; tests/integration/test_own_family.py trains those that are admitted.
"""

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pages import PAGES, blocks
from tiny import DEBUG, DEBUG_TOKENIZER, ROOT
from torch import nn

from titan_lite.config import ConfigError, load_config
from titan_lite.config.families import LLAMA3, file_digest
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.parallelize import ParallelModel
from titan_lite.models.float8 import Float8Linear, apply_float8
from titan_lite.models.own_family import check_tensors
from titan_lite.models.transformer import Transformer, takes_documents
from titan_lite.rules import check
from titan_lite.tools.generate import Decoder, check_steps

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
    assert "layers.0 does not read its argument mask" in message
    checked(tmp_path / "own.py", without)
    checked(tmp_path / "with.py", options=masked)


def test_attention_by_a_function_of_its_own_gets_a_mask_and_no_documents():
    """A kernel's Documents are for `attend` alone."""
    model = Transformer(LLAMA3.flavors["debug"])
    assert takes_documents(model)
    model.layers["3"].attention.attend = lambda q, k, v, mask: q
    assert not takes_documents(model)


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
    "numpy": ([result(f"{RESULT} * __import__('numpy').random.rand()")], "calls numpy.random"),
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


def test_a_weight_that_is_gathered_with_a_scale_is_for_its_layer_alone(tmp_path):
    file = tmp_path / "family.py"
    read = result("self.wo(out.flatten(-2) * torch.sigmoid(x @ self.gate.weight.T))")
    message = mistake(file, read, options=FLOAT8)
    assert "layers.0.attention reads layers.0.attention.gate.weight, which float8.enable" in message
    assert message.endswith('use float8.filter_fqns = ["attention.gate"]')
    checked(file, read)
    checked(file, read, options=[*FLOAT8, "--float8.filter_fqns", "attention.gate"])
    checked(file, read, options=[*FLOAT8, "--float8.recipe=rowwise"])


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
        Decoder(layout.model)


def test_attention_calls_what_is_replaced(tmp_path):
    call = "self.attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, mask)"
    past = (call, call.removeprefix("self."))
    message = mistake(tmp_path / "family.py", past, options=CP)
    assert "layers.0.attention does not call self.attend" in message
    twice = (call, f"{call} + {call}")
    for number, change in enumerate((past, twice)):
        layout = checked(tmp_path / f"{number}.py", change)
        decoder = Decoder(replace(layout.model, max_seq_len=4))
        decoder.init_weights(0)
        with pytest.raises(ConfigError, match=r"attention does not call self.attend once"):
            decoder(torch.zeros(1, 3, dtype=torch.int64))


def test_a_forward_of_an_instance_is_refused(tmp_path):
    change = (
        "    return TransformerBlock(config, GatedAttention(config))\n",
        (
            "    block = TransformerBlock(config, GatedAttention(config))\n"
            "    block.feed_forward.forward = lambda x: x\n"
            "    return block\n"
        ),
    )
    message = mistake(tmp_path / "family.py", change)
    assert "layers.0.feed_forward with a forward of its own beside that of its class" in message


# Styles of tensor parallelism


def styled(**styles):
    words = ", ".join(f'"attention.{name}": "{style}"' for name, style in styles.items())
    return ('    styles={"attention.gate": "columns"},\n', f"    styles={{{words}}},\n")


def test_a_style_that_does_not_fit_shows_without_ranks(tmp_path):
    message = mistake(tmp_path / "family.py", styled(gate="replicated"), options=TP)
    assert (
        "parallelism.tensor_parallel_degree = 2, layers.0.attention fails: RuntimeError" in message
    )
    assert "give its modules other styles in `styles` of the Family" in message
    checked(tmp_path / "alone.py", styled(gate="replicated"))
    checked(tmp_path / "right.py", options=[*TP, *FLOAT8])
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
    assert "layers.0.attention.q_norm fails: RuntimeError" in message


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
    assert "layers.0 returns (1, 16, 128) in float32 for x (1, 16, 128) in bfloat16" in message


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
        "blocks share layers.1.attention.wq.weight with layers.0.attention.wq.weight",
    ),
    "a buffer of some": (
        later('block.register_buffer("scale", torch.ones(4))'),
        "block has the buffer layers.1.scale",
    ),
    "frozen ones": (
        later("block.attention.gate.weight.requires_grad_(False)"),
        "block has layers.1.attention.gate.weight without requires_grad",
    ),
    "another parameter": (
        later("block.more = nn.Linear(4, 4, bias=False)"),
        "blocks differ: layers.0.more.weight is not there, and layers.1.more.weight is (4, 4)",
    ),
    "another number": (
        later("block.attention_norm.eps = 1e-3"),
        "blocks differ: layers.0.attention_norm.eps is 1e-05, and layers.1.attention_norm.eps is",
    ),
    "another class": (
        later("block.attention_norm = torch.nn.RMSNorm(config.dim)"),
        "blocks differ: layers.0.attention_norm.__class__ is 'titan_lite.models.transformer.RMSNorm', and",
    ),
    "another module": (
        later("block.noise = nn.Dropout(0.1)"),
        "blocks differ: layers.0.noise.__class__ is 'not there', and layers.1.noise.__class__ is",
    ),
    "another shape": (
        later("block.attention.gate = nn.Linear(config.dim, 4, bias=False)"),
        "blocks differ: layers.0.attention.gate.weight is (128, 128), and",
    ),
    "made in forward": (
        [
            (
                "        cos, sin = cos[",
                '        if not hasattr(self, "scale"):\n'
                "            self.scale = nn.Parameter(torch.ones(4, 4))\n"
                "        cos, sin = cos[",
            )
        ],
        "block makes layers.0.attention.scale in its first forward, which would not be saved",
    ),
    "a tensor": (
        [(GATE, f"{GATE}        self.slopes = torch.ones(8)\n")],
        "block has the tensor layers.0.attention.slopes, which nothing fills or saves",
    ),
    "a hook on a parameter": (
        [(GATE, f"{GATE}        self.gate.weight.register_hook(lambda grad: grad * 3)\n")],
        "layers.0.attention.gate.weight with a hook, an attribute or a class of its own",
    ),
    "a hook after accumulation": (
        [
            (
                GATE,
                f"{GATE}        self.gate.weight.register_post_accumulate_grad_hook(\n"
                "            lambda parameter: None\n"
                "        )\n",
            )
        ],
        "layers.0.attention.gate.weight with a hook, an attribute or a class of its own",
    ),
    "an attribute of a parameter": (
        [(GATE, f"{GATE}        self.gate.weight.factor = 3\n")],
        "layers.0.attention.gate.weight with a hook, an attribute or a class of its own",
    ),
    "another dtype": (
        [(GATE, GATE.replace("bias=False", "bias=False, dtype=torch.float64"))],
        "block has layers.0.attention.gate.weight in float64; parameters are float32",
    ),
    "the default dtype": (
        [("import torch\n", "import torch\n\ntorch.set_default_dtype(torch.bfloat16)\n")],
        "the file sets torch's default dtype to bfloat16",
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
        "block has layers.0.attention.norm.bias, which would start at 1",
    ),
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_what_the_structure_of_all_blocks_shows_is_refused(name, tmp_path):
    changes, words = STRUCTURE[name]
    assert words in mistake(tmp_path / "family.py", *changes)


# Blocks, and what they read and write in forward

FORWARD = "        cos, sin = cos["
BLOCK_FORWARD = "    def forward(self, x, cos, sin, mask=None):\n"


def forward(line):
    """Begin the forward of attention with a line."""
    return (BLOCK_FORWARD, f"{BLOCK_FORWARD}        {line}\n")


def made(line):
    """Make something beside the gate."""
    return (GATE, f"{GATE}        {line}\n")


def of_file(words):
    return (CLASS, f"{words}\n\n\n{CLASS}")


def of_block(line):
    """Begin the forward of blocks with a line."""
    return (
        "def build_block(config):\n    return TransformerBlock(",
        "class Block(TransformerBlock):\n"
        f"{BLOCK_FORWARD}        {line}\n"
        "        return super().forward(x, cos, sin, mask)\n\n\n"
        "def build_block(config):\n    return Block(",
    )


READS = "block reads a tensor that is none of its arguments and parameters, and not of this"
# Not linspace: once transformers has made a model in this process, torch.device no longer moves it
CACHE = "@__import__('functools').cache\ndef slopes(n):\n    return torch.arange(n) / n"
BEYOND_ARGUMENTS = {
    "input": ([of_block("x.data.mul_(0.5)")], "block changes x in place: layers.0 calls aten.mul_"),
    "table": ([of_block("cos *= 0.9")], "block changes cos in place: layers.0 calls aten.mul_"),
    "weight": (
        [forward("self.gate.weight.data.clamp_(-0.005, 0.005)")],
        "block changes layers.0.attention.gate.weight in place: layers.0.attention calls aten.clam",
    ),
    "data of a weight": (
        [forward("self.gate.weight.data = self.gate.weight.data.clamp(-0.005, 0.005)")],
        "block replaces the data of layers.0.attention.gate.weight in forward",
    ),
    "list of modules": (
        [
            made("self.more = [nn.Linear(4, config.dim, bias=False)]"),
            result("self.more[0](x[..., :4])"),
        ],
        f"{READS} forward alone: layers.0.attention calls aten.t.default with one of shape (128, 4)",
    ),
    "dict of tensors": (
        [made('self.more = {"slopes": torch.ones(config.dim)}'), result('x * self.more["slopes"]')],
        f"{READS} forward alone: layers.0.attention calls aten.mul.Tensor with one of shape (128,)",
    ),
    "kept tensor": (
        [
            made("self.slopes = None"),
            forward("self.slopes = torch.ones(128) if self.slopes is None else self.slopes"),
            result("x * self.slopes"),
        ],
        f"{READS} forward alone: layers.0.attention calls aten.mul.Tensor with one of shape (128,)",
    ),
    "cache of the file": (
        [of_file(CACHE), result("x * slopes(128)")],
        f"{READS} forward alone: layers.0.attention calls aten.mul.Tensor with one of shape (128,)",
    ),
    "tensor of the block before": (
        [of_file("kept = []"), forward("kept.append(x)"), result("x * kept[-2 % len(kept)]")],
        f"{READS} forward alone: layers.0.attention calls aten.mul.Tensor with one of shape (1, 16, 128)",
    ),
    "counter": (
        [made("self.calls = 0"), forward("self.calls += 1")],
        "block changes layers.0.attention.calls in every forward",
    ),
    "generator of the file": (
        [of_file("RNG = __import__('random').Random(0)"), result(f"{RESULT} * RNG.random()")],
        "block changes the global RNG in every forward",
    ),
    "another weight": (
        [
            result(
                "torch.func.functional_call(self.wo, {'weight': self.wo.weight * 2}, out.flatten(-2))"
            )
        ],
        "block calls layers.0.attention.wo with another tensor as its weight",
    ),
    "all parameters": (
        [result(f"{RESULT} * (1 + sum(p.square().mean() for p in self.parameters()))")],
        "block reads layers.0.attention.wq.weight in another way than as an attribute of its module:"
        " layers.0.attention calls aten.pow",
    ),
    "list of parameters": (
        [
            made("self.more = [self.gate.weight]"),
            result("self.wo(out.flatten(-2) * torch.sigmoid(x @ self.more[0].T))"),
        ],
        "block reads layers.0.attention.gate.weight in another way than as an attribute of its",
    ),
    "clock": (
        [result(f"{RESULT} * (__import__('time').perf_counter() % 1e-3 * 1e3)")],
        "block layers.0 computes other numbers from equal ones",
    ),
    "bytes of the system": (
        [result(f"{RESULT} * int.from_bytes(__import__('os').urandom(4))")],
        "block layers.0 computes other numbers from equal ones",
    ),
    "no gradient": (
        [result("self.wo(out.flatten(-2) * torch.sigmoid(self.gate(x).detach()))")],
        "block computes no gradient of layers.0.attention.gate.weight",
    ),
    "tensor on the CPU": (
        [made('self.scale = torch.tensor(0.5, device="cpu")'), forward("self.scale.mul_(0.99)")],
        "block has the tensor layers.0.attention.scale, which nothing fills or saves",
    ),
    "later tokens": (
        [of_block("x = x - x.mean(1, keepdim=True)")],
        "block layers.0 computes a token from later ones",
    ),
    "number of a block": (
        [
            of_file("blocks = []"),
            made("blocks.append(id(self))"),
            result(f"{RESULT} * (1 + blocks.index(id(self)) % 2)"),
        ],
        "blocks differ: from equal parameters and inputs layers.0 and layers.1 compute other",
    ),
    "mean of a batch": (
        [of_block("x = x - x.mean(0, keepdim=True)")],
        "block layers.0 mixes the sequences of a batch",
    ),
    "norm of a batch": (
        [
            made("self.bn = nn.BatchNorm1d(config.dim, affine=False, track_running_stats=False)"),
            forward("x = self.bn(x.transpose(1, 2)).transpose(1, 2)"),
        ],
        "block layers.0 mixes the sequences of a batch",
    ),
}


@pytest.mark.parametrize("name", BEYOND_ARGUMENTS)
def test_a_result_is_of_arguments_and_parameters_alone(name, tmp_path):
    changes, words = BEYOND_ARGUMENTS[name]
    assert words in mistake(tmp_path / "family.py", *changes)


ARGUMENTS_ALONE = {
    "a weight that is read": [
        result(
            "self.wo(out.flatten(-2) * torch.sigmoid(x.to(self.gate.weight.dtype) @ self.gate.weight.T))"
        )
    ],
    "sizes and dtypes of all parameters": [
        result(f"{RESULT}.to(next(self.parameters()).dtype) * len(list(self.parameters()))")
    ],
    "a weight with two names": [
        made("self.gate.again = self.gate.weight"),
        result("self.wo(out.flatten(-2) * torch.sigmoid(x @ self.gate.again.T))"),
    ],
    "weights of a list": [
        made("self.more = nn.ParameterList([self.gate.weight])"),
        result("self.wo(out.flatten(-2) * torch.sigmoid(x @ self.more[0].T))"),
    ],
    "tensors of numbers": [result(f"{RESULT} * torch.tensor([0.5]) * torch.tensor(2.0)")],
    "a number that is set once": [
        made("self.scale = None"),
        forward("self.scale = self.scale or x.shape[-1] ** -0.5"),
    ],
    "a change of what it computes": [result(f"{RESULT}.mul_(0.5)")],
    "a weight that is computed": [
        (
            "import torch\n",
            "import torch\nfrom torch.nn.utils.parametrizations import weight_norm\n",
        ),
        made("weight_norm(self.gate)"),
        (
            '"attention.gate.weight": (config.n_heads * config.head_dim, config.dim),\n',
            '"attention.gate.parametrizations.weight.original0": (config.dim, 1),\n'
            '        "attention.gate.parametrizations.weight.original1": (config.dim, config.dim),\n',
        ),
    ],
}


@pytest.mark.parametrize("name", ARGUMENTS_ALONE)
def test_what_a_block_makes_for_itself_is_admitted(name, tmp_path):
    checked(tmp_path / "family.py", *ARGUMENTS_ALONE[name])


def test_generate_refuses_tokens_that_mix_outside_of_attention(tmp_path):
    shift = "x = (x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]) / 2"
    layout = checked(tmp_path / "family.py", of_block(shift))
    with pytest.raises(ConfigError, match="from one token at a time than from all at once"):
        check_steps(layout.model)
    check_steps(checked(tmp_path / "gated.py").model)


def test_a_large_block_without_a_flavor_debug_is_not_run_with_numbers(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("titan_lite.models.own_family.MAX_WEIGHTS", 1000)
    mixing = of_block("x = x - x.mean(0, keepdim=True)")
    layout = checked(tmp_path / "family.py", mixing)
    assert "that sequences of a batch do not mix is not verified" in caplog.text
    check_steps(layout.model)
    assert "from one token at a time what they do from all at once is not verified" in caplog.text


# What a family is at a resume


def test_modules_beside_the_file_belong_to_it(tmp_path, monkeypatch):
    def digest(gate, unused="", folder="first"):
        root = tmp_path / folder
        package = root / "parts_of_gated"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "gates.py").write_text("from .numbers_of_gates import FACTOR as FACTOR\n")
        (package / "numbers_of_gates.py").write_text(f"FACTOR = {gate}\n")
        (package / "unused.py").write_text(unused)
        file = root / "family.py"
        file.write_text(f"import torch\nfrom parts_of_gated import gates\n{GATED.read_text()}")
        monkeypatch.setattr("sys.path", [*sys.path, str(root)])
        for name in [name for name in sys.modules if name.startswith("parts_of_gated")]:
            monkeypatch.delitem(sys.modules, name)
        found = file_digest(str(file))
        monkeypatch.undo()
        return found

    first = digest(1)
    assert digest(1, folder="moved") == first
    assert digest(1, "import torch", folder="other") == first
    assert digest(2, folder="changed") != first
    assert file_digest(str(GATED)) == hashlib.sha256(GATED.read_bytes()).hexdigest()


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            (
                "        self.moe = MixtureOfExperts(config)\n",
                "        self.moe = MixtureOfExperts(config)\n"
                "        self.feed_forward = MixtureOfExperts(config)\n",
            ),
            "has the routers layers.0.feed_forward.router and layers.0.moe.router",
        ),
        (
            (
                "        self.moe = MixtureOfExperts(config)\n",
                "        self.moe = MixtureOfExperts(config)\n"
                "        self.moe.experts.w1 = nn.Parameter(self.moe.experts.w1[:3])\n",
            ),
            "three dimensions are for a matrix of each expert, and n_experts is 4",
        ),
    ],
)
def test_experts_that_would_not_be_balanced_or_sharded_are_refused(change, words):
    """Even where block_parameters agrees with the block."""
    namespace = {}
    exec(of_experts(change), namespace)
    model = SimpleNamespace(config=namespace["FAMILY"].flavors["debug"])
    with torch.device("meta"):
        model.layers = nn.ModuleDict({"0": namespace["build_block"](model.config)})
    with pytest.raises(ConfigError, match=words):
        check_tensors(model, "own.py")


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
