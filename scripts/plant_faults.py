"""Check the tests: plant faults in a copy of this checkout, one at a time, and see which test finds
each. Prints a Markdown table, each row as soon as it is known.

    python scripts/plant_faults.py                        # all faults
    python scripts/plant_faults.py --list                 # what they are
    python scripts/plant_faults.py --only 3,17            # by their numbers
    python scripts/plant_faults.py --only "optim/*"       # by their files

A fault is one line that a tired engineer could write: another sign, axis, group, dtype or order, a
call or a wait that is left out, a rule that never fires. Every folder of the package has one. Its
tests run as the default suite has them, up to the first that fails; if none does, those that only
`scripts/test.sh --all` runs. A test counts if it passes without the fault.

The checkout stays as it is, and may be edited meanwhile. Exit code 1: nobody sees a fault.
"""

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "titan_lite"
SUITES = {  # the mark expression of what runs in one and not in those before
    "default": "not slow and not release",
    "`--all`": "slow and not release",
}
NOBODY = "NOBODY"
NO_TESTS = 5  # exit code of pytest
SHOWN = 48  # characters of a changed line in the table


class Fault(NamedTuple):
    """A wrong line, and the tests of what it is in."""

    file: str  # in the package
    before: str  # occurs in it once
    after: str
    tests: tuple[str, ...]  # files and folders in tests, the likeliest to see it first


FAULTS = (
    # What other groups have done is received, but for the counts and the position in the data.
    Fault(
        "features/replica_groups/groups.py",
        "self.load_parts(received.parts)",
        "pass",
        (
            "unit/features/replica_groups/test_groups_together.py",
            "integration/test_replica_groups.py",
        ),
    ),
    # A loss is divided by the tokens of one rank.
    Fault(
        "trainer.py",
        "        sum_over_tokens(tokens, self.mesh)\n        return tokens",
        "        return tokens",
        ("integration/test_training.py", "integration/test_stopped_runs.py"),
    ),
    # Of tensor-parallel ranks, only the one that has a signal stops.
    Fault(
        "trainer.py",
        "sum_of_flags(both[1:], self.mesh)",
        "pass",
        ("unit/resilience/test_stop_signal.py", "integration/test_stopped_runs.py"),
    ),
    # A step has the position of the first rank's data alone.
    Fault(
        "checkpoint/manager.py",
        "merge_states(loaders)}",
        "merge_states(loaders[:1])}",
        ("integration/test_resuming.py", "unit/checkpoint"),
    ),
    # Segments for other strides share their code.
    Fault(
        "compile/segments.py",
        " {tuple(value.shape)} {value.stride()}",
        " {tuple(value.shape)}",
        ("unit/compile/test_segments.py",),
    ),
    # A bucket's gradients are in another order than its results.
    Fault(
        "compile/passes/bucketing.py",
        "gradients = [node.all_input_nodes[0] for node in nodes]",
        "gradients = [node.all_input_nodes[0] for node in reversed(nodes)]",
        ("unit/compile/passes/test_bucketing.py", "unit/compile/passes"),
    ),
    # Gradients are read while they are being reduced.
    Fault(
        "compile/passes/bucketing.py",
        "_flat(graph, add_call(graph, collectives.wait_tensor.default, reduced))",
        "_flat(graph, reduced)",
        ("unit/compile/passes/test_bucketing.py", "unit/compile/passes"),
    ),
    # A resumed run that begins to shuffle takes its documents as those it had.
    Fault(
        "config/effects.py",
        "not any(map(mark.holds, recipes))",
        "not all(map(mark.holds, recipes))",
        ("unit/config/test_effects.py", "unit/config"),
    ),
    # A wait counts as if its collective had started with the graph.
    Fault(
        "cost/timeline.py",
        "exposed = max(0.0, span.start + span.seconds - self.now)",
        "exposed = max(0.0, span.seconds - self.now)",
        ("unit/cost/test_timeline.py", "unit/cost"),
    ),
    # A reduce-scatter costs what one rank gets of it.
    Fault(
        "graph.py",
        "return sum(nbytes_of(source) for source in node.all_input_nodes)",
        "return nbytes_of(node)",
        ("unit/cost/test_timeline.py", "unit/cost"),
    ),
    # After a step that takes some of the streams, windows are numbered from the first again.
    Fault(
        "data/packing.py",
        "begin + (stream - begin) % num_streams",
        "begin + stream",
        ("unit/data/test_mixing.py", "unit/data/test_loader.py", "integration/test_resuming.py"),
    ),
    # What is held out for validation is trained on as well.
    Fault(
        "data/documents.py",
        'return (hashed < validation_fraction) == (split == "validation")',
        'return split == "train" or hashed < validation_fraction',
        ("unit/data/test_documents.py", "unit/data", "integration/test_data.py"),
    ),
    # Gradients that two groups sum are summed over one of them twice.
    Fault(
        "distributed/param_collectives.py",
        "self.reduce_groups[number + 1])",
        "self.sum_groups[0])",
        ("distributed/test_tensor_parallel.py", "distributed/test_layouts.py"),
    ),
    # A gradient that something else refers to starts a sum on its rank alone.
    Fault(
        "distributed/gradient_reducer.py",
        "if func is aten.new_empty_strided.default and tuple(args[1]) == rows.shape:",
        "if func is None:",
        ("distributed/test_prefetch.py",),
    ),
    # A sequence's tails have the order of its heads.
    Fault(
        "distributed/context_parallel.py",
        "tail = (2 * degree - 1 - rank) * chunk",
        "tail = (degree + rank) * chunk",
        ("unit/distributed/test_context_parallel.py", "distributed/test_layouts.py"),
    ),
    # Copies that differ are not told.
    Fault(
        "features/replica_check/comparison.py",
        "largest != ~inverted_smallest",
        "largest != largest",
        ("unit/features/replica_check", "integration/test_diverged_copies.py"),
    ),
    # A compilation that takes long is a hang.
    Fault(
        "features/watchdog/watchdog.py",
        "return hash(tuple(positions))",
        "return None",
        ("unit/features/watchdog",),
    ),
    # Experts with many tokens get more.
    Fault(
        "features/moe/balance.py",
        "(counts.sum() - self.n_experts * counts).sign()",
        "(self.n_experts * counts - counts.sum()).sign()",
        ("unit/features/moe/test_expert_balance.py", "distributed/test_balance_on_layouts.py"),
    ),
    # Every chunk has the tokens of the first.
    Fault(
        "features/async_tp/token_chunks.py",
        "shard, 1, chunk * size, (chunk + 1) * size",
        "shard, 1, 0, size",
        ("unit/features/async_tp",),
    ),
    # A weight stays in its bucket, however long it takes to copy it out.
    Fault(
        "features/cost_buckets/greedy.py",
        "return [bucket] if machine.memory_traffic(copied) <= saved else [others, large]",
        "return [bucket]",
        ("unit/features/cost_buckets",),
    ),
    # The fewest values live from one half of a backward to the other, and not the fewest bytes.
    Fault(
        "features/split_backward/backward_halves.py",
        '["capacity"] = nbytes_of(node)',
        '["capacity"] = 1',
        ("unit/features/split_backward",),
    ),
    # The keys of a feature are unknown.
    Fault(
        "features/__init__.py",
        '    "powersgd",\n',
        "",
        ("unit/rules/test_fixes.py",),
    ),
    # A token of the prompt is scored in place of the last one.
    Fault(
        "features/evaluation/log_likelihoods.py",
        "labels[row, end - scored : end] = torch.tensor(text[-scored:])",
        "labels[row, end - scored : end] = torch.tensor(text[-scored - 1 : -1])",
        ("distributed/test_evaluation.py",),
    ),
    # Parameters of other shapes than the Family says are admitted.
    Fault(
        "features/own_family/check.py",
        "if found.get(fqn) != expected.get(fqn):",
        "if fqn not in found:",
        ("unit/features/own_family/test_own_family_blocks.py",),
    ),
    # A skipped step leaves its errors behind.
    Fault(
        "features/powersgd/compression.py",
        "torch.where(skipped, self.errors[fqn], error)",
        "error",
        ("distributed/test_powersgd.py", "integration/test_powersgd_runs.py"),
    ),
    # A wide matrix has the steps of a tall one.
    Fault(
        "features/matrix_optimizers/muon.py",
        "math.sqrt(max(self.shapes[index][-2:]))",
        "math.sqrt(self.shapes[index][-2])",
        ("unit/features/matrix_optimizers/test_muon.py", "distributed/test_owners.py"),
    ),
    # A step counts although experts have left out tokens.
    Fault(
        "features/moe/capacity.py",
        "if most <= 1:",
        "if most <= self.factor:",
        ("unit/features/moe/test_expert_capacity.py", "integration/test_expert_runs.py"),
    ),
    # Tensor-parallel ranks scale their parts of a weight differently.
    Fault(
        "features/float8/weights.py",
        'for axis in ("dp_shard", "tp"):',
        'for axis in ("dp_shard",):',
        ("distributed/test_float8_layouts.py",),
    ),
    # The loss of a source is that of one rank's tokens over those of all.
    Fault(
        "metrics/per_source.py",
        "sum_of_losses(self.own[0], self.mesh)",
        "pass",
        ("unit/metrics/test_per_source.py", "unit/metrics", "integration/test_mixture.py"),
    ),
    # The gradient of the vocabulary is summed over chunks in bfloat16.
    Fault(
        "models/loss.py",
        "weight_grad = product.float() if weight_grad is None",
        "weight_grad = product if weight_grad is None",
        ("unit/models/test_chunked_loss.py", "unit/models"),
    ),
    # The norm of gradients forgets an axis of weights that two axes shard.
    Fault(
        "optim/clipping.py",
        "if not placement.is_replicate():",
        "if placement.is_shard():",
        ("unit/optim/test_adamw.py",),
    ),
    # A rank whose standard output is a pipe without a reader ends with another exit code.
    Fault(
        "resilience/exit_code.py",
        "        with suppress(OSError):\n            stream.flush()",
        "        stream.flush()",
        ("unit/resilience/test_exit_code.py",),
    ),
    # A scheduler takes a run that was stopped for one that has failed.
    Fault(
        "resilience/signals.py",
        "os._exit(STOPPED)",
        "os._exit(1)",
        ("unit/resilience/test_signals.py", "unit/resilience"),
    ),
    # A rule is not registered.
    Fault(
        "rules/model.py",
        "@rule_of_layout\ndef sequences_fit_the_rotary_tables",
        "def sequences_fit_the_rotary_tables",
        ("unit/rules", "unit/config/test_validation.py"),
    ),
    # The text is read again for each token.
    Fault(
        "tools/generate.py",
        "        tokens = [token]",
        "        tokens = [*tokens, token]",
        ("unit/tools/test_generate.py",),
    ),
    # A pipeline receives one microbatch at a time.
    Fault(
        "tools/plan/memory.py",
        "buffers = neighbours * self.layout.pipeline.microbatches",
        "buffers = neighbours",
        ("unit/tools/plan/test_memory_of_plans.py", "unit/tools/plan"),
    ),
    # A source's loss is that of validation.
    Fault(
        "tools/report/sections.py",
        'newest(run, f"loss_by_source/{name}")',
        'newest(run, f"validation_loss_by_source/{name}")',
        ("unit/tools/report",),
    ),
    # Gradients may differ.
    Fault(
        "tools/verify/compare.py",
        "loss <= within.loss and gradients[parameter] <= within.gradient and not module",
        "loss <= within.loss and not module",
        ("integration/test_verify.py", "integration/test_verified_family.py"),
    ),
)


class Copy:
    """A copy of the checkout in a folder, with what was not committed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tree = folder / "tree"
        listed = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
        for name in subprocess.check_output(listed, text=True).split("\0"):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.tree / name)
        imported = self.python("-c", f"import {PACKAGE}; print({PACKAGE}.__file__)").stdout
        if not Path(imported.strip()).is_relative_to(self.tree):
            sys.exit(f"tests would import {imported.strip()} instead of the copy in {self.tree}")

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the copy.

        Compiled code is kept in its folder, apart from that of the tests of the checkout, since a
        cache may know a graph and not the pass that was wrong.
        """
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.tree),
            "TMPDIR": str(self.folder),
        }
        return subprocess.run(
            [sys.executable, *words],
            env=environment,
            cwd=self.tree,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def first_failure(self, tests: tuple[str, ...], marks: str) -> str:
        """Return the name of the first test that fails; "" if none does."""
        paths = [f"tests/{path}" for path in tests]
        done = self.python("-m", "pytest", "-x", "-q", "-rfE", "-m", marks, *paths)
        if done.returncode in (0, NO_TESTS):
            return ""
        found = re.search("^(?:FAILED|ERROR) tests/(.*?)(?: - |$)", done.stdout, re.MULTILINE)
        if found is None:
            sys.exit(f"pytest: exit code {done.returncode}\n{done.stdout[-3000:]}")
        return found[1]

    def try_fault(self, fault: Fault) -> tuple[str, str]:
        """Return which suite sees a fault, and the name of the first test that fails."""
        path = self.tree / PACKAGE / fault.file
        right = path.read_text(encoding="utf-8")
        path.write_text(right.replace(fault.before, fault.after), encoding="utf-8")
        seen_by, test = NOBODY, ""
        for suite, marks in SUITES.items():
            test = self.first_failure(fault.tests, marks)
            if test:
                seen_by = suite
                break
        path.write_text(right, encoding="utf-8")
        if test and self.first_failure((test,), marks=""):
            return NOBODY, f"{test}, which also fails without the fault"
        return seen_by, test


def mistakes(faults: tuple[Fault, ...] = FAULTS) -> list[str]:
    """Return what is wrong with the table: faults that cannot be planted, tests that are not there,
    and folders of the package without a fault.
    """
    found = []
    package = ROOT / PACKAGE
    for fault in faults:
        count = (package / fault.file).read_text(encoding="utf-8").count(fault.before)
        if count != 1:
            found.append(f"{fault.file}: occurs {count} times: {fault.before}")
        absent = [path for path in fault.tests if not (ROOT / "tests" / path).exists()]
        found += [f"no tests/{path}" for path in absent]
    folders = {source.relative_to(package).parent for source in package.rglob("*.py")}
    without = folders - {Path(fault.file).parent for fault in faults}
    return found + [f"no fault in {PACKAGE}/{folder}" for folder in sorted(without)]


def is_wanted(number: int, fault: Fault, only: str) -> bool:
    return not only or str(number) in only.split(",") or fnmatch.fnmatch(fault.file, only)


def change(fault: Fault) -> str:
    """Return what a fault changes, as a cell of the table."""
    before, after = (" ".join(text.split()) for text in (fault.before, fault.after))
    same = 0  # characters at the beginning
    while before[: same + 1] == after[: same + 1]:
        same += 1
    start = max(0, same - SHOWN // 2)
    return f"{shortened(before, start)} -> {shortened(after, start)}"


def shortened(line: str, start: int) -> str:
    """Return a line of code from `start` on, without what does not fit."""
    end = start + SHOWN
    return f"`{'...' if start else ''}{line[start:end]}{'...' if line[end:] else ''}`"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NUMBERS|PATTERN", help="which faults")
    parser.add_argument("--list", action="store_true", help="plant nothing")
    options = parser.parse_args()
    if found := mistakes():
        sys.exit("\n".join(found))
    numbered = enumerate(FAULTS, 1)
    wanted = {number: fault for number, fault in numbered if is_wanted(number, fault, options.only)}
    if options.list:
        print("| # | file | fault | tests |\n|--:|---|---|---|")
        for number, fault in wanted.items():
            print(f"| {number} | {fault.file} | {change(fault)} | {' '.join(fault.tests)} |")
        return 0

    begin = time.perf_counter()
    unseen = 0
    # Tests write to folders with short names alone (tests/hermetic.py).
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        copy = Copy(Path(folder))
        print(
            "| # | file | fault | seen by | first test that fails | s |\n|--:|---|---|---|---|--:|"
        )
        for number, fault in wanted.items():
            started = time.perf_counter()
            seen_by, test = copy.try_fault(fault)
            unseen += seen_by == NOBODY
            seconds = time.perf_counter() - started
            first = test.replace("|", r"\|")
            cells = (str(number), fault.file, change(fault), seen_by, first, f"{seconds:.0f}")
            print(f"| {' | '.join(cells)} |", flush=True)
    minutes = (time.perf_counter() - begin) / 60
    print(f"\nfaults: {len(wanted)}, seen by nobody: {unseen}; {minutes:.1f} minutes")
    return int(unseen > 0)


if __name__ == "__main__":
    sys.exit(main())
