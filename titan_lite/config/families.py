"""Model families: flavors, shapes of parameters, and names in Hugging Face's files. Needs no torch.

    find_family("llama3").flavors["8B"].dim            # 4096
    find_family("my_models/mixer.py").flavors          # of a user's own file

A family is a row of FAMILIES and the file models/NAME.py, whose function `build_block` makes one of
its transformer blocks. What is around the blocks is the same for all (models/transformer.py). A
user's own file has both: `FAMILY`, a Family, and `build_block` (docs/contributing.md).
"""

import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from titan_lite.config.errors import ConfigError, shown

Shape = tuple[int, ...]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of low rotary frequencies, for contexts beyond `original_max_seq_len`."""

    factor: float  # divisor of the low frequencies
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192  # tokens


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int = 128_256
    tied_embeddings: bool = False
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    max_seq_len: int = 131_072  # tokens in the rotary tables
    head_dim: int = 0  # of a query, key or value; 0 becomes dim / n_heads
    n_experts: int = 0  # of a block, each of hidden_dim; 0: a dense model
    experts_per_token: int = 0  # that a token is computed by
    family: str = "llama3"  # a name that `find_family` knows

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)


@dataclass(frozen=True)
class HuggingFace:
    """A family in the files of Hugging Face's transformers (models/huggingface.py)."""

    architecture: str  # such as "LlamaForCausalLM"
    model_type: str  # of config.json
    # keys of config.json whose other values are another model; None is this one
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any]  # of keys that a config.json leaves out
    # Module or parameter of a block: its name there, beside those that all families have. A "*"
    # stands for the number of an expert: the parameter is one tensor here, and one each there.
    names: Mapping[str, str] = field(default_factory=dict)
    # field of ModelConfig: keys of config.json that have it, beside those that all families have;
    # the first one is written
    sizes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Tensors of a block with several parameters of experts, as transformers has them in memory: the
    # name there, and the parameters that are side by side in dimension 1.
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # modules of a block whose rows are rotary pairs, (2i, 2i + 1) here and (i, i + D/2) there
    rotary: tuple[str, ...] = ("attention.wq", "attention.wk")


@dataclass(frozen=True)
class Torchtitan:
    """A family in torchtitan's checkpoints (checkpoint/names.py)."""

    # Module, parameter or buffer of a block: its name there, beside those that all families have.
    names: Mapping[str, str] = field(default_factory=dict)
    rotary: tuple[str, ...] = ()  # modules whose rows are other pairs there, as in HuggingFace


@dataclass(frozen=True)
class Family:
    """A model family, but for its modules."""

    flavors: Mapping[str, ModelConfig]  # "debug" is the small one of tests and `verify`
    # shapes of a block's parameters by their names in it, in the module's order
    block_parameters: Callable[[ModelConfig], Mapping[str, Shape]]
    # shapes of a block's buffers that are saved, by their names in it
    block_buffers: Callable[[ModelConfig], Mapping[str, Shape]] = lambda config: {}
    # fields of a shape that is given by keys of [model], where neither a key nor a flavor has them
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # module of a block: its tensor-parallel style (distributed/tensor_parallel.py), beside those
    # that all families have
    styles: Mapping[str, str] = field(default_factory=dict)
    huggingface: HuggingFace | None = None  # None: such files are not read or written
    torchtitan: Torchtitan | None = None  # None: such checkpoints are not read or written


# Shapes of what several families have in a block


def attention_parameters(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of the projections of grouped-query attention."""
    width = config.n_heads * config.head_dim
    kv_width = config.n_kv_heads * config.head_dim
    return {
        "attention.wq.weight": (width, config.dim),
        "attention.wk.weight": (kv_width, config.dim),
        "attention.wv.weight": (kv_width, config.dim),
        "attention.wo.weight": (config.dim, width),
    }


def feed_forward_parameters(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of SwiGLU."""
    return {
        "feed_forward.w1.weight": (config.hidden_dim, config.dim),
        "feed_forward.w2.weight": (config.dim, config.hidden_dim),
        "feed_forward.w3.weight": (config.hidden_dim, config.dim),
    }


def expert_parameters(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of a router and its experts, which are SwiGLU (models/experts.py)."""
    widening = (config.n_experts, config.hidden_dim, config.dim)
    return {
        "moe.router.weight": (config.n_experts, config.dim),
        "moe.experts.w1": widening,
        "moe.experts.w2": (config.n_experts, config.dim, config.hidden_dim),
        "moe.experts.w3": widening,
    }


def expert_buffers(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of what a router keeps from step to step, in float32."""
    return {
        "moe.router.expert_bias": (config.n_experts,),
        "moe.router.expert_share": (config.n_experts,),
    }


def norm_parameters(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of the norms before attention and feed-forward."""
    return {"attention_norm.weight": (config.dim,), "ffn_norm.weight": (config.dim,)}


# The families


def _llama3_block(config: ModelConfig) -> dict[str, Shape]:
    return {
        **attention_parameters(config),
        **feed_forward_parameters(config),
        **norm_parameters(config),
    }


LLAMA3 = Family(
    flavors={
        "debug": ModelConfig(256, 6, 8, 4, 768, vocab_size=2048),
        "1B": ModelConfig(
            2048, 16, 32, 8, 8192, tied_embeddings=True, rope_scaling=RopeScaling(factor=32.0)
        ),
        "3B": ModelConfig(
            3072, 28, 24, 8, 8192, tied_embeddings=True, rope_scaling=RopeScaling(factor=32.0)
        ),
        "8B": ModelConfig(4096, 32, 32, 8, 14336, rope_scaling=RopeScaling(factor=8.0)),
        "70B": ModelConfig(8192, 80, 64, 8, 28672, rope_scaling=RopeScaling(factor=8.0)),
        "405B": ModelConfig(16384, 126, 128, 8, 53248, rope_scaling=RopeScaling(factor=8.0)),
    },
    block_parameters=_llama3_block,
    huggingface=HuggingFace(
        architecture="LlamaForCausalLM",
        model_type="llama",
        fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    ),
    torchtitan=Torchtitan(),
)


def _qwen3_block(config: ModelConfig) -> dict[str, Shape]:
    return {
        **attention_parameters(config),
        "attention.q_norm.weight": (config.head_dim,),
        "attention.k_norm.weight": (config.head_dim,),
        **feed_forward_parameters(config),
        **norm_parameters(config),
    }


_QWEN3_ROTARY = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")
_QWEN3_DEFAULTS: dict[str, Any] = {
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-6,
    "max_seq_len": 40_960,
    "head_dim": 128,
}


def _qwen3(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, hidden_dim: int, *, tied: bool = False
) -> ModelConfig:
    sizes = (dim, n_layers, n_heads, n_kv_heads, hidden_dim, 151_936)
    return ModelConfig(*sizes, tied_embeddings=tied, family="qwen3", **_QWEN3_DEFAULTS)


QWEN3 = Family(
    flavors={
        "debug": replace(_qwen3(256, 6, 8, 4, 768), vocab_size=2048, head_dim=48),
        "0.6B": _qwen3(1024, 28, 16, 8, 3072, tied=True),
        "1.7B": _qwen3(2048, 28, 16, 8, 6144, tied=True),
        "4B": _qwen3(2560, 36, 32, 8, 9728, tied=True),
        "8B": _qwen3(4096, 36, 32, 8, 12288),
        "14B": _qwen3(5120, 40, 40, 8, 17408),
        "32B": _qwen3(5120, 64, 64, 8, 25600),
    },
    block_parameters=_qwen3_block,
    defaults=_QWEN3_DEFAULTS,
    styles={"attention.q_norm": "replicated", "attention.k_norm": "replicated"},
    huggingface=HuggingFace(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
        defaults={
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "head_dim": 128,
            "num_key_value_heads": 32,
        },
        names={"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"},
        rotary=_QWEN3_ROTARY,
    ),
    torchtitan=Torchtitan(rotary=_QWEN3_ROTARY),
)


def _qwen3_moe_block(config: ModelConfig) -> dict[str, Shape]:
    return {
        **attention_parameters(config),
        "attention.q_norm.weight": (config.head_dim,),
        "attention.k_norm.weight": (config.head_dim,),
        **expert_parameters(config),
        **norm_parameters(config),
    }


def _qwen3_moe(dim: int, n_layers: int, n_heads: int, hidden_dim: int) -> ModelConfig:
    return ModelConfig(
        *(dim, n_layers, n_heads, 4, hidden_dim, 151_936),
        n_experts=128,
        experts_per_token=8,
        family="qwen3_moe",
        **_QWEN3_DEFAULTS,
    )


QWEN3_MOE = Family(
    flavors={
        "debug": replace(
            _qwen3_moe(256, 6, 8, 192),
            vocab_size=2048,
            head_dim=48,
            n_experts=8,
            experts_per_token=2,
        ),
        "30B-A3B": _qwen3_moe(2048, 48, 32, 768),
        "235B-A22B": _qwen3_moe(4096, 94, 64, 1536),
    },
    block_parameters=_qwen3_moe_block,
    block_buffers=expert_buffers,
    defaults=_QWEN3_DEFAULTS,
    styles={**QWEN3.styles, "moe.router": "replicated"},  # each rank routes its own tokens
    huggingface=HuggingFace(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
        defaults={
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "head_dim": 128,
            "num_key_value_heads": 4,
            "norm_topk_prob": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        names={
            "attention.q_norm": "self_attn.q_norm",
            "attention.k_norm": "self_attn.k_norm",
            "moe.router": "mlp.gate",
            "moe.experts.w1": "mlp.experts.*.gate_proj.weight",
            "moe.experts.w2": "mlp.experts.*.down_proj.weight",
            "moe.experts.w3": "mlp.experts.*.up_proj.weight",
        },
        sizes={
            "hidden_dim": ("moe_intermediate_size",),
            "n_experts": ("num_experts", "num_local_experts"),
            "experts_per_token": ("num_experts_per_tok",),
        },
        fused={
            "mlp.experts.gate_up_proj": ("moe.experts.w1", "moe.experts.w3"),
            "mlp.experts.down_proj": ("moe.experts.w2",),
        },
        rotary=_QWEN3_ROTARY,
    ),
    torchtitan=Torchtitan(
        names={
            "moe.router": "moe.router.gate",
            "moe.router.expert_bias": "moe.expert_bias_E",
            "moe.experts.w1": "moe.routed_experts.inner_experts.w1_EFD",
            "moe.experts.w2": "moe.routed_experts.inner_experts.w2_EDF",
            "moe.experts.w3": "moe.routed_experts.inner_experts.w3_EFD",
        },
        rotary=_QWEN3_ROTARY,
    ),
)

FAMILIES: dict[str, Family] = {"llama3": LLAMA3, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE}


# By name


def find_family(name: str) -> Family:
    """Return a family by its name, or by the path of a user's own file, which is run.

    Raises ConfigError.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    if name.endswith(".py"):
        return run_file(name).FAMILY
    raise ConfigError(
        f"model.name = {shown(name)}: use one of {', '.join(FAMILIES)}, or the path of a Python"
        " file with a family of your own"
    )


def where_it_is(saved: str, given: str) -> str:
    """Return the family that a checkpoint names, or where its file is now.

    given: model.name of the recipe, which is returned if both are files with the same name.
    """
    is_moved = saved.endswith(".py") and Path(saved).name == Path(given).name
    return given if is_moved else saved


@functools.cache  # as the file was when it was run
def file_digest(name: str) -> str:
    """Return a SHA-256 of a user's own file; "" for a family of this package.

    Raises ConfigError.
    """
    if name in FAMILIES:
        return ""
    find_family(name)  # raises ConfigError if the file is not there
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()


@functools.cache  # a file is run once
def run_file(name: str) -> ModuleType:
    """Run a user's own file, and return it as a module. Raises ConfigError."""
    subject = f"model.name = {shown(name)}"
    path = Path(name).resolve()
    if not path.is_file():
        raise ConfigError(
            f"{subject}: {path} is no file; put the file of the family there, or name where it is"
        )
    # for pickle, and so that two files of one name are two modules
    module_name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:  # would end the program without a word
        why = f"{subject}: SystemExit: {error}; the file has to run by itself"
        raise ConfigError(why) from error
    return module
