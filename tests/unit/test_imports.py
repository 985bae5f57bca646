"""What a start leaves out, since each rank would wait for it."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from commands import python, run
from pages import PAGES
from tiny import AOT_EAGER, DEBUG, steps

from titan_lite.features import FEATURES

IMPORTED = """
import sys
import titan_lite.trainer
from titan_lite.feature import all_features
all_features()
print(*(name in sys.modules for name in ("torch", "torch._inductor.compile_fx", "torchft")))
parts = [name.split(".")[2:] for name in sys.modules if name.startswith("titan_lite.features.")]
print(*{part[1] for part in parts if len(part) > 1})
"""


@pytest.mark.slow
def test_a_run_imports_no_inductor_torchft_or_what_features_compute_with_unless_it_needs_them():
    told = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True
    )
    packages, of_features = told.stdout.splitlines()
    assert packages.split() == ["True", "False", "False"]
    assert set(of_features.split()) == {"keys", "rules", "feature"}


@pytest.mark.parametrize("name", FEATURES)
def test_the_keys_of_a_feature_may_be_imported_first(name):
    module = f"titan_lite.features.{name}.keys"
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)


RUN = """
import sys
from titan_lite.train import main
assert main(sys.argv[1:]) == 0
modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "titan_lite"}
print("imported", *(module.__file__ for module in modules.values()))
"""


def lines_of_code(path):
    """Lines of a file without docstrings, comments and blank lines."""
    text = path.read_text()
    beside = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in beside and token.string:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= {*range(node.lineno, node.end_lineno + 1)}
    return len(lines)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], AOT_EAGER], ids=["eager", "compiled"])
def test_the_page_says_how_much_code_a_run_imports(options, tmp_path):
    page = PAGES["docs/design.md"]
    eager, compiled = re.findall(r"(\d+)(?: files)?\s+with ([\d,]+)", page)[:2]
    said = [int(number.replace(",", "")) for number in (compiled if options else eager)]
    command = [DEBUG, "--job.dump_folder", tmp_path, *steps(2), "--validation.steps=1", *options]
    done = run(*python("-c", RUN, *command))
    (line,) = re.findall(r"^imported (.*)$", done.stdout, re.MULTILINE)
    paths = [Path(path) for path in line.split()]
    assert said == pytest.approx([len(paths), sum(map(lines_of_code, paths))], rel=0.02)
