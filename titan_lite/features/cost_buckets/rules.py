"""Rules of buckets by the cost model."""

from collections.abc import Iterator

from titan_lite.config import Config
from titan_lite.distributed.layout import Layout
from titan_lite.rules.mistakes import Mistake, rule_of_keys, rule_of_layout, rule_of_machine


@rule_of_keys
def inductor_orders_what_it_buckets(config: Config) -> Iterator[Mistake]:
    compile = config.compile
    if compile.enable and compile.bucketing == "auto" and not compile.reordering:
        yield Mistake(
            key="compile.reordering",
            value=compile.reordering,
            why='is not for compile.bucketing = "auto", which orders what it buckets',
            instead='reordering = true or bucketing = "block"',
        )


@rule_of_layout
def collectives_of_a_microbatch_are_bucketed(config: Config, layout: Layout) -> Iterator[Mistake]:
    if config.compile.buckets_across_blocks and layout.gathers_once:
        yield Mistake(
            key="compile.bucketing",
            value=config.compile.bucketing,
            why=(
                'has nothing to bucket: parallelism.fsdp_communication = "step" gathers once for'
                f" {layout.microbatches} microbatches"
            ),
            instead='fsdp_communication = "microbatch" or bucketing = "block"',
        )


@rule_of_machine
def collectives_of_this_gpu_are_priced(config: Config, layout: Layout) -> Iterator[Mistake]:
    compile = config.compile
    if not compile.buckets_across_blocks or compile.machine:
        return
    import torch

    from titan_lite.cost.profiles import PROFILES, profile_of

    if not torch.cuda.is_available():
        return
    name = torch.cuda.get_device_name()
    if profile_of(name) is None:
        yield Mistake(
            key="compile.bucketing",
            value=compile.bucketing,
            why=f'prices collectives, and "{name}" is not known',
            instead=(
                f'compile.machine = {", ".join(PROFILES)} or a .toml file, or bucketing = "block"'
            ),
        )
