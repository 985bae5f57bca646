"""Checkpoints of torchtitan 0.3.0, told by the names in them: into a run on two ranks, and out of
one. Those of its Qwen3 and Qwen3-MoE have rotary pairs as transformers does.
"""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from tiny import ROOT, of_family
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_lite.checkpoint.names import TorchtitanNames
from titan_lite.checkpoint.weights import TorchtitanFolder, load_initial, open_weights
from titan_lite.config import ConfigError
from titan_lite.config.families import ModelConfig
from titan_lite.models.transformer import Transformer
from titan_lite.tools import convert
from titan_lite.tools.convert import write_hf, write_step, write_torchtitan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TINY = ModelConfig(
    dim=48, n_layers=2, n_heads=6, n_kv_heads=2, hidden_dim=64, vocab_size=320, max_seq_len=32
)
TIED = dataclasses.replace(TINY, tied_embeddings=True)
QWEN3 = of_family("qwen3", TINY)
MOE = of_family("qwen3_moe", TINY)
OF_LLAMA = TorchtitanNames("llama3")
OWN_FAMILY = ROOT / "tests/own_families/shared_expert.py"
IN_A_LAYER = (  # parameters of torchtitan's Llama3Model, 0.3.0
    *(f"attention.{name}" for name in ("qkv_linear.wq", "qkv_linear.wk", "qkv_linear.wv", "wo")),
    *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
    "attention_norm",
    "ffn_norm",
)
THEIRS = {"tok_embeddings.weight", "norm.weight", "lm_head.weight"} | {
    f"layers.{layer}.{module}.weight" for layer in range(2) for module in IN_A_LAYER
}
IN_A_MIXTURE = (  # and those of its Qwen3Model with a mixture, with a buffer
    *(f"{module}.weight" for module in IN_A_LAYER if "feed_forward" not in module),
    *(f"attention.{name}.weight" for name in ("q_norm", "k_norm")),
    *(f"moe.{name}" for name in ("router.gate.weight", "expert_bias_E")),
    *(f"moe.routed_experts.inner_experts.{name}" for name in ("w1_EFD", "w2_EDF", "w3_EFD")),
)


def model_of(config):
    """Its parameters, and the biases of routers."""
    model = Transformer(config)
    model.init_weights(seed=1)
    biases = {fqn: each for fqn, each in model.named_buffers() if fqn.endswith("expert_bias")}
    tensors = {**dict(model.named_parameters()), **biases}
    return {
        # vectors begin as ones or zeros, in any order
        fqn: tensor.detach() + 0.01 * torch.arange(len(tensor)) if tensor.ndim == 1 else tensor
        for fqn, tensor in tensors.items()
    }


def in_halves(weight, head_dim):
    """Rows with rotary pairs (i, i + D/2) in each head, one by one."""
    found = weight.detach().clone()
    for head in range(len(weight) // head_dim):
        for pair in range(head_dim // 2):
            for side in (0, 1):
                theirs = head * head_dim + side * head_dim // 2 + pair
                found[theirs] = weight[head * head_dim + 2 * pair + side].detach()
    return found


def as_theirs(fqn, weight, config):
    rotary = ("attention.w" in fqn and fqn[-8] in "qk") or "q_norm" in fqn or "k_norm" in fqn
    if config.family == "llama3" or not rotary:
        return weight.detach()
    return in_halves(weight, config.head_dim)


def plain_save(folder, config, rename=None):
    """Save as torchtitan does: parameters at the top, and what else it keeps beside them."""
    rename = rename or TorchtitanNames(config.family).of
    state_dict = {
        rename(fqn): as_theirs(fqn, tensor, config) for fqn, tensor in model_of(config).items()
    }
    if config.tied_embeddings:
        state_dict[rename("output.weight")] = state_dict["tok_embeddings.weight"]
    state_dict["optimizer"] = {
        "state.layers.0.attention.qkv_linear.wqkv.weight.exp_avg": torch.zeros(80, 48),
        "param_groups.norm.weight.lr": 8e-4,
    }
    state_dict["lr_scheduler"] = {"last_epoch": 3}
    state_dict["train_state"] = {"step": 3, "ntokens_seen": 384}
    dcp.save(state_dict, checkpoint_id=folder, no_dist=True)
    return folder


def test_names_are_those_of_torchtitan_and_back():
    ours = model_of(TINY)
    assert {OF_LLAMA.of(fqn) for fqn in ours} == THEIRS
    assert {OF_LLAMA.ours(name) for name in THEIRS} == set(ours)
    names = TorchtitanNames("qwen3_moe")
    of_blocks = {f"layers.{layer}.{name}" for layer in range(2) for name in IN_A_MIXTURE}
    theirs = {"tok_embeddings.weight", "norm.weight", "lm_head.weight"} | of_blocks
    ours = model_of(MOE)
    assert {names.of(fqn) for fqn in ours} == theirs
    assert {names.ours(name) for name in theirs} == set(ours)


@pytest.mark.parametrize(
    ("config", "rename"),
    [
        *((config, None) for config in (TINY, TIED, QWEN3, MOE)),
        *((config, str) for config in (TINY, TIED)),
    ],
    ids=["untied", "tied", "Qwen3", "Qwen3-MoE", "untied, 0.2", "tied, 0.2"],
)
def test_a_plain_save_is_opened_with_the_shape_of_the_recipe(config, rename, tmp_path):
    step = plain_save(tmp_path / "checkpoint/step-3", config, rename)
    for path in (step, tmp_path):
        weights = open_weights(path, model=config)
        assert isinstance(weights, TorchtitanFolder)
        assert all(torch.equal(weights.read(fqn), it) for fqn, it in model_of(config).items())


def initial_weights(folder, config):
    """Return the parameters of a run on two ranks, in full."""
    mesh = init_device_mesh("cpu", (2,))
    parameters = {
        fqn: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)])
        for fqn, tensor in model_of(config).items()
    }
    load_initial(str(folder), config, parameters, Path("run"))
    return {fqn: parameter.full_tensor() for fqn, parameter in parameters.items()}


@pytest.mark.parametrize("config", [TINY, MOE], ids=["Llama", "Qwen3-MoE"])
def test_a_run_on_two_ranks_starts_from_a_plain_save(config, tmp_path):
    plain_save(tmp_path / "theirs", config)
    expected = model_of(config)
    for found in run_ranks(2, initial_weights, tmp_path / "theirs", config):
        assert all(torch.equal(found[fqn], tensor) for fqn, tensor in expected.items())


@pytest.mark.parametrize(
    "config", [TINY, TIED, QWEN3, MOE], ids=["untied", "tied", "Qwen3", "Qwen3-MoE"]
)
def test_what_convert_writes_a_plain_load_reads_and_comes_back_to_the_bit(config, tmp_path):
    names = TorchtitanNames(config.family)
    write_step(tmp_path / "step", open_weights(plain_save(tmp_path / "a", config), model=config))
    arguments = [str(tmp_path / "step"), str(tmp_path / "theirs"), "--to", "torchtitan"]
    assert convert.main(arguments) == 0
    ours = model_of(config)
    found = {names.of(fqn): torch.zeros_like(tensor) for fqn, tensor in ours.items()}
    found["lm_head.weight"] = torch.zeros_like(ours["tok_embeddings.weight"])
    dcp.load(found, checkpoint_id=tmp_path / "theirs", no_dist=True)
    back = open_weights(tmp_path / "theirs", model=config)
    for fqn, tensor in ours.items():
        assert torch.equal(found[names.of(fqn)], as_theirs(fqn, tensor, config)), fqn
        assert torch.equal(back.read(fqn), tensor)
    if config.tied_embeddings:
        assert torch.equal(found["lm_head.weight"], found["tok_embeddings.weight"])
    write_torchtitan(tmp_path / "half", back, torch.bfloat16)
    assert open_weights(tmp_path / "half", model=config).dtypes["norm.weight"] == torch.bfloat16


def test_torchtitan_gets_biases_also_from_weights_without_them(tmp_path):
    """It asks for them when it loads."""
    weights = open_weights(plain_save(tmp_path / "a", MOE), model=MOE)
    write_hf(tmp_path / "hf", weights)
    write_torchtitan(tmp_path / "theirs", open_weights(tmp_path / "hf"))
    found = {"layers.1.moe.expert_bias_E": torch.ones(MOE.n_experts)}
    dcp.load(found, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert not found["layers.1.moe.expert_bias_E"].any()


def test_what_does_not_fit_is_one_line(tmp_path, capsys):
    step = plain_save(tmp_path / "theirs", TINY)
    wrong = dataclasses.replace(TINY, vocab_size=300)
    with pytest.raises(ConfigError, match=r"tok_embeddings.weight is \[320, 48\], where \[300, 48"):
        open_weights(step, model=wrong)
    with pytest.raises(ConfigError, match=r"lm_head.weight is missing"):
        open_weights(
            plain_save(tmp_path / "tied", TIED, lambda n: n.replace("output", "x")), model=TINY
        )
    assert convert.main([str(step), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "checkpoint of torchtitan, which does not have the shape of its model; use it as" in line
    weights = open_weights(step, model=TINY)
    os.truncate(step / "__0_0.distcp", 1000)
    with pytest.raises(ConfigError, match=r"theirs cannot be read: __0_0.distcp cannot be read: "):
        weights.read("output.weight")
    (step / ".metadata").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"theirs: .metadata cannot be read: EOFError"):
        open_weights(step, model=TINY)


def test_of_qwen3_our_names_are_refused_since_rows_may_be_in_either_order(tmp_path):
    folder = plain_save(tmp_path / "theirs", QWEN3, str)
    with pytest.raises(ConfigError, match=r"rows of model.name = \"qwen3\" are in different order"):
        open_weights(folder, model=QWEN3)


def test_a_family_that_torchtitan_does_not_have_is_refused(tmp_path):
    config = dataclasses.replace(TINY, family=str(OWN_FAMILY))
    folder = plain_save(tmp_path / "theirs", TINY)
    with pytest.raises(ConfigError, match=r"torchtitan.s checkpoints have another layout"):
        open_weights(folder, model=config)
