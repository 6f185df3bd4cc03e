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
    BudgetExceeded, EnsembleLedger, MemberFilter, Server, accuracy_loss, alarm_shares, attack_ensemble, audit_members, audit_release, calibrated_scores, capped_trust, chosen_members,
    clipped_average, discrete_gaussian, discrete_laplace, epsilon_of_rho, largest_online_weight, latched, local_average, mechanisms, membership, noisy,
    own_predictions, pair_of, private_alarms, public_ridge, release, rho_of, screened, sensitivity, teach, teach_whole, train_student, whole_answers,
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
    options = {"B": 4.0, "members": 3, "epsilon": 1.0, "ledger": EnsembleLedger()} | {name: bad}
    with pytest.raises(ValueError, match=name):
        release(np.ones((2, 3)), **options)
    assert options["ledger"].entries == []


@pytest.mark.parametrize("options", [{"members": 0}, {"members": 2}, {"mechanism": "uniform"}, {"ledger": None}, {"neighbour": "add"}, {"weights": [1, 1, 1]}, {"weights": [0.5, 0.5]}])
def test_bad_releases(options):
    with pytest.raises(ValueError):
        release(np.ones((2, 3)), **({"B": 4.0, "members": 3, "epsilon": 1.0, "ledger": EnsembleLedger()} | options))


@pytest.mark.parametrize("bad", [{"budget": 0}, {"budget": -1}, {"budget": math.nan}, {"delta": 0}, {"delta": 1}, {"delta": 2}, {"public": {"weather": "fine"}}])
def test_bad_ledgers(bad):
    with pytest.raises(ValueError):
        EnsembleLedger(**bad)


@pytest.mark.parametrize("mechanism", mechanisms)
def test_noise_has_its_scale_and_a_seed_repeats_it(mechanism):
    runs = 600 if mechanism.startswith("discrete") else 20000
    made = [noisy(np.zeros(runs), 0.01, mechanism=mechanism, noise=3.0, ledger=EnsembleLedger(), random_state=4) for _ in range(2)]
    np.testing.assert_array_equal(*made)
    expected = 0.03 * (math.sqrt(2) if "laplace" in mechanism else 1)
    assert made[0].std() == pytest.approx(expected, rel=0.15 if runs == 600 else 0.03)
    assert not np.array_equal(made[0], noisy(np.zeros(runs), 0.01, mechanism=mechanism, noise=3.0, ledger=EnsembleLedger()))


def test_discrete_values_lie_on_a_grid():
    values = noisy(np.full(200, 0.123456), 0.01, mechanism="discrete-laplace", noise=3.0, ledger=EnsembleLedger(), random_state=0)
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
        ledger = EnsembleLedger(delta=1e-6)
        ledger.charge("laplace", steps, noise=10.0)
        assert ledger.epsilon() == pytest.approx(laplace, rel=0.015)
        ledger = EnsembleLedger(delta=1e-6)
        ledger.charge("gaussian", steps, noise=10 * math.sqrt(2))
        assert ledger.epsilon() == pytest.approx(gaussian, rel=0.015)


def test_never_below_the_certified_lower_bound_and_beside_dp_accounting():
    pytest.importorskip("dp_accounting")
    from dp_accounting.pld import privacy_loss_distribution as reference

    for steps in (1, 38, 217):
        for kind, pair, other in (("laplace", Laplace(10.0), reference.from_laplace_mechanism(10.0, value_discretization_interval=1e-3)),
                                  ("gaussian", Gaussian(15.0), reference.from_gaussian_mechanism(15.0, value_discretization_interval=1e-3))):
            ledger = EnsembleLedger(delta=1e-6)
            ledger.charge(kind, steps, noise=10.0 if kind == "laplace" else 15.0)
            assert ledger.epsilon() >= epsilon_bounds(pair, steps, delta=1e-6).lower * (1 - 1e-9)
            assert ledger.epsilon() == pytest.approx(other.self_compose(steps).get_epsilon_for_delta(1e-6), rel=0.03)


def test_ledger_on_disk_refuses_and_is_shared(tmp_path):
    path = tmp_path / "ledger.json"
    one, two = EnsembleLedger(1.0, 1e-6, path), EnsembleLedger(path=path)
    assert two.budget == 1.0
    one.charge("laplace", 1, noise=2.0)
    with pytest.raises(BudgetExceeded):
        two.charge("laplace", 1, noise=1.5)  # sees the other's entry
    assert len(json.loads(path.read_text())["entries"]) == 1 and EnsembleLedger(path=path).epsilon() == pytest.approx(0.5, rel=1e-4)
    path.write_text("{}")
    with pytest.raises(ValueError, match="ledger must be"):
        EnsembleLedger(path=path)


def test_epsilon_per_stay_and_lifetime():
    ledger, outputs = EnsembleLedger(delta=1e-6), np.ones((5, 4))
    first = release(outputs, B=4, members=4, epsilon=0.2, ledger=ledger, stay="a")
    second = release(outputs, B=4, members=4, epsilon=0.2, ledger=ledger, stay="b")
    assert first.epsilon_value == pytest.approx(0.2) and first.epsilon_stay == pytest.approx(second.epsilon_stay)
    assert second.epsilon_lifetime > first.epsilon_lifetime and first.epsilon_stay <= 1.0 + 1e-9
    assert any("members" in a for a in second.assumptions) and any("development set" in a for a in second.assumptions)
    json.loads(second.to_json())


def test_alarms_stay_on_and_charge_once():
    ledger = EnsembleLedger()
    made = private_alarms([0, 9, 0, 0, 0], [0, 3, 5], threshold=5, D=1e-9, epsilon=0.5, ledger=ledger)
    assert list(made.alarms) == [0, 1, 1, 0, 0] and list(made.first) == [1, -1] and ledger.entries[0]["count"] == 2
    with pytest.raises(ValueError, match="epsilon"):
        private_alarms([1.0], [0, 1], threshold=5, D=1.0, epsilon=0, ledger=ledger)
    on, first = latched([], [0])
    assert len(on) == 0 and len(first) == 0


def test_renyi_filter_drops_who_has_spent():
    club = MemberFilter(2, B=4, sigma=1.0, epsilon=1.0, centre=0.0, random_state=0)
    values = club.release(np.tile([4.0, 0.0], (2000, 1)))
    assert club.spent[0] <= club.budget and club.spent[1] == 0
    assert values[:2].mean() > values[-500:].mean()  # the loud member is gone
    assert epsilon_of_rho(rho_of(0.7, 1e-5), 1e-5) == pytest.approx(0.7, rel=1e-6) and epsilon_of_rho(0.0, 1e-5) == 0
    for bad in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError):
            MemberFilter(2, B=4, sigma=1.0, epsilon=bad)


def test_filter_accounting_is_not_below_the_truth():
    rho, steps = 0.002, 40
    z = 1 / math.sqrt(2 * rho)
    assert epsilon_of_rho(rho * steps, 1e-6) >= epsilon_bounds(Gaussian(z), steps, delta=1e-6).lower


def test_only_declared_sources_and_pools(world):
    _, _, stays = world
    pool = train_readouts(stays.take(np.arange(20)), reservoir=Reservoir(stays.x.shape[1], units=4))
    for source in ("synthetic", "training", None, "Public"):
        with pytest.raises(ValueError, match="source"):
            teach(pool, stays.take([100]), source=source, B=4, noise=10.0, ledger=EnsembleLedger())
    with pytest.raises(ValueError, match="generator_epsilon"):
        teach(pool, stays.take([100]), source="public", generator_epsilon=1.0, B=4, noise=10.0, ledger=EnsembleLedger())
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
    ledger = EnsembleLedger(1.0, 1e-6)
    server = Server(ensemble, private=True, ledger=ledger, epsilon=0.4, random_state=0)
    first = server.answer("a", 1.0, {"HR": 90.0})
    assert server.answer("a", 1.5, {"HR": 91.0})["value"] == first["value"] and len(ledger.entries) == 1  # no new grid point
    server.answer("a", 2.0, {})
    with pytest.raises(BudgetExceeded):
        server.answer("b", 1.0, {"HR": None})
    with pytest.raises(ValueError, match="time"):
        server.answer("a", 2.0, {})
    with pytest.raises(ValueError, match="ledger"):
        Server(ensemble, private=True)


def test_alarms_of_one_stay_follow_the_law_of_above_threshold():
    "Probabilities of the first alarm under two neighbours, by numerical integration over the threshold's noise."
    once, each = alarm_shares(1.0)
    assert once + each == pytest.approx(1.0) and each / once == pytest.approx(2 ** (2 / 3))
    tail = lambda x, b: np.where(x > 0, 0.5 * np.exp(-np.abs(x) / b), 1 - 0.5 * np.exp(-np.abs(x) / b))
    height = np.linspace(-60, 60, 24001)
    weight = np.exp(-np.abs(height) * once) * once / 2 * (height[1] - height[0])
    rng = np.random.default_rng(0)
    for _ in range(30):
        values = rng.uniform(-3, 3, 4)
        other = values + rng.choice([-1, 1], 4)
        law = []
        for v in (values, other):
            yes = [tail(1.0 + height - x, 2 / each) for x in v]
            law.append(np.array([weight @ (np.prod([1 - y for y in yes[:k]], axis=0) * (yes[k] if k < 4 else 1)) for k in range(5)]))
        assert np.max(np.abs(np.log(law[0] / law[1]))) <= 1.0 + 1e-6


@pytest.mark.parametrize("discrete", [True, False])
def test_alarms_fire_as_often_as_the_law_says(discrete):
    starts = np.arange(0, 1201, 2)
    made = private_alarms(np.zeros(1200), starts, threshold=1.0, D=1.0, epsilon=1.0, ledger=EnsembleLedger(), discrete=discrete, random_state=1)
    rng = np.random.default_rng(2)
    once, each = alarm_shares(1.0)
    free = np.mean((rng.laplace(0, 2 / each, (200000, 2)).max(axis=1) - rng.laplace(0, 1 / once, 200000)) >= 1.0)
    assert np.mean(made.first >= 0) == pytest.approx(free, abs=0.08)
    assert np.isin(made.alarms, (0, 1)).all() and all(made.alarms[a + 1] >= made.alarms[a] for a in starts[:-1])


@pytest.mark.parametrize("starts", [[0], [0, 3], [1, 5], [0, 4, 2, 5], []])
def test_alarms_refuse_stays_that_do_not_fit(starts):
    ledger = EnsembleLedger()
    with pytest.raises(ValueError, match="starts"):
        private_alarms(np.zeros(5), starts, threshold=1.0, D=1.0, epsilon=1.0, ledger=ledger)
    assert ledger.entries == []


def test_no_teacher_moves_the_whole_vector_by_more_than_said(world):
    _, _, stays = world
    rng, lessons = np.random.default_rng(0), stays.take(np.arange(3))
    pool = train_readouts(stays.take(np.arange(20)), reservoir=Reservoir(stays.x.shape[1], units=4))
    for bound in (0.05, 0.5, 50.0):
        k, wild = int(rng.integers(20)), pool.readouts.copy()
        wild[k] = rng.normal(0, 30, wild.shape[1])
        from dataclasses import replace
        moved = whole_answers(replace(pool, readouts=wild), lessons, bound, 0.4) - whole_answers(pool, lessons, bound, 0.4)
        assert np.linalg.norm(moved) <= sensitivity(2 * bound * math.sqrt(len(lessons.x)), 20) + 1e-9
    free = whole_answers(pool, lessons, 1e6, 0.4)
    np.testing.assert_allclose(free, pool.combine(lessons), atol=1e-5)
    ledger = EnsembleLedger(budget=1.0, delta=1e-5)
    labels = teach_whole(pool, lessons, source="simulator", bound=0.5, centre=0.4, noise=4.0, ledger=ledger, random_state=0)
    assert (labels - whole_answers(pool, lessons, 0.5, 0.4)).std() == pytest.approx(4.0 * 0.5 * math.sqrt(len(lessons.x)) / 20, rel=0.2)
    assert ledger.entries[0]["count"] == 1
    with pytest.raises(BudgetExceeded):
        teach_whole(pool, lessons, source="simulator", bound=0.5, noise=4.0, ledger=ledger)
    for bad in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="bound"):
            teach_whole(pool, lessons, source="public", bound=bad, noise=4.0, ledger=EnsembleLedger())


def test_a_student_leans_on_the_public_start_as_noise_grows(world):
    _, _, stays = world
    known = train_readouts(stays.take(np.arange(60)), reservoir=Reservoir(stays.x.shape[1], units=4))
    lessons = stays.take(np.arange(60, 80))
    far = np.full(len(lessons.x), 9.0)
    start = known.predict(lessons).mean(axis=1)
    distances = [np.abs(train_student(lessons, far, prior=known, noise=s).predict(lessons)[:, 0] - start).mean() for s in (0.01, 1.0, 1e4)]
    assert distances[0] > distances[1] > distances[2] and distances[2] < 0.01
    assert public_ridge(known, 2.0) == pytest.approx(4 * public_ridge(known, 1.0))
    with pytest.raises(ValueError, match="noise"):
        train_student(lessons, far, prior=known)


def test_a_filter_charges_a_shared_ledger_once():
    ledger = EnsembleLedger(budget=1.5, delta=1e-5)
    MemberFilter(3, B=4, sigma=1.0, epsilon=1.0, delta=1e-6, ledger=ledger)
    assert len(ledger.entries) == 1 and 0.999 <= ledger.epsilon() <= 1.02
    with pytest.raises(BudgetExceeded):
        MemberFilter(3, B=4, sigma=1.0, epsilon=1.0, delta=1e-6, ledger=ledger)


def test_server_that_says_only_alarms(world):
    _, prep, stays = world
    ensemble = train_ensemble(prep, stays.take(np.arange(40)), stays.take(np.arange(40, 80)), units=4)
    ledger = EnsembleLedger(2.0, 1e-6)
    server = Server(ensemble, private=True, ledger=ledger, epsilon=1.0, answers="alarms", random_state=0)
    said = [server.answer("a", float(t), {"HR": 150.0, "Temp": 41.0, "Resp": 40.0})["alarm"] for t in range(1, 60)]
    assert said == sorted(said) and len(ledger.entries) == 1 and ledger.epsilon() == pytest.approx(1.0, rel=1e-4)
    server.answer("b", 1.0, {})
    with pytest.raises(BudgetExceeded):
        server.answer("c", 1.0, {})
    free = Server(ensemble, answers="alarms")
    assert set(free.answer("a", 1.0, {"HR": 80.0})) == {"alarm", "epsilon_stay", "epsilon_lifetime"}
    with pytest.raises(ValueError, match="answers"):
        Server(ensemble, answers="curves")


def test_accuracy_loss_and_audit_of_members(world):
    _, prep, stays = world
    values = stays.label + np.random.default_rng(0).normal(size=len(stays.x))
    assert accuracy_loss(stays.label, values, 0.0, draws=1) == 0.0
    assert 0 < accuracy_loss(stays.label, values, 1.0) < accuracy_loss(stays.label, values, 50.0)
    ensemble = train_ensemble(prep, stays.take(np.arange(30)), stays.take(np.arange(40, 80)), units=4, target="utility")
    made = audit_members(ensemble, stays, noise=20.0, most=10)
    assert made["candidates"] == 10 and made["lower"] <= made["epsilon"]
    with pytest.raises(ValueError, match="cohorts"):
        audit_members(ensemble, stays.take(np.arange(100, 120)), noise=1.0)


def test_the_constant_control_knows_nobody(world):
    "Members and strangers of one law: a constant predictor must not tell them apart, whichever target."
    _, prep, stays = world
    for target in ("severity", "label"):
        ensemble = train_ensemble(prep, stays.take(np.arange(60)), stays.take(np.arange(200, 260)), units=4, target=target)
        control = attack_ensemble(ensemble, stays.take(np.arange(60)), stays.take(np.arange(60, 200)), references=1)["control: constant"]
        assert control.auc_low <= 0.5 <= control.auc_high
