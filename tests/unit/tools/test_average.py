"""The mean of checkpoints' weights: its numbers, its formats, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from checkpoints import Given
from safetensors.torch import load_file
from tiny import UNTIED

from titan_lite.checkpoint.weights import open_weights, shapes
from titan_lite.config import ConfigError
from titan_lite.models.shapes import buffer_shapes
from titan_lite.tools import average
from titan_lite.tools.convert import write_step

MOE = dataclasses.replace(
    UNTIED, family="qwen3_moe", head_dim=10, hidden_dim=40, n_experts=5, experts_per_token=2
)


def random_weights(config, seed, dtype):
    """Buffers are in float32."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        fqn: torch.randn(shape, generator=generator).to(dtype)
        for fqn, shape in shapes(config).items()
    }
    for fqn, shape in buffer_shapes(config).items():
        tensors[fqn] = torch.randn(shape, generator=generator)
    return Given(config, tensors)


def write(folder, seeds, config=UNTIED, dtype=torch.float32):
    """Checkpoints as a run has them, and their paths and weights."""
    given = [random_weights(config, seed, dtype) for seed in seeds]
    paths = [folder / f"checkpoint/step-{seed}" for seed in seeds]
    for path, weights in zip(paths, given, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_step(path, weights)
    return list(map(str, paths)), [weights.tensors for weights in given]


def mean_of(given, fqn):
    return torch.stack([tensors[fqn].double() for tensors in given]).mean(0)


@pytest.mark.parametrize("config", [UNTIED, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_of_the_mean_has_each_tensor_rounded_once(config, dtype, tmp_path):
    paths, given = write(tmp_path, [1, 2, 3], config, dtype)
    output = tmp_path / "averaged"
    assert average.main([*paths, f"--output={output}", "--to=step"]) == 0
    found = open_weights(output, every_byte=True)
    assert found.buffers.keys() == buffer_shapes(config).keys()
    for fqn in (*found.shapes, *found.buffers):
        expected = mean_of(given, fqn).to(dtype if fqn in found.shapes else torch.float32)
        assert torch.equal(found.read(fqn), expected), fqn
    sources = json.loads((output / "state.json").read_text())["parts"]["converted_from"]["folders"]
    assert sources == paths


def test_sums_lose_no_number_that_float32_has(tmp_path):
    paths = [tmp_path / f"step-{number}" for number in range(3)]
    for path, number in zip(paths, (1e8, 1.0, -1e8), strict=True):
        tensors = {fqn: torch.full(shape, number) for fqn, shape in shapes(UNTIED).items()}
        write_step(path, Given(UNTIED, tensors))
    mean = average.open_mean(list(map(str, paths)))
    third = torch.tensor(1 / 3, dtype=torch.float64).float()
    assert mean.read("norm.weight").eq(third).all()


def test_a_hugging_face_folder_of_the_mean(tmp_path):
    paths, given = write(tmp_path, [1, 2])
    output = tmp_path / "exported"
    assert average.main([*paths, "--output", str(output), "--dtype=bfloat16"]) == 0
    found = load_file(output / "model.safetensors")["model.norm.weight"]
    assert torch.equal(found, mean_of(given, "norm.weight").float().bfloat16())


def test_of_a_runs_folder_it_is_the_newest(tmp_path):
    for run in ("a", "b"):
        write(tmp_path / run, [1, 2])
    mean = average.open_mean([str(tmp_path / "a"), str(tmp_path / "b")])
    assert [part.folder for part in mean.parts] == [
        tmp_path / run / "checkpoint/step-2" for run in ("a", "b")
    ]


def refusal(*paths):
    with pytest.raises(ConfigError) as error:
        average.open_mean(list(map(str, paths)))
    return str(error.value)


def test_what_is_no_mean_is_refused(tmp_path):
    (one, two), _ = write(tmp_path, [1, 2])
    assert f"{one} is one checkpoint; name two or more" in refusal(one)
    assert "is named twice" in refusal(one, two, f"{one}/.")
    (other, *_), _ = write(tmp_path / "other", [3], dataclasses.replace(UNTIED, dim=40))
    assert refusal(one, other).startswith(
        f"{other} is of another model than {one}: dim 40 instead of 20"
    )
    average.main([one, two, f"--output={tmp_path / 'exported'}"])
    assert "a Hugging Face folder is not averaged" in refusal(one, tmp_path / "exported")
    assert "nowhere is not a folder" in refusal(one, tmp_path / "nowhere")
    path = Path(one, "__0_0.distcp")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "__0_0.distcp" in refusal(one, two)
