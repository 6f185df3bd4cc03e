"""The accountants of others: agreement within their own accuracy where they are sound, and the documented cases where they are not."""

import math
import warnings

import pytest

from databloom.connect_the_dots import connect_the_dots, dp_sgd_epsilon, epsilon_bounds
from databloom.mechanisms import DiscretePair, Gaussian, Laplace, PoissonSubsampled, RandomizedResponse

dpa = pytest.importorskip("dp_accounting", reason="dp-accounting is not installed (it comes with the dev extra)")
pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
from accounting_exact import gaussian_delta


def peer_pld(noise, q, step):
    return pld.from_gaussian_mechanism(noise, sampling_prob=q, value_discretization_interval=step)


@pytest.mark.parametrize("noise, q, steps, delta, step, accuracy", [
    (1.0, 0.01, 10**4, 1e-5, 1e-3, 6e-4), (0.5, 2e-5, 10**3, 1e-8, 1e-3, 1e-4),
    (2.0, 0.1, 100, 1e-6, 1e-3, 1e-3), (1.0, 1.0, 10, 1e-6, 1e-3, 1e-3), (3.0, 0.05, 1000, 1e-5, 1e-3, 1e-2),
])
def test_connect_the_dots_agrees(noise, q, steps, delta, step, accuracy):
    "dp-accounting's pessimistic estimate at moderate delta: above our lower bound, and above the truth by no more than its step explains."
    ours = dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=steps, delta=delta, tolerance=1e-4)
    theirs = peer_pld(noise, q, step).self_compose(steps).get_epsilon_for_delta(delta)
    assert ours.lower * (1 - 1e-9) <= theirs <= ours.upper * (1 + accuracy), (ours, theirs)


@pytest.mark.parametrize("noise, q, steps, delta, truth", [(1.0, 0.01, 10**4, 1e-13, 10.8331)])
def test_sampled_upper_bound_of_the_peer_is_too_low(noise, q, steps, delta, truth):
    "FFT round-off at small delta: dp-accounting's upper bound lies below the truth, our interval holds it."
    ours = dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=steps, delta=delta, tolerance=1e-4)
    theirs = peer_pld(noise, q, 1e-4).self_compose(steps).get_epsilon_for_delta(delta)
    assert ours.lower - 1e-4 <= truth <= ours.upper + 1e-4 and ours.met
    assert theirs < 0.999 * ours.lower, (ours, theirs)


def test_gaussian_upper_bound_of_the_peer_is_too_low():
    "The same with a closed form to prove it."
    theirs = pld.from_gaussian_mechanism(50.0, value_discretization_interval=1e-3).self_compose(10**5).get_epsilon_for_delta(1e-11)
    ours = epsilon_bounds(Gaussian(50.0), 10**5, delta=1e-11, method="direct")
    assert gaussian_delta(50.0, 10**5, theirs) > 1.1e-11, theirs
    assert gaussian_delta(50.0, 10**5, ours.upper) <= 1e-11 <= gaussian_delta(50.0, 10**5, ours.lower) and ours.met


def test_infinite_where_the_truth_is_finite():
    "A truncation of fixed mass makes every delta up to 1e-15 infinite; Laplace at delta 0 has epsilon 2."
    assert pld.from_gaussian_mechanism(20.0).self_compose(1000).get_epsilon_for_delta(1e-15) == math.inf
    ours = epsilon_bounds(Gaussian(20.0), 1000, delta=1e-15, method="direct")
    assert ours.lower <= 13.449329 + 1e-6 and 13.449329 - 1e-6 <= ours.upper and ours.met
    assert pld.from_laplace_mechanism(1.0).self_compose(2).get_epsilon_for_delta(0.0) == math.inf
    ours = epsilon_bounds(Laplace(1.0), 2, delta=0.0)
    assert ours.lower <= 2 <= ours.upper and ours.upper - ours.lower <= 1e-14


def test_grids_that_do_not_adapt():
    "Small losses on a fixed grid: 12% too high; our grid chooses itself."
    truth = 0.027957804
    theirs = peer_pld(4.0, 0.00033, 1e-4).self_compose(10**4).get_epsilon_for_delta(1e-6)
    ours = dp_sgd_epsilon(noise_multiplier=4.0, sampling_probability=0.00033, steps=10**4, delta=1e-6)
    assert theirs > 1.1 * truth and ours.lower <= truth * (1 + 1e-8) and truth * (1 - 1e-8) <= ours.upper <= 1.001 * truth


def test_laplace_and_randomized_response_agree():
    for scale, steps, delta in ((1.0, 5, 1e-5), (10.0, 100, 1e-5), (0.5, 3, 1e-3)):
        theirs = pld.from_laplace_mechanism(scale, value_discretization_interval=1e-3).self_compose(steps).get_epsilon_for_delta(delta)
        ours = epsilon_bounds(Laplace(scale), steps, delta=delta)
        assert ours.lower <= theirs * (1 + 1e-9) and theirs <= ours.upper + steps * 1e-3, (ours, theirs)
    theirs = pld.from_randomized_response(0.4, 4, value_discretization_interval=1e-4).self_compose(6).get_epsilon_for_delta(1e-6)
    ours = epsilon_bounds(RandomizedResponse(0.6 + 0.1, 4), 6, delta=1e-6)  # theirs: noise 0.4 spread over all four answers
    assert ours.lower <= theirs * (1 + 1e-9) and theirs <= ours.upper + 6e-4, (ours, theirs)


def test_composition_in_the_loop():
    "Different mechanisms one after another."
    laws = [peer_pld(1.0, 0.02, 1e-3).self_compose(20), pld.from_laplace_mechanism(5.0, value_discretization_interval=1e-3).self_compose(10)]
    theirs = laws[0].compose(laws[1]).get_epsilon_for_delta(1e-6)
    ours = epsilon_bounds([(PoissonSubsampled(Gaussian(1.0), 0.02), 20), (Laplace(5.0), 10)], delta=1e-6)
    assert ours.lower <= theirs * (1 + 1e-9) and theirs <= ours.upper * 1.01 and ours.met, (ours, theirs)


def test_counts_of_randomized_response():
    "dp-accounting's accountant, where it knows the event, ignores the count: 1.0987 for ten answers; right is 10.986105."
    ours = epsilon_bounds(RandomizedResponse(0.75), 10, delta=1e-6)
    assert ours.lower <= 10.986105 + 1e-6 and 10.986105 - 1e-6 <= ours.upper and ours.met
    if not hasattr(dpa, "RandomizedResponseDpEvent"):
        return  # this release has no such event yet
    accountant = dpa.pld.PLDAccountant(dpa.NeighboringRelation.REPLACE_ONE)
    accountant.compose(dpa.RandomizedResponseDpEvent(0.5, 2), 10)
    theirs = accountant.get_epsilon(1e-6)
    assert theirs == pytest.approx(1.0987, abs=1e-3) or theirs == pytest.approx(10.986105, rel=1e-2)


# Renyi DP: looser, never below our lower bound


def rdp_epsilon(noise, q, steps, delta):
    from dp_accounting.rdp import rdp_privacy_accountant

    accountant = rdp_privacy_accountant.RdpAccountant()
    accountant.compose(dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(noise)), steps)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize("noise, q, steps, delta", [
    (0.5, 2e-5, 10**5, 1e-8), (1.0, 0.01, 10**4, 1e-5), (1.0, 0.01, 10**4, 1e-15), (2.0, 0.05, 500, 1e-30), (0.8, 0.02, 10**5, 1e-5), (4.0, 1e-3, 10**4, 1e-6),
])
def test_renyi_is_looser(noise, q, steps, delta):
    ours, theirs = dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=steps, delta=delta), rdp_epsilon(noise, q, steps, delta)
    assert ours.upper <= theirs, (ours, theirs)
    assert theirs <= 120 * ours.upper


def test_tensorflow_privacy():
    "The function that users of TensorFlow Privacy call; it speaks of Renyi DP."
    pytest.importorskip("tensorflow_privacy", reason="tensorflow-privacy is not installed (it comes with the dev extra)", exc_type=ImportError)
    from tensorflow_privacy.privacy.analysis.compute_dp_sgd_privacy_lib import compute_dp_sgd_privacy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, _ = compute_dp_sgd_privacy(n=60_000, batch_size=256, noise_multiplier=1.1, epochs=60, delta=1e-5)
    q, steps = 256 / 60_000, math.ceil(60 * 60_000 / 256)
    ours = dp_sgd_epsilon(noise_multiplier=1.1, sampling_probability=q, steps=steps, delta=1e-5)
    assert theirs == pytest.approx(rdp_epsilon(1.1, q, steps, 1e-5), rel=1e-3)  # its list of orders is another one
    assert ours.upper <= theirs <= 1.2 * ours.upper, (ours, theirs)


def test_arbitrary_discrete_pair():
    p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    theirs = pld.from_two_probability_mass_functions(
        {i: math.log(x) for i, x in enumerate(q)}, {i: math.log(x) for i, x in enumerate(p)}, value_discretization_interval=1e-4)
    ours = connect_the_dots(DiscretePair(p, q), 1e-4)
    for n in (1, 8):
        for epsilon in (0.0, 0.5, 1.5, 4.0):
            assert (ours**n).delta(epsilon) <= theirs.self_compose(n).get_delta_for_epsilon(epsilon) * (1 + 1e-9) + 1e-12
    r = epsilon_bounds(DiscretePair(p, q), 8, delta=1e-3)
    assert r.lower <= theirs.self_compose(8).get_epsilon_for_delta(1e-3) * (1 + 1e-9) <= r.upper + 8.1e-4


# Microsoft's accountant


def prv_interval(mechanism, steps, delta, error):
    prv = pytest.importorskip("prv_accountant", reason="prv-accountant is not installed (it comes with the dev extra)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accountant = prv.PRVAccountant(prvs=mechanism(prv), max_self_compositions=steps, eps_error=error, delta_error=delta / 1000)
        return accountant.compute_epsilon(delta=delta, num_self_compositions=steps)


@pytest.mark.parametrize("noise, q, steps, delta", [(0.5, 2e-5, 1000, 1e-8), (2.0, 0.05, 100, 1e-6)])
def test_prv_agrees(noise, q, steps, delta):
    low, middle, high = prv_interval(lambda prv: prv.PoissonSubsampledGaussianMechanism(noise_multiplier=noise, sampling_probability=q), steps, delta, 0.1)
    ours = dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=steps, delta=delta)
    assert low <= ours.lower and ours.upper <= high
    assert abs(middle - ours.upper) <= 2e-3 * ours.upper + (ours.upper - ours.lower)


@pytest.mark.parametrize("noise, steps, error", [(20.0, 10**4, 0.1)])
def test_prv_interval_misses_a_gaussian(noise, steps, error):
    "Its certified interval at delta 1e-12 does not hold the closed form; ours does."
    low, _, high = prv_interval(lambda prv: prv.GaussianMechanism(noise_multiplier=noise), steps, 1e-12, error)
    outside = gaussian_delta(noise, steps, float(high)) > 1e-12 or gaussian_delta(noise, steps, float(low)) < 1e-12
    assert outside, (low, high)
    ours = epsilon_bounds(Gaussian(noise), steps, delta=1e-12, method="direct")
    assert gaussian_delta(noise, steps, ours.upper) <= 1e-12 <= gaussian_delta(noise, steps, ours.lower)
