"The bench of chapter `calm_e2e` in small, on the embedded grammar: quality against depth, the promise over 1,000 draws, and the clock."
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sacrebleu")

from databloom.calm_calibration import System, table_of, violation_rate  # noqa: E402
from databloom.calm_data import corpus_bleu, grammar_task, split_valid, task_tokens, token_rows  # noqa: E402
from databloom.calm_decoding import Confidence, Decoder, FullModel, Oracle, Replay, Static  # noqa: E402
from databloom.calm_model import CalmConfig, evaluate_layers, new_model, train, train_classifier  # noqa: E402

GRID = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
LAYERS = 6


@pytest.fixture(scope="module")
def bench():
    "Two models that differ in the weights of the layers' losses; the answers of the first under many rules."
    torch.set_num_threads(1)
    task = grammar_task("data_to_text", train=800, held_out=200, references=3)
    tokens = task_tokens(task)
    learn, watch = split_valid(task.train, 0.05)
    rows, valid = token_rows(learn, tokens), token_rows(watch, tokens)
    config = CalmConfig(d_model=64, d_kv=16, d_ff=128, num_encoder_layers=1, num_decoder_layers=LAYERS, vocab_size=len(tokens))
    models = {}
    for weights in ("linear", "last"):
        models[weights] = new_model(config, random_state=0)
        train(models[weights], rows, steps=120, weights=weights, sampled_layers=2 if weights == "linear" else None, random_state=0)
    train_classifier(models["linear"], rows[:300], valid, steps=100, random_state=0)
    system, prompts = System(models["linear"], tokens, max_new_tokens=40), [e.source for e in task.held_out]
    rules = [FullModel(), Oracle(), Static(1), *(Confidence("softmax", t) for t in GRID)]
    return {"answers": {rule: system.answer(prompts, rule) for rule in rules}, "references": [e.references for e in task.held_out],
            "system": system, "prompts": prompts, "layers": {kind: evaluate_layers(model, valid) for kind, model in models.items()}}


def test_quality_against_depth(bench):
    bleu = {rule: corpus_bleu(some.texts, bench["references"]) for rule, some in bench["answers"].items()}
    depth = {rule: some.mean_layers for rule, some in bench["answers"].items()}
    full = bleu[FullModel()]
    assert full >= 50 and bleu[Oracle()] >= full - 1 and depth[Oracle()] <= 0.5 * LAYERS
    soft = min(depth[rule] for rule in depth if isinstance(rule, Confidence) and bleu[rule] >= full - 1)
    assert soft <= 0.75 * LAYERS
    assert bleu[Static(1)] < full


def test_a_loss_on_every_layer_teaches_the_lower_ones(bench):
    linear, last = bench["layers"]["linear"], bench["layers"]["last"]
    assert (linear["agreement"][:2] > last["agreement"][:2] + 0.15).all()
    assert linear["loss"][-1] < last["loss"][-1] + 0.15


@pytest.mark.parametrize("consistency, alphas", [("textual", (0.2,)), ("risk", (0.05,))])
def test_the_promise_over_a_thousand_draws(bench, consistency, alphas):
    early = {rule.threshold: some for rule, some in bench["answers"].items() if isinstance(rule, Confidence)}
    table = table_of(early, bench["answers"][FullModel()], bench["references"])
    for alpha in alphas:
        found = {method: violation_rate(getattr(table, consistency), table.mean_layers(), LAYERS, alpha, method=method, n=150, trials=1000)
                 for method in ("wsr", "hoeffding_bentkus")}
        assert all(one.violations <= one.limit for one in found.values())
        assert found["wsr"].layers <= found["hoeffding_bentkus"].layers


@pytest.mark.parametrize("measure", ["softmax", "state", "classifier"])
def test_trained_rows_in_a_batch_are_the_rows_alone(bench, measure):
    system, rows = bench["system"], bench["system"].encode(bench["prompts"][:40])
    for threshold in (0.9, 0.6):
        rule = Confidence(measure, threshold)
        many = system.decoder.generate(rows, exit=rule, max_new_tokens=40)
        alone = [system.decoder.generate(row, exit=rule, max_new_tokens=40) for row in rows]
        assert [one.tokens[0] for one in alone] == list(many.tokens) and [one.layers[0] for one in alone] == list(many.layers)


@pytest.mark.parametrize("rows", [1, 16])
def test_layers_saved_are_time_saved(rows):
    "Paired and interleaved, with room for a busy machine: the real measurement is `benchmarks/calm_speed.py`."
    shape = CalmConfig(d_model=256, d_kv=64, d_ff=512, num_encoder_layers=1, num_decoder_layers=8, vocab_size=500)
    decoder, rng = Decoder(new_model(shape, random_state=0)), np.random.default_rng(0)
    exits = rng.choice([1, 2, 3, 8], (rows, 20), p=[0.5, 0.2, 0.1, 0.2]).tolist()
    prompts, ratios = rng.integers(2, 500, (rows, 12)), []
    for _ in range(7):
        seconds = []
        for rule in (FullModel(), Replay(exits)):
            start = time.perf_counter()
            decoder.generate(prompts, exit=rule, max_new_tokens=20, stop_at_eos=False)
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    assert np.median(ratios[1:]) > (1.4 if rows == 1 else 0.9), ratios
