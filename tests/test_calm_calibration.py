"CALM's calibration, report and command line, on a small model of the embedded grammar."
import contextlib
import copy
import dataclasses
import io
import json
import math
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import databloom.calm_decoding as decoding  # noqa: E402
from databloom.calm_calibration import (  # noqa: E402
    CalibratedModel, Guarantee, LossTable, System, calibrate, fingerprint, load_calibrated, load_system, loss_table, reference_risk, risk_losses,
    save_calibrated, save_system, split_rate, textual_losses, violation_rate,
)
from databloom.calm_data import Example, grammar_task, rouge_l, task_tokens, token_rows  # noqa: E402
from databloom.calm_decoding import Confidence, FullModel, Oracle, Static  # noqa: E402
from databloom.calm_model import CalmConfig, new_model, save_model, train, train_classifier  # noqa: E402
from databloom.calm_report import colored_html, layer_color, measure_latency, quality, report, sweep, waiting_speedup  # noqa: E402
from databloom.ltt_calibration import learn_then_test  # noqa: E402

torch.set_num_threads(1)
TASK = grammar_task("data_to_text", train=300, held_out=150, references=2)


@pytest.fixture(scope="module")
def system():
    tokens = task_tokens(TASK)
    model = new_model(CalmConfig(d_model=32, d_kv=8, d_ff=64, num_encoder_layers=1, num_decoder_layers=4, vocab_size=len(tokens)), 0)
    rows = token_rows(TASK.train, tokens)
    train(model, rows, steps=80, warmup=15, batch_size=24, learning_rate=5e-3, random_state=0)
    train_classifier(model, rows[:150], rows[200:250], steps=60, random_state=0)
    return System(model, tokens, max_new_tokens=25)


@pytest.fixture(scope="module")
def calibrated(system):
    return calibrate(system, TASK.held_out[:120], alpha=0.3)


def test_answers_do_not_depend_on_the_batch(system):
    prompts = [example.source for example in TASK.held_out[:40]]
    for rule in (FullModel(), Confidence("softmax", 0.5), Confidence("classifier", 0.6), Static(2)):
        one = dataclasses.replace(system, batch_size=1).answer(prompts, rule)
        many = dataclasses.replace(system, batch_size=16).answer(prompts, rule)
        assert (one.tokens, one.layers, one.texts) == (many.tokens, many.layers, many.texts)
        assert one.histogram().sum() == sum(map(len, one.tokens))
        assert one.mean_layers == pytest.approx(np.mean([layer for row in one.layers for layer in row]))


@pytest.mark.parametrize("prompts, words", [([], "at least one"), ([""], "prompt 0"), (["a", "\n "], "prompt 1"), (["a", 5], "prompt 1"), (["coal " * 600], "at most 512")])
def test_bad_prompts(system, prompts, words):
    with pytest.raises(ValueError, match=words):
        system.answer(prompts)


def test_losses_by_hand():
    early, full, references = ["a b c", "x", ""], ["a b d", "x", ""], [["a b d", "c"], ["y", "x"], ["z"]]
    assert np.allclose(textual_losses(early, full), [1 - 2 / 3, 0, 0])
    assert np.allclose(reference_risk(early, references), [1 / 3, 0, 1])
    assert np.allclose(risk_losses(early, full, references), [1 / 3, 0, 0])
    assert np.allclose(risk_losses(full, early, references), 0)  # an improvement is no loss
    assert np.allclose(textual_losses(["a b"], ["b a"], "token_f1"), 0)
    assert np.allclose(textual_losses(["x"], ["yy"], lambda a, b: 0.25), 0.75)
    with pytest.raises(ValueError, match="metric's value"):
        textual_losses(["x"], ["y"], lambda a, b: math.nan)
    with pytest.raises(ValueError):
        textual_losses(["x"], [])


def test_calibration_stops_at_the_first_failure_and_keeps_its_evidence(system, calibrated):
    guarantee, evidence = calibrated.guarantee, calibrated.guarantee.evidence
    p = evidence["p_values"]
    assert guarantee.n == 120 and evidence["passes"] == len(p) + 1
    chosen = evidence["thresholds"].index(guarantee.threshold)
    assert all(value <= 0.05 for value in p[:chosen + 1])
    assert len(p) in (chosen + 1, chosen + 2) and (len(p) == chosen + 1 or p[-1] > 0.05)
    early = system.answer([e.source for e in TASK.held_out[:120]], calibrated.rule)
    full = system.answer([e.source for e in TASK.held_out[:120]])
    assert np.allclose(evidence["losses"][chosen], textual_losses(early.texts, full.texts))
    assert evidence["mean_losses"][chosen] == pytest.approx(np.mean(evidence["losses"][chosen]))


def test_only_the_thresholds_that_are_tested_are_decoded(system, monkeypatch):
    asked = []
    answer = System.answer
    monkeypatch.setattr(System, "answer", lambda self, prompts, exit=FullModel(): asked.append(str(exit)) or answer(self, prompts, exit))
    found = calibrate(system, TASK.held_out[:120], alpha=0.05, thresholds=(0.9, 0.4, 0.1, 0.0))
    assert len(asked) == found.guarantee.evidence["passes"] == len(set(asked)) <= 4


def test_groups_count_once(system):
    examples = [Example(e.source, e.references, f"group {i // 4}") for i, e in enumerate(TASK.held_out[:120])]
    found = calibrate(system, examples, alpha=0.4, thresholds=(0.9,))
    assert found.guarantee.n == 30
    losses = np.array(found.guarantee.evidence["losses"][0]).reshape(30, 4).mean(1)
    wanted = learn_then_test(losses[:, None], 0.4, 0.05, settings=[0.9], random_state=0)
    assert found.guarantee.evidence["p_values"][0] == pytest.approx(wanted.p_values[0])
    assert found.guarantee.evidence["mean_losses"][0] == pytest.approx(losses.mean())


def test_nothing_certified_means_the_full_model(system):
    with pytest.warns(UserWarning, match="at least"):
        found = calibrate(system, TASK.held_out[:10], alpha=0.02)
    assert found.guarantee.threshold is None and found.rule == FullModel()
    prompts = [e.source for e in TASK.held_out[:10]]
    assert found.generate(prompts).texts == system.answer(prompts).texts
    assert "full model" in found.claim()


@pytest.mark.parametrize("form", ["paper", "t5x"])
def test_decay_is_fixed_at_calibration(system, form):
    found = calibrate(system, TASK.held_out[:60], alpha=0.5, temperature=4, form=form, thresholds=(0.9, 0.8))
    assert found.guarantee.length == 25 and found.rule.length == 25 and found.rule.form == form
    assert "decaying" in found.claim()


def test_asymptotic_method_says_so(system):
    with pytest.warns(UserWarning, match="asymptotic"):
        found = calibrate(system, TASK.held_out[:60], alpha=0.4, method="clt", thresholds=(0.9,))
    assert not found.guarantee.guaranteed and "NOT guaranteed" in found.claim()


def test_saved_and_read_back(tmp_path, calibrated):
    save_calibrated(calibrated, tmp_path)
    again = load_calibrated(tmp_path)
    assert again.guarantee == calibrated.guarantee and again.holds and again.claim() == calibrated.claim()
    prompts = [e.source for e in TASK.held_out[120:]]
    assert again.generate(prompts).tokens == calibrated.generate(prompts).tokens


def changed_system(system, **parts):
    return System(**{"model": copy.deepcopy(system.model), "tokens": system.tokens, "max_new_tokens": 25, **parts})


@pytest.mark.parametrize("what", ["weight", "classifier", "configuration", "tokenizer", "limit", "prompt limit", "threshold", "alpha", "losses", "measure", "software"])
def test_a_change_voids_the_guarantee(system, calibrated, monkeypatch, what):
    model, guarantee = copy.deepcopy(system.model), calibrated.guarantee
    new = System(model, system.tokens, max_new_tokens=25)
    if what == "weight":
        with torch.no_grad():
            model.lm_head.weight[3, 3] += 1e-6
    elif what == "classifier":
        model.exit_classifier = None
    elif what == "configuration":
        model.config = dataclasses.replace(model.config, relative_attention_max_distance=100)
    elif what == "tokenizer":
        new = changed_system(system, tokens=task_tokens(grammar_task("data_to_text", train=50, held_out=1)))
    elif what == "limit":
        new = changed_system(system, max_new_tokens=24)
    elif what == "prompt limit":
        new = changed_system(system, max_prompt=500)
    elif what == "threshold":
        guarantee = dataclasses.replace(guarantee, threshold=0.01)
    elif what == "alpha":
        guarantee = dataclasses.replace(guarantee, alpha=0.01)
    elif what == "losses":
        guarantee = dataclasses.replace(guarantee, evidence={**guarantee.evidence, "losses": []})
    elif what == "measure":
        monkeypatch.setitem(decoding.measures, "softmax", dataclasses.replace(decoding.measures["softmax"], function=lambda state: state.logits.amax(-1)))
    elif what == "software":
        monkeypatch.setattr("databloom.calm_calibration.__version__", "9.9.9")
    other = CalibratedModel(new, guarantee)
    assert calibrated.holds or what in ("measure", "software")
    assert not other.holds and "VOID" in str(other)
    with pytest.raises(ValueError, match="the guarantee is void"):
        other.claim()


def test_an_unchanged_copy_keeps_it(system, calibrated):
    assert CalibratedModel(changed_system(system, batch_size=3), calibrated.guarantee).holds


def test_own_measures_and_metrics(tmp_path, system):
    def steady(state):
        return torch.softmax(state.logits, -1).amax(-1) ** 2

    def likeness(one, other):
        return float(one == other)

    found = calibrate(system, TASK.held_out[:60], alpha=0.5, measure=steady, metric=likeness, thresholds=(0.95, 0.9))
    assert found.holds and found.guarantee.metric == "likeness" and found.guarantee.measure == "steady"
    save_calibrated(found, tmp_path)
    with pytest.raises(ValueError, match="measure"):
        load_calibrated(tmp_path)
    assert load_calibrated(tmp_path, steady, likeness).holds
    assert not load_calibrated(tmp_path, lambda state: steady(state) * 0.5, likeness).holds


def test_systems_are_saved_and_files_checked(tmp_path, system):
    save_system(system, tmp_path)
    again = load_system(tmp_path)
    assert again.max_new_tokens == 25 and fingerprint(again, "softmax", "rouge_l") == fingerprint(system, "softmax", "rouge_l")
    assert load_system(tmp_path, max_new_tokens=3).max_new_tokens == 3
    with pytest.raises(ValueError, match="calibrated.json"):
        load_calibrated(tmp_path)
    (tmp_path / "calibrated.json").write_text('{"alpha": 1}')
    with pytest.raises(ValueError, match="record"):
        load_calibrated(tmp_path)
    (tmp_path / "system.json").write_text("[]")
    with pytest.raises(ValueError, match="object"):
        load_system(tmp_path)


def test_loss_table_equals_direct_computation(tmp_path, system):
    examples = TASK.held_out[:30]
    table = loss_table(system, examples, thresholds=(0.9, 0.3))
    prompts = [e.source for e in examples]
    full, early = system.answer(prompts), system.answer(prompts, Confidence("softmax", 0.3))
    assert np.allclose(table.textual[:, 1], textual_losses(early.texts, full.texts))
    assert np.allclose(table.risk[:, 1], risk_losses(early.texts, full.texts, [e.references for e in examples]))
    assert table.mean_layers()[1] == pytest.approx(early.mean_layers)
    table.save(tmp_path / "t.npz")
    again = LossTable.load(tmp_path / "t.npz")
    assert np.array_equal(again.textual, table.textual) and again.thresholds == (0.9, 0.3) and again.measure == "softmax"
    assert loss_table(system, [Example(e.source, ()) for e in examples], thresholds=(0.9,)).risk is None


@pytest.mark.parametrize("method", ["wsr", "hoeffding_bentkus"])
def test_promises_are_kept(method):
    "A table made so that a threshold sits just above the level, the hardest place."
    rng = np.random.default_rng(0)
    scale = np.array([0.01, 0.05, 0.101, 0.3])
    losses = np.minimum(1, rng.exponential(1, (2000, 1)) * scale)
    losses *= scale / losses.mean(0)
    found = violation_rate(np.minimum(losses, 1), [8, 4, 2, 1], 8, alpha=0.1, n=300, trials=200, method=method)
    assert found.violations <= found.limit and found.layers < 8
    assert 0 <= split_rate(np.minimum(losses, 1), 0.1, trials=20) <= 1


def test_oracle_and_full_in_a_sweep(system):
    points = sweep(system, TASK.held_out[:40], [FullModel(), Oracle(), Static(1), Confidence("softmax", 0.6)])
    full, oracle, static, soft = points
    assert (full.layers, full.distance, full.risk_increase) == (4.0, 0.0, 0.0)
    assert static.layers == 1 and oracle.layers < 4 and 1 <= soft.layers < 4
    assert full.risk == pytest.approx(np.mean([1 - max(rouge_l(text, r) for r in e.references) for text, e in zip(system.answer([e.source for e in TASK.held_out[:40]]).texts, TASK.held_out[:40])]))
    bare = sweep(system, [Example(e.source, ()) for e in TASK.held_out[:5]], [Static(2)])[0]
    assert bare.bleu is None and bare.distance >= 0


def test_expected_speedup_by_hand(system):
    c = system.model.config
    prompts = [TASK.held_out[0].source]
    answers, inner = system.answer(prompts, Static(2)), c.num_heads * c.d_kv
    layer, head = 6 * c.d_model * inner + 3 * c.d_model * c.d_ff, c.d_model * c.vocab_size
    encoder = 7 * (4 * c.d_model * inner + 3 * c.d_model * c.d_ff + 2 * c.d_model * inner * 4)
    tokens = len(answers.tokens[0])
    wanted = (encoder + tokens * (4 * layer + head)) / (encoder + tokens * (2 * layer + head))
    assert waiting_speedup(system, answers, Static(2), 7) == pytest.approx(wanted)
    assert waiting_speedup(system, system.answer(prompts, Oracle()), Oracle(), 7) < 1


def test_latency_is_paired_with_the_full_model(system):
    rows = measure_latency(system, [e.source for e in TASK.held_out[:3]], [Static(1), FullModel()], rounds=1)
    assert [row.rule for row in rows] == ["full model", "static, 1 layers"]
    assert rows[0].speedup == 1 and all(0 < row.p50 <= row.p95 and row.tokens_per_second > 0 for row in rows)


def test_report_shows_everything_and_escapes(tmp_path, system, calibrated):
    examples = [Example(e.source, (e.references[0] + " <b>&",)) for e in TASK.held_out[120:135]]
    result = report(calibrated, examples, rules=[Confidence("softmax", 0.9)], latency_prompts=2, rounds=1, shown=2, title="A <title>")
    page, text = result.to_html(tmp_path / "r.html"), result.to_markdown(tmp_path / "r.md")
    assert "<b>&" not in page and "&lt;b&gt;&amp;" in page and "A &lt;title&gt;" in page
    assert str(calibrated.rule) in text and "(certified)" in text and calibrated.claim() in text
    assert {p.name for p in (tmp_path / "r_files").iterdir()} == {"quality.png", "consistency.png", "risk.png", "exits.png"}
    assert all(f"r_files/{name}.png" in text for name in ("quality", "exits"))
    rows = {row["rule"]: row for row in result.table()}
    assert rows["full model"]["layers"] == "4.00" and rows["full model"]["measured speed-up"] == "1.00"
    json.loads(result.to_json())
    void = CalibratedModel(changed_system(system, max_new_tokens=24), calibrated.guarantee)
    broken = report(void, examples[:3], latency_prompts=1, rounds=1, shown=0)
    assert not broken.holds and "the guarantee is void" in broken.to_markdown()


def test_colours_go_from_dark_to_pale(system):
    brightness = [int(layer_color(i, 8)[0][1:3], 16) for i in range(1, 9)]
    assert brightness == sorted(brightness) and layer_color(1, 1)[0] == "#0b3c5d"
    answers = system.answer([TASK.held_out[0].source], Static(1))
    assert colored_html(system, answers).count("left after layer 1 of 4") == len(answers.tokens[0])
    assert quality(answers, answers).distance == 0


def run(*words):
    from databloom.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as stop:
            return stop.code, out.getvalue(), err.getvalue()


def test_command_line_from_training_to_report(tmp_path):
    data = tmp_path / "pairs.csv"
    data.write_text("question,answer\n" + "".join(f"{e.source},{r}\n" for e in grammar_task("translation", train=120, held_out=1).train for r in e.references))
    folder, shape = tmp_path / "model", ["--width", 16, "--heads", 2, "--layers", 3, "--steps", 12, "--max-new-tokens", 12]
    words = ["calm", "train", folder, "--data", data, "--source", "question", "--target", "answer", "--held-out", 0.5, *shape, "--json", "--quiet"]
    code, out, err = run(*words)
    assert (code, err) == (0, "") and json.loads(out)["step"] == 12 and len(json.loads(out)["agreement"]) == 3
    again = run(*words)  # nothing left to train
    assert json.loads(again[1])["valid_loss"] == json.loads(out)["valid_loss"]
    code, out, err = run("calm", "calibrate", folder, "--alpha", 0.9, "--delta", 0.2, "--method", "hoeffding", "--json")
    assert code == 0 and json.loads(out)["alpha"] == 0.9 and "losses" not in json.loads(out)["evidence"]
    (tmp_path / "prompts.txt").write_text("the dog sees a cat .\na king likes the river .\n")
    code, out, err = run("calm", "generate", folder, "--input", tmp_path / "prompts.txt", "--json")
    assert code == 0 and len(json.loads(out)["texts"]) == 2
    code, out, err = run("calm", "generate", folder, "the dog sees a cat .", "--threshold", 0.5, "--measure", "classifier", "--layers", "--quiet")
    assert code == 0 and err == "" and any(mark in out for mark in "₁₂₃")
    code, out, err = run("calm", "report", folder, "--output", tmp_path / "r.md", "--prompts", 1, "--rounds", 1, "--json")
    assert code == 0 and json.loads(out)["holds"] and (tmp_path / "r.md").is_file()
    code, out, err = run("calm", "train", folder, "--data", data, "--source", "nothing", "--quiet")
    assert code == 2 and out == "" and err.count("\n") == 1
    save_model(new_model(CalmConfig(d_model=8, d_kv=4, d_ff=8, num_heads=2, vocab_size=100)), folder)
    code, out, err = run("calm", "generate", folder, "the dog sees a cat .")
    assert code == 2 and "void" in err
    assert isinstance(load_calibrated(folder).guarantee, Guarantee)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, system):
    folder = tmp_path_factory.mktemp("trained")
    save_system(system, folder)
    return folder


@pytest.mark.parametrize("words, says", [
    (["generate", "FOLDER", "", "--full"], "prompt 0 must be a text that is not empty"),
    (["generate", "FOLDER", "coal " * 600, "--full"], "at most 512 tokens"),
    (["generate", "FOLDER", "coal", "--threshold", "0.5", "--measure", "hope"], "measure must be one of"),
    (["generate", "FOLDER", "coal", "--threshold", "1.5"], "threshold must be"),
    (["generate", "FOLDER", "coal", "--threshold", "-0.5"], "threshold must be"),
    (["generate", "FOLDER", "coal", "--threshold", "0.5", "--temperature", "-1"], "temperature must be"),
    (["generate", "FOLDER", "coal"], "calibrated model"),
    (["calibrate", "FOLDER"], "calibration.jsonl"),
    (["report", "FOLDER", "--output", "page.pdf"], "output must be"),
    (["report", "FOLDER", "--output", "page.md", "--thresholds", "high"], "thresholds must be"),
    (["generate", "FOLDER", "coal", "--full", "--device", "nowhere"], "device must be"),
    (["generate", "OTHER", "coal", "--full"], "architecture"),
    (["generate", "OVERFLOWN", "coal", "--full"], "logits must be finite"),
    (["generate", "NOWHERE", "coal", "--full"], "folder"),
])
def test_bad_input_on_the_command_line(tmp_path, trained, words, says):
    folder = trained
    if "FOLDER" not in words:
        folder = tmp_path / "model"
    if "OTHER" in words or "OVERFLOWN" in words:
        shutil.copytree(trained, folder)
        if "OTHER" in words:
            (folder / "config.json").write_text('{"model_type": "bart"}')
        else:
            broken = load_system(trained)
            with torch.no_grad():
                broken.model.lm_head.weight[3, 0] = float("inf")
            save_system(broken, folder)
    code, out, err = run("calm", *(folder if word.isupper() else word for word in words))
    assert (code, out, err.count("\n")) == (2, "", 1) and says in err
