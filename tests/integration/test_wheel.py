"""A wheel, installed in an environment that has titan_lite from nowhere else, has the command, the
recipes and the tokenizer.
"""

import shutil
import subprocess
import sys
import sysconfig

import pytest
from commands import run
from tiny import NO_VALIDATION, RECIPES, ROOT, SMALL, steps

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment with the wheel; the dependencies are those of this Python."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("titan_lite", "train_configs", "assets", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    quiet = ["-q", "--no-deps", "--disable-pip-version-check"]
    built = run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        *quiet,
        "--no-build-isolation",
        "-w",
        folder,
        source,
        cwd=folder,
    )
    assert built.returncode == 0
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    python = folder / "env/bin/python"
    assert (
        run(python, "-m", "pip", "install", *quiet, wheel, cwd=folder, PYTHONPATH=None).returncode
        == 0
    )
    # A folder named by a .pth file is a folder of modules: the .pth files in it, such as this
    # checkout's, mean nothing.
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    with open(f"{site}/dependencies.pth", "w") as file:
        file.write("\n".join(paths))
    return folder


def titan_lite(folder, *arguments):
    return run(
        folder / "env/bin/titan-lite", *arguments, cwd=folder, PYTHONPATH=None, PYTHONSAFEPATH=None
    )


def test_it_trains_the_debug_recipe_and_reports_it(environment):
    trained = titan_lite(environment, "train", "debug_model", *SMALL, *NO_VALIDATION, *steps(2))
    assert trained.returncode == 0
    assert "starting 2 CPU processes: debug_model" in trained.stdout
    assert "done: step 2" in trained.stdout
    assert "Warning" not in trained.stdout
    assert titan_lite(environment, "report", "outputs/debug_model").returncode == 0
    assert "<html" in (environment / "outputs/debug_model/report.html").read_text()


def test_it_has_all_recipes_and_all_modules(environment):
    for path in RECIPES.glob("*.toml"):
        assert titan_lite(environment, "recipe", path.stem).returncode == 0
    (installed,) = (environment / "env/lib").glob("python*/site-packages/titan_lite")
    for path in (ROOT / "titan_lite").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert (installed / path.relative_to(ROOT / "titan_lite")).exists(), path


def test_it_has_the_script_for_slurm(environment):
    script = environment / "env/share/titan_lite/train.slurm"
    assert script.read_bytes() == (ROOT / "scripts/train.slurm").read_bytes()
