"""The contour against closed forms, a quadrature in extended precision, the grids, and itself on other lines."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from accounting_exact import assert_holds, gaussian_delta

from databloom.connect_the_dots import dp_sgd_epsilon, epsilon_bounds
from databloom.contour import Contour, ContourError, _Cells, _decay, _layers, _Nodes, _Steps, contour_for
from databloom.mechanisms import Gaussian, Laplace, PoissonSubsampled


@pytest.mark.parametrize("noise, steps, delta", [
    (20, 1000, 1e-12), (20, 10**4, 1e-14), (100, 10**5, 1e-8), (100, 10**5, 1e-12), (50, 10**6, 1e-20), (10, 100, 1e-30), (100, 10**6, 1e-30), (3, 50, 1e-5), (1, 20, 1e-5), (1, 1, 1e-3),
])
def test_gaussian_closed_form(noise, steps, delta):
    "Without sampling there is a truth to 60 digits; it must lie in an interval as narrow as this."
    r = epsilon_bounds(Gaussian(noise), steps, delta=delta, tolerance=1e-7, method="contour")
    assert_holds(r, lambda e: gaussian_delta(noise, steps, e), delta)
    assert 0 < r.upper - r.lower <= 1e-7 * r.upper and r.method == "contour", r


def extended_delta(noise, q, steps, epsilon, swapped, tilt, terms, window):
    "delta by the same integral, in 40 digits, with no cut and every parameter ours."
    with mpmath.workdps(40):
        noise, q, epsilon, tilt = (mpmath.mpf(x) for x in (noise, q, epsilon, tilt))
        h = mpmath.mpf(noise) / 8
        y = [h * i for i in range(int(-14 / h), int((16 + 1 / noise) / h) + 1)]
        loss = [mpmath.log(1 - q + q * mpmath.exp(v / noise - 1 / (2 * noise**2))) for v in y]
        base = [h * mpmath.exp(-v * v / 2) / mpmath.sqrt(2 * mpmath.pi) for v in y]
        moment = lambda z: mpmath.fsum(b * mpmath.exp((-z if swapped else z + 1) * one) for b, one in zip(base, loss))
        step, total = 2 * mpmath.pi / window, 0
        for j in range(terms):
            z = mpmath.mpc(tilt, j * step)
            total += (mpmath.mpf(1) / 2 if j == 0 else 1) * (moment(z) ** steps * mpmath.exp(-z * epsilon) / (z * (z + 1))).real
        return total * step / mpmath.pi


@pytest.mark.parametrize("noise, q, steps, delta, tilt, terms, window", [(1.0, 0.01, 10_000, 1e-5, 3.0, 30, 25), (2.0, 0.01, 100_000, 1e-12, 4.5, 26, 22)])
@pytest.mark.parametrize("swapped", [False, True])
def test_extended_precision(noise, q, steps, delta, tilt, terms, window, swapped):
    contour = Contour([(noise, q, steps)], delta, swapped)
    low, high = contour.epsilon()
    assert high - low < 1e-9 * high
    for epsilon in (low, high, 0.9 * low):
        truth = extended_delta(noise, q, steps, epsilon, swapped, tilt, terms, window)
        bounds = contour.delta(epsilon)
        assert bounds[0] <= truth * (1 + mpmath.mpf(10) ** -18) and truth * (1 - mpmath.mpf(10) ** -18) <= bounds[1], (epsilon, truth, bounds)
        assert bounds[1] - bounds[0] < 1e-6 * bounds[1]
    assert extended_delta(noise, q, steps, high, swapped, tilt, terms, window) <= delta <= extended_delta(noise, q, steps, low, swapped, tilt, terms, window)


cases = some.fixed_dictionaries(dict(
    noise_multiplier=some.floats(math.log(0.3), math.log(100)).map(math.exp), sampling_probability=some.floats(math.log(1e-6), 0.0).map(math.exp),
    steps=some.floats(math.log(20), math.log(1e6)).map(lambda x: int(math.exp(x))), delta=some.floats(-30.0, -3.0).map(lambda x: 10.0**x)))


@pytest.mark.filterwarnings("error")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases)
def test_contour_and_grid_meet(case):
    "Where both directions have a contour, the interval of the grids shares a point with it."
    run, found = (case["noise_multiplier"], case["sampling_probability"], case["steps"]), []
    for swapped in (False, True):
        try:
            found.append(contour_for([run], case["delta"], swapped, 1e-4).epsilon())
        except ContourError:
            return
        low, high = found[-1]
        assert 0 <= low <= high
    grid = dp_sgd_epsilon(**case, tolerance=1e-2, method="direct")
    assert max(low for low, _ in found) <= grid.upper and grid.lower <= max(high for _, high in found), (case, found, grid)


@pytest.mark.filterwarnings("error")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases, some.sampled_from([1e-3, 1e-5, 1e-7, 1e-9]), some.sampled_from([1e-4, 1e-6, 1e-8]), some.floats(0.8, 1.25), some.booleans())
def test_lines_agree(case, first, second, stretch, swapped):
    "Other accuracy, another line, another cut: the intervals share a point, for delta too."
    run = (case["noise_multiplier"], case["sampling_probability"], case["steps"])
    try:
        one = Contour([run], case["delta"], swapped, first, most_work=1e7)
        low, high = one.epsilon()
        other = Contour([run], min(0.5, case["delta"] ** stretch), swapped, second, near=stretch * low if low > 0 else None, most_work=1e7)
    except ContourError:
        return
    again = other.epsilon(case["delta"])
    assert low <= again[1] and again[0] <= high, (case, (low, high), again)
    at = np.linspace(0.5, 1.5, 7) * max(low, 1e-6)
    (low, high), (low2, high2) = one.delta(at), other.delta(at)
    assert (low <= high2).all() and (low2 <= high).all(), (case, at)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases, some.floats(0.1, 3.0), some.booleans(), some.sampled_from([1.0, 0.5, 0.2]))
def test_bounds_of_the_pieces(case, part, swapped, smaller):
    "The characteristic function stays below its bound at all larger frequencies, and fewer nodes within their error of many."
    steps = _Steps(smaller * case["noise_multiplier"], case["sampling_probability"], case["steps"], swapped, tail=1e-12)
    tilt = part * min(steps.noise / case["sampling_probability"], 30.0)
    cells = _Cells(steps, tilt)
    end = 2 / max(1e-9, float(np.ptp(cells.ratio[1:][cells.mass > 1e-3 * cells.mass.max()])))
    try:
        nodes, fine = _Nodes(cells, 4 * end, 1e-10).fill(), _Nodes(cells, 4 * end, 1e-14).fill()
    except ValueError:  # too steep for the cells: `Contour` declines
        return
    (phi, error), (exact, more) = nodes.phi(end, 4), fine.phi(end, 4)
    assert (np.abs(phi - exact) <= error + more).all(), (case, phi - exact, error, more)
    one = _Steps(steps.noise, steps.q, 1, swapped)
    for j in (1, 2, 3):
        below = math.exp(-_decay([(_layers(cells), one)], j * end))
        assert (np.abs(1 + exact[j:]) <= below + more[j:]).all(), (case, j, exact, below)


def test_mixtures_meet_the_grids():
    for runs in ([(1.0, 0.01, 500), (1.3, 0.02, 700)], [(0.8, 0.05, 300), (30.0, 1.0, 100)], [(2.0, 0.001, 9000), (5.0, 0.3, 20), (1.1, 0.9, 3)]):
        parts = [(PoissonSubsampled(Gaussian(noise), q) if q < 1 else Gaussian(noise), n) for noise, q, n in runs]
        found = [epsilon_bounds(parts, delta=1e-6, tolerance=1e-4, method=method) for method in ("contour", "direct")]
        assert max(r.lower for r in found) <= min(r.upper for r in found) and found[0].method == "contour" and found[0].met, found


def test_refusals_by_name():
    for mechanism, steps in ((Laplace(1.0), 100), (PoissonSubsampled(Gaussian(1.0), 0.01), 3), (PoissonSubsampled(Gaussian(0.5), 2e-5), 25)):
        with pytest.raises(ValueError, match="method must be another method"):
            epsilon_bounds(mechanism, steps, delta=1e-8, method="contour")
    for wrong, name in ((dict(delta=0.0), "delta"), (dict(accuracy=2.0), "accuracy")):
        with pytest.raises(ValueError, match=name):
            Contour([(1.0, 0.01, 1000)], **dict(delta=1e-5) | wrong)


def test_a_line_that_says_nothing_is_left_to_the_grids():
    "Here the contour of one direction has an infinite upper bound, which once was taken for an answer."
    r = dp_sgd_epsilon(noise_multiplier=7.783, sampling_probability=3.472e-05, steps=145, delta=5.3e-22)
    assert 0 < r.lower <= r.upper < math.inf
    with pytest.raises(ContourError):
        contour_for([(7.783, 3.472e-05, 145)], 5.3e-22, False, 1e-3)


def test_outside_its_reach_it_stays_a_bound():
    "Asked far from where it is sharp, a contour answers loosely, not wrongly."
    contour = Contour([(1.0, 0.01, 10_000)], 1e-5)
    at = np.array([-2.0, 0.0, 0.5, 20.0, 60.0, 500.0])
    low, high = contour.delta(at)
    assert (0 <= low).all() and (low <= high).all() and (high <= 1).all() and (np.diff(high) <= 0).all()
    exact = dp_sgd_epsilon(noise_multiplier=1.0, sampling_probability=0.01, steps=10_000, delta=1e-9)
    low, high = contour.epsilon(1e-9)
    assert low <= exact.upper and exact.lower <= high
    assert contour.upper.epsilon(1.0) == 0.0 and repr(contour.lower).startswith("lower bound")
