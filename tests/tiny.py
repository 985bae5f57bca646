"""Small enough for a test: options that shrink the debug recipe, and shapes of models.

options = [*SMALL, *steps(6, schedule=12), *every(2), *NO_VALIDATION]
"""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_lite.config.families import ModelConfig

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "train_configs"
DEBUG = RECIPES / "debug_model.toml"
DEBUG_TOKENIZER = ROOT / "assets/tokenizer/debug.model"

SHORT = ["--training.seq_len=32", "--metrics.log_freq=1"]
# 2 blocks instead of the debug flavor's 6, and a width of 64 instead of 256: a third of the time
TINY_MODEL = ["--model.n_layers=2", "--model.dim=64", "--model.hidden_dim=96"]
SMALL = [*SHORT, *TINY_MODEL]
NO_VALIDATION = ["--validation.no-enable"]
NO_CHECKPOINT = ["--checkpoint.no-enable"]
NO_WORKERS = ["--data.num_workers=0"]
AOT_EAGER = [
    "--compile.enable",
    "--compile.backend=aot_eager",
]  # the passes without Inductor's minute of code generation

# 61, 30 and 10 rows: no number of ranks here divides all of them
UNTIED = ModelConfig(
    dim=20, n_layers=2, n_heads=2, n_kv_heads=1, hidden_dim=30, vocab_size=61, max_seq_len=16
)
TIED = replace(UNTIED, tied_embeddings=True)
# Heads that tensor parallelism divides; of 30 hidden units and 61 tokens the last of four ranks has
# fewer.
HEADS = ModelConfig(
    dim=32, n_layers=2, n_heads=8, n_kv_heads=4, hidden_dim=30, vocab_size=61, max_seq_len=16
)

# A row a family: what its small shapes have beside those above. Tests that run over all families
# run over this table; tests/unit/config/test_families.py sees that none is missing.
OF_FAMILY = {
    "llama3": {},
    "qwen3": {"head_dim": 10},  # not dim / n_heads, and 10 of wq's rows are one head
    # no number of ranks here divides 5 experts; 40 hidden units have a kernel in bfloat16, too
    "qwen3_moe": {"head_dim": 10, "hidden_dim": 40, "n_experts": 5, "experts_per_token": 2},
}
FIRST_FAMILY = "llama3"


def slow_unless_first():
    """The families, as parameters of a test that is slow but for the first of them."""
    return [
        pytest.param(family, marks=() if family == FIRST_FAMILY else pytest.mark.slow)
        for family in OF_FAMILY
    ]


def of_family(family, shape):
    return replace(shape, family=family, **OF_FAMILY[family])


def steps(count: int, schedule: int | None = None) -> list[str]:
    """schedule: the steps of the learning rate's, where the run is a part of it; its second half
    decays, or what the warm-up of the debug recipe leaves.
    """
    options = [f"--training.steps={count}"]
    if schedule:
        begin = max(10, schedule // 2)
        options.append(f"--lr_scheduler.decay_begin={begin}")
        options.append(f"--lr_scheduler.decay_length={max(1, schedule - begin)}")
    return options


def every(saved: int, validated: int | None = None, batches: int = 1) -> list[str]:
    """Steps from one checkpoint to the next, and from one validation, of so many batches, to the
    next.
    """
    checks = (
        [f"--validation.freq={validated}", f"--validation.steps={batches}"] if validated else []
    )
    return [f"--checkpoint.interval={saved}", *checks]
