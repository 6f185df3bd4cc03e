"""Every accountant on the same cases: who is right, who is tight, who is fast, and whose upper bound is none.

Makes its own environment (dp-accounting 0.6.0, prv-accountant 0.2.0, Opacus 1.6.0, this package), asks each package each
question in a process of its own on one thread, and prints one table: case, truth, our width and time, and each peer's
answer, error and time.

    python benchmarks/accountants.py                                      # the table; about ten minutes
    python benchmarks/accountants.py --save nbs/data/accountants.json     # and the data of the book's page
    python benchmarks/accountants.py --cases 0,9 --seconds 20             # some cases, less patience
    python benchmarks/accountants.py --adapter                            # the tests of our adapters, with dp-accounting 0.6.0

The truths are closed forms, or values of the contour integral for delta on several lines (tests/contour.py), given to the
digits on which these agree. An answer is LOW when an upper bound lies below the truth (or an interval does not hold it).
Seconds are CPU seconds of the one thread, from the first call to the epsilon, import not counted, best of a few calls.
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
PEERS = ("dp-accounting==0.6.0", "prv-accountant==0.2.0", "opacus==1.6.0", "torch==2.13.0", "numpy", "scipy")
MEMORY_LIMIT = 8 * 2**30


def sgd(noise, q, steps, delta, truth):
    return dict(kind="sgd", noise=noise, q=q, steps=steps, delta=delta, truth=truth)


def gaussian(noise, steps, delta, truth):
    return dict(kind="gaussian", noise=noise, steps=steps, delta=delta, truth=truth)


CASES = [
    sgd(1.0, 0.01, 10**4, 1e-5, 6.18771239), sgd(1.0, 0.01, 10**4, 1e-12, 10.3466898), sgd(0.7, 0.001, 10**4, 1e-12, 4.5042735),
    sgd(2.0, 0.01, 10**5, 1e-12, 12.9497105), sgd(1.0, 0.001, 10**5, 1e-12, 2.8941101), sgd(0.5, 2e-5, 10**5, 1e-8, 2.2840592),
    sgd(4.0, 0.00033, 10**4, 1e-6, 0.0279578039), sgd(0.8, 0.02, 10**5, 1e-5, 119.315181), sgd(100.0, 0.01, 10, 1e-2, 0.0),
    gaussian(100.0, 10**5, 1e-10, 24.569659), gaussian(20.0, 1000, 1e-12, 11.992091), gaussian(20.0, 1000, 1e-15, 13.449329),
    dict(kind="laplace", noise=1.0, steps=2, delta=0.0, truth=2.0),
    dict(kind="response", noise=0.5, k=2, steps=10, delta=1e-6, truth=math.log((0.75**10 - 1e-6) / 0.25**10)),
    dict(kind="replaced", noise=2.0, steps=1, delta=1e-5, truth=4.377178),
]
WORDS = dict(sgd="DP-SGD", gaussian="Gaussian", laplace="Laplace", response="randomised response", replaced="Gaussian, a record replaced")


def describe(case):
    q = f", q {case['q']:g}" if "q" in case else ""
    return f"{WORDS[case['kind']]}, noise {case['noise']:g}{q}, {case['steps']:,} step{'s' if case['steps'] > 1 else ''}, delta {case['delta']:g}"


# What runs in the environment, one process for each answer. Each returns a function that answers.


def ours(case):
    from databloom.connect_the_dots import dp_sgd_epsilon, epsilon_bounds
    from databloom.mechanisms import Gaussian, Laplace, RandomizedResponse

    steps, delta, noise = case["steps"], case["delta"], case["noise"]
    if case["kind"] == "sgd":
        return lambda: dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=case["q"], steps=steps, delta=delta, tolerance=case["tolerance"])
    if case["kind"] == "replaced":
        return lambda: dp_sgd_epsilon(noise_multiplier=noise, steps=steps, delta=delta, adjacency="replace_one")
    pair = {"gaussian": lambda: Gaussian(noise), "laplace": lambda: Laplace(noise), "response": lambda: RandomizedResponse(1 - noise + noise / case["k"], case["k"])}[case["kind"]]()
    return lambda: epsilon_bounds(pair, steps, delta=delta, tolerance=case["tolerance"])


def event(case):
    import dp_accounting
    from dp_accounting import dp_event as e

    relation = dp_accounting.NeighboringRelation
    inner = {"sgd": lambda: e.PoissonSampledDpEvent(case["q"], e.GaussianDpEvent(case["noise"])), "laplace": lambda: e.LaplaceDpEvent(case["noise"]),
             "response": lambda: e.RandomizedResponseDpEvent(case["noise"], case["k"])}.get(case["kind"], lambda: e.GaussianDpEvent(case["noise"]))()
    return inner, relation.REPLACE_ONE if case["kind"] in ("replaced", "response") else relation.ADD_OR_REMOVE_ONE


def dots(case):
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.pld import privacy_loss_distribution as pld

    if case["kind"] == "gaussian":  # as an object: the accountant itself turns plain Gaussians into one
        return lambda: pld.from_gaussian_mechanism(case["noise"]).self_compose(case["steps"]).get_epsilon_for_delta(case["delta"])
    inner, relation = event(case)
    return lambda: PLDAccountant(relation).compose(inner, case["steps"]).get_epsilon(case["delta"])


def rdp(case):
    from dp_accounting.rdp import RdpAccountant

    inner, relation = event(case)
    return lambda: RdpAccountant(neighboring_relation=relation).compose(inner, case["steps"]).get_epsilon(case["delta"])


def prv(case):
    from prv_accountant import GaussianMechanism, LaplaceMechanism, PoissonSubsampledGaussianMechanism, PRVAccountant

    noise = case["noise"]
    mechanism = {"sgd": lambda: PoissonSubsampledGaussianMechanism(noise_multiplier=noise, sampling_probability=case["q"]),
                 "gaussian": lambda: GaussianMechanism(noise_multiplier=noise), "laplace": lambda: LaplaceMechanism(mu=noise)}[case["kind"]]()

    def call():
        accountant = PRVAccountant(prvs=mechanism, max_self_compositions=case["steps"], eps_error=0.01, delta_error=case["delta"] / 1000)
        return accountant.compute_epsilon(delta=case["delta"], num_self_compositions=case["steps"])

    return call


def opacus(name):
    def make(case):
        import warnings

        warnings.simplefilter("ignore")
        from opacus.accountants import create_accountant

        def call():
            accountant = create_accountant(name)
            accountant.history = [(case["noise"], case.get("q", 1.0), case["steps"])]
            return accountant.get_epsilon(case["delta"])

        return call

    return make


PEOPLE = {"ours": ours, "dp-accounting PLD": dots, "dp-accounting RDP": rdp, "prv-accountant": prv, "Opacus PRV": opacus("prv"), "Opacus RDP": opacus("rdp"), "Opacus GDP": opacus("gdp")}
TAKES = {"ours": WORDS, "dp-accounting PLD": WORDS, "dp-accounting RDP": ("sgd", "gaussian", "replaced", "laplace"), "prv-accountant": ("sgd", "gaussian"),
         "Opacus PRV": ("sgd",), "Opacus RDP": ("sgd", "gaussian"), "Opacus GDP": ("sgd",)}


def worker():
    task = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT * 4, MEMORY_LIMIT * 4))  # address space: torch maps much and uses little
    call, best, spent = PEOPLE[task["who"]](task["case"]), math.inf, 0.0
    for _ in range(5):
        start = time.process_time()
        value = call()
        took = time.process_time() - start
        best, spent = min(best, took), spent + took
        if spent > 1.0:
            break
    if task["who"] == "ours":
        result = dict(lower=value.lower, upper=value.upper, met=value.met)
    elif isinstance(value, tuple):
        result = dict(lower=float(value[0]), estimate=float(value[1]), upper=float(value[2]))
    else:
        result = dict(upper=float(value))
    print("\n" + json.dumps({**{key: one if one is None or one is True or math.isfinite(one) else str(one) for key, one in result.items()}, "seconds": best}))


# What runs outside


class Environment:
    "A virtual environment with the peers and this package."

    def __init__(self, folder):
        self.python = Path(folder) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            self._install(*PEERS)
        self._install("--upgrade", "--no-deps", "--force-reinstall", str(ROOT))
        self._install("typer", "rich")

    def _install(self, *what):
        subprocess.run([self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what], check=True)

    def ask(self, who, case, limit):
        "One answer, or what went wrong."
        threads = {key: "1" for key in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        try:
            done = subprocess.run([self.python, __file__, "--worker"], input=json.dumps(dict(who=who, case=case)), text=True, capture_output=True, env=os.environ | threads,
                                  timeout=10 * limit + 60, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 20, int(limit) + 25)))
        except subprocess.TimeoutExpired:
            return dict(failed="no answer in time")
        lines = done.stdout.strip().splitlines()
        if done.returncode < 0:
            return dict(failed="no answer in time")
        if done.returncode or not lines:
            return dict(failed=(done.stderr.strip().splitlines() or ["no answer"])[-1][:160])
        answer = json.loads(lines[-1])
        return {key: float(one) if isinstance(one, str) else one for key, one in answer.items()}


def judge(answer, truth):
    "The relative error of an answer and a word about it; a truth is known to its last digit only."
    if "failed" in answer:
        return None, "fails"
    slack = 2e-7 * max(truth, 1e-3)
    off = (answer["upper"] - truth) / truth if truth else answer["upper"]
    if answer["upper"] < truth - slack or answer.get("lower", -math.inf) > truth + slack or answer["upper"] < 0:
        return off, "LOW" if answer["upper"] < truth - slack or answer["upper"] < 0 else "lower bound too high"
    return off, "infinite" if answer["upper"] == math.inf else ""


def show(head, rows):
    widths = [max(len(row[i]) for row in [head] + rows) for i in range(len(head))]
    for row in [head, ["-" * width for width in widths]] + rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")
    sys.stdout.flush()


def milliseconds(seconds):
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def test_adapter(environment):
    "Exit code of the adapters' tests, run in the environment from outside of the project."
    subprocess.run([environment.python, "-m", "pip", "install", "--quiet", "pytest"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.call([environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "tests" / "test_adapters.py"], cwd=folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--environment", default=Path(tempfile.gettempdir()) / "databloom-accountants", help="where the environment is made, or kept")
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU time that each gets for an answer")
    parser.add_argument("--cases", default="", help="which cases, as numbers from 0, with commas; all by default")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="relative width that our own bounds aim for")
    parser.add_argument("--save", metavar="FILE", help="also write the answers to this file, as JSON")
    parser.add_argument("--adapter", action="store_true", help="only run the tests of our adapters with these packages instead of the pinned ones")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker()
    if arguments.adapter:
        return test_adapter(Environment(arguments.environment))
    environment, rows, saved = Environment(arguments.environment), [], []
    for case in [CASES[int(i)] for i in arguments.cases.split(",")] if arguments.cases else CASES:
        answers = {}
        for who in PEOPLE:
            if case["kind"] in TAKES[who]:
                answers[who] = environment.ask(who, {**case, "tolerance": arguments.tolerance}, arguments.seconds)
                off, word = judge(answers[who], case["truth"])
                if who == "ours":
                    width = (answers[who]["upper"] - answers[who]["lower"]) / answers[who]["upper"] if answers[who]["upper"] else 0.0
                    own = f"[{answers[who]['lower']:.7g}, {answers[who]['upper']:.7g}], width {width:.1e}, {milliseconds(answers[who]['seconds'])}" + (f" {word}" if word else "")
                else:
                    said = answers[who].get("failed") or f"{answers[who]['upper']:.7g} ({off:+.1e}), {milliseconds(answers[who]['seconds'])}"
                    rows.append([describe(case), f"{case['truth']:.9g}", own, who, said, word])
                    print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
        saved.append(dict(case=case, words=describe(case), answers={who: {key: str(one) if isinstance(one, float) and not math.isfinite(one) else one for key, one in answer.items()} for who, answer in answers.items()},
                          verdicts={who: judge(answer, case["truth"])[1] for who, answer in answers.items()}))
        if arguments.save:
            data = dict(packages=list(PEERS[:3]), tolerance=arguments.tolerance, seconds="CPU seconds of one thread, import not counted", cases=saved)
            Path(arguments.save).write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    show(["case", "truth", "ours: bounds, width, time", "peer", "its upper bound (error), time", "verdict"], rows)


if __name__ == "__main__":
    sys.exit(main())
