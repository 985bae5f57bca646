"""The sections and keys of a recipe: a pydantic model for each TOML table, a field for each key.

    config.training.steps                # load.py reads a Config from a recipe and the command line
    KEYS["training.steps"].description   # "Optimizer steps of the run, resumed parts included."

A field's type has the values that are accepted, and what another value does at a resume
(effects.py); its docstring has the meaning and the unit. Features add keys and tables of their own
(titan_lite/features/). Rules across keys are in
titan_lite/rules/. Help and docs/recipes.md are made from these docstrings by help.py. Imports no
torch.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin

from pydantic import AfterValidator, Field, PrivateAttr
from pydantic.fields import FieldInfo

from titan_lite.config.effects import OnlyWith, RestartsData, RestartsOptimizer, Rounding
from titan_lite.config.families import FAMILIES
from titan_lite.config.optimizers import OPTIMIZERS
from titan_lite.config.schedules import SCHEDULES
from titan_lite.config.section import (
    ModuleNames,
    OutputPath,
    RecipePath,
    Relative,
    Section,
    SelectsModules,
    added_values,
    with_added_keys,
    with_added_tables,
)
from titan_lite.text import without_secrets

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # torchft's variable for the address of its server


def _known_family(value: str) -> str:
    if value not in FAMILIES and not value.endswith(".py"):
        known = ", ".join(FAMILIES)
        raise ValueError(f"expected one of {known}, or the path of a Python file (.py)")
    # absolute, since a checkpoint names the file
    return value if value in FAMILIES else os.path.abspath(value)


FamilyName = Annotated[str, Relative(".py"), AfterValidator(_known_family)]


# of [lr_scheduler]; optim/lr_scheduler.py reads it
Moment = (
    Annotated[int, Field(ge=0)]
    | Annotated[
        str,
        Field(
            pattern=r"^$|^(\d{1,2}(\.\d+)?|100) ?%$|^\d{1,15}(\.\d+)? ?[MBT]? ?tokens$",
            title='"20%", "2B tokens" or ""',
        ),
    ]
)


def _zero_or_at_least_one(value: float) -> float:
    if 0 < value < 1:
        raise ValueError("expected 0, or a number at least 1")
    return value


ZeroOrAtLeastOne = Annotated[float, Field(ge=0), AfterValidator(_zero_or_at_least_one)]


@with_added_keys("job")
class Job(Section):
    """Name and folder of the run."""

    dump_folder: OutputPath = ""
    """Folder that the run writes to, relative to the current one; empty: outputs/<recipe name>."""

    description: str = ""
    """One line about the run, shown at its start."""


@with_added_keys("model")
class Model(Section):
    """The model and its tokenizer. A number that is 0 is the flavor's."""

    name: FamilyName = "llama3"
    """Model family (config/families.py), or a Python file with one of your own."""

    flavor: str = "debug"
    """Size, such as 8B. Empty: the keys below give the shape. from_weights, or not set beside
    checkpoint.initial_load_path: shape and tokenizer of that folder."""

    dim: Annotated[int, Field(ge=1, le=2**18)] | Literal[0] = 0
    """Width of the residual stream."""

    n_layers: Annotated[int, Field(ge=1, le=1024)] | Literal[0] = 0
    """Transformer blocks."""

    n_heads: Annotated[int, Field(ge=1, le=4096)] | Literal[0] = 0
    """Query heads."""

    n_kv_heads: Annotated[int, Field(ge=1, le=4096)] | Literal[0] = 0
    """Key/value heads."""

    head_dim: Annotated[int, Field(ge=2, le=2**12)] | Literal[0] = 0
    """Width of a head; 0: dim / n_heads, or the flavor's in families that fix it."""

    hidden_dim: Annotated[int, Field(ge=1, le=2**20)] | Literal[0] = 0
    """Width of feed_forward, or of an expert."""

    n_experts: Annotated[int, Field(ge=1, le=2**16)] | Literal[0] = 0
    """Experts of a block."""

    experts_per_token: Annotated[int, Field(ge=1, le=2**16)] | Literal[0] = 0
    """Experts that compute a token."""

    vocab_size: Annotated[int, Field(ge=1, le=2**22)] | Literal[0] = 0
    """Rows of the embedding, at least the tokenizer's tokens."""

    tied_embeddings: Literal["flavor", "yes", "no"] = "flavor"
    """yes: embedding and output are one weight; no: two."""

    rope_theta: ZeroOrAtLeastOne = Field(0.0, le=1e9)
    """Base of the rotary frequencies."""

    rope_scaling_factor: ZeroOrAtLeastOne = Field(0.0, le=1024)
    """Divisor of the low rotary frequencies, as in Llama 3.1; 1: no scaling."""

    rope_scaling_low_freq_factor: float = Field(0.0, ge=0, le=1024)
    """Frequencies with fewer turns in rope_scaling_original_max_seq_len tokens are divided; 0: the
    flavor's, or 1."""

    rope_scaling_high_freq_factor: float = Field(0.0, ge=0, le=1024)
    """Frequencies with more turns there stay; 0: the flavor's, or 4."""

    rope_scaling_original_max_seq_len: Annotated[int, Field(ge=1, le=2**24)] | Literal[0] = 0
    """Context in tokens before its extension; 0: the flavor's, or 8192."""

    norm_eps: float = Field(0.0, ge=0, lt=1)
    """Added to the mean square in RMSNorm."""

    max_seq_len: Annotated[int, Field(ge=1, le=2**24)] | Literal[0] = 0
    """Upper bound of training.seq_len, and of a generated text."""

    tokenizer_path: RecipePath = ""
    """Tokenizer: a file in tiktoken's format, or a tokenizer.json; empty: that of
    checkpoint.initial_load_path."""


@with_added_keys("training")
class Training(Section):
    """Batch size, sequence length, steps, precision, skipped steps."""

    local_batch_size: Rounding[int] = Field(8, ge=1, le=2**16)
    """Sequences per forward of a data-parallel rank or its pipeline."""

    global_batch_size: Annotated[int, Field(ge=1, le=2**20)] | Literal[-1] = -1
    """Sequences per optimizer step over all ranks; more than local_batch_size x data-parallel
    degree accumulates gradients; -1: that product."""

    seq_len: int = Field(2048, ge=1, le=2**24)
    """Tokens per sequence."""

    mask_documents: bool = False
    """A token attends only to its own document (Llama 3, section 3.2): by FlashAttention on NVIDIA
    GPUs in bfloat16, else, and with context parallelism, by a mask of all pairs of tokens."""

    attention_kernel: Rounding[Literal["auto", "cudnn", "FA2", "FA3", "FA4"]] = "auto"
    """Attention on NVIDIA GPUs. auto: torch's choice, with context parallelism FlashAttention 2;
    FA3: H100, package flash_attn_interface; FA4: H100 and B200, package flash_attn; cudnn: not with
    mask_documents or context parallelism."""

    max_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this global L2 norm."""

    steps: int = Field(1000, ge=1)
    """Optimizer steps of the run, resumed parts included."""

    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of gathered parameters, their traffic and activations."""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are reduced and accumulated."""

    float32_matmul_precision: Rounding[Literal["highest", "high", "medium"]] = "highest"
    """Argument of torch.set_float32_matmul_precision: high is TF32 on GPUs, about eight times as
    fast in float32, with 10 bits of mantissa."""

    loss_chunk_tokens: Rounding[int] = Field(0, ge=-1, le=2**24)
    """Tokens whose logits a rank has at a time, at least 1/16 of a microbatch. 0: all if logits,
    copies and gradients (12 bytes a token and vocabulary entry) take at most 1.5 GiB, else up to 8
    chunks; -1: all."""

    gc_freq: int = Field(50, ge=1)
    """Steps between garbage collections of Python, on all ranks at once."""

    compare_replicas_freq: int = Field(100, ge=0)
    """Steps between comparisons of the ranks' copies of parameters and optimizer state, beside
    those at the start and before saves. If copies differ or a value is not finite, the run ends
    without saving; 0: none between."""

    max_nonfinite_steps: int = Field(10, ge=1)
    """Steps with a non-finite loss or gradient are skipped; this many skipped ones in a row, spikes
    included, end the run."""

    spike_window: Annotated[int, Field(ge=2)] | Literal[0] = 0
    """Skip a step whose loss is far above the mean of this many steps before (a spike); 0: off."""

    spike_sigmas: float = Field(6.0, gt=0)
    """Distance of a spike above that mean, in standard deviations."""


@with_added_keys("optimizer")
class Optimizer(Section):
    """The optimizer and its constants."""

    name: RestartsOptimizer[Literal[tuple(OPTIMIZERS)]] = Field(  # type: ignore[valid-type]
        "AdamW",
        description="; ".join(f"{name}: {row.about}" for name, row in OPTIMIZERS.items())
        + ". Other parameters are AdamW's.",
    )

    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""

    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment; Lion: of the momentum in a step's direction."""

    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment and of Shampoo's statistics; Lion: of the momentum that is
    kept."""

    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of AdamW."""

    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay of all but RMSNorm weights, times the learning rate."""

    state_dtype: Rounding[Literal["float32", "bfloat16"]] = "float32"
    """Dtype of AdamW's and Lion's moments. bfloat16: weight and moments take 8 bytes a parameter in
    place of 12 (Lion: 6 of 8); updates are computed in float32."""


@with_added_keys("lr_scheduler")
class LRScheduler(Section):
    """The learning rate over the run."""

    warmup_steps: int = Field(200, ge=0)
    """Steps of linear warm-up from zero."""

    decay_begin: Moment = ""
    """Last step at the peak: a number, "80%" of training.steps, or "2B tokens" (M, B, T). Empty: so
    that the decay ends with the run."""

    decay_length: Moment = ""
    """Length of the decay, in the same forms; 0: none. Empty: to the end of the run, and without
    decay_begin from the end of the warm-up. With both keys the rate does not
    depend on training.steps."""

    decay_type: Literal["linear", "cosine", "sqrt"] = "linear"
    """Shape of the decay."""

    min_lr_factor: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end of the decay, one step after the last, as a share of lr."""


@with_added_keys("parallelism")
class Parallelism(Section):
    """The layout of ranks; the product of all degrees is the number of ranks."""

    data_parallel_replicate_degree: int = Field(1, ge=1)
    """Replicas of the sharded model (HSDP; DDP if the shard degree is 1)."""

    data_parallel_shard_degree: Annotated[int, Field(ge=1)] | Literal[-1] = -1
    """Ranks that a replica is sharded over (FSDP); -1: all remaining ranks."""

    tensor_parallel_degree: int = Field(1, ge=1)
    """Ranks that each matmul is split over."""

    context_parallel_degree: int = Field(1, ge=1)
    """Ranks that each sequence is split over."""

    expert_parallel_degree: int = Field(1, ge=1)
    """Ranks that the experts of a block are split over; it divides shard x context x tensor degree.
    Tokens travel in place of weights (docs/moe.md)."""

    pipeline_parallel_degree: int = Field(1, ge=1)
    """Groups of ranks that the layers are split over."""

    pipeline_parallel_schedule: Literal[tuple(SCHEDULES)] = Field(  # type: ignore[valid-type]
        "1F1B",
        description="Pipeline schedule, by its stages per rank. "
        + "; ".join(f"{name}: {schedule.about}" for name, schedule in SCHEDULES.items())
        + ".",
    )

    pipeline_parallel_microbatch_size: Rounding[int] = Field(1, ge=1)
    """Sequences of local_batch_size per pipeline microbatch."""

    pipeline_parallel_stages_per_rank: Annotated[int, Field(ge=1)] | Literal[-1] = -1
    """Stages per pipeline rank; -1: the fewest of the schedule."""

    pipeline_parallel_first_stage_less_layers: int = Field(1, ge=0)
    """Layers less in the first stage, which also has the embedding."""

    pipeline_parallel_last_stage_less_layers: int = Field(1, ge=0)
    """Layers less in the last stage, which also has norm, output and loss."""

    pipeline_parallel_split_points: tuple[str, ...] = ()
    """First modules of all stages but the first, such as layers.2 layers.4; empty: automatic."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Weights that are freed after forward and gathered again in backward. default: all but
    fsdp_keep_gathered; always: all; never: none. fsdp_communication = step keeps all."""

    fsdp_keep_gathered: ModuleNames = ("norm", "output")
    """Modules whose weights stay gathered from forward to backward, such as layers.31, at the cost
    of memory; backward needs norm and output first."""

    fsdp_communication: Rounding[Literal["auto", "step", "microbatch"]] = "auto"
    """With accumulation or a pipeline: step gathers weights and reduces gradients once a step
    (memory: the rank's stages and their gradients, unsharded); microbatch does both for each; auto:
    step if 16 bytes a sharded parameter and 8 a gathered one take at most 60% of a GPU, and
    compile.bucketing is none or block."""

    def without_pipeline(self) -> "Parallelism":
        """Return it with one stage, and defaults for all of a pipeline."""
        pipeline = {
            name: field.default
            for name, field in type(self).model_fields.items()
            if name.startswith("pipeline_parallel_")
        }
        return self.replace(**pipeline)


@with_added_keys("activation_checkpoint")
class ActivationCheckpoint(Section):
    """Recomputation of activations."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """none keeps all activations; full keeps each block's input; selective follows
    selective_ac_option; memory_budget lets the compiler choose."""

    selective_ac_option: str = "op"
    """With mode = selective: "op" keeps matmuls and attention; "op/2" recomputes every second
    matmul, too; a number such as 2 recomputes every second block."""

    memory_budget: float = Field(0.5, ge=0, le=1)
    """With mode = memory_budget and a compiled model: share of activations kept."""


BUCKETINGS = {
    "none": "each has its own",
    "block": "those of a block",
    **added_values("compile.bucketing"),
}


@with_added_keys("compile")
class Compile(Section):
    """The compiler, and the passes that bucket and overlap communication."""

    enable: Rounding[bool] = False
    """Compile the model, with its loss, as one graph."""

    backend: Rounding[Literal["inductor", "aot_eager"]] = "inductor"
    """inductor makes kernels; aot_eager only traces, for tests."""

    bucketing: Literal[tuple(BUCKETINGS)] = Field(  # type: ignore[valid-type]
        "block",
        description="Parameters that share an all-gather and a reduction. "
        + "; ".join(f"{value}: {words}" for value, words in BUCKETINGS.items())
        + ".",
    )

    machine: Annotated[str, Relative(".toml")] = ""
    """Cost model: a profile such as H100 (cost/profiles.py), or a .toml file, on a CPU also the
    peak for MFU; empty: this GPU's profile, or measurements of this CPU."""

    dump_graphs: bool = False
    """Write each graph before and after each pass to graphs/."""

    reordering: bool = True
    """Start each gather one bucket early, and wait for each reduction when the next starts."""

    defer_weight_grads: bool = True
    """Compute gradients of weights during collectives of tensor or context parallelism; not with
    asynchronous tensor parallelism."""

    @property
    def buckets_across_blocks(self) -> bool:
        """True if the model is compiled with buckets that do not follow its blocks."""
        return self.enable and self.bucketing not in ("none", "block")


@with_added_keys("checkpoint")
class Checkpoint(Section):
    """Saving and resuming."""

    enable: bool = False
    """Save, and resume from the newest checkpoint found."""

    folder: OutputPath = "checkpoint"
    """Folder of the checkpoints, inside job.dump_folder."""

    interval: int = Field(500, ge=1)
    """Steps between saves; the last step is saved, too."""

    keep_latest_k: int = Field(3, ge=0)
    """Newest checkpoints to keep; 0: all."""

    load_step: Annotated[int, Field(ge=1)] | Literal[-1] = -1
    """Step to resume from, which has to be the newest; -1: whichever that is. For an older one use
    branch_from."""

    branch_from: RecipePath = ""
    """Checkpoint of another run, such as "../outputs/trunk/checkpoint/step-8000", that a run
    without one of its own starts from: weights, optimizer, position in the data."""

    initial_load_path: RecipePath = ""
    """Initial weights of a run without a checkpoint: a checkpoint, a run's folder (its newest one),
    a checkpoint of torchtitan, or a Hugging Face folder."""

    must_resume: bool = False
    """Fail if there is no checkpoint."""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """disabled: training waits until a checkpoint is on disk; async: only for a copy in host
    memory; async_with_pinned_mem: for a pinned copy, faster on GPUs. The copy stays in memory: 12
    bytes a parameter with AdamW, divided by the shards."""

    on_failure: Literal["stop", "continue"] = "stop"
    """If a save fails: stop, or continue with a warning."""

    last_save_model_only: bool = False
    """Save the last step without optimizer state; resuming from it needs accept_model_only."""

    restart_data: bool = False
    """If a source's documents or their order differ from the checkpoint's, start the data anew;
    else that is an error. Sources may be added and left out anyway."""

    accept_model_only: bool = False
    """Start with a new optimizer if the checkpoint has none or another; else that is an error."""


class Corpus(Section):
    """The source of documents: keys of [data], and of each table of data.sources."""

    dataset: (
        Literal["stdlib", "local", "c4", "prepared"]
        | Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$", title="owner/name")]
    ) = "stdlib"
    """stdlib: documentation and sources of the running Python; local: files at path; owner/name: a
    streamed dataset of the Hugging Face hub; c4: allenai/c4 in English, with its own validation
    split; prepared: what titan-lite prepare wrote to path."""

    path: RecipePath = ""
    """local: file, folder or glob, on disk or at a URL, of txt, jsonl, json with one object a line
    (each also compressed) or parquet; prepared: a folder."""

    subset: str = ""
    """Subset of a dataset of the hub; empty: its only or default one."""

    split: str = "train"
    """Split of a dataset of the hub."""

    text_field: str = "text"
    """Field or column of a document's text."""

    @property
    def documents(self) -> tuple[str, ...]:
        """The values that say which documents these are."""
        return tuple(getattr(self, name) for name in Corpus.model_fields)

    @property
    def short_name(self) -> str:
        """The last part of the path without a pattern, or the dataset."""
        fixed = [
            part
            for part in PurePath(without_secrets(self.path)).parts
            if not set(part) & set("*?[")
        ]
        if fixed:
            text = PurePath(fixed[-1]).name.partition(".")[0]
        else:
            text = f"{self.dataset} {self.subset}".strip()
        return re.sub(r"[^\w.-]+", "_", text) or self.dataset


class DataSource(Corpus):
    """One corpus of a data mix."""

    weight: float = Field(1.0, gt=0)
    """Share of the tokens, relative to the other sources' weights."""


@with_added_keys("data")
class Data(Corpus):
    """The documents to train on, and their loader."""

    sources: tuple[DataSource, ...] = ()
    """Several corpora to mix: tables [[data.sources]] of dataset, path, subset, split, text_field
    and weight, in place of the keys of [data]."""

    validation_fraction: RestartsData[float] = Field(0.05, ge=0, lt=1)
    """Share of documents held out for validation, by a hash of their name; 0 if it is not set and
    [validation] has documents of its own."""

    shuffle: RestartsData[bool] = True
    """Shuffle documents with debug.seed, anew in each epoch."""

    shuffle_buffer: Annotated[RestartsData[int], OnlyWith("data.shuffle", True)] = Field(
        10_000, ge=1
    )
    """Documents of 4 KiB in the shuffle buffer, over all files."""

    min_document_tokens: int = Field(0, ge=0)
    """Shorter documents, BOS and EOS not counted, are left out."""

    max_document_mib: int = Field(32, ge=1, le=4096)
    """A document of more MiB of UTF-8 is a bad one."""

    on_bad_document: Literal["error", "skip"] = "error"
    """A document that cannot be read or is too large: error ends the run and names file and line;
    skip leaves it out and lists it in bad_documents.jsonl."""

    max_bad_documents: int = Field(100, ge=0)
    """More bad documents, over all epochs, end the run."""

    num_workers: int = Field(1, ge=0, le=1024)
    """Loader processes per rank; 0: the training process reads."""

    prefetch: int = Field(4, ge=1, le=2**16)
    """Microbatches prepared ahead by each loader process."""

    _run_folder: str = PrivateAttr("")
    _table: str = PrivateAttr("data")
    _of_run: tuple["Data", ...] = PrivateAttr(())  # this table in all phases of the run

    @property
    def run_folder(self) -> str:
        """job.dump_folder, whose files are no documents; empty: not known."""
        return self._run_folder

    def without_run(self, folder: str) -> "Data":
        """Return a copy that leaves out the files in the run's own folder."""
        copy = self.model_copy()
        copy._run_folder = folder
        return copy

    def in_run(self, phases: "Sequence[Data]") -> "Data":
        """Return a copy that knows this table in all phases of the run."""
        copy = self.model_copy()
        copy._of_run = tuple(phases)
        return copy

    def source_names(self) -> list[str]:
        """Return the name of each of data.sources."""
        return [self._name_of(source) for source in self.sources]

    @property
    def name(self) -> str:
        """The name of these documents, which no others have in any phase of the run: the last part
        of their path without a pattern, or their dataset; with a number, such as web_2, where those
        of an earlier table have it.
        """
        return self._name_of(self)

    def _name_of(self, corpus: Corpus) -> str:
        names: dict[tuple[str, ...], str] = {}
        for data in (*self._of_run, self):
            for each in data.sources or (data,):
                unique = each.short_name
                number = 2
                while unique in names.values():
                    unique = f"{each.short_name}_{number}"
                    number += 1
                names.setdefault(each.documents, unique)
        return names[corpus.documents]

    def mixture(self) -> "list[tuple[float, Data]]":
        """Return [(share of the tokens, the source as a [data] section), ...]."""
        if not self.sources:
            return [(1.0, self)]
        total = sum(source.weight for source in self.sources)
        found: list[tuple[float, Data]] = []
        for number, source in enumerate(self.sources, 1):
            corpus = {name: getattr(source, name) for name in Corpus.model_fields}
            part = self.of_table(f"{self.key('sources')}[{number}]", **corpus, sources=())
            found.append((source.weight / total, part.in_run((*self._of_run, self))))
        return found

    def of_table(self, table: str, **documents: object) -> "Data":
        """Return a copy with the documents of another table of the recipe."""
        copy = self.replace(**documents)
        copy._table = table
        return copy

    def key(self, name: str) -> str:
        """Return the key as the recipe has it, for messages."""
        of_table = name in Corpus.model_fields or name == "sources"
        return f"{self._table if of_table else 'data'}.{name}"


@with_added_keys("validation")
class Validation(Section):
    """The loss on documents of its own, or on those held out of [data]."""

    enable: bool = False
    """Measure the loss on documents that are not trained on; not set: true if [validation] has
    documents."""

    freq: int = Field(500, ge=1)
    """Steps between validations; there is one at the end, too."""

    steps: int = Field(10, ge=1)
    """Global batches per validation, the same ones each time."""

    path: RecipePath = ""
    """As data.path; empty: documents held out of [data]."""

    dataset: (
        Literal["", "stdlib", "local", "c4", "prepared"]
        | Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$", title="owner/name")]
    ) = ""
    """As data.dataset; empty: the files at path."""

    subset: str = ""
    """As data.subset."""

    split: str = "validation"
    """As data.split."""

    text_field: str = ""
    """As data.text_field; empty: that of [data]."""

    sources: tuple[DataSource, ...] = ()
    """As data.sources; each has a loss of its own, too."""

    @property
    def has_documents(self) -> bool:
        """True for documents of its own; False for those held out of [data]."""
        return bool(self.path or self.dataset or self.sources)


@with_added_keys("metrics")
class Metrics(Section):
    """Logging during training; NO_COLOR=1 in the environment: no colours, no progress bar."""

    log_freq: int = Field(10, ge=1)
    """Steps between entries in the log, metrics.jsonl and TensorBoard."""

    enable_tensorboard: bool = True
    """Write TensorBoard events to tb/."""

    enable_wandb: bool = False
    """Log to Weights & Biases (pip install wandb), to the project WANDB_PROJECT."""

    show_all_warnings: bool = False
    """Show libraries' warnings unchanged on every rank; false: each once, without harmless ones."""


@with_added_keys("profiling")
class Profiling(Section):
    """Traces and memory snapshots."""

    enable_profiling: bool = False
    """Write torch.profiler traces to profile_traces/."""

    profile_freq: int = Field(10, ge=2)
    """Every so many steps one is traced; in a shorter run its last."""

    enable_memory_snapshot: bool = False
    """Write CUDA memory snapshots to memory_snapshots/, every profile_freq steps and when out of
    memory."""


@with_added_keys("comm")
class Comm(Section):
    """Time limits in seconds, and the flight recorder."""

    init_timeout_seconds: int = Field(300, ge=1, le=365 * 86400)
    """Limit until the first step is done, and for writing a checkpoint: a rank that neither enters
    nor leaves a collective so long hangs, and the run ends."""

    compile_timeout_seconds: int = Field(900, ge=1, le=365 * 86400)
    """The same limit in a first step or validation that compiles."""

    train_timeout_seconds: int = Field(100, ge=1, le=365 * 86400)
    """The same limit afterwards; a finished step or microbatch is progress, too."""

    trace_buf_size: int = Field(2000, ge=0, le=2**20)
    """Entries of the flight recorder, which shows where a run hangs; 0: off, and collectives do not
    count as progress."""

    @property
    def longest_limit(self) -> int:
        """Seconds of the longest limit."""
        return max(
            self.init_timeout_seconds, self.compile_timeout_seconds, self.train_timeout_seconds
        )


@with_added_keys("fault_tolerance")
class FaultTolerance(Section):
    """Replica groups, which train on when one of them is lost (torchft)."""

    replica_groups: int = Field(1, ge=1, le=9999)
    """Replicas that share a step, each with the processes of [parallelism]. When one is lost the
    others go on, and it rejoins with their state; 1: off."""

    min_replica_groups: int = Field(1, ge=1, le=9999)
    """Replica groups that a step needs."""

    lighthouse: str = ""
    """Address of torchft's lighthouse, http://HOST:PORT; empty: ./run_train.sh starts it, and all
    groups, on this machine."""

    timeout_seconds: int = Field(40, ge=1, le=86400)
    """Limit of a sum between groups, and of sending state; then the living groups repeat the
    step."""

    wait_seconds: int = Field(600, ge=1, le=365 * 86400)
    """Limit of a wait for the lighthouse or for min_replica_groups; then the run is saved and
    stopped."""

    @property
    def address(self) -> str:
        """Address of the lighthouse, which the launcher names to groups; "" without them."""
        if self.replica_groups == 1:
            return ""
        return self.lighthouse or os.environ.get(LIGHTHOUSE, "")


@with_added_keys("debug")
class Debug(Section):
    """Settings to repeat a run exactly."""

    # Without shuffling it decides only in which turns a mix takes its sources: another one
    # repeats and skips nothing, as another weight does.
    seed: Annotated[RestartsData[int], OnlyWith("data.shuffle", True)] = Field(
        0, ge=0, le=2**63 - 1
    )
    """Seed of weights and data order."""

    deterministic: Rounding[bool] = False
    """Use deterministic kernels, and fail where there is none."""


class Phase(NamedTuple):
    """A part of a run, with a recipe of its own (config/phases.py)."""

    number: int  # the first is 1
    begin: int  # steps of the run before it
    end: int  # its last step


@with_added_tables
class Config(Section):
    """A recipe with all its sections."""

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
    fault_tolerance: FaultTolerance = FaultTolerance()
    debug: Debug = Debug()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)  # of the keys that were set
    _phase: Phase | None = PrivateAttr(None)  # None: the run has only one
    _phases: tuple["Config", ...] = PrivateAttr(())  # all of the run

    @property
    def phase(self) -> Phase:
        """The phase of the run that this is the recipe of."""
        return self._phase or Phase(1, 0, self.training.steps)

    @property
    def phases(self) -> "tuple[Config, ...]":
        """The recipes of all phases of the run; of a run without, this one."""
        return tuple(each.with_all_phases(self._phases) for each in self._phases) or (self,)

    def alone(self) -> "Config":
        """Return the recipe of a phase as one of a run without phases."""
        copy = self.model_copy()
        copy._phase = None
        copy._phases = ()
        return copy

    def in_phase(self, phase: Phase) -> "Config":
        """Return the recipe as that of a phase."""
        copy = self.model_copy()
        copy._phase = phase
        return copy

    def with_all_phases(self, phases: "Sequence[Config]") -> "Config":
        """Return the recipe of a phase, which knows those of all phases of the run."""
        copy = self.replace(data=self.data.in_run([each.data for each in phases]))
        copy._phases = tuple(phases)
        return copy

    @property
    def validation_data(self) -> Data:
        """The documents of validation as a [data] section, with the loader's settings of [data]."""
        validation = self.validation
        if not validation.has_documents:
            return self.data
        documents = self.data.of_table(
            "validation",
            dataset=validation.dataset or ("local" if validation.path else "stdlib"),
            path=validation.path,
            subset=validation.subset,
            split=validation.split,
            text_field=validation.text_field or self.data.text_field,
            sources=validation.sources,
            validation_fraction=1.0,  # all documents are for validation
        )
        of_run = [each.validation_data for each in self._phases if each.validation.has_documents]
        return documents.in_run(of_run)

    def origin(self, key: str) -> str:
        """Return where the value of "section.key" is from: a recipe's path, "command line" or
        "default".
        """
        return self._origins.get(key, "default")

    def was_set(self, key: str) -> bool:
        """Return True if the recipe or the command line has the key "section.key"."""
        return key in self._origins

    def set_origins(self, origins: Mapping[str, str]) -> None:
        """Note the origins of the keys that were set, by "section.key"."""
        self._origins.update(origins)


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in Config.model_fields.items()
}
KEYS: dict[str, FieldInfo] = {
    f"{name}.{key}": field
    for name, section in SECTIONS.items()
    for key, field in section.model_fields.items()
}
KEYS_OF_MODULES = tuple(
    key
    for key, field in KEYS.items()
    if any(isinstance(mark, SelectsModules) for mark in field.metadata)
)


def flatten(config: Config) -> dict[str, Any]:
    """Return {"training.steps": 1000, ...} for all keys."""
    return {f"{name}.{key}": value for name, section in config for key, value in section}


def changes_of(phases: Sequence[Config], index: int) -> dict[str, Any]:
    """Return the keys that a phase of a run changes, and their values; {} for the first one."""
    if index == 0:
        return {}
    before = flatten(phases[index - 1].without_secrets())
    now = flatten(phases[index].without_secrets())
    return {key: value for key, value in now.items() if value != before[key]}


def is_unset(key: str, value: object) -> bool:
    """Return True for the value that stands for none: empty, or a default of 0 or -1 that is apart
    from the key's own numbers, such as model.dim = 0 (the flavor's).
    """
    if value in (None, "", (), []):
        return True
    if isinstance(value, bool) or key not in KEYS or value != KEYS[key].default:
        return False
    is_apart = any(get_origin(kind) is Literal for kind in get_args(KEYS[key].annotation))
    return value in (0, -1) and (is_apart or key.startswith("model."))


# The types of fields


def kind_of(annotation: object) -> type:
    """Return bool, int, float, str, tuple or the class of a table."""
    origin = get_origin(annotation)
    if origin is Annotated or origin in (Union, UnionType):
        return kind_of(get_args(annotation)[0])
    if origin is Literal:
        return type(get_args(annotation)[0])
    return origin or cast("type", annotation)


def table_of(annotation: object) -> type[Section] | None:
    """Return the class of a table, or of the tables of a list; None for other values."""
    kind = kind_of(annotation)
    if kind is tuple:
        return table_of(get_args(annotation)[0])
    return kind if issubclass(kind, Section) else None


def choices_of(annotation: object) -> tuple[str, ...]:
    """Return the words that a key, or the entries of a list, may have; () if any."""
    if get_origin(annotation) is Literal:
        return tuple(word for word in get_args(annotation) if isinstance(word, str))
    return tuple(word for part in get_args(annotation) for word in choices_of(part))
