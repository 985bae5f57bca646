"""Score a checkpoint in tasks of lm-evaluation-harness, on one process or on many.

    titan-lite evaluate CHECKPOINT --tasks hellaswag arc_easy [--task-folder FOLDER] [--limit N]
    torchrun --nproc-per-node 8 -m titan_lite evaluate CHECKPOINT --tasks hellaswag --tp 2

The weights are sharded over all processes: those that no other degree takes share the requests.
Needs titan_lite[evaluation].
"""

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_lite import manifest
from titan_lite.checkpoint.weights import (
    CheckpointFolder,
    Weights,
    find_tokenizer,
    load,
    open_weights,
)
from titan_lite.cli import Parser, at_least_one, command
from titan_lite.config import Config, ConfigError, Parallelism, Training
from titan_lite.distributed.device import init_device
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.mesh import build_mesh
from titan_lite.distributed.parallelize import ParallelModel, parallelize
from titan_lite.distributed.process_group import connect_store, init_process_group
from titan_lite.environment import check_environment
from titan_lite.features.evaluation.tasks import check_tasks, load_tasks
from titan_lite.logging import init_logging

LIMIT = 1800.0  # seconds of a collective, and of a start


@command()
def main(arguments: Sequence[str]) -> None:
    options = build_parser().parse_args(arguments)
    rank, world_size = check_environment()
    init_logging(rank, world_size, stream=sys.stderr)
    if options.num_fewshot < -1:
        raise ConfigError(f"--num-fewshot {options.num_fewshot}: use 0 or more")
    weights = open_weights(options.checkpoint)
    longest = weights.config.max_seq_len
    max_length = options.max_length or longest
    if not 1 < max_length <= longest:
        raise ConfigError(
            f"--max-length {max_length}: the model's context has {longest} tokens; use 2 to"
            f" {longest}"
        )
    tokenizer = find_tokenizer(weights, options.tokenizer)
    config = recipe(weights, options)
    layout = Layout.from_config(config, world_size, weights.config)
    names = tuple(options.tasks)
    tasks = load_tasks(names, options.task_folder, options.num_fewshot, key="--tasks")
    check_tasks(tasks, tokenizer, max_length, options.limit, key="--tasks")
    from titan_lite.features.evaluation.harness import Evaluation, puts_bos

    model = build_model(config, layout, weights)
    evaluation = Evaluation(
        model,
        tokenizer,
        tasks,
        names,
        batch_size=options.batch_size,
        max_length=max_length,
        # all documents of a run begin with BOS
        bos=isinstance(weights, CheckpointFolder) or puts_bos(tokenizer),
        limit=options.limit,
        is_first=rank == 0,
    )
    values = evaluation.run().values
    dist.destroy_process_group()
    if rank == 0:
        show(values)
        if options.output:
            found = {"checkpoint": str(weights.folder), "values": values}
            manifest.replace_text(Path(options.output), json.dumps(found, indent=1) + "\n")


def recipe(weights: Weights, options: Namespace) -> Config:
    """Return the recipe of a model in eager mode, on the layout of the command line."""
    stored = str(weights.dtypes["tok_embeddings.weight"]).removeprefix("torch.")
    dtype: Any = options.dtype or (stored if stored == "bfloat16" else "float32")
    return Config(
        training=Training.model_validate(
            {
                "seq_len": weights.config.max_seq_len,
                "local_batch_size": options.pp,
                "mixed_precision_param": dtype,
            }
        ),
        parallelism=Parallelism(
            tensor_parallel_degree=options.tp,
            pipeline_parallel_degree=options.pp,
            context_parallel_degree=options.cp,
            expert_parallel_degree=options.ep,
        ),
    )


def build_model(config: Config, layout: Layout, weights: Weights) -> ParallelModel:
    """Return this rank's part of a model, with weights. Begins the process group."""
    device = init_device(config.debug)
    connect = layout.degrees["pp"] == 1
    init_process_group(device, connect_store(LIMIT), LIMIT, connect=connect)
    mesh = build_mesh(layout.degrees, device.type)
    model = parallelize(config, layout, mesh)
    model.materialize(device)
    model.init_weights(seed=0)  # buffers, too
    load(weights, {**model.parameters, **model.buffers})
    model.parameters_have_changed()
    return model


def show(values: Mapping[str, float]) -> None:
    """Print a line for each score, with its standard error where there is one."""
    width = max(map(len, values)) - len("evaluation/")
    for name, value in values.items():
        if not name.endswith("_stderr"):
            error = values.get(f"{name}_stderr")
            with_error = "" if error is None else f" ± {error:.4f}"
            print(f"{name.removeprefix('evaluation/'):{width}}  {value:.4f}{with_error}")


def build_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument(
        "--tasks",
        nargs="+",
        required=True,
        metavar="TASK",
        help="names of tasks, or of groups of them",
    )
    parser.add_argument(
        "--task-folder", default="", metavar="FOLDER", help="tasks of your own (YAML files)"
    )
    parser.add_argument(
        "--limit",
        type=at_least_one,
        default=0,
        metavar="N",
        help="the first N documents of each task (default: all)",
    )
    parser.add_argument(
        "--num-fewshot",
        type=int,
        default=-1,
        metavar="N",
        help="examples before each question (default: as the task says)",
    )
    parser.add_argument(
        "--batch-size",
        type=at_least_one,
        default=8,
        metavar="N",
        help="requests that a process reads at once (default %(default)s)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=0,
        metavar="N",
        help="tokens of a request; a longer one loses its beginning (default: the model's context)",
    )
    for axis, what in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        parser.add_argument(
            f"--{axis}",
            type=at_least_one,
            default=1,
            metavar="N",
            help=f"degree of {what} parallelism (default %(default)s)",
        )
    parser.add_options_of_checkpoint()
    parser.add_argument("--output", default="", metavar="FILE", help="write the scores as JSON")
    return parser
