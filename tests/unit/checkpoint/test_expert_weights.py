"""Weights of experts in Hugging Face's files: each apart or fused, both names of their number, and what
has no place there.
"""

import dataclasses
import json

import pytest
import torch
from checkpoints import Given
from in_transformers import in_memory
from safetensors.torch import load_file, save_file
from tiny import UNTIED, of_family

from titan_lite import manifest
from titan_lite.checkpoint import tensor_files
from titan_lite.checkpoint.run_identity import RunIdentity
from titan_lite.checkpoint.state import RunState, write_state
from titan_lite.checkpoint.weights import load, open_weights
from titan_lite.config import ConfigError
from titan_lite.models.shapes import buffer_shapes
from titan_lite.models.transformer import Transformer
from titan_lite.tools import convert
from titan_lite.tools.convert import write_hf, write_step
from titan_lite.tools.generate import build_model

CONFIG = of_family("qwen3_moe", UNTIED)
BIASES = [fqn for fqn in buffer_shapes(CONFIG) if fqn.endswith("expert_bias")]


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A step whose routers have biases, as a run saves it."""
    folder = tmp_path_factory.mktemp("run") / "step"
    folder.mkdir()
    model = Transformer(CONFIG)
    model.init_weights(seed=2)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for fqn, shape in buffer_shapes(CONFIG).items():
        tensors[fqn] = torch.full(shape, 1 / 5)
    for number, fqn in enumerate(BIASES):
        tensors[fqn] = torch.tensor([1, -2, 0, 3, 4]) * 1e-3 * (number + 1) + 1e-7
    tensor_files.write_one_by_one(folder, tensors, tensors.__getitem__)
    write_state(folder, 7, ["model"], RunState(RunIdentity(model=dataclasses.asdict(CONFIG)), {}))
    files = {path.name: manifest.digest(path) for path in folder.iterdir()}
    manifest.write(folder, 7, files)
    return folder


@pytest.fixture
def exported(step, tmp_path):
    write_hf(tmp_path / "hf", open_weights(step))
    return tmp_path / "hf"


def same(found, expected):
    assert found.shapes == expected.shapes
    return all(torch.equal(found.read(fqn), expected.read(fqn)) for fqn in expected.shapes)


def change_config(folder, **values):
    path = folder / "config.json"
    content = json.loads(path.read_text())
    for name, value in values.items():
        content.pop(name, None)
        if value is not None:
            content[name] = value
    path.write_text(json.dumps(content))


def fuse(folder, change=lambda tensors: tensors):
    tensors = change(in_memory(load_file(folder / "model.safetensors")))
    save_file(tensors, folder / "model.safetensors")


def test_an_export_has_each_expert_apart_and_comes_back_to_the_bit(step, exported, tmp_path):
    names = load_file(exported / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.4.gate_proj.weight" in names
    assert "model.layers.1.mlp.gate.weight" in names
    json_of = json.loads((exported / "config.json").read_text())
    assert (json_of["num_experts"], json_of["num_experts_per_tok"]) == (5, 2)
    assert json_of["moe_intermediate_size"] == 40
    assert same(open_weights(exported), open_weights(step))
    write_step(tmp_path / "back", open_weights(exported))
    back = open_weights(tmp_path / "back")
    assert same(back, open_weights(step))
    assert not back.buffers


def test_transformers_reads_an_export_and_its_own_folder_is_read(step, exported, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    model = Transformer(CONFIG)
    load(open_weights(step), dict(model.named_parameters()))
    ids = torch.arange(16)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), rtol=1e-5, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    assert same(open_weights(tmp_path / "theirs"), open_weights(step))


@pytest.mark.parametrize("names", [("num_experts",), ("num_local_experts",), "both"])
def test_both_names_of_the_number_of_experts_are_read(names, step, exported):
    both = ("num_experts", "num_local_experts")
    change_config(
        exported, **{name: 5 if name in names or names == "both" else None for name in both}
    )
    assert same(open_weights(exported), open_weights(step))


def test_a_fused_file_is_read_where_its_dimensions_leave_no_doubt(step, exported):
    fuse(exported)
    found = open_weights(exported)
    assert same(found, open_weights(step))
    part = found.read("layers.0.moe.experts.w3", slice(1, 3))
    assert torch.equal(part, open_weights(step).read("layers.0.moe.experts.w3")[1:3])


def test_a_fused_file_that_is_transposed_is_refused(exported):
    fuse(
        exported,
        lambda tensors: {
            name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
            for name, tensor in tensors.items()
        },
    )
    expected = r"gate_up_proj is \[5, 20, 80\], where \[5, 80, 20\] is expected"
    with pytest.raises(ConfigError, match=expected):
        open_weights(exported)


def test_a_fused_file_whose_sides_are_alike_is_refused(tmp_path):
    config = dataclasses.replace(CONFIG, dim=40, hidden_dim=20)

    model = Transformer(config)
    model.init_weights(seed=0)
    write_hf(tmp_path / "hf", Given(config, dict(model.named_parameters())))
    fuse(tmp_path / "hf")
    with pytest.raises(ConfigError, match="could be the other way round; save each expert apart"):
        open_weights(tmp_path / "hf")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm_topk_prob": None}, "norm_topk_prob = False: expected True"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]: expected \[\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2: expected 1"),
        ({"num_experts": 10**9, "num_local_experts": None}, "1,000,000,000 experts, but"),
        ({"num_experts": 4, "num_local_experts": None}, "experts.4.gate_proj.weight is unexpected"),
        ({"shared_expert_intermediate_size": 8}, "may change what the model computes"),
    ],
)
def test_another_mixture_is_refused(change, words, exported):
    change_config(exported, **change)
    with pytest.raises(ConfigError, match=words):
        open_weights(exported)


# Biases


def test_a_bias_that_an_export_cannot_hold_is_reported(step, tmp_path, caplog):
    write_hf(tmp_path / "hf", open_weights(step))
    assert "left out: the biases by which 2 routers choose experts" in caplog.text
    caplog.clear()
    write_hf(tmp_path / "again", open_weights(tmp_path / "hf"))
    assert "left out" not in caplog.text


def test_biases_stay_float32_in_a_step_of_another_dtype(step, tmp_path):
    convert.main([str(step), str(tmp_path / "half"), "--to", "step", "--dtype", "bfloat16"])
    half = open_weights(tmp_path / "half")
    for fqn in BIASES:
        assert half.read(fqn).dtype == torch.float32
        assert torch.equal(half.read(fqn), open_weights(step).read(fqn))
    assert half.read("layers.0.moe.experts.w1").dtype == torch.bfloat16


def test_generate_chooses_with_the_biases(step):
    model = build_model(open_weights(step), 16, torch.device("cpu"), torch.float32)
    for fqn in BIASES:
        assert torch.equal(model.get_buffer(fqn), open_weights(step).read(fqn))
