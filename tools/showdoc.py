"""How a function or class is presented on the site: its name, where its source is, what it does, and a table of its parameters."""
import importlib
import inspect
import re
from operator import attrgetter
from pathlib import Path

from fastcore.docments import docments
from nbdev.doclinks import NbdevLookup
from nbdev.processors import add_show_docs
from nbdev.showdoc import BasicMarkdownRenderer

NOTHING = (None, inspect.Parameter.empty)
chapter = None  # the module of the notebook that is being processed


def know_the_chapter(begin=add_show_docs.begin):
    "Let a name mean what it means in its own chapter: two chapters may have a `Calibration` each."
    def begin_and_remember(self):
        global chapter
        found = [re.search(r"^#\| *default_exp +(\S+)", cell.source, re.MULTILINE) for cell in self.nb.cells]
        chapter = next((f"databloom.{match[1]}" for match in found if match), None)
        begin(self)

    add_show_docs.begin = begin_and_remember
    anywhere = NbdevLookup.__getitem__

    def lookup(self, name):
        found = self.syms.get(f"{chapter}.{name}") or anywhere(self, name)
        # outside its own chapter `delta` is a number and `fit` a method, not the command of that name
        return None if found and "/cli_" in found[1] and "." not in name and f"databloom.{Path(found[1]).stem}" != chapter else found

    NbdevLookup.__getitem__ = lookup


def cell(text):
    "Text that may stand in a cell of a Markdown table."
    return " ".join(str(text).split()).replace("|", r"\|")


def words(text):
    "What a comment says of a parameter: a star in it is a product or a power, and what it quotes is typed as it stands."
    pieces = re.split(r"(`[^`]*`)", cell(text or ""))
    pieces[::2] = [re.sub(r'"[\w.-]+"|(?<!\S)--[a-z][\w-]*', r"`` \g<0> ``", each.replace("*", r"\*")) for each in pieces[::2]]
    return "".join(pieces)


def code(text):
    "A name or a default as code that nbdev does not take for a link."
    return f"`` {cell(text)} ``" if text else ""


def kind(annotation):
    "A type, as code that links to where it is explained; nothing where none is given."
    if annotation in NOTHING:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return f"`{cell(re.sub(r'(__main__|databloom[.][a-z_]+)[.]', '', text))}`"


def default(value):
    "A default value, short enough for a table; nothing for an option of the command line that must be given."
    value = getattr(value, "default", value)
    if value is ...:
        return ""
    return code(value.__name__ if inspect.isfunction(value) or inspect.isclass(value) else repr(value))


def exported(sym, name):
    "The same class in the package: what its fields mean is told by comments, which are found in files alone."
    entry = NbdevLookup()[name] if inspect.isclass(sym) and sym.__module__ == "__main__" else None
    if not entry:
        return sym
    module = importlib.import_module(entry[1].removesuffix(".py").replace("/", "."))
    return attrgetter(name)(module)


def beside(sym, name, parameter):
    "What the comment beside a parameter says; fastcore does not read those of `*names` and `**names`."
    stars = {parameter.VAR_POSITIONAL: r"[*]", parameter.VAR_KEYWORD: r"[*][*]"}.get(parameter.kind)
    if not stars:
        return (docments(sym, full=True).get(name) or {}).get("docment")
    try:
        found = re.search(rf"[(\s]{stars}{name}\b[^#\n]*# *(.*)", inspect.getsource(sym.__init__ if inspect.isclass(sym) else sym))
    except (OSError, TypeError):
        return None
    return found and found[1]


def option(parameter):
    "What Typer is told about a parameter of a command, or None: its `help` is what the reader needs."
    told = [parameter.default, *getattr(parameter.annotation, "__metadata__", ())]
    return next((each for each in told if hasattr(each, "param_decls")), None)


def option_names(name, told):
    "A parameter as it is typed on the command line: `--noise-multiplier`, or `FOLDER` where its place says what it is."
    if type(told).__name__ == "ArgumentInfo":
        return (told.metavar or name).upper()
    return ", ".join(told.param_decls or ["--" + name.replace("_", "-")])


class SignatureTable(BasicMarkdownRenderer):
    "The Markdown of `show_doc`: heading, link to the source, docstring, and a row for each parameter."

    def rows(self):
        sym = exported(self.sym, self.nm)
        for name, parameter in (self.sig.parameters if self.sig else {}).items():
            told = option(parameter)
            given = "" if parameter.default is parameter.empty else default(parameter.default)
            if told:
                plain = getattr(parameter.annotation, "__origin__", None) if hasattr(parameter.annotation, "__metadata__") else parameter.annotation
                yield code(option_names(name, told)), kind(plain), given, words(told.help)
            elif name != "self":
                yield code(str(parameter).split(":")[0].split("=")[0].strip()), kind(parameter.annotation), given, words(beside(sym, name, parameter))
        back = docments(sym, full=True).get("return") or {}
        rest = [beside(sym, name, each) for name, each in (self.sig.parameters if self.sig else {}).items() if each.kind is each.VAR_KEYWORD]
        if back.get("docment") in rest:  # fastcore takes the comment beside `**names` for that of the result
            back = {**back, "docment": None}
        if not inspect.isclass(sym) and (back.get("docment") or back.get("anno") not in NOTHING):
            yield "**returns**", kind(back.get("anno")), "", words(back.get("docment"))

    def _repr_markdown_(self):
        if any(part.startswith("_") for part in self.nm.split(".")):
            return ""  # a method of a class that is nobody's but the chapter's, or one that nobody calls by its name
        source = NbdevLookup().code(self.fn)
        parts = [f"{'#' * self.title_level} {self.nm}"]
        parts += [f'[source]({source}){{target="_blank" .showdoc-source}}'] if source else []
        parts += [self.docs.strip()] if self.docs else []
        rows = [("", "type", "default", ""), *self.rows()]
        kept = [i for i in range(4) if i in (0, 3) or any(row[i] for row in rows[1:])]
        lines = ["| " + " | ".join(row[i] for i in kept) + " |" for row in rows]
        if len(rows) > 1:
            parts.append("\n".join([lines[0], "|" + "---|" * len(kept), *lines[1:]]))
        return "::: {.showdoc}\n\n" + "\n\n".join(parts) + "\n\n:::"
