"""Imports of the package lead downward: a layer imports itself and those below it.

Nothing is imported here; ast reads.

An import that this test refuses is a question about the design: move the function, or pass the
value in.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "titan_lite"

# The lowest layer first. A name is a folder or a module; the longest name that fits a module
# counts.
LAYERS = (
    (
        "config",
        "cli",
        "logging",
        "manifest",
        "environment",
        "processes",
        "text",
        "progress",
        "feature",
        "__init__",
        "features.__init__",
        "features.part_of_each",
        "features.FEATURES",
    ),
    # parts of tensors, and their checksums; what ranks send; FX graphs
    ("sharding", "dtensor", "checksum", "collectives", "graph", "sinks"),
    ("models",),
    ("cost",),
    ("compile",),
    ("optim",),
    ("distributed",),
    ("checkpoint", "data", "metrics", "resilience"),
    ("rules", "recipe", "hooks", "one_group", "trainer", "train"),
    ("features",),  # the core imports none
    ("launch", "launch_groups", "lighthouse", "tools", "__main__"),
)
WITHOUT_TORCH = (*LAYERS[0], "sharding", "recipe", "rules", "checkpoint.resume", "checkpoint.steps")
WITH_TORCH = ("rules.machine",)  # within those
SEE_THE_WHOLE_CONFIG = (  # the others take their own section, the Layout, or plain values
    "config",
    "distributed.layout",
    "distributed.parallelize",
    "feature",
    "features",
    "rules",
    "recipe",
    "checkpoint.run_identity",
    "metrics.start_lines",
    "compile.graph_passes",
    "optim.build",
    "hooks",
    "trainer",
    "train",
    "launch",
    "launch_groups",
    "tools",
    "__main__",
)


def imports_of(path, package, *, of_types=False):
    """(line, "torch.nn") for every import of a file; `from a import b` is a.b.

    of_types: those for type checking alone, too.
    """
    here = ("titan_lite", *path.relative_to(package).with_suffix("").parts)
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types and not of_types:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            origin = here[: -node.level] if node.level else ()
            origin += (node.module,) if node.module else ()
            for alias in node.names:
                yield node.lineno, ".".join((*origin, alias.name))


def layer_of(module):
    """Index in LAYERS of a module of the package, such as "cost.machine"; None for one that has no
    layer.
    """
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        for index, names in enumerate(LAYERS):
            if name in names:
                return index
    return None


def is_part_of(module, names):
    return any(module == name or module.startswith(f"{name}.") for name in names)


def wrong_imports(package):
    """A line for every import below the folder `package` that leads upward or to what its module
    must not know.
    """
    found = []
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        layer = layer_of(module)
        if layer is None:
            found.append(f"{path}: no layer in LAYERS for {module}")
            continue
        for line, name in imports_of(path, package, of_types=True):
            if layer < layer_of("tools") and name.startswith("titan_lite.tools"):
                found.append(f"{path}:{line}: {module} imports {name}")
        for line, name in imports_of(path, package):
            inner = name.removeprefix("titan_lite.")
            if is_part_of(inner, ("tools",)):
                continue
            if inner != name:
                theirs = layer_of(inner)
                wrong = theirs is not None and theirs > layer
                whole = inner in ("config.Config", "config.load_config")
                wrong |= whole and not is_part_of(module, SEE_THE_WHOLE_CONFIG)
            else:
                without_torch = is_part_of(module, WITHOUT_TORCH) and module not in WITH_TORCH
                wrong = is_part_of(name, ("torch",)) and without_torch
                wrong |= is_part_of(name, ("torch.distributed",)) and module.startswith("models.")
            if wrong:
                found.append(f"{path}:{line}: {module} imports {name}")
    return found


def written(package, module, source):
    """Write a module of a package, and return its path."""
    path = package / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return path


def test_imports_lead_downward():
    assert wrong_imports(PACKAGE) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("config/sections.py", "import torch"),
        ("rules/model.py", "import torch"),
        ("models/llama3.py", "from torch.distributed.tensor import DTensor"),
        ("models/llama3.py", "def late():\n    from ..distributed import mesh"),
        ("cost/machine.py", "from titan_lite.compile.passes.bucketing import merge"),
        ("compile/passes/bucketing.py", "from titan_lite.distributed import mesh"),
        ("distributed/mesh.py", "from titan_lite.config import Config"),
        ("data/loader.py", "from titan_lite import trainer"),
        ("trainer.py", "from titan_lite.tools.plan.plan import make_plan"),
        ("hooks.py", "if TYPE_CHECKING:\n    from titan_lite.tools import verify"),
        ("utils.py", ""),
    ],
)
def test_an_import_that_leads_upward_is_found(module, source, tmp_path):
    path = written(tmp_path, module, source)
    (finding,) = wrong_imports(tmp_path)
    assert str(path) in finding


def imports_of_features(package):
    """A line for every import of a feature by core or tools, or by another feature."""
    found = []
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        own = ".".join(["titan_lite", *module.split(".")[:2]])
        for line, name in imports_of(path, package, of_types=True):
            if not name.startswith("titan_lite.features.") or name.endswith(
                (".part_of_each", ".FEATURES")
            ):
                continue
            if not (module.startswith("features.") and name.startswith(f"{own}.")):
                found.append(f"{path}:{line}: {module} imports {name}")
    return found


def test_a_feature_is_imported_by_itself_alone():
    assert imports_of_features(PACKAGE) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("trainer.py", "if TYPE_CHECKING:\n    from titan_lite.features.moe.balance import Loads"),
        ("models/qwen3_moe.py", "def late():\n    from titan_lite.features.moe import balance"),
        ("features/powersgd/feature.py", "from titan_lite.features.moe.keys import ExpertsKeys"),
        ("tools/plan/costs.py", "from titan_lite.features.powersgd import compression"),
    ],
)
def test_an_import_of_a_feature_is_found(module, source, tmp_path):
    path = written(tmp_path, module, source)
    (finding,) = imports_of_features(tmp_path)
    assert str(path) in finding


LAYOUT = {
    "distributed/layout.py",
    "tools/plan/rank_bytes.py",
    "config/batch_sizes.py",
    "tools/verify/small.py",
    "tools/verify/proxy.py",
}  # small and proxy: make other recipes


def derived_again(package):
    """A line for every place but LAYOUT that works out accumulation, rows or whether weights are
    gathered once a step.
    """
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


def is_rule(node):
    """True for a function that a decorator such as @rule_of_keys adds to a list."""
    names = {ast.unparse(decorator) for decorator in node.decorator_list}
    return bool(names & {"rule_of_keys", "rule_of_layout", "rule_of_inputs", "rule_of_machine"})


PRICED = (  # need seconds, or hand on what has them
    "compile.passes",
    "compile.graph_passes",
    "compile.settings",
    "cost",
    "features.async_tp",
    "features.cost_buckets",
    "rules.compile",
    "tools",
    "trainer",
)
WITHOUT_PRICES = ("bucketing", "resharding")  # of those passes


def importers_of_prices(package):
    """Modules that import titan_lite.cost."""
    return {
        ".".join(path.relative_to(package).with_suffix("").parts)
        for path in package.rglob("*.py")
        for _, name in imports_of(path, package)
        if is_part_of(name, ("titan_lite.cost",))
    }


def test_only_what_needs_seconds_imports_prices():
    found = importers_of_prices(PACKAGE)
    assert [module for module in found if not is_part_of(module, PRICED)] == []
    assert found.isdisjoint(f"compile.passes.{name}" for name in WITHOUT_PRICES)


def without_use(package):
    """Functions and classes of modules that nothing in the package uses: what they did has been
    lost, or can go.
    """
    defined, used = set(), set()
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(), str(path))
        defined |= {
            (str(path), node.name)
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not is_rule(node)
        }
        used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return sorted((path, name) for path, name in defined if name not in used)


def test_everything_that_is_defined_is_used():
    assert without_use(PACKAGE) == []


def test_a_function_without_use_is_found(tmp_path):
    (tmp_path / "part.py").write_text("import part\ndef told(): pass\ndef lost(): pass\ntold()\n")
    assert [name for _, name in without_use(tmp_path)] == ["lost"]
