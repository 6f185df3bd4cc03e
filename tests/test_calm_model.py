"CALM's model: equality with transformers, checkpoints, losses, exact resume, the classifier."
import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from databloom.calm_model import (  # noqa: E402
    CalmConfig, CalmT5, epoch_batches, evaluate_layers, exit_examples, exit_loss, layer_losses, layer_weights, load_model, make_batch, mask_bias,
    new_model, relative_buckets, sampled_weights, save_model, stay_f1, train, train_classifier,
)

torch.set_num_threads(1)
TINY = CalmConfig(d_model=16, d_kv=8, d_ff=24, num_heads=2, num_encoder_layers=1, num_decoder_layers=3, vocab_size=20)


def rows(count, seed=0):
    rng = np.random.default_rng(seed)
    texts = [rng.integers(4, 20, size=rng.integers(1, 6)).tolist() for _ in range(count)]
    return [(text + [1], text[::-1] + [1]) for text in texts]


@pytest.mark.parametrize("tied, bend", [(True, "relu"), (True, "gated-gelu"), (False, "gated-gelu"), (False, "gated-silu"), (False, "relu")])
@pytest.mark.parametrize("depths", [(1, 4), (3, 2)])
def test_logits_equal_transformers(tmp_path, tied, bend, depths):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=61, d_model=24, d_kv=10, d_ff=40, num_layers=depths[0], num_decoder_layers=depths[1], num_heads=3, feed_forward_proj=bend,
        tie_word_embeddings=tied, relative_attention_num_buckets=16, relative_attention_max_distance=24, decoder_start_token_id=0)).eval()
    for weight in theirs.parameters():  # far from the initial values, where everything is nearly linear
        weight.data = torch.randn_like(weight) * 0.3
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    assert (ours.config.num_encoder_layers, ours.config.num_decoder_layers) == depths
    prompts, answers = torch.randint(2, 61, (4, 40)), torch.randint(2, 61, (4, 35))
    mask = torch.ones_like(prompts)
    mask[1, 25:], mask[2, :9], mask[3, 1:] = 0, 0, 0
    with torch.no_grad():
        wanted = theirs(input_ids=prompts, attention_mask=mask, decoder_input_ids=answers).logits
        assert (ours(prompts, mask, answers) - wanted).abs().max() <= 1e-4
        assert torch.equal(ours.layer_logits(prompts, mask, answers)[-1], ours(prompts, mask, answers))


@pytest.mark.parametrize("scaled", [True, False])
def test_untied_head_of_a_file_that_says_tied(tmp_path, scaled):
    "transformers 5 writes tie_word_embeddings: true for all; the file's own head and scale decide."
    from safetensors.torch import load_file, save_file

    model = new_model(TINY, 0).eval()
    save_model(model, tmp_path)
    description = {"model_type": "t5", "num_layers": 1, "num_decoder_layers": 3, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "vocab_size": 20,
                   "feed_forward_proj": "gated-gelu", "tie_word_embeddings": True, "scale_decoder_outputs": scaled}
    (tmp_path / "config.json").write_text(json.dumps(description))
    batch = make_batch(rows(3), TINY)
    with torch.no_grad():
        wanted = model(batch.input_ids, batch.attention_mask, batch.decoder_input_ids)
        found = load_model(tmp_path)(batch.input_ids, batch.attention_mask, batch.decoder_input_ids)
        assert torch.allclose(found, wanted * (TINY.d_model**-0.5 if scaled else 1), atol=1e-5)
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, tmp_path / "model.safetensors")
        assert torch.equal(load_model(tmp_path).lm_head.weight, model.shared.weight)


def test_sharded_checkpoints_and_older_configs(tmp_path):
    from safetensors.torch import load_file, save_file

    model = new_model(TINY, 0)
    save_model(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    (tmp_path / "model.safetensors").unlink()
    for i, part in enumerate((names[:10], names[10:]), 1):
        save_file({name: tensors[name] for name in part}, tmp_path / f"model-0000{i}-of-00002.safetensors")
    again = load_model(tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("description, words", [
    ({"model_type": "bart"}, "architecture"), ({"model_type": "umt5"}, "umt5"), ({"format": "databloom-calm-99"}, "architecture"),
    ({"format": "databloom-calm-1", "d_model": 32}, "weights in"), ({"format": "databloom-calm-1", "depth": 3}, "config.json"), ([], "object"),
])
def test_checkpoint_of_another_kind_is_one_clear_error(tmp_path, description, words):
    save_model(new_model(TINY, 0), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=words):
        load_model(tmp_path)


def test_broken_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="folder"):
        load_model(tmp_path / "nowhere")
    save_model(new_model(TINY, 0), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(ValueError, match="safetensors"):
        load_model(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_own_checkpoint_keeps_everything(tmp_path, tied):
    model = new_model(CalmConfig(**{**TINY.to_dict(), "tie_word_embeddings": tied}), 3)
    model.exit_classifier = torch.nn.Linear(16, 1)
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    assert again.config == model.config
    assert set(again.state_dict()) == set(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    assert (again.lm_head.weight is again.shared.weight) == tied


def test_buckets_equal_transformers():
    attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    distance = torch.arange(300)[None] - torch.arange(300)[:, None]
    for both, buckets, most in [(True, 32, 128), (False, 32, 128), (True, 16, 20), (False, 8, 50)]:
        assert torch.equal(relative_buckets(300, 300, both, buckets, most), attention._relative_position_bucket(distance, both, buckets, most))


def test_mask_makes_padding_exactly_invisible():
    model = new_model(TINY, 0).eval()
    ids = torch.tensor([[5, 6, 7, 1]])
    noise = torch.tensor([[5, 6, 7, 1, 9, 12]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    with torch.no_grad():
        assert torch.allclose(model.encode(ids, torch.ones_like(ids))[0], model.encode(noise, mask)[0, :4], atol=1e-6)
    assert (torch.softmax(mask_bias(mask.bool())[0], -1)[4:] == 0).all()


def test_layer_weights_and_their_unbiased_samples():
    assert layer_weights("linear", 4).tolist() == [0.1, 0.2, 0.3, 0.4]
    assert layer_weights("last", 3).tolist() == [0, 0, 1] and layer_weights("uniform", 1).tolist() == [1]
    rng, weights = np.random.default_rng(0), layer_weights("uniform", 5)
    draws = np.array([sampled_weights(weights, 1, rng) for _ in range(20_000)])
    assert ((draws > 0).sum(1) == 2).all()
    assert np.allclose(draws.mean(0), weights, atol=0.01)
    assert sampled_weights(weights, 0, rng).tolist() == [0, 0, 0, 0, 0.2]


def test_losses_ignore_padding():
    model = new_model(TINY, 0).eval()
    some = rows(5)
    with torch.no_grad():
        alone = [layer_losses(model, make_batch([row], TINY)).numpy() * len(row[1]) for row in some]
        together = layer_losses(model, make_batch(some, TINY)).numpy()
    assert np.allclose(sum(alone) / sum(len(row[1]) for row in some), together, atol=1e-5)
    assert np.allclose(evaluate_layers(model, some, batch_size=2)["loss"], together, atol=1e-5)


def test_every_row_once_an_epoch():
    seen = np.concatenate(epoch_batches(103, 10, 4, 0))
    assert sorted(seen) == list(range(103))
    assert not np.array_equal(seen, np.concatenate(epoch_batches(103, 10, 4, 1)))


@pytest.mark.parametrize("breaks", [[7], [5, 6, 19]])
def test_resumed_training_equals_one_without_a_break(tmp_path, breaks):
    config = CalmConfig(**{**TINY.to_dict(), "dropout_rate": 0.2})
    options = dict(steps=24, batch_size=8, valid_every=6, warmup=4, sampled_layers=1, random_state=7)
    whole, parts = new_model(config, 0), None
    story = train(whole, rows(50), rows(10, 1), **options)
    for stop in [*breaks, None]:
        parts = new_model(config, 0)
        again = train(parts, rows(50), rows(10, 1), folder=tmp_path, stop_at=stop, **options)
        assert again.finished == (stop is None)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters()))
    assert (again.losses, again.valid, again.words) == (story.losses, story.valid, story.words)
    done = train(new_model(config, 1), rows(50), rows(10, 1), folder=tmp_path, **options)  # nothing left to do
    assert done == again


def test_training_refuses_what_does_not_fit(tmp_path):
    model, options = new_model(TINY, 0), dict(steps=3, batch_size=4, random_state=0)
    with pytest.raises(ValueError, match="rows must be"):
        train(model, [], **options)
    with pytest.raises(ValueError, match="vocabulary"):
        train(model, [([5], [20])], **options)
    with pytest.raises(ValueError, match="weights must be one of"):
        train(model, rows(5), weights="square", **options)
    train(model, rows(5), folder=tmp_path, **options)
    with pytest.raises(ValueError, match="the same learning_rate"):
        train(new_model(TINY, 0), rows(5), folder=tmp_path, learning_rate=1e-4, **options)
    wider = new_model(CalmConfig(**{**TINY.to_dict(), "d_ff": 25}), 0)
    with pytest.raises(ValueError, match="folder"):
        train(wider, rows(5), folder=tmp_path, **options)
    with pytest.raises(ValueError, match="loss became"):
        with torch.no_grad():
            model.lm_head.weight[0, 0] = math.nan
        train(model, rows(5), **options)


def test_training_repeats_with_its_seed():
    a, b = new_model(TINY, 1), new_model(TINY, 1)
    train(a, rows(30), steps=5, random_state=2)
    train(b, rows(30), steps=5, random_state=2)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))


def test_geometric_loss_is_the_probability_of_leaving_at_the_first_agreement():
    rng = np.random.default_rng(0)
    logits, agree = torch.from_numpy(rng.normal(size=(50, 4))).float(), torch.from_numpy(rng.random((50, 4)) < 0.4)
    wanted = 0.0
    for row, truth in zip(torch.sigmoid(logits).tolist(), agree.tolist()):
        first = truth.index(True) if True in truth else len(truth)
        wanted -= sum(math.log(1 - c) for c in row[:first]) + (math.log(row[first]) if first < len(truth) else 0)
    assert math.isclose(exit_loss(logits, agree, "geometric").item(), wanted / 50, rel_tol=1e-5)


def test_f1_of_staying():
    from sklearn.metrics import f1_score

    rng = np.random.default_rng(1)
    logits, agree = rng.normal(size=(200, 3)), rng.random((200, 3)) < 0.7
    found = stay_f1(torch.from_numpy(logits), torch.from_numpy(agree))
    assert np.allclose(found, [f1_score(~agree[:, i], logits[:, i] < 0) for i in range(3)])
    assert stay_f1(torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool)) == (1.0,)


@pytest.mark.parametrize("loss", ["independent", "geometric"])
def test_classifier_learns_and_leaves_the_model_alone(loss):
    model = new_model(TINY, 0)
    train(model, rows(400), steps=60, warmup=10, random_state=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = train_classifier(model, rows(200, 1), rows(60, 2), loss=loss, steps=100, random_state=0)
    states, agree = exit_examples(model, rows(60, 2))
    assert states.shape[1:] == (2, 16) and 0 < agree.float().mean() < 1
    assert result.valid_loss < exit_loss(torch.zeros(agree.shape), agree, loss).item()
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in before)
    assert model.exit_classifier.weight.shape == (1, 16)
    with pytest.raises(ValueError, match="one decoder layer"):
        train_classifier(new_model(CalmConfig(**{**TINY.to_dict(), "num_decoder_layers": 1}), 0), rows(5), rows(5))


def test_weighted_loss_teaches_the_lower_layers():
    some, valid = rows(600), rows(60, 5)
    found = {}
    for weights in ("linear", "last"):
        model = new_model(CalmConfig(d_model=32, d_kv=16, d_ff=64, num_heads=2, num_encoder_layers=1, num_decoder_layers=4, vocab_size=20), 0)
        train(model, some, steps=70, warmup=20, weights=weights, random_state=0)
        found[weights] = evaluate_layers(model, valid)
    assert found["linear"]["agreement"][0] > found["last"]["agreement"][0] + 0.1
    assert found["linear"]["loss"][0] < found["last"]["loss"][0]


def test_meta_shapes():
    assert isinstance(new_model(TINY), CalmT5)
    with pytest.raises(ValueError, match="multiple of 4"):
        CalmConfig(relative_attention_num_buckets=6)
    with pytest.raises(ValueError, match="dropout_rate"):
        CalmConfig(dropout_rate=1.0)
