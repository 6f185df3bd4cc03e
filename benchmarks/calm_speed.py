"""Early-exit decoding against the clock.

Random weights (d 256, 8 decoder layers, vocabulary 1,001), one thread, the exit layers of a trained model replayed
(`calm_exits.json`). In every round each contestant has its turn, in random order; what is reported is the median over
rounds of the ratio of two times of the same round, so that a machine that is busy for a while slows both.

A turn is several texts in a row, as a decoder that serves with one rule would have them. The first finds the caches of
the processor full of another contestant's weights; it is timed by itself and shown as "the first text of a turn". The
times that count are the means of the others.

    python benchmarks/calm_speed.py [--rounds 15] [--no-economize] [--json out.json]

`calm_speed.json` beside this file is a kept run; the chapter `calm_decoding` shows it.

`economize` (PyPI) is put into a temporary folder with pip, without its dependencies, unless it is installed already.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from databloom.calm_decoding import Decoder, FullModel, Replay, predicted_speedup
from databloom.calm_model import CalmConfig, new_model

CONFIG = CalmConfig(d_model=256, d_kv=64, d_ff=512, num_heads=4, num_encoder_layers=2, num_decoder_layers=8, vocab_size=1001)
PROMPT, TOKENS, ROWS, TEXTS = 16, 32, 32, 6
MEASURES = (None, "classifier", "state", "softmax")


def exit_layers():
    "Recorded exit layers, 32 tokens a row."
    return json.loads(Path(__file__).with_name("calm_exits.json").read_text())["layers"]


def ours(model, prompts, exits):
    "name -> a call that decodes TOKENS tokens of each prompt."
    decoder = Decoder(model)
    rules = {"full": FullModel()} | {name_of(measure): Replay(exits, measure) for measure in MEASURES}
    return {name: lambda rule=rule: decoder.generate(prompts, exit=rule, max_new_tokens=TOKENS, stop_at_eos=False).tokens
            for name, rule in rules.items()}


def ratio_of(exits):
    "How many times fewer layers."
    return CONFIG.num_decoder_layers / np.mean(exits)


def name_of(measure):
    return "exits" if measure is None else f"exits, {measure} paid"


def transformers_t5(model, prompt):
    "The same weights in `transformers`; a call that generates TOKENS tokens."
    import transformers

    config = transformers.T5Config(
        vocab_size=CONFIG.vocab_size, d_model=CONFIG.d_model, d_kv=CONFIG.d_kv, d_ff=CONFIG.d_ff, num_heads=CONFIG.num_heads,
        num_layers=CONFIG.num_encoder_layers, num_decoder_layers=CONFIG.num_decoder_layers, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, decoder_start_token_id=0, dropout_rate=0.0)
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("exit_classifier")}
    theirs.lm_head.weight = torch.nn.Parameter(weights["lm_head.weight"].clone())  # transformers 5 ties it whatever the configuration says
    weights |= {f"{stack}.embed_tokens.weight": weights["shared.weight"] for stack in ("encoder", "decoder")}
    theirs.load_state_dict(weights)
    theirs.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])

    def call():
        # A cache that grows by itself: with the default one `generate` fails on unequal depths.
        cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
        with torch.inference_mode():
            return theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, past_key_values=cache)

    return call


def find_economize():
    "The package, from a temporary folder when it is not installed."
    try:
        return importlib.import_module("economize")
    except ImportError:
        folder = tempfile.mkdtemp(prefix="economize-")
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, "economize==0.3.2"], check=True)
        sys.path.append(folder)
        return importlib.import_module("economize")


def economize_llama(prompt, exits):
    "A decoder-only model of the same shape with economize's CALM, its confidence replaced by the recorded exits."
    economize = find_economize()
    import transformers
    from economize.techniques.dynamic_depth.calm import CONFIDENCE_MEASURES, CalmConfig as TheirConfig, ConfidenceMeasure

    class Recorded(ConfidenceMeasure):
        step = 0

        def __call__(self, index, x, out):
            if index == 1:
                Recorded.step += 1
            leave = index >= exits[min(Recorded.step, len(exits) - 1)]
            return torch.full(out.shape[:2], 1.0 if leave else 0.0)

    CONFIDENCE_MEASURES.register("recorded")(Recorded)
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=CONFIG.vocab_size, hidden_size=CONFIG.d_model, intermediate_size=CONFIG.d_ff, num_hidden_layers=CONFIG.num_decoder_layers,
        num_attention_heads=CONFIG.num_heads, num_key_value_heads=CONFIG.num_heads, max_position_embeddings=256, eos_token_id=None,
        bos_token_id=None, pad_token_id=0)).eval()
    model = economize.apply(base, TheirConfig(confidence="recorded", threshold=0.5))
    ids = torch.tensor([prompt])

    def call():
        Recorded.step = 0  # the first token comes from the prompt's own pass
        with torch.inference_mode():
            return model.decode(ids, TOKENS)

    result = call()
    assert result.tokens.numel() in (TOKENS, PROMPT + TOKENS), result.tokens.shape
    return call


def measure(contestants, rounds, texts=TEXTS):
    "Seconds of each contestant in each round: a text of its turn but the first, and the first; the first round is thrown away."
    rng, steady, first = np.random.default_rng(0), {name: [] for name in contestants}, {name: [] for name in contestants}
    for _ in range(rounds + 1):
        for name in rng.permutation(list(contestants)):
            times = []
            for _ in range(texts):
                start = time.perf_counter()
                contestants[name]()
                times.append(time.perf_counter() - start)
            first[name].append(times[0])
            steady[name].append(np.mean(times[1:]))
    return tuple({name: np.array(seconds[1:]) for name, seconds in found.items()} for found in (steady, first))


def ratio(times, slow, fast):
    "Median over rounds of how many times `fast` is faster, with the quartiles."
    low, middle, high = np.quantile(times[slow] / times[fast], [0.25, 0.5, 0.75])
    return {"median": float(middle), "quartiles": [float(low), float(high)]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-economize", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()  # how busy the machine was, before and after
    warnings.filterwarnings("ignore", category=FutureWarning)
    rng, recorded, goals = np.random.default_rng(0), exit_layers(), []
    model = new_model(CONFIG, random_state=0).eval()
    torch.manual_seed(0)
    model.exit_classifier = torch.nn.Linear(CONFIG.d_model, 1)

    def goal(text, reached, wanted):
        goals.append({"goal": text, "reached": round(reached["median"], 3), "quartiles": reached["quartiles"], "wanted": wanted})
        print(f"  {text:66} {reached['median']:6.2f} [{reached['quartiles'][0]:.2f}, {reached['quartiles'][1]:.2f}]  wanted >= {wanted:.2f}")

    # batch 1: a row whose mean is near the mean of all
    one = recorded[int(np.argmin([abs(np.mean(row) - np.mean(recorded)) for row in recorded]))]
    prompt = [*rng.integers(2, CONFIG.vocab_size, PROMPT - 1).tolist(), 1]
    contestants = ours(model, prompt, one)
    contestants["transformers"] = transformers_t5(model, prompt)
    same = contestants["full"]()[0] == contestants["transformers"]()[0, 1:].tolist()
    if not options.no_economize:
        contestants["economize"] = economize_llama(prompt, one)
    times, first = measure(contestants, options.rounds)
    layers = ratio_of(one)
    print(f"\nbatch 1: mean exit {np.mean(one):.2f} of {CONFIG.num_decoder_layers} layers, ratio of layers {layers:.2f}; "
          f"the full decoder's tokens are those of transformers: {same}")
    for name, seconds in times.items():
        print(f"  {name:24} {np.median(seconds) / TOKENS * 1e3:7.3f} ms a token (median), {seconds.min() / TOKENS * 1e3:7.3f} (best)")
    for m in MEASURES:
        found, predicted = ratio(times, "full", name_of(m)), predicted_speedup(CONFIG, [one], m)
        print(f"  speed-up with {name_of(m):26} {found['median']:.2f}, predicted from the work {predicted:.2f}")
        scaled = {"median": found["median"] / layers, "quartiles": [q / layers for q in found["quartiles"]]}
        goal(f"speed-up / layer ratio, {name_of(m)}", scaled, 0.8)
        print(f"    of the first text of a turn: {ratio(first, 'full', name_of(m))['median'] / layers:.2f}")
    goal("full decoder / transformers", ratio(times, "transformers", "full"), 2.5)
    for m in MEASURES:
        goal(f"{name_of(m)} / transformers", ratio(times, "transformers", name_of(m)), 5.0)
    if "economize" in times:
        goal("exits / economize with the same exits", ratio(times, "economize", name_of(None)), 3.0)

    # batch 32
    prompts, many = rng.integers(2, CONFIG.vocab_size, (ROWS, PROMPT)), recorded[:ROWS]
    times32, first32 = measure(ours(model, prompts, many), max(3, options.rounds // 2))
    layers = ratio_of(many)
    print(f"\nbatch {ROWS}: mean exit {np.mean(many):.2f}, ratio of layers {layers:.2f}")
    for name, seconds in times32.items():
        print(f"  {name:24} {np.median(seconds) / TOKENS * 1e3:7.3f} ms a step")
    for m in MEASURES:
        found = ratio(times32, "full", name_of(m))
        goal(f"batch {ROWS}: speed-up / layer ratio, {name_of(m)}",
             {"median": found["median"] / layers, "quartiles": [q / layers for q in found["quartiles"]]}, 0.6)
        print(f"    of the first batch of a turn: {ratio(first32, 'full', name_of(m))['median'] / layers:.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps({
            "goals": goals, "same_tokens": same, "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "load": [load, os.getloadavg()],
            "first_of_a_turn": {"batch 1": round(ratio(first, "full", "exits")["median"] / ratio_of(one), 3),
                                "batch 32": round(ratio(first32, "full", "exits")["median"] / ratio_of(many), 3)},
            "seconds": {"batch 1": {k: v.tolist() for k, v in times.items()}, "batch 32": {k: v.tolist() for k, v in times32.items()}}}, indent=1))


if __name__ == "__main__":
    main()
