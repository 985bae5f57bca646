"""Predict the costs of bucketing collectives without hardware, or measure them on this machine.

Prints Markdown tables.

    script=scripts/benchmark_schedule.py
    python $script predict                                  # 8B on 8 and 128 H100; minutes
    python $script predict --layers 2 --world-sizes 8       # seconds
    python $script predict --depths 2 4 8 16 32 --modes greedy --world-sizes 128 --batch-sizes 1
    python $script measure --models debug --backends aot_eager

predict compiles the real model by the real stage, with fake tensors and one fake process group a
world size: no weight is ever made, and nothing runs. Graphs are traced for a CPU and priced as
Inductor's on --machine (a profile, or a .toml file). As in a recipe by default, weights are
bfloat16, gradients are reduced in float32, all but norm and output is gathered again in backward,
and the loss is not in the graphs. All figures are of forward and backward together:

    collectives     of parameters, forward + backward
    communication   ms that these keep the links busy; computation: the rest
    exposed         ms that computation waits for them; bound: at least so much, wherever they stand
    copied          GiB that buckets write: shards and gradients put in, weights taken out
    peak            GiB that a graph holds at once, gradients included, beside parameters and
                    optimizer state
    passes          seconds of ours; compile: of the first call, tracing and passes included, once
                    the process has compiled before

With --depths, the two times against the number of blocks. Every world size is a process of its own,
one after another; each prints the most memory it took of this host.

measure trains the models of benchmark_fsdp.py in its way: worlds in turn, float32, losses compared.
The base is FSDP2 compiled by blocks. Each variant is built twice, with an empty folder for
Inductor's caches (cold) and by fresh processes with the same folder (warm): compile is what the
first steps took longer than as many of the fastest. The machine is found once, by all ranks, and
its prices are those of all variants: exposed is what they predict.
"""

import argparse
import gc
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmark_fsdp import (
    MODELS,
    Built,
    Variant,
    World,
    add_arguments,
    fsdp2,
    heading,
    join_world,
    rank_main,
    run_in_turn,
    simple_fsdp,
    spread,
    start_world,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_lite.compile.compile import check_backend, compile_model
from titan_lite.compile.errors import CompileError
from titan_lite.compile.model_parts import TraceableModel
from titan_lite.compile.report import CompileReport
from titan_lite.compile.schedule import Schedule
from titan_lite.compile.settings import PassSettings
from titan_lite.config import Compile, ConfigError, Parallelism
from titan_lite.config.families import LLAMA3, ModelConfig
from titan_lite.cost.machine import Machine
from titan_lite.cost.measure import find_machine
from titan_lite.cost.profiles import load_machine
from titan_lite.distributed.layout import resolve_degrees
from titan_lite.distributed.mesh import build_mesh, parameter_mesh
from titan_lite.distributed.simple_fsdp import (
    FSDPOptions,
    apply_simple_fsdp,
    materialize,
)
from titan_lite.models.transformer import Transformer

MODES = ("none", "block", "auto", "greedy")
BACKENDS = ("aot_eager", "inductor")


@dataclass(frozen=True)
class Compiled:
    """reports: forward's and backward's; seconds: of the first call; host_bytes: the most that the
    process has had so far.
    """

    reports: list[CompileReport]
    seconds: float
    host_bytes: int


def start_fake_world(world_size: int) -> None:
    """This process is rank 0 of so many that are not there, and has compiled something, so that no
    figure has that in it.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    compile_fake(
        replace(LLAMA3.flavors["debug"], n_layers=1, max_seq_len=16),
        1,
        "none",
        load_machine("H100"),
    )


def compile_fake(config: ModelConfig, batch_size: int, mode: str, machine: Machine) -> Compiled:
    """The model, for sequences of max_seq_len tokens, as a rank of a recipe that only trains with
    FSDP compiles it.
    """
    gc.collect()  # the graphs before
    mesh = build_mesh(resolve_degrees(Parallelism(), dist.get_world_size()), "cpu")
    stage = Compile(enable=True, backend="aot_eager", bucketing=mode)
    schedule = Schedule(PassSettings(stage, machine, fused=True))
    keep_gathered = Parallelism().fsdp_keep_gathered
    options = FSDPOptions(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, keep_gathered=keep_gathered
    )
    with torch.device("meta"):
        model = Transformer(config)
    sharding = apply_simple_fsdp(model, parameter_mesh(mesh), options)
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialize(model, torch.device("cpu"))
        compiled = compile_model(TraceableModel(model, sharding, model.layers), schedule)
        tokens = torch.zeros(batch_size, config.max_seq_len, dtype=torch.long)
        start = time.perf_counter()
        compiled(tokens)  # compiles backward as well
        seconds = time.perf_counter() - start
    return Compiled(
        schedule.reports, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    )


def predict(arguments: argparse.Namespace) -> None:
    flavor, machine = LLAMA3.flavors[arguments.flavor], load_machine(arguments.machine)
    depths = arguments.depths or [arguments.layers or flavor.n_layers]
    if max(depths) > flavor.n_layers or arguments.seq_len > flavor.max_seq_len:
        raise ConfigError(
            f"flavor {arguments.flavor} has {flavor.n_layers} layers, and sequences of up to"
            f" {flavor.max_seq_len} tokens"
        )
    configs = [replace(flavor, n_layers=depth, max_seq_len=arguments.seq_len) for depth in depths]
    of_layers = f"{', '.join(map(str, depths))} of {flavor.n_layers}"
    for world_size in arguments.world_sizes:
        spawn = mp.get_context("spawn")
        with ProcessPoolExecutor(
            1, mp_context=spawn, initializer=start_fake_world, initargs=(world_size,)
        ) as process:
            for batch_size in arguments.batch_sizes:
                cases = [
                    (config, batch_size, mode, machine)
                    for mode in arguments.modes
                    for config in configs
                ]
                found = list(process.map(compile_fake, *zip(*cases, strict=True)))
                print(
                    f"\n{arguments.flavor} ({of_layers} layers): {world_size} ranks of"
                    f" {machine.name} ({machine.memory} GiB), estimated, each {batch_size} x"
                    f" {arguments.seq_len} tokens; bfloat16, reduced in float32; torch"
                    f" {torch.__version__}; {max(each.host_bytes for each in found) / 2**30:.1f}"
                    " GiB of this host\n"
                )
                modes = [mode for _, _, mode, _ in cases]
                if arguments.depths:
                    blocks = [config.n_layers for config, *_ in cases]
                    lines = [depth_line(*case) for case in zip(modes, blocks, found, strict=True)]
                    print_table("mode", ("blocks", "trace and compile s", "passes s"), lines)
                else:
                    print_table(
                        "mode",
                        PREDICTED,
                        [prediction(*case) for case in zip(modes, found, strict=True)],
                    )


PREDICTED = (
    *(
        "collectives",
        "communication ms",
        "computation ms",
        "exposed ms",
        "bound ms",
        "exposed/bound",
        "copied GiB",
        "peak GiB",
    ),
    *("passes s", "compile s"),
)


def prediction(mode: str, compiled: Compiled) -> list[str]:
    timelines = [report.timeline for report in compiled.reports if report.timeline is not None]
    communication = sum(timeline.communication for timeline in timelines)
    compute = sum(timeline.compute for timeline in timelines)
    copied = [report.copied for report in compiled.reports]
    exposed, bound = (
        sum(timeline.exposed for timeline in timelines),
        sum(timeline.bound for timeline in timelines),
    )
    return [
        mode,
        counts(compiled.reports),
        *(f"{1e3 * seconds:.2f}" for seconds in (communication, compute, exposed, bound)),
        f"{exposed / bound:.2f}" if bound else "-",
        "-" if None in copied else f"{sum(copied) / 2**30:.2f}",
        f"{max(timeline.peak_bytes for timeline in timelines) / 2**30:.2f}",
        f"{passes(compiled.reports):.2f}",
        f"{compiled.seconds:.1f}",
    ]


def depth_line(mode: str, blocks: int, compiled: Compiled) -> list[str]:
    return [mode, str(blocks), f"{compiled.seconds:.1f}", f"{passes(compiled.reports):.2f}"]


def counts(reports: Sequence[CompileReport]) -> str:
    """Collectives that are left: forward + backward."""
    return " + ".join(str(len(report.after)) for report in reports)


def passes(reports: Sequence[CompileReport]) -> float:
    return sum(report.pass_seconds for report in reports)


def print_table(first: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """In Markdown; all columns but the first are numbers."""
    head, *body = (f"| {' | '.join(row)} |" for row in ([first, *columns], *lines))
    print("\n".join([head, f"|---|{'--:|' * len(columns)}", *body]), flush=True)


def machine_main(pipe: Connection, rank: int, world_size: int, store: str) -> None:
    """Sends the machine that this is."""
    pipe.send(find_machine("", join_world(rank, world_size, store)))
    pipe.recv()
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace) -> None:
    on_gpus = torch.cuda.device_count() >= arguments.world_size
    for backend in ("inductor", *arguments.backends):  # the base needs Inductor
        check_backend(Compile(enable=True, backend=backend), "cuda" if on_gpus else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        world = start_world(machine_main, arguments.world_size, Path(folder) / "store")
        machine = world.receive()[0]
        world.end()
    if machine is None:
        raise ConfigError(
            f"{torch.cuda.get_device_name()} has no profile in titan_lite/cost/profiles.py, which"
            " prices need"
        )
    variants: dict[str, Variant] = {"fsdp2-compiled": (fsdp2, dict(backend="inductor"))}
    for backend in arguments.backends:
        for mode in arguments.modes:
            settings = dict(backend=backend, reshard=True, machine=machine, bucketing=mode)
            variants[f"{mode}, {backend}"] = simple_fsdp, settings
    for name in arguments.models:
        config, batch_size = MODELS[name]
        measure_model(
            name, config, arguments.batch_size or batch_size, machine, variants, arguments
        )


MEASURED = (
    *(
        "collectives",
        "predicted exposed ms",
        "step ms",
        "spread",
        "relative",
        "peak MiB per rank",
        "relative",
    ),
    *("compile s, cold", "warm"),
)


def measure_model(
    name: str,
    config: ModelConfig,
    batch_size: int,
    machine: Machine,
    variants: dict[str, Variant],
    arguments: argparse.Namespace,
) -> None:
    shape = (config, batch_size)
    with tempfile.TemporaryDirectory() as folder:
        worlds: dict[str, World] = {}
        built: dict[str, list[Built]] = {}
        compile_seconds: dict[str, list[float]] = {}
        for number, (variant, settings) in enumerate(variants.items()):
            caches = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / f"{number}-caches")}
            compile_seconds[variant] = []
            for state in ("cold", "warm"):
                store = Path(folder) / f"{number}-{state}"
                worlds[variant] = start_world(
                    rank_main, arguments.world_size, store, settings, shape, environment=caches
                )
                built[variant] = worlds[variant].receive()
                compile_seconds[variant].append(
                    max(rank.compile_seconds for rank in built[variant])
                )
                if state == "cold":
                    worlds[variant].end()
            cold, warm = compile_seconds[variant]
            print(f"{variant}: compiled in {cold:.1f} s, then in {warm:.1f} s", flush=True)
        seconds = run_in_turn(worlds, arguments.rounds, arguments.steps)

    medians = {variant: statistics.median(each) for variant, each in seconds.items()}
    peaks = {variant: max(rank.peak for rank in ranks) for variant, ranks in built.items()}
    base, lines = next(iter(variants)), []
    for variant in variants:
        reports = built[variant][0].reports
        exposed = sum(report.timeline.exposed for report in reports if report.timeline)
        cold, warm = compile_seconds[variant]
        lines.append(
            [
                variant,
                *((counts(reports), f"{1e3 * exposed:.2f}") if reports else ("-", "-")),
                f"{1e3 * medians[variant]:.1f}",
                spread(seconds[variant]),
                f"{medians[variant] / medians[base]:.2f}",
                f"{peaks[variant] / 2**20:,.1f}",
                f"{peaks[variant] / peaks[base]:.2f}",
                f"{cold:.1f}",
                f"{warm:.1f}",
            ]
        )
    link = (
        f"{machine.intra_node.bandwidth:.2f} GB/s and {machine.intra_node.latency:.0f} us between"
        " ranks"
    )
    compute = f"{1e3 * machine.tflops['float32']:,.0f} GFLOP/s in float32"
    print(f"\n{heading(name, batch_size, arguments)}; {machine.name}: {compute}, {link}\n")
    print_table("variant", MEASURED, lines)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """One line, without the usage."""
        self.exit(2, f"error: {message}\n")


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text} is no whole number of {least} or more")
        return int(text)

    return number


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="predict | measure")
    command = commands.add_parser("predict", help="without hardware")
    command.set_defaults(run=predict)
    command.add_argument("--flavor", choices=LLAMA3.flavors, default="8B")
    depth = command.add_mutually_exclusive_group()
    depth.add_argument("--layers", type=at_least(1), help="default: all")
    depth.add_argument(
        "--depths",
        type=at_least(1),
        nargs="+",
        help="compile times for so many layers, and nothing else",
    )
    command.add_argument("--machine", default="H100", help="a profile, or the path of a .toml file")
    command.add_argument(
        "--world-sizes", type=at_least(2), nargs="+", default=[8, 128], help="ranks"
    )
    command.add_argument(
        "--batch-sizes", type=at_least(1), nargs="+", default=[1, 2], help="sequences a rank"
    )
    command.add_argument("--seq-len", type=at_least(1), default=8192)
    command.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    command = commands.add_parser("measure", help="on this machine")
    command.set_defaults(run=measure)
    add_arguments(command)
    command.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    command.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except (ConfigError, CompileError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
