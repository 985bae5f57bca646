"""Evaluate a checkpoint on tasks of lm-evaluation-harness.

titan-lite evaluate outputs/debug_model --tasks hellaswag arc_easy
torchrun --nproc-per-node 8 -m titan_lite evaluate CHECKPOINT --tasks hellaswag

Processes share the weights and the requests: each has its shards, as in training.
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.distributed as dist

from titan_lite.checkpoint.weights import Weights, load, open_weights
from titan_lite.cli import Parser, command
from titan_lite.config import Config, ConfigError, Parallelism, Training
from titan_lite.config.sections import Debug
from titan_lite.distributed.device import init_device
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.mesh import build_mesh
from titan_lite.distributed.parallelize import ParallelModel, parallelize
from titan_lite.distributed.process_group import connect_store, init_process_group
from titan_lite.environment import check_environment
from titan_lite.logging import init_logging, logger
from titan_lite.tools.generate import check_experts, find_tokenizer

SECONDS = 1800.0  # that a rank may wait for another: one may download a task's documents


def build_model(
    weights: Weights, dtype: str, max_length: int, parallelism: Parallelism, device: torch.device
) -> ParallelModel:
    """Return a model with these weights, sharded over all ranks. A collective.

    dtype: "float32" or "bfloat16", in which it computes. max_length: tokens of a request.
    """
    check_experts(weights.config, getattr(torch, dtype))
    training = Training(
        seq_len=max_length, mixed_precision_param=dtype, mixed_precision_reduce="float32"
    )
    config = Config(training=training, parallelism=parallelism)
    layout = Layout.from_config(config, dist.get_world_size(), weights.config)
    model = parallelize(config, layout, build_mesh(layout.degrees, device.type))
    model.materialize(device)
    model.init_weights(seed=0)  # buffers
    load(weights, {**model.parameters, **model.buffers})
    model.parameters_have_changed()
    return model


def build_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument(
        "checkpoint",
        help="a run's folder (its newest complete step), a checkpoint, or a Hugging Face folder",
    )
    parser.add_argument(
        "--tasks", nargs="+", required=True, metavar="TASK", help="names of tasks or groups"
    )
    parser.add_argument(
        "--task-folder", default="", metavar="FOLDER", help="with task files of your own"
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="documents of each task (default: all)"
    )
    parser.add_argument(
        "--num-fewshot",
        type=int,
        metavar="N",
        help="examples in a prompt (default: as each task says)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=8,
        metavar="N",
        help="requests of a process at a time (default %(default)s)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="tokens of a request (default: the model's max_seq_len)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="(default %(default)s)",
    )
    parser.add_argument(
        "--tokenizer",
        default="",
        metavar="FILE",
        help="in tiktoken's format, or a tokenizer.json (default: the recipe's, or the folder's)",
    )
    parser.add_argument(
        "--json", default="", metavar="FILE", help="write the scores there, as {name: number}"
    )
    return parser


def check_options(options: Namespace, longest: int) -> None:
    """Raise ConfigError for a number that is out of range. longest: the model's max_seq_len."""
    least = {"limit": 1, "num_fewshot": 0, "batch_size": 1, "max_length": 2}
    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and value < smallest:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected {smallest} or more")
    if options.max_length is not None and options.max_length > longest:
        raise ConfigError(
            f"--max-length {options.max_length}: the model's max_seq_len is {longest}; use"
            f" {longest} or less"
        )


@command()
def main(arguments: Sequence[str]) -> None:
    options = build_parser().parse_args(arguments)
    rank, world_size = check_environment()
    init_logging(rank, world_size)
    if not find_spec("lm_eval"):
        raise ConfigError(
            "titan-lite evaluate needs the package lm_eval, which is not installed; use pip install"
            " 'titan_lite[evaluation]'"
        )
    weights = open_weights(options.checkpoint, every_byte=rank == 0)
    longest = weights.config.max_seq_len
    check_options(options, longest)
    max_length = options.max_length or longest
    tokenizer = find_tokenizer(weights, options.tokenizer)

    from titan_lite.features.evaluation.language_model import ShardedModel
    from titan_lite.features.evaluation.tasks import describe, load_tasks, scores

    tasks = load_tasks(
        tuple(options.tasks), options.task_folder, options.num_fewshot, max_length, "--tasks"
    )
    device = init_device(Debug())
    init_process_group(device, connect_store(SECONDS), SECONDS, connect=True)
    model = ShardedModel(
        build_model(weights, options.dtype, max_length, Parallelism(), device),
        tokenizer,
        max_length=max_length,
        batch_size=options.batch_size,
    )
    values = scores(model, tasks, options.limit) or {}
    logger.info(f"{weights.folder}, {weights.kind}; {options.dtype}, {world_size} processes")
    for line in describe(values):
        logger.info(line)
    if options.json and rank == 0:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=2)
    dist.destroy_process_group()
