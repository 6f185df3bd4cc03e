"Every combination of the support matrix, every parameter of every public constructor with bad values, and the numbers of public complaints."

import itertools
import math
import resource
import subprocess
import sys
import warnings

import numpy as np
import pytest

from databloom.black_boxes import ApproximateDP, DensityPair, PureDP, RenyiDP, ZeroConcentratedDP, renyi_epsilon
from databloom.connect_the_dots import Phase, dp_sgd_epsilon, epsilon_bounds, schedule_epsilon
from databloom.mechanisms import DiscreteGaussian, DiscreteLaplace, DiscretePair, Gaussian, Laplace, Pair, PoissonSubsampled, RandomizedResponse
from databloom.sampling import MixtureOfGaussians, ReplaceOne, Revealed, TruncatedPoisson, WithoutReplacement, worst_case
from databloom.selection import AboveThreshold, BoundedRange, ExponentialMechanism, PermuteAndFlip, ReportNoisyMax, fixed_selections_delta
from databloom.support_matrix import support_matrix


# ---- the matrix

def test_every_cell_is_computed_or_refused_by_name():
    matrix = support_matrix(steps=3, delta=1e-5)
    assert len(matrix.cells) == 16 * 6 * 4
    named = {"both", "upper"} | {f"refused: {name}" for name in ("sampling", "adjacency", "group_size", "mechanism")}
    for (mechanism, sampling, adjacency, group, answer), epsilon in zip(matrix.cells, matrix.epsilons):
        assert answer in named, (mechanism, sampling, answer)
        assert (epsilon is None) == answer.startswith("refused") and (epsilon is None or 0 < epsilon < math.inf)
        if sampling == "none" and group == 1:
            assert not answer.startswith("refused"), mechanism
        if sampling in ("shuffle", "random_allocation"):
            assert answer == "refused: sampling"
    frame = matrix.to_frame()
    assert len(frame) == len(matrix.cells) and "both" in str(matrix) and matrix.to_dict()["cells"]


# ---- bad values

log_p, log_q = (lambda x: -0.5 * (x - 1) ** 2 - 0.5 * math.log(2 * math.pi)), (lambda x: -0.5 * x**2 - 0.5 * math.log(2 * math.pi))
SGD = dict(noise_multiplier=1.0, sampling_probability=0.01, steps=10, delta=1e-5, tolerance=1e-2, group_size=1)
CALLS = {  # a valid call of each, and which values beyond the obviously bad are fine for a parameter
    Gaussian: dict(noise_multiplier=1.0), Laplace: dict(noise_multiplier=1.0), DiscreteLaplace: dict(scale=2.0, sensitivity=1), DiscreteGaussian: dict(sigma=2.0, sensitivity=1),
    RandomizedResponse: dict(truth_probability=0.75, num_answers=3), DiscretePair: dict(p=[0.5, 0.5], q=[0.4, 0.6]), PoissonSubsampled: dict(pair=Gaussian(1.0), sampling_probability=0.1),
    MixtureOfGaussians: dict(noise_multiplier=1.0, sensitivities=[0, 1], weights=[0.5, 0.5]), ReplaceOne: dict(noise_multiplier=1.0, sampling_probability=0.1, group_size=1),
    WithoutReplacement: dict(pair=Gaussian(1.0), sampling_probability=0.1), Revealed: dict(pairs=[Gaussian(1.0)], weights=[1.0]),
    TruncatedPoisson: dict(mechanism=Gaussian(1.0), sampling_probability=0.1, dataset_size=100, max_batch_size=20, adjacency="add_remove"),
    ExponentialMechanism: dict(epsilon=0.5, monotone=False, adaptive=True), ReportNoisyMax: dict(epsilon=0.5, noise="laplace", monotone=False), PermuteAndFlip: dict(epsilon=0.5, monotone=False),
    AboveThreshold: dict(epsilon=0.5), BoundedRange: dict(length=0.5), PureDP: dict(epsilon=0.5), ApproximateDP: dict(epsilon=0.5, delta=1e-9), ZeroConcentratedDP: dict(rho=0.1),
    RenyiDP: dict(orders=[2, 3], divergences=[0.1, 0.2]), DensityPair: dict(log_p=log_p, log_q=log_q, low=-12.0, high=13.0, error=1e-12, tail=1e-20),
    fixed_selections_delta: dict(length=0.5, steps=3, epsilon=0.1),
    worst_case: dict(mechanism=Gaussian(1.0), adjacency="add_remove", sampling="poisson", sampling_probability=0.1, group_size=1),
    dp_sgd_epsilon: SGD | dict(adjacency="add_remove", method="auto", sampling="poisson"),
    schedule_epsilon: dict(phases=[(1.0, 0.01, 5)], delta=1e-5, tolerance=1e-2, adjacency="add_remove", sampling="poisson", group_size=1),
    epsilon_bounds: dict(mechanism=Gaussian(1.0), steps=3, delta=1e-5, tolerance=1e-2, method="auto"),
}
BAD = [math.nan, math.inf, -math.inf, -1, -0.5, 0, "one", "", None, [], [1.0], [[1.0]], np.array([0.2, 0.3]), np.array([[1.0]]), True, 1e300, 10**400, 1e-300, 2.5, 1 + 2j, {}, object(), b"x", lambda x: x, "nan", np.float64("nan")]
FREE = {"log_p", "log_q"}  # any function will do


def sane(result):
    "What a call gave must be a number or a mechanism that can be accounted for."
    if isinstance(result, tuple):
        return 0 <= result[0] <= result[1]
    bounds = result if hasattr(result, "upper") else epsilon_bounds(result, 2, delta=1e-5, tolerance=0.05)
    return bounds.upper >= (bounds.lower or 0.0) >= 0


@pytest.mark.parametrize("call", list(CALLS), ids=lambda call: call.__name__)
def test_bad_values_are_refused_by_name(call):
    assert sane(call(**CALLS[call]))
    for name, bad in itertools.product(CALLS[call], BAD):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                result = call(**(CALLS[call] | {name: bad}))
        except ValueError as error:
            assert name in str(error), (call, name, bad, error)
            continue
        assert name in FREE or sane(result), (call, name, bad, result)


def test_what_bad_values_must_not_pass():
    "The obviously wrong, for every number there is: no such value is ever accepted."
    never = [math.nan, -math.inf, -1, "one", None, [[1.0]], True, 1 + 2j, {}, object()]
    for call, arguments in CALLS.items():
        for name, bad in itertools.product(arguments, never):
            if isinstance(arguments[name], bool) and bad is True or name == "phases" and bad == [[1.0]]:
                continue
            with pytest.raises(ValueError):
                call(**(arguments | {name: bad}))


@pytest.mark.parametrize("phases", [None, "x", 3, {}, [], [None], ["ab"], [(1.0,)], [dict(noise_multiplier=1.0, wrong=2)], [(1.0, 0.1, 0)], [(1.0, 0.1, 2.5)], [(-1, 0.1, 1)], [(1.0, 2.0, 1)], [Phase(math.nan)], [(1, 0.1, 1, 1)]])
def test_bad_phases(phases):
    if phases == [(1.0,)]:
        assert schedule_epsilon(phases, delta=1e-5).upper > 0  # one step without sampling
        return
    with pytest.raises(ValueError, match="phases"):
        schedule_epsilon(phases, delta=1e-5)


@pytest.mark.parametrize("mechanism", [None, 3, "x", [], [Gaussian(1.0)], [(Gaussian(1.0), 0)], [(Gaussian(1.0), 1.5)], [(Gaussian(1.0), None)], [(1.0, 2)], [(Gaussian(1.0), 10**13)], Gaussian])
def test_bad_lists(mechanism):
    with pytest.raises(ValueError, match="mechanism|steps"):
        epsilon_bounds(mechanism, delta=1e-5)


# ---- numbers of public complaints, and their kind

def test_ten_randomized_responses_are_ten():
    "dp-accounting's accountant answers 1.0987, as if there were one (finding 5)."
    right = math.log((0.75**10 - 1e-6) / 0.25**10)
    bounds = epsilon_bounds(RandomizedResponse(0.75), 10, delta=1e-6, tolerance=1e-6)
    assert bounds.lower <= right * (1 + 1e-12) and right * (1 - 1e-12) <= bounds.upper and abs(bounds.upper - 10.986105) < 1e-4


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0, 7.0])
def test_replacing_is_not_half_of_removing(noise):
    "google/differential-privacy#378: a replaced record moves a Gaussian query twice as far, at noise 2 epsilon is 4.377178."
    replaced = dp_sgd_epsilon(noise_multiplier=noise, steps=1, delta=1e-5, adjacency="replace_one")
    assert replaced.upper == dp_sgd_epsilon(noise_multiplier=noise / 2, steps=1, delta=1e-5).upper
    if noise == 2.0:
        assert abs(replaced.upper - 4.377178) < 1e-6


@pytest.mark.parametrize("noise,q,steps,delta,truth,digits", [
    (4, 0.00033, 10**4, 1.1e-18, 0.0672137, 7), (0.5, 2e-5, 10**5, 1e-8, 2.28406, 5), (1, 0.01, 10**4, 1e-5, 6.18771, 5), (0.5, 0.1, 200, 1e-5, 45.371, 3), (1, 0.2, 10, 1e-5, 4.9842, 4), (1, 0.2, 500, 1e-5, 38.1702, 4),
    (0.5, 0.1, 1000, 1e-5, 126.1667, 3), (0.4, 0.25, 500, 1e-5, 361.5456, 3), (0.3, 0.05, 1000, 1e-5, 262.5833, 3), (1, 1e-4, 10**5, 1e-5, 0.13187, 5)])
def test_sampled_complaints(noise, q, steps, delta, truth, digits):
    "prv_accountant#17, #42; opacus#601, #604, #591, #775; autodp: far below, far above, or no answer."
    bounds = dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=steps, delta=delta, tolerance=1e-4)
    slack = 1.01 * 10.0**-digits
    assert bounds.lower - slack <= truth <= bounds.upper + slack and bounds.met, bounds


def test_epsilon_is_never_negative():
    "opacus#585: 100, .01, 10 at delta .01 gave -4e-5; and tensorflow/privacy#166, where 0 is right."
    for noise, q, steps, delta in ((100, 0.01, 10, 0.01), (1, 0.00105, 1, 1e-3), (1e4, 0.5, 3, 0.1), (1e3, 1.0, 1, 0.5)):
        bounds = dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=steps, delta=delta)
        assert bounds.lower == bounds.upper == 0


@pytest.mark.parametrize("scale,n", [(1.0, 2), (10.0, 100), (0.5, 7)])
def test_pure_mechanisms_have_a_finite_epsilon_at_delta_zero(scale, n):
    "dp-accounting answers inf."
    for mechanism in (Laplace(scale), PureDP(1 / scale), DiscreteLaplace(scale), ExponentialMechanism(1 / scale)):
        bounds = epsilon_bounds(mechanism, n, delta=0.0)
        assert abs(bounds.upper - n / scale) <= 1e-9 * n / scale and (bounds.lower is None) == (not mechanism.tight)
    assert epsilon_bounds(DiscreteGaussian(scale), n, delta=0.0).upper == math.inf
    assert epsilon_bounds(Laplace(scale), n, delta=1e-25).upper <= n / scale * (1 + 1e-12)


@pytest.mark.parametrize("sampling", ["shuffle", "random_allocation", "balls_and_bins", "with_replacement"])
def test_other_ways_of_drawing_batches_are_not_taken_for_poisson(sampling):
    "opacus#80, tensorflow/privacy#483: shuffled batches accounted as Poisson."
    with pytest.raises(ValueError, match="^sampling must not be") as error:
        dp_sgd_epsilon(noise_multiplier=1.0, sampling_probability=0.01, steps=10, delta=1e-5, sampling=sampling)
    assert len(str(error.value)) > 120  # an explanation


def test_fixed_batches_are_not_poisson():
    "Lebeda et al. 2024: epsilon may be several times that of Poisson sampling."
    run = dict(noise_multiplier=1.0, sampling_probability=0.01, steps=1000, delta=1e-6)
    poisson, fixed = dp_sgd_epsilon(**run), dp_sgd_epsilon(**run, sampling="without_replacement")
    assert fixed.lower > 7 * poisson.upper and fixed.met
    replaced = dp_sgd_epsilon(**run, sampling="without_replacement", adjacency="replace_one")
    assert replaced.lower is None and replaced.upper >= fixed.lower and "no lower bound" in str(replaced) and replaced.to_dict()["lower"] is None


@pytest.mark.parametrize("noise,q,steps,delta,truth", [(4, 0.00033, 10**4, 1e-5, 0.022438048), (4, 0.00033, 10**4, 1e-6, 0.0279578039), (4, 0.00033, 10**4, 1e-12, 0.051084236), (4, 0.001, 10**4, 1e-6, 0.0921238043)])
def test_tiny_epsilons_by_default(noise, q, steps, delta, truth):
    "The accuracy that peers miss by 12% on their default grid."
    bounds = dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=steps, delta=delta)
    assert bounds.lower <= truth * (1 + 1e-7) and truth * (1 - 1e-7) <= bounds.upper <= truth * (1 + 1.01e-4) and bounds.met


def test_fixed_and_adaptive_selections():
    "Two selections of range 1 at epsilon 0: 0.2883 if fixed beforehand; adaptive ones are never accounted by that number."
    assert abs(fixed_selections_delta(1.0, 2, 0.0)[1] - 0.2883) < 5e-5
    fixed, adaptive = (epsilon_bounds(ExponentialMechanism(1.0, adaptive=a), 2, delta=0.2) for a in (False, True))
    assert fixed.lower is not None and fixed.upper < adaptive.upper and adaptive.lower is None
    assert epsilon_bounds(ExponentialMechanism(1.0), 2, delta=0.3034).upper > 0  # the adaptive optimum at epsilon 0 is 0.3034
    assert epsilon_bounds(ExponentialMechanism(0.1), 100, delta=1e-6).upper < epsilon_bounds(PureDP(0.1), 100, delta=1e-6).lower


@pytest.mark.parametrize("rho,delta", list(itertools.product([1e-6, 1e-3, 0.1, 2.0, 50.0], [1e-2, 1e-6, 1e-12])))
def test_curves_are_never_worse_than_renyi_accounting(rho, delta):
    "dp-accounting's conversion on its own orders (Canonne, Kamath, Steinke 2020, and Bretagnolle and Huber 1979), computed here."
    orders = np.concatenate([[1 + x / 10 for x in range(1, 100)], np.arange(11, 64), [128, 256, 512, 1024]])
    for curve in (rho * orders, rho * np.sqrt(orders)):
        simple = [0.0 if delta**2 + math.expm1(-r) >= 0 else r + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a, r in zip(orders, curve)]
        assert epsilon_bounds(RenyiDP(orders, curve), delta=delta).upper <= max(0.0, min(simple)) * (1 + 1e-9)


def test_curves_beside_pairs():
    "Curves are added before one conversion: many small boxes cost no more than one large one; pairs beside them are sound."
    apart = epsilon_bounds([(ZeroConcentratedDP(0.001), 100)], delta=1e-6)
    assert abs(apart.upper / epsilon_bounds(ZeroConcentratedDP(0.1), delta=1e-6).upper - 1) < 1e-9 and apart.lower is None
    mixed = epsilon_bounds([(ZeroConcentratedDP(0.005), 1), (Gaussian(10.0), 1)], delta=1e-6)  # as two Gaussians of noise 10 would have it
    assert epsilon_bounds(Gaussian(10.0), 2, delta=1e-6).lower <= mixed.upper <= 1.4 * epsilon_bounds(Gaussian(10.0), 2, delta=1e-6).upper
    both = epsilon_bounds([(ZeroConcentratedDP(0.005), 2), (PureDP(0.1), 3), (ApproximateDP(0.1, 1e-9), 1)], delta=1e-6)
    assert both.lower is None and both.upper >= epsilon_bounds([(PureDP(0.1), 4)], delta=1e-6).lower


# ---- order: worse neighbours, larger groups, more steps

@pytest.mark.parametrize("noise,q", [(0.7, 0.1), (1.0, 0.01), (3.0, 0.3)])
def test_order(noise, q):
    run = dict(noise_multiplier=noise, sampling_probability=q, steps=50, delta=1e-6)
    one = dp_sgd_epsilon(**run)
    groups = [dp_sgd_epsilon(**run, group_size=k) for k in (1, 2, 4)]
    assert groups[0].upper == one.upper and all(a.upper <= b.lower for a, b in itertools.pairwise(groups))
    assert all(g.upper <= k * dp_sgd_epsilon(**(run | dict(delta=1e-6 / (k * math.exp((k - 1) * one.upper))))).upper * 1.001 for g, k in zip(groups[1:], (2, 4)) if one.upper < 20)
    replaced = dp_sgd_epsilon(**run, adjacency="replace_one")
    assert one.upper <= replaced.lower and dp_sgd_epsilon(**run, adjacency="zero_out").upper == one.upper
    caps = [dp_sgd_epsilon(**run, sampling="truncated_poisson", dataset_size=1000, max_batch_size=int(1000 * q * c) + 30).upper for c in (1, 1.2, 3)]
    assert caps[0] >= 0.999 * caps[1] and caps[1] >= 0.999 * caps[2] and caps[2] >= one.lower


def test_memory():
    "Below 100 MB above the import, whatever the noise."
    script = """
import resource, numpy
from databloom.connect_the_dots import dp_sgd_epsilon, epsilon_bounds
from databloom.mechanisms import DiscreteGaussian
dp_sgd_epsilon(noise_multiplier=1.0, sampling_probability=0.01, steps=10, delta=1e-5)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for noise in (0.01, 0.05, 0.3, 2.0, 50.0, 1e4):
    for q in (1.0, 0.01, 1e-5):
        for steps in (1, 1000, 100000):
            dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=steps, delta=1e-6)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(answer.stdout) < 100, answer.stdout


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
def test_tiny_noise(noise):
    "Losses of thousands: upper bounds stay above, and replacing a record stays worse than removing one."
    for q, steps in ((0.01, 1), (0.5, 1), (1e-5, 100), (0.01, 100)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            removed, replaced = (dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=q, steps=steps, delta=1e-6, adjacency=a) for a in ("add_remove", "replace_one"))
        assert replaced.upper >= removed.lower and removed.upper >= 0.4 / noise**2
        # all steps but a few sampled ones lose nothing much: as many records as are sampled at once with probability 1e-6
        hits = steps if q * steps > 1e-6 else 1
        assert replaced.upper <= hits * (0.5 / noise**2 + 8 / noise) * 1.05, replaced
    one = dp_sgd_epsilon(noise_multiplier=noise, sampling_probability=0.01, steps=1, delta=1e-6)
    assert one.lower >= 0.99 * one.upper


def test_nothing_but_zero_needs_no_memory():
    "Total variation below delta: epsilon is 0, without a grid."
    bounds = dp_sgd_epsilon(noise_multiplier=1e4, sampling_probability=1e-5, steps=10**5, delta=1e-6)
    assert bounds.lower == bounds.upper == 0 and bounds.cells is None
