"""More than five hundred cases in which the truth is known otherwise: no bound may be on its wrong side.

Truths: the closed form of composed Gaussians, single releases in 50 digits, exact binomial sums for two-valued losses (also sampled ones), convolution
of lattices in extended precision, quadrature over the first of two releases, and the contour of `tests/contour.py`. Each comes with its own error.
"""

import json
import math

import mpmath as mp
import numpy as np
import pytest

import contour
from accounting_exact import gaussian_delta

from databloom.black_boxes import ApproximateDP, PureDP, ZeroConcentratedDP
from databloom.connect_the_dots import dp_sgd_epsilon, epsilon_bounds, schedule_epsilon
from databloom.core import data_folder
from databloom.mechanisms import DiscreteGaussian, DiscreteLaplace, Gaussian, Laplace, PoissonSubsampled
from databloom.sampling import MixtureOfGaussians, ReplaceOne, TruncatedPoisson, WithoutReplacement, worst_case
from databloom.selection import BoundedRange

CASES = dict(judged=0, wide=0, infinite=0)
DELTAS = [1e-3, 1e-5, 1e-6, 1e-8, 1e-10, 1e-12, 1e-15, 1e-20, 1e-30]


def judge(bounds, delta_at, delta, error=1e-12):
    "Both ends against a decreasing delta(epsilon) with a relative error; a wide interval must say so."
    CASES["judged"] += 1
    if bounds.upper == math.inf:
        CASES["infinite"] += 1
        assert not bounds.met or bounds.lower == math.inf
        return
    assert delta_at(bounds.upper) <= delta * (1 + error) + mp.mpf(10) ** -290, ("upper bound below the truth", bounds)
    if bounds.lower:
        assert bounds.lower <= bounds.upper and delta_at(bounds.lower) >= delta * (1 - error), ("lower bound above the truth", bounds)
    if not bounds.met:
        CASES["wide"] += 1
    elif bounds.lower is not None:
        assert bounds.upper - bounds.lower <= bounds.tolerance * bounds.upper


# ---- composed Gaussians: one formula for any number of steps

GAUSSIANS = [(noise, steps, delta) for i, (noise, steps) in enumerate(
    [(0.3, 1), (1, 1), (30, 1), (1e3, 1), (1e4, 10**6), (2, 10), (20, 1000), (100, 10**4), (50, 10**5), (300, 10**5), (1000, 10**6), (200, 10**6), (7, 100), (1e4, 1)]) for delta in DELTAS]


@pytest.mark.parametrize("method", ["auto", "direct"])
def test_gaussians(method):
    "By the closed form, and on a grid that knows nothing of it."
    for noise, steps, delta in GAUSSIANS if method == "auto" else GAUSSIANS[3::4]:
        bounds = epsilon_bounds(Gaussian(noise), steps, delta=delta, method=method)
        judge(bounds, lambda e: gaussian_delta(noise, steps, e), delta)


def test_different_gaussians():
    rng = np.random.default_rng(11)
    for case in range(24):
        noises, counts = rng.uniform(3, 60, 3), rng.integers(1, 400, 3)
        delta = DELTAS[case % 9]
        precision = sum(int(n) / s**2 for s, n in zip(noises, counts))
        parts = [(Gaussian(float(s)), int(n)) for s, n in zip(noises, counts)]
        bounds = epsilon_bounds(parts, delta=delta, method="direct" if case % 2 else "auto")
        judge(bounds, lambda e: gaussian_delta(1 / math.sqrt(precision), 1, e), delta, 1e-11)


# ---- single releases in 50 digits

def _root_of_loss(noise, moves, weights, target, mirrored):
    "The output of that loss in double precision, by bisection; None if there is none."
    moves, logs = np.array(moves), np.log(np.array(weights)) - 0.5 * (np.array(moves) / noise) ** 2
    one = lambda x: float(np.logaddexp.reduce(logs + moves * x / noise**2))
    loss = lambda x: one(x) - (one(-x) if mirrored else 0.0)
    low, high = -1500 * noise, 1500 * noise
    if not loss(low) < target < loss(high):
        return None
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if loss(middle) < target else (low, middle)
    return low


def mixture_delta(noise, moves, weights, epsilon, mirrored=False, swapped=False):
    "Hockey stick of sum w_i N(s_i, noise^2) against N(0, noise^2), or against its mirror image."
    with mp.workdps(36):
        noise, epsilon = mp.mpf(noise), mp.mpf(epsilon)
        moves, weights = [mp.mpf(m) for m in moves], [mp.mpf(w) for w in weights]
        ratio = lambda x: sum(w * mp.exp((2 * m * x - m * m) / (2 * noise**2)) for m, w in zip(moves, weights))
        loss = lambda x: mp.log(ratio(x)) - (mp.log(ratio(-x)) if mirrored else 0)
        above = lambda x, m: mp.erfc((x - m) / noise / mp.sqrt(2)) / 2
        target = -epsilon if swapped else epsilon
        if mp.log(sum(w for m, w in zip(moves, weights) if m == 0) or mp.mpf("1e-400")) >= target and not mirrored:
            return mp.mpf(0) if swapped else 1 - mp.exp(epsilon)
        low = _root_of_loss(float(noise), [float(m) for m in moves], [float(w) for w in weights], float(target), mirrored)
        if low is None:
            return mp.mpf(0) if target > 0 else None
        low = mp.mpf(low)
        for _ in range(3):  # Newton's method, each step twice as many digits
            slope = lambda x: sum(w * m * mp.exp((2 * m * x - m * m) / (2 * noise**2)) for m, w in zip(moves, weights)) / noise**2 / ratio(x)
            low -= (loss(low) - target) / (slope(low) + (slope(-low) if mirrored else 0))
        p = sum(w * above(low, m) for m, w in zip(moves, weights))
        q = sum(w * above(low, -m) for m, w in zip(moves, weights)) if mirrored else above(low, 0)
        return (1 - q) - mp.exp(epsilon) * (1 - p) if swapped else p - mp.exp(epsilon) * q


def binomial(k, q):
    return [math.comb(k, i) * q**i * (1 - q) ** (k - i) for i in range(k + 1)]


def test_one_sampled_step():
    "Rates from 1e-6 to near 1, by the exact release; every fifth also on a grid."
    rng = np.random.default_rng(3)
    for case in range(36):
        noise, q, delta = float(np.exp(rng.uniform(-1, 2))), float(10 ** rng.uniform(-6, -0.05)), DELTAS[case % 9]
        truth = lambda e: max(mixture_delta(noise, [0, 1], [1 - mp.mpf(q), q], e), mixture_delta(noise, [0, 1], [1 - mp.mpf(q), q], e, swapped=True))
        for method in ("auto", "direct")[: 1 + (case % 5 == 0)]:
            bounds = epsilon_bounds(PoissonSubsampled(Gaussian(noise), q), delta=delta, method=method)
            judge(bounds, truth, delta, 1e-9)


def test_one_step_of_groups_and_replacements():
    rng = np.random.default_rng(4)
    for case in range(40):
        noise, q, delta, k = float(np.exp(rng.uniform(-0.7, 2))), float(10 ** rng.uniform(-4, -0.3)), DELTAS[case % 9], 1 + case % 4
        mirrored = case % 2 == 1
        pair = ReplaceOne(noise, q, k) if mirrored else MixtureOfGaussians(noise, range(k + 1), binomial(k, q))
        weights = binomial(k, q)
        truth = lambda e: max(mixture_delta(noise, range(k + 1), weights, e, mirrored), 0 if mirrored else mixture_delta(noise, range(k + 1), weights, e, swapped=True))
        judge(epsilon_bounds(pair, delta=delta), truth, delta, 1e-8)


def test_one_selection():
    for length in (0.01, 0.3, 1.0, 4.0, 20.0):
        for delta in DELTAS[:6]:
            truth = lambda e: (mp.exp(mp.mpf(length) / 2) - mp.exp(min(mp.mpf(e), mp.mpf(length)) / 2)) ** 2 / mp.expm1(mp.mpf(length))
            judge(epsilon_bounds(BoundedRange(length), delta=delta), truth, delta)


# ---- losses of two values: exact binomial sums, up to a million steps

def sure(size):
    "Probability of the true answer of randomised response."
    with mp.workdps(40):
        return 1 / (1 + mp.exp(-mp.mpf(size)))


def two_valued_delta(p, q, n, epsilon, swapped=False):
    "n times the pair ((p, 1 - p), (q, 1 - q)), p > q."
    with mp.workdps(40):
        p, epsilon = mp.mpf(p), mp.mpf(epsilon)
        q = 1 - p if q is None else mp.mpf(q)
        if swapped:
            p, q = 1 - q, 1 - p
        up, down = mp.log(p / q), mp.log((1 - p) / (1 - q))
        k = max(0, int(mp.floor((epsilon - n * down) / (up - down))) + 1)
        if k > n:
            return mp.mpf(0)
        start = mp.loggamma(n + 1) - mp.loggamma(k + 1) - mp.loggamma(n - k + 1) + k * mp.log(p) + (n - k) * mp.log(1 - p)
        first, fall = epsilon - k * up - (n - k) * down, down - up
        # the terms from k on, in long doubles, as far as they matter
        i = np.arange(min(n - k, max(0, int(n * p) - k) + int(30 * math.sqrt(n * p * (1 - p))) + 300), dtype=np.longdouble)
        steps = np.log(np.longdouble(float(p / (1 - p)))) + np.log((n - k - i) / (k + i + 1))
        log_terms = np.append(np.longdouble(0), np.cumsum(steps))
        gain = -np.expm1(np.longdouble(float(first)) + np.longdouble(float(fall)) * np.arange(len(log_terms)))
        scale = log_terms.max()
        return mp.exp(start + float(scale)) * mp.mpf(float((np.exp(log_terms - scale) * gain).sum()))


TWO_VALUED = [(0.01, 10**4), (0.002, 10**5), (0.1, 100), (0.5, 30), (1.0, 12), (1.0, 300), (2.0, 10), (3.0, 2), (0.003, 10**4), (0.2, 1000), (5.0, 40), (0.05, 1000)]


def test_pure_boxes():
    for size, n in TWO_VALUED:
        p = sure(size)
        for delta in DELTAS:
            judge(epsilon_bounds(PureDP(size), n, delta=delta), lambda e: two_valued_delta(p, None, n, e), delta, 1e-9)


def test_sampled_boxes():
    "Rates from 1e-6, up to a million steps."
    rng = np.random.default_rng(5)
    for case in range(72):
        size, q, n = float(rng.uniform(0.3, 3)), float(10 ** rng.uniform(-6, -0.3)), int(10 ** rng.uniform(0, 6))
        if n * q * (1 - q) > 3000:
            n = max(1, int(3000 / q))
        delta = DELTAS[case % 9]
        with mp.workdps(40):
            p1, q1 = (1 - mp.mpf(q)) * (1 - sure(size)) + q * sure(size), 1 - sure(size)
        truth = lambda e: max(two_valued_delta(p1, q1, n, e), two_valued_delta(p1, q1, n, e, swapped=True))
        judge(epsilon_bounds(PoissonSubsampled(PureDP(size), q), n, delta=delta), truth, delta, 1e-8)


def test_approximate_boxes():
    for size, n in TWO_VALUED[2:8]:
        p = sure(size)
        for slack in (1e-9, 1e-12):
            for delta in (1e-5, 1e-8):
                with mp.workdps(40):
                    lost = 1 - (1 - mp.mpf(slack)) ** n
                truth = lambda e: lost + (1 - lost) * two_valued_delta(p, None, n, e)
                judge(epsilon_bounds(ApproximateDP(size, slack), n, delta=delta), truth, delta, 1e-9)


# ---- whole-numbered noise: the loss is linear in the sum of the noises, which a convolution knows

def lattice_delta(law, first, n, move, loss_step, epsilon):
    "n times integer noise of the given law (its first value `first`), losses move by lattice; long doubles, no cancellation in sums."
    total, base, start = None, law.astype(np.longdouble), first
    power, power_start, m = base, start, n
    total_start = 0
    while m:
        if m & 1:
            total, total_start = (power, power_start) if total is None else (np.convolve(total, power), total_start + power_start)
        m >>= 1
        if m:
            power, power_start = np.convolve(power, power), 2 * power_start
    losses = loss_step(total_start + np.arange(len(total)))
    return float((total * np.where(losses > epsilon, -np.expm1(np.longdouble(epsilon) - losses), 0)).sum())


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_integer_noise(kind):
    for scale, move, n in ((0.7, 1, 8), (1.0, 1, 40), (2.5, 2, 30), (3.0, 5, 3), (6.0, 3, 16), (1.0, 1, 1)):
        for delta in DELTAS[:5]:
            if kind == "gaussian":
                pair, reach = DiscreteGaussian(scale, move), int(14 * scale) + 2
                x = np.arange(-reach, reach + 1)
                law = np.exp(-np.longdouble(0.5) * (x / np.longdouble(scale)) ** 2)
                law, first, loss = law / law.sum(), -reach, lambda s: np.longdouble(move) * (2 * s + n * move) / (2 * np.longdouble(scale) ** 2)
            else:  # the loss of one release, an integer from -move to move
                pair, x = DiscreteLaplace(scale, move), np.arange(move + 1)
                r = np.exp(-1 / np.longdouble(scale))
                law = (1 - r) / (1 + r) * r ** (move - x)
                law[0], law[-1] = r**move / (1 + r), 1 / (1 + r)
                first, loss = 0, lambda s: (2 * s - n * move) / np.longdouble(scale)
            judge(epsilon_bounds(pair, n, delta=delta), lambda e: lattice_delta(law, first, n, move, loss, e), delta, 1e-9)


# ---- two releases: quadrature over the first one

def twice(atoms, density, delta_at, ends):
    "delta at epsilon of two releases: `atoms` (loss, mass) and a density of the first loss's outputs with its loss, on panels."
    nodes, weights = np.polynomial.legendre.leggauss(12)
    edges = np.linspace(*ends, 41)
    x = (0.5 * (edges[:-1] + edges[1:])[:, None] + 0.5 * np.diff(edges)[:, None] * nodes).ravel()
    w = (0.5 * np.diff(edges)[:, None] * weights).ravel()
    mass, loss = density(x)
    return lambda e: sum(m * delta_at(e - l) for l, m in atoms) + float(sum(w[i] * mass[i] * delta_at(e - loss[i]) for i in np.flatnonzero(mass * w > 1e-16)))


def normal(x, m, s):
    return np.exp(-0.5 * ((x - m) / s) ** 2) / s / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("case", [(0.8, 0.1, 1), (1.0, 0.4, 2)])
def test_two_steps_of_mixtures_and_mirrors(case):
    noise, q, k = case
    weights = binomial(k, q)
    p = lambda x: sum(w * normal(x, i, noise) for i, w in enumerate(weights))
    mirror = lambda x: sum(w * normal(x, -i, noise) for i, w in enumerate(weights))
    ends = -9 * noise - k, 9 * noise + k
    for pair, lower in ((MixtureOfGaussians(noise, range(k + 1), weights), lambda x: normal(x, 0, noise)), (ReplaceOne(noise, q, k), mirror)):
        single = lambda swapped: lambda e: pair.delta(float(e), swapped)[1] if e >= 0 else 1 - math.exp(e) + math.exp(e) * pair.delta(float(-e), not swapped)[1]
        forward = twice([], lambda x: (p(x), np.log(p(x) / lower(x))), single(False), ends)
        back = twice([], lambda x: (lower(x), np.log(lower(x) / p(x))), single(True), ends)
        for delta in (1e-3 if k == 2 else 1e-6,):
            judge(epsilon_bounds(pair, 2, delta=delta, tolerance=1e-4), lambda e: max(forward(e), back(e)), delta, 1e-6)


def test_fixed_size_batches_hold_real_neighbours():
    "Some neighbours of fixed-size batches are known: the bound must hold each of them, and be one of them for a single step."
    for noise, q, steps, delta in ((1.0, 0.01, 1, 1e-6), (2.0, 0.05, 1, 1e-4), (1.0, 0.01, 300, 1e-6), (3.0, 0.02, 2000, 1e-8), (2.0, 0.3, 20, 1e-5)):
        bound = epsilon_bounds(WithoutReplacement(Gaussian(noise / 2), q), steps, delta=delta)
        half = epsilon_bounds(PoissonSubsampled(Gaussian(noise / 2), q), steps, delta=delta)
        mirror = epsilon_bounds(ReplaceOne(noise, q), steps, delta=delta)
        capped = [epsilon_bounds(TruncatedPoisson(Gaussian(noise), q, dataset_size=1000, max_batch_size=cap), steps, delta=delta) for cap in (1, 1001)]
        poisson = epsilon_bounds(PoissonSubsampled(Gaussian(noise), q), steps, delta=delta)
        CASES["judged"] += 5
        assert bound.lower is None and bound.upper >= max(half.lower, mirror.lower)
        if steps == 1:
            assert bound.upper <= half.upper * (1 + 1e-9)
        assert capped[0].lower is None and capped[0].upper >= poisson.lower  # a cap of one is nearly always reached
        assert capped[1].lower is not None and abs(capped[1].upper - poisson.upper) <= 1e-3 * poisson.upper  # a cap that cannot be reached


# ---- DP-SGD: the contour, and stored truths

CONTOUR = [(1.0, 0.01, 10**4, 1e-5), (2.0, 0.01, 10**4, 1e-12), (0.8, 0.02, 10**4, 1e-13), (4.0, 0.00033, 10**5, 1e-18), (1.0, 0.01, 10**4, 1e-30), (3.0, 0.1, 2000, 1e-9)]


def test_contour():
    for noise, q, steps, delta in CONTOUR:
        low, high = contour.both_directions(noise, q, steps, delta, nodes=500)
        bounds = dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=steps, delta=delta)
        CASES["judged"] += 1
        assert bounds.met and bounds.lower <= high and low <= bounds.upper, (low, high, bounds)


def test_schedules_of_one_kind():
    "A schedule cut into pieces is the whole."
    for noise, q, steps, delta in CONTOUR[:3]:
        whole = dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=steps, delta=delta)
        parts = schedule_epsilon([(noise, q, steps // 4)] * 3 + [(noise * (1 + 1e-12), q, steps - 3 * (steps // 4))], delta=delta)
        CASES["judged"] += 1
        assert parts.lower <= whole.upper and whole.lower <= parts.upper and parts.met


@pytest.mark.skipif(data_folder("accounting_truths.json") is None, reason="DATABLOOM_DATA is not set, or holds no accounting_truths.json")
def test_stored_truths():
    for case in json.loads(data_folder("accounting_truths.json").read_text())["cases"]:
        bounds = dp_sgd_epsilon(noise_multiplier=case["sigma"], sampling_probability=case["q"], steps=case["T"], delta=case["delta"])
        CASES["judged"] += 1
        assert bounds.lower <= case["eps"] * (1 + 2e-8) and case["eps"] * (1 - 2e-8) <= bounds.upper and bounds.met, (case, bounds)


# ---- different mechanisms one after another, by enumeration of all outcomes

def atoms_of(kind, size, slack, q):
    "P- and Q-masses of the outcomes of a randomised response, of an approximate box, or of a sampled one, in long doubles."
    up = 1 / (1 + np.exp(-np.longdouble(size)))
    p, r = np.array([up, 1 - up]), np.array([1 - up, up])
    if kind == "approximate":
        return np.append((1 - np.longdouble(slack)) * p, [slack, 0]), np.append((1 - np.longdouble(slack)) * r, [0, slack])
    return (p, r) if kind == "pure" else ((1 - np.longdouble(q)) * r + np.longdouble(q) * p, r)


def test_mixed_lists():
    rng = np.random.default_rng(8)
    for case in range(48):
        p, r, parts = np.ones(1, np.longdouble), np.ones(1, np.longdouble), []
        for _ in range(rng.integers(2, 4)):
            kind, size, q, n = rng.choice(["pure", "approximate", "sampled"]), float(rng.uniform(0.05, 2)), float(10 ** rng.uniform(-3, -0.2)), int(rng.integers(1, 4))
            parts.append((dict(pure=PureDP(size), approximate=ApproximateDP(size, 1e-9), sampled=PoissonSubsampled(PureDP(size), q))[kind], n))
            for _ in range(n):
                one, other = atoms_of(kind, size, 1e-9, q)
                p, r = np.multiply.outer(p, one).ravel(), np.multiply.outer(r, other).ravel()
        truth = lambda e: float(max(np.maximum(a - np.exp(np.longdouble(e)) * b, 0).sum() for a, b in ((p, r), (r, p))))
        delta = [1e-2, 1e-4, 1e-6][case % 3]
        judge(epsilon_bounds(parts, delta=delta), truth, delta, 1e-10)


# ---- Rényi curves: a Gaussian keeps the promise of its zCDP

def test_concentrated_boxes_hold_a_gaussian():
    for rho in (1e-4, 0.01, 0.5, 5.0):
        for delta in DELTAS:
            CASES["judged"] += 1
            upper = epsilon_bounds(ZeroConcentratedDP(rho), delta=delta).upper
            assert gaussian_delta(math.sqrt(0.5 / rho), 1, upper) <= delta
            assert upper <= rho + 2 * math.sqrt(rho * math.log(1 / delta)) * (1 + 1e-9)  # Bun and Steinke's own conversion


def test_many_cases_few_of_them_wide():
    "The suite is as large as it says, and intervals wider than asked, or infinite, are rare."
    if CASES["judged"] < 400:
        pytest.skip("only a part of the suite was run")
    assert CASES["judged"] >= 500, CASES
    assert CASES["wide"] <= 0.03 * CASES["judged"] and CASES["infinite"] <= 0.01 * CASES["judged"], CASES
