"Every argument that a user can give is explained beside its name or in the docstring; every public name has a docstring."
import dataclasses
import importlib
import inspect
import pkgutil
import re

import pytest
from fastcore.docments import docments

import databloom

MODULES = sorted(module.name for module in pkgutil.iter_modules(databloom.__path__) if not module.name.startswith("_"))



def module_of(name):
    try:
        return importlib.import_module(f"databloom.{name}")
    except ImportError as error:
        pytest.skip(str(error))


def public(module):
    "Functions and classes that a module shows, and the methods that a user calls on them."
    for name in getattr(module, "__all__", []):
        thing = getattr(module, name)
        if (inspect.isfunction(thing) or inspect.isclass(thing)) and thing.__module__ == module.__name__:
            yield name, thing
            for method, code in vars(thing).items() if inspect.isclass(thing) else ():
                code = code.__func__ if isinstance(code, (classmethod, staticmethod)) else code
                if inspect.isfunction(code) and code.__name__ != "<lambda>" and not method.startswith("_"):
                    yield f"{name}.{method}", code


def unexplained(what, thing, module):
    "Parameters with neither a comment beside them nor a word in the docstring; a method may leave it to the one that it replaces."
    code = thing
    if inspect.isclass(thing) and not dataclasses.is_dataclass(thing):
        if "__init__" not in vars(thing):
            return []
        code = thing.__init__
    ways = [code]
    if "." in what:
        owner, method = what.split(".")
        ways += [vars(parent)[method] for parent in getattr(module, owner).__mro__[1:] if inspect.isfunction(vars(parent).get(method))]
    notes = [docments(way, returns=False) for way in ways]
    said = " ".join(filter(None, [thing.__doc__, *(way.__doc__ for way in ways)]))
    names = list(inspect.signature(code).parameters)[1 if "." in what or code is not thing else 0:]
    beside = lambda name: any(note.get(name) for note in notes) or re.search(rf"[*][*]{name},  # \S", inspect.getsource(code))
    asked = lambda name: getattr(inspect.signature(code).parameters[name].default, "help", None)  # an option of a command
    return [name for name in names if not (asked(name) or name == "ax" or name.startswith("_") or beside(name) or re.search(rf"\b{name}\b", said))]


def inherited(what, module):
    "The docstring of the method that this one replaces."
    owner, _, method = what.partition(".")
    return method and next((said for parent in getattr(module, owner).__mro__ if (said := getattr(vars(parent).get(method), "__doc__", None))), None)


def test_the_walk_finds_them():
    assert {"core", "pld", "ledger", "sepsis_ensemble", "calm_model", "ehr_safe", "cli"} <= set(MODULES)
    assert "EnsembleLedger.charge" in dict(public(module_of("sepsis_privacy"))) and "dp_sgd_epsilon" in dict(public(module_of("connect_the_dots")))


@pytest.mark.parametrize("name", MODULES)
def test_names_are_explained(name):
    module = module_of(name)
    silent = [what for what, thing in public(module) if not (inspect.getdoc(thing) or inherited(what, module))]
    bare = {what: missing for what, thing in public(module) if (missing := unexplained(what, thing, module))}
    assert (silent, bare) == ([], {})


@pytest.mark.parametrize("name", MODULES)
def test_chance_has_one_name(name):
    "Python says `random_state`, the command line `--seed`."
    if name.startswith("cli") or name == "tour":
        return
    callables = [(what, thing) for what, thing in public(module_of(name)) if not inspect.isclass(thing) or "__init__" in vars(thing)]
    other = [what for what, thing in callables for parameter in inspect.signature(thing).parameters if parameter in ("seed", "rng", "generator")]
    assert other == []
