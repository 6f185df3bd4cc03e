"What the tests of the whole book share: where it lies, its site, its wheel."
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BESIDE = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
ALONE = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}  # nothing of this environment leaks in


def call(*words, **options):
    "Run a program, of this environment unless told otherwise; its output is text, and a failure shows it."
    options = {"cwd": ROOT, "env": BESIDE, **options}
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_of_the_project(folder):
    "The project's own files in another folder, without what was built from them."
    unwanted = shutil.ignore_patterns(".*", "_docs", "_proc", "_site", "build", "dist", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(ROOT, folder, ignore=unwanted, symlinks=True))


@pytest.fixture(scope="session")
def site():
    "The folder of the built site; notebooks that did not change since the last build are not processed again."
    assert "every link leads somewhere" in call(sys.executable, "tools/site.py")
    return ROOT / "_docs"


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    "The source distribution and the wheel that is built from it, in that order."
    folder = tmp_path_factory.mktemp("packages")
    project = copy_of_the_project(folder / "project")
    call(sys.executable, "-m", "build", "--outdir", folder / "dist", project)
    (source,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return source, wheel


@pytest.fixture(scope="session")
def elsewhere(packages, tmp_path_factory):
    "The folder of programs of a second environment, with the wheel and the newest of what it requires, and nothing else."
    folder = tmp_path_factory.mktemp("elsewhere")
    call(sys.executable, "-m", "venv", folder / "venv", env=ALONE)
    programs = folder / "venv" / "bin"
    call(programs / "pip", "install", "-q", "--disable-pip-version-check", packages[1], cwd=folder, env=ALONE)
    return programs
