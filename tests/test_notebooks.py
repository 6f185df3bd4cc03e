"The notebooks as JupyterLab opens them: valid, with a kernel that every environment has, and in a JupyterLab that starts."
import sys

import nbformat
import pytest

from conftest import ROOT, call

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
