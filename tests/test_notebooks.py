"The notebooks as JupyterLab opens them: valid, with a kernel that every environment has, and in a JupyterLab that starts."
import importlib.util
import sys
import warnings

import nbformat
import pytest

from browser import program
from conftest import ROOT, call
from databloom.core import need

NOTEBOOKS = sorted(path for path in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.relative_to(ROOT / "nbs").as_posix())
def test_a_notebook_is_valid_names_the_usual_kernel_and_shows_no_failure(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error", f"a cell that failed: {cell.source[:80]}"
            assert output.get("name") != "stderr", f"a warning was saved: {output.text[:80]}"
            text = output.get("text", "") or output.get("data", {}).get("text/plain", "")
            assert " object at 0x" not in text and "<function " not in text, f"an address was saved: {text[:80]}"


def test_every_figure_is_told_in_words():
    silent = [
        f"{path.relative_to(ROOT / 'nbs')}: {cell.source[:60]}"
        for path in NOTEBOOKS
        for cell in nbformat.read(path, as_version=4).cells
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])) and "#| fig-alt: " not in cell.source
    ]
    assert silent == [], 'give the cell a line `#| fig-alt: "..."`'


def test_jupyterlab_starts():
    assert call(sys.executable, "-m", "jupyterlab", "--version").strip()  # some versions fail with the pinned `packaging`


@pytest.mark.skipif(program() is None, reason="no Chromium on this machine: install one (Debian: apt-get install chromium) to run JupyterLab in it")
def test_notebooks_run_in_jupyterlab():
    said = call(sys.executable, "tools/lab.py", "cli", "howto/dp_sgd_run")  # all of them take twenty minutes: python tools/lab.py
    assert [line.split(":")[0] for line in said.splitlines()] == ["cli", "howto/dp_sgd_run"]


def test_lab_tells_what_is_wrong():
    spec = importlib.util.spec_from_file_location("lab", ROOT / "tools" / "lab.py")
    lab = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lab)
    cell = {"source": "x", "count": 1, "outputs": [
        {"output_type": "stream", "name": "stdout", "text": "fine"}, {"output_type": "stream", "name": "stderr", "text": ["a warning\n"]},
        {"output_type": "error", "ename": "ValueError", "evalue": "no"},
    ]}
    assert list(lab.complaints(cell)) == ["stderr: a warning", "ValueError: no"]
    assert list(lab.complaints({"source": "x", "count": None, "outputs": []})) == ["did not run"]


def test_a_package_that_misses_the_widgets_of_notebooks_is_imported_silently(tmp_path, monkeypatch):
    (tmp_path / "wants_widgets.py").write_text('import warnings\nwarnings.warn("IProgress not found. Please update jupyter and ipywidgets.")\n')
    (tmp_path / "wants_more.py").write_text('import warnings\nwarnings.warn("something else")\n')
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        need("wants_widgets", "calm")
        with pytest.raises(UserWarning, match="something else"):
            need("wants_more", "calm")
