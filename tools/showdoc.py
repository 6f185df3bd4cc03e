"How a function or class is presented on the site: its name, where its source is, what it does, and a table of its parameters."
import inspect
import re

from fastcore.docments import docments
from nbdev.doclinks import NbdevLookup
from nbdev.showdoc import BasicMarkdownRenderer


def cell(text):
    "Text that may stand in a cell of a Markdown table."
    return re.sub(r"([|])", r"\\\1", " ".join(str(text).split()))


def code(value):
    "A type or a default as code, or nothing where there is none."
    if value in (None, inspect.Parameter.empty):
        return ""
    text = inspect.formatannotation(value) if isinstance(value, type) or not isinstance(value, str) else value
    return f"`{cell(text)}`" if text else ""


class SignatureTable(BasicMarkdownRenderer):
    "The Markdown of `show_doc`: heading, link to the source, docstring, and a row for each parameter."

    def rows(self):
        notes = docments(self.sym, full=True)
        for name, parameter in (self.sig.parameters if self.sig else {}).items():
            if name == "self":
                continue
            note = notes.get(name) or {}
            default = "" if parameter.default is parameter.empty else f"`{cell(show(parameter.default))}`"
            yield f"`{name}`", code(parameter.annotation), default, cell(note.get("docment") or "")
        back = notes.get("return") or {}
        if not inspect.isclass(self.sym) and (back.get("docment") or code(back.get("anno"))):
            yield "**returns**", code(back.get("anno")), "", cell(back.get("docment") or "")

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


def show(default):
    "A default value, short enough for a table."
    return default.__name__ if inspect.isfunction(default) or inspect.isclass(default) else repr(default)
