"Build the site into _docs/ without Quarto, and refuse a warning, a notebook that is not listed or a link that leads nowhere."
import argparse
import base64
import html
import json
import re
import shutil
import sys
import tempfile
import warnings
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

ROOT = Path(__file__).resolve().parent.parent


# Before: what the notebooks and _quarto.yml say

def notebooks():
    "The notebooks of the book, by the name that `_quarto.yml` gives them."
    paths = sorted((ROOT / "nbs").rglob("*.ipynb"))
    return {path.relative_to(ROOT / "nbs").as_posix(): path for path in paths if ".ipynb_checkpoints" not in path.parts}


def listed(contents):
    "The notebooks that a sidebar and its sections name, in order."
    for item in contents:
        if isinstance(item, str):
            yield item
        elif "contents" in item:
            yield from listed(item["contents"])
        else:
            yield item["href"]


def check_contents(config):
    "What is wrong between the notebooks that exist and those that `_quarto.yml` names."
    exist = set(notebooks())
    places = {"render": config["project"]["render"], "sidebar": list(listed(config["website"]["sidebar"]["contents"]))}
    for place, names in places.items():
        yield from (f"_quarto.yml: {name} is missing from the {place}" for name in sorted(exist - set(names)))
        yield from (f"_quarto.yml: the {place} names {name}, which does not exist" for name in sorted(set(names) - exist))
        yield from (f"_quarto.yml: the {place} names {name} twice" for name in sorted({n for n in names if names.count(n) > 1}))


def check_titles():
    "Notebooks whose first cell says more than title and summary: nbdev makes both the page's head and drops the rest."
    for name, path in notebooks().items():
        first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]
        lines = [line for line in "".join(first["source"]).splitlines() if line.strip()]
        if first["cell_type"] != "markdown" or not lines or not lines[0].startswith("# "):
            yield f"nbs/{name}: the first cell is not its title"
        elif any(not line.startswith("> ") for line in lines[1:]):
            yield f"nbs/{name}: text below title and summary does not reach the site; give it a cell of its own"


# Between: what smalldocs does not know

def without_maths(config):
    "The configuration for smalldocs, which does not know Quarto's `html-math-method`, and the folder of KaTeX that it names."
    options = dict(config["format"]["html"])
    method = options.pop("html-math-method")
    return {**config, "format": {"html": options}}, method["url"].rstrip("/")


def take_page_names(folder):
    "The page name that nbdev gives each notebook (`00_pld.ipynb` is `pld.html`), taken out of its head, where smalldocs does not know it."
    names = {}
    for path in folder.rglob("*.ipynb"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        head = notebook["cells"][0]
        text = "".join(head["source"])
        found = re.search(r"^output-file: *(\S+)\n", text, re.MULTILINE)
        names[path.relative_to(folder).with_suffix(".html").as_posix()] = found[1]
        head["source"] = text.replace(found[0], "")
        path.write_text(json.dumps(notebook), encoding="utf-8")
    return names


def join_streams(folder):
    "What a cell printed in several goes is one text to its reader, as in Jupyter."
    for path in folder.rglob("*.ipynb"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            joined = []
            for output in cell.get("outputs", []):
                if joined and output["output_type"] == "stream" == joined[-1]["output_type"] and output["name"] == joined[-1]["name"]:
                    joined[-1]["text"] = "".join(joined[-1]["text"]) + "".join(output["text"])
                else:
                    joined.append(output)
            if "outputs" in cell:
                cell["outputs"] = joined
        path.write_text(json.dumps(notebook), encoding="utf-8")


# After: the pages

class Page(HTMLParser):
    "The ids of a page, the links that it makes, and what it loads while it opens."

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids.update(attrs[key] for key in ("id", "name") if attrs.get(key))
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        elif tag in ("link", "script", "img", "source", "iframe"):
            self.loads += [attrs[key] for key in ("href", "src") if attrs.get(key)]


def rename_pages(site, names):
    "Give each page the name that nbdev's links to names in code expect."
    for old, new in names.items():
        (site / old).rename((site / old).with_name(new))
    for path in [*site.rglob("*.html"), site / "search.json"]:
        text = path.read_text(encoding="utf-8")
        for old, new in names.items():
            # from any folder of the site: `00_pld.html`, `./00_pld.html`, `../00_pld.html`
            text = re.sub(rf"(?<![\w/.-])((?:\.{{1,2}}/)*){re.escape(old)}", rf"\g<1>{Path(old).with_name(new).as_posix()}", text)
        path.write_text(text, encoding="utf-8")


def use_local_katex(site, katex):
    "Let every page load KaTeX from the site itself instead of another machine."
    for path in site.rglob("*.html"):
        here = "../" * len(path.relative_to(site).parent.parts) + katex
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r'https://[^"\s]*/katex@[^"/]*/dist', here, text), encoding="utf-8")


def use_local_fonts(site):
    "Themes fetch their fonts from another machine; without them a page shows the reader's own."
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r"@import url\(['\"]?https?://[^)]*\);?", "", text), encoding="utf-8")


def shorten_links(site, base):
    "Links that nbdev makes for names in code lead to the hosted site: lead them to this one, and to the class where a method has no place."
    ids = {path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8")).ids for path in site.rglob("*.html")}

    def shorten(match):
        page, _, place = match[1].partition("#")
        while place and place not in ids.get(page, ()):
            place = place.rpartition(".")[0]
        return f'href="{here}{page}#{place}"' if place else f'href="{here}{page}"'

    for path in site.rglob("*.html"):
        here = "../" * len(path.relative_to(site).parent.parts)
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(rf'href="{re.escape(base)}/([^"]*)"', shorten, text), encoding="utf-8")


def is_prose(text):
    "Whether a printed text may wrap: blanks inside a line line columns up, and a wrapped table is none."
    return not any("  " in line.strip() or "\t" in line for line in text.splitlines())


def fit_outputs(site):
    "Tell the style sheet what it cannot see: how wide a figure was drawn, which printed texts are sentences, where lines may break."
    def figure(match):
        width = int.from_bytes(base64.b64decode(match[2])[16:20], "big")  # the head of a PNG
        broad = 'class="broad" ' if width > 720 else ""  # more than a phone can show at half its size
        return f'<img {broad}style="--drawn: {width}px" {match[1]}src="data:image/png;base64,{match[2]}'

    def printed(match):
        return f'{match[1]} class="prose"><code>{match[2]}' if is_prose(html.unescape(match[2])) else match[0]

    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r'<img ([^>]*?)src="data:image/png;base64,([A-Za-z0-9+/]{32})', figure, text)
        # a long name breaks where its words do, a full stop stays with the letter before it, an option of a command in one piece
        text = re.sub(r'(<h3 id="[^"]*" class="anchored"[^>]*>)([\w.]+)', lambda m: m[1] + re.sub(r"(?<=[^_.])([_.])(?=\w)", r"\1<wbr>", m[2]), text)
        text = re.sub(r'(<span class="math inline">[^<]{1,24}</span>[.,;:!?)]+)', r'<span class="together">\1</span>', text)
        text = re.sub(r"<code>(--?[a-z][\w-]*)</code>", r'<code class="together">\1</code>', text)
        path.write_text(re.sub(r'(<div class="cell-output[^"]*">\s*<pre)><code>(.*?)(?=</code></pre>)', printed, text, flags=re.DOTALL), encoding="utf-8")


def present(site, base, title):
    "What other sites show of a link to a page: its title, its summary, a picture."
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        told = re.search(r"""<meta name="description" content=(?:"([^"]*)"|'([^']*)')>""", text)
        words = html.escape(html.unescape(told[1] or told[2]).replace("`", "")) if told else ""
        here = html.escape(html.unescape(re.search(r"<title>(.*?)</title>", text)[1]))
        card = {"og:type": "website", "og:site_name": title, "og:title": here, "og:description": words,
                "og:url": f"{base}/{path.relative_to(site).as_posix()}", "og:image": f"{base}/assets/card.png", "og:image:width": "1200", "og:image:height": "630",
                "og:image:alt": "Epsilon of a training run against its steps, bounded from below and above."}
        tags = "".join(f'<meta property="{name}" content="{value}">' for name, value in card.items() if value)
        path.write_text(text.replace("</head>", tags + '<meta name="twitter:card" content="summary_large_image"></head>', 1), encoding="utf-8")


def write_lost_page(site, base):
    "The page for an address that does not exist; it is shown at any depth, so its links are whole."
    path = site / "404.html"
    path.write_text(f"""<!doctype html><html lang="en-GB"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex"><title>No such page – databloom</title><style>
:root {{ color-scheme: light dark }} body {{ font: 1.1rem/1.6 sans-serif; max-width: 32rem; margin: 15vh auto; padding: 0 1rem }}
</style></head><body><main><h1>No such page</h1><p>Nothing stands at this address. Pages are named after their chapters: all of them are listed at the end of
<a href="{base}/index.html#chapters">the home page</a>, and the search box there finds every function by its name.</p></main></body></html>
""", encoding="utf-8")


def broken_links(site):
    "Each link of the site that leads to no file or no place in it, and each thing that a page would load from elsewhere."
    site = site.resolve()
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        where = path.relative_to(site)
        yield from (f"{where}: loads {url} from another machine" for url in page.loads if urlsplit(url).netloc)
        for link in page.links + page.loads:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{where}: {link} leads to no file"
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].ids:
                yield f"{where}: {link} leads to no place on that page"
    for sheet in sorted(site.rglob("*.css")):
        for url in re.findall(r"(?:url\(|@import )\s*['\"]?([^'\")]+)", sheet.read_text(encoding="utf-8")):
            if not url.startswith(("data:", "#")) and not (sheet.parent / urlsplit(url).path).is_file():
                yield f"{sheet.relative_to(site)}: {url} leads to no file"


def build(fresh=False):
    "Process the notebooks as nbdev does, render them as a Quarto site, and return what is wrong with it."
    from nbdev.config import get_config
    from nbdev.serve import proc_nbs
    from smalldocs.site import build as render

    config = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    problems = [*check_contents(config), *check_titles()]
    if problems:
        return problems
    settings = get_config(path=ROOT)
    processed = proc_nbs(str(ROOT / "nbs"), n_workers=2, force=fresh)
    site = ROOT / config["project"]["output-dir"]
    config, katex = without_maths(config)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        shutil.copytree(processed / "assets", folder / "assets")
        for name in notebooks():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(processed / name, folder / name)
        names = take_page_names(folder)
        join_streams(folder)
        (folder / "_quarto.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        problems = render(folder, quiet=True).warnings
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(folder / site.name, site)
    rename_pages(site, names)
    use_local_katex(site, katex)
    use_local_fonts(site)
    fit_outputs(site)
    base = settings.doc_host + settings.doc_baseurl
    shorten_links(site, base)
    present(site, base, config["website"]["title"])
    write_lost_page(site, base)
    return problems + list(broken_links(site))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="process every notebook again, also those that did not change")
    problems = build(**vars(parser.parse_args()))
    print("\n".join(problems) or "the site stands in _docs/: no warning, and every link leads somewhere")
    sys.exit(1 if problems else 0)


if __name__ == "__mp_main__":  # one of the processes in which nbdev runs the notebooks' imports and `show_doc`
    import nbdev.showdoc
    from showdoc import SignatureTable, know_the_chapter

    nbdev.showdoc.BasicMarkdownRenderer = SignatureTable
    know_the_chapter()
    warnings.filterwarnings("error", message="Found cells containing imports")  # such a cell runs without those above it
elif __name__ == "__main__":
    main()
