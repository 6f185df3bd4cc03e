"""Speed and memory of chapter 03, beside MAPIE on the same table of losses.

Run: python benchmarks/ltt.py [--rows 20000] [--settings 100] [--repeat 5] [--json FILE]
Every case runs in a process of its own, on one thread; times are medians, memory is the growth of the peak resident size.
MAPIE comes with the package's `dev` extra. Its betting bound needs rows x settings x settings numbers, so it is given `--mapie-rows` of the rows where
memory is short, and then both packages are compared on those rows.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


def table(rows, settings):
    "Graded losses whose risk grows from setting to setting."
    import numpy as np

    return np.random.default_rng(0).beta(0.5, 4.5, (rows, settings)) * np.linspace(0.1, 2, settings).clip(0, 1)


def ours(method, test="fixed_sequence"):
    from databloom.ltt_calibration import learn_then_test

    return lambda losses: len(learn_then_test(losses, 0.1, 0.05, method=method, test=test).valid)


def mapie_hb(test):
    import numpy as np
    from mapie.risk_control._base_controller import ltt_procedure

    def run(losses):
        size = np.full((1, losses.shape[1]), len(losses))
        return len(ltt_procedure(losses.mean(axis=0)[None], np.array([[0.1]]), 0.05, size, False, test)[0][0])

    return run


def mapie_wsr(losses):
    import numpy as np
    from mapie.risk_control.methods import get_r_hat_plus

    bounds = get_r_hat_plus(losses, np.linspace(0.002, 0.2, losses.shape[1]), "rcps", "wsr", 0.05, 0.25)[1]
    return int((bounds <= 0.1).sum())


CASES = {
    "databloom, betting, fixed sequence": lambda: ours("wsr"),
    "databloom, betting, Holm": lambda: ours("wsr", "holm"),
    "databloom, Hoeffding-Bentkus, fixed sequence": lambda: ours("hoeffding_bentkus"),
    "MAPIE, betting bound (RCPS)": lambda: mapie_wsr,
    "MAPIE, Hoeffding-Bentkus, fixed sequence": lambda: mapie_hb("fixed_sequence"),
}


def one_case(name, rows, settings, repeat):
    "In a process of its own: seconds and megabytes."
    losses, run, times = table(rows, settings), CASES[name](), []
    run(losses[:50])  # imports and first calls are not timed
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(repeat):
        start = time.perf_counter()
        valid = run(losses)
        times.append(time.perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": statistics.median(times), "best": min(times), "megabytes": (after - before) / 1e3,
                      "peak_megabytes": after / 1e3, "valid": valid}))


def measure(name, rows, settings, repeat):
    words = [sys.executable, __file__, "--case", name, "--rows", str(rows), "--settings", str(settings), "--repeat", str(repeat)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **ONE_THREAD, "PYTHONWARNINGS": "ignore"})
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failed": done.stderr.strip().splitlines()[-1:] or ["killed"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--settings", type=int, default=100)
    parser.add_argument("--mapie-rows", type=int, default=None, help="rows for MAPIE's betting bound (default: all)")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", default=None)
    parser.add_argument("--case", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        return one_case(args.case, args.rows, args.settings, args.repeat)
    few = args.mapie_rows or args.rows
    jobs = [(name, args.rows if name != "MAPIE, betting bound (RCPS)" else few) for name in CASES]
    if few != args.rows:
        jobs.append(("databloom, betting, fixed sequence", few))
    results = [{"case": name, "rows": rows, **measure(name, rows, args.settings, 1 if "RCPS" in name else args.repeat)} for name, rows in jobs]
    for row in results:
        print(f"{row['case']:48} {row['rows']:>7,} x {args.settings}", row.get("failed") or f"{row['seconds']:8.3f} s {row['megabytes']:8.0f} MB")
    at = {(row["case"], row["rows"]): row for row in results if "seconds" in row}
    for theirs, mine in (("MAPIE, betting bound (RCPS)", "databloom, betting, fixed sequence"),
                         ("MAPIE, Hoeffding-Bentkus, fixed sequence", "databloom, Hoeffding-Bentkus, fixed sequence")):
        rows = few if "RCPS" in theirs else args.rows
        if (theirs, rows) in at and (mine, rows) in at:
            print(f"{theirs} / {mine}: time x {at[theirs, rows]['seconds'] / at[mine, rows]['seconds']:.2f}")
    goal = at["databloom, betting, fixed sequence", args.rows]
    met = goal["seconds"] < 1.5 and goal["megabytes"] < 500
    print(f"goal (< 1.5 s, < 500 MB): {goal['seconds']:.3f} s, {goal['megabytes']:.0f} MB: {'met' if met else 'MISSED'}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"settings": args.settings, "results": results}, file, indent=2)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
