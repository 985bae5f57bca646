"""Keys that decide how a run is executed: layout, memory, compilation, checkpoints, logs and limits. One row per key (row.py)."""

from dataclasses import dataclass

from titan_lite.config.row import setting


@dataclass(frozen=True)
class Parallelism:
    """the layout of ranks; the product of all degrees is the number of ranks"""

    data_parallel_replicate_degree: int = setting(
        1, "copies of the sharded model (HSDP; DDP if shard degree is 1)", "ranks >= 1"
    )
    data_parallel_shard_degree: int = setting(
        -1, "ranks that a copy is sharded over (FSDP); -1: all remaining ranks", "ranks >= 1 or -1"
    )
    tensor_parallel_degree: int = setting(
        1, "ranks that each matrix product is split over", "ranks >= 1"
    )
    replicate_compression: str = setting(
        "none",
        "how gradients travel between copies. none: as they are, in backward; powersgd: once a step in the last backward, as "
        "two thin factors of each large shard, with error feedback (memory: two float32 shards of these)",
        choices=("none", "powersgd"),
    )
    replicate_rank: int = setting(
        8,
        "columns of these factors. A shard whose factors would have more than a quarter of its numbers travels as it is",
        "columns >= 1",
    )
    replicate_uncompressed_steps: int = setting(
        100,
        "first steps, in which gradients change fast and travel as they are",
        "steps >= 0",
    )
    enable_async_tensor_parallel: bool = setting(
        False,
        "overlap tensor parallelism's collectives with the matrix products beside them (Inductor, on GPUs)",
        gpu="its ranks write to each other's GPU memory",
    )
    context_parallel_degree: int = setting(
        1, "ranks that each sequence is split over", "ranks >= 1"
    )
    pipeline_parallel_degree: int = setting(
        1, "groups of ranks that the layers are split over", "ranks >= 1"
    )
    pipeline_parallel_schedule: str = setting(
        "1F1B",
        "order of forwards and backwards: GPipe and 1F1B have one stage per rank, Interleaved1F1B two or more, ZBVZeroBubble "
        "two, with a backward in two halves",
        choices=("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"),
    )
    pipeline_parallel_microbatch_size: int = setting(
        1,
        "sequences per pipeline microbatch, of the local_batch_size",
        "sequences >= 1",
    )
    pipeline_parallel_stages_per_rank: int = setting(
        -1,
        "stages per pipeline rank; -1: the fewest that the schedule admits",
        "stages >= 1 or -1",
    )
    pipeline_parallel_first_stage_less_layers: int = setting(
        1,
        "layers less in the first stage, which has the embedding",
        "layers >= 0",
    )
    pipeline_parallel_last_stage_less_layers: int = setting(
        1,
        "layers less in the last stage, which has norm, output and loss",
        "layers >= 0",
    )
    pipeline_parallel_split_points: tuple = setting(
        (),
        "first modules of all stages but the first, such as layers.2,layers.4; empty: automatic",
        "FQNs",
    )
    fsdp_reshard_after_forward: str = setting(
        "default",
        "which gathered weights are freed after forward and gathered again in backward: all of them (always), none (never), "
        "or all but those of fsdp_keep_gathered (default); fsdp_communication = step keeps all of them for a step",
        choices=("default", "always", "never"),
    )
    fsdp_keep_gathered: tuple = setting(
        ("norm", "output"),
        "modules whose gathered weights are kept from forward to backward, such as layers.31,norm,output (memory: these weights, "
        "unsharded, in mixed_precision_param); norm and output are not worth freeing, since backward needs them first. A block "
        "that activation_checkpoint recomputes gathers its weights again in any case",
        "FQNs",
    )
    fsdp_communication: str = setting(
        "auto",
        "with several microbatches (gradient accumulation, pipeline): step gathers all weights and reduces all gradients once "
        "per optimizer step (memory: the rank's stages, unsharded, in mixed_precision_param, and their gradients in "
        "mixed_precision_reduce); microbatch does both for every microbatch (traffic times the number of microbatches); auto is "
        "step if that leaves 40% of a GPU for activations and compile.bucketing is none or block, else microbatch",
        choices=("auto", "step", "microbatch"),
    )


@dataclass(frozen=True)
class ActivationCheckpoint:
    """recomputation of activations instead of keeping them"""

    mode: str = setting(
        "none",
        "none keeps every activation; full keeps each block's input and recomputes the rest; selective follows "
        "selective_ac_option; memory_budget lets the compiler choose within the key memory_budget",
        choices=("none", "selective", "full", "memory_budget"),
    )
    selective_ac_option: str = setting(
        "op",
        'with mode = selective: "op" keeps matrix products and attention of every block and recomputes the rest, which is cheap; '
        '"op/2" also recomputes every second matrix product, like TorchTitan; a number such as 2 recomputes every second block',
        "op, op/2, or blocks",
    )
    memory_budget: float = setting(
        0.5,
        "with mode = memory_budget and a compiled model: share of activations kept; 0 recomputes all that can be, 1 nothing",
        "fraction >= 0 <= 1",
    )


@dataclass(frozen=True)
class Float8:
    """matrix products of the blocks' linear layers in float8, for GPUs from H100 on"""

    enable: bool = setting(
        False,
        "compute forward and both gradients of these layers in float8; weights stay in float32",
    )
    recipe: str = setting(
        "tensorwise",
        "what shares a scale. tensorwise: a tensor, the fastest; rowwise: a row, with scales that are powers of two, more exact; "
        "rowwise_with_gw_hp: also a row, and gradients of weights are computed in mixed_precision_param, the most exact",
        choices=("tensorwise", "rowwise", "rowwise_with_gw_hp"),
    )
    all_gather: bool = setting(
        False,
        "FSDP gathers these weights in float8: half the bytes; only tensorwise, since backward multiplies by columns of a weight",
    )
    filter_fqns: tuple = setting(
        (),
        'layers of the blocks that stay in mixed_precision_param, by parts of their names: "attention.wk", "layers.0", "w2"; '
        "embedding and output always do",
        "parts of FQNs",
    )


@dataclass(frozen=True)
class Compile:
    """torch.compile, and the passes that bucket and overlap communication"""

    enable: bool = setting(False, "compile each of components as one graph")
    components: tuple = setting(
        ("model", "loss"),
        "compiled parts: model; loss, for which Inductor avoids float32 copies of the logits (in chunks of tokens it is in the "
        "model's graph); optimizer, which gains little, since its fused update is already one kernel",
        choices=("model", "loss", "optimizer"),
    )
    backend: str = setting(
        "inductor",
        "inductor makes kernels; aot_eager only traces (for tests)",
        choices=("inductor", "aot_eager"),
    )
    bucketing: str = setting(
        "block",
        "which parameters share an all-gather and a reduction. none: each has its own; block: those of each transformer block, "
        "the last one with the last norm; plan: those of each entry of buckets; greedy: as many as fit under the computation "
        "before them, by the cost model of machine; auto: Inductor's overlap scheduler, with the same cost model",
        choices=("none", "block", "plan", "greedy", "auto"),
    )
    buckets: tuple = setting(
        (),
        "with bucketing = plan, the modules or parameters of each bucket, with spaces between, such as "
        '["tok_embeddings", "layers.0 layers.1", "norm output"]; each parameter not named has its own',
        "FQNs",
    )
    machine: str = setting(
        "",
        "cost model of communication and computation: a profile (A100, H100, H100 PCIe, H100 NVL, H200, H200 NVL, B200, MI300X) "
        "or the path of a .toml file (compiler/profiles.py), on a CPU also the peak for MFU; empty: this GPU's profile, or "
        "measurements of this CPU",
        "name or path",
        path=".toml",
    )
    dump_graphs: bool = setting(
        False,
        "write every graph before and after each pass to graphs/",
    )
    reordering: bool = setting(
        True,
        "start each gather one bucket early, and wait for each reduction when the next starts",
    )
    defer_products: bool = setting(
        True,
        "compute gradients of weights while a collective of tensor or context parallelism is in flight; not with asynchronous "
        "tensor parallelism",
    )
    tensor_parallel_chunks: int = setting(
        1,
        "chunks of tokens that a collective of tensor parallelism and its matrix product are cut into, so that one travels while "
        "another is computed; where the cost model of machine finds it slower, nothing is cut; 1: never",
        "chunks >= 1",
    )

    def compiles(self, component: str) -> bool:
        return self.enable and component in self.components


@dataclass(frozen=True)
class Checkpoint:
    """saving and resuming"""

    enable: bool = setting(False, "save, and resume from the newest step found")
    folder: str = setting("checkpoint", "folder of the steps, inside job.dump_folder", "path")
    interval: int = setting(500, "interval of saves; the last step is saved, too", "steps >= 1")
    keep_latest_k: int = setting(
        3, "saved steps to keep; older ones are deleted; 0: keep all", "checkpoints >= 0"
    )
    load_step: int = setting(
        -1,
        "step to resume from; -1: the newest",
        "step >= 1 or -1",
    )
    initial_load_path: str = setting(
        "",
        "initial weights of a run that has no saved step, for any layout: a step, a run's folder (its newest step), a "
        "checkpoint of torchtitan, or a Hugging Face folder (titan_lite/convert.py converts between them)",
        path=True,
    )
    must_resume: bool = setting(
        False,
        "fail if no checkpoint exists, and start no new run",
    )
    async_mode: str = setting(
        "disabled",
        "disabled: training waits until a step is on disk; async: training waits only for a copy in host memory, and goes on "
        "while that is written; async_with_pinned_mem: the copy is pinned and reused, which is faster on GPUs",
        choices=("disabled", "async", "async_with_pinned_mem"),
    )
    on_failure: str = setting(
        "stop", "if a save fails: stop, or continue with a warning", choices=("stop", "continue")
    )
    last_save_model_only: bool = setting(
        False,
        "at training.steps, save the model without optimizer state; resuming from it needs accept_model_only",
    )
    restart_data: bool = setting(
        False,
        "if the loaded step had other data (other documents or another order), start the data of this recipe at its first "
        "document; later resumes continue it. Without this key such a resume is an error",
    )
    accept_model_only: bool = setting(
        False,
        "start with a new optimizer if the step has only the model, or that of another optimizer; else that is an error",
    )


@dataclass(frozen=True)
class Metrics:
    """logging during training; NO_COLOR=1 in the environment turns colours and the progress bar off"""

    log_freq: int = setting(
        10, "interval of entries in the log, metrics.jsonl and TensorBoard", "steps >= 1"
    )
    enable_tensorboard: bool = setting(True, "write TensorBoard events to tb/")
    enable_wandb: bool = setting(
        False, "log to Weights & Biases, to the project WANDB_PROJECT", package="wandb"
    )
    show_all_warnings: bool = setting(
        False,
        "show libraries' warnings unchanged on every rank; false: each once, without those known to be harmless",
    )


@dataclass(frozen=True)
class Profiling:
    """traces and memory snapshots"""

    enable_profiling: bool = setting(False, "write torch.profiler traces to profile_traces/")
    profile_freq: int = setting(10, "interval of traces; its last step is traced", "steps >= 3")
    enable_memory_snapshot: bool = setting(
        False,
        "write snapshots of CUDA memory to memory_snapshots/, every profile_freq steps and on out-of-memory",
        gpu="snapshots are of CUDA memory",
    )


@dataclass(frozen=True)
class Comm:
    """time limits and the flight recorder"""

    init_timeout_seconds: int = setting(
        300,
        "limit before the first step is done, and while a checkpoint is written: a rank that neither enters nor leaves a "
        "collective for this time hangs, and the run ends",
        "seconds >= 1 <= 31536000",
    )
    compile_timeout_seconds: int = setting(
        900,
        "the same limit in a first step or validation that compiles",
        "seconds >= 1 <= 31536000",
    )
    train_timeout_seconds: int = setting(
        100,
        "the same limit afterwards; a finished step or microbatch counts as progress, too",
        "seconds >= 1 <= 31536000",
    )
    trace_buf_size: int = setting(
        2000,
        "entries of the flight recorder, which shows where a run hangs; NCCL dumps it into job.dump_folder on a timeout; 0: off, "
        "and collectives do not count as progress",
        "collectives >= 0 <= 1048576",
    )
