"""Keys of how a run is run: its ranks, memory, graphs, checkpoints, records and time limits. One row a key, as row.py says."""

from dataclasses import dataclass

from titan_lite.config.row import NOTHING, ROUNDING, Need, setting

PIPELINE = Need("parallelism.pipeline_parallel_degree", lambda degree: degree != 1)
NO_POINTS = Need("parallelism.pipeline_parallel_split_points", lambda points: not points)
NO_CSV = Need("parallelism.pipeline_parallel_schedule_csv", lambda path: not path)
COMPILES = Need("compile.enable", bool, "compile.enable = true")
COMPILES_MODEL = (
    COMPILES,
    Need(
        "compile.components",
        lambda names: isinstance(names, list | tuple) and "model" in names,
        'compile.components = ["model", "loss"]',
        "the model is not in compile.components",
    ),
)
CHECKPOINTS = Need("checkpoint.enable", bool, "checkpoint.enable = true")


@dataclass(frozen=True)
class Parallelism:
    """how many ranks share what; their product is the number of ranks"""

    resume = ROUNDING
    data_parallel_replicate_degree: int = setting(1, "copies of the sharded model (HSDP; DDP if shard degree is 1)", "ranks >= 1")
    data_parallel_shard_degree: int = setting(
        -1, "ranks a copy is sharded over (FSDP); -1: all that are left", "ranks >= 1 or -1"
    )
    tensor_parallel_degree: int = setting(1, "ranks each matrix product is split over", "ranks >= 1")
    enable_async_tensor_parallel: bool = setting(
        False,
        "overlap tensor parallelism's collectives with the matrix products beside them (Inductor, on GPUs)",
        needs=(
            Need("parallelism.tensor_parallel_degree", lambda degree: degree != 1, "tensor_parallel_degree = 2"),
            *COMPILES_MODEL,
            Need("compile.backend", lambda backend: backend == "inductor", 'compile.backend = "inductor"'),
        ),
        refused=True,
        gpu="its ranks write to each other's GPU memory",
    )
    context_parallel_degree: int = setting(1, "ranks each sequence is split over", "ranks >= 1")
    pipeline_parallel_degree: int = setting(1, "groups of ranks the layers are split over", "ranks >= 1")
    pipeline_parallel_schedule: str = setting(
        "1F1B",
        "order of forwards and backwards: GPipe and 1F1B have one stage a rank, Interleaved1F1B two or more, ZBVZeroBubble two, "
        "with backward in two halves",
        choices=("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"),
        needs=(PIPELINE, NO_CSV),
    )
    pipeline_parallel_schedule_csv: str = setting(
        "", "your own schedule: a row a pipeline rank, such as 0F0,1F0,1B0 (stage, action, microbatch)", path=True, needs=PIPELINE
    )
    pipeline_parallel_microbatch_size: int = setting(
        1, "sequences that go through the pipeline at once, cut from local_batch_size", "sequences >= 1", needs=PIPELINE
    )
    pipeline_parallel_stages_per_rank: int = setting(
        -1, "stages of a pipeline rank; -1: the least that the schedule has", "stages >= 1 or -1", needs=(PIPELINE, NO_CSV)
    )
    pipeline_parallel_first_stage_less_layers: int = setting(
        1, "layers that the first stage has less, for its embedding", "layers >= 0", needs=(PIPELINE, NO_POINTS)
    )
    pipeline_parallel_last_stage_less_layers: int = setting(
        1, "layers that the last stage has less, for norm, output and loss", "layers >= 0", needs=(PIPELINE, NO_POINTS)
    )
    pipeline_parallel_split_points: tuple = setting(
        (), "modules that the later stages begin with, such as layers.2,layers.4; empty: automatic", "FQNs", needs=PIPELINE
    )
    fsdp_reshard_after_forward: str = setting(
        "default",
        "whether gathered weights are dropped after forward and gathered again in backward: all of them (always), none (never), "
        "or all but those of fsdp_keep_gathered (default), except where fsdp_communication = step keeps all for a step",
        choices=("default", "always", "never"),
    )
    fsdp_keep_gathered: tuple = setting(
        ("norm", "output"),
        "modules whose gathered weights are kept from forward to backward, such as layers.31,norm,output (memory: these weights, "
        "whole, in mixed_precision_param); norm and output, which backward needs first, are not worth dropping. A block that "
        "activation_checkpoint recomputes gathers its weights again all the same",
        "FQNs",
        needs=(
            Need("parallelism.fsdp_reshard_after_forward", lambda when: when != "never"),
            Need(  # which a recipe does not say; who asks may (describe.py)
                "parallelism.microbatches_gathered_once",
                lambda count: count == 1,
                why_not='fsdp_communication = "step" keeps all weights gathered for the {value} microbatches of a step',
            ),
        ),
    )
    fsdp_communication: str = setting(
        "auto",
        "with several microbatches (gradient accumulation, pipeline): step gathers all weights and reduces all gradients once an "
        "optimizer step (memory: the rank's whole stages in mixed_precision_param plus their gradients in "
        "mixed_precision_reduce); microbatch does both for every microbatch (traffic times the number of microbatches); auto is "
        "step where that leaves 40% of a GPU for activations and compile.bucketing is none or block, bucket_mode copy, else "
        "microbatch",
        choices=("auto", "step", "microbatch"),
    )


@dataclass(frozen=True)
class ActivationCheckpoint:
    """which activations are recomputed instead of kept"""

    resume = ROUNDING
    mode: str = setting(
        "none",
        "none keeps every activation; full keeps each block's input and recomputes the rest; selective is what "
        "selective_ac_option says; memory_budget lets the compiler choose, with memory_budget",
        choices=("none", "selective", "full", "memory_budget"),
    )
    selective_ac_option: str = setting(
        "op",
        'with mode = selective: "op" keeps matrix products and attention of every block and recomputes what is cheap; "op/2" '
        "of matrix products every second one too, as TorchTitan does; a number such as 2 recomputes every second block whole",
        "op, op/2, or blocks",
        needs=Need("activation_checkpoint.mode", lambda mode: mode == "selective"),
    )
    memory_budget: float = setting(
        0.5,
        "with mode = memory_budget and a compiled model: activations kept, between recomputing what can be (0) and nothing (1)",
        "fraction >= 0 <= 1",
        needs=Need("activation_checkpoint.mode", lambda mode: mode == "memory_budget"),
    )


@dataclass(frozen=True)
class Compile:
    """compiled graphs, and the passes that bucket and overlap communication"""

    resume = ROUNDING
    enable: bool = setting(False, "compile what components names, each as one graph")
    components: tuple = setting(
        ("model", "loss"),
        "what is compiled: the model; the loss, of which Inductor makes one without float32 copies of the logits; the optimizer, "
        "whose update is one kernel as it is",
        choices=("model", "loss", "optimizer"),
        needs=COMPILES,
    )
    backend: str = setting(
        "inductor", "inductor makes kernels; aot_eager only traces, for tests", choices=("inductor", "aot_eager"), needs=COMPILES
    )
    bucketing: str = setting(
        "block",
        "which parameters share an all-gather and a reduction. none: each has its own; block: those of each transformer block, "
        "of the last one with the last norm; plan: as buckets says; greedy: as many as hide under the computation "
        "before them, as priced for this machine; auto: what Inductor's overlap scheduler finds, with the same prices; measured: "
        "the first steps try all of these but plan, which must all fit, and the fastest that leaves memory free stays",
        choices=("none", "block", "plan", "greedy", "auto", "measured"),
        needs=COMPILES_MODEL,
    )
    buckets: tuple = setting(
        (),
        "with bucketing = plan, the modules or parameters of each bucket, with spaces between, such as "
        '["tok_embeddings", "layers.0 layers.1", "norm output"]; what is not named stays alone',
        "FQNs",
        needs=(*COMPILES_MODEL, Need("compile.bucketing", lambda way: way == "plan")),
    )
    bucket_mode: str = setting(
        "copy",
        "how a bucket travels. copy: as one tensor, into which shards and gradients are copied, and weights out of it; "
        "coalesced: each tensor by itself, all in one launch, and nothing copied but what is all-reduced",
        choices=("copy", "coalesced"),
        needs=(
            *COMPILES_MODEL,
            Need("compile.bucketing", lambda way: way in ("block", "plan", "greedy", "measured"), 'bucketing = "block"'),
        ),
        refused=True,
    )
    machine: str = setting(
        "",
        "what prices communication and computation: a profile (A100, H100, H100 PCIe, H100 NVL, H200, H200 NVL, B200, MI300X) or "
        "the path of a .toml file (compiler/hardware.py), on a CPU also the peak of MFU; empty: this machine's, a CPU measured",
        "name or path",
        path=".toml",
        needs=COMPILES_MODEL,
    )
    dump_graphs: bool = setting(
        False, "write every graph before and after each pass to graphs/", resume=NOTHING, needs=COMPILES_MODEL
    )
    reordering: bool = setting(
        True, "gather before the wait for what is in use, and wait for a reduction when the next starts", needs=COMPILES_MODEL
    )

    def compiles(self, component: str) -> bool:
        return self.enable and component in self.components


@dataclass(frozen=True)
class Checkpoint:
    """saving, and going on from what was saved; the flag --checkpoint.explain says what that would mean"""

    resume = NOTHING
    enable: bool = setting(False, "save, and resume from the newest step found")
    folder: str = setting("checkpoint", "folder of the steps, inside job.dump_folder", "path")
    interval: int = setting(500, "a step is saved every so often, and at the end", "steps >= 1")
    keep_latest_k: int = setting(3, "older steps are deleted; 0 keeps all", "checkpoints >= 0")
    load_step: int = setting(-1, "step to resume from; -1: newest whole one", "step >= 1 or -1", needs=CHECKPOINTS, refused=True)
    initial_load_path: str = setting(
        "",
        "weights that a run without a step of its own starts from, on any layout: a step, a run's folder (its newest step), or a "
        "Hugging Face folder (titan_lite/convert.py makes one of the other)",
        path=True,
    )
    must_resume: bool = setting(False, "a folder without a step is an error, and no new run", needs=CHECKPOINTS, refused=True)
    async_mode: str = setting(
        "disabled",
        "async: the run waits for a copy in host memory alone, which is written beside training; async_with_pinned_mem: the copy "
        "is pinned and kept, quicker on GPUs",
        choices=("disabled", "async", "async_with_pinned_mem"),
    )
    on_failure: str = setting("stop", "if a step cannot be saved: stop, or continue with a warning", choices=("stop", "continue"))
    last_save_model_only: bool = setting(
        False, "at training.steps save the model without optimizer state; to go on from that takes accept_model_only"
    )
    restart_data: bool = setting(
        False,
        "where the data is not that of the step loaded (other documents or another order), begin it at its first document; "
        "later resumes go on in it. Otherwise such a resume is refused",
        needs=CHECKPOINTS,
    )
    accept_model_only: bool = setting(
        False, "start with a new optimizer where the step has the model alone; otherwise it is refused", needs=CHECKPOINTS
    )


@dataclass(frozen=True)
class Metrics:
    """what is shown and written along the way; NO_COLOR=1 in the environment: without colours and progress bar"""

    resume = NOTHING
    log_freq: int = setting(10, "a line in the log, metrics.jsonl and TensorBoard every so often", "steps >= 1")
    enable_tensorboard: bool = setting(True, "write TensorBoard events to tb/")
    enable_wandb: bool = setting(False, "log to Weights & Biases as well, to the project of WANDB_PROJECT", package="wandb")
    show_all_warnings: bool = setting(
        False, "show libraries' warnings as they print them, on every rank; else once, and without those known to be harmless"
    )
    compare_plan: str = setting(
        "auto",
        "at the end of a run, planned against measured step time and memory, with plan.json and measured.json in the folder: on "
        "GPUs (auto), also on CPUs, where the end then takes a quarter of a minute longer (always), or not (never)",
        choices=("auto", "always", "never"),
    )


@dataclass(frozen=True)
class Profiling:
    """traces and memory snapshots"""

    resume = NOTHING
    enable_profiling: bool = setting(False, "write torch.profiler traces to profile_traces/")
    profile_freq: int = setting(10, "steps from one trace to the next (the last of them is traced)", "steps >= 3")
    enable_memory_snapshot: bool = setting(
        False, "CUDA memory, every trace period and on out-of-memory, to memory_snapshots/", gpu="snapshots are of CUDA memory"
    )


@dataclass(frozen=True)
class Comm:
    """time limits, and the flight recorder"""

    resume = NOTHING
    init_timeout_seconds: int = setting(
        300,
        "a rank hangs, and the run ends, if it neither enters nor leaves a collective for so long: until the first step is done, "
        "and while a checkpoint is written",
        "seconds >= 1 <= 31536000",
    )
    compile_timeout_seconds: int = setting(
        900, "the same in the first step and the first validation, if these compile", "seconds >= 1 <= 31536000", needs=COMPILES
    )
    train_timeout_seconds: int = setting(
        100, "the same afterwards; a finished step or microbatch counts as well", "seconds >= 1 <= 31536000"
    )
    trace_buf_size: int = setting(
        2000,
        "entries in the flight recorder, which tells where a run hangs; NCCL's dumps into job.dump_folder on a timeout; 0: off, "
        "and collectives do not count as progress",
        "collectives >= 0 <= 1048576",
    )
