"Deltas, tables, trade-off curves, Gaussian privacy and attack rates against closed forms and exact sums; bad input by name."

import itertools
import json
import math

import mpmath
import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from databloom.answers import PrivacyProfile, attack_success, delta_bounds, dp_sgd_delta, epsilon_table, gdp_bounds, trade_off
from databloom.black_boxes import ApproximateDP, PureDP, ZeroConcentratedDP
from databloom.connect_the_dots import epsilon_bounds
from databloom.mechanisms import DiscretePair, Gaussian, Laplace, PoissonSubsampled, RandomizedResponse
from databloom.sampling import WithoutReplacement
from databloom.selection import ReportNoisyMax

RUN = PoissonSubsampled(Gaussian(0.5), 2e-5)


def gaussian_delta(mu, epsilon):
    mpmath.mp.dps = 60
    mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
    return float(mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu))


class Unmerged(Gaussian):
    "A Gaussian that is composed on a grid, for only the class itself has a closed form."


@pytest.mark.parametrize("mu, epsilon", [(1.0, 0.0), (1.0, 0.5), (1.0, 6.0), (1.0, 20.0), (0.01, 0.0), (0.01, 0.02), (10.0, 40.0), (10.0, 100.0), (3.0, 15.0)])
@pytest.mark.parametrize("steps", [9, 10_000])
def test_delta_of_gaussians(mu, epsilon, steps):
    truth = gaussian_delta(mu, epsilon)
    bounds = delta_bounds(Unmerged(math.sqrt(steps) / mu), steps, epsilon=epsilon)
    assert bounds.lower <= truth * (1 + 1e-12) and truth * (1 - 1e-12) <= bounds.upper and bounds.met, (bounds, truth)


@pytest.mark.parametrize("epsilon, steps, delta", [(2.2840592, 100_000, 1e-8), (0.0575899564067, 1, 1e-8), (3.0408422, 1_000_000, 1e-8)])
def test_delta_of_known_epsilons(epsilon, steps, delta):
    bounds = dp_sgd_delta(noise_multiplier=0.5, sampling_probability=2e-5, steps=steps, epsilon=epsilon)
    assert bounds.lower <= delta * (1 + 1e-6) and delta * (1 - 1e-6) <= bounds.upper <= delta * 1.002 and bounds.met


@pytest.mark.parametrize("seed", range(6))
def test_delta_of_discrete_pairs_by_enumeration(seed):
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(3)), rng.dirichlet(np.ones(3))
    n, pair = 5, DiscretePair(p, q)
    outputs = list(itertools.product(range(3), repeat=n))
    many_p, many_q = (np.array([math.prod(law[i] for i in o) for o in outputs]) for law in (p, q))
    for epsilon in (0.0, 0.4, 1.1):
        truth = max(np.maximum(many_p - math.exp(epsilon) * many_q, 0).sum(), np.maximum(many_q - math.exp(epsilon) * many_p, 0).sum())
        bounds = delta_bounds(pair, n, epsilon=epsilon)
        assert bounds.lower <= truth + 1e-14 and truth - 1e-14 <= bounds.upper <= truth * 1.003 + 1e-12


def test_delta_and_epsilon_are_inverse():
    for pair, steps in ((PoissonSubsampled(Gaussian(1.0), 0.01), 1000), (Laplace(10.0), 50), (PoissonSubsampled(Laplace(1.0), 0.1), 20)):
        for delta in (1e-4, 1e-8):
            epsilon = epsilon_bounds(pair, steps, delta=delta, tolerance=1e-5)
            assert delta_bounds(pair, steps, epsilon=epsilon.upper).lower <= delta <= delta_bounds(pair, steps, epsilon=epsilon.lower).upper


def test_delta_at_the_ends():
    assert delta_bounds(Laplace(1.0), 2, epsilon=2.5).upper == 0.0
    assert delta_bounds(Laplace(1.0), 2, epsilon=2.0).upper < 1e-13
    assert delta_bounds(Gaussian(1.0), epsilon=50.0).upper < 1e-290
    assert delta_bounds(Gaussian(0.1), 100, epsilon=0.0).upper <= 1.0
    box = delta_bounds(ApproximateDP(0.1, 1e-7), 10, epsilon=2.0)
    assert box.lower <= -math.expm1(10 * math.log1p(-1e-7)) <= box.upper and box.upper - box.lower < 1e-12
    assert delta_bounds(PureDP(0.5), 1, epsilon=0.0).upper == pytest.approx(math.tanh(0.25))


def test_no_lower_bound_where_the_pair_is_not_reached():
    pair = WithoutReplacement(Gaussian(0.5), 0.1)
    assert delta_bounds(pair, 5, epsilon=1.0).lower is None
    assert trade_off(pair, 5, alpha=[0.1]).upper is None and trade_off(pair, 5, alpha=[0.1]).to_frame().shape == (1, 5)
    assert gdp_bounds(pair, 5).lower is None and attack_success(pair, 5, fpr=0.1).lower is None
    assert epsilon_table(pair, [1, 5], [1e-5]).lower is None
    zcdp = delta_bounds(ZeroConcentratedDP(0.05), 4, epsilon=3.0)
    assert zcdp.lower is None and epsilon_bounds(ZeroConcentratedDP(0.05), 4, delta=zcdp.upper).upper <= 3.0
    assert "no lower bound" in str(zcdp)
    assert delta_bounds(ReportNoisyMax(0.2), 3, epsilon=0.5).lower is None


def test_table_agrees_with_single_answers_and_uses_few_compositions():
    pair = PoissonSubsampled(Gaussian(1.0), 0.01)
    table = epsilon_table(pair, [1000, 10, 100], [1e-9, 1e-4, 1e-6])
    assert table.met and table.laws < 3 * 9
    for i, steps in enumerate(table.steps):
        for j, delta in enumerate(table.deltas):
            alone = epsilon_bounds(pair, int(steps), delta=float(delta), tolerance=1e-4)
            assert table.lower[i, j] <= alone.upper and alone.lower <= table.upper[i, j]
    assert list(table.to_frame().columns) == ["steps", "delta", "lower", "upper"] and len(table.to_frame()) == 9


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_trade_off_of_gaussians(mu):
    alpha = np.array([1e-8, 1e-5, 1e-3, 0.1, 0.5, 0.9, 0.999])
    curve = trade_off([(Unmerged(4 / mu), 16)], alpha=alpha)
    truth = ndtr(ndtri(1 - alpha) - mu)
    assert (curve.lower <= truth + 1e-13).all() and (truth <= curve.upper + 1e-13).all()
    assert (1 - curve.lower - (1 - truth) <= 3e-3 * (1 - truth) + 1e-12).all()


def test_trade_off_of_discrete_pairs_by_enumeration():
    rng = np.random.default_rng(3)
    p, q = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4))
    outputs = list(itertools.product(range(4), repeat=3))
    many_p, many_q = (np.array([math.prod(law[i] for i in o) for o in outputs]) for law in (p, q))
    alpha = np.linspace(0.005, 0.995, 60)
    curve = trade_off(DiscretePair(p, q), 3, alpha=alpha)
    for null, alternative, name in ((many_q, many_p, "remove"), (many_p, many_q, "add")):
        order = np.argsort(-alternative / null)
        fpr, tpr = np.append(0, np.cumsum(null[order])), np.append(0, np.cumsum(alternative[order]))
        truth = 1 - np.interp(alpha, fpr, tpr)
        assert (getattr(curve, name + "_lower") <= truth + 1e-9).all() and (truth <= getattr(curve, name + "_upper") + 1e-9).all()
        assert np.max(getattr(curve, name + "_upper") - getattr(curve, name + "_lower")) < 1e-2


def test_gaussian_privacy_holds_between_the_points_of_any_grid():
    low, high = 1e-3, 0.99
    pair = PoissonSubsampled(Gaussian(0.8), 0.05)
    mu = gdp_bounds(pair, 60, low_fpr=low, high_fpr=high)
    assert 0 < mu.lower <= mu.upper < 1.01 * mu.lower
    alpha = np.random.default_rng(0).uniform(low, high, 300)
    curve = trade_off(pair, 60, alpha=alpha)
    assert (curve.upper >= ndtr(ndtri(1 - alpha) - mu.upper) - 1e-12).all()  # the true curve is below its upper bound
    assert gdp_bounds(pair, 60, low_fpr=1e-5).upper > mu.upper
    exact = gdp_bounds(Unmerged(3.0), 9)
    assert exact.lower <= 1.0 <= exact.upper and exact.upper - exact.lower < 2e-3


def test_attacks_on_randomised_response():
    success = attack_success(RandomizedResponse(0.75), fpr=0.1)
    assert success.lower <= 0.3 <= success.upper and success.upper - success.lower < 1e-3
    assert success.advantage_lower <= 0.5 <= success.advantage_upper
    for result in (success, delta_bounds(RUN, 1, epsilon=0.05), gdp_bounds(Gaussian(1.0)), trade_off(Gaussian(1.0), alpha=[0.5])):
        assert json.loads(result.to_json())["mechanism"] and str(result)


BAD = (None, "1", True, math.nan, -0.5, [])


@pytest.mark.parametrize("bad", BAD + (math.inf, 1j))
def test_bad_input_is_named(bad):
    cases = {"epsilon": lambda: delta_bounds(Gaussian(1.0), epsilon=bad), "tolerance": lambda: delta_bounds(Gaussian(1.0), epsilon=1.0, tolerance=bad),
             "steps": lambda: delta_bounds(Gaussian(1.0), bad, epsilon=1.0), "deltas": lambda: epsilon_table(Gaussian(1.0), [1], [bad]),
             "low_fpr": lambda: gdp_bounds(Gaussian(1.0), low_fpr=bad), "high_fpr": lambda: gdp_bounds(Gaussian(1.0), high_fpr=bad),
             "fpr": lambda: attack_success(Gaussian(1.0), fpr=bad), "mechanism": lambda: PrivacyProfile(bad),
             "noise_multiplier": lambda: dp_sgd_delta(noise_multiplier=bad, steps=1, epsilon=1.0)}
    if bad is not True:  # one and nothing else, to numpy
        cases["alpha"] = lambda: trade_off(Gaussian(1.0), alpha=[bad])
    for name, call in cases.items():
        with pytest.raises(ValueError, match=name):
            call()
