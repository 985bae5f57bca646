"""Checkpoints of torchtitan 0.3.0, told by the names in them: into a run on two ranks, and out of
one.
"""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from tiny import of_family
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_lite.checkpoint.names import from_torchtitan, to_torchtitan
from titan_lite.checkpoint.weights import TorchtitanFolder, load_initial, open_weights
from titan_lite.config import ConfigError
from titan_lite.config.families import ModelConfig
from titan_lite.models.transformer import Transformer
from titan_lite.tools import convert
from titan_lite.tools.convert import write_step, write_torchtitan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TINY = ModelConfig(
    dim=48, n_layers=2, n_heads=6, n_kv_heads=2, hidden_dim=64, vocab_size=320, max_seq_len=32
)
TIED = dataclasses.replace(TINY, tied_embeddings=True)
IN_A_LAYER = (  # parameters of torchtitan's Llama3Model, 0.3.0
    "attention.qkv_linear.wq",
    "attention.qkv_linear.wk",
    "attention.qkv_linear.wv",
    "attention.wo",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
    "attention_norm",
    "ffn_norm",
)
THEIRS = {"tok_embeddings.weight", "norm.weight", "lm_head.weight"} | {
    f"layers.{layer}.{module}.weight" for layer in range(2) for module in IN_A_LAYER
}


def model_of(config):
    model = Transformer(config)
    model.init_weights(seed=1)
    return dict(model.named_parameters())


def plain_save(folder, config, rename=to_torchtitan):
    """Save as torchtitan does: parameters at the top, and what else it keeps beside them."""
    state_dict = {rename(fqn): tensor.detach() for fqn, tensor in model_of(config).items()}
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
    assert {to_torchtitan(fqn) for fqn in ours} == THEIRS
    assert {from_torchtitan(name) for name in THEIRS} == set(ours)


@pytest.mark.parametrize("config", [TINY, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("rename", [to_torchtitan, str], ids=["0.3", "0.2"])
def test_a_plain_save_is_opened_with_the_shape_of_the_recipe(config, rename, tmp_path):
    step = plain_save(tmp_path / "checkpoint/step-3", config, rename)
    for path in (step, tmp_path):
        weights = open_weights(path, model=config)
        assert isinstance(weights, TorchtitanFolder)
        assert all(torch.equal(weights.read(fqn), it) for fqn, it in model_of(config).items())


def initial_weights(folder):
    """Return the parameters of a run on two ranks, in full."""
    mesh = init_device_mesh("cpu", (2,))
    parameters = {
        fqn: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)])
        for fqn, tensor in model_of(TINY).items()
    }
    load_initial(str(folder), TINY, parameters, None, Path("run"))
    return {fqn: parameter.full_tensor() for fqn, parameter in parameters.items()}


def test_a_run_on_two_ranks_starts_from_a_plain_save(tmp_path):
    plain_save(tmp_path / "theirs", TINY)
    expected = model_of(TINY)
    for found in run_ranks(2, initial_weights, tmp_path / "theirs"):
        assert all(torch.equal(found[fqn], tensor) for fqn, tensor in expected.items())


@pytest.mark.parametrize("config", [TINY, TIED], ids=["untied", "tied"])
def test_what_convert_writes_a_plain_load_reads_and_comes_back_to_the_bit(config, tmp_path):
    write_step(tmp_path / "step", open_weights(plain_save(tmp_path / "a", config), model=config))
    arguments = [str(tmp_path / "step"), str(tmp_path / "theirs"), "--to", "torchtitan"]
    assert convert.main(arguments) == 0
    found = {name: torch.zeros_like(model_of(TINY)[from_torchtitan(name)]) for name in THEIRS}
    dcp.load(found, checkpoint_id=tmp_path / "theirs", no_dist=True)
    back = open_weights(tmp_path / "theirs", model=config)
    for fqn, tensor in model_of(config).items():
        assert torch.equal(found[to_torchtitan(fqn)], tensor)
        assert torch.equal(back.read(fqn), tensor)
    if config.tied_embeddings:
        assert torch.equal(found["lm_head.weight"], found["tok_embeddings.weight"])
    write_torchtitan(tmp_path / "half", back, torch.bfloat16)
    assert open_weights(tmp_path / "half", model=config).dtypes["norm.weight"] == torch.bfloat16


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


def test_a_family_that_torchtitan_has_in_another_layout_is_refused(tmp_path):
    config = of_family("qwen3", TINY)
    folder = plain_save(tmp_path / "theirs", config)
    with pytest.raises(ConfigError, match=r'model.name = "qwen3": torchtitan.s checkpoints have'):
        open_weights(folder, model=config)
