"""The accountant of chapter 01 against its peers: certified width and time, each from the real package.

Makes its own environment (dp-accounting 0.6.0, prv-accountant 0.2.0, this package), runs every measurement in a process
of its own on one thread, and prints tables:

    python benchmarks/accounting.py                         # all tables; most of an hour, as each peer gets 60 s a case
    python benchmarks/accounting.py --tables own            # only our own width, time and memory: a minute
    python benchmarks/accounting.py --seconds 10            # less time for the peers
    python benchmarks/accounting.py --figure figure.json    # the data of the announcement's figure, nothing else

Seconds are CPU seconds of the one thread, from the first call on a mechanism to its epsilon, import not counted: on an
idle core they are what the clock shows. Short calls are repeated and the best is kept.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("dp-accounting==0.6.0", "prv-accountant==0.2.0", "numpy", "scipy")
HEADLINE = dict(noise=0.5, q=2e-5, delta=1e-8)
SMOOTH = [
    dict(noise=1.0, q=0.01, steps=10**4, delta=1e-5),
    dict(noise=0.8, q=0.02, steps=10**5, delta=1e-5),
    dict(noise=2.0, q=0.01, steps=10**5, delta=1e-12),
]
NARROW = [dict(noise=1.0, q=1e-4, steps=10**5, delta=1e-5), dict(noise=4.0, q=3.3e-4, steps=10**4, delta=1e-6)]
STEPS = [10**k for k in range(7)]
MEMORY_LIMIT = 8 * 2**30  # of each process: a peer's grid that does not fit ends its ladder


# What runs in the environment, one process for each measurement


def best_of(function, repeat=7, enough=2.0, least=0.1):
    "Value and best CPU seconds of a call; calls are timed in groups of at least `least` seconds, as the clock ticks in milliseconds."
    best, spent, calls = math.inf, 0.0, 1
    for _ in range(repeat):
        start = time.process_time()
        for _ in range(calls):
            value = function()
        took = time.process_time() - start
        if calls == 1 and took < least:
            calls = math.ceil(least / max(took, 2e-3))
            continue
        best, spent = min(best, took / calls), spent + took
        if spent > enough:
            break
    return value, best


def run_ours(case, tolerance, method="auto"):
    from databloom.connect_the_dots import dp_sgd_epsilon

    def call():
        return dp_sgd_epsilon(noise_multiplier=case["noise"], sampling_probability=case["q"], steps=case["steps"], delta=case["delta"],
                              tolerance=tolerance, method=method)

    if case.get("warm", True):
        call()
    bounds, seconds = best_of(call)
    return dict(lower=bounds.lower, upper=bounds.upper, met=bounds.met, method=bounds.method, seconds=seconds)


def run_rdp(case, _):
    import dp_accounting as dpa
    from dp_accounting.rdp import RdpAccountant

    def call():
        accountant = RdpAccountant()
        accountant.compose(dpa.PoissonSampledDpEvent(case["q"], dpa.GaussianDpEvent(case["noise"])), case["steps"])
        return accountant.get_epsilon(case["delta"])

    epsilon, seconds = best_of(call)
    return dict(upper=epsilon, seconds=seconds)


def _dp_accounting(case, step, pessimistic, dots):
    from dp_accounting.pld import privacy_loss_distribution as pld

    law = pld.from_gaussian_mechanism(case["noise"], sampling_prob=case["q"], value_discretization_interval=step,
                                      pessimistic_estimate=pessimistic, use_connect_dots=dots)
    return law.self_compose(case["steps"]).get_epsilon_for_delta(case["delta"])


def run_dots(case, step):
    upper, seconds = best_of(lambda: _dp_accounting(case, step, True, True))
    return dict(upper=upper, seconds=seconds)


def run_buckets(case, step):
    upper, seconds = best_of(lambda: _dp_accounting(case, step, True, False))
    lower, more = best_of(lambda: _dp_accounting(case, step, False, False))
    return dict(lower=lower, upper=upper, seconds=seconds + more, seconds_upper=seconds)


def run_prv(case, error):
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

    def call():
        mechanism = PoissonSubsampledGaussianMechanism(noise_multiplier=case["noise"], sampling_probability=case["q"])
        accountant = PRVAccountant(prvs=mechanism, max_self_compositions=case["steps"], eps_error=error, delta_error=case["delta"] / 1000)
        return accountant.compute_epsilon(delta=case["delta"], num_self_compositions=case["steps"])

    (lower, estimate, upper), seconds = best_of(call)
    return dict(lower=float(lower), estimate=float(estimate), upper=float(upper), seconds=seconds)


RUNNERS = dict(ours=run_ours, rdp=run_rdp, dots=run_dots, buckets=run_buckets, prv=run_prv)


def run_memory(cases, tolerance):
    import databloom.connect_the_dots as dots

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in cases:
        dots.dp_sgd_epsilon(noise_multiplier=case["noise"], sampling_probability=case["q"], steps=case["steps"], delta=case["delta"],
                            tolerance=tolerance)
    return dict(megabytes=(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def worker():
    task = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    if task["name"] == "memory":
        result = run_memory(task["case"], task["setting"])
    else:
        result = RUNNERS[task["name"]](task["case"], task["setting"])
    print("\n" + json.dumps(result))


# What runs outside


class Environment:
    "A virtual environment with the peers and this package."

    def __init__(self, folder):
        self.folder = Path(folder)
        self.python = self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
            self._install(*PEERS)
        self._install("--upgrade", "--no-deps", "--force-reinstall", str(ROOT))
        self._install("typer", "rich")

    def _install(self, *what):
        subprocess.run([self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what], check=True)

    def run(self, name, case, setting, limit=90.0):
        "The result of one measurement, or None where it failed or took longer than `limit` CPU seconds."
        threads = {key: "1" for key in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        try:
            done = subprocess.run(
                [self.python, __file__, "--worker"], input=json.dumps(dict(name=name, case=case, setting=setting)), text=True,
                capture_output=True, env=os.environ | threads, timeout=10 * limit + 60,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 5, int(limit) + 10)))
        except subprocess.TimeoutExpired:
            return None
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            return None
        return json.loads(lines[-1])


def show(title, head, rows):
    print(f"\n{title}\n")
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [head] + rows) for i in range(len(head))]
    for row in [head, ["-" * width for width in widths]] + rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")
    sys.stdout.flush()


def describe(case):
    return f"noise {case['noise']:g}, q {case['q']:g}, {case['steps']:,} steps, delta {case['delta']:g}"


def milliseconds(seconds):
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def own_table(environment):
    "Our width and time in the cases of the goals, memory, and growth with the steps."
    goals = [(HEADLINE | dict(steps=steps), tolerance, goal) for tolerance, goal in ((1e-3, 0.1), (1e-4, 0.15)) for steps in STEPS]
    goals += [(case, tolerance, 0.05) for tolerance in (1e-4, 1e-6) for case in SMOOTH]
    goals += [(case, 1e-4, 0.1) for case in NARROW]
    rows, seconds = [], {}
    for case, tolerance, goal in goals:
        r = environment.run("ours", case, tolerance)
        seconds[case["steps"], tolerance, case["noise"]] = r["seconds"]
        width = (r["upper"] - r["lower"]) / r["upper"]
        fine = width <= tolerance and r["seconds"] <= goal
        rows.append([describe(case), f"{tolerance:g}", f"[{r['lower']:.8g}, {r['upper']:.8g}]", f"{width:.1e}", r["method"],
                     milliseconds(r["seconds"]), milliseconds(goal), "yes" if fine else "NO"])
    show("Ours: both bounds, both directions, trial runs included", ["case", "tolerance", "interval", "width", "method", "time", "goal", "met"], rows)
    for tolerance in (1e-3, 1e-4):
        ratio = seconds[10**6, tolerance, 0.5] / seconds[10**3, tolerance, 0.5]
        print(f"time at 1e6 steps over time at 1e3 steps, tolerance {tolerance:g}: {ratio:.2f} (goal: at most 3)")
    memory = environment.run("memory", [HEADLINE | dict(steps=steps) for steps in STEPS] + SMOOTH + NARROW, 1e-4)
    print(f"memory above the import, all cases at 1e-4 in one process: {memory['megabytes']:.0f} MB (goal: under 100)")


def width_of(peer, r, truth):
    "Relative width of a peer's answer: of its own interval, or of its upper bound over the truth's lower one; infinite if it misses the truth."
    if not r["upper"] < math.inf or r["upper"] < truth["lower"] or r.get("lower", 0.0) > truth["upper"]:
        return math.inf
    if peer == "dots":  # no finer than the truth is known
        return max(r["upper"] - truth["lower"], truth["upper"] - truth["lower"]) / r["upper"]
    return (r["upper"] - r["lower"]) / r["upper"]


def ladder(environment, peer, case, seconds, truth):
    "The peer's tightest sound result within `seconds`: (setting, result, width), and what stopped it."
    best, note = None, ""

    def attempt(setting):
        "The result, or None where it is too slow, too large, or no bound."
        nonlocal best, note
        r = environment.run(peer, case, setting, limit=1.5 * seconds + 10)
        if r is None or r["seconds"] > seconds:
            note = "beyond: memory or time ran out"
            return None
        width = width_of(peer, r, truth)
        if width < math.inf and (best is None or width < best[2]):
            best = (setting, r, width)
        if width == math.inf and best:
            note = f"misses the truth at setting {setting:.2g}"
            return None
        return r

    setting = {"dots": 0.02 if case["noise"] < 3 else 1e-3, "buckets": 1e-3, "prv": 0.3}[peer]
    while (r := attempt(setting)) and setting > 1e-9 and seconds / max(r["seconds"], 1e-3) > 1.3:
        setting /= min(10.0, max(1.3, 0.7 * seconds / max(r["seconds"], 1e-3)))
    if r is None and best:  # too fine: close in on the last good setting
        bad = setting
        for _ in range(3):
            middle = math.sqrt(bad * best[0])
            if attempt(middle) is None:
                bad = middle
    return best, note


def peer_table(environment, peer, seconds, cases):
    names = dict(dots="dp-accounting 0.6.0, Connect-the-Dots (its width: its upper bound over our lower one, no finer than we know the truth)",
                 buckets="dp-accounting 0.6.0, Privacy Buckets, upper and lower", prv="prv-accountant 0.2.0, certified interval")
    rows = []
    for case in cases:
        truth = environment.run("ours", case, 1e-7, limit=60) or environment.run("ours", case, 1e-6, limit=60)
        best, note = ladder(environment, peer, case, seconds, truth)
        if best is None:
            rows.append([describe(case), "-", "-", "-", "-", "-", "-", note or "nothing finite in time"])
            continue
        setting, r, width = best
        tolerance = float(min(1.0, max(width, 1e-9)))
        ours = environment.run("ours", case, tolerance)
        own = (ours["upper"] - ours["lower"]) / ours["upper"] if ours else math.nan
        rows.append([describe(case), f"{setting:.2g}", f"{width:.1e}", milliseconds(r["seconds"]), f"{own:.1e}",
                     milliseconds(ours["seconds"]), f"{r['seconds'] / ours['seconds']:,.0f} times" + ("" if own <= width else " (we are wider)"), note])
        print("  " + " | ".join(rows[-1]), file=sys.stderr, flush=True)
    show(names[peer], ["case", "setting", "its width", "its time", "our width", "our time", "we are faster", "note"], rows)


def figure(environment, path, limit):
    "Epsilon and time against steps for everyone; written after each line, so that a broken run keeps what it had."
    lines = [("Renyi DP", "rdp", None), ("Privacy Buckets", "buckets", 1e-4), ("PRV accountant, error 0.1", "prv", 0.1),
             ("PRV accountant, error 0.01", "prv", 0.01), ("Connect-the-Dots (dp-accounting)", "dots", 1e-4),
             ("databloom, tolerance 1e-3", "ours", 1e-3), ("databloom, tolerance 1e-4", "ours", 1e-4)]
    result = dict(case=HEADLINE, packages=list(PEERS[:2]), seconds="CPU seconds of one thread, import not counted", lines=[])
    for label, name, setting in lines:
        points = []
        for steps in STEPS:
            r = environment.run(name, HEADLINE | dict(steps=steps), setting, limit=limit)
            if r is None:
                print(f"{label}, {steps:,} steps: not within {limit:g} s or {MEMORY_LIMIT / 2**30:g} GB", flush=True)
                continue
            point = {key: float(f"{value:.9g}") for key, value in r.items() if isinstance(value, float) and math.isfinite(value)}
            points.append(dict(steps=steps) | point)
            print(label, points[-1], flush=True)
        result["lines"].append(dict(label=label, name=name, setting=setting, points=points))
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--environment", default=Path(tempfile.gettempdir()) / "databloom-benchmark", help="where the environment is made, or kept")
    parser.add_argument("--seconds", type=float, default=60.0, help="time a peer gets for each case")
    parser.add_argument("--tables", default="own,dots,prv,buckets", help="which tables: own, dots, prv, buckets")
    parser.add_argument("--cases", default="", help="which cases of the peers' tables, as numbers from 0, with commas; all by default")
    parser.add_argument("--figure", metavar="FILE", help="only write the figure's data to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker()
    environment = Environment(arguments.environment)
    if arguments.figure:
        return figure(environment, arguments.figure, arguments.seconds + 30)
    cases = [HEADLINE | dict(steps=10**3), HEADLINE | dict(steps=10**5)] + SMOOTH + NARROW
    if arguments.cases:
        cases = [cases[int(i)] for i in arguments.cases.split(",")]
    for table in arguments.tables.split(","):
        if table == "own":
            own_table(environment)
        else:
            peer_table(environment, table, arguments.seconds, cases)


if __name__ == "__main__":
    main()
