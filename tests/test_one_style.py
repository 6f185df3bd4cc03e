"One style through the book: a name means one thing, a figure is drawn in one way, a result is asked by the same methods."
import dataclasses
import importlib
import inspect
import json
import re
from collections import defaultdict

import pytest

from conftest import ROOT
from databloom.core import Result
from test_documented import MODULES

NOTEBOOKS = sorted(path for path in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)


def modules():
    for name in MODULES:
        try:
            yield importlib.import_module(f"databloom.{name}")
        except ImportError:  # an extra that is not here
            continue


def code(path):
    return ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_a_public_name_means_one_thing():
    homes = defaultdict(list)
    for module in modules():
        if module.__name__.startswith("databloom.cli") or module.__name__ == "databloom.tour":
            continue  # commands bear the names that are typed
        for name in getattr(module, "__all__", []):
            homes[name].append(module.__name__)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_figures_are_drawn_in_the_style_of_the_book(path):
    assert [cell[:80] for cell in code(path) if re.search(r"plt\.(subplots|figure|plot)\(", cell) and "book_style" not in cell] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_exported_cells_can_be_read_aloud(path):
    assert [cell[:80] for cell in code(path) if cell.startswith("#| export") and len(cell.splitlines()) > 61] == []  # the directive, and sixty lines


def test_results_are_asked_by_the_same_methods():
    ways, others = {"to_dict", "to_json", "to_frame", "to_html", "to_markdown", "plot"}, re.compile(r"(as|to|get)_(json|dict|df|frame|dataframe|html|md|markdown|table)|dataframe|json|html|markdown|draw|show")
    for module in modules():
        for name in getattr(module, "__all__", []):
            thing = getattr(module, name)
            if inspect.isclass(thing) and issubclass(thing, Result):
                assert not [method for method in vars(thing) if others.fullmatch(method) and method not in ways], f"{module.__name__}.{name}"


def test_results_are_frozen():
    for module in modules():
        for name in getattr(module, "__all__", []):
            thing = getattr(module, name)
            if inspect.isclass(thing) and issubclass(thing, Result) and dataclasses.is_dataclass(thing):
                assert thing.__dataclass_params__.frozen, f"{module.__name__}.{name}"
