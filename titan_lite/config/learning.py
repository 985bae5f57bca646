"""Keys that decide what is learned: model, batches, optimizer, documents and validation. One row per key (row.py)."""

import dataclasses
import itertools
import re
from dataclasses import dataclass
from pathlib import PurePath

from titan_lite.config.row import setting

OF_FLAVOR = "; 0: the flavor's"


@dataclass(frozen=True)
class Job:
    """name and folder of the run"""

    dump_folder: str = setting(
        "", "folder that the run writes to; empty: outputs/<recipe name>", "path"
    )
    description: str = setting("", "one line about the run, shown at its start", "text")


@dataclass(frozen=True)
class Model:
    """the model and its tokenizer"""

    name: str = setting(
        "llama3",
        "model family",
        choices=("llama3",),
    )
    flavor: str = setting(
        "debug",
        "size, a key of FLAVORS in models/shapes.py; empty: the keys below give the shape",
        "name",
    )
    dim: int = setting(
        0,
        f"width of the residual stream{OF_FLAVOR}",
        "numbers >= 1 <= 262144 or 0",
    )
    n_layers: int = setting(
        0,
        f"transformer blocks{OF_FLAVOR}",
        "blocks >= 1 <= 1024 or 0",
    )
    n_heads: int = setting(
        0,
        f"query heads, dim / n_heads numbers each{OF_FLAVOR}",
        "heads >= 1 <= 4096 or 0",
    )
    n_kv_heads: int = setting(
        0,
        f"key/value heads, shared by query heads{OF_FLAVOR}",
        "heads >= 1 <= 4096 or 0",
    )
    hidden_dim: int = setting(
        0,
        f"width within feed_forward{OF_FLAVOR}",
        "numbers >= 1 <= 1048576 or 0",
    )
    vocab_size: int = setting(
        0,
        f"rows of the embedding, at least the tokenizer's tokens{OF_FLAVOR}",
        "tokens >= 1 <= 4194304 or 0",
    )
    tied_embeddings: str = setting(
        "flavor",
        "whether embedding and output are one weight",
        choices=("flavor", "yes", "no"),
    )
    rope_theta: float = setting(
        0.0,
        f"base of the rotary frequencies{OF_FLAVOR}",
        "number >= 1 <= 1000000000 or 0",
    )
    rope_scaling_factor: float = setting(
        0.0,
        f"divisor of the low rotary frequencies, as in Llama 3.1; 1: no scaling{OF_FLAVOR}",
        "factor >= 1 <= 1024 or 0",
    )
    norm_eps: float = setting(
        0.0,
        f"added to the mean square in RMSNorm{OF_FLAVOR}",
        "number > 0 < 1 or 0",
    )
    max_seq_len: int = setting(
        0,
        f"upper bound of training.seq_len, and of a text of titan_lite.generate{OF_FLAVOR}",
        "tokens >= 1 <= 16777216 or 0",
    )
    tokenizer_path: str = setting(
        "",
        "tokenizer in tiktoken's format (base64 token and rank per line), or a tokenizer.json",
        path=True,
    )


@dataclass(frozen=True)
class Training:
    """batch size, sequence length, steps and precision; which steps are skipped"""

    local_batch_size: int = setting(
        8,
        "sequences per forward of a data-parallel rank or its pipeline",
        "sequences >= 1 <= 65536",
    )
    global_batch_size: int = setting(
        -1,
        "sequences per optimizer step over all ranks; more than local_batch_size x data-parallel degree means gradient "
        "accumulation; -1: one local batch per data-parallel rank",
        "sequences >= 1 <= 1048576 or -1",
    )
    global_batch_ramp: tuple = setting(
        (),
        'other global batch sizes at the beginning: ["64 until 1000", "128 until 3000"] is 64 sequences up to step 1000, 128 up '
        "to step 3000, and then global_batch_size",
        "SEQUENCES until STEP",
    )
    seq_len: int = setting(
        2048,
        "tokens per sequence",
        "tokens >= 1 <= 16777216",
    )
    mask_documents: bool = setting(
        False,
        "a token attends only to its own document, not to those packed before it (Llama 3, section 3.2); by "
        "FlashAttention on NVIDIA GPUs in bfloat16; with context parallelism and elsewhere by a mask of all pairs of tokens",
    )
    attention_kernel: str = setting(
        "auto",
        "attention on NVIDIA GPUs: auto is torch's choice (a new cuDNN on H100 and B200, else FlashAttention 2) and with context "
        "parallelism FlashAttention 2; FA3 (H100, package flash_attn_interface) and FA4 (H100 and B200, package flash_attn) are "
        "newer ones; mask_documents knows no cuDNN",
        choices=("auto", "cudnn", "FA2", "FA3", "FA4"),
    )
    max_norm: float = setting(1.0, "gradients are clipped to this global norm", "L2 norm > 0")
    steps: int = setting(
        1000,
        "optimizer steps of the run, resumed parts included",
        "steps >= 1",
    )
    mixed_precision_param: str = setting(
        "bfloat16",
        "gathered parameters, activations, all-gather traffic",
        choices=("bfloat16", "float32"),
    )
    mixed_precision_reduce: str = setting(
        "float32",
        "gradient reduction and accumulation, its traffic",
        choices=("float32", "bfloat16"),
    )
    float32_matmul_precision: str = setting(
        "highest",
        "argument of torch.set_float32_matmul_precision, for matrix products of float32 tensors: high lets GPUs compute them in "
        "TF32, about eight times as fast, with 10 bits of mantissa; no effect on products in bfloat16",
        choices=("highest", "high", "medium"),
    )
    loss_chunk_tokens: int = setting(
        0,
        "tokens of a microbatch that a rank projects to the vocabulary at a time, with their part of loss and gradients, so that "
        "logits of all never exist; at most 16 chunks. 0: all at once if logits, copies and gradients take at most 1.5 GiB (12 "
        "bytes for each token and entry of the vocabulary on the rank), else chunks of that size, at most 8; -1: all at once",
        "tokens >= -1 <= 16777216",
    )
    gc_freq: int = setting(
        50,
        "interval of Python's garbage collection, at once on all ranks",
        "steps >= 1",
    )
    compare_copies_freq: int = setting(
        100,
        "interval at which ranks compare their copies of a parameter or of optimizer state; they also do at the start and before "
        "a save. If copies differ or a value is not finite, the run ends and saves nothing; 0: no interval",
        "steps >= 0",
    )
    max_nonfinite_steps: int = setting(
        10,
        "steps with a non-finite loss or gradient are skipped; this many in a row stop the run",
        "steps >= 1",
    )
    spike_window: int = setting(
        0,
        "skip a step whose loss is far above the mean of this many steps before (a spike); 0: off",
        "steps >= 2 or 0",
    )
    spike_sigmas: float = setting(
        6.0,
        "distance of a spike above that mean",
        "standard deviations > 0",
    )


@dataclass(frozen=True)
class Optimizer:
    """the optimizer and its constants"""

    name: str = setting(
        "AdamW",
        "Muon: momentum made orthogonal; Shampoo: momentum between roots of gradient statistics. Both are for matrices within "
        "blocks, and AdamW for embedding, output and norms",
        choices=("AdamW", "Muon", "Shampoo"),
    )
    lr: float = setting(3e-4, "peak learning rate", "per step > 0")
    beta1: float = setting(
        0.9, "decay of the first moment of AdamW and Shampoo", "per step >= 0 < 1"
    )
    beta2: float = setting(
        0.95,
        "decay of the second moment of AdamW, and of Shampoo's statistics",
        "per step >= 0 < 1",
    )
    eps: float = setting(1e-8, "added to the denominator of AdamW", "gradient > 0")
    momentum: float = setting(
        0.95,
        "decay of the momentum",
        "per step >= 0 < 1",
    )
    nesterov: bool = setting(
        True,
        "add the gradient once more to its momentum, before it is made orthogonal",
    )
    ns_steps: int = setting(
        5,
        "steps of the Newton-Schulz iteration",
        "steps >= 1 <= 99",
    )
    ns_per_head: bool = setting(
        False,
        "cut wq, wk and wv into heads for the iteration",
    )
    ns_dtype: str = setting(
        "bfloat16",
        "the Newton-Schulz iteration, and the traffic of matrices to their owners and back",
        choices=("bfloat16", "float32"),
    )
    max_preconditioner_dim: int = setting(
        1024,
        "larger matrices are cut into blocks of at most so many rows and columns",
        "rows >= 1",
    )
    precondition_frequency: int = setting(
        10,
        "steps from one computation of a root to the next, in which it becomes stale",
        "steps >= 1",
    )
    start_preconditioning_step: int = setting(
        10,
        "first step with roots; earlier ones are AdamW's",
        "step >= 1",
    )
    preconditioner_eps: float = setting(
        1e-5,
        "added to the eigenvalues of the statistics",
        "times the largest eigenvalue > 0",
    )
    weight_decay: float = setting(
        0.1, "decoupled decay of all but RMSNorm weights, times the learning rate", "per step >= 0"
    )


@dataclass(frozen=True)
class LRScheduler:
    """the learning rate over the run"""

    warmup_steps: int = setting(200, "linear warm-up from zero", "steps >= 0")
    total_steps: int = setting(
        -1,
        "length of the schedule, if it is not that of the run; -1: training.steps",
        "steps >= 1 or -1",
    )
    decay_ratio: float = setting(
        1.0,
        "share of total_steps that decays, at the end; between warm-up and decay the learning rate is constant; 1.0: decay "
        "starts when warm-up ends",
        "fraction >= 0 <= 1",
    )
    decay_type: str = setting("linear", "shape of the decay", choices=("linear", "cosine", "sqrt"))
    min_lr_factor: float = setting(0.0, "final learning rate, relative to lr", "fraction >= 0 <= 1")


@dataclass(frozen=True)
class Corpus:
    """The source of documents: keys of [data], and of each table of data.sources."""

    dataset: str = setting(
        "stdlib",
        "stdlib: documentation and sources of the running Python; local: files at path; owner/name: a dataset of the Hugging "
        "Face hub, streamed; c4: allenai/c4 in English, with its own validation split; prepared: tokens that "
        "titan_lite.data.prepare wrote to path",
        choices=("stdlib", "local", "c4", "prepared"),
        or_like=("owner/name", r"[\w.-]+/[\w.-]+"),
    )
    path: str = setting(
        "",
        "file, folder or glob, on disk or at a URL, of txt, jsonl, json, csv (these plain or compressed), parquet or arrow, "
        "for dataset = local; a folder for dataset = prepared",
        path=True,
    )
    subset: str = setting(
        "", "subset of a dataset of the hub; empty: its only or default one", "name"
    )
    split: str = setting("train", "split of a dataset of the hub", "name")
    text_field: str = setting(
        "text",
        "field or column that holds a document's text, except in txt",
        "name",
    )


@dataclass(frozen=True)
class DataSource(Corpus):
    weight: float = setting(
        1.0, "share of the tokens, relative to the other sources' weights", "tokens > 0"
    )


@dataclass(frozen=True)
class Data(Corpus):
    """the documents to train on, and their loader"""

    sources: tuple = setting(
        (),
        "several corpora to mix: [[data.sources]] tables with the keys dataset, path, subset, split, text_field and weight; "
        "[data] then has none of these",
        "tables",
        table=DataSource,
    )
    validation_fraction: float = setting(
        0.05,
        "share of documents held out for validation, chosen by a hash of their name",
        "fraction >= 0 < 1",
    )
    shuffle: bool = setting(True, "shuffle documents with debug.seed, anew in each epoch")
    shuffle_buffer: int = setting(
        10_000,
        "documents of 4 KiB in the shuffle buffer, over all files",
        "documents >= 1",
    )
    min_document_tokens: int = setting(
        0,
        "documents with fewer tokens, BOS and EOS not counted, are left out",
        "tokens >= 0",
    )
    max_document_mib: int = setting(
        32,
        "a larger document is a bad one",
        "MiB of UTF-8 >= 1 <= 4096",
    )
    on_bad_document: str = setting(
        "error",
        "policy for a document that cannot be read, is empty or too large: error ends the run and names file and line, skip "
        "leaves it out and lists it in bad_documents.jsonl in job.dump_folder",
        choices=("error", "skip"),
    )
    max_bad_documents: int = setting(
        100,
        "more bad documents than this end the run",
        "documents >= 0",
    )
    num_workers: int = setting(
        1,
        "loader processes per rank; 0: read in the training process",
        "processes >= 0 <= 1024",
    )
    prefetch: int = setting(
        4,
        "microbatches prepared ahead by each loader process",
        "microbatches >= 1 <= 65536",
    )

    def source_names(self) -> list[str]:
        """Return a short unique name for each of data.sources: the last part of its path without a pattern, or its dataset."""
        names: list[str] = []
        for source in self.sources:
            fixed = [part for part in PurePath(source.path).parts if not set(part) & set("*?[")]
            text = (
                PurePath(fixed[-1]).name.partition(".")[0]
                if fixed
                else f"{source.dataset} {source.subset}".strip()
            )
            name = re.sub(r"[^\w.-]+", "_", text) or source.dataset
            numbered = (
                name if number == 1 else f"{name}_{number}" for number in itertools.count(1)
            )
            names.append(next(each for each in numbered if each not in names))
        return names

    def mixture(self) -> "list[tuple[float, Data]]":
        """Return [(share of the tokens, the source as a [data] section), ...]."""
        if not self.sources:
            return [(1.0, self)]
        total, own = sum(source.weight for source in self.sources), {**vars(self), "sources": ()}
        names = [field.name for field in dataclasses.fields(Corpus)]
        return [
            (
                source.weight / total,
                MixedData(
                    **{**own, **{name: getattr(source, name) for name in names}}, number=number
                ),
            )
            for number, source in enumerate(self.sources, 1)
        ]

    def key(self, name: str) -> str:
        """Return the key as the recipe has it, for messages."""
        return f"data.{name}"


@dataclass(frozen=True)
class MixedData(Data):
    """One source of a mixture as a [data] section."""

    number: int = 0  # position in data.sources, from 1

    def key(self, name: str) -> str:
        return (
            f"data.sources[{self.number}].{name}"
            if name in Corpus.__dataclass_fields__
            else super().key(name)
        )


@dataclass(frozen=True)
class Validation:
    """the loss on held-out documents"""

    enable: bool = setting(False, "measure the loss on held-out documents")
    freq: int = setting(500, "interval of validations; there is one at the end, too", "steps >= 1")
    steps: int = setting(
        10, "global batches per validation, the same ones each time", "batches >= 1"
    )


@dataclass(frozen=True)
class Debug:
    """settings to repeat a run exactly"""

    seed: int = setting(
        0,
        "seed of weights and data order",
        f"integer >= 0 <= {2**63 - 1}",
    )
    deterministic: bool = setting(
        False,
        "use deterministic kernels, and fail where there is none",
    )
