"Calibration: certified sufficient, near the optimum, monotone in what it should be; bad input by name."

import json
import math

import pytest

from databloom.connect_the_dots import dp_sgd_epsilon, epsilon_bounds
from databloom.mechanisms import DiscreteLaplace, Gaussian, Laplace, PoissonSubsampled
from databloom.noise_calibration import calibrate_noise, calibrate_sampling, calibrate_steps


def test_the_case_of_the_note():
    answer = calibrate_noise(epsilon=1.0, delta=1e-6, sampling_probability=0.01, steps=1000)
    assert abs(answer.noise_multiplier - 1.56268) < 1e-4 and answer.epsilon <= 1 and answer.met and answer.gap <= 1e-4
    assert dp_sgd_epsilon(noise_multiplier=answer.limit, sampling_probability=0.01, steps=1000, delta=1e-6, tolerance=1e-6).lower > 1.0


@pytest.mark.parametrize("epsilon, delta, q, steps", [(0.1, 1e-8, 0.1, 100), (50.0, 1e-8, 0.01, 10_000), (3.0, 1e-8, 2e-5, 100_000), (1.0, 1e-6, 1.0, 100),
                                                      (0.01, 1e-6, 1.0, 1), (1000.0, 1e-6, 1.0, 1), (4.0, 1e-5, 0.5, 10), (2.0, 1e-12, 0.02, 300)])
def test_noise_is_enough_and_hardly_more(epsilon, delta, q, steps):
    answer = calibrate_noise(epsilon=epsilon, delta=delta, sampling_probability=q, steps=steps)
    run = dict(sampling_probability=q, steps=steps, delta=delta, tolerance=1e-5)
    assert answer.epsilon <= epsilon and answer.met
    assert dp_sgd_epsilon(noise_multiplier=answer.noise_multiplier, **run).lower <= epsilon
    assert dp_sgd_epsilon(noise_multiplier=answer.noise_multiplier * (1 - 1.1e-4), **run).upper > epsilon


def test_gaussian_closed_form_to_1e6():
    answer = calibrate_noise(epsilon=4.377178, delta=1e-5, accuracy=1e-6)  # mu = 1
    assert abs(answer.noise_multiplier - 1) < 3e-6


@pytest.mark.parametrize("noise, q", [(1.2, 0.01), (30.0, 1.0), (1.0, 0.05)])
def test_steps_are_the_largest(noise, q):
    answer = calibrate_steps(epsilon=3.0, delta=1e-6, noise_multiplier=noise, sampling_probability=q)
    run = dict(noise_multiplier=noise, sampling_probability=q, delta=1e-6, tolerance=1e-5)
    assert dp_sgd_epsilon(steps=answer.steps, **run).lower <= 3 and answer.epsilon <= 3
    assert answer.limit == answer.steps + 1 and dp_sgd_epsilon(steps=answer.limit, **run).upper > 3


def test_sampling_and_noise_agree():
    batches = calibrate_sampling(epsilon=2.0, delta=1e-6, noise_multiplier=1.0, steps=500)
    noise = calibrate_noise(epsilon=2.0, delta=1e-6, sampling_probability=batches.sampling_probability, steps=500)
    assert abs(noise.noise_multiplier - 1) < 3e-4
    assert calibrate_sampling(epsilon=10.0, delta=1e-6, noise_multiplier=5.0, steps=10).sampling_probability == 1.0


def test_other_noise_and_other_neighbours():
    pure = calibrate_noise(epsilon=2.0, delta=0.0, steps=10, mechanism=Laplace)
    assert pure.noise_multiplier == pytest.approx(5.0, rel=1e-3) and pure.epsilon <= 2
    laplace = calibrate_noise(epsilon=1.0, delta=1e-6, steps=20, mechanism=Laplace, sampling_probability=0.1)
    assert epsilon_bounds(PoissonSubsampled(Laplace(laplace.noise_multiplier), 0.1), 20, delta=1e-6).lower <= 1.0
    discrete = calibrate_noise(epsilon=1.0, delta=1e-6, steps=5, mechanism=DiscreteLaplace)
    assert discrete.epsilon <= 1.0 and discrete.met
    replaced = calibrate_noise(epsilon=2.0, delta=1e-6, steps=3, adjacency="replace_one")
    added = calibrate_noise(epsilon=2.0, delta=1e-6, steps=3)
    assert replaced.noise_multiplier == pytest.approx(2 * added.noise_multiplier, rel=2e-4)
    fixed = calibrate_noise(epsilon=2.0, delta=1e-6, steps=100, sampling_probability=0.01, sampling="without_replacement", adjacency="replace_one")
    assert fixed.lower is None and fixed.epsilon <= 2 and fixed.met


def test_results_are_data():
    answer = calibrate_noise(epsilon=1.0, delta=1e-6, steps=3)
    data = json.loads(answer.to_json())
    assert data["noise_multiplier"] == answer.value and data["epsilon"] <= 1 and data["parameter"] == "noise_multiplier"
    assert "certainly not enough" in str(answer)


@pytest.mark.parametrize("bad", (None, "1", True, math.nan, math.inf, -1, 0, [], 1j))
def test_bad_input_is_named(bad):
    noise = lambda **k: calibrate_noise(**{**dict(epsilon=1.0, delta=1e-6), **k})
    steps = lambda **k: calibrate_steps(**{**dict(epsilon=1.0, delta=1e-6, noise_multiplier=2.0), **k})
    for name in ("epsilon", "delta", "steps", "sampling_probability", "accuracy", "group_size", "adjacency", "sampling", "mechanism"):
        with pytest.raises(ValueError, match=name):
            noise(**{name: bad})
    for name in ("noise_multiplier", "most", "epsilon", "delta", "sampling_probability"):
        with pytest.raises(ValueError, match=name):
            steps(**{name: bad})
    with pytest.raises(ValueError, match="noise_multiplier"):
        calibrate_sampling(epsilon=1.0, delta=1e-6, noise_multiplier=bad)


def test_what_cannot_be_met_is_said():
    with pytest.raises(ValueError, match="epsilon must be reachable"):
        calibrate_steps(epsilon=0.1, delta=1e-6, noise_multiplier=0.5)
    with pytest.raises(ValueError, match="delta must be above 0"):
        calibrate_noise(epsilon=1.0, delta=0.0)
