"""How a function or class is presented on the site: its name, where its source is, what it does, and a table of its parameters."""
import html
import importlib
import inspect
import re
from operator import attrgetter

from fastcore.docments import docments
from nbdev.doclinks import NbdevLookup
from nbdev.showdoc import BasicMarkdownRenderer

NOTHING = (None, inspect.Parameter.empty)


def cell(text):
    "Text that may stand in a cell of a Markdown table."
    return " ".join(str(text).split()).replace("|", r"\|")


def code(text):
    "A name or a default as code that nbdev does not take for a link."
    return f"<code>{cell(html.escape(text, quote=False))}</code>"


def kind(annotation):
    "A type, as code that links to where it is explained; nothing where none is given."
    if annotation in NOTHING:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return f"`{cell(re.sub(r'(__main__|databloom[.][a-z_]+)[.]', '', text))}`"


def default(value):
    "A default value, short enough for a table."
    return code(value.__name__ if inspect.isfunction(value) or inspect.isclass(value) else repr(value))


def exported(sym, name):
    "The same class in the package: what its fields mean is told by comments, which are found in files alone."
    entry = NbdevLookup()[name] if inspect.isclass(sym) and sym.__module__ == "__main__" else None
    if not entry:
        return sym
    module = importlib.import_module(entry[1].removesuffix(".py").replace("/", "."))
    return attrgetter(name)(module)


class SignatureTable(BasicMarkdownRenderer):
    "The Markdown of `show_doc`: heading, link to the source, docstring, and a row for each parameter."

    def rows(self):
        sym = exported(self.sym, self.nm)
        notes = docments(sym, full=True)
        for name, parameter in (self.sig.parameters if self.sig else {}).items():
            if name != "self":
                given = "" if parameter.default is parameter.empty else default(parameter.default)
                yield code(name), kind(parameter.annotation), given, cell((notes.get(name) or {}).get("docment") or "")
        back = notes.get("return") or {}
        if not inspect.isclass(sym) and (back.get("docment") or back.get("anno") not in NOTHING):
            yield "**returns**", kind(back.get("anno")), "", cell(back.get("docment") or "")

    def _repr_markdown_(self):
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
