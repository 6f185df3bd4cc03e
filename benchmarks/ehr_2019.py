"""EHR-Safe on PhysioNet 2019, hourly: time, memory and fidelity at ten thousand patients.

    DATABLOOM_DATA=... python benchmarks/ehr_2019.py --patients 10000 --json ehr_2019.json
"""
import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np

from databloom.cohort_readers import read_physionet2019
from databloom.core import data_folder, plain
from databloom.ehr_safe import EhrSafe
from databloom.fidelity import compare


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patients", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, help="passes over the patients; default: the model's own choice")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    cohort = read_physionet2019(data_folder("icu"))
    real = cohort.select(np.random.default_rng(0).choice(cohort.ids, given.patients, replace=False))
    del cohort
    print(real, flush=True)
    model = EhrSafe(epochs=given.epochs, random_state=0).fit(real)
    began, cpu = time.perf_counter(), time.process_time()
    made = model.sample(given.patients, random_state=0)
    sampled = {"sample wall s": time.perf_counter() - began, "sample cpu s": time.process_time() - cpu}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    ever = [c.temporal.groupby("id")["SepsisLabel"].max().mean() for c in (real, made)]
    steps = made.temporal.groupby("id")[made.schema.time].diff().dropna()
    result = {"patients": len(real), "rows": len(real.temporal), "columns": len(real.schema.static) + len(real.schema.temporal), "fit wall s": model.fitted["seconds"],
              "fit cpu s": model.fitted["cpu seconds"], "peak GB": peak, **sampled, "septic": ever, "order": int((steps <= 0).sum()), "longest stay": [int(c.lengths.max()) for c in (real, made)]}
    given.json.write_text(json.dumps(plain(result)))              # before the judge, which takes its own time
    found = compare(real, made, permutations=19, envelope=20, random_state=0)
    result |= {g: found.group(g).get("mean") for g in ("ks", "missing", "length", "correlation", "lag-1")}
    given.json.write_text(json.dumps(plain(result)))
    print(json.dumps(plain(result), indent=1))


if __name__ == "__main__":
    main()
