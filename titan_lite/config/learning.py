"""Keys of what is learned: the model, its batches and documents, and how parameters move. One row a key, as row.py says."""

import dataclasses
import itertools
import re
from dataclasses import dataclass
from pathlib import PurePath

from titan_lite.config.row import DATA, LEARNING, NOTHING, PLACE, ROUNDING, Need, setting

SPIKES = Need("training.spike_window", lambda window: window != 0)
SHUFFLES = Need("data.shuffle", bool)
CUT_HERE = Need("data.dataset", lambda name: name not in ("c4", "prepared"))  # and not held out where it comes from
READS_FILES = Need("data.dataset", lambda name: name not in ("stdlib", "prepared"))
SKIPS = Need("data.on_bad_document", lambda policy: policy != "error")
WORKERS = Need("data.num_workers", lambda workers: workers != 0)
OF_FLAVOR = "; 0: the flavor's"


@dataclass(frozen=True)
class Job:
    """what the run is called and where it writes"""

    resume = NOTHING
    dump_folder: str = setting("", "where the run writes; empty: outputs/<recipe name>", "path")
    description: str = setting("", "one line about the run, shown at its start", "text")


@dataclass(frozen=True)
class Model:
    """which model, and its tokenizer"""

    name: str = setting("llama3", "model family", choices=("llama3",), fact="model")
    flavor: str = setting(
        "debug", "size, a key of FLAVORS in models/llama3.py; empty: the keys below say all of the shape", "name", fact="model"
    )
    dim: int = setting(0, f"width of the residual stream{OF_FLAVOR}", "numbers >= 1 <= 262144 or 0", fact="model")
    n_layers: int = setting(0, f"transformer blocks{OF_FLAVOR}", "blocks >= 1 <= 1024 or 0", fact="model")
    n_heads: int = setting(0, f"query heads, dim / n_heads numbers each{OF_FLAVOR}", "heads >= 1 <= 4096 or 0", fact="model")
    n_kv_heads: int = setting(0, f"key/value heads, which query heads share{OF_FLAVOR}", "heads >= 1 <= 4096 or 0", fact="model")
    hidden_dim: int = setting(0, f"width within feed_forward{OF_FLAVOR}", "numbers >= 1 <= 1048576 or 0", fact="model")
    vocab_size: int = setting(
        0, f"tokens there is room for, at least the tokenizer's{OF_FLAVOR}", "tokens >= 1 <= 4194304 or 0", fact="model"
    )
    tied_embeddings: str = setting(
        "flavor", "whether embedding and output are one weight", choices=("flavor", "yes", "no"), fact="model"
    )
    rope_theta: float = setting(0.0, f"base of the rotary frequencies{OF_FLAVOR}", "number >= 1 <= 1000000000 or 0", fact="model")
    rope_scaling_factor: float = setting(
        0.0,
        f"low rotary frequencies are divided by it, as in Llama 3.1; 1: none are{OF_FLAVOR}",
        "factor >= 1 <= 1024 or 0",
        fact="model",
    )
    norm_eps: float = setting(0.0, f"added to the mean square in RMSNorm{OF_FLAVOR}", "number > 0 < 1 or 0", fact="model")
    max_seq_len: int = setting(
        0,
        f"most tokens that training.seq_len, or a text of titan_lite.generate, has{OF_FLAVOR}",
        "tokens >= 1 <= 16777216 or 0",
        fact="model",
    )
    tokenizer_path: str = setting(
        "", "tokenizer in tiktoken's format (base64 token and rank a line), or a tokenizer.json", path=True, fact="tokenizer"
    )


@dataclass(frozen=True)
class Training:
    """batch, sequence, length and precision; which steps are skipped"""

    resume = LEARNING
    local_batch_size: int = setting(
        8,
        "sequences that a data-parallel rank or its pipeline takes at once",
        "sequences >= 1 <= 65536",
        resume=ROUNDING,
        fact="rows",
    )
    global_batch_size: int = setting(
        -1,
        "sequences in one optimizer step over all ranks; more than local_batch_size x data-parallel degree means gradient "
        "accumulation; -1: exactly one local batch a rank",
        "sequences >= 1 <= 1048576 or -1",
        fact="rows",
    )
    global_batch_ramp: tuple = setting(
        (),
        'other global batches at the beginning: ["64 until 1000", "128 until 3000"] is 64 sequences up to step 1000, 128 up to '
        "step 3000, and then global_batch_size",
        "SEQUENCES until STEP",
    )
    seq_len: int = setting(2048, "tokens the model sees at once", "tokens >= 1 <= 16777216", resume=DATA)
    mask_documents: bool = setting(
        False,
        "a token attends to its own document alone, and not to those packed before it (Llama 3, section 3.2); by "
        "FlashAttention on NVIDIA GPUs in bfloat16; with context parallelism and elsewhere by a mask of all pairs of tokens",
    )
    attention_kernel: str = setting(
        "auto",
        "attention on NVIDIA GPUs: auto is torch's choice (a new cuDNN on H100 and B200, else FlashAttention 2) and with context "
        "parallelism FlashAttention 2; FA3 (H100, package flash_attn_interface) and FA4 (H100 and B200, package flash_attn) are "
        "newer ones; mask_documents knows no cuDNN",
        choices=("auto", "cudnn", "FA2", "FA3", "FA4"),
        resume=ROUNDING,
        needs=Need("training.mixed_precision_param", lambda dtype: dtype == "bfloat16"),
    )
    max_norm: float = setting(1.0, "gradients are scaled down to this global norm", "L2 norm > 0")
    steps: int = setting(1000, "optimizer steps of the whole run, resumed parts included", "steps >= 1", fact="total_steps")
    dtype: str = setting("float32", "sharded parameters and optimizer state", choices=("float32", "bfloat16"), resume=ROUNDING)
    mixed_precision_param: str = setting(
        "bfloat16", "gathered parameters, activations, all-gather traffic", choices=("bfloat16", "float32"), resume=ROUNDING
    )
    mixed_precision_reduce: str = setting(
        "float32", "gradient reduction and accumulation, its traffic", choices=("float32", "bfloat16"), resume=ROUNDING
    )
    float32_matmul_precision: str = setting(
        "highest",
        "matrix products of float32 tensors, as torch.set_float32_matmul_precision has it: high lets GPUs compute them in TF32, "
        "about eight times as fast, with 10 bits of mantissa; no effect on products in bfloat16",
        choices=("highest", "high", "medium"),
        resume=ROUNDING,
    )
    gc_freq: int = setting(50, "Python's garbage is collected every so often on all ranks together", "steps >= 1", resume=NOTHING)
    compare_copies_freq: int = setting(
        100,
        "ranks with copies of a parameter or of optimizer state compare them every so often, and always at the start and before "
        "a save; where copies differ, or a value is not finite, the run ends and nothing is saved; 0: only then",
        "steps >= 0",
        resume=NOTHING,
    )
    max_nonfinite_steps: int = setting(
        10, "steps with a non-finite loss or gradient are skipped; so many in a row stop the run", "steps >= 1", resume=NOTHING
    )
    spike_window: int = setting(
        0, "a loss far above the last so many is a spike: its step is skipped like a non-finite one; 0: off", "steps >= 2 or 0"
    )
    spike_sigmas: float = setting(6.0, "how far above their mean a spike is", "standard deviations > 0", needs=SPIKES)


@dataclass(frozen=True)
class Optimizer:
    """how parameters move"""

    resume = LEARNING
    name: str = setting("AdamW", "optimizer", choices=("AdamW",))
    lr: float = setting(3e-4, "peak learning rate", "per step > 0")
    beta1: float = setting(0.9, "decay of the first moment", "per step >= 0 < 1")
    beta2: float = setting(0.95, "decay of the second moment", "per step >= 0 < 1")
    eps: float = setting(1e-8, "added to the denominator", "gradient > 0")
    weight_decay: float = setting(0.1, "decoupled decay, times the learning rate, of all but RMSNorm weights", "per step >= 0")


@dataclass(frozen=True)
class LRScheduler:
    """the learning rate over the run"""

    resume = LEARNING
    warmup_steps: int = setting(200, "linear warm-up from zero", "steps >= 0")
    total_steps: int = setting(
        -1, "schedule's length if the run ends early or goes on; -1: training.steps", "steps >= 1 or -1", fact="total_steps"
    )
    decay_ratio: float = setting(
        1.0,
        "share of total_steps spent decaying at the end; what lies between warm-up and decay is constant; 1.0: decay starts "
        "when warm-up ends",
        "fraction >= 0 <= 1",
    )
    decay_type: str = setting("linear", "shape of the decay", choices=("linear", "cosine", "sqrt"))
    min_lr_factor: float = setting(0.0, "learning rate at the very end, relative to lr", "fraction >= 0 <= 1")


@dataclass(frozen=True)
class Corpus:
    """The source of documents: keys of [data], and of each table of data.sources."""

    resume = PLACE
    dataset: str = setting(
        "stdlib",
        "stdlib: documentation and sources of the running Python; local: files at path; owner/name: a dataset of the Hugging "
        "Face hub, streamed; c4: allenai/c4 in English, with its own validation split; prepared: what titan_lite.data.prepare "
        "wrote to path",
        choices=("stdlib", "local", "c4", "prepared"),
        or_like=("owner/name", r"[\w.-]+/[\w.-]+"),
    )
    path: str = setting(
        "",
        "file, folder or glob of txt, jsonl, json, csv (these plain, gz or zst), parquet or arrow, for dataset = local; "
        "a folder for dataset = prepared",
        path=True,
        fact="documents",
    )
    subset: str = setting("", "which subset of a dataset of the hub; empty: the one it has, or its default", "name")
    split: str = setting("train", "which split of a dataset of the hub", "name")
    text_field: str = setting("text", "field or column that holds a document's text, except in txt", "name", needs=READS_FILES)


@dataclass(frozen=True)
class DataSource(Corpus):
    weight: float = setting(1.0, "its share of the tokens, relative to the other sources' weights", "tokens > 0")


@dataclass(frozen=True)
class Data(Corpus):
    """the documents to train on, and their loader"""

    sources: tuple = setting(
        (),
        "several corpora to mix, in place of dataset, path and so on: [[data.sources]] tables with these keys and weight",
        "tables",
        table=DataSource,
        fact="documents",
    )
    validation_fraction: float = setting(
        0.05, "share of documents held out of training, chosen by a hash of their name", "fraction >= 0 < 1", needs=CUT_HERE
    )
    shuffle: bool = setting(True, "a new seeded order of documents every epoch")
    shuffle_buffer: int = setting(
        10_000, "documents (of 4 KiB) shuffled at once, of all files' pieces", "documents >= 1", needs=(READS_FILES, SHUFFLES)
    )
    min_document_tokens: int = setting(
        0, "documents with fewer tokens, BOS and EOS not counted, are left out", "tokens >= 0", resume=LEARNING
    )
    max_document_mib: int = setting(
        32, "a larger document is a bad one", "MiB of UTF-8 >= 1 <= 4096", resume=LEARNING, needs=READS_FILES
    )
    on_bad_document: str = setting(
        "error",
        "what becomes of a document that cannot be read, is empty or too large: error ends the run naming file and line, skip "
        "leaves it out and lists it in bad_documents.jsonl in job.dump_folder",
        choices=("error", "skip"),
        resume=NOTHING,
        needs=READS_FILES,
    )
    max_bad_documents: int = setting(
        100, "more bad documents than this end the run all the same", "documents >= 0", resume=NOTHING, needs=(READS_FILES, SKIPS)
    )
    num_workers: int = setting(
        1, "loader processes a rank; 0 reads in the training process", "processes >= 0 <= 1024", resume=NOTHING
    )
    prefetch: int = setting(
        4, "microbatches prepared ahead by each loader process", "microbatches >= 1 <= 65536", resume=NOTHING, needs=WORKERS
    )

    def source_names(self) -> list[str]:
        """A short and different name for each of data.sources: the last part of its path that is no pattern, or its dataset."""
        names: list[str] = []
        for source in self.sources:
            fixed = [part for part in PurePath(source.path).parts if not set(part) & set("*?[")]
            told = PurePath(fixed[-1]).name.partition(".")[0] if fixed else f"{source.dataset} {source.subset}".strip()
            name = re.sub(r"[^\w.-]+", "_", told) or source.dataset
            numbered = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
            names.append(next(each for each in numbered if each not in names))
        return names

    def mixture(self) -> "list[tuple[float, Data]]":
        """(share of the tokens, [data] of it alone) for each source."""
        if not self.sources:
            return [(1.0, self)]
        total, own = sum(source.weight for source in self.sources), {**vars(self), "sources": ()}
        names = [field.name for field in dataclasses.fields(Corpus)]
        return [
            (source.weight / total, MixedData(**{**own, **{name: getattr(source, name) for name in names}}, number=number))
            for number, source in enumerate(self.sources, 1)
        ]

    def key(self, name: str) -> str:
        """The key as the recipe has it, for messages."""
        return f"data.{name}"


@dataclass(frozen=True)
class MixedData(Data):
    """[data] of one source of a mixture alone. number: its place in data.sources, from 1."""

    number: int = 0

    def key(self, name: str) -> str:
        return f"data.sources[{self.number}].{name}" if name in Corpus.__dataclass_fields__ else super().key(name)


@dataclass(frozen=True)
class Validation:
    """the loss on held-out documents"""

    resume = NOTHING
    enable: bool = setting(False, "measure the loss on held-out documents")
    freq: int = setting(500, "every so often, and at the end", "steps >= 1")
    steps: int = setting(10, "global batches in one validation, the same ones each time", "batches >= 1")


@dataclass(frozen=True)
class Debug:
    """what a run needs to be repeated exactly"""

    seed: int = setting(0, "seed of weights and data order", f"integer >= 0 <= {2**63 - 1}", resume=PLACE, resume_needs=SHUFFLES)
    deterministic: bool = setting(False, "deterministic kernels, an error where there is none", resume=ROUNDING)
