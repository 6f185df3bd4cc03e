"""Intervals for epsilon as a user meets them: any input, any order, any method, and bad input."""

import itertools
import json
import math
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from databloom.connect_the_dots import (
    connect_the_dots, connect_the_dots_of_curve, dp_sgd_epsilon, epsilon_bounds, merge_the_dots, privacy_buckets,
)
from databloom.mechanisms import DiscretePair, Gaussian, Laplace, PoissonSubsampled, RandomizedResponse, normal_masses

small = settings(max_examples=25, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
                 suppress_health_check=list(HealthCheck))


def between(low, high):
    "Numbers spread evenly in their logarithm, with few digits."
    return st.floats(math.log10(low), math.log10(high)).map(lambda x: min(high, max(low, float(f"{10**x:.4g}"))))


cases = st.fixed_dictionaries(dict(
    noise_multiplier=between(0.3, 100.0), sampling_probability=between(1e-6, 1.0),
    steps=between(1, 1e6).map(round), delta=between(1e-30, 1e-3)))
tame = st.fixed_dictionaries(dict(  # where every run is a fraction of a second
    noise_multiplier=between(0.6, 8.0), sampling_probability=between(1e-3, 0.5), steps=between(1, 1e4).map(round), delta=between(1e-14, 1e-3)))


def width(r):
    return (r.upper - r.lower) / r.upper if r.upper > 0 else 0.0


def checked(case, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        r = dp_sgd_epsilon(**case, **more)
    assert 0 <= r.lower <= r.upper < math.inf, (case, r)
    assert r.met == (r.upper - r.lower <= r.tolerance * r.upper), (case, r)
    return r


_stopped = []


@small
@given(cases)
def test_any_case(case):
    "No crash, no warning, lower <= upper, upper finite, tolerance met or flagged."
    r = checked(case)
    if not r.met:
        _stopped.append((width(r), case))


def test_few_stopped():
    "Runs after the cases above: most intervals reach the tolerance, and those that stopped are shown."
    for one, case in _stopped:
        print(f"stopped at width {one:.1e}: {case}")
    assert len(_stopped) <= 8, f"{len(_stopped)} of 25 stopped"


@settings(small, max_examples=8)
@given(tame)
def test_monotone(case):
    "Less noise, a larger sample, more steps or a smaller delta never lower epsilon, as far as the intervals can tell."
    base = checked(case)
    worse = [dict(noise_multiplier=case["noise_multiplier"] * 0.98), dict(sampling_probability=min(1.0, case["sampling_probability"] * 1.03)),
             dict(steps=case["steps"] + 1 + case["steps"] // 40), dict(delta=case["delta"] * 0.9)]
    for change in worse:
        r = checked(case | change)
        assert base.lower <= r.upper, (case, change, base, r)


@settings(small, max_examples=8)
@given(tame)
def test_methods_nest(case):
    "The same case by every method and at two tolerances: all intervals share a point."
    case = case | dict(steps=case["steps"] + 16)
    found = [dp_sgd_epsilon(**case, method=method, tolerance=tolerance) for method in ("auto", "direct", "two_stage", "core_tail") for tolerance in (1e-2, 1e-3)
             if not (case["sampling_probability"] == 1 and method == "core_tail")]
    assert all(0 <= r.lower <= r.upper for r in found), (case, found)  # a method that does not fit says 0 and infinity
    assert max(r.lower for r in found) <= min(r.upper for r in found), (case, found)
    assert {r.method for r in found} >= {"direct"}


@pytest.mark.parametrize("tolerance", [3e-2, 1e-2, 3e-3, 1e-3])
def test_stages_count_what_falls_below_their_window(tolerance):
    "Dropped there, it made an upper bound of 2.28343 of this truth."
    truth = 2.2840592  # contour quadrature, good to 1e-7
    for method in ("two_stage", "core_tail"):
        bounds = dp_sgd_epsilon(noise_multiplier=0.5, sampling_probability=2e-5, steps=100_000, delta=1e-8, tolerance=tolerance, method=method)
        assert bounds.lower - 2e-7 <= truth <= bounds.upper + 2e-7, (method, bounds)


@pytest.mark.parametrize("noise, q, delta", [(0.5, 2e-5, 1e-8), (1.0, 0.01, 1e-10), (30.0, 0.4, 1e-20), (2.0, 1e-3, 1e-6)])
def test_steps_nest(noise, q, delta):
    "Intervals grow with the steps, without a gap or a jump back: each upper bound is above each earlier lower one."
    found = [dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=n, delta=delta) for n in (1, 2, 3, 7, 16, 17, 100, 999, 1000, 1001, 30_000)]
    for early, late in itertools.combinations(found, 2):
        assert early.lower <= late.upper
    assert all(0 <= r.lower <= r.upper < math.inf for r in found)


def test_one_step_is_exact_and_grids_hold_it():
    "A single sampled release has a closed form; the grids must hold it from both sides at any delta."
    for noise, q, delta in ((0.5, 2e-5, 1e-8), (1.0, 0.1, 1e-5), (3.0, 1e-3, 1e-6), (0.8, 0.5, 1e-20), (1.0, 1e-4, 1e-12)):
        exact = dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=1, delta=delta)
        assert width(exact) <= 1e-9
        grid = dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=1, delta=delta, method="direct")
        assert grid.lower <= exact.upper and exact.lower <= grid.upper < math.inf, (exact, grid)


def test_order_and_grouping():
    "A composition does not depend on the order of its parts or on how equal parts are grouped."
    a, b, c = PoissonSubsampled(Gaussian(1.0), 0.02), Laplace(5.0), RandomizedResponse(0.6)
    lists = [list(order) for order in itertools.permutations([(a, 20), (b, 10), (c, 5)])] + [[(a, 7), (c, 5), (a, 13), (b, 4), (b, 6)]]
    found = [epsilon_bounds(parts, delta=1e-6) for parts in lists]
    assert max(r.lower for r in found) <= min(r.upper for r in found)
    assert all(r.met for r in found), found
    alone = epsilon_bounds(a, 20, delta=1e-6)
    assert alone.lower <= min(r.upper for r in found)
    twice = epsilon_bounds([(a, 10), (b, 5)], 2, delta=1e-6)
    once = epsilon_bounds([(a, 20), (b, 10)], delta=1e-6)
    assert twice.lower <= once.upper and once.lower <= twice.upper


def test_both_directions_are_looked_at():
    "A pair and its reverse have one epsilon."
    p, q = [0.7, 0.2, 0.1], [0.2, 0.3, 0.5]
    for n in (1, 5, 40):
        one, other = epsilon_bounds(DiscretePair(p, q), n, delta=1e-4), epsilon_bounds(DiscretePair(q, p), n, delta=1e-4)
        assert one.lower <= other.upper and other.lower <= one.upper


def test_zero_epsilon():
    "A delta that needs no epsilon at all."
    r = dp_sgd_epsilon(noise_multiplier=1000.0, steps=1, delta=0.1)
    assert r.lower == r.upper == 0 and r.met
    r = dp_sgd_epsilon(noise_multiplier=50.0, sampling_probability=1e-4, steps=10, delta=1e-3)
    assert r.lower == r.upper == 0 and r.met


def test_delta_zero():
    assert dp_sgd_epsilon(noise_multiplier=1.0, steps=10, delta=0.0).upper == math.inf
    sampled = epsilon_bounds(PoissonSubsampled(Laplace(1.0), 0.1), 3, delta=0.0)
    assert sampled.lower <= 3 * math.log(1 + 0.1 * (math.e - 1)) * (1 + 1e-14)
    assert sampled.upper >= 3 * max(math.log(1 + 0.1 * (math.e - 1)), -math.log(1 - 0.1 * (1 - 1 / math.e))) * (1 - 1e-14)


def test_replace_one():
    "One record replaced moves the sum twice as far."
    r, half = dp_sgd_epsilon(noise_multiplier=2.0, steps=9, delta=1e-6, adjacency="replace_one"), dp_sgd_epsilon(noise_multiplier=1.0, steps=9, delta=1e-6)
    assert r.upper == pytest.approx(half.upper, rel=1e-12) and r.adjacency == "replace_one"


def test_result():
    r = dp_sgd_epsilon(noise_multiplier=1.0, sampling_probability=0.01, steps=1000, delta=1e-5)
    content = json.loads(r.to_json())
    assert content["lower"] == r.lower and content["upper"] == r.upper and content["delta"] == 1e-5 and content["steps"] == 1000
    assert "laws" not in content and content["adjacency"] == "add_remove"
    assert any("Poisson" in a for a in r.assumptions) and r.method == "contour" and r.step is None and r.cells is None
    gridded = dp_sgd_epsilon(noise_multiplier=1.0, sampling_probability=0.01, steps=1000, delta=1e-5, method="direct")
    assert gridded.step > 0 and gridded.cells > 0
    assert "epsilon is between" in str(r) and "Poisson" in str(r)
    with pytest.raises(Exception):
        r.upper = 0.0


def test_repeatable():
    a, b = (dp_sgd_epsilon(noise_multiplier=1.1, sampling_probability=0.004, steps=5000, delta=1e-6) for _ in range(2))
    assert (a.lower, a.upper) == (b.lower, b.upper)


# Normal probabilities


def test_normal_masses():
    "Relative accuracy against 40 digits: thin slices, wide ones, and tails; the stated bound holds."
    import mpmath as mp

    rng = np.random.default_rng(5)
    points = np.unique(np.concatenate([
        np.linspace(-37, 37, 150), np.linspace(-1e-3, 1e-3, 30), 5 + np.cumsum(np.exp(rng.uniform(-25, -1, 60))), -20 + np.cumsum(np.exp(rng.uniform(-20, -2, 60))),
        [0.0, 1e-9, 37.3, -37.3]]))
    points = np.concatenate([[-math.inf], points, [math.inf]])
    mass, relative = normal_masses(points)
    with mp.workdps(60):
        for low, high, m, bound in zip(points[:-1], points[1:], mass, relative):
            side = -1 if low > 0 else 1  # on the left, where nothing cancels
            ends = sorted((mp.mpf(side * low), mp.mpf(side * high)))
            lower, upper = (mp.mpf(x > 0) if mp.isinf(x) else mp.erfc(-x / mp.sqrt(2)) / 2 for x in ends)
            truth = upper - lower
            error = abs(m - truth) / truth
            assert error <= bound + 1e-300, (low, high, float(error), bound)
            assert error <= 1e-9, (low, high, float(error))


def test_normal_tail_function():
    "scipy's normal distribution function has the relative accuracy that the masses assume (2e-13), far down the tail."
    import mpmath as mp
    from scipy.special import ndtr

    points = np.concatenate([np.linspace(-37.0, 1.0, 900), -np.geomspace(1e-8, 30, 100)])
    with mp.workdps(40):
        worst = max(abs(float((mp.mpf(v) - mp.erfc(-mp.mpf(x) / mp.sqrt(2)) / 2) / (mp.erfc(-mp.mpf(x) / mp.sqrt(2)) / 2))) for x, v in zip(points.tolist(), ndtr(points).tolist()))
    assert worst <= 2e-13, worst


# Bad input: always a ValueError that names the argument


good = dict(noise_multiplier=1.0, sampling_probability=0.01, steps=10, delta=1e-5)
not_numbers = [math.nan, math.inf, -math.inf, "1", None, True, [1.0], 1j]


@pytest.mark.parametrize("name, values", [
    ("noise_multiplier", [0, -1, -1e-9] + not_numbers),
    ("sampling_probability", [0, -0.1, 1.0000001, 2] + not_numbers),
    ("steps", [0, -1, 1.5, 10**13] + not_numbers),
    ("delta", [-1e-9, 1, 1.5] + not_numbers),
    ("tolerance", [0, -1, 2] + not_numbers),
    ("adjacency", ["", "replace", "ADD_REMOVE", None, 3]),
    ("method", ["", "fft", None, 3]),
])
def test_bad_input(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            dp_sgd_epsilon(**(good | {name: value}))


def test_bad_pairs_and_grids():
    pair = Gaussian(1.0)
    for call, name in [
        (lambda: epsilon_bounds("gaussian", delta=1e-5), "mechanism"), (lambda: epsilon_bounds([], delta=1e-5), "mechanism"),
        (lambda: epsilon_bounds([(pair, 0)], delta=1e-5), "steps"), (lambda: epsilon_bounds([(3, 1)], delta=1e-5), "mechanism"),
        (lambda: epsilon_bounds(pair, 0, delta=1e-5), "steps"), (lambda: epsilon_bounds(pair, delta=2), "delta"),
        (lambda: Gaussian(0), "noise_multiplier"), (lambda: Gaussian(math.nan), "noise_multiplier"), (lambda: Laplace(0), "noise_multiplier"),
        (lambda: Laplace(-1.0), "noise_multiplier"), (lambda: RandomizedResponse(0.3, 2), "truth_probability"), (lambda: RandomizedResponse(1.5), "truth_probability"),
        (lambda: RandomizedResponse(0.7, 1), "num_answers"), (lambda: DiscretePair([0.5, 0.5], [1.0]), "q"), (lambda: DiscretePair([0.5, 0.4], [0.5, 0.5]), "p"),
        (lambda: DiscretePair([0.5, 0.5], [0.5, math.nan]), "q"), (lambda: DiscretePair([-0.5, 1.5], [0.5, 0.5]), "p"), (lambda: DiscretePair([], []), "p"),
        (lambda: PoissonSubsampled(pair, 0), "sampling_probability"), (lambda: PoissonSubsampled(pair, 1), "sampling_probability"),
        (lambda: PoissonSubsampled(3, 0.5), "pair"), (lambda: PoissonSubsampled(PoissonSubsampled(pair, 0.5), 0.5), "pair"),
        (lambda: connect_the_dots(pair, 0), "step"), (lambda: connect_the_dots(pair, math.nan), "step"), (lambda: connect_the_dots(pair, 1e-12), "step"),
        (lambda: merge_the_dots(pair, -1), "step"), (lambda: merge_the_dots(pair, 0.1, tail=2), "tail"), (lambda: connect_the_dots(3, 0.1), "pair"),
        (lambda: privacy_buckets(pair, 0.1, bound="middle"), "bound"), (lambda: privacy_buckets(pair, 0), "step"),
        (lambda: connect_the_dots_of_curve(lambda e: e * 0 + 0.1, 0.0, 0.0, 5), "step"), (lambda: connect_the_dots_of_curve(lambda e: e * 0 + 0.1, 0.0, 0.1, 1), "count"),
        (lambda: connect_the_dots_of_curve(lambda e: e * 0 + 2.0, 0.0, 0.1, 5), "delta"),
    ]:
        with pytest.raises(ValueError, match=name):
            call()


# The command


def command(*words):
    return subprocess.run([sys.executable, "-c", "from databloom.cli import main; main()", "epsilon", *words], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"COLUMNS": "200"})


@pytest.fixture(scope="module")
def has_command():
    if command("--help").returncode != 0:
        pytest.skip("the epsilon command has not landed yet")


def test_command(has_command):
    done = command("--noise-multiplier", "0.5", "--sampling-probability", "2e-5", "--steps", "100000", "--delta", "1e-8", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["lower"] <= 2.2840592 <= content["upper"] <= 2.2840592 * 1.001 and content["delta"] == 1e-8 and content["steps"] == 100_000
    plain = command("--noise-multiplier", "1", "--steps", "1", "--delta", "1e-5")
    assert plain.returncode == 0 and "4.37" in plain.stdout and "add_remove" in plain.stdout.replace("-", "_")


@pytest.mark.parametrize("name, value", [
    ("--noise-multiplier", "0"), ("--noise-multiplier", "nan"), ("--noise-multiplier", "abc"), ("--sampling-probability", "1.5"), ("--sampling-probability", "-1"),
    ("--steps", "0"), ("--steps", "1.5"), ("--delta", "2"), ("--delta", "inf"), ("--tolerance", "0"), ("--adjacency", "neighbours"),
])
def test_command_refuses(has_command, name, value):
    words = {"--noise-multiplier": "1", "--sampling-probability": "0.1", "--steps": "10", "--delta": "1e-5"} | {name: value}
    done = command(*itertools.chain.from_iterable((key, word) for key, word in words.items()))
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == "" and "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert name.strip("-").replace("-", "_") in done.stderr.replace("-", "_")
