"""Imports between parts of the package are those of a table. Sources are read with ast; nothing is imported.

A new module needs a row, or its folder's. An import that the table forbids is a question to ask before it is a row to widen: the
model knows nothing distributed, a part takes its own section and not the whole Config, nobody but train knows the trainer.
"""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "titan_lite"

# module or folder, below titan_lite; a module's own row counts alone
# -> what it may import beside the standard library and, for a folder, itself
PART = ("torch", "titan_lite.config", "titan_lite.logging", "titan_lite.ranks")
ROOMS = {
    "__init__": (),
    "command": ("titan_lite.config",),
    "logging": (),
    "manifest": ("titan_lite.outside",),
    "outside": ("titan_lite.config.errors",),
    "ranks": ("torch", "titan_lite.config"),
    "config": (
        "pydantic",
        "tomli",  # the standard library has it from Python 3.11 on
        "tyro",
    ),
    "attention": (
        "torch",
        "titan_lite.config",
    ),  # operators, which the model and its parallel forms call
    "float8": ("torch", "titan_lite.config"),  # as attention
    "sharding": ("torch",),
    "describe": (
        *PART,
        "titan_lite.attention",
        "titan_lite.layout",
        "titan_lite.layout_checks",
        "titan_lite.shape",
        "titan_lite.distributed",
        "titan_lite.optimizer",
    ),
    "check": (*PART, "titan_lite"),  # looks at a recipe with the eyes of all parts
    "models": ("torch", "titan_lite.attention", "titan_lite.outside"),
    "shape": ("titan_lite.config", "titan_lite.models"),
    "loss": PART,
    "loss_chunk": ("titan_lite.config",),
    "chunked_loss": (*PART, "titan_lite.loss"),
    "validation": (*PART, "titan_lite.distributed", "titan_lite.loss", "titan_lite.metrics"),
    "optimizer": (*PART, "titan_lite.sharding"),
    "lr_scheduler": PART,
    "compiler": ("torch", "titan_lite.config", "titan_lite.outside"),
    "distributed": (
        "torch",
        "titan_lite.attention",
        "titan_lite.config",
        "titan_lite.compiler",
        "titan_lite.float8",
        "titan_lite.sharding",
        "titan_lite.ranks",
    ),
    "data": (
        *PART,
        "torchdata",
        "titan_lite.manifest",
        "tiktoken",
        "tokenizers",
        "datasets",
        "fsspec",
        "pyarrow",
        "numpy",
    ),
    "data/bad_documents": (*PART, "titan_lite.metrics.records"),
    "data/prepare": (
        *PART,
        "titan_lite.command",
        "titan_lite.manifest",
        "datasets",
        "numpy",
        "pyarrow",
    ),
    "checkpoint": (*PART, "filelock", "titan_lite.manifest", "titan_lite.outside"),
    "checkpoint/names": (),  # as resume reads them without torch
    "checkpoint/weights": (
        *PART,
        "safetensors",
        "titan_lite.manifest",
        "titan_lite.outside",
        "titan_lite.models",
    ),
    "checkpoint/resume": (
        "titan_lite.config",
        "titan_lite.lr_scheduler",
        "titan_lite.data.dataset.EPOCH",
    ),
    "faults": (*PART, "titan_lite.sharding"),
    "faults/signals": (),  # beside faults/exit_code
    "faults/exit_code": (),
    "faults/restart": ("titan_lite.logging",),
    "faults/verdict": (),
    "metrics": (*PART, "titan_lite.manifest", "matplotlib", "tqdm", "wandb"),
    "metrics/records": ("titan_lite.config", "titan_lite.outside"),  # and no torch, as report
    "metrics/lines": (*PART, "titan_lite.compiler"),
    "layout": (
        *PART,
        "titan_lite.layout_checks",
        "titan_lite.loss_chunk",
        "titan_lite.optimizer",
        "titan_lite.shape",
        "titan_lite.models",
        "titan_lite.distributed",
    ),
    "layout_checks": (
        *PART,
        "titan_lite.float8",
        "titan_lite.layout",  # its type
        "titan_lite.shape",
        "titan_lite.models",
        "titan_lite.optimizer.state",
        "titan_lite.distributed",
        "titan_lite.compiler",
    ),
    "metrics/throughput": (),
    "metrics/timelines": ("titan_lite.compiler", "titan_lite.distributed.axes", "matplotlib"),
    "plan": (
        "titan_lite.sharding",
        "titan_lite.attention",
        "titan_lite.chunked_loss",
        "titan_lite.command",
        "titan_lite.layout",
        "titan_lite.layout_checks",
        "titan_lite.shape",
        *PART,
        "matplotlib",
        "tqdm",
        "titan_lite.models",
        "titan_lite.distributed",
        "titan_lite.compiler",
        "titan_lite.loss",
        "titan_lite.metrics.timelines",
        "titan_lite.metrics.records",
        "titan_lite.optimizer",
    ),
    "report": (
        "titan_lite.config",
        "titan_lite.command",
        "titan_lite.metrics.records",
    ),  # no torch: a page is made where a run's folder was copied to
    "recipe": (
        "titan_lite.config",
        "titan_lite.command",
        "titan_lite.layout",
        "titan_lite.logging",
        "titan_lite.inputs",
    ),
    "inputs": ("titan_lite.config", "titan_lite.layout", "titan_lite.data"),
    "environment": ("titan_lite.config", "titan_lite.logging"),
    "start": (
        *PART,
        "titan_lite.faults.exit_code",
        "titan_lite.faults.signals",
        "titan_lite.recipe",
        "titan_lite.train",
    ),
    "__main__": ("titan_lite.config", "titan_lite.command"),
    "convert": (
        *PART,
        "titan_lite.command",
        "safetensors",
        "titan_lite.manifest",
        "titan_lite.models",
        "titan_lite.checkpoint",
        "titan_lite.data",
    ),
    "generate": (
        *PART,
        "titan_lite.command",
        "titan_lite.models",
        "titan_lite.checkpoint.weights",
        "titan_lite.data",
    ),
    "trainer": (*PART, "titan_lite"),  # the assembler
    "train": (
        *PART,
        "titan_lite.recipe",
        "titan_lite.environment",
        "titan_lite.layout",
        "titan_lite.trainer",
        "titan_lite.check",
        "titan_lite.faults",
    ),
    "verify": (*PART, "titan_lite"),  # runs the trainer, and looks into it
}
WHOLE_CONFIG = {  # the others take their own section, or plain values
    "config",
    "check",
    "describe",
    "recipe",
    "start",
    "__main__",
    "inputs",
    "layout",
    "layout_checks",
    "trainer",
    "train",
    "verify",
    "plan",
    "data/prepare",
}


def within(name, prefix):
    return name == prefix or name.startswith(f"{prefix}.")


def imports_of(path, package):
    """(line, "torch.nn.functional") for every import of a file, `from a import b` as a.b, and every use of torch.distributed."""
    here = ("titan_lite", *path.relative_to(package).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            origin = here[: -node.level] if node.level else ()
            origin += (node.module,) if node.module else ()
            for alias in node.names:
                yield node.lineno, ".".join((*origin, alias.name))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed"  # there after any `import torch`


def forbidden_imports(package):
    """A line for every import below the folder `package` that ROOMS does not allow."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        room = "/".join(parts) if "/".join(parts) in ROOMS else parts[0]
        if room not in ROOMS:
            found.append(f"{path}: no row in ROOMS for {'/'.join(parts)}")
            continue
        for line, name in imports_of(path, package):
            allowed = [*ROOMS[room], *([f"titan_lite.{parts[0]}"] if len(parts) > 1 else [])]
            standard = name.partition(".")[0] in sys.stdlib_module_names
            wrong = not standard and not any(within(name, prefix) for prefix in allowed)
            wrong |= room == "models" and within(name, "torch.distributed")
            wrong |= room not in ("train", "verify") and within(name, "titan_lite.trainer")
            wrong |= room != "start" and within(name, "titan_lite.train")
            wrong |= room not in WHOLE_CONFIG and (
                name == "titan_lite.config.Config" or name == "titan_lite.config.load_config"
            )
            if wrong:
                found.append(f"{path}:{line}: {room} imports {name}")
    return found


def test_every_room_imports_only_what_it_may():
    assert forbidden_imports(PACKAGE) == []


def test_the_package_is_read():
    names = {
        name for path in (PACKAGE / "models").glob("*.py") for _, name in imports_of(path, PACKAGE)
    }
    assert "torch.nn" in names


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("config/sections.py", "import torch"),
        ("config/sections.py", "from titan_lite.recipe import help_text"),
        ("config/sections.py", "def late():\n    import numpy"),
        ("logging.py", "from titan_lite.config import Metrics"),
        ("models/llama3.py", "import torch.distributed as dist"),
        ("models/llama3.py", "from torch import distributed"),
        ("models/llama3.py", "from torch.distributed.tensor import DTensor"),
        ("models/llama3.py", "import torch\ntorch.distributed.barrier()"),
        ("models/llama3.py", "from titan_lite.config import Model"),
        ("models/llama3.py", "from ..config import Model"),
        ("loss.py", "import datasets"),
        ("compiler/bucketing.py", "from titan_lite.distributed import mesh"),
        ("distributed/mesh.py", "from titan_lite.models.llama3 import Llama3"),
        ("distributed/mesh.py", "from titan_lite.config import Config"),
        ("data/loader.py", "from titan_lite.distributed.mesh import build_mesh"),
        ("data/loader.py", "from titan_lite.config import load_config"),
        ("optimizer/adamw.py", "from titan_lite import checkpoint"),
        ("metrics.py", "from . import trainer"),
        ("planner/trace.py", "from titan_lite.trainer import Trainer"),
        ("trainer.py", "from titan_lite.train import main"),
        ("train.py", "from titan_lite.data import loader"),
        ("utils.py", ""),
    ],
)
def test_a_forbidden_import_is_found(module, source, tmp_path):
    path = tmp_path / module
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    (finding,) = forbidden_imports(tmp_path)
    assert str(path) in finding


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "config/load.py",
            "import json, tomllib, tomli\nfrom titan_lite.config import ConfigError",
        ),
        (
            "models/llama3.py",
            "import torch.nn.functional as F\nfrom torch import nn\nfrom titan_lite.models import hf",
        ),
        ("data/loader.py", "from torch.utils.data import DataLoader\nfrom .dataset import Dataset"),
        (
            "data/loader.py",
            "from titan_lite.config import Data, Validation\nfrom titan_lite.logging import logger",
        ),
        (
            "distributed/build.py",
            "from titan_lite.compiler.stage import compile_stage\nimport torch.distributed",
        ),
        (
            "trainer.py",
            "from titan_lite import loss\nfrom titan_lite.data.loader import build_loader",
        ),
        (
            "train.py",
            "from titan_lite.trainer import Trainer\nfrom titan_lite.config import load_config",
        ),
    ],
)
def test_an_allowed_import_is_not(module, source, tmp_path):
    path = tmp_path / module
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    assert forbidden_imports(tmp_path) == []


LAYOUT = {
    "layout.py",
    "config/batch_sizes.py",
    "config/rules.py",
    "verify.py",
}  # rules: an early check; verify: makes other recipes


def derived_again(package):
    """A line for every place but LAYOUT that works out accumulation, rows or whether weights are gathered once a step."""
    found = []
    for path in sorted(package.rglob("*.py")):
        if str(path.relative_to(package)) in LAYOUT:
            continue
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            parts = []
            if isinstance(node, ast.BinOp) and isinstance(
                node.op, ast.Mult | ast.FloorDiv | ast.Mod
            ):
                parts = [
                    part.attr for part in (node.left, node.right) if isinstance(part, ast.Attribute)
                ]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                parts = [node.func.id]
            elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute):
                parts = [node.left.attr]
            derived = {
                "local_batch_size",
                "global_batch_size",
                "gradient_accumulation_steps",
                "fsdp_communication",
            }
            if derived & {*parts} and not (
                isinstance(node, ast.Compare) and parts == ["global_batch_size"]
            ):
                found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_only_the_layout_derives_accumulation_rows_and_gathering_once():
    assert derived_again(PACKAGE) == []


@pytest.mark.parametrize(
    "source",
    [
        "rows = training.local_batch_size * dp_degree",
        "n = gradient_accumulation_steps(config.training, 2)",
        'once = n > 1 and parallelism.fsdp_communication == "step"',
        "n = config.training.global_batch_size // rows",
    ],
)
def test_a_value_derived_again_is_found(source, tmp_path):
    (tmp_path / "part.py").write_text(source)
    assert len(derived_again(tmp_path)) == 1


def without_use(package):
    """Functions and classes of modules that nothing in the package uses: what they did has been lost, or can go."""
    defined, used = set(), set()
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(), str(path))
        defined |= {
            (str(path), node.name)
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return sorted((path, name) for path, name in defined if name not in used)


def test_everything_that_is_defined_is_used():
    assert without_use(PACKAGE) == []


def test_a_function_without_use_is_found(tmp_path):
    (tmp_path / "part.py").write_text("import part\ndef told(): pass\ndef lost(): pass\ntold()\n")
    assert [name for _, name in without_use(tmp_path)] == ["lost"]
