"""Every shipped recipe: it loads, it fits the cluster that its header states, and, shrunk to the
debug flavor, it trains.
"""

import re

import pytest
from ranks import run_ranks
from tiny import DEBUG_TOKENIZER
from tiny import RECIPES as FOLDER

from titan_lite.config import (
    Config,
    load_config,
)
from titan_lite.config.families import FAMILIES, LLAMA3
from titan_lite.distributed.layout import Layout
from titan_lite.hooks import Hook
from titan_lite.metrics.deferred import StepMetrics
from titan_lite.models.shapes import shape_of
from titan_lite.rules import check
from titan_lite.trainer import Trainer

RECIPES = sorted(FOLDER.glob("*.toml"))
TRAINED = [  # these have all that the others have, when they have the debug flavor
    "debug_model",
    pytest.param("llama3_405b", marks=pytest.mark.slow),
    pytest.param("llama3_405b_float8", marks=pytest.mark.slow),
    pytest.param("qwen3_32b", marks=pytest.mark.slow),
    pytest.param("llama3_8b_128k", marks=pytest.mark.release),
    pytest.param("qwen3_235b_a22b", marks=pytest.mark.release),
]


def test_there_is_a_recipe_for_every_flavor():
    names = {recipe.stem for recipe in RECIPES}
    assert names == {
        "debug_model",
        *(f"llama3_{size}" for size in ("1b", "3b", "8b", "70b", "405b", "8b_128k")),
        *(f"llama3_{size}_float8" for size in ("8b", "70b", "405b")),
        *(f"qwen3_{size}" for size in ("0.6b", "8b", "32b")),
        *(f"qwen3_{size}" for size in ("moe_debug", "30b_a3b", "235b_a22b")),
    }
    models = [load_config(recipe).model for recipe in RECIPES]
    assert {model.flavor for model in models if model.name == "llama3"} == set(LLAMA3.flavors)
    assert {model.name for model in models} == FAMILIES.keys()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_loads_and_fits_the_cluster_of_its_header(recipe):
    config = load_config(recipe)
    stated = re.search(r"^# world_size: (\d+)$", recipe.read_text(), re.M)
    world_size = int(stated[1]) if stated else 2  # as that of debug_model, which it extends
    assert config.training.seq_len <= shape_of(config.model).max_seq_len
    assert config.lr_scheduler.warmup_steps < config.training.steps
    layout = Layout.from_config(config, world_size)
    check(config, layout)
    assert len(layout.pipeline.modules) % layout.degrees["pp"] == 0


def train_shrunk(config: Config) -> tuple[int, list[float]]:
    losses = []

    class KeepLosses(Hook):
        def on_metrics(self, metrics: StepMetrics) -> None:
            losses.append(metrics.loss)

    trainer = Trainer(config, hooks=[KeepLosses()])
    trainer.train()
    return trainer.layout.accumulation, losses


@pytest.mark.parametrize("recipe", TRAINED)
def test_a_recipe_shrunk_to_the_debug_flavor_trains(recipe, tmp_path):
    config = load_config(FOLDER / f"{recipe}.toml")
    pp = min(2, config.parallelism.pipeline_parallel_degree)
    tp = min(2 // pp, config.parallelism.tensor_parallel_degree)
    small = dict(local_batch_size=2 * pp, seq_len=32, steps=2)  # DualPipeV needs 2 * pp
    if config.training.global_batch_size != -1:  # two batches, of each of 2 / (pp * tp) ranks
        small["global_batch_size"] = 8 // tp
    config = config.replace(
        job=config.job.replace(dump_folder=str(tmp_path)),
        model=config.model.replace(flavor="debug", tokenizer_path=str(DEBUG_TOKENIZER)),
        training=config.training.replace(**small),
        lr_scheduler=config.lr_scheduler.replace(warmup_steps=0),
        parallelism=config.parallelism.replace(
            data_parallel_shard_degree=-1,
            tensor_parallel_degree=tp,
            context_parallel_degree=min(2, config.parallelism.context_parallel_degree),
            pipeline_parallel_degree=pp,
            expert_parallel_degree=min(2 // pp, config.parallelism.expert_parallel_degree),
        ),
        compile=config.compile.replace(
            backend="aot_eager"
        ),  # the passes without a minute of code generation
        data=config.data.replace(dataset="stdlib"),
        validation=config.validation.replace(steps=1),
    )
    (accumulation, losses), again = run_ranks(2, train_shrunk, config, init=False)
    assert (accumulation, losses) == again
    assert accumulation == (2 if "global_batch_size" in small else 1)
    assert len(losses) == 2
    assert all(7.4 < loss < 7.9 for loss in losses)  # about ln(2048), on other tokens each
    assert (tmp_path / "checkpoint/step-2/.metadata").is_file()
