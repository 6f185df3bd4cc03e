"The built site, as a reader's browser sees it: nothing comes from another machine, and what the book promises is on the page."
import importlib.util
import json
import re

import pytest
import yaml

from browser import Browser, program, served
from conftest import ROOT

CHAPTER = "pld.html"


@pytest.fixture(scope="module")
def address(site):
    with served(site) as url:
        yield url


@pytest.fixture(scope="module")
def browser():
    if program() is None:
        pytest.skip("no Chromium on this machine: install one (Debian: apt-get install chromium) to test the site in it")
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def builder():
    "tools/site.py as a module (under another name: Python has a `site` of its own)."
    spec = importlib.util.spec_from_file_location("site_builder", ROOT / "tools" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def titles():
    "The title of each notebook."
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        yield "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]).splitlines()[0].removeprefix("# ").strip()


def test_every_notebook_is_a_page_that_search_knows(site):
    known = {entry["title"] for entry in json.loads((site / "search.json").read_text(encoding="utf-8"))}
    assert {title.replace("`", "") for title in titles()} <= known  # code in a title is plain text to the search
    assert len(list(site.rglob("*.html"))) == len(list(titles())) + 1  # and the page for addresses that do not exist


def test_a_link_elsewhere_shows_title_summary_and_picture(site):
    import struct

    for path in site.rglob("*.html"):
        card = dict(re.findall(r'<meta property="(og:\w+)" content="([^"]*)">', path.read_text(encoding="utf-8")))
        assert path.name == "404.html" or (card["og:title"] and len(card["og:description"]) > 10 and card["og:image"].endswith("/databloom/assets/card.png")), path.name
    assert struct.unpack(">II", (site / "assets" / "card.png").read_bytes()[16:24]) == (1200, 630)
    assert 'href="https://databloom.github.io/databloom/index.html#chapters"' in (site / "404.html").read_text(encoding="utf-8")
    assert 'id="chapters"' in (site / "index.html").read_text(encoding="utf-8")


def test_nbdev_finds_the_same_configuration():
    here, there = ROOT / "_quarto.yml", ROOT / "nbs" / "_quarto.yml"
    assert there.resolve() == here.resolve()


def test_a_notebook_that_is_not_listed_is_refused(builder):
    config = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    assert list(builder.check_contents(config)) == []
    config["project"]["render"].remove("core.ipynb")
    config["website"]["sidebar"]["contents"].append("no_such.ipynb")
    assert list(builder.check_contents(config)) == [
        "_quarto.yml: core.ipynb is missing from the render",
        "_quarto.yml: the sidebar names no_such.ipynb, which does not exist",
    ]


def test_links_that_lead_nowhere_are_found(builder, tmp_path):
    (tmp_path / "a.html").write_text('<h1 id="top"></h1><a href="b.html#here">b</a><a href="#top">up</a><a href="https://example.org">out</a>')
    (tmp_path / "b.html").write_text('<p id="here"></p>')
    assert list(builder.broken_links(tmp_path)) == []
    (tmp_path / "b.html").write_text('<img src="gone.png"><a href="c.html">c</a><script src="https://example.org/x.js"></script>')
    (tmp_path / "s.css").write_text("@font-face { src: url(fonts/gone.woff2) }")
    assert list(builder.broken_links(tmp_path)) == [
        "a.html: b.html#here leads to no place on that page",
        "b.html: loads https://example.org/x.js from another machine",
        "b.html: c.html leads to no file",
        "b.html: gone.png leads to no file",
        "s.css: fonts/gone.woff2 leads to no file",
    ]


def test_pages_keep_their_links_when_they_are_renamed(builder, tmp_path):
    (tmp_path / "how").mkdir()
    (tmp_path / "00_pld.html").write_text('<a href="how/to.html">x</a><a href="./00_pld.html">x</a>')
    (tmp_path / "how" / "to.html").write_text('<a href="../00_pld.html#pld">x</a><a href="to.html">x</a>')
    (tmp_path / "search.json").write_text('[{"href": "00_pld.html"}, {"href": "how/to.html"}, {"href": "my00_pld.html"}]')
    builder.rename_pages(tmp_path, {"00_pld.html": "pld.html", "how/to.html": "to.html"})
    assert builder.Page((tmp_path / "pld.html").read_text()).links == ["how/to.html", "./pld.html"]
    assert builder.Page((tmp_path / "how" / "to.html").read_text()).links == ["../pld.html#pld", "to.html"]
    assert [e["href"] for e in json.loads((tmp_path / "search.json").read_text())] == ["pld.html", "how/to.html", "my00_pld.html"]


def test_links_to_names_in_code_stay_on_the_site(builder, tmp_path):
    (tmp_path / "pld.html").write_text('<h3 id="pld">PLD</h3>')
    links = "".join(f'<a href="https://a.org/book/pld.html{place}">x</a>' for place in ("#pld", "#pld.delta", "#gone", ""))
    (tmp_path / "index.html").write_text(links)
    builder.shorten_links(tmp_path, "https://a.org/book")
    assert builder.Page((tmp_path / "index.html").read_text()).links == ["pld.html#pld", "pld.html#pld", "pld.html", "pld.html"]


def test_printed_sentences_wrap_and_printed_tables_do_not(builder, tmp_path):
    (tmp_path / "a.html").write_text("".join(f'<div class="cell-output cell-output-stdout">\n<pre><code>{text}</code></pre>\n</div>' for text in ("  one line\n", "a    b\n1    2\n")))
    builder.fit_outputs(tmp_path)
    assert (tmp_path / "a.html").read_text().count('<pre class="prose"><code>  one line') == 1
    assert "<pre><code>a    b" in (tmp_path / "a.html").read_text()


def test_what_a_cell_printed_in_pieces_is_one_text(builder, tmp_path):
    piece = lambda name, text: {"output_type": "stream", "name": name, "text": [text]}
    notebook = {"cells": [{"cell_type": "code", "outputs": [piece("stdout", "a\n"), piece("stdout", "b\n"), piece("stderr", "c\n")]}]}
    (tmp_path / "n.ipynb").write_text(json.dumps(notebook))
    builder.join_streams(tmp_path)
    told = json.loads((tmp_path / "n.ipynb").read_text())["cells"][0]["outputs"]
    assert [(each["name"], "".join(each["text"])) for each in told] == [("stdout", "a\nb\n"), ("stderr", "c\n")]


def test_names_lead_to_their_chapter_and_to_their_source(site):
    from nbdev.doclinks import NbdevLookup

    if not NbdevLookup()["EpsilonBounds"]:
        pytest.skip("databloom is not installed in this environment, so nbdev finds no names")
    text = (site / "connect_the_dots.html").read_text(encoding="utf-8")
    assert re.search(r'<a href="pld.html#pld"><code>PLD</code></a>', text)
    assert "cli_accounting.html#delta" not in text  # the number, not the command of that name
    assert text.count('class="showdoc-source"') > 5 and ">no smaller epsilon holds at this delta" in text


def test_a_command_explains_its_options_as_they_are_typed(site):
    text = (site / "cli_accounting.html").read_text(encoding="utf-8")
    assert re.search(r"<td><code[^>]*>--sampling-probability</code></td>\s*<td><code>float</code></td>\s*<td><code>1.0</code></td>\s*<td>Probability that a record", text)
    assert [page.name for page in site.rglob("*.html") if re.search(r"typer\.models|object at 0x", page.read_text(encoding="utf-8"))] == []


def test_every_parameter_has_words(site):
    "Fields of results, options of commands, `*names` and `**names` too; a result may be told by its type alone."
    silent = []
    for page in site.rglob("*.html"):
        for box in re.findall(r'<div class="showdoc">(.*?)</div>', page.read_text(encoding="utf-8"), re.DOTALL):
            rows = [[re.sub("<.*?>", "", cell).strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)] for row in re.findall(r"<tr>(.*?)</tr>", box, re.DOTALL)]
            silent += [(page.name, row[0]) for row in rows if row and not row[-1] and row[0] != "returns"]
    assert silent == []


def test_every_figure_has_words_and_a_size(site):
    figures = [(page.name, tag) for page in site.rglob("*.html") for tag in re.findall(r"<img [^>]{0,400}?src=\"data:image/png", page.read_text(encoding="utf-8"))]
    assert len(figures) > 50
    assert [page for page, tag in figures if not re.search(r'alt="[^"]{20,}"', tag) or "--drawn: " not in tag] == []


def test_a_chapter_shows_title_formula_signature_and_figure(site, address, browser):
    browser.size(1300)
    browser.open(f"{address}/{CHAPTER}")
    assert browser.run("document.title").endswith("databloom")
    assert browser.run("document.querySelector('h1.title').innerText") in titles()
    assert browser.run("document.querySelectorAll('main .katex .katex-html').length") > 0
    signatures = browser.run("""[...document.querySelectorAll('.showdoc')].map(box => [
        box.querySelector('h3').innerText.trim(), ...[...box.querySelectorAll('tbody td:first-child')].map(cell => cell.innerText.trim())])""")
    assert ["PLD.delta", "epsilon"] in [names[:2] for names in signatures]
    assert browser.run("[...document.querySelectorAll('main img, main .cell-output-display > svg')].some(f => f.getBoundingClientRect().width > 100)")


def test_no_page_breaks_or_asks_another_machine(site, address, browser):
    for page in sorted(site.rglob("*.html")):
        name = page.relative_to(site).as_posix()
        for width in (1300, 390):
            browser.size(width)
            browser.open(f"{address}/{name}")
            where = f"{name} at {width} pixels"
            assert list(browser.complaints()) == [], where
            assert browser.run("document.documentElement.scrollWidth") <= width, where
            assert browser.run("[...document.querySelectorAll('main .math')].filter(m => !m.querySelector('.katex')).map(m => m.innerText)") == [], where
            assert browser.run("[...document.querySelectorAll('main .katex-error')].map(m => m.title)") == [], where
            assert browser.run("[...document.images].every(image => image.complete && image.naturalWidth > 0)"), where


def test_the_search_box_finds_a_symbol(address, browser):
    browser.size(1300)
    browser.open(f"{address}/index.html")
    browser.run("document.querySelector('.smalldocs-search input').focus()")
    browser.type("check_number")
    found = "[...document.querySelectorAll('.search-result')].find(r => r.querySelector('.search-result-section')?.innerText == 'check_number')"
    browser.wait(lambda: browser.run(f"Boolean({found})"))
    browser.run(f"{found}.click()")
    browser.wait(lambda: browser.run("location.href").endswith("/core.html#check_number") and browser.run("document.readyState == 'complete'"))
    assert browser.run("document.getElementById('check_number').innerText").strip().startswith("check_number")
