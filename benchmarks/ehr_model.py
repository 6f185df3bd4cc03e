"""EHR-Safe on the bench of PhysioNet 2012, seed by seed, with ablations and the three GANs.

    DATABLOOM_DATA=... python benchmarks/ehr_model.py --seeds 0 1 2 --json ehr_model.json
    DATABLOOM_DATA=... python benchmarks/ehr_model.py --seeds 0 --what ablation baselines controls --json ehr_rest.json

Every line of the JSON is one model on one seed; a model that is already in the file is not run again.
Fidelity is scored on 10,000 synthetic patients, utility on 1,500, privacy on 10,000.
"""
import argparse
import json
import time
from pathlib import Path

import numpy as np

from databloom.cohorts import Cohort
from databloom.core import plain
from databloom.ehr_baselines import SequenceGan, baselines
from databloom.ehr_bench import physionet2012_bench
from databloom.ehr_safe import EhrSafe
from databloom.fidelity import compare, features, shuffled, utility
from databloom.privacy_attacks import attribute_inference, membership, nearest, scaled

ablations = {"no stochastic normalisation": dict(normalize="minmax"), "no categorical encoding": dict(encode_categories=False), "no masks": dict(masks=False)}
groups = ("ks", "tv", "missing", "length", "correlation", "lag-1")


def fidelity_of(real, made):
    found = compare(real, made, permutations=19, envelope=40, random_state=0)
    return {**{g: found.group(g).get("mean") for g in groups}, "ks max": found.group("ks").get("max"), "inside": found.inside(),
            "real-real": {g: found.group(g).get("typical") for g in groups}}


def codes(cohorts, name):
    levels = sorted({v for v in cohorts[0].labels(name) if v is not None})
    return tuple(np.array([levels.index(v) if v in levels else -1 for v in c.labels(name)], float) for c in cohorts)


def privacy_of(bench, made, seed):
    "Scores of members and others, the same with 5 % copies planted, and attribute inference."
    people = (bench.training, bench.holdout, made)
    train, other, synthetic = scaled(*[features(c, bench.training).matrix for c in people])
    near = [nearest(t, synthetic, 1)[0][:, 0] for t in (train, other)]
    copies = train[np.random.default_rng(seed).choice(len(train), round(0.05 * len(train)), replace=False)]
    planted = [np.minimum(n, nearest(t, copies, 1)[0][:, 0]) for n, t in zip(near, (train, other))]
    inferred = {}
    for name in ("Gender", "ICUType"):
        known = tuple(scaled(*[features(c, bench.training, without=[name]).matrix for c in people]))
        c = attribute_inference(name, known, codes(people, name))
        inferred[name] = {"advantage": c.difference, "low": c.low, "high": c.high}
    near, planted = [np.round(n, 3) for n in near], [np.round(n, 3) for n in planted]
    return {"near": near, "planted": planted, "ids": [bench.training.ids, bench.holdout.ids], "inferred": inferred}


def redrawn(cohort, n, seed):
    "Patients of a cohort drawn again, with replacement: what a generator of exactly the training patients' law would make."
    who = np.random.default_rng(seed).integers(0, len(cohort), n)
    length = cohort.lengths
    first = np.cumsum(length) - length
    rows = np.concatenate([np.arange(first[i], first[i] + length[i]) for i in who])
    static, temporal = cohort.static.iloc[who].reset_index(drop=True), cohort.temporal.iloc[rows].reset_index(drop=True)
    static["id"], temporal["id"] = np.arange(1, n + 1), np.repeat(np.arange(1, n + 1), length[who])
    return Cohort(cohort.schema, static, temporal)


def judged(bench, seed, sample, raw=None, privacy=True):
    "Everything the bench asks about a sampler: sample(n, seed) -> Cohort."
    began = time.perf_counter()
    made = sample(10_000, seed)
    out = {"sample s": time.perf_counter() - began, "calibrated" if raw else "fidelity": fidelity_of(bench.training, made),
           "rates": [float(np.nanmean(c.numbers("In-hospital_death"))) for c in (bench.training, made)],
           "order": int((made.temporal.groupby("id")["step"].diff().dropna() <= 0).sum()),
           "dtypes": int((made.temporal.dtypes != bench.training.temporal.dtypes).sum() + (made.static.dtypes != bench.training.static.dtypes).sum())}
    if raw:
        out["raw"] = fidelity_of(bench.training, raw(10_000, seed))
    used = utility(bench.training, sample(1500, seed + 10), bench.test, draws=200)
    out["utility"] = {m["model"]: m for m in used.models}
    return {**out, **(privacy_of(bench, made, seed) if privacy else {})}


def tasks(what, seed, seconds, keep):
    "Names and functions (bench -> result); models are kept in a folder, if one is given, and taken from it."
    def safe(name, **choices):
        def run(bench):
            folder = None if keep is None else keep / f"{name} {seed}".replace(" ", "-")
            if folder is not None and (folder / "model.json").is_file():
                model = EhrSafe.load(folder)
            else:
                model = EhrSafe(random_state=seed, **choices).fit(bench.training)
                folder is None or model.save(folder)
            about = {"fit wall s": model.fitted["seconds"], "fit cpu s": model.fitted.get("cpu seconds")}
            return {**about, **judged(bench, seed, lambda n, s: model.sample(n, random_state=s), lambda n, s: model.sample(n, random_state=s, calibrate=False), not choices)}
        return run

    def gan(kind):
        def run(bench):
            model = SequenceGan(kind, seconds=seconds, random_state=seed).fit(bench.training)
            return {"steps": model.steps_done, "fit wall s": model.seconds_spent, **judged(bench, seed, lambda n, s: model.sample(n, random_state=s))}
        return run

    def control(make):
        return lambda bench: judged(bench, seed, lambda n, s: make(bench, s), privacy=False)

    if "model" in what:
        yield "EHR-Safe", safe("EHR-Safe")
    if "ablation" in what:
        yield from ((name, safe(name, **choices)) for name, choices in ablations.items())
    if "baselines" in what:
        yield from ((kind, gan(kind)) for kind in baselines)
    if "controls" in what:
        yield "copy of the training set", control(lambda b, s: b.training)
        yield "training patients drawn again", control(lambda b, s: redrawn(b.training, 1500, s))
        yield "columns shuffled", control(lambda b, s: shuffled(b.training, random_state=s))
        yield "second real sample", control(lambda b, s: b.second)


def pooled(results, which, model="EHR-Safe"):
    "Membership of a model pooled over seeds, by patient."
    runs = [r for r in results if r["model"] == model]
    members, others = (np.concatenate([-np.array(r[which][side]) for r in runs]) for side in (0, 1))
    ids = [np.concatenate([r["ids"][side] for r in runs]) for side in (0, 1)]
    m = membership(members, others, member_ids=ids[0], nonmember_ids=ids[1])
    return {"auc": m.auc, "low": m.auc_low, "high": m.auc_high, "p": m.p_value}


def publish(paths, out):
    "One file of all results: EHR-Safe's distances are kept, those of the others become their membership AUC."
    results = [r for path in paths for r in json.loads(path.read_text())]
    for r in results:
        if r["model"] != "EHR-Safe" and "near" in r:
            r["membership"] = {which: pooled([r], which, r["model"]) for which in ("near", "planted")}
            for name in ("near", "planted", "ids"):
                del r[name]
    out.write_text(json.dumps(plain(results)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--what", nargs="+", default=["model"], choices=["model", "ablation", "baselines", "controls"])
    parser.add_argument("--seconds", type=float, default=120.0, help="training time of each baseline")
    parser.add_argument("--json", type=Path, required=True, help="results so far, added to")
    parser.add_argument("--keep", type=Path, help="folder to keep fitted models in")
    parser.add_argument("--only", help="the one model of these groups to run, by its name in the results")
    parser.add_argument("--publish", type=Path, nargs="+", help="only join these files of results, such as the peers', into --json")
    given = parser.parse_args()
    if given.publish:
        return publish(given.publish, given.json)
    results = json.loads(given.json.read_text()) if given.json.is_file() else []
    for seed in given.seeds:
        bench = physionet2012_bench(seed)
        for name, run in tasks(given.what, seed, given.seconds, given.keep):
            if given.only not in (None, name) or any(r["model"] == name and r["seed"] == seed for r in results):
                continue
            results.append(plain({"model": name, "seed": seed, **run(bench)}))
            given.json.write_text(json.dumps(results))
            shown = {k: v for k, v in results[-1].items() if k not in ("near", "planted", "ids")}
            print(json.dumps(shown, indent=1), flush=True)
    if any(r["model"] == "EHR-Safe" for r in results):
        print("membership, pooled:", pooled(results, "near"), "with 5 % copies:", pooled(results, "planted"))


if __name__ == "__main__":
    main()
