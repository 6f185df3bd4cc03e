"Ledgers and certificates: what is refused, what is kept, what never leaves; files that others check."

import copy
import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from databloom import core
from databloom.black_boxes import ApproximateDP, PureDP, RenyiDP, ZeroConcentratedDP
from databloom.certificates import Certificate, certify, describe, mechanism_of, read_certificate, read_schedule, releases_of, verify
from databloom.connect_the_dots import epsilon_bounds
from databloom.ledger import (
    BudgetExceeded, Ledger, PersonalLedger, PrivateContents, RenyiFilter, best_order, load_ledger, renyi_budget, renyi_divergence,
)
from databloom.mechanisms import DiscreteGaussian, DiscreteLaplace, DiscretePair, Gaussian, Laplace, PoissonSubsampled, RandomizedResponse
from databloom.sampling import MixtureOfGaussians, ReplaceOne, WithoutReplacement, worst_case
from databloom.selection import AboveThreshold, ExponentialMechanism, PermuteAndFlip, ReportNoisyMax

MECHANISMS = [
    Gaussian(1.5), Laplace(3.0), RandomizedResponse(0.75, 4), DiscretePair([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]), DiscretePair([0.5, 0.5, 0], [0, 0.4, 0.6]),
    DiscreteLaplace(4.0), DiscreteGaussian(5.0), PoissonSubsampled(Gaussian(1.0), 0.01), PoissonSubsampled(Laplace(2.0), 0.1),
    MixtureOfGaussians(1.0, [0, 1, 2], [0.8, 0.15, 0.05]), ReplaceOne(1.0, 0.05), WithoutReplacement(Gaussian(0.5), 0.1),
    worst_case(Gaussian(1.0), sampling="truncated_poisson", sampling_probability=0.01, dataset_size=1000, max_batch_size=12),
    ExponentialMechanism(0.5), ReportNoisyMax(0.5), PermuteAndFlip(0.5), AboveThreshold(0.5), PureDP(0.5), ApproximateDP(0.5, 1e-8), ZeroConcentratedDP(0.01),
    RenyiDP([2, 4, 8], [0.1, 0.2, 0.5]),
]


@pytest.mark.parametrize("pair", MECHANISMS, ids=lambda pair: type(pair).__name__)
def test_every_mechanism_survives_a_file_and_a_certificate(pair):
    again = mechanism_of(json.loads(json.dumps(describe(pair))))
    assert describe(again) == describe(pair)
    claim = certify(pair, 3, delta=1e-4, tolerance=1e-2)
    bounds = epsilon_bounds(pair, 3, delta=1e-4, tolerance=1e-2)
    assert (claim.lower is None) == (bounds.lower is None) and claim.upper == pytest.approx(bounds.upper, rel=1e-9)
    result = verify(claim.to_json())
    assert result.confirmed, result


def test_certificates_that_lie():
    claim = certify([(PoissonSubsampled(Gaussian(1.0), 0.02), 300), (Laplace(5.0), 2)], delta=1e-6, assumptions=("the moon is public",))
    assert verify(claim) and verify(claim.to_dict()) and "the moon is public" in claim.assumptions
    data = claim.to_dict()
    lies = [dict(upper=0.9 * claim.upper, lower=0.5), dict(lower=1.01 * claim.upper, upper=1.02 * claim.upper), dict(delta=1e-7), dict(budget=0.1),
            dict(releases=data["releases"][:1]), dict(releases=[{**data["releases"][0], "steps": 600}, data["releases"][1]])]
    for lie in lies:
        assert not verify({**data, **lie}).confirmed, lie
    capped = certify(WithoutReplacement(Gaussian(0.5), 0.1), 3, delta=1e-5).to_dict()
    assert not verify({**capped, "lower": 0.1}).confirmed


@pytest.mark.parametrize("change", [dict(kind="x"), dict(format=2), dict(delta=math.nan), dict(delta="1"), dict(upper=None), dict(upper="big"), dict(releases=[]), dict(releases=[1]),
                                    dict(releases=[{"mechanism": "eval", "steps": 1}]), dict(releases=[{"mechanism": "Gaussian", "noise_multiplier": -1, "steps": 1}]),
                                    dict(releases=[{"mechanism": "Gaussian", "noise_multiplier": 1, "steps": 0}]), dict(tolerance=0), dict(assumptions="none"), dict(versions=3)])
def test_bad_certificates_are_refused(change):
    data = {**certify(Gaussian(3.0), delta=1e-6).to_dict(), **change}
    with pytest.raises(ValueError):
        verify(data)
    for text in ("", "[]", "{", '"x"', "[" * 100_000):
        with pytest.raises((ValueError, OSError)):
            read_certificate("{" + text)


@pytest.mark.parametrize("bad", [None, "x", [], {}, [1], [{"noise_multiplier": 1, "steps": -1}], [{"steps": 3}], [{"noise_multiplier": 1, "noise": 2}],
                                 [{"mechanism": 3, "noise_multiplier": 1}], [{"noise_multiplier": 1, "sampling_probability": 2}], {"phases": 1}])
def test_bad_schedules_are_refused(bad):
    with pytest.raises(ValueError):
        releases_of(bad)


def test_schedule_files(tmp_path):
    phases = [{"noise_multiplier": 1.0, "sampling_probability": 0.1, "steps": 3}, {"mechanism": "laplace", "noise_multiplier": 2.0}]
    (tmp_path / "a.json").write_text(json.dumps(phases))
    (tmp_path / "a.yaml").write_text("phases:\n- {noise_multiplier: 1.0, sampling_probability: 0.1, steps: 3}\n- {mechanism: laplace, noise_multiplier: 2.0}\n")
    for name in ("a.json", "a.yaml"):
        assert [(describe(p), n) for p, n in read_schedule(tmp_path / name)] == [(describe(PoissonSubsampled(Gaussian(1.0), 0.1)), 3), (describe(Laplace(2.0)), 1)]
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.txt").write_text("[]")
    for name in ("bad.yaml", "bad.json", "bad.txt"):
        with pytest.raises(ValueError, match="schedule"):
            read_schedule(tmp_path / name)


def test_yaml_without_pyyaml_names_the_need(tmp_path, monkeypatch):
    import builtins

    (tmp_path / "a.yaml").write_text("[]")
    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *a, **k: (_ for _ in ()).throw(ImportError(name)) if name == "yaml" else real(name, *a, **k))
    with pytest.raises(ImportError, match="PyYAML"):
        read_schedule(tmp_path / "a.yaml")


def test_a_ledger_refuses_what_would_pass_the_budget():
    ledger = Ledger(delta=1e-6, budget=2.0)
    assert ledger.epsilon().upper == 0 and ledger.delta_at(1.0) is None and len(ledger) == 0
    first = ledger.spend(PoissonSubsampled(Gaussian(1.0), 0.01), 500, what="model")
    second = ledger.spend({"mechanism": "laplace", "noise_multiplier": 10.0, "steps": 3})
    together = epsilon_bounds([(PoissonSubsampled(Gaussian(1.0), 0.01), 500), (Laplace(10.0), 3)], delta=1e-6)
    assert first.upper < second.upper == pytest.approx(together.upper, rel=1e-9)
    before = list(ledger.entries)
    with pytest.raises(BudgetExceeded, match="above the budget of 2"):
        ledger.spend(Gaussian(2.0))
    assert ledger.entries == before and len(ledger) == 503
    n = ledger.left(Gaussian(30.0))
    assert n > 0 and ledger.allows(Gaussian(30.0), n) and not ledger.allows(Gaussian(30.0), n + 1)
    assert ledger.left(Gaussian(0.5)) == 0
    assert ledger.delta_at(2.0).upper < 1e-6
    assert issubclass(BudgetExceeded, ValueError) and "503" in repr(ledger)
    assert any("not chosen by looking" in text for text in second.assumptions)


def test_a_ledger_on_disk(tmp_path):
    path = tmp_path / "ledger.json"
    one, two = Ledger(delta=1e-6, budget=1.0, path=path), Ledger(delta=1e-6, budget=1.0, path=path)
    one.spend(Gaussian(10.0), 2)
    two.spend(Gaussian(10.0), 1)
    again = load_ledger(path)
    assert len(again) == 3 and again.budget == 1.0 and again.epsilon().upper == pytest.approx(epsilon_bounds(Gaussian(10.0), 3, delta=1e-6).upper)
    with ThreadPoolExecutor(4) as pool:  # every release is counted, and none passes the budget
        done = list(pool.map(lambda _: _try(path), range(8)))
    assert len(load_ledger(path)) == 3 + sum(done) and load_ledger(path).epsilon().upper <= 1.0 and not all(done)
    assert verify(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "entries": content["entries"][1:]}))
    with pytest.raises(ValueError, match="not those that it certifies"):
        verify(path)
    for bad in ("", "{}", "[]", json.dumps({**content, "delta": 7}), json.dumps({**content, "entries": 3}), json.dumps({k: v for k, v in content.items() if k != "budget"})):
        path.write_text(bad)
        with pytest.raises(ValueError):
            load_ledger(path)
    with pytest.raises(FileNotFoundError):
        load_ledger(tmp_path / "none.json")


def _try(path):
    try:
        Ledger(delta=1e-6, budget=1.0, path=path).spend(Gaussian(10.0))
        return 1
    except BudgetExceeded:
        return 0


@pytest.mark.parametrize("epsilon, delta", [(0.5, 1e-6), (3.0, 1e-6), (10.0, 1e-10)])
def test_the_renyi_filter_keeps_its_promise(epsilon, delta):
    gate, passed = RenyiFilter(epsilon=epsilon, delta=delta), 0
    with pytest.raises(BudgetExceeded):
        while True:
            gate.spend(Gaussian(12.0))
            passed += 1
    assert passed > 0 and epsilon_bounds(Gaussian(12.0), passed, delta=delta).upper <= epsilon
    for order in (2, 5, 40):
        assert renyi_budget(epsilon, delta, best_order(epsilon, delta)) / best_order(epsilon, delta) >= renyi_budget(epsilon, delta, order) / order


@pytest.mark.parametrize("order", [2, 3, 16])
def test_renyi_divergences_against_sums(order):
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.3, 0.5])
    truth = max(math.log((a**order * b ** (1 - order)).sum()) / (order - 1) for a, b in ((p, q), (q, p)))
    assert truth <= renyi_divergence(DiscretePair(p, q), order) <= truth * (1 + 1e-4)
    assert renyi_divergence(Gaussian(2.0), order) == order / 8
    x = np.linspace(-30, 31, 400_001)
    base = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    ratio = 1 - 0.2 + 0.2 * np.exp(x - 0.5)
    integral = math.log((base * ratio**order).sum() * (x[1] - x[0])) / (order - 1)
    assert renyi_divergence(PoissonSubsampled(Gaussian(1.0), 0.2), order) == pytest.approx(integral, rel=1e-6)
    assert renyi_divergence(ZeroConcentratedDP(0.1), order) == pytest.approx(0.1 * order)


def test_personal_accounts():
    norms = np.array([0.0, 0.5, 1.0, 1.0])
    book = PersonalLedger(4, epsilon=2.0, delta=1e-6)
    parts = np.zeros(4, int)
    for _ in range(400):
        parts += book.admit(norms, noise=10.0)
    assert parts[0] == 400 and parts[2] == parts[3] < parts[1] <= 400 and parts[1] == pytest.approx(4 * parts[2], abs=4)
    for person in (1, 2):
        assert epsilon_bounds(Gaussian(10.0 / norms[person]), int(parts[person]), delta=1e-6).upper <= 2.0
        assert 0.9 < book.own_share(person) <= 1.0 or parts[person] == 400
    sampled = PersonalLedger(2, epsilon=1.0, delta=1e-6)
    assert sampled.admit([1.0, 0.5], noise=4.0, sampling_probability=0.01).all() and sampled.own_share(0) > sampled.own_share(1) > 0


def test_personal_accounts_have_no_way_out(tmp_path):
    book = PersonalLedger(3, epsilon=2.0, delta=1e-6)
    book.admit([0.123456, 0.7654321, 1.0], noise=5.0)
    for way in (lambda: book.save(tmp_path / "x"), book.to_json, book.to_dict, book.certificate, lambda: pickle.dumps(book), lambda: copy.copy(book), lambda: copy.deepcopy(book)):
        with pytest.raises(PrivateContents, match="never written down"):
            way()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError):
        json.dumps(book)
    published = json.dumps(core.plain({"book": book, "public": book.public()})) + repr(book) + str(book)
    assert not any(f"{spent:.6g}" in published for spent in book._spent)
    assert book.public()["releases"] == 1 and book.public()["epsilon"] == 2.0
    with pytest.raises(ValueError, match="mechanism"):
        Ledger(delta=1e-6).spend(book)


@pytest.mark.parametrize("bad", (None, "1", True, math.nan, -1, [], 1j))
def test_bad_input_is_named(bad):
    cases = [("delta", lambda: Ledger(delta=bad)), ("budget", lambda: Ledger(delta=1e-6, budget=bad)), ("tolerance", lambda: Ledger(delta=1e-6, tolerance=bad)),
             ("mechanism", lambda: Ledger(delta=1e-6).spend(bad)), ("steps", lambda: Ledger(delta=1e-6).spend(Gaussian(1.0), bad)), ("most", lambda: Ledger(delta=1e-6).left(Gaussian(1.0), bad)),
             ("epsilon", lambda: RenyiFilter(epsilon=bad, delta=1e-6)), ("delta", lambda: RenyiFilter(epsilon=1.0, delta=bad)),
             ("mechanism", lambda: RenyiFilter(epsilon=1.0, delta=1e-6).spend(bad)), ("steps", lambda: RenyiFilter(epsilon=1.0, delta=1e-6).spend(Gaussian(9.0), bad)),
             ("order", lambda: renyi_divergence(Gaussian(1.0), bad)), ("people", lambda: PersonalLedger(bad, epsilon=1.0, delta=1e-6)),
             ("norms", lambda: PersonalLedger(2, epsilon=1.0, delta=1e-6).admit([bad, 1.0], noise=1.0)), ("noise", lambda: PersonalLedger(1, epsilon=1.0, delta=1e-6).admit([1.0], noise=bad)),
             ("sampling_probability", lambda: PersonalLedger(1, epsilon=1.0, delta=1e-6).admit([1.0], noise=9.0, sampling_probability=bad)),
             ("person", lambda: PersonalLedger(1, epsilon=1.0, delta=1e-6).own_share(bad)), ("delta", lambda: certify(Gaussian(1.0), delta=bad)),
             ("mechanism", lambda: certify(bad, delta=1e-6)), ("steps", lambda: certify(Gaussian(1.0), bad, delta=1e-6))]
    if bad is not None:
        cases += [("order", lambda: RenyiFilter(epsilon=1.0, delta=1e-6, order=bad)), ("noise_multiplier", lambda: mechanism_of({"noise_multiplier": bad}))]
    for name, call in cases:
        if name == "norms" and bad is True:
            continue  # a one, to numpy
        with pytest.raises(ValueError, match=name):
            call()
