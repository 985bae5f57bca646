"""Layouts that cannot be: refused before a process group starts, with key and value and what would
work, which does.
"""

import importlib
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from titan_lite.config import ConfigError, load_config
from titan_lite.config.load import option
from titan_lite.distributed.layout import Layout
from titan_lite.rules.machine import check_machine, does_not_fit, mistakes_here
from titan_lite.rules.mistakes import raise_mistakes

ROOT = Path(__file__).parents[3]
DEBUG = (
    ROOT / "train_configs/debug_model.toml"
)  # 6 layers, 8 heads, 4 key/value heads, 256 tokens, batches of 2 of 8


@pytest.fixture(autouse=True)
def no_run_before(monkeypatch, tmp_path):
    """Leave no outputs/ with steps that a recipe would resume from."""
    monkeypatch.chdir(tmp_path)


class Wrong(NamedTuple):
    """[parallelism] and [training] keys, short; ranks; what the message says; and what is changed
    in them so that it works.
    """

    ranks: int
    keys: str
    words: tuple[str, ...]
    fix: str = ""
    fixed_ranks: int = 0


SHORT = {
    "attention": "training.attention_kernel",
    "replicate": "parallelism.data_parallel_replicate_degree",
    "shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "async_tp": "parallelism.enable_async_tensor_parallel",
    "pp": "parallelism.pipeline_parallel_degree",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "microbatch": "parallelism.pipeline_parallel_microbatch_size",
    "stages": "parallelism.pipeline_parallel_stages_per_rank",
    "points": "parallelism.pipeline_parallel_split_points",
    "less": "parallelism.pipeline_parallel_first_stage_less_layers",
    "reshard": "parallelism.fsdp_reshard_after_forward",
    "keep": "parallelism.fsdp_keep_gathered",
    "every": "parallelism.fsdp_communication",
    "batch": "training.local_batch_size",
    "global": "training.global_batch_size",
    "seq_len": "training.seq_len",
    "flavor": "model.flavor",
    "compile": "compile.enable",
    "backend": "compile.backend",
    "bucketing": "compile.bucketing",
    "machine": "compile.machine",
    "steps": "training.steps",
    "ac": "activation_checkpoint.mode",
    "ep": "parallelism.expert_parallel_degree",
}

WRONG = {
    "copies that do not divide": Wrong(
        8, "replicate=3 global=24", ("not divide 8 ranks", "start 9 ranks"), "global=36", 9
    ),
    "too many ranks": Wrong(8, "shard=4", ("need 4 ranks, and there are 8", "NGPU=4"), "", 4),
    "product of all five": Wrong(
        8,
        "shard=2 tp=2 pp=2 cp=2 replicate=2",
        ("(pp 2 x dp_replicate 2 x dp_shard 2 x cp 2 x tp 2) need 32",),
        "cp=1 replicate=1",
    ),
    "pipeline alone larger than the ranks": Wrong(
        2,
        "pp=4",
        (
            "(pp 4) multiply to 4, which does not divide 2 ranks;"
            " use parallelism.pipeline_parallel_degree = 2, or start 4 ranks",
        ),
        "pp=2",
    ),
    "sequence by cp": Wrong(
        2,
        "cp=2 seq_len=250",
        ("context_parallel_degree = 2", "2 x 2 chunks", "248 or 252"),
        "seq_len=252",
    ),
    "sequence by cp and tp": Wrong(
        4,
        "cp=2 tp=2 seq_len=252",
        ("context_parallel_degree = 2", "that 2 tensor-parallel ranks share", "248 or 256"),
        "seq_len=248",
    ),
    "global batch by data-parallel degree": Wrong(
        4,
        "batch=4 global=24",
        ("global_batch_size = 24", "4 x 4 = 16", "use 16 or 32"),
        "global=32",
    ),
    "batch by microbatches": Wrong(
        2,
        "pp=2 batch=4 microbatch=3",
        ("microbatch_size = 3 does not divide training.local_batch_size = 4", "use 1 or 2 or 4"),
        "microbatch=2",
    ),
    "fewer microbatches than stages": Wrong(
        4,
        "pp=4 batch=2",
        (
            'schedule = "1F1B" needs as many',
            "= 2 microbatches",
            'local_batch_size = 4, or pipeline_parallel_schedule = "GPipe"',
        ),
        "schedule=GPipe",
    ),
    "microbatches by rounds": Wrong(
        2,
        "pp=2 batch=5 global=5 schedule=Interleaved1F1B",
        ("goes in 2 rounds", "local_batch_size = 4 or 6"),
        "batch=6 global=6",
    ),
    "layers by stages": Wrong(
        9, "pp=9 batch=9 global=9", ("9 stages for 6 layers give -1, 1, 1",), "pp=3", 3
    ),
    "more stages than layers": Wrong(
        8,
        "pp=8 batch=8 global=8 schedule=Interleaved1F1B",
        ("16 stages for 6 layers",),
        "pp=2 batch=8",
        2,
    ),
    "a first stage with less than nothing": Wrong(
        2, "pp=2 less=9", ("give -1, 7", "first_stage_less_layers"), "less=1"
    ),
    "virtual stages of 1F1B": Wrong(
        2,
        "pp=2 stages=2",
        (
            'stages_per_rank = 2 is not for pipeline_parallel_schedule = "1F1B", which has 1;',
            '"Interleaved1F1B"',
        ),
        "stages=-1",
    ),
    "one virtual stage, interleaved": Wrong(
        2,
        "pp=2 stages=1 schedule=Interleaved1F1B",
        ("stages_per_rank = 1", "has 2 or more"),
        "stages=2",
    ),
    "three virtual stages of DualPipeV": Wrong(
        2,
        "pp=2 stages=3 schedule=DualPipeV batch=4",
        ("stages_per_rank = 3", '"DualPipeV", which has 2;'),
        "stages=2",
    ),
    "fewer microbatches than stages of DualPipeV": Wrong(
        2,
        "pp=2 schedule=DualPipeV batch=2",
        (
            "needs as many microbatches as stages, 4, but",
            'local_batch_size = 4, or pipeline_parallel_schedule = "ZBVZeroBubble"',
        ),
        "batch=4",
    ),
    "ZBV with checkpointing": Wrong(
        2,
        "pp=2 schedule=ZBVZeroBubble ac=full",
        ("cuts backward in two", "compile.enable = true"),
        "compile=true backend=aot_eager",
    ),
    "a rank with the copy of a tied table alone": Wrong(
        2,
        "pp=2 flavor=1B points=output",
        (
            'pipeline_parallel_split_points = ["output"] leaves a rank with the output alone',
            "norm or a layer",
        ),
        "points=norm",
    ),
    "a split at no module": Wrong(
        2,
        "pp=2 points=layers.9",
        ("there is no module layers.9", "layers.0 to layers.5"),
        "points=layers.3",
    ),
    "too many splits": Wrong(
        2,
        "pp=2 points=layers.2,layers.4",
        ("makes 3 stages, but the schedule has 2",),
        "points=layers.4",
    ),
    "splits in another order": Wrong(
        3,
        "pp=3 batch=4 global=4 points=layers.4,layers.2",
        ("not in the order", "use layers.2, layers.4"),
        "points=layers.2,layers.4",
    ),
    "always resharded, and kept": Wrong(
        2,
        "shard=2 reshard=always every=step",
        (
            'reshard_after_forward = "always" has no effect',
            "2 microbatches",
            'use fsdp_communication = "microbatch"',
        ),
        "reshard=default",
    ),
    "always resharded, but for one block": Wrong(
        2,
        "shard=2 every=microbatch reshard=always keep=layers.5",
        (
            'fsdp_keep_gathered = ["layers.5"]',
            'fsdp_reshard_after_forward = "always"',
            '"default"',
            "[]",
        ),
        "reshard=default",
    ),
    "a block to keep that is not there": Wrong(
        2,
        "shard=2 keep=layers.5,layers.6,norm",
        (
            'fsdp_keep_gathered = ["layers.5", "layers.6", "norm"] has "layers.6", which has no',
            "flavor debug",
            "layers.0 to layers.5",
        ),
        "keep=layers.5,norm",
    ),
    "half a name to keep": Wrong(
        2, "shard=2 keep=out", ('"out", which has no parameter', "norm, output or"), "keep=output"
    ),
    "async TP without TP": Wrong(
        2,
        "async_tp=true",
        ("enable_async_tensor_parallel = true", "tensor_parallel_degree"),
        "async_tp=false",
    ),
    "cuDNN from a part of a sequence": Wrong(
        2,
        "cp=2 attention=cudnn",
        ('attention_kernel = "cudnn"', "context_parallel_degree = 2", '"auto" or "FA2"'),
        "attention=auto",
    ),
    "nothing left to bucket": Wrong(
        2,
        "compile=true backend=aot_eager bucketing=greedy every=step",
        (
            'compile.bucketing = "greedy"',
            'fsdp_communication = "microbatch" or bucketing = "block"',
        ),
        "bucketing=block",
    ),
    "an unknown machine": Wrong(
        2,
        "compile=true backend=aot_eager machine=H1000",
        ('compile.machine = "H1000"', "H100"),
        "machine=H100",
    ),
    "async TP without a compiler": Wrong(
        2,
        "async_tp=true tp=2",
        ("enable_async_tensor_parallel = true", "compile.enable = true"),
        "async_tp=false",
    ),
    "async TP without a GPU": Wrong(
        2,
        "async_tp=true tp=2 compile=true",
        ("enable_async_tensor_parallel = true", "GPU"),
        "async_tp=false",
    ),
}


def checked(ranks, *keys):
    pairs = dict(pair.split("=", 1) for part in keys for pair in part.split())
    options = [option(SHORT[key], value) for key, value in pairs.items()]
    config = load_config(
        DEBUG, [*options, f"--model.tokenizer_path={ROOT / 'assets/tokenizer/debug.model'}"]
    )
    return check_machine(config, Layout.from_config(config, ranks))


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_layout_is_refused_and_the_way_out_works(wrong, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("titan_lite.rules.machine.host_memory", lambda: 2**50)
    with pytest.raises(ConfigError) as error:
        checked(wrong.ranks, wrong.keys)
    message = str(error.value)
    for word in wrong.words:
        assert word in message, message
    assert any(key in message for key in ("parallelism.", "training.", "compile."))
    checked(wrong.fixed_ranks or wrong.ranks, wrong.keys, wrong.fix)


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        (8, "pp=2 cp=2 tp=2"),
        (8, "pp=2 shard=2 tp=2"),
        (8, "replicate=2 shard=2 cp=2"),
        (4, "pp=4 schedule=GPipe"),
        (2, "pp=2 schedule=ZBVZeroBubble batch=4"),
        (2, "pp=2 schedule=DualPipeV batch=4"),
        (2, "pp=2 schedule=InterleavedZeroBubble stages=3 batch=4"),
        (2, "pp=2 schedule=Interleaved1F1B stages=3 batch=4"),
        (2, "pp=2 points=output"),
        (2, "pp=2 keep=tok_embeddings,layers.0.attention,output.weight"),  # of both stages
        (2, "shard=2 flavor=1B keep=output"),
        (2, "pp=2 flavor=1B keep=output"),
        (2, "shard=2 every=microbatch reshard=always keep="),
        (2, "shard=2 every=microbatch reshard=never"),
    ],
)
def test_layouts_that_can_be(ranks, keys):
    checked(ranks, keys)


def test_weights_and_biases_must_be_installed_where_they_are_asked_for(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()  # where it keeps its files
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    config = load_config(
        DEBUG, ["--metrics.enable_wandb", "--job.dump_folder", str(tmp_path / "out")]
    )
    with pytest.raises(
        ConfigError,
        match=r"metrics.enable_wandb = true .* pip install wandb, or enable_wandb = false",
    ):
        check_machine(config, Layout.from_config(config, 1))
    (tmp_path / "wandb/__init__.py").write_text("")
    importlib.invalidate_caches()
    check_machine(config, Layout.from_config(config, 1))


def check_memory(config, layout, *bytes_of_rank):
    raise_mistakes(config, does_not_fit(config, layout, *bytes_of_rank))


def layout_of(recipe, ranks, gib, *options):
    config = load_config(ROOT / f"train_configs/{recipe}.toml", options)
    return config, Layout.from_config(config, ranks, device_memory=gib * 2**30)


def test_what_cannot_fit_is_refused_with_what_would():
    config, layout = layout_of("llama3_8b", 1, 80)
    with pytest.raises(
        ConfigError,
        match=(
            r"need at least 120 GiB a rank, .* a rank has 80; use .*data_parallel_shard_degree = 2 or more"
        ),
    ):
        check_memory(config, layout, 80 * 2**30)
    accumulates = [
        "--training.local_batch_size=1",
        "--training.global_batch_size=32",
        "--compile.bucketing=block",
    ]
    config, layout = layout_of(
        "llama3_8b", 8, 60, *accumulates, "--parallelism.fsdp_communication=step"
    )
    with pytest.raises(
        ConfigError,
        match=r'fsdp_communication = "step" needs 75 GiB .* has 60; use "microbatch" or "auto"',
    ):
        check_memory(config, layout, 60 * 2**30)
    check_memory(*layout_of("llama3_8b", 8, 60, *accumulates), 60 * 2**30)


def test_a_batch_that_cannot_be_is_refused_with_one_that_can():
    gib = 2**30
    long = ["--training.global_batch_size=-1", "--training.seq_len=8192"]
    huge = [*long, "--training.local_batch_size=60000"]
    words = (
        r"training.local_batch_size = 60000 needs at least [\d,]+ GiB a rank for its tokens of 8,192"
        r" a sequence and their activations, and a rank has 12; use at most (\d+)"
    )
    with pytest.raises(ConfigError, match=words) as error:
        check_memory(*layout_of("debug_model", 2, math.inf, *huge), math.inf, 12 * gib)
    (fitting,) = re.findall(r"at most (\d+)", str(error.value))
    smaller = [*long, f"--training.local_batch_size={fitting}"]
    check_memory(*layout_of("debug_model", 2, math.inf, *smaller), math.inf, 12 * gib)
    # on a GPU, whose host has more
    with pytest.raises(ConfigError, match="a rank has 80; use at most"):
        check_memory(*layout_of("debug_model", 2, 80, *huge), 80 * gib, 2000 * gib)
    with pytest.raises(ConfigError, match=r"use training.seq_len below [\d,]+$"):
        check_memory(
            *layout_of("debug_model", 2, 80, "--training.seq_len=16000000"), 80 * gib, 2000 * gib
        )


def test_the_copy_of_a_save_in_the_background_has_to_fit_in_host_memory():
    gib = 2**30
    asked = ["--checkpoint.enable", "--checkpoint.async_mode=async"]
    recipe = layout_of("llama3_8b", 8, 80, *asked)
    check_memory(*recipe, 80 * gib, 12 * gib)  # 8B parameters x 12 bytes / 8 ranks: 11.2 GiB
    words = r'async_mode = "async" keeps a copy of .* in host memory'
    with pytest.raises(
        ConfigError, match=rf'{words}: 11 GiB a rank, and a rank has 10; use "disabled"'
    ):
        check_memory(*recipe, 80 * gib, 10 * gib)
    on_cpu = layout_of("llama3_8b", 8, math.inf, *asked)
    with pytest.raises(ConfigError, match=f"{words}, beside them: 26 GiB a rank"):
        check_memory(*on_cpu, math.inf, 20 * gib)
    check_memory(*layout_of("llama3_8b", 8, 80, "--checkpoint.enable"), 80 * gib, gib)


def test_a_model_that_this_machine_cannot_hold_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        ConfigError,
        match=(
            r"^no GPU found, and .*dim = 65536.* need \d+ GiB a rank, and a rank has \d+;"
            r" `titan-lite plan RECIPE --world-size 8` predicts"
        ),
    ):
        check_machine(
            *layout_of(
                "debug_model",
                2,
                math.inf,
                "--model.dim=65536",
                "--model.n_layers=256",
                "--model.n_heads=512",
            )
        )


def test_memory_snapshots_need_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = load_config(DEBUG, ["--profiling.enable_memory_snapshot"])
    (mistake,) = mistakes_here(config, Layout.from_config(config, 2))
    assert mistake.message(config) == (
        "command line: profiling.enable_memory_snapshot = true takes snapshots of CUDA memory, and"
        " there is none here; use enable_memory_snapshot = false"
    )
