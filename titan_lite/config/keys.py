"""What a recipe can say: one frozen dataclass per TOML section, each key with its default, bounds, unit and purpose.

    config.training.steps            # of a Config, which recipe.py reads from a TOML file and the command line
    KEYS["training.steps"].metadata["unit"]

Standard library only, so that a recipe can be checked in a tenth of a second, before torch is imported or a process is started.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any


class ConfigError(ValueError):
    """A recipe or command line that cannot be run; the message names the key, the value and what would work."""


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    also: tuple = (),
    choices: tuple[str, ...] = (),
    or_like: tuple[str, str] = ("", ""),
    path: bool | str = False,
    table: type | None = None,
) -> Any:
    """One key of a recipe: its default, what it is for, its unit, and the values it admits.

    `least`/`most` are inclusive bounds, `above`/`below` exclusive ones; values in `also` (such as -1) are admitted beside
    them; `or_like`: beside choices, words of a form, and the regular expression that tells them. `path`: a relative path in a
    recipe is taken from that recipe's folder, on the command line from the current one. Or the suffix of those values that are
    paths. `table`: the dataclass of each element of a list of tables.
    """
    metadata = dict(doc=doc, unit=unit, least=least, above=above, most=most, below=below, also=also, choices=choices)
    return dataclasses.field(default=default, metadata={**metadata, "or_like": or_like, "path": path, "table": table})


@dataclass(frozen=True)
class Job:
    """what the run is called and where it writes"""

    dump_folder: str = setting("", "where the run writes; empty: outputs/<recipe name>", unit="path")
    description: str = setting("", "one line about the run, shown at its start", unit="text")


@dataclass(frozen=True)
class Model:
    """which model, and its tokenizer"""

    name: str = setting("llama3", "model family", unit="name", choices=("llama3",))
    flavor: str = setting("debug", "size, a key of FLAVORS in models/llama3.py", unit="name")
    tokenizer_path: str = setting(
        "", "tokenizer in tiktoken's format (base64 token and rank a line), or a tokenizer.json", unit="path", path=True
    )


@dataclass(frozen=True)
class Training:
    """batch, sequence, length and precision; which steps are skipped"""

    local_batch_size: int = setting(
        8, "sequences that a data-parallel rank or its pipeline takes at once", unit="sequences", least=1
    )
    global_batch_size: int = setting(
        -1,
        "sequences in one optimizer step over all ranks; more than local_batch_size x data-parallel degree means gradient "
        "accumulation; -1: exactly one local batch a rank",
        unit="sequences",
        least=1,
        also=(-1,),
    )
    seq_len: int = setting(2048, "tokens the model sees at once", unit="tokens", least=1)
    mask_documents: bool = setting(
        False,
        "a token attends to its own document alone, and not to those packed before it (Llama 3, section 3.2); without, attention "
        "is faster on GPUs, whose flash kernels know no such mask",
        unit="bool",
    )
    max_norm: float = setting(1.0, "gradients are scaled down to this global norm", unit="L2 norm", above=0)
    steps: int = setting(1000, "optimizer steps of the whole run, resumed parts included", unit="steps", least=1)
    dtype: str = setting("float32", "sharded parameters and optimizer state", unit="dtype", choices=("float32", "bfloat16"))
    mixed_precision_param: str = setting(
        "bfloat16", "gathered parameters, activations, all-gather traffic", unit="dtype", choices=("bfloat16", "float32")
    )
    mixed_precision_reduce: str = setting(
        "float32", "gradient reduction and accumulation, its traffic", unit="dtype", choices=("float32", "bfloat16")
    )
    gc_freq: int = setting(50, "Python's garbage is collected every so often, on all ranks together", unit="steps", least=1)
    max_nonfinite_steps: int = setting(
        10, "steps with a non-finite loss or gradient are skipped; after this many in a row the run stops", unit="steps", least=1
    )
    spike_window: int = setting(
        0,
        "a loss far above those of the last so many steps is a spike: its step is skipped as a non-finite one is; 0: off",
        unit="steps",
        least=2,
        also=(0,),
    )
    spike_sigmas: float = setting(
        6.0, "how far above their mean a spike is, for spike_window > 0", unit="standard deviations", above=0
    )


@dataclass(frozen=True)
class Optimizer:
    """how parameters move"""

    name: str = setting("AdamW", "optimizer", unit="name", choices=("AdamW",))
    lr: float = setting(3e-4, "peak learning rate", unit="per step", above=0)
    beta1: float = setting(0.9, "decay of the first moment", unit="per step", least=0, below=1)
    beta2: float = setting(0.95, "decay of the second moment", unit="per step", least=0, below=1)
    eps: float = setting(1e-8, "added to the denominator", unit="gradient", above=0)
    weight_decay: float = setting(0.1, "decoupled weight decay, times the learning rate", unit="per step", least=0)
    decay_norms: bool = setting(False, "whether RMSNorm weights decay as well", unit="bool")


@dataclass(frozen=True)
class LRScheduler:
    """the learning rate over the run"""

    warmup_steps: int = setting(200, "linear warm-up from zero", unit="steps", least=0)
    total_steps: int = setting(
        -1,
        "length of the schedule, so that a run can be stopped early or go on; -1: training.steps",
        unit="steps",
        least=1,
        also=(-1,),
    )
    decay_ratio: float = setting(
        1.0,
        "share of total_steps spent decaying at the end; what lies between warm-up and decay is constant; 1.0: decay starts "
        "when warm-up ends",
        unit="fraction",
        least=0,
        most=1,
    )
    decay_type: str = setting("linear", "shape of the decay", unit="name", choices=("linear", "cosine", "sqrt"))
    min_lr_factor: float = setting(0.0, "learning rate at the very end, relative to lr", unit="fraction", least=0, most=1)


@dataclass(frozen=True)
class Parallelism:
    """how many ranks share what; their product is the number of ranks"""

    data_parallel_replicate_degree: int = setting(
        1, "copies of the sharded model (HSDP; DDP when shard degree is 1)", unit="ranks", least=1
    )
    data_parallel_shard_degree: int = setting(
        -1, "ranks one copy is sharded over (FSDP); -1: all that are left", unit="ranks", least=1, also=(-1,)
    )
    tensor_parallel_degree: int = setting(1, "ranks each matrix product is split over", unit="ranks", least=1)
    enable_async_tensor_parallel: bool = setting(
        False, "overlap tensor parallelism's collectives with the matrix products beside them (Inductor, on GPUs)", unit="bool"
    )
    context_parallel_degree: int = setting(1, "ranks each sequence is split over", unit="ranks", least=1)
    pipeline_parallel_degree: int = setting(1, "groups of ranks the layers are split over", unit="ranks", least=1)
    pipeline_parallel_schedule: str = setting(
        "1F1B",
        "order of forwards and backwards: GPipe and 1F1B have one stage a rank, Interleaved1F1B two or more, ZBVZeroBubble two, "
        "with backward in two halves",
        unit="name",
        choices=("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"),
    )
    pipeline_parallel_schedule_csv: str = setting(
        "",
        "a schedule of your own instead: a row of actions a pipeline rank, such as 0F0,1F0,1B0,0B0 (stage, action, microbatch)",
        unit="path",
        path=True,
    )
    pipeline_parallel_microbatch_size: int = setting(
        1, "sequences that go through the pipeline at once; local_batch_size is cut into these", unit="sequences", least=1
    )
    pipeline_parallel_stages_per_rank: int = setting(
        -1, "stages of one pipeline rank; -1: as many as the schedule has, at least", unit="stages", least=1, also=(-1,)
    )
    pipeline_parallel_first_stage_less_layers: int = setting(
        1, "layers that the first stage has less, for its embedding, where layers are split automatically", unit="layers", least=0
    )
    pipeline_parallel_last_stage_less_layers: int = setting(
        1, "layers that the last stage has less, for norm, output and loss", unit="layers", least=0
    )
    pipeline_parallel_split_points: tuple = setting(
        (),
        "the module that each stage but the first begins with, such as layers.2,layers.4; empty: layers are split automatically",
        unit="FQNs",
    )
    fsdp_reshard_after_forward: str = setting(
        "default",
        "whether gathered weights are dropped after forward and gathered again in backward: all of them (always), none (never), "
        "or all but those of fsdp_keep_gathered (default), except where fsdp_communication = step keeps all for a step",
        unit="name",
        choices=("default", "always", "never"),
    )
    fsdp_keep_gathered: tuple = setting(
        ("norm", "output"),
        "modules whose gathered weights are kept from forward to backward, such as layers.31,norm,output (memory: these weights, "
        "whole, in mixed_precision_param); norm and output, which backward needs first, are not worth dropping. A block that "
        "activation_checkpoint recomputes gathers its weights again all the same",
        unit="FQNs",
    )
    fsdp_communication: str = setting(
        "step",
        "with several microbatches (gradient accumulation, pipeline): step gathers all weights and reduces all gradients once an "
        "optimizer step (memory: the rank's whole stages in mixed_precision_param plus their gradients in "
        "mixed_precision_reduce); microbatch does both for every microbatch (traffic times the number of microbatches)",
        unit="name",
        choices=("step", "microbatch"),
    )


@dataclass(frozen=True)
class ActivationCheckpoint:
    """which activations are recomputed instead of kept"""

    mode: str = setting(
        "none",
        "none keeps every activation; full keeps each block's input and recomputes the rest; selective is what "
        "selective_ac_option says; memory_budget lets the compiler choose, with memory_budget",
        unit="name",
        choices=("none", "selective", "full", "memory_budget"),
    )
    selective_ac_option: str = setting(
        "op",
        'with mode = selective: "op" keeps matrix products and attention of every block and recomputes what is cheap; "op/2" '
        "of matrix products every second one too, as TorchTitan does; a number such as 2 recomputes every second block whole",
        unit="op, op/2, or blocks",
    )
    memory_budget: float = setting(
        0.5,
        "with mode = memory_budget and a compiled model: activations kept, between recomputing what can be (0) and nothing (1)",
        unit="fraction",
        least=0,
        most=1,
    )


@dataclass(frozen=True)
class Compile:
    """compiled graphs, and the passes that bucket and overlap communication"""

    enable: bool = setting(False, "compile what components names, each as one graph", unit="bool")
    components: tuple = setting(
        ("model", "loss"),
        "what is compiled: the model; the loss, of which Inductor makes one without float32 copies of the logits; the optimizer, "
        "whose update is one kernel as it is",
        unit="names",
        choices=("model", "loss", "optimizer"),
    )
    backend: str = setting(
        "inductor",
        "inductor generates kernels; aot_eager only traces (quick, for tests)",
        unit="name",
        choices=("inductor", "aot_eager"),
    )
    bucketing: str = setting(
        "block",
        "which parameters share an all-gather and a reduction. none: each has its own; block: those of each transformer block, "
        "of the embedding, and of last norm and output; plan: as buckets says; greedy: as many as hide under the computation "
        "before them, as priced for this machine; auto: what Inductor's overlap scheduler finds, with the same prices; measured: "
        "the first steps try all of these but plan, which must all fit, and the fastest that leaves memory free stays",
        unit="name",
        choices=("none", "block", "plan", "greedy", "auto", "measured"),
    )
    buckets: tuple = setting(
        (),
        "with bucketing = plan, the modules or parameters of each bucket, with spaces between, such as "
        '["tok_embeddings", "layers.0 layers.1", "norm output"]; what is not named stays alone',
        unit="FQNs",
    )
    bucket_memory: float = setting(
        -1.0,
        "with bucketing = greedy, most that a bucket and the one before it may have, of whole weights or gradients; -1: as much "
        "as two blocks",
        unit="GiB",
        above=0,
        also=(-1.0,),
    )
    machine: str = setting(
        "",
        "what prices communication and computation: a profile (A100, H100, H100 PCIe, H100 NVL, H200, H200 NVL, B200, MI300X) or "
        "the path of a .toml file (compiler/hardware.py); empty: this machine's, a CPU measured",
        unit="name or path",
        path=".toml",
    )
    dump_graphs: bool = setting(
        False, "write every graph before and after each pass as text, to job.dump_folder/graphs", unit="bool"
    )
    reordering: bool = setting(
        True,
        "start an all-gather before the one in use is waited for, and wait for a reduction when the next starts",
        unit="bool",
    )

    def compiles(self, component: str) -> bool:
        return self.enable and component in self.components


@dataclass(frozen=True)
class Checkpoint:
    """saving, and going on from what was saved"""

    enable: bool = setting(False, "save, and resume from the newest step found", unit="bool")
    folder: str = setting("checkpoint", "folder of the steps, inside job.dump_folder", unit="path")
    interval: int = setting(500, "a step is saved every so often, and at the end", unit="steps", least=1)
    keep_latest_k: int = setting(3, "older steps are deleted; 0 keeps all", unit="checkpoints", least=0)
    load_step: int = setting(-1, "step to resume from; -1: the newest whole one", unit="step", least=1, also=(-1,))
    initial_load_path: str = setting(
        "",
        "weights that a run without a step of its own starts from, on any layout: a step, a run's folder (its newest step), or a "
        "Hugging Face folder (titan_lite/convert.py makes one of the other)",
        unit="path",
        path=True,
    )
    must_resume: bool = setting(False, "a folder without a step is an error, and no new run", unit="bool")
    async_mode: str = setting(
        "disabled",
        "async: the run waits for a copy in host memory alone, which is written beside training; async_with_pinned_mem: the copy "
        "is pinned and kept, quicker on GPUs",
        unit="name",
        choices=("disabled", "async", "async_with_pinned_mem"),
    )
    on_failure: str = setting(
        "stop", "when a step cannot be saved: stop, or continue with a warning", unit="name", choices=("stop", "continue")
    )
    last_save_model_only: bool = setting(
        False,
        "at training.steps the model is saved without optimizer state: smaller, and to go on from it takes accept_model_only",
        unit="bool",
    )
    explain: bool = setting(
        False,
        "only say which step would be loaded and what the recipe changes since it was saved, then exit",
        unit="bool",
    )
    restart_data: bool = setting(
        False,
        "where the data is not that of the step loaded (other documents, order or global batch), begin it at its first document; "
        "later resumes go on in it. Otherwise such a resume is refused",
        unit="bool",
    )
    accept_model_only: bool = setting(
        False, "where the step loaded has the model alone, start with a new optimizer; otherwise it is refused", unit="bool"
    )


@dataclass(frozen=True)
class Corpus:
    """Where documents come from: keys of [data], and of each table of data.sources."""

    dataset: str = setting(
        "stdlib",
        "stdlib: documentation and sources of the running Python; local: files at path; owner/name: a dataset of the Hugging "
        "Face hub, streamed; c4: allenai/c4 in English, with its own validation split; prepared: what titan_lite.data.prepare "
        "wrote to path",
        unit="name",
        choices=("stdlib", "local", "c4", "prepared"),
        or_like=("owner/name", r"[\w.-]+/[\w.-]+"),
    )
    path: str = setting(
        "",
        "file, folder or glob of txt, jsonl, json, csv (these plain, gz or zst), parquet or arrow, for dataset = local; "
        "a folder for dataset = prepared",
        unit="path",
        path=True,
    )
    subset: str = setting("", "which subset of a dataset of the hub; empty: the one it has, or its default", unit="name")
    split: str = setting("train", "which split of a dataset of the hub", unit="name")
    text_field: str = setting("text", "field or column that holds a document's text, except in txt", unit="name")


@dataclass(frozen=True)
class DataSource(Corpus):
    weight: float = setting(1.0, "its share of the tokens, relative to the other sources' weights", unit="tokens", above=0)


@dataclass(frozen=True)
class Data(Corpus):
    """the documents to train on, and their loader"""

    sources: tuple = setting(
        (),
        "several corpora to mix, in place of dataset, path and so on: [[data.sources]] tables with these keys and weight",
        unit="tables",
        table=DataSource,
    )
    validation_fraction: float = setting(
        0.05, "share of documents held out of training, chosen by a hash of their name", unit="fraction", least=0, below=1
    )
    shuffle: bool = setting(True, "a new seeded order of documents every epoch", unit="bool")
    shuffle_buffer: int = setting(
        10_000,
        "documents (of 4 KiB) that are shuffled at once, from pieces of all files in a new order",
        unit="documents",
        least=1,
    )
    min_document_tokens: int = setting(
        0, "documents with fewer tokens, BOS and EOS not counted, are left out", unit="tokens", least=0
    )
    max_document_mib: int = setting(32, "a larger document is a bad one", unit="MiB of UTF-8", least=1)
    on_bad_document: str = setting(
        "error",
        "what becomes of a document that cannot be read, is empty or too large: error ends the run naming file and line, skip "
        "leaves it out and lists it in bad_documents.jsonl in job.dump_folder",
        unit="policy",
        choices=("error", "skip"),
    )
    max_bad_documents: int = setting(
        100, "more different bad documents than this end the run all the same", unit="documents", least=0
    )
    num_workers: int = setting(1, "loader processes a rank; 0 reads in the training process", unit="processes", least=0)
    prefetch: int = setting(4, "microbatches prepared ahead by each loader process", unit="microbatches", least=1)

    def mixture(self) -> "list[tuple[float, Data]]":
        """(share of the tokens, [data] of it alone) for each source."""
        if not self.sources:
            return [(1.0, self)]
        total = sum(source.weight for source in self.sources)
        names = [field.name for field in dataclasses.fields(Corpus)]
        return [
            (source.weight / total, dataclasses.replace(self, sources=(), **{name: getattr(source, name) for name in names}))
            for source in self.sources
        ]


@dataclass(frozen=True)
class Validation:
    """the loss on held-out documents"""

    enable: bool = setting(False, "measure the loss on held-out documents", unit="bool")
    freq: int = setting(500, "every so often, and at the end", unit="steps", least=1)
    steps: int = setting(10, "global batches in one validation, the same ones each time", unit="batches", least=1)


@dataclass(frozen=True)
class Metrics:
    """what is shown and written along the way"""

    log_freq: int = setting(10, "a line in the log, metrics.jsonl and TensorBoard every so often", unit="steps", least=1)
    enable_tensorboard: bool = setting(True, "write TensorBoard events to tb/", unit="bool")
    enable_wandb: bool = setting(
        False, "log to Weights & Biases as well (pip install wandb), to the project that WANDB_PROJECT names", unit="bool"
    )
    show_all_warnings: bool = setting(
        False,
        "show what libraries warn of as they print it, on every rank; otherwise once, and without what is known to be harmless",
        unit="bool",
    )
    compare_plan: str = setting(
        "auto",
        "at the end of a run, planned against measured step time and memory, with plan.json and measured.json in the folder: on "
        "GPUs (auto), also on CPUs, where the end then takes a quarter of a minute longer (always), or not (never)",
        unit="name",
        choices=("auto", "always", "never"),
    )
    enable_color: bool = setting(True, "colours and a progress bar where the output is a terminal", unit="bool")


@dataclass(frozen=True)
class Profiling:
    """traces and memory snapshots"""

    enable_profiling: bool = setting(False, "write torch.profiler traces", unit="bool")
    save_traces_folder: str = setting("profile_traces", "folder of the traces, inside job.dump_folder", unit="path")
    profile_freq: int = setting(10, "steps from one trace to the next (the last of them is traced)", unit="steps", least=3)
    enable_memory_snapshot: bool = setting(
        False, "write CUDA memory snapshots with every trace period and on out-of-memory", unit="bool"
    )
    save_memory_snapshot_folder: str = setting("memory_snapshots", "folder of the snapshots, inside job.dump_folder", unit="path")


@dataclass(frozen=True)
class Comm:
    """time limits, and the flight recorder"""

    init_timeout_seconds: int = setting(
        300,
        "a rank hangs, and the run ends, if it neither enters nor leaves a collective for so long: until the first step is done, "
        "and while a checkpoint is written",
        unit="seconds",
        least=1,
    )
    compile_timeout_seconds: int = setting(
        900, "the same in the first step and the first validation, where compile.enable compiles", unit="seconds", least=1
    )
    train_timeout_seconds: int = setting(
        100, "the same afterwards; a step or microbatch that is done counts as well", unit="seconds", least=1
    )
    trace_buf_size: int = setting(
        2000,
        "entries in the flight recorder, which tells where a run hangs; NCCL's dumps into job.dump_folder on a timeout; 0: off, "
        "and collectives do not count as progress",
        unit="collectives",
        least=0,
    )


@dataclass(frozen=True)
class Debug:
    """what a run needs to be repeated exactly"""

    seed: int = setting(0, "seed of weights and data order", unit="integer", least=0, most=2**63 - 1)
    deterministic: bool = setting(False, "deterministic kernels, an error where there is none", unit="bool")


@dataclass(frozen=True)
class Config:
    job: Job = Job()
    model: Model = Model()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    checkpoint: Checkpoint = Checkpoint()
    data: Data = Data()
    validation: Validation = Validation()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    debug: Debug = Debug()

    @property
    def total_steps(self) -> int:
        """Length of the learning-rate schedule, in steps."""
        return self.training.steps if self.lr_scheduler.total_steps == -1 else self.lr_scheduler.total_steps


SECTIONS: dict[str, type] = {field.name: type(field.default) for field in dataclasses.fields(Config)}
KEYS: dict[str, dataclasses.Field] = {f"{name}.{f.name}": f for name, cls in SECTIONS.items() for f in dataclasses.fields(cls)}


def gradient_accumulation_steps(training: Training, dp_degree: int) -> int:
    """Microbatches of one rank in one optimizer step, for `dp_degree` data-parallel ranks. Raises ConfigError."""
    once = training.local_batch_size * dp_degree
    if training.global_batch_size == -1:
        return 1
    if training.global_batch_size % once:
        nearest = sorted({max(once, training.global_batch_size // once * once), -(-training.global_batch_size // once) * once})
        raise ConfigError(
            f"training.global_batch_size = {training.global_batch_size} is not a multiple of training.local_batch_size x "
            f"data-parallel degree = {training.local_batch_size} x {dp_degree} = {once}; "
            f"{' or '.join(map(str, nearest))} would work"
        )
    return training.global_batch_size // once


def flatten(config: Config) -> dict[str, Any]:
    """{"training.steps": 1000, ...} of all keys."""
    return {key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in KEYS}
