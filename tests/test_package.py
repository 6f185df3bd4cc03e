"The package as its users get it: in step with the notebooks, light to import, whole in an environment of its own."
import configparser
import email
import html
import importlib.metadata
import json
import re
import resource
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from conftest import ALONE, BESIDE, ROOT, call, copy_of_the_project

HEADLINE = "--noise-multiplier 0.5 --sampling-probability 2e-5 --steps 100000 --delta 1e-8".split()
HEAVY = ("torch", "pandas", "matplotlib", "sklearn", "tensorflow", "IPython", "fastcore")


def files(folder):
    "What each file of a folder holds, without compiled ones."
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def commands():
    "The shell commands of README.md."
    return re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def settings():
    parser = configparser.ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"]


# In step

def test_the_package_and_the_notebooks_are_in_step_and_clean(tmp_path):
    project = copy_of_the_project(tmp_path / "project")
    before = files(project / "databloom"), files(project / "nbs")
    call("nbdev_export", cwd=project)
    call("nbdev_clean", cwd=project)
    after = files(project / "databloom"), files(project / "nbs")
    changed = [str(name) for old, new in zip(before, after) for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
    assert changed == [], "run nbdev_export and nbdev_clean"


def test_readme_is_made_from_the_index():
    assert "as nbs/index.ipynb says" in call(sys.executable, "tools/readme.py", "--check")


def test_readme_has_two_commands_and_ci_runs_the_second_word_for_word():
    first, second = commands()
    assert first.startswith("python3 -m venv") and "pip install -c constraints.txt '.[all]'" in first
    assert first.split("&&")[-1].strip() == ".venv/bin/databloom tour"
    assert " ".join(["databloom epsilon", *HEADLINE]) in (ROOT / "README.md").read_text(encoding="utf-8")
    assert second.startswith("python3 -m venv") and "nbdev_test" in second
    assert second.split("&&")[-1].strip() == "pytest tests"
    assert call("bash", ".ci/run", "--print") == second


# Requirements

def test_the_core_requires_no_more_than_it_says():
    names = {Requirement(need).name for need in settings()["requirements"].split()}
    assert names == {"numpy", "scipy", "typer", "rich"}


def test_the_environment_of_development_is_the_one_that_constraints_txt_names():
    try:
        importlib.metadata.distribution("databloom")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("databloom is not installed in this environment")
    if sys.version_info[:2] != (3, 11):
        pytest.skip("constraints.txt is for Python 3.11")
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    installed = importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])  # not what some package carries inside itself
    have = {canonicalize_name(d.metadata["Name"]): d.version.partition("+")[0] for d in installed}
    for name in ("databloom", "pip", "setuptools", "wheel"):
        have.pop(name, None)
    loose = {name: version for name, version in have.items() if pins.get(name) != version}
    assert loose == {}
    assert have["numpy"].startswith("1.26.")


@pytest.mark.parametrize("words", [["--version"], ["epsilon", *HEADLINE]], ids=["import", "epsilon"])
def test_the_command_line_imports_nothing_heavy(words):
    script = f"""
import sys
import databloom, databloom.cli
try:
    databloom.cli.main({words!r})
except SystemExit as stop:
    assert not stop.code, stop.code
print("heavy:", [name for name in {HEAVY!r} if name in sys.modules])
"""
    assert call(sys.executable, "-c", script).splitlines()[-1] == "heavy: []"


def test_the_command_line_starts_at_once():
    def seconds():  # of the processor, which other programs that run meanwhile hardly change
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        call(sys.executable, "-c", "from databloom.cli import main; main(['epsilon', '--help'])", env={**BESIDE, "OMP_NUM_THREADS": "1"})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 1.5  # about half a second where nothing else runs


# What is handed out

def test_an_index_would_take_the_metadata_of_both(packages):
    source, wheel = packages
    with tarfile.open(source) as archive:
        heads = [archive.extractfile(name).read() for name in archive.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", name)]
    with zipfile.ZipFile(wheel) as archive:
        heads += [archive.read(name) for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    assert len(heads) == 2
    for said in map(email.message_from_bytes, heads):
        assert re.fullmatch(r"2\.[1-5]", said["Metadata-Version"]) and said["Name"] == "databloom"
        assert str(Version(said["Version"])) == said["Version"] and Version("3.11") in SpecifierSet(said["Requires-Python"])
        assert 0 < len(said["Summary"]) <= 512 and "\n" not in said["Summary"]
        assert "@" in said["Author-email"] and all(re.fullmatch(r"https://\S+", url.split(", ")[-1]) for url in said.get_all("Home-page", []) + said.get_all("Project-URL", []))
        assert all(re.fullmatch(r"[a-z]+", extra) for extra in said.get_all("Provides-Extra"))
        assert all(Requirement(need).url is None for need in said.get_all("Requires-Dist"))  # an index refuses direct references
        assert not any(kind.startswith("License ::") for kind in said.get_all("Classifier"))  # the licence is said once
        assert said.get_payload(decode=True).decode().startswith("<!-- Made from")


def test_wheel_and_source_hold_what_they_must(packages):
    source, wheel = packages
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        head = next(name for name in names if name.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(archive.read(head))
        programs = archive.read(head.replace("METADATA", "entry_points.txt")).decode()
    inside = {name.split("/")[0] for name in names}
    assert inside == {"databloom", head.split("/")[0]}
    assert {f"databloom/{path.name}" for path in (ROOT / "databloom").glob("*.py")} <= set(names)
    assert any(re.search(r"\.dist-info/(licenses/)?LICENSE$", name) for name in names)
    assert "databloom = databloom.cli:main" in programs
    with tarfile.open(source) as archive:
        kept = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "settings.ini", "setup.py", "pyproject.toml"} <= kept
    assert said["Name"] == "databloom" and said["Version"] == settings()["version"]
    assert said["Requires-Python"] == ">=3.11" and "Apache-2.0" in (said["License"] or said["License-Expression"])
    assert said["Description-Content-Type"].startswith("text/markdown")
    assert said.get_payload(decode=True).decode().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()


def test_each_part_has_an_extra_and_all_and_dev_hold_them(packages):
    with zipfile.ZipFile(packages[1]) as archive:
        head = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(archive.read(head))
    extras = {extra: set() for extra in said.get_all("Provides-Extra")}
    core = set()
    for need in map(Requirement, said.get_all("Requires-Dist")):
        homes = [extra for extra in extras if need.marker and need.marker.evaluate({"extra": extra})]
        for extra in homes:
            extras[extra].add(need.name)
        if not homes and need.marker is None:
            core.add(need.name)
    assert core == {"numpy", "scipy", "typer", "rich"}
    assert {"plot", "all", "dev"} <= set(extras) and extras["plot"] == {"matplotlib"}
    users = set(extras) - {"all", "dev"}
    assert extras["all"] == set().union(*(extras[extra] for extra in users))
    assert extras["all"] <= extras["dev"]
    assert {"nbdev", "jupyterlab", "pytest", "hypothesis", "mpmath", "smalldocs"} <= extras["dev"]


def test_the_wheel_works_alone_with_the_newest_numpy(elsewhere, tmp_path):
    version = call(elsewhere / "python", "-c", "import numpy; print(numpy.__version__)", cwd=tmp_path, env=ALONE)
    assert int(version.split(".")[0]) >= 2
    assert call(elsewhere / "databloom", "--version", cwd=tmp_path, env=ALONE).strip() == settings()["version"]
    answer = json.loads(call(elsewhere / "databloom", "epsilon", *HEADLINE, "--json", cwd=tmp_path, env=ALONE))
    assert answer["lower"] <= 2.2840592 <= answer["upper"] <= 2.2840592 + 1e-3
    assert (answer["delta"], answer["steps"]) == (1e-8, 100_000)


def test_the_wheel_alone_refuses_in_one_line(elsewhere, tmp_path):
    for words in (["epsilon", "--noise-multiplier", "nan", "--steps", "1", "--delta", "1e-5"], ["no-such-command"]):
        done = subprocess.run([elsewhere / "databloom", *words], capture_output=True, text=True, cwd=tmp_path, env=ALONE)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


def test_the_core_alone_takes_the_tour_as_far_as_it_goes(elsewhere, tmp_path):
    done = subprocess.run([elsewhere / "databloom", "tour", "--quick", "--out", tmp_path / "tour.html"], capture_output=True, text=True, cwd=tmp_path, env=ALONE)
    told = json.loads((tmp_path / "tour.json").read_text(encoding="utf-8"))
    assert (done.returncode, told["failed"]) == (1, ["calm", "ehr", "sepsis"])
    account = told["stops"]["accounting"]
    assert account["error"] is None and account["numbers"]["run"]["lower"] <= 2.2840592 <= account["numbers"]["run"]["upper"]
    assert any("databloom[plot]" in note for note in account["notes"])
    page = (tmp_path / "tour.html").read_text(encoding="utf-8")
    for name in told["failed"]:
        assert "pip install 'databloom[" in told["stops"][name]["error"]
        assert html.escape(told["stops"][name]["error"]) in page
