"CALM's data: tasks, readers, tokens, measures of likeness, download."
import functools
import gzip
import hashlib
import http.server
import json
import random
import threading

import numpy as np
import pytest

from databloom.calm_data import (
    GRAMMARS, Example, TextTask, Tokens, corpus_bleu, delexicalise, fetch, fetch_e2e, grammar_task, hold_out, load_e2e, merge_examples, raw_text,
    read_cnn_dm, read_e2e_cleaned, read_pairs, read_squad, read_wmt, rouge_l, similarity, split_valid, task_tokens, token_f1, token_rows, train_tokens,
    write_pairs,
)
from databloom.core import data_folder


@pytest.mark.parametrize("kind", GRAMMARS)
def test_grammar_tasks_repeat_and_keep_groups_apart(kind):
    task = grammar_task(kind, train=200, held_out=50, random_state=3)
    assert task == grammar_task(kind, train=200, held_out=50, random_state=3)
    assert task != grammar_task(kind, train=200, held_out=50, random_state=4)
    assert (len(task.train), len(task.held_out)) == (200, 50)
    assert not {e.source for e in task.train} & {e.source for e in task.held_out}
    if kind == "answers":
        assert all(e.references[0] in e.source for e in task.train)
    with pytest.raises(ValueError, match="train"):
        grammar_task(kind, train=0)


def test_e2e_as_the_bench_defines_it():
    folder = data_folder("e2e")
    if folder is None:
        pytest.skip("DATABLOOM_DATA has no e2e")
    task = load_e2e(folder)
    assert (len(task.train), len(task.held_out)) == (31_670, 1_747)
    assert not {e.source for e in task.train} & {e.source for e in task.held_out}
    assert all("__" not in e.source and "<eos>" not in e.references[0] for e in task.train)
    assert len(task_tokens(task, "word", min_count=5)) == 999
    assert load_e2e(folder, random_state=1).held_out != task.held_out
    cleaned = read_e2e_cleaned(folder / "devel-fixed.no-ol.csv.gz")
    tokens = task_tokens(task, "word", min_count=5)
    known = [tokens.unk not in tokens.encode(example.source) for example, _ in cleaned]
    assert len(cleaned) == 1_442 and np.mean(known) > 0.99


def test_delexicalisation_replaces_whole_names_only():
    source, text = delexicalise({"near": "The Sun", "name": "The Su"}, "The Su is near The Sun ; The Sunday .")
    assert source == "name= X-NAME near= X-NEAR" and text == "X-NAME is near X-NEAR ; The Sunday ."


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_tokens_round_trip(tmp_path, kind):
    texts = ["the cat sat on the mat .", "a dog , a cat ."]
    tokens = train_tokens(texts * 3, kind, vocab_size=60)
    tokens.save(tmp_path)
    again = Tokens.load(tmp_path)
    for text in texts:
        assert again.decode(again.encode(text)) == text and again.encode(text)[-1] == again.eos
    assert again.decode([*again.encode("the cat"), 7, 8]) == "the cat"
    assert len(again) == len(tokens) and again.encode_many(texts) == [tokens.encode(text) for text in texts]
    with pytest.raises(ValueError, match="folder"):
        Tokens.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer"):
        Tokens.load(tmp_path)


def test_the_vocabulary_does_not_see_held_out_words():
    task = TextTask("t", (Example("a b", ("c",)),), (Example("secret", ("word",)),))
    tokens = task_tokens(task)
    assert tokens.encode("secret") == [tokens.unk, tokens.eos]


def test_pairs_from_files(tmp_path):
    (tmp_path / "a.tsv").write_text("q\ta\tg\nx\t1\tone\nx\t2\tone\ny\t3\ttwo\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"q": "x", "a": ["1", "2"], "g": "one"}\n\n{"q": "y", "a": "3", "g": "two"}\n')
    a, b = (read_pairs(tmp_path / name, "q", "a", "g") for name in ("a.tsv", "b.jsonl.gz"))
    assert a == b == [Example("x", ("1", "2"), "one"), Example("y", ("3",), "two")]
    write_pairs([*a, Example("z", ())], tmp_path / "c.jsonl")
    assert read_pairs(tmp_path / "c.jsonl", group="group", need_target=False) == [*a, Example("z", ())]


@pytest.mark.parametrize("name, content, words", [
    ("a.csv", "source,target\n", "at least one row"), ("a.csv", "source,target\nx,\n", "'target'"), ("a.txt", "x", ".csv, .tsv or .jsonl"),
    ("a.jsonl", "{", "line 1"), ("a.jsonl", "[1]\n", "object"), ("a.csv", "source,target\n  ,y\n", "not empty"),
])
def test_bad_files_are_one_clear_error(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        read_pairs(tmp_path / name)
    with pytest.raises(ValueError, match="exists"):
        read_pairs(tmp_path / "nowhere.csv")


def test_cnn_dm(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.story").write_text(f"Story {i}.\n\nMore.\n\n@highlight\n\nFirst\n\n@highlight\n\nSecond!\n")
    found = read_cnn_dm(tmp_path, prefix="summarize: ")
    assert found[2] == Example("summarize: Story 2. More.", ("First . Second!",)) and len(found) == 3
    assert read_cnn_dm(tmp_path / "1.story")[0].source == "Story 1. More."
    (tmp_path / "t.csv").write_text('id,article,highlights\n1,"An article, long.","One.\nTwo."\n')
    assert read_cnn_dm(tmp_path / "t.csv") == [Example("An article, long.", ("One. Two.",))]
    (tmp_path / "3.story").write_text("no highlights")
    with pytest.raises(ValueError, match="highlights"):
        read_cnn_dm(tmp_path)


def test_wmt(tmp_path):
    (tmp_path / "s.sgm").write_text('<srcset setid="n" srclang="any">\n<doc sysid="x" docid="d1" genre="n">\n<p>\n<seg id="1">One &amp; two</seg>\n<seg id="2">Three</seg></p></doc></srcset>')
    (tmp_path / "r.sgm").write_text('<refset><doc docid="d1"><hl><seg id="1">Un et deux</seg></hl><seg id="2">Trois</seg></doc></refset>')
    assert read_wmt(tmp_path / "s.sgm", tmp_path / "r.sgm") == [Example("One & two", ("Un et deux",), "doc d1"), Example("Three", ("Trois",), "doc d1")]
    (tmp_path / "x.xml").write_text('<dataset id="n"><doc id="d" origlang="en"><src lang="en"><p><seg id="1">One</seg></p></src><ref lang="fr" translator="A"><p><seg id="1">Un</seg></p></ref>'
                                    '<ref lang="fr" translator="B"><p><seg id="1">Une</seg></p></ref><hyp system="s" language="fr"><p><seg id="1">no</seg></p></hyp></doc></dataset>')
    assert read_wmt(tmp_path / "x.xml") == [Example("One", ("Un", "Une"), "doc d")]
    (tmp_path / "j.jsonl").write_text('{"translation": {"en": "One", "fr": "Un"}}\n')
    assert read_wmt(tmp_path / "j.jsonl") == [Example("One", ("Un",))]
    (tmp_path / "a.en").write_text("One\nTwo\n")
    (tmp_path / "a.fr").write_text("Un\n")
    with pytest.raises(ValueError, match="as many lines"):
        read_wmt(tmp_path / "a.en", tmp_path / "a.fr")
    with pytest.raises(ValueError, match="'de'"):
        read_wmt(tmp_path / "j.jsonl", target_lang="de")


def test_squad(tmp_path):
    question = lambda i, answers, **rest: {"id": str(i), "question": f"Q{i}?", "answers": [{"text": a, "answer_start": 0} for a in answers], **rest}
    data = {"version": "v2.0", "data": [
        {"title": "A", "paragraphs": [{"context": "a  b", "qas": [question(1, ["a", "a", "b"]), question(2, [], is_impossible=True)]}]},
        {"title": "B", "paragraphs": [{"context": "c", "qas": [question(3, ["c"])]}]}]}
    (tmp_path / "s.json").write_text(json.dumps(data))
    found = read_squad(tmp_path / "s.json")
    assert found == [Example("question: Q1? context: a b", ("a", "b"), "A"), Example("question: Q3? context: c", ("c",), "B")]
    for bad in ("[]", "{}", '{"data": [{"title": "x"}]}', '{"data": []}', "nonsense"):
        (tmp_path / "s.json").write_text(bad)
        with pytest.raises(ValueError, match="SQuAD|at least one"):
            read_squad(tmp_path / "s.json")


def lcs(a, b):
    table = np.zeros((len(a) + 1, len(b) + 1), int)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1, j + 1] = table[i, j] + 1 if x == y else max(table[i, j + 1], table[i + 1, j])
    return table[-1, -1]


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence():
    rng = random.Random(0)
    for _ in range(100):
        a, b = ([rng.choice(["The", "the", ",", "x-y", "cat", "é"]) for _ in range(rng.randint(1, 9))] for _ in range(2))
        common = lcs(a, b)
        assert rouge_l(" ".join(a), " ".join(b)) == pytest.approx(2 * common / (len(a) + len(b)))
    assert (rouge_l("", ""), rouge_l("", "a"), rouge_l(" ", "")) == (1.0, 0.0, 1.0)


def test_token_f1_as_squad_counts():
    assert token_f1("The Eiffel Tower.", "eiffel tower") == 1
    assert token_f1("in Paris, France", "Paris") == pytest.approx(0.5)
    assert token_f1("a dog", "the dog") == 1  # articles do not count
    assert token_f1("x x y", "x y y") == pytest.approx(2 / 3)
    assert token_f1("", "") == 1 and token_f1("x", "") == 0


def test_bleu_takes_any_number_of_references():
    sacrebleu = pytest.importorskip("sacrebleu")
    texts, references = ["a b c d e", "c d e f"], [["a b c d f", "a b c e"], ["c d e f g", "d e f g"]]
    assert corpus_bleu(texts, references) == pytest.approx(sacrebleu.metrics.BLEU(tokenize="none", force=True).corpus_score(texts, list(zip(*references))).score)
    ragged = corpus_bleu(texts, [references[0], references[1][:1]])
    assert ragged == pytest.approx(corpus_bleu(texts, [references[0], references[1][:1] * 2]))
    with pytest.raises(ValueError):
        corpus_bleu([], [])


def test_split_is_by_group():
    examples = [Example(f"s{i}", ("t",), f"g{i % 5}") for i in range(50)]
    train, valid = split_valid(examples, 0.4)
    assert len({e.group for e in valid}) == 2 and not {e.group for e in valid} & {e.group for e in train}
    task = hold_out(examples, 0.4)
    assert len(task.train) == 30
    with pytest.raises(ValueError, match="two groups"):
        split_valid(examples[:1], 0.5)


def test_rows_keep_limits():
    task = TextTask("t", (Example("a b c", ("d e f g",)),), ())
    tokens = task_tokens(task)
    assert [len(part) for part in token_rows(task.train, tokens, max_answer=3)[0]] == [4, 3]
    with pytest.raises(ValueError, match="at most 3"):
        token_rows(task.train, tokens, max_prompt=3)


def test_examples_refuse_and_merge():
    with pytest.raises(ValueError, match="source"):
        Example(" ", ())
    assert merge_examples([("a", "x", ""), ("b", None, "g"), ("a", "x", "")]) == [Example("a", ("x",)), Example("b", (), "g")]
    with pytest.raises(ValueError, match="metric"):
        similarity("bleu")


def test_raw_text_puts_names_back():
    assert raw_text("X-NAME 's pub ( near X-NEAR ) costs £ 20 - 25 .", {"name": "Bo", "near": "Al"}) == "Bo's pub (near Al) costs £20-25."


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path):
    pytest.importorskip("pooch")
    (tmp_path / "served").mkdir()
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path / "served"))
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield tmp_path / "served", f"http://127.0.0.1:{made.server_address[1]}"
    made.shutdown()
    thread.join()


def test_download_checks_the_hash(server, tmp_path):
    folder, url = server
    (folder / "a.csv").write_text("source,target\nx,y\n")
    digest = hashlib.sha256((folder / "a.csv").read_bytes()).hexdigest()
    path = fetch(f"{url}/a.csv", digest, tmp_path / "kept")
    assert read_pairs(path) == [Example("x", ("y",))]
    (folder / "a.csv").unlink()
    assert fetch(f"{url}/a.csv", digest, tmp_path / "kept") == path  # kept, not fetched again
    (folder / "b.csv").write_text("other")
    with pytest.raises(ValueError):
        fetch(f"{url}/b.csv", digest, tmp_path / "kept")
    assert not (tmp_path / "kept" / "b.csv").exists()
    with pytest.raises(ValueError, match="64 hexadecimal"):
        fetch(f"{url}/b.csv", "abc", tmp_path / "kept")


def test_e2e_download(server, tmp_path):
    folder, url = server
    source = data_folder("e2e/e2e_aligned.tar.gz")
    if source is None:
        pytest.skip("DATABLOOM_DATA has no e2e")
    (folder / "mirror.tar.gz").write_bytes(source.read_bytes())
    path = fetch_e2e(tmp_path / "kept", f"{url}/mirror.tar.gz")
    assert path.name == "e2e_aligned.tar.gz" and path.read_bytes() == source.read_bytes()
