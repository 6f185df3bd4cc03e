"The compiled layers: products of any shape, every road to the same text, and the measures in both of their forms."
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from databloom.calm_decoding import Confidence, Decoder, FullModel, Oracle, Replay, Static, measures  # noqa: E402
from databloom.calm_kernels import COLUMNS, FEW, add_product, exponential  # noqa: E402
from databloom.calm_model import CalmConfig, new_model  # noqa: E402

CONFIG = CalmConfig(d_model=36, d_kv=12, d_ff=52, num_heads=3, num_encoder_layers=2, num_decoder_layers=5, vocab_size=70)
RULES = [FullModel(), Static(2), Oracle(), *(Confidence(name, 0.35) for name in ("softmax", "softmax_gap", "classifier")), Confidence("state", 0.97, temperature=3)]


def sharp(seed=0):
    "A random model whose confidences spread out."
    model = new_model(CONFIG, random_state=seed).eval()
    torch.manual_seed(seed)
    model.exit_classifier = torch.nn.Linear(CONFIG.d_model, 1)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
        model.shared.weight.mul_(1.5)
        model.exit_classifier.weight.mul_(2)
    return model


@pytest.fixture(scope="module")
def model():
    return sharp()


def some_prompts(count, low=1, high=12, seed=0):
    rng = np.random.default_rng(seed)
    return [[*rng.integers(2, CONFIG.vocab_size, rng.integers(low, high)).tolist(), 1] for _ in range(count)]


@pytest.mark.parametrize("rows, k, n", [(1, 8, 1), (2, 7, 5), (3, 9, 130), (5, 64, COLUMNS), (4, 21, COLUMNS + 3), (FEW, 16, 2 * COLUMNS)])
def test_products(rows, k, n):
    rng = np.random.default_rng(k)
    x, w, y = (rng.standard_normal(shape, np.float32) for shape in ((rows, k), (k, n), (rows, n)))
    wanted = y.astype(float) + x.astype(float) @ w.astype(float)
    add_product(x, w.reshape(-1), y)
    assert np.abs(y - wanted).max() < 1e-5 * k**0.5
    wide = rng.standard_normal((rows, 2 * k), np.float32)  # rows that do not follow each other in memory
    y[:] = 0
    add_product(wide[:, :k], w.reshape(-1), y)
    assert np.abs(y - wide[:, :k].astype(float) @ w).max() < 1e-5 * k**0.5


def test_the_exponential_ends_softly():
    assert exponential(np.float32(-1e30)) == exponential(np.float32(-87)) > 0 and np.isfinite(exponential(np.float32(1e30)))
    assert np.isnan(exponential(np.float32(np.nan))) or exponential(np.float32(np.nan)) > 0  # logits are looked at in any case


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_road_leads_to_the_same_text(model, rule):
    "Compiled and plain, one thread and several, 32 and 64 bits, alone, few and many."
    prompts = some_prompts(FEW + 12)
    quick, plain, double = Decoder(model), Decoder(model, threads=2), Decoder(sharp().double())
    assert quick.engine.quick and not plain.engine.quick and not double.engine.quick
    many = quick.generate(prompts, exit=rule, max_new_tokens=9)
    for other in (plain, double):
        found = other.generate(prompts, exit=rule, max_new_tokens=9)
        assert (found.tokens, found.layers) == (many.tokens, many.layers)
    few = quick.generate(prompts[:7], exit=rule, max_new_tokens=9)
    assert few.tokens == many.tokens[:7] and few.layers == many.layers[:7]
    for i in range(6):
        alone = quick.generate(prompts[i], exit=rule, max_new_tokens=9)
        assert (alone.tokens[0], alone.layers[0]) == (many.tokens[i], many.layers[i])
        np.testing.assert_allclose(alone.confidences[0], many.confidences[i], atol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "softmax_gap", "state", "classifier"])
def test_measures_are_the_same_compiled(model, name):
    decoder, rows = Decoder(model), some_prompts(20)
    in_python = replace(measures[name], kernel=0)
    levels = decoder.generate(rows, exit=Replay([[4] * 8] * 20, name), max_new_tokens=8).confidences
    for threshold in np.quantile(np.concatenate(levels), [0.2, 0.6]).clip(0, 1):
        for prompts in (rows, rows[0]):
            one, other = (decoder.generate(prompts, exit=Confidence(m, float(threshold) + 3e-6), max_new_tokens=8) for m in (name, in_python))
            assert (one.tokens, one.layers) == (other.tokens, other.layers)
            np.testing.assert_allclose(np.concatenate(one.confidences), np.concatenate(other.confidences), atol=2e-6)


def test_prompts_longer_than_the_compiled_encoder_takes(model):
    long, decoder = some_prompts(3, FEW + 5, FEW + 30), Decoder(model)
    together = decoder.generate(long, exit=Confidence("softmax", 0.35), max_new_tokens=6)
    plain = Decoder(model, threads=2).generate(long, exit=Confidence("softmax", 0.35), max_new_tokens=6)
    assert together.tokens == plain.tokens == tuple(decoder.generate(p, exit=Confidence("softmax", 0.35), max_new_tokens=6).tokens[0] for p in long)


def test_a_cache_is_used_again_and_forgets(model):
    decoder, prompts = Decoder(model), some_prompts(9, 4, 5)
    wanted = [Decoder(model).generate(p, exit=Static(3), max_new_tokens=steps).tokens for p, steps in zip(prompts, (20, 8, 30, 30, 5) * 2)]
    assert [decoder.generate(p, exit=Static(3), max_new_tokens=steps).tokens for p, steps in zip(prompts, (20, 8, 30, 30, 5) * 2)] == wanted
    stream = decoder.stream(prompts[0], exit=Static(3), max_new_tokens=20)
    first = [next(stream).token, next(stream).token]
    decoder.generate(prompts[1], max_new_tokens=5)  # in the middle of the stream
    assert [*first, *(piece.token for piece in stream)] == wanted[0][0]


def test_threads_share_a_decoder(model):
    decoder, prompts = Decoder(model), some_prompts(24)
    rule = Confidence("softmax", 0.35)
    wanted = [decoder.generate(p, exit=rule, max_new_tokens=12).tokens for p in prompts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda p: decoder.generate(p, exit=rule, max_new_tokens=12).tokens, prompts)) == wanted


def test_a_classifier_that_overflowed_is_noticed(model):
    broken = sharp()
    with torch.no_grad():
        broken.exit_classifier.bias.fill_(float("nan"))
    for prompts in (some_prompts(1)[0], some_prompts(4)):
        with pytest.raises(ValueError, match="confidence must be"):
            Decoder(broken).generate(prompts, exit=Confidence("classifier", 0.5), max_new_tokens=4)
