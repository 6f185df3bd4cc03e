"""The certified interval against truths: stored ones, closed forms, enumerations and a quadrature of its own."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest

import contour
from accounting_exact import assert_holds, discrete_law, gaussian_delta, laplace_delta, laplace_delta_twice, law_delta, law_max_loss

from databloom.connect_the_dots import connect_the_dots, dp_sgd_epsilon, epsilon_bounds, merge_the_dots
from databloom.core import data_folder
from databloom.mechanisms import DiscretePair, Gaussian, Laplace, PoissonSubsampled, RandomizedResponse

METHODS = ("auto", "direct", "two_stage", "core_tail")
_file = data_folder("accounting_truths.json")
_stored = json.loads(_file.read_text()) if _file else dict(cases=[], brackets=[])
needs_truths = pytest.mark.skipif(_file is None, reason="DATABLOOM_DATA is not set, or holds no accounting_truths.json")


def run(case, **more):
    return dp_sgd_epsilon(noise_multiplier=case["sigma"], sampling_probability=case["q"], steps=case["T"], delta=case["delta"], **more)


def nested(intervals):
    return max(r.lower for r in intervals) <= min(r.upper for r in intervals)


@needs_truths
@pytest.mark.parametrize("tolerance", [1e-3, 1e-4])
def test_stored_truths(tolerance):
    "Every stored case, the truth's own error (2e-8 relative) granted."
    assert len(_stored["cases"]) >= 29 and len(_stored["brackets"]) >= 9
    for case in _stored["cases"]:
        r = run(case, tolerance=tolerance)
        assert r.lower <= case["eps"] * (1 + 2e-8) and case["eps"] * (1 - 2e-8) <= r.upper < math.inf, (case, r)
        assert r.met and r.upper - r.lower <= tolerance * r.upper, (case, r)
    for case in _stored["brackets"]:
        r = run(case, tolerance=tolerance)
        assert r.lower <= case["upper"] * (1 + 1e-10) and case["lower"] * (1 - 1e-10) <= r.upper < math.inf, (case, r)
        assert r.met, (case, r)


@needs_truths
def test_methods_agree_on_stored_truths():
    "Each method by name: it holds the truth, and the intervals of all of them meet."
    for case in _stored["cases"][::4] + _stored["brackets"][2:]:
        intervals = [run(case, tolerance=1e-3, method=method) for method in METHODS if not (method != "direct" and case["T"] < 16)]
        for r in intervals:
            assert r.lower <= case.get("eps", case.get("upper")) * (1 + 2e-8), (case, r)
            assert r.upper >= case.get("eps", case.get("lower")) * (1 - 2e-8), (case, r)
        assert nested(intervals), (case, intervals)


# Cases in which dp-accounting, prv-accountant or both miss the truth
KNOWN = [
    (1, 0.01, 10**4, 1e-8, 8.185123), (1, 0.01, 10**4, 1e-9, 8.7654386), (1, 0.01, 10**4, 1e-10, 9.3161385), (1, 0.01, 10**4, 1e-11, 9.8420),
    (1, 0.01, 10**4, 1e-12, 10.3466898), (1, 0.01, 10**4, 1e-13, 10.8331), (1, 0.01, 10**4, 1e-15, 11.75998),
    (0.7, 0.001, 10**4, 1e-12, 4.5042735), (2, 0.01, 10**5, 1e-12, 12.9497105), (0.8, 0.02, 10**4, 1e-13, 37.5012), (1, 0.001, 10**5, 1e-12, 2.8941101),
    (4, 0.00033, 10**4, 1e-5, 0.022438048), (4, 0.00033, 10**4, 1e-12, 0.051084236), (4, 0.001, 10**4, 1e-6, 0.0921238043),
    (1, 0.01, 10**4, 1e-5, 6.18771239), (0.8, 0.02, 10**5, 1e-5, 119.315181),
]


def test_known_values():
    for noise, q, steps, delta, truth in KNOWN:
        digits = len(str(truth).split(".")[1])
        slack = 1.01 * 10.0**-digits
        r = dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=steps, delta=delta, tolerance=1e-4)
        assert r.lower - slack <= truth <= r.upper + slack and r.met, (truth, r)


def test_headline():
    r = dp_sgd_epsilon(noise_multiplier=0.5, sampling_probability=2e-5, steps=100_000, delta=1e-8)
    assert abs(r.upper / 2.2840592 - 1) <= 1e-3 and r.lower <= 2.28405920 <= r.upper
    r = dp_sgd_epsilon(noise_multiplier=0.5, sampling_probability=2e-5, steps=10**6, delta=1e-8, tolerance=1e-4)
    assert r.lower <= 3.0408423 and r.upper >= 3.0408421 and r.met


# Gaussians: the closed form, to 60 digits


@pytest.mark.parametrize("noise, steps, delta", [
    (1.0, 1, 1e-5), (1000.0, 1, 1e-5), (1e4, 1, 1e-5), (0.3, 1, 1e-3), (0.03, 1, 1e-3), (20, 1000, 1e-12), (20, 10**4, 1e-14), (100, 10**5, 1e-8),
    (100, 10**5, 1e-10), (100, 10**5, 1e-12), (20, 1000, 1e-15), (50, 10**6, 1e-20), (5, 100, 1e-30), (100, 10**6, 1e-30), (1, 1, 1e-30), (300, 7, 1e-30),
    (2, 1000, 1e-6), (0.5, 10**6, 1e-24), (0.46, 6374, 2.56e-17), (100, 1, 1e-3), (100, 37, 0.2),
])
def test_gaussian_exact(noise, steps, delta):
    "Without sampling the interval is as narrow as round-off, epsilon in the thousands included."
    r = dp_sgd_epsilon(noise_multiplier=noise, steps=steps, delta=delta)
    assert_holds(r, lambda e: gaussian_delta(noise, steps, e), delta)
    assert r.upper == 0 or r.upper - r.lower <= 1e-7 * r.upper


@pytest.mark.parametrize("method", ["direct", "two_stage"])
@pytest.mark.parametrize("noise, steps, delta", [
    (20, 1000, 1e-12), (20, 10**4, 1e-14), (100, 10**5, 1e-8), (100, 10**5, 1e-12), (50, 10**6, 1e-20), (10, 100, 1e-30), (100, 10**6, 1e-30),
    (3, 50, 1e-5), (7, 333, 1e-15), (200, 10**6, 1e-6), (1.0, 20, 1e-5),
])
def test_gaussian_on_grids(method, noise, steps, delta):
    "The same truth through the grids, on which nothing is known of Gaussians."
    for tolerance in (1e-3, 1e-4):
        r = epsilon_bounds(Gaussian(noise), steps, delta=delta, tolerance=tolerance, method=method)
        assert_holds(r, lambda e: gaussian_delta(noise, steps, e), delta)
        assert r.met, r


def test_gaussian_self_composed():
    "PLD objects, powers of them: both directions of the bound, at every epsilon of the curve."
    for noise, steps, step in ((20, 1000, 2e-3), (100, 10**5, 4e-4), (5, 10, 1e-2), (30, 37, 1e-3)):
        upper, lower = connect_the_dots(Gaussian(noise), step) ** steps, merge_the_dots(Gaussian(noise), step) ** steps
        for epsilon in np.linspace(0.05, 10, 9) * math.sqrt(steps) / noise:
            truth = gaussian_delta(noise, steps, float(epsilon))
            if truth < 1e-32:
                continue
            assert lower.delta(float(epsilon)) <= truth <= upper.delta(float(epsilon)), (noise, steps, epsilon)
        for delta in (1e-3, 1e-8, 1e-12, 1e-20, 1e-30):
            assert gaussian_delta(noise, steps, upper.epsilon(delta)) <= delta
            assert lower.epsilon(delta) == 0 or gaussian_delta(noise, steps, lower.epsilon(delta)) >= delta
            assert upper.epsilon(delta) < math.inf and (upper.epsilon(delta) - lower.epsilon(delta)) <= 2e-2 * upper.epsilon(delta)


def test_different_gaussians():
    "Precisions add up: as one mechanism, and through grids with another pair that hides nothing."
    parts = [(Gaussian(5.0), 10), (Gaussian(9.0), 20), (Gaussian(3.0), 1)]
    noise = 1 / math.sqrt(10 / 25 + 20 / 81 + 1 / 9)
    for method in ("auto", "direct"):
        r = epsilon_bounds(parts, delta=1e-7, tolerance=1e-4, method=method)
        assert gaussian_delta(noise * (1 - 1e-14), 1, r.lower) >= 1e-7 >= gaussian_delta(noise * (1 + 1e-14), 1, r.upper) and r.met


# Pure differential privacy and discrete pairs: enumeration in fractions


@pytest.mark.parametrize("scale", [0.2, 3.0, 50.0])
def test_laplace(scale):
    for delta in (0.3, 1e-2, 1e-5, 1e-12, 1e-30):
        if laplace_delta(scale, 0) <= delta:
            continue
        assert_holds(epsilon_bounds(Laplace(scale), delta=delta), lambda e: laplace_delta(scale, e), delta)
        if delta > 1e-30:
            r = epsilon_bounds(Laplace(scale), 2, delta=delta)
            assert_holds(r, lambda e: laplace_delta_twice(scale, e), delta)
            assert r.met, r
    for steps in (1, 2, 10, 1000):
        r = epsilon_bounds(Laplace(scale), steps, delta=0)
        assert r.lower <= steps / scale <= r.upper and r.upper - r.lower <= 1e-12 * r.upper
        law = connect_the_dots(Laplace(scale), 0.05 / scale) ** min(steps, 10)
        assert law.epsilon(0) == pytest.approx(min(steps, 10) / scale, rel=1e-12)


@pytest.mark.parametrize("truth, answers", [(Fraction(3, 4), 2), (Fraction(1, 2), 3), (Fraction(9, 10), 5), (Fraction(33, 64), 2)])
def test_randomized_response(truth, answers):
    rest = (1 - truth) / (answers - 1)
    p, q = [truth, rest] + [rest] * (answers - 2), [rest, truth] + [rest] * (answers - 2)
    if answers > 3:  # answers with equal probabilities are one
        p, q = [truth, rest, rest * (answers - 2)], [rest, truth, rest * (answers - 2)]
    pair = RandomizedResponse(float(truth), answers)
    for n in (1, 2, 5, 12):
        law = discrete_law(p, q, n)
        for delta in (0.1, 1e-2, 1e-4, 1e-9):
            for method in ("auto", "direct"):
                r = epsilon_bounds(pair, n, delta=delta, method=method)
                assert_holds(widened(r), lambda e: law_delta(law, e), delta)
                assert r.met, (n, delta, r)
        r = epsilon_bounds(pair, n, delta=0)
        assert r.lower <= law_max_loss(law) <= r.upper and r.met


class widened:
    "An interval with room for the inputs' own rounding: 0.9 is no binary number."

    def __init__(self, r):
        self.lower, self.upper, self.r = r.lower * (1 - 1e-14), r.upper * (1 + 1e-14), r

    def __repr__(self):
        return repr(self.r)


def test_ten_randomized_responses():
    "dp-accounting's accountant ignores the count here and says 1.0987."
    r = epsilon_bounds(RandomizedResponse(0.75), 10, delta=1e-6)
    truth = math.log((0.75**10 - 1e-6) / 0.25**10)
    assert r.lower <= truth * (1 + 1e-12) and truth * (1 - 1e-12) <= r.upper and r.met


@pytest.mark.parametrize("seed", range(6))
def test_random_discrete_pairs(seed):
    "Random laws on a few outputs, in sixty-fourths and so exact as floats; both directions of the pair; some with infinite loss."
    rng = np.random.default_rng(seed)
    k = int(rng.integers(2, 5))
    counts = [rng.multinomial(64 - k, np.ones(k) / k) + 1 for _ in range(2)]
    if seed % 3 == 2:  # an output that Q never gives
        counts[1][0] += counts[1][1]
        counts[1][1] = 0
    p, q = ([Fraction(int(c), 64) for c in one] for one in counts)
    pair = DiscretePair([float(x) for x in p], [float(x) for x in q])
    for n in (1, 3, 6):
        law = discrete_law(p, q, n)
        worst = lambda e: max(law_delta(law, e), law_delta(law, e, True))
        for delta in (0.05, 1e-3, 1e-6):
            if worst(40.0) >= delta:
                r = epsilon_bounds(pair, n, delta=delta)
                assert r.upper == math.inf, (p, q, n, delta, r)  # more mass than delta is where the other law has none
                continue
            r = epsilon_bounds(pair, n, delta=delta)
            assert_holds(r, worst, delta)
            assert r.met == (r.upper - r.lower <= r.tolerance * r.upper), (p, q, n, delta, r)  # met, or flagged
        largest = max(law_max_loss(law), law_max_loss(law, True))
        r = epsilon_bounds(pair, n, delta=0)
        assert r.lower <= largest <= r.upper
        assert (r.upper == math.inf) == (largest == math.inf)
        for step in (0.05, 0.3):
            for swapped in (False, True):
                upper, lower = connect_the_dots(pair, step), merge_the_dots(pair, step)
                if swapped:
                    upper, lower = upper.swap(), lower.swap()
                upper, lower = upper**n, lower**n
                for e in np.linspace(-1.0, 4.0, 11):
                    truth = law_delta(law, float(e), swapped)
                    assert lower.delta(float(e)) <= truth + mp_tiny and truth <= upper.delta(float(e)) + mp_tiny, (n, step, swapped, e)


mp_tiny = 1e-300


@pytest.mark.parametrize("q", [Fraction(1, 8), Fraction(1, 1024), Fraction(7, 8)])
def test_sampled_randomized_response(q):
    "A discrete pair under Poisson sampling is another discrete pair."
    p0, q0 = [Fraction(3, 4), Fraction(1, 4)], [Fraction(1, 4), Fraction(3, 4)]
    mixed = [(1 - q) * b + q * a for a, b in zip(p0, q0)]
    pair = PoissonSubsampled(DiscretePair([0.75, 0.25], [0.25, 0.75]), float(q))
    for n in (1, 4, 20):
        law = discrete_law(mixed, q0, n)
        worst = lambda e: max(law_delta(law, e), law_delta(law, e, True))
        for delta in (1e-2, 1e-5, 1e-10):
            if worst(0.0) <= delta:
                continue
            r = epsilon_bounds(pair, n, delta=delta)
            assert_holds(r, worst, delta)


# The second opinion


def smooth_cases(count):
    rng = np.random.default_rng(2026)
    for _ in range(count):
        noise, q = (float(np.exp(rng.uniform(*np.log(ends)))) for ends in ((0.6, 6.0), (2e-3, 0.3)))
        yield round(noise, 3), round(q, 5), int(np.exp(rng.uniform(math.log(1000), math.log(2e5)))), float(10 ** rng.uniform(-16, -3))


def test_contour_quadrature():
    "At least 40 random smooth cases: the quadrature, its errors charged, meets the certified interval; so does it on another line."
    seen = stopped = 0
    for i, (noise, q, steps, delta) in enumerate(smooth_cases(56)):
        try:
            low, high = contour.both_directions(noise, q, steps, delta)
        except ArithmeticError:
            continue  # the quadrature says itself that the case is not smooth
        seen += 1
        if i % 4 == 0:
            again = contour.both_directions(noise, q, steps, delta, stretch=0.85, refine=1.4, nodes=1700)
            assert max(low, again[0]) <= min(high, again[1]) * (1 + 1e-8), (noise, q, steps, delta)
        r = dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=steps, delta=delta, tolerance=(1e-3, 1e-4, 1e-5)[i % 3])
        assert r.lower <= high * (1 + 1e-8) and low * (1 - 1e-8) <= r.upper, ((noise, q, steps, delta), (low, high), r)
        stopped += not r.met
    assert seen >= 40 and stopped <= 2, (seen, stopped)
