"""Privacy loss distributions: composition, direction of the bounds, and what carries them from one form to another."""

import dataclasses
import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest

from accounting_exact import discrete_law, gaussian_delta, law_delta

from databloom.connect_the_dots import connect_the_dots, connect_the_dots_of_curve, merge_the_dots, privacy_buckets
from databloom.mechanisms import DiscretePair, Gaussian, Laplace, PoissonSubsampled, RandomizedResponse
from databloom.pld import PLD, compose, hockey_stick, pld_from_json, split_up

PAIRS = {
    "gaussian": Gaussian(1.3), "narrow gaussian": Gaussian(40.0), "wide gaussian": Gaussian(0.5), "laplace": Laplace(0.7), "response": RandomizedResponse(0.8, 3),
    "sampled gaussian": PoissonSubsampled(Gaussian(0.9), 0.03), "rarely sampled gaussian": PoissonSubsampled(Gaussian(0.5), 2e-5),
    "sampled laplace": PoissonSubsampled(Laplace(0.5), 0.2), "discrete": DiscretePair([0.5, 0.3, 0.15, 0.05], [0.1, 0.3, 0.2, 0.4]),
    "with infinite losses": DiscretePair([0.5, 0.25, 0.25, 0.0], [0.25, 0.5, 0.0, 0.25]),
}
STEPS = (0.003, 0.05, 0.4)
each_pair = pytest.mark.parametrize("name", PAIRS)


def epsilons(pair):
    "Where to look: through the bulk, the edges and far tails."
    scale = 1.0 if not isinstance(pair, Gaussian) else 6 / pair.noise_multiplier
    return np.concatenate([np.linspace(-1, 1, 21) * scale, scale * np.array([1.5, 2.7]), [1e-9, -1e-9]])


@each_pair
@pytest.mark.parametrize("swapped", [False, True])
def test_domination(name, swapped):
    "One release: the upper law is never below the pair's own divergence, the lower one never above; in the reversed direction too."
    pair = PAIRS[name]
    for step in STEPS:
        upper, lower = connect_the_dots(pair, step), merge_the_dots(pair, step)
        if swapped:
            upper, lower = upper.swap(), lower.swap()
        assert upper.bound == "upper" and lower.bound == "lower"
        for e in epsilons(pair):
            least, most = pair.delta(float(e), swapped)
            assert lower.delta(float(e)) <= most * (1 + 1e-12) + 1e-300, (step, e)
            assert upper.delta(float(e)) >= least * (1 - 1e-12), (step, e)
        assert np.all(np.diff(upper.delta(np.sort(epsilons(pair)))) <= 0) and np.all(np.diff(lower.delta(np.sort(epsilons(pair)))) <= 0)


@each_pair
def test_tight(name):
    "Both laws come close to the pair as the step shrinks."
    pair = PAIRS[name]
    gaps = []
    for step in (0.02, 0.002):
        upper, lower = connect_the_dots(pair, step), merge_the_dots(pair, step)
        gaps.append(np.abs(upper.delta(epsilons(pair)) - lower.delta(epsilons(pair))).max())
    assert gaps[1] <= max(0.15 * gaps[0], 2e-5), gaps


@each_pair
def test_dots_beat_buckets(name):
    "Privacy Buckets bound from both sides too, and never tighter."
    pair = PAIRS[name]
    for step in STEPS:
        dots = connect_the_dots(pair, step)
        up, down = privacy_buckets(pair, step), privacy_buckets(pair, step, "lower")
        for e in epsilons(pair):
            least, most = pair.delta(float(e))
            assert up.delta(float(e)) >= least * (1 - 1e-12) and down.delta(float(e)) <= most * (1 + 1e-12) + 1e-300, (step, e)
            assert dots.delta(float(e)) <= up.delta(float(e)) * (1 + 1e-9) + 1e-15, (step, e)
    step = 0.02 * min(1.0, max(abs(epsilons(pair))))
    up, down, dots, merged = (f**10 for f in (privacy_buckets(pair, step), privacy_buckets(pair, step, "lower"), connect_the_dots(pair, step), merge_the_dots(pair, step)))
    for e in (0.1, 1.0):
        assert up.delta(e) >= dots.delta(e) * (1 - 1e-9) and down.delta(e) <= dots.delta(e) * (1 + 1e-9) and merged.delta(e) <= up.delta(e) * (1 + 1e-9)


@each_pair
def test_upper_over_lower_through_stages(name):
    "Composition, coarsening, truncation and composition again, in many orders: the upper law stays above the lower one."
    pair, grid = PAIRS[name], np.linspace(-1.0, 6.0, 15)
    upper, lower = connect_the_dots(pair, 0.02), merge_the_dots(pair, 0.02)
    reference = upper**12, lower**12
    steps = {
        "compose": lambda law: law**12,
        "stages": lambda law: (law**3).coarsen(0.05)**4,
        "coarse first": lambda law: law.coarsen(0.05)**12,
        "truncated": lambda law: (law.truncate(1e-12)**4).truncate(1e-12)**3,
        "products": lambda law: ((law * law)**2 * (law**2 * law**3)) * (law**2 * law),
        "three stages": lambda law: (((law**2).coarsen(0.03)**2).coarsen(0.1))**3,
    }
    for what, path in steps.items():
        high, low = path(upper), path(lower)
        assert high.bound == "upper" and low.bound == "lower"
        assert np.all(low.delta(grid) <= high.delta(grid)), what
        assert np.all(low.delta(grid) <= reference[0].delta(grid)) and np.all(reference[1].delta(grid) <= high.delta(grid)), what


@each_pair
def test_coarsen_and_truncate_keep_direction(name):
    pair, grid = PAIRS[name], np.sort(epsilons(PAIRS[name]))
    for law, sign in ((connect_the_dots(pair, 0.01), 1), (merge_the_dots(pair, 0.01), -1)):
        before, slack = law.delta(grid), 1e-12 + 4e-15 * len(law.masses)  # each charges its own round-off, by cells
        for after in (law.coarsen(0.01), law.coarsen(0.03), law.coarsen(0.0731), law.coarsen(1.0), law.truncate(1e-6), law.truncate(1e-30), law.truncate(0.0)):
            assert np.all(sign * (after.delta(grid) - before) >= -slack * before - 1e-300), (name, after)
            assert after.bound == law.bound
        assert law.coarsen(0.0731).step == 0.0731 and len(law.coarsen(0.0731).masses) < len(law.masses) + 2
        for delta in (1e-2, 1e-6):
            assert sign * (law.coarsen(0.05).epsilon(delta) - law.epsilon(delta)) >= -1e-9 or not math.isfinite(law.epsilon(delta))


@each_pair
def test_epsilon_inverts_delta(name):
    for law in (connect_the_dots(PAIRS[name], 0.02)**5, merge_the_dots(PAIRS[name], 0.02)**5):
        for delta in (0.3, 1e-2, 1e-5, 1e-9, 1e-20):
            e = law.epsilon(delta)
            if e in (0.0, math.inf):
                continue
            if law.bound == "upper":
                assert law.delta(e) <= delta * (1 + 1e-7)
                assert law.delta(e - max(1e-6, 1e-6 * e)) >= delta * (1 - 1e-7) or law.tail_mass > 0
            else:
                assert law.delta(e - 1e-9 * max(1.0, e)) >= delta * (1 - 1e-7)
        values = law.epsilon(np.array([0.3, 1e-2, 1e-5]))
        assert values.shape == (3,) and np.all(np.diff(values) >= 0)
        assert law.epsilon(1.0) == 0.0


@each_pair
def test_order_of_composition(name):
    "a * b = b * a, and powers by any grouping, as far as the bounds can tell."
    grid = np.linspace(0.0, 4.0, 9)
    for build, other in ((connect_the_dots, merge_the_dots), (merge_the_dots, connect_the_dots)):
        a, b = build(PAIRS[name], 0.02), build(Laplace(2.0), 0.02)
        if abs(a.step - b.step) > 1e-15:
            b = build(PAIRS[name], 0.02) ** 2
        left, right = a * b, b * a
        np.testing.assert_allclose(left.delta(grid), right.delta(grid), rtol=1e-6, atol=1e-13)
        np.testing.assert_allclose((a**6).delta(grid), ((a**2)**3).delta(grid), rtol=1e-5, atol=1e-12)
        np.testing.assert_allclose(compose([(a, 2), (b, 1)]).delta(grid), compose([(b, 1), (a, 1), (a, 1)]).delta(grid), rtol=1e-6, atol=1e-13)


@each_pair
def test_json_round_trip(name, tmp_path):
    for law in (connect_the_dots(PAIRS[name], 0.05), merge_the_dots(PAIRS[name], 0.05), connect_the_dots(PAIRS[name], 0.05)**4, merge_the_dots(PAIRS[name], 0.05)**4):
        again = pld_from_json(law.to_json())
        assert np.array_equal(again.masses, law.masses)
        for field in dataclasses.fields(PLD):
            if field.name != "masses":
                assert getattr(again, field.name) == getattr(law, field.name), field.name
        law.to_json(tmp_path / "law.json")
        json.loads((tmp_path / "law.json").read_text())  # plain JSON, no NaN or Infinity
        assert pld_from_json(tmp_path / "law.json").delta(0.5) == law.delta(0.5)


def test_swap_twice():
    for pair in PAIRS.values():
        law = connect_the_dots(pair, 0.05)
        np.testing.assert_allclose(law.swap().swap().masses, law.masses, rtol=1e-12, atol=1e-300)


def test_atoms_exactly():
    "A law with its atoms on the grid composes exactly: binomial sums in fractions, delta 0 exact."
    step = math.log(3)
    law = PLD(np.array([0.25, 0.0, 0.75]), step, -step)
    for n in (1, 2, 7, 30):
        truth = discrete_law([Fraction(3, 4), Fraction(1, 4)], [Fraction(1, 4), Fraction(3, 4)], n)
        power = law**n
        assert power.epsilon(0.0) == pytest.approx(n * step, rel=1e-13)
        for e in np.linspace(-2, n * step * 0.95, 9):
            exact = float(law_delta(truth, float(e)))
            assert exact * (1 - 1e-12) <= power.delta(float(e)) <= exact * (1 + 1e-6) + 1e-35, (n, e)


def test_mean_and_variance_add_up():
    law = connect_the_dots(Gaussian(2.0), 0.01)
    assert law.mean == pytest.approx(0.125, abs=1e-4) and law.variance == pytest.approx(0.25, rel=1e-3)
    power = law**50
    assert power.mean == pytest.approx(50 * law.mean, rel=1e-6) and power.variance == pytest.approx(50 * law.variance, rel=1e-6)


def test_trade_off():
    "Gaussian trade-off curve: Phi(Phi^-1(1 - alpha) - mu); below it for the upper law, above for the lower one."
    from scipy.stats import norm

    alpha = np.linspace(0.001, 0.999, 41)
    truth = norm.cdf(norm.ppf(1 - alpha) - 1 / 1.5)
    low, high = connect_the_dots(Gaussian(1.5), 0.005).trade_off(alpha), merge_the_dots(Gaussian(1.5), 0.005).trade_off(alpha)
    assert np.all(low <= truth + 1e-12) and np.all(truth <= high + 1e-12) and np.all(high - low <= 1e-3)


def test_curve_gives_a_dominating_law():
    "A law from nothing but values of delta(epsilon)."
    curve = np.vectorize(lambda e: float(gaussian_delta(1.0, 1, float(e))))
    law = connect_the_dots_of_curve(curve, -8.0, 0.05, 400)
    for e in (-2.0, 0.0, 0.31, 1.0, 3.3, 6.0):
        assert law.delta(e) >= float(gaussian_delta(1.0, 1, e)) * (1 - 1e-12)
    four = law**4
    for e in (0.0, 1.0, 4.0, 9.0):
        truth = float(gaussian_delta(1.0, 4, e))
        assert truth * (1 - 1e-12) <= four.delta(e) <= truth * 1.02 + 1e-6, e


def test_infinite_mass_and_dropped_mass():
    pair = PAIRS["with infinite losses"]
    law = connect_the_dots(pair, 0.1)
    assert law.infinity == pytest.approx(0.25, rel=1e-9) and law.epsilon(0.2) == math.inf and math.isfinite(law.epsilon(0.3))
    assert (law**3).infinity >= 1 - 0.75**3 - 1e-12
    assert (merge_the_dots(pair, 0.1)**3).delta(50.0) <= 1 - 0.75**3 + 1e-9


def test_hockey_stick():
    p, q = [0.5, 0.5, 0.0], [0.25, 0.5, 0.25]
    assert hockey_stick(p, q, 0.0) == 0.25 and hockey_stick(p, q, math.log(2)) == 0.0
    assert hockey_stick(q, p, 100.0) == 0.25  # where p has nothing
    assert np.array_equal(hockey_stick(p, q, np.array([[0.0, 5.0]])), [[0.25, 0.0]])


def test_split_up_keeps_both_masses():
    rng = np.random.default_rng(0)
    losses, masses = rng.uniform(-1, 1, 200), rng.dirichlet(np.ones(200))
    moved = split_up(losses, masses, -1.0, 0.07)
    grid = -1.0 + 0.07 * np.arange(len(moved))
    assert moved.sum() == pytest.approx(1.0, rel=1e-13)
    assert (moved * np.exp(-grid)).sum() == pytest.approx((masses * np.exp(-losses)).sum(), rel=1e-12)


def test_bad_input():
    law, other = connect_the_dots(Gaussian(1.0), 0.1), connect_the_dots(Gaussian(1.0), 0.2)
    for call, name in [
        (lambda: PLD([0.5, -0.1], 0.1, 0.0), "masses"), (lambda: PLD([0.5, math.nan], 0.1, 0.0), "masses"), (lambda: PLD([], 0.1, 0.0), "masses"),
        (lambda: PLD([1.0], 0.0, 0.0), "step"), (lambda: PLD([1.0], math.inf, 0.0), "step"), (lambda: PLD([1.0], 0.1, math.nan), "offset"),
        (lambda: PLD([1.0], 0.1, 0.0, "middle"), "bound"), (lambda: PLD([1.0], 0.1, 0.0, infinity=-0.1), "infinity"),
        (lambda: law.delta(math.nan), "epsilon"), (lambda: law.delta("1"), "epsilon"), (lambda: law.epsilon(-0.1), "delta"), (lambda: law.epsilon(1.5), "delta"),
        (lambda: law.self_compose(0), "n"), (lambda: law**-1, "n"), (lambda: law**1.5, "n"), (lambda: law.coarsen(0.05), "step"), (lambda: law.coarsen(math.nan), "step"),
        (lambda: law.truncate(2.0), "mass"), (lambda: law.truncate(1.0), "mass"), (lambda: law * other, "parts"),
        (lambda: law * merge_the_dots(Gaussian(1.0), 0.1), "parts"), (lambda: law.trade_off(1.5), "alpha"), (lambda: hockey_stick([1.0], [0.5, 0.5], 0.0), "q"),
        (lambda: hockey_stick([-1.0], [0.5], 0.0), "p"), (lambda: pld_from_json('{"masses": [1.0], "step": 0.1, "offset": 0.0, "colour": 1}'), "source"),
        (lambda: pld_from_json('{"masses": [-1.0], "step": 0.1, "offset": 0.0}'), "masses"),
    ]:
        with pytest.raises(ValueError, match=name):
            call()
