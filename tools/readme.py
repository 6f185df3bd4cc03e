"Make README.md, and the pictures that it shows, from nbs/index.ipynb; with --check, only say whether they agree."
import argparse
import re
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent.parent
SOURCE, TARGET, PICTURES = ROOT / "nbs" / "index.ipynb", ROOT / "README.md", ROOT / "nbs" / "assets"
HEAD = "<!-- Made from nbs/index.ipynb by tools/readme.py: edit the notebook. -->\n\n"


def directives(cell):
    "What the `#|` lines of a cell say about showing it."
    return set(re.findall(r"^#\|\s*(.+?)\s*$", cell.source, re.MULTILINE))


def shown(notebook):
    "The notebook as a reader of README.md shall see it: without hidden cells, hidden code and directives."
    cells = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            said = directives(cell)
            if "hide" in said or "include: false" in said:
                continue
            if "echo: false" in said:
                cell.metadata["tags"] = ["only-output"]
            cell.source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.MULTILINE).strip()
            if not cell.source and not cell.outputs:
                continue
        cells.append(cell)
    notebook.cells = cells
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def from_the_top(match):
    "A link or picture of the notebook, as it reads from the folder above."
    text, target = match[1], match[2]
    if re.match(r"[a-z]+:|#", target):
        return match[0]
    return f"{text}(nbs/{target})"


def make():
    "The text of README.md and the pictures that the notebook drew, by file name."
    exporter = MarkdownExporter(config=Config({"TagRemovePreprocessor": {"enabled": True, "remove_input_tags": {"only-output"}}}))
    resources = {"output_files_dir": "assets", "unique_key": "readme"}
    notebook = nbformat.read(SOURCE, as_version=4)
    told = iter([match[1] for cell in notebook.cells for match in re.finditer(r'^#\| *fig-alt: *"(.*)"$', cell.source, re.MULTILINE)])
    body, resources = exporter.from_notebook_node(shown(notebook), resources)
    body = re.sub(r"^ *\n!\[png\](\(\S+\))\n *$", lambda match: f"\n![{next(told)}]{match[1]}\n", body, flags=re.MULTILINE)
    body = re.sub(r"(!?\[[^\]]*\])\(([^)\s]+)\)", from_the_top, body)
    body = re.sub(r"\n{3,}", "\n\n", body).strip()
    pictures = {Path(name).name: data for name, data in resources.get("outputs", {}).items()}
    return HEAD + body + "\n", pictures


def differences(text, pictures):
    "What in the tree is not as the notebook says."
    if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text:
        yield "README.md"
    for name, data in pictures.items():
        if not (PICTURES / name).exists() or (PICTURES / name).read_bytes() != data:
            yield f"nbs/assets/{name}"
    yield from (f"nbs/assets/{path.name} (no longer drawn)" for path in PICTURES.glob("readme_*") if path.name not in pictures)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when they do not agree")
    check = parser.parse_args().check
    text, pictures = make()
    found = list(differences(text, pictures))
    if check and found:
        sys.exit("not as nbs/index.ipynb says: " + ", ".join(found) + "; make them again with: python tools/readme.py")
    if not check:
        for path in PICTURES.glob("readme_*"):
            path.unlink()
        for name, data in pictures.items():
            (PICTURES / name).write_bytes(data)
        TARGET.write_text(text, encoding="utf-8")
    print("README.md is as nbs/index.ipynb says")


if __name__ == "__main__":
    main()
