"""Identify a run: the recipe, and what a recipe does not have, such as hashes and versions.

    documents = documents_of_run(list_documents(config))
    identity = run_identity(config, layout, tokenizer, documents)     # what the user has given
    identity = with_machine(identity)                                 # and what computes it

Every step has the identity of the run that saved it (checkpoint/state.py). A run that resumes from
the step compares it with its own (checkpoint/resume.py).
"""

import dataclasses
import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import NonNegativeFloat, NonNegativeInt

import titan_lite
from titan_lite import __version__
from titan_lite.config import Config
from titan_lite.config.families import file_digest
from titan_lite.config.load import without_gone
from titan_lite.config.nearest import RENAMED
from titan_lite.data.listing import Listing, list_sources
from titan_lite.data.source_identity import SourceIdentity, digest_of
from titan_lite.data.tokenizer import Tokenizer
from titan_lite.distributed.layout import Layout
from titan_lite.feature import features_of
from titan_lite.manifest import validated
from titan_lite.models.shapes import shape_of
from titan_lite.optim.lr_scheduler import Decay, decay_of

# Variables of the environment with which torch and its libraries choose other kernels, another
# precision or another order of sums
NUMERIC_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
)


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run, in JSON types and tuples.

    An empty value is unknown: `convert` writes steps that know only their model.
    """

    # resolved: {section: {key: value}}
    recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)  # shape, as dataclasses.asdict
    tokenizer: str = ""  # SHA-256
    documents: str = ""  # SHA-256 of their names, sizes and contents (data/source_identity.py)
    validation_documents: str = ""  # the same of those of [validation]; "": held out, or none
    sequences: NonNegativeInt = 0  # of an optimizer step
    shares: tuple[NonNegativeFloat, ...] = ()  # of each source in the tokens
    total_steps: NonNegativeInt = 0  # of an older run's schedule
    decay: Mapping[str, NonNegativeInt] = field(default_factory=dict)  # of the learning rate: Decay
    world_size: NonNegativeInt = 0
    mesh: Mapping[str, NonNegativeInt] = field(default_factory=dict)  # ranks along each axis
    # what tensors that features add to checkpoints depend on, by the first word of their names
    added_tensors: Mapping[str, Mapping[str, NonNegativeInt]] = field(default_factory=dict)
    device: str = ""  # name of the GPU, or "CPU"
    # what rounding depends on beside recipe, device and versions: threads, CPU, variables
    numerics: Mapping[str, str | int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)  # by package
    family_file: str = ""  # of a user's own (config/families.file_digest); "": one of this package
    sources: str = ""  # SHA-256 of this package's files
    git: str = ""  # commit of the checkout; only rank 0 looks it up

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RunIdentity":
        """Return the identity in a state.json, which may lack fields or have unknown ones.

        Raises ValueError for a value that is not of its type and bounds.
        """
        if content.get("compression"):  # before 0.2, with PowerSGD
            content = {**content, "added_tensors": {"between": content["compression"]}}
        validated(cls, content)
        names = [each.name for each in dataclasses.fields(cls)]
        identity = cls(**{name: content[name] for name in names if name in content})
        identity = dataclasses.replace(identity, recipe=_with_present_names(identity.recipe))
        return _with_present_decay(identity)


def _with_present_names(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return {table: {key: value}} of an older recipe, with the names that its keys have now."""
    tables = {table: dict(keys) for table, keys in recipe.items()}
    for old, new in RENAMED.items():
        table, name = old.split(".")
        if name in tables.get(table, {}):
            tables[table][new.removeprefix(f"{table}.")] = tables[table].pop(name)
    compiled = tables.get("compile", {})
    if "model" not in compiled.get("components", ["model"]):  # which was in eager mode then
        compiled["enable"] = False
    return without_gone(tables)


def _with_present_decay(identity: RunIdentity) -> RunIdentity:
    """Return the identity of an older run with the keys of the learning rate's decay of now: it had
    lr_scheduler.decay_ratio, a share, of lr_scheduler.total_steps, where it ended.
    """
    schedule = dict(identity.recipe.get("lr_scheduler", {}))
    if "decay_ratio" not in schedule:
        return identity
    ratio = validated(NonNegativeFloat, schedule, "decay_ratio")
    warmup_steps = validated(NonNegativeInt, schedule, "warmup_steps")
    was_set = schedule.pop("total_steps", -1) != -1
    schedule.pop("decay_ratio")
    total = identity.total_steps
    steps = max(0, min(round(ratio * total), total - warmup_steps))
    schedule["decay_begin"] = total - steps if was_set and ratio else ""
    if was_set or not ratio:
        schedule["decay_length"] = steps
    else:
        schedule["decay_length"] = "" if ratio == 1 else f"{100 * ratio:.10g}%"
    return dataclasses.replace(
        identity,
        recipe={**identity.recipe, "lr_scheduler": schedule},
        decay=Decay(total - steps, steps)._asdict(),
    )


# by the field of RunIdentity that has their hash
ListingsOfRun = Mapping[str, Sequence[Listing]]
DocumentsOfRun = Mapping[str, Sequence[SourceIdentity]]


def list_documents(config: Config) -> ListingsOfRun:
    """Return listings of the sources of [data], and of those of [validation], if it has its own.

    Nothing is read yet.
    """
    listings = {"documents": list_sources(config.data)}
    if config.validation.enable and config.validation.has_documents:
        listings["validation_documents"] = list_sources(config.validation_data)
    return listings


def documents_of_run(listings: ListingsOfRun) -> DocumentsOfRun:
    """Return what identifies the documents of a run. Raises ConfigError."""
    return {
        name: [listing.identity for listing in of_sources] for name, of_sources in listings.items()
    }


def run_identity(
    config: Config, layout: Layout, tokenizer: Tokenizer, documents: DocumentsOfRun
) -> RunIdentity:
    """Return what the recipe and its inputs make of the identity of this run."""
    # In the layout, max_seq_len is training.seq_len of this run; parameters do not depend on it.
    model = dataclasses.replace(layout.model, max_seq_len=shape_of(config.model).max_seq_len)

    added_tensors: dict[str, Mapping[str, int]] = {}
    for feature in features_of(config):
        added_tensors |= feature.tensors_depend_on(config, layout)

    # what [parallelism] and [compile] make of it together, where the key is "auto"
    times = "step" if layout.gathers_once else "microbatch"
    numerics: dict[str, str | int] = {"gradients are summed once a": times}
    for feature in features_of(config):
        numerics |= feature.numerics(config)

    digests = {name: digest_of(sources) for name, sources in documents.items()}
    return RunIdentity(
        recipe=config.without_secrets().model_dump(),
        model=dataclasses.asdict(model),
        tokenizer=tokenizer.sha256,
        documents=digests["documents"],
        validation_documents=digests.get("validation_documents", ""),
        sequences=layout.sequences_per_step,
        shares=tuple(share for share, _ in config.data.mixture()),
        decay=decay_of(config.lr_scheduler, config.training.steps, layout.tokens)._asdict(),
        world_size=layout.world_size,
        mesh={**layout.degrees, "ep": layout.expert_parallel},
        added_tensors=added_tensors,
        numerics=numerics,
        family_file=file_digest(config.model.name),
    )


def with_machine(identity: RunIdentity, *, git: str = "") -> RunIdentity:
    """Return the identity with what this process computes on, after `init_device`."""
    import torch  # the rest of this file is needed before it can be imported

    versions = {
        "titan_lite": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    numerics = dict(identity.numerics)
    numerics |= {name: os.environ[name] for name in NUMERIC_VARIABLES if os.environ.get(name)}
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        versions["cuDNN"] = str(torch.backends.cudnn.version())
        numerics["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    else:
        device = "CPU"
        numerics["threads"] = torch.get_num_threads()
        numerics["CPU capability"] = torch.backends.cpu.get_cpu_capability()
        numerics["processor"] = _processor()
    return dataclasses.replace(
        identity,
        device=device,
        numerics=numerics,
        versions=versions,
        sources=source_digest(),
        git=git,
    )


def _processor() -> str:
    """Return the name of the CPU, such as "AMD EPYC 7R13 Processor"; its architecture at worst."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except (OSError, UnicodeError):
        pass
    return platform.processor() or platform.machine()


@cache
def source_digest() -> str:
    """Return a SHA-256 of the names and contents of this package's source files."""
    package = Path(titan_lite.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


@cache
def git_revision() -> str:
    """Return the commit of the checkout that has this package; "": no checkout.

    It ends with "+changes" if files were changed since.
    """
    path = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(path.parent), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return result.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", path.name)  # fails if installed inside another checkout
        return git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return ""
