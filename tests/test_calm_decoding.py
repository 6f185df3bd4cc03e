"""Early-exit decoding: exactness against independent computations, bad input, threads, streams."""

import copy
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from databloom.calm_decoding import (  # noqa: E402
    Confidence, Decoder, FullModel, Oracle, Replay, Static, check_prompts, decayed_threshold, decoding_work, find_measure, measures,
    predicted_speedup, recompute, shortlist)
from databloom.calm_model import CalmConfig, load_model, new_model  # noqa: E402

SHAPES = {
    "t5 1.1": {},
    "t5": {"feed_forward": "relu", "tie_word_embeddings": True},
    "silu, wide heads": {"feed_forward": "gated-silu", "d_kv": 24, "num_encoder_layers": 1},
}


def make_model(seed=0, sharp=6.0, **changes):
    "A random model whose upper layers change little, so that measures of confidence spread out."
    config = CalmConfig(**({"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_decoder_layers": 6, "vocab_size": 60} | changes))
    model = new_model(config, random_state=seed).eval()
    with torch.no_grad():
        model.shared.weight.mul_(1.5)
        if not config.tie_word_embeddings:
            model.lm_head.weight.mul_(sharp)
        for stack in (model.encoder, model.decoder):
            for block in stack.block:
                for part in block.layer:
                    part.layer_norm.weight.add_(0.3 * torch.randn(config.d_model, generator=torch.Generator().manual_seed(seed)))
        torch.manual_seed(seed)
        model.exit_classifier = torch.nn.Linear(config.d_model, 1)
    return model


def make_prompts(count, vocabulary=60, seed=1):
    rng = np.random.default_rng(seed)
    return [[*rng.integers(2, vocabulary, rng.integers(1, 12)).tolist(), 1] for _ in range(count)]


@pytest.fixture(scope="module")
def decoder():
    return Decoder(make_model())


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(200)


def thresholds_of(decoder, measure, prompts):
    "Three thresholds at which tokens leave at many different layers."
    seen = decoder.generate(prompts[:40], exit=Replay([[5] * 12] * 40, measure), max_new_tokens=12).confidences
    return [round(float(q), 3) for q in np.quantile(np.concatenate(seen), [0.3, 0.55, 0.8])]


def worst(one, other):
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(one, other, strict=True))


# ---- exactness -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", SHAPES)
def test_full_model_is_the_plain_model(shape):
    model = make_model(**SHAPES[shape])
    out = Decoder(model).generate(make_prompts(30), max_new_tokens=15, keep_logits=True)
    for prompt, tokens, layers, logits in zip(make_prompts(30), out.tokens, out.layers, out.logits):
        with torch.no_grad():
            plain = model(torch.tensor([prompt]), torch.ones(1, len(prompt)), torch.tensor([[0, *tokens[:-1]]]))[0]
        assert set(layers) == {6}
        assert plain.argmax(-1).tolist() == tokens
        assert float((plain - torch.from_numpy(logits)).abs().max()) <= 1e-5 * max(1, float(plain.abs().max()))


def test_full_model_matches_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_decoder_layers=4, num_heads=4, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, decoder_start_token_id=0)).eval()
    theirs.save_pretrained(tmp_path)
    decoder = Decoder(load_model(tmp_path))
    for prompt in make_prompts(10):
        ids = torch.tensor([prompt])
        want = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[0, 1:].tolist()
        assert decoder.generate(prompt, max_new_tokens=12).tokens[0] == want


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eager", [False, True])
def test_exits_compute_the_definition(shape, eager):
    model = make_model(**SHAPES[shape])
    decoder, prompts, rng = Decoder(model), make_prompts(12), np.random.default_rng(5)
    exits = rng.integers(1, 7, (12, 20))
    crowd = decoder.generate(prompts, exit=Replay(exits.tolist()), max_new_tokens=20, keep_logits=True, eager=eager, stop_at_eos=False)
    for i, prompt in enumerate(prompts):
        lone = decoder.generate(prompt, exit=Replay(exits[i].tolist()), max_new_tokens=20, keep_logits=True, eager=eager, stop_at_eos=False)
        want = recompute(model, prompt, lone.tokens[0], exits[i]).numpy()
        size = max(1, np.abs(want).max())
        assert lone.layers[0] == crowd.layers[i] == exits[i].tolist()
        assert np.abs(lone.logits[0] - want).max() <= 1e-5 * size
        assert lone.tokens[0] == crowd.tokens[i]
        assert np.abs(crowd.logits[i] - want).max() <= 1e-5 * size


def test_recompute_is_not_the_full_model_after_an_exit():
    "The yardstick itself: exits change what comes after, and the stand-in is the exit's own state."
    model = make_model()
    full, early = (recompute(model, [5, 6, 1], [7, 8, 9, 10], layers) for layers in ([6] * 4, [6, 2, 6, 6]))
    assert torch.equal(full[0], early[0])
    assert float((full[2] - early[2]).abs().max()) > 1e-3


@pytest.mark.parametrize("measure", ["softmax", "softmax_gap", "state", "classifier", "shortlist"])
def test_batch_is_batch_of_one(decoder, prompts, measure):
    used, prompts = set(), prompts if measure in ("softmax", "state", "classifier") else prompts[:40]
    for threshold in thresholds_of(decoder, measure, prompts):
        rule = Confidence(measure, threshold)
        crowd = decoder.generate(prompts, exit=rule, max_new_tokens=8, keep_logits=True)
        used.add(tuple(crowd.histogram() > 0))
        for i, prompt in enumerate(prompts):
            lone = decoder.generate(prompt, exit=rule, max_new_tokens=8, keep_logits=True)
            assert lone.tokens[0] == crowd.tokens[i], (threshold, prompt)
            assert lone.layers[0] == crowd.layers[i], (threshold, prompt)
            assert np.abs(lone.logits[0] - crowd.logits[i]).max() <= 1e-5 * max(1, np.abs(lone.logits[0]).max())
            np.testing.assert_allclose(lone.confidences[0], crowd.confidences[i], atol=1e-4)
    assert any(sum(layers) >= 3 for layers in used), "the thresholds must spread the exits"


def test_company_and_padding_do_not_matter(decoder, prompts):
    some, width = prompts[:30], max(map(len, prompts[:30])) + 3
    rule = Confidence("softmax", thresholds_of(decoder, "softmax", prompts)[1], temperature=4, length=10)
    want = decoder.generate(some, exit=rule, max_new_tokens=10)
    left = np.array([[0] * (width - len(p)) + p for p in some])
    right = torch.tensor([p + [0] * (width - len(p)) for p in some])
    middle = [[0] + p + [0] * (width - len(p) - 1) for p in some]
    for padded in (left, right, middle):
        assert decoder.generate(padded, exit=rule, max_new_tokens=10).tokens == want.tokens
    mask = (right != 0).int()
    rubbish = torch.where(mask.bool(), right, torch.tensor(7))
    assert decoder.generate(rubbish, mask, exit=rule, max_new_tokens=10).layers == want.layers
    assert decoder.generate(some[::-1], exit=rule, max_new_tokens=10).tokens == want.tokens[::-1]


def test_a_hole_in_a_lone_prompt_is_masked():
    model = make_model()
    ids, mask = torch.tensor([[5, 6, 7, 1]]), torch.tensor([[1, 0, 1, 1]])
    tokens = Decoder(model).generate(ids, mask, max_new_tokens=6).tokens[0]
    with torch.no_grad():
        logits = model(ids, mask, torch.tensor([[0, *tokens[:-1]]]))[0]
    assert logits.argmax(-1).tolist() == tokens


def test_oracle_leaves_at_the_first_layer_that_agrees():
    model = make_model()
    decoder, prompts = Decoder(model), make_prompts(6)
    crowd = decoder.generate(prompts, exit=Oracle(), max_new_tokens=8, keep_logits=True)
    assert len(set(np.concatenate(crowd.layers).tolist())) >= 3
    for i, prompt in enumerate(prompts):
        lone = decoder.generate(prompt, exit=Oracle(), max_new_tokens=8)
        assert (lone.tokens[0], lone.layers[0]) == (crowd.tokens[i], crowd.layers[i])
        for t, layer in enumerate(crowd.layers[i]):
            before, tokens = crowd.layers[i][:t], crowd.tokens[i][: t + 1]
            at = [int(recompute(model, prompt, tokens, [*before, k])[t].argmax()) for k in range(1, 7)]
            assert at[-1] == tokens[t] and layer == 1 + at.index(at[-1])


def test_decay_is_not_the_full_model_but_the_sentinel_is(decoder, prompts):
    full = decoder.generate(prompts[:50], exit=FullModel(), max_new_tokens=10)
    assert full.mean_layers == 6
    sure = find_measure(lambda state: torch.full((len(state.hidden),), 0.95))
    relaxed = decoder.generate(prompts[:50], exit=Confidence(sure, 1.0, temperature=4, length=10), max_new_tokens=10)
    assert relaxed.mean_layers < 6
    assert {row[0] for row in relaxed.layers} == {6}  # the threshold starts at 1


def test_eos_counts_and_nothing_after_it():
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[1] *= 3
    out = Decoder(model).generate(make_prompts(60), exit=Static(3), max_new_tokens=15)
    ended = [tokens for tokens in out.tokens if 1 in tokens]
    assert len(ended) >= 5 and len({len(tokens) for tokens in ended}) >= 2
    assert all(tokens.index(1) == len(tokens) - 1 for tokens in ended)
    assert all(len(tokens) == len(layers) for tokens, layers in zip(out.tokens, out.layers))
    assert out.count == sum(map(len, out.tokens)) == out.histogram().sum()
    lone = [Decoder(model).generate(p, exit=Static(3), max_new_tokens=15).tokens[0] for p in make_prompts(60)]
    assert lone == list(out.tokens)


def test_checkpointed_caches_are_not_confused(decoder, prompts):
    "Static caches are used again: a long text, then a short one, then two at once."
    rule = Replay([1, 6, 2, 5, 3] * 8)
    long = decoder.generate(prompts[0], exit=rule, max_new_tokens=40, stop_at_eos=False)
    short = decoder.generate(prompts[1], exit=rule, max_new_tokens=7, stop_at_eos=False)
    assert decoder.generate(prompts[0], exit=rule, max_new_tokens=40, stop_at_eos=False).tokens == long.tokens
    streams = [decoder.stream(p, exit=rule, max_new_tokens=7, stop_at_eos=False) for p in prompts[:2]]
    pairs = list(zip(*streams))
    assert [b.token for _, b in pairs] == short.tokens[0]
    assert [a.token for a, _ in pairs] == long.tokens[0][:7]


# ---- rules and measures ----------------------------------------------------------------------------------------------

def test_decay_forms():
    t = np.arange(40)
    np.testing.assert_allclose(decayed_threshold(0.7, t, 4, 40), np.clip(0.63 + 0.1 * np.exp(-4 * t / 40), 0, 1))
    np.testing.assert_allclose(decayed_threshold(0.7, t, 4, 40, "t5x"), 0.63 + 0.07 * np.exp(-4 * t / 40))
    np.testing.assert_allclose(decayed_threshold(0.7, t, 0, 40), 0.73)
    np.testing.assert_allclose(decayed_threshold(0.7, t, None, 40), 0.7)


def test_length_of_the_decay_is_fixed_beforehand():
    rule = Confidence("softmax", 0.5, temperature=4, length=40)
    np.testing.assert_array_equal(rule.thresholds(40)[:10], rule.thresholds(10))
    assert not np.array_equal(Confidence("softmax", 0.5, temperature=4).thresholds(40)[:10], Confidence("softmax", 0.5, temperature=4).thresholds(10))


def test_measures_by_hand(decoder):
    "Each measure of the registry against its definition on the plain model."
    model, prompt = make_model(), make_prompts(1)[0]
    with torch.no_grad():
        memory = model.encode(torch.tensor([prompt]))
        states = [s[0, 0] for s in model.decode_states(torch.tensor([[0]]), memory, torch.ones(1, len(prompt)))]
        chances = torch.stack([torch.softmax(model.head(model.normed(s)), -1) for s in states])
        top = chances.topk(2, -1).values
        want = {"softmax": top[:, 0], "softmax_gap": top[:, 0] - top[:, 1],
                "state": torch.stack([torch.zeros(()), *(torch.cosine_similarity(a, b, 0) for a, b in zip(states[1:], states))]).clamp(0),
                "classifier": torch.stack([torch.sigmoid(model.exit_classifier(model.normed(s)))[0] for s in states])}
    for name, values in want.items():
        for layer in range(measures[name].first_layer, 6):
            got = decoder.generate(prompt, exit=Replay([layer], name), max_new_tokens=1).confidences[0][0]
            assert got == pytest.approx(float(values[layer - 1]), abs=1e-5), (name, layer)


def test_exit_rule_is_at_least(decoder, prompts):
    "Eq. 4: leave at the first layer whose confidence is >= the threshold; ties leave."
    constant = find_measure(lambda state: 0.1 * state.layer * np.ones(len(state.hidden)))
    assert decoder.generate(prompts[:3], exit=Confidence(constant, 0.3), max_new_tokens=4).mean_layers == 3
    assert decoder.generate(prompts[0], exit=Confidence(constant, 0.3), max_new_tokens=4).mean_layers == 3
    assert decoder.generate(prompts[0], exit=Confidence(constant, 0.3, first_layer=5), max_new_tokens=4).mean_layers == 5
    assert decoder.generate(prompts[0], exit=Confidence(constant, 0.99), max_new_tokens=4).mean_layers == 6
    assert decoder.generate(prompts[:3], exit=Confidence("state", 1e-9), max_new_tokens=4).mean_layers == 2
    assert decoder.generate(prompts[:3], exit=Confidence("softmax", 0), max_new_tokens=4).mean_layers == 1


def test_shortlists(decoder, prompts):
    everything = decoder.generate(prompts[:40], exit=Confidence(shortlist(60), 0.5), max_new_tokens=8)
    softmax = decoder.generate(prompts[:40], exit=Confidence("softmax", 0.5), max_new_tokens=8)
    assert everything.tokens == softmax.tokens and everything.layers == softmax.layers
    fixed = Confidence(shortlist(ids=range(60)), 0.5)
    assert decoder.generate(prompts[:40], exit=fixed, max_new_tokens=8).layers == softmax.layers
    few = decoder.generate(prompts[:40], exit=Confidence(shortlist(3), 0.5), max_new_tokens=8)
    assert few.mean_layers <= softmax.mean_layers
    with pytest.raises(ValueError, match="token ids below 60"):
        decoder.generate(prompts[0], exit=Confidence(shortlist(ids=[3, 99]), 0.5))


def test_work_by_hand():
    config = CalmConfig(d_model=2, d_kv=1, d_ff=3, num_heads=2, num_decoder_layers=3, vocab_size=10)
    assert decoding_work(config, [[3, 3]]) == 2 * (3 * 42 + 20)
    assert decoding_work(config, [[1, 3], [2]], "classifier") == 6 * 42 + 3 * 20 + 2 * 8 + (1 + 2 + 2) * 2
    assert predicted_speedup(config, [[3, 3, 3]]) == 1
    assert predicted_speedup(config, [[1] * 5]) == pytest.approx((3 * 42 + 20) / (42 + 20))


# ---- manners ---------------------------------------------------------------------------------------------------------

def test_threads_and_modes_are_put_back(decoder, prompts):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen = []
        rule = Confidence(lambda state: seen.append((torch.get_num_threads(), torch.is_inference_mode_enabled())) or 0.5, 0.9)
        for _ in decoder.stream(prompts[0], exit=rule, max_new_tokens=3):
            assert torch.get_num_threads() == 2 and not torch.is_inference_mode_enabled()
        decoder.generate(prompts[0], exit=rule, max_new_tokens=3)
        with pytest.raises(ZeroDivisionError):
            decoder.generate(prompts[0], exit=Confidence(lambda state: 1 / 0, 0.5))
        assert set(seen) == {(1, True)}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_users_model_is_left_alone():
    model = make_model().train()
    weights = copy.deepcopy(model.state_dict())
    decoder = Decoder(model)
    first = decoder.generate([5, 6, 1], max_new_tokens=6).tokens
    assert model.training
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert decoder.generate([5, 6, 1], max_new_tokens=6).tokens == first


def test_stream_spells(decoder, prompts):
    rule = Confidence("softmax", 0.5)
    pieces = list(decoder.stream(prompts[:3], exit=rule, max_new_tokens=6, spell=lambda ids: " ".join(map(str, ids))))
    out = decoder.generate(prompts[:3], exit=rule, max_new_tokens=6)
    for row in range(3):
        mine = [piece for piece in pieces if piece.row == row]
        assert [piece.token for piece in mine] == out.tokens[row]
        assert [piece.layer for piece in mine] == out.layers[row]
        assert "".join(piece.text for piece in mine) == " ".join(str(t) for t in out.tokens[row] if t != 1)


def test_result(decoder, prompts):
    out = decoder.generate(prompts[:4], exit=Confidence("softmax", 0.5, temperature=4), max_new_tokens=6)
    facts = out.to_dict()
    assert facts["num_layers"] == 6 and facts["histogram"] == out.histogram().tolist()
    assert out.mean_layers == pytest.approx(np.mean(np.concatenate(out.layers)))
    assert str(out.count) in str(out) and "softmax" in str(out)
    frame = out.to_frame()
    assert len(frame) == out.count and frame.layer.tolist() == np.concatenate(out.layers).tolist()
    assert Confidence("softmax", 0.5).to_dict()["measure"] == "softmax"


BAD_PROMPTS = {
    "empty list": [], "empty row": [[5], []], "only padding": torch.zeros(2, 4, dtype=torch.long), "too long": [5] * 513,
    "unknown token": [5, 60], "negative token": [5, -1], "fractions": [5.5, 6.0], "words": "hello", "floats": torch.ones(2, 3),
    "three dimensions": torch.ones(1, 2, 3, dtype=torch.long), "nothing": None, "empty array": np.zeros((0, 3), dtype=int),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts(decoder, name):
    for call in (decoder.generate, decoder.stream):
        with pytest.raises(ValueError, match="input_ids must be"):
            call(BAD_PROMPTS[name])


@pytest.mark.parametrize("call, says", [
    (lambda d: d.generate([5], max_new_tokens=0), "max_new_tokens must be"),
    (lambda d: d.generate([5], max_new_tokens=2.5), "max_new_tokens must be"),
    (lambda d: d.generate([5, 6], [1]), "attention_mask must be"),
    (lambda d: d.generate([5, 6], [2, 1]), "attention_mask must be"),
    (lambda d: d.generate([5, 6], [0, 0]), "at least one token"),
    (lambda d: d.generate([5], exit=0.9), "exit must be an exit rule"),
    (lambda d: d.generate([5], exit=Static(7)), "layers must be"),
    (lambda d: d.generate([5], exit=Replay([7])), "layers must be"),
    (lambda d: d.generate([5], exit=Replay([[1], [2]])), "one sequence or one for each"),
    (lambda d: d.generate([5], exit=Confidence("softmax", 0.5, first_layer=7)), "first_layer must be"),
    (lambda d: d.generate([5], exit=Confidence(lambda state: [0.1, 0.2], 0.5)), "confidence must be"),
    (lambda d: d.generate([5], exit=Confidence(lambda state: math.nan, 0.5)), "confidence must be"),
    (lambda d: Confidence("entropy"), "measure must be one of"),
    (lambda d: Confidence("softmax", 1.01), "threshold must be"),
    (lambda d: Confidence("softmax", -0.01), "threshold must be"),
    (lambda d: Confidence("softmax", math.nan), "threshold must be"),
    (lambda d: Confidence("softmax", 0.5, temperature=-1), "temperature must be"),
    (lambda d: Confidence("softmax", 0.5, temperature=1, form="linear"), "form must be"),
    (lambda d: Confidence("softmax", 0.5, length=0), "length must be"),
    (lambda d: Static(0), "layers must be"),
    (lambda d: Replay([0]), "layers must be"),
    (lambda d: shortlist(1), "size must be"),
    (lambda d: Decoder("model"), "model must be"),
    (lambda d: Decoder(make_model(), threads=0), "threads must be"),
])
def test_bad_input(decoder, call, says):
    with pytest.raises(ValueError, match=says):
        call(decoder)


def test_a_model_without_classifier():
    model = make_model()
    model.exit_classifier = None
    with pytest.raises(ValueError, match="no trained exit classifier"):
        Decoder(model).generate([5], exit=Confidence("classifier", 0.5))


@pytest.mark.parametrize("rule", [FullModel(), Static(2), Oracle(), Confidence("softmax", 0.5), Confidence("state", 0.5)])
@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6], [7]]])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_overflowed_weights(rule, prompt, poison):
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = poison
    with pytest.raises(ValueError, match="logits must be finite"):
        Decoder(model).generate(prompt, exit=rule, max_new_tokens=3)


def test_check_prompts_cuts_common_padding():
    ids, mask = check_prompts([[0, 0, 5, 6, 0], [0, 7, 8, 0, 0]], None, CalmConfig(vocab_size=10), 2)
    assert ids.tolist() == [[0, 5, 6], [7, 8, 0]] and mask.tolist() == [[False, True, True], [True, True, False]]


def test_without_the_short_cuts_of_a_cpu(prompts):
    "The way a GPU takes: no lone row, no Python numbers inside a step."
    quick, plain = Decoder(make_model()), Decoder(make_model())
    plain.engine.quick = False
    for rule in (FullModel(), Oracle(), Confidence("softmax", 0.5), Confidence("classifier", 0.5, temperature=2)):
        one, other = (d.generate(prompts[0], exit=rule, max_new_tokens=10, keep_logits=True) for d in (quick, plain))
        assert (one.tokens, one.layers) == (other.tokens, other.layers) and worst(one.logits, other.logits) < 5e-5  # of logits up to 12


@pytest.mark.parametrize("rule", [Confidence("softmax", 0.5), Confidence("state", 0.9)])
def test_a_row_waits_its_turn_and_is_not_forgotten(decoder, prompts, rule):
    "Whatever order the layers are run in, the result is the same."
    import databloom.calm_decoding as module

    wanted, chosen = decoder.generate(prompts[:30], exit=rule, max_new_tokens=10), module.next_layer
    try:
        for order in (lambda waiting, *_: int(waiting.argmax()), lambda waiting, *_: int(np.flatnonzero(waiting)[-1]), lambda waiting, *_: int(np.flatnonzero(waiting)[0])):
            module.next_layer = order
            found = decoder.generate(prompts[:30], exit=rule, max_new_tokens=10)
            assert (found.tokens, found.layers) == (wanted.tokens, wanted.layers)
    finally:
        module.next_layer = chosen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu(prompts):
    model = make_model()
    here, there = Decoder(model), Decoder(model, device="cuda")
    rule = Replay(np.random.default_rng(0).integers(1, 7, (20, 8)).tolist())
    one, other = (d.generate(prompts[:20], exit=rule, max_new_tokens=8, keep_logits=True) for d in (here, there))
    assert one.tokens == other.tokens and worst(one.logits, other.logits) < 1e-3
    assert there.generate(prompts[0], max_new_tokens=8).tokens == here.generate(prompts[0], max_new_tokens=8).tokens
