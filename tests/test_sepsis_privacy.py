"""The promises of the sepsis releases: sensitivity by brute force, ledgers, refusals, attacks on planted leaks."""

import json
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from databloom.connect_the_dots import epsilon_bounds
from databloom.icu_simulator import simulate_icu
from databloom.mechanisms import Gaussian, Laplace
from databloom.sepsis_ensemble import Reservoir, fit_preprocessor, online_trust, train_ensemble, train_readouts
from databloom.sepsis_privacy import (
    BudgetSpent, Ledger, calibrated_scores, membership, own_predictions, RenyiFilter, Server, attack_ensemble, audit_release, capped_trust, chosen_members, clipped_average, discrete_gaussian,
    discrete_laplace, epsilon_of_rho, largest_online_weight, latched, local_average, mechanisms, noisy, pair_of, private_alarms, release, rho_of,
    screened, sensitivity, teach,
)


@pytest.fixture(scope="module")
def world():
    cohort = simulate_icu(260, random_state=3, outcome="SepsisLabel", sepsis_rate=0.3)
    prep = fit_preprocessor(cohort, public=True)
    return cohort, prep, prep(cohort)


def test_one_patient_moves_the_average_by_no_more_than_said():
    rng = np.random.default_rng(0)
    for _ in range(200):
        n, B = int(rng.integers(1, 9)), float(rng.uniform(0.5, 5))
        outputs, other = rng.normal(0, 6, (7, n)), rng.normal(0, 6, (7, n))
        k = int(rng.integers(n))
        changed = outputs.copy()
        changed[:, k] = other[:, k]
        assert np.abs(clipped_average(outputs, B, n) - clipped_average(changed, B, n)).max() <= sensitivity(B, n) + 1e-12
        gone = np.delete(outputs, k, axis=1)
        if n > 1:
            assert np.abs(clipped_average(outputs, B, n) - clipped_average(gone, B, n)).max() <= sensitivity(B, n, "remove") + 1e-12
        w = rng.dirichlet(np.ones(n))
        assert np.abs(clipped_average(outputs, B, n, w) - clipped_average(changed, B, n, w)).max() <= sensitivity(B, n, largest_weight=w.max()) + 1e-12


def test_capped_weights_and_screening_keep_the_bound():
    rng = np.random.default_rng(1)
    for _ in range(50):
        n, T, B, cap = 6, 40, 4.0, 10.0
        outputs, truth = rng.uniform(-1, 6, (T, n)), rng.uniform(0, 4, T)
        changed = outputs.copy()
        changed[:, 2] = rng.uniform(-1, 6, T)
        values = [local_average(o, capped_trust(online_trust(o, truth), cap, n), B, n) for o in (outputs, changed)]
        assert np.abs(values[0] - values[1]).max() <= B / n + 1e-12
        values = [local_average(o, screened(((o - truth[:, None]) ** 2).mean(axis=0), 4.0), B, n) for o in (outputs, changed)]
        assert np.abs(values[0] - values[1]).max() <= B / n + 1e-12
    with pytest.raises(ValueError, match="weights"):
        local_average(outputs, np.full(n, 0.5), B, n)


def test_online_weight_bound_is_reached_and_kept():
    rng = np.random.default_rng(2)
    for _ in range(50):
        outputs, truth = rng.uniform(0, 4, (30, 5)), rng.uniform(0, 4, 30)
        trust = online_trust(outputs, truth)
        assert (trust / trust.sum(axis=1, keepdims=True)).max(axis=1)[-1] <= largest_online_weight(5, 30) + 1e-12


@pytest.mark.parametrize("bad", [0, -1, math.inf, -math.inf, math.nan, None, "1", True])
@pytest.mark.parametrize("name", ["epsilon", "B"])
def test_bad_epsilon_and_bound(name, bad):
    options = {"B": 4.0, "members": 3, "epsilon": 1.0, "ledger": Ledger()} | {name: bad}
    with pytest.raises(ValueError, match=name):
        release(np.ones((2, 3)), **options)
    assert options["ledger"].entries == []


@pytest.mark.parametrize("options", [{"members": 0}, {"members": 2}, {"mechanism": "uniform"}, {"ledger": None}, {"neighbour": "add"}, {"weights": [1, 1, 1]}, {"weights": [0.5, 0.5]}])
def test_bad_releases(options):
    with pytest.raises(ValueError):
        release(np.ones((2, 3)), **({"B": 4.0, "members": 3, "epsilon": 1.0, "ledger": Ledger()} | options))


@pytest.mark.parametrize("bad", [{"budget": 0}, {"budget": -1}, {"budget": math.nan}, {"delta": 0}, {"delta": 1}, {"delta": 2}, {"public": {"weather": "fine"}}])
def test_bad_ledgers(bad):
    with pytest.raises(ValueError):
        Ledger(**bad)


@pytest.mark.parametrize("mechanism", mechanisms)
def test_noise_has_its_scale_and_a_seed_repeats_it(mechanism):
    runs = 600 if mechanism.startswith("discrete") else 20000
    made = [noisy(np.zeros(runs), 0.01, mechanism=mechanism, noise=3.0, ledger=Ledger(), random_state=4) for _ in range(2)]
    np.testing.assert_array_equal(*made)
    expected = 0.03 * (math.sqrt(2) if "laplace" in mechanism else 1)
    assert made[0].std() == pytest.approx(expected, rel=0.15 if runs == 600 else 0.03)
    assert not np.array_equal(made[0], noisy(np.zeros(runs), 0.01, mechanism=mechanism, noise=3.0, ledger=Ledger()))


def test_discrete_values_lie_on_a_grid():
    values = noisy(np.full(200, 0.123456), 0.01, mechanism="discrete-laplace", noise=3.0, ledger=Ledger(), random_state=0)
    step = 2.0 ** math.floor(math.log2(0.01 / 128))
    np.testing.assert_array_equal(values / step, np.rint(values / step))


@pytest.mark.parametrize("scale", [Fraction(1, 3), Fraction(5, 2), Fraction(40)])
def test_discrete_laplace_law(scale):
    rng = random.Random(1)
    draws = np.array([discrete_laplace(rng, scale) for _ in range(3000)])
    q = math.exp(-1 / scale)
    for k in range(-3, 4):
        p = (1 - q) / (1 + q) * q ** abs(k)
        assert abs(np.mean(draws == k) - p) < 4.5 * math.sqrt(p * (1 - p) / 3000) + 1e-9


def test_discrete_gaussian_law():
    rng = random.Random(2)
    draws = np.array([discrete_gaussian(rng, Fraction(4)) for _ in range(3000)])
    weights = np.exp(-np.arange(-30, 31) ** 2 / 8.0)
    for k in range(-4, 5):
        p = math.exp(-k * k / 8) / weights.sum()
        assert abs(np.mean(draws == k) - p) < 4.5 * math.sqrt(p * (1 - p) / 3000)


def test_pairs_of_discrete_noise_are_hockey_sticks():
    for kind in ("discrete-laplace", "discrete-gaussian"):
        units, scale = 5, 8.0
        x = np.arange(-400, 400)
        law = np.exp(-np.abs(x) / scale) if kind == "discrete-laplace" else np.exp(-x**2 / (2 * scale**2))
        law = law / law.sum()
        shifted = np.roll(law, units)
        for epsilon in (0.0, 0.1, 0.3, 0.6):
            exact = np.maximum(shifted - math.exp(epsilon) * law, 0).sum()
            if exact > 1e-6:
                found = epsilon_bounds(pair_of({"kind": kind, "units": units, "scale": scale}), delta=float(exact)).upper
                assert found == pytest.approx(epsilon, abs=2e-3) and found >= epsilon - 1e-9


def test_golden_table_of_the_notes():
    for steps, laplace, gaussian in ((38, 2.65, 1.94), (217, 7.41, 5.12)):
        ledger = Ledger(delta=1e-6)
        ledger.charge("laplace", steps, noise=10.0)
        assert ledger.epsilon() == pytest.approx(laplace, rel=0.015)
        ledger = Ledger(delta=1e-6)
        ledger.charge("gaussian", steps, noise=10 * math.sqrt(2))
        assert ledger.epsilon() == pytest.approx(gaussian, rel=0.015)


def test_never_below_the_certified_lower_bound_and_beside_dp_accounting():
    pytest.importorskip("dp_accounting")
    from dp_accounting.pld import privacy_loss_distribution as reference

    for steps in (1, 38, 217):
        for kind, pair, other in (("laplace", Laplace(10.0), reference.from_laplace_mechanism(10.0, value_discretization_interval=1e-3)),
                                  ("gaussian", Gaussian(15.0), reference.from_gaussian_mechanism(15.0, value_discretization_interval=1e-3))):
            ledger = Ledger(delta=1e-6)
            ledger.charge(kind, steps, noise=10.0 if kind == "laplace" else 15.0)
            assert ledger.epsilon() >= epsilon_bounds(pair, steps, delta=1e-6).lower * (1 - 1e-9)
            assert ledger.epsilon() == pytest.approx(other.self_compose(steps).get_epsilon_for_delta(1e-6), rel=0.03)


def test_ledger_on_disk_refuses_and_is_shared(tmp_path):
    path = tmp_path / "ledger.json"
    one, two = Ledger(1.0, 1e-6, path), Ledger(path=path)
    assert two.budget == 1.0
    one.charge("laplace", 1, noise=2.0)
    with pytest.raises(BudgetSpent):
        two.charge("laplace", 1, noise=1.5)  # sees the other's entry
    assert len(json.loads(path.read_text())["entries"]) == 1 and Ledger(path=path).epsilon() == pytest.approx(0.5, rel=1e-4)
    path.write_text("{}")
    with pytest.raises(ValueError, match="ledger must be"):
        Ledger(path=path)


def test_epsilon_per_stay_and_lifetime():
    ledger, outputs = Ledger(delta=1e-6), np.ones((5, 4))
    first = release(outputs, B=4, members=4, epsilon=0.2, ledger=ledger, stay="a")
    second = release(outputs, B=4, members=4, epsilon=0.2, ledger=ledger, stay="b")
    assert first.epsilon_value == pytest.approx(0.2) and first.epsilon_stay == pytest.approx(second.epsilon_stay)
    assert second.epsilon_lifetime > first.epsilon_lifetime and first.epsilon_stay <= 1.0 + 1e-9
    assert any("members" in a for a in second.assumptions) and any("development set" in a for a in second.assumptions)
    json.loads(second.to_json())


def test_alarms_stay_on_and_charge_once():
    ledger = Ledger()
    made = private_alarms([0, 9, 0, 0, 0], [0, 3, 5], threshold=5, D=1e-9, epsilon=0.5, ledger=ledger)
    assert list(made.alarms) == [0, 1, 1, 0, 0] and list(made.first) == [1, -1] and ledger.entries[0]["count"] == 2
    with pytest.raises(ValueError, match="epsilon"):
        private_alarms([1.0], [0, 1], threshold=5, D=1.0, epsilon=0, ledger=ledger)
    on, first = latched([], [0])
    assert len(on) == 0 and len(first) == 0


def test_renyi_filter_drops_who_has_spent():
    club = RenyiFilter(2, B=4, sigma=1.0, epsilon=1.0, centre=0.0, random_state=0)
    values = club.release(np.tile([4.0, 0.0], (2000, 1)))
    assert club.spent[0] <= club.budget and club.spent[1] == 0
    assert values[:2].mean() > values[-500:].mean()  # the loud member is gone
    assert epsilon_of_rho(rho_of(0.7, 1e-5), 1e-5) == pytest.approx(0.7, rel=1e-6) and epsilon_of_rho(0.0, 1e-5) == 0
    for bad in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError):
            RenyiFilter(2, B=4, sigma=1.0, epsilon=bad)


def test_filter_accounting_is_not_below_the_truth():
    rho, steps = 0.002, 40
    z = 1 / math.sqrt(2 * rho)
    assert epsilon_of_rho(rho * steps, 1e-6) >= epsilon_bounds(Gaussian(z), steps, delta=1e-6).lower


def test_only_declared_sources_and_pools(world):
    _, _, stays = world
    pool = train_readouts(stays.take(np.arange(20)), reservoir=Reservoir(stays.x.shape[1], units=4))
    for source in ("synthetic", "training", None, "Public"):
        with pytest.raises(ValueError, match="source"):
            teach(pool, stays.take([100]), source=source, B=4, noise=10.0, ledger=Ledger())
    with pytest.raises(ValueError, match="generator_epsilon"):
        teach(pool, stays.take([100]), source="public", generator_epsilon=1.0, B=4, noise=10.0, ledger=Ledger())
    for pool_kind in ("private", "", None):
        with pytest.raises(ValueError, match="pool"):
            chosen_members(np.eye(3), pool=pool_kind)
    assert len(chosen_members(np.eye(3), pool="public", how="simplex")) == 3


def test_attack_finds_an_overfit_pool_and_not_a_constant(world):
    _, prep, stays = world
    R = Reservoir(stays.x.shape[1], units=16)
    people, crowd = stays.take(np.arange(100)), train_readouts(stays.take(np.arange(100, 200)), reservoir=R, ridge=1.0)
    own = own_predictions(train_readouts(people, reservoir=R, ridge=1.0), people)
    reference, guest = crowd.combine(people, low=0, high=4), np.clip(crowd.predict(people, [7])[:, 0], 0, 4)
    inside = np.arange(100) < 50
    predicted = np.where(inside[people.patient], (own + guest) / 2, guest)  # ensembles of two: with the patient, or with a stranger in place
    score = calibrated_scores(people, predicted, reference)
    assert membership(score[inside], score[~inside]).auc > 0.8
    flat = calibrated_scores(people, np.full(len(people.x), 0.4), reference)
    assert abs(membership(flat[inside], flat[~inside]).auc - 0.5) < 0.2
    few = train_ensemble(prep, stays.take(np.arange(20)), stays.take(np.arange(200, 260)), units=16, ridge=0.5)
    assert set(attack_ensemble(few, stays, stays, references=2)) == {"plain error (the paper's)", "calibrated", "likelihood ratio", "control: constant"}
    with pytest.raises(ValueError, match="cohorts"):
        attack_ensemble(few, stays.take(np.arange(50, 60)), stays)


def test_audit_stays_below_the_accountant_and_finds_a_leak(world):
    _, _, stays = world
    people = stays.take(np.arange(24))  # fewer than the features, so that all coins can be read from exact values
    pool = train_readouts(people, reservoir=Reservoir(stays.x.shape[1], units=16), ridge=1.0)
    for noise in (0.01, 1.0, 60.0):
        made = audit_release(people, pool, B=4, noise=noise)
        assert made["lower"] <= made["epsilon"]
        if noise == 0.01:
            assert made["membership"].auc > 0.9 and made["lower"] > 0.3


def test_server_repeats_and_refuses(world):
    _, prep, stays = world
    ensemble = train_ensemble(prep, stays.take(np.arange(40)), stays.take(np.arange(40, 80)), units=4)
    ledger = Ledger(1.0, 1e-6)
    server = Server(ensemble, private=True, ledger=ledger, epsilon=0.4, random_state=0)
    first = server.answer("a", 1.0, {"HR": 90.0})
    assert server.answer("a", 1.5, {"HR": 91.0})["value"] == first["value"] and len(ledger.entries) == 1  # no new grid point
    server.answer("a", 2.0, {})
    with pytest.raises(BudgetSpent):
        server.answer("b", 1.0, {"HR": None})
    with pytest.raises(ValueError, match="time"):
        server.answer("a", 2.0, {})
    with pytest.raises(ValueError, match="ledger"):
        Server(ensemble, private=True)
