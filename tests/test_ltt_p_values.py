"""p-values of chapter 03: valid, exact, and strong where the chapter says so."""

import math

import mpmath
import numpy as np
import pytest
from scipy.stats import binom

from databloom import ltt_calibration as ltt

DRAWS = 20_000
LEVELS = np.array([0.01, 0.05, 0.1])
GUARANTEED = [name for name, method in ltt.p_value_methods.items() if method.guaranteed]


def losses_at_the_level(kind, n, draws, rng, alpha=0.1):
    "n x draws losses whose true mean is exactly alpha."
    if kind == "bernoulli":
        return (rng.random((n, draws)) < alpha).astype(float)
    if kind == "beta":
        return rng.beta(5 * alpha, 5 * (1 - alpha), (n, draws))
    if kind == "zero-inflated":  # a half on average where there is a loss; symmetric, so clipping keeps the mean
        return (rng.random((n, draws)) < 2 * alpha) * np.clip(rng.normal(0.5, 0.1, (n, draws)), 0, 1)
    return np.where(rng.random((n, draws)) < 0.05, 0.9, (alpha - 0.045) / 0.95)  # two points, rarely the upper one


@pytest.mark.parametrize("kind", ["bernoulli", "beta", "zero-inflated", "two-point"])
@pytest.mark.parametrize("n", [5, 20, 100, 1000])
def test_super_uniform(kind, n):
    rng = np.random.default_rng([n, len(kind)])
    counts, done = {name: np.zeros(3) for name in GUARANTEED if name != "binomial" or kind == "bernoulli"}, 0
    while done < DRAWS:  # in portions, so that the table stays small
        table = losses_at_the_level(kind, n, min(DRAWS, 4_000), rng)
        done += table.shape[1]
        for name in counts:
            counts[name] += (ltt.p_value_methods[name].p(table, 0.1, 0.05)[:, None] <= LEVELS).sum(axis=0)
    limit = LEVELS + 3 * np.sqrt(LEVELS * (1 - LEVELS) / done)
    for name, count in counts.items():
        assert (count / done <= limit).all(), (name, count / done)


def test_clt_is_not_super_uniform_and_says_so():
    table = losses_at_the_level("bernoulli", 500, DRAWS, np.random.default_rng(0))
    share = np.mean(ltt.clt_p_value(table, 0.1) <= 0.05)
    assert share > 0.05 + 10 * math.sqrt(0.05 * 0.95 / DRAWS)
    with pytest.warns(UserWarning, match="NOT guaranteed"):
        result = ltt.learn_then_test(table[:, :3] * 0.1, 0.1, method="clt")
    assert not result.guaranteed and "NOT GUARANTEED" in result.guarantee and "NOT GUARANTEED" in str(result)
    assert result.to_dict()["guaranteed"] is False


@pytest.mark.parametrize("numerator", [1, 5, 30])
def test_hoeffding_bentkus_for_every_count_up_to_1000(numerator):
    "Bentkus's part in exact integers; the other in extended precision; the mean given as k / n, ceiling trap and all."
    for n in range(1, 1001):
        weight, total, tails = (100 - numerator) ** n, 0, []
        for k in range(n + 1):  # weight = C(n, k) a^k (100 - a)^(n - k)
            total += weight
            tails.append(total / 100**n if k < n else 1.0)
            weight = weight * (n - k) * numerator // ((k + 1) * (100 - numerator))
        r = np.minimum(np.arange(n + 1) / np.longdouble(n), np.longdouble(numerator) / 100)
        a = np.longdouble(numerator) / 100
        with np.errstate(divide="ignore", invalid="ignore"):
            h = np.where(r > 0, r * np.log(r / a), 0) + (1 - r) * np.log((1 - r) / (1 - a))
        reference = np.minimum(np.exp(-n * h), math.e * np.array(tails)).astype(float)
        got = ltt.hoeffding_bentkus_p_value(mean=np.arange(n + 1) / n, n=n, alpha=numerator / 100)
        error = np.abs(got - reference)
        assert ((error <= 1e-12) | (error <= 1e-9 * reference)).all(), (n, error.max())


def test_hoeffding_bentkus_against_mpmath():
    rng = np.random.default_rng(3)
    mpmath.mp.dps = 40
    for _ in range(600):
        n, alpha = int(rng.integers(1, 1001)), float(rng.choice([0.001, 0.02, 0.1, 0.25, 0.5, 0.9, rng.uniform(0.01, 0.99)]))
        k = int(rng.binomial(n, alpha)) if rng.random() < 0.6 else int(rng.integers(0, n + 1))
        a, r = mpmath.mpf(alpha), mpmath.mpf(k) / n
        low = min(r, a)
        h = (low * mpmath.log(low / a) if low else 0) + (1 - low) * mpmath.log((1 - low) / (1 - a))
        tail = mpmath.betainc(n - k, k + 1, 0, 1 - a, regularized=True) if k < n else 1
        reference = min(mpmath.exp(-n * h), mpmath.e * tail)
        error = abs(ltt.hoeffding_bentkus_p_value(mean=k / n, n=n, alpha=alpha) - reference)
        assert error <= 1e-12 or error <= 1e-9 * reference


def test_the_ceiling_trap():
    assert 25 * 0.28 > 7  # what the trap is made of
    expected = math.e * float(binom.cdf(7, 25, 0.5))
    assert ltt.bentkus_p_value(mean=0.28, n=25, alpha=0.5) == pytest.approx(expected, rel=1e-12)
    for n in range(1, 401):
        assert (ltt._ceil_of_sum(np.arange(n + 1) / n, n) == np.arange(n + 1)).all()
    assert ltt._ceil_of_sum(7.001 / 25, 25) == 8  # a sum that is truly above a whole number goes up
    tenths = np.full(30, 0.1)  # their sum in floating point is not 3
    assert ltt.bentkus_p_value(tenths, 0.3) == pytest.approx(math.e * float(binom.cdf(3, 30, 0.3)), rel=1e-12)


def test_binomial_equals_scipy():
    rng = np.random.default_rng(1)
    n = rng.integers(1, 2000, 2000)
    k = rng.integers(0, n + 1)
    alpha = rng.uniform(0.001, 0.999, 2000)
    np.testing.assert_allclose(ltt.binomial_p_value(mean=k / n, n=n, alpha=alpha), binom.cdf(k, n, alpha), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", list(ltt.p_value_methods))
@pytest.mark.parametrize("n", [1, 2, 3, 30, 400])
def test_bound_is_the_inverse_of_the_p_value(name, n):
    rng, method = np.random.default_rng(n), ltt.p_value_methods[name]
    table = (rng.random((n, 40)) < rng.random(40)).astype(float)
    if name != "binomial":
        table *= rng.random((n, 40))
    for delta in (0.001, 0.05, 0.4):
        bound = method.bound(table, delta, 0.05)
        assert ((bound >= 0) & (bound <= 1)).all()
        for shift in (1e-6, -1e-6):  # refuted just above the bound, not refuted just below
            at = np.clip(bound + shift, 1e-9, 1 - 1e-9)
            inside = (bound < 1 - 2e-6) & (bound > 2e-6)
            refuted = method.p(table, at, 0.05) <= delta
            assert (refuted == (shift > 0))[inside].all()


def test_wsr_equals_its_definition():
    rng = np.random.default_rng(0)
    for n, alpha, level in [(1, 0.1, 0.05), (7, 0.3, 0.1), (60, 0.5, 0.01), (301, 0.1, 0.05)]:
        losses = rng.beta(0.4, 2.0, n)
        mean_sum, square_sum, variance, wealth, best = 0.5, 0.25, 0.25, 1.0, 1.0
        for i, loss in enumerate(losses, start=1):
            stake = min(1, math.sqrt(2 * math.log(1 / level) / (n * variance)))
            wealth *= 1 - stake * (loss - alpha)
            best = max(best, wealth)
            mean_sum += loss
            square_sum += (loss - mean_sum / (i + 1)) ** 2
            variance = square_sum / (i + 1)
        assert ltt.wsr_p_value(losses, alpha, bet_level=level) == pytest.approx(1 / best, rel=1e-9)


def test_wsr_bound_holds_where_that_of_mapie_does_not():
    from mapie.risk_control.methods import get_r_hat_plus

    coins = (np.random.default_rng(8).random((200, DRAWS)) < 0.2).astype(float)
    ours = np.mean(ltt.wsr_upper_bound(coins, 0.1) < 0.2)
    assert ours <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / DRAWS)
    grid = np.linspace(0.02, 0.6, 100)
    theirs = np.concatenate([get_r_hat_plus(coins[:, j : j + 100], grid, "rcps", "wsr", 0.1, 0.25)[1] for j in range(0, 3000, 100)])
    assert np.mean(theirs < 0.2) > 0.12


def test_agrees_with_mapie_where_that_is_valid():
    from mapie.risk_control.methods import compute_hoeffding_bentkus_p_value

    losses = np.random.default_rng(2).beta(0.5, 4.5, (500, 60))
    for alpha in (0.05, 0.1, 0.3):
        theirs = compute_hoeffding_bentkus_p_value(losses.mean(axis=0), 500, alpha)[:, 0]
        np.testing.assert_allclose(ltt.hoeffding_bentkus_p_value(losses, alpha), theirs, rtol=1e-9)
    trapped = compute_hoeffding_bentkus_p_value(np.array([0.28]), 25, 0.5)[0, 0]  # its ceiling makes 8 of 7
    assert trapped > 1.2 * ltt.hoeffding_bentkus_p_value(mean=0.28, n=25, alpha=0.5)


def test_power_of_betting():
    rng, draws, m = np.random.default_rng(5), 4_000, 0.07
    zero_inflated = (rng.random((500, draws)) < 2 * m) * np.clip(rng.normal(0.5, 0.1, (500, draws)), 0, 1)
    betting, tails = (np.mean(p(zero_inflated, 0.1) <= 0.05) for p in (ltt.wsr_p_value, ltt.hoeffding_bentkus_p_value))
    assert betting >= 1.5 * tails, (betting, tails)
    beta = rng.beta(5 * m, 5 * (1 - m), (500, draws))
    assert np.mean(ltt.wsr_p_value(beta, 0.1) <= 0.05) >= 0.95


@pytest.mark.parametrize("name", list(ltt.p_value_methods))
def test_bad_input_is_refused_by_name(name):
    p_value, bound = ltt.p_value_methods[name].p_value, ltt.p_value_methods[name].upper_bound
    for losses in ([], [0.0, np.nan], [0.0, -0.1], [0.0, 1.1], [[[0.0]]], ["a"]):
        with pytest.raises(ValueError, match="losses"):
            p_value(losses, 0.1)
    for level in (0, 1, -0.1, 1.1, np.nan, np.inf, None):
        with pytest.raises(ValueError, match="alpha"):
            p_value([0.0, 1.0], level)
        with pytest.raises(ValueError, match="delta"):
            bound([0.0, 1.0], level)


@pytest.mark.parametrize("name", list(ltt.p_value_methods))
def test_shapes(name):
    method = ltt.p_value_methods[name]
    column, table = np.array([0.0, 1.0, 0.0, 0.0]), np.zeros((4, 3))
    assert np.ndim(method.p_value(column, 0.4)) == 0 and isinstance(method.p_value(column, 0.4), float)
    assert method.p_value(table, 0.4).shape == (3,) and method.upper_bound(table, 0.1).shape == (3,)
    assert 0 <= method.p_value(column, 0.4) <= 1
