"Behind the interfaces of dp-accounting, Opacus and tensorflow-privacy: the same calls, certified answers, what is unsupported named."

import math
import warnings

import pytest

from databloom.connect_the_dots import dp_sgd_epsilon, epsilon_bounds
from databloom.mechanisms import Gaussian, Laplace, PoissonSubsampled
from databloom.statements import dp_sgd_statement, step_counts


# dp-accounting

@pytest.fixture(scope="module")
def dpa():
    return pytest.importorskip("dp_accounting", reason="dp-accounting is not installed (it comes with the dev extra)")


@pytest.fixture(scope="module")
def ours(dpa):
    from databloom.dp_accounting import PLDAccountant

    return PLDAccountant


@pytest.fixture(scope="module")
def theirs(dpa):
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant


def events(dpa):
    "Events that both accountants take, with the neighbours and an accuracy that the original's grid allows."
    e, add = dpa.dp_event, dpa.NeighboringRelation.ADD_OR_REMOVE_ONE
    sampled = lambda inner: e.PoissonSampledDpEvent(0.05, inner)
    return [(add, e.GaussianDpEvent(3.0), 1e-4), (add, e.LaplaceDpEvent(5.0), 1e-3), (add, sampled(e.GaussianDpEvent(1.0)), 5e-3), (add, sampled(e.LaplaceDpEvent(1.0)), 5e-3),
            (add, e.ComposedDpEvent([e.GaussianDpEvent(4.0), e.SelfComposedDpEvent(e.LaplaceDpEvent(20.0), 3), e.NoOpDpEvent()]), 1e-3)]


@pytest.mark.parametrize("case", range(5))
def test_the_same_trees_give_the_same_answers(dpa, ours, theirs, case):
    relation, event, accuracy = events(dpa)[case]
    new, old = ours(relation), theirs(relation)
    assert new.supports(event) and new.compose(event, 7) is new
    old.compose(event, 7)
    bounds = new.epsilon_bounds(1e-5)
    assert bounds.lower <= old.get_epsilon(1e-5) * (1 + 1e-9) and old.get_epsilon(1e-5) <= bounds.upper * (1 + accuracy)
    assert new.get_epsilon(1e-5) == bounds.upper and new.ledger == old.ledger
    assert new.get_delta(0.8 * bounds.upper) == pytest.approx(old.get_delta(0.8 * bounds.upper), rel=2e-2)


def test_what_0_6_0_also_knows(dpa, ours):
    "Events of newer versions, by name, so that 0.4.3 tests them too."
    special, add, one = dpa.NeighboringRelation.REPLACE_SPECIAL, dpa.NeighboringRelation.ADD_OR_REMOVE_ONE, dpa.NeighboringRelation.REPLACE_ONE
    from databloom.dp_accounting import pair_of_event

    def event(name, **fields):
        return type(name, (), fields)()

    response = pair_of_event(event("RandomizedResponseDpEvent", noise_parameter=0.5, num_buckets=2), "replace_one")
    assert epsilon_bounds(response, 10, delta=1e-6).upper == pytest.approx(10.986105, rel=1e-4)  # PLDAccountant of 0.6.0 answers 1.0987
    assert epsilon_bounds(pair_of_event(event("RandomizedResponseDpEvent", noise_parameter=0.5, num_buckets=4), "zero_out"), 5, delta=1e-5).upper == pytest.approx(4.5813485, rel=1e-4)
    assert epsilon_bounds(pair_of_event(event("DiscreteLaplaceDpEvent", noise_parameter=0.5, sensitivity=2)), 5, delta=1e-5).upper == pytest.approx(4.999893, rel=1e-4)
    mixture = pair_of_event(event("MixtureOfGaussiansDpEvent", standard_deviation=1.0, sensitivities=[0, 1, 2], sampling_probs=[0.8, 0.1, 0.1]))
    assert epsilon_bounds(mixture, 5, delta=1e-5).upper == pytest.approx(10.4367, rel=1e-3)
    capped = pair_of_event(event("TruncatedSubsampledGaussianDpEvent", dataset_size=1000, sampling_probability=0.1, truncated_batch_size=110, noise_multiplier=2.0))
    assert epsilon_bounds(capped, 5, delta=1e-5).upper <= 1.7933
    assert repr(pair_of_event(event("ZCDpEvent", rho=0.1, xi=0.0))) == "ZeroConcentratedDP(0.1)"
    for name, fields, adjacency in (("RandomizedResponseDpEvent", dict(noise_parameter=0.5, num_buckets=2), "add_remove"), ("ZCDpEvent", dict(rho=0.1, xi=0.2), "add_remove"),
                                    ("MixtureOfGaussiansDpEvent", dict(standard_deviation=1.0, sensitivities=[1], sampling_probs=[1.0]), "replace_one")):
        with pytest.raises(Exception, match="privacy|neighbours|xi|mixture"):
            pair_of_event(event(name, **fields), adjacency)
    assert ours(special)._neighboring_relation is special and ours(add).get_epsilon(1e-5) == 0 and ours(one).get_delta(1.0) == 0


def test_neighbours(dpa, ours):
    relation = dpa.NeighboringRelation
    for which, truth in ((relation.ADD_OR_REMOVE_ONE, Gaussian(2.0)), (relation.REPLACE_ONE, Gaussian(1.0)), (relation.REPLACE_SPECIAL, Gaussian(2.0))):
        accountant = ours(which).compose(dpa.GaussianDpEvent(2.0), 3)
        assert accountant.get_epsilon(1e-6) == pytest.approx(epsilon_bounds(truth, 3, delta=1e-6).upper)
    fixed = dpa.dp_event.SampledWithoutReplacementDpEvent(1000, 10, dpa.GaussianDpEvent(1.0))
    assert 0 < ours(relation.REPLACE_ONE).compose(fixed, 20).get_epsilon(1e-5) < math.inf
    assert ours(relation.REPLACE_ONE).compose(dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(1.0))).get_epsilon(1e-5) > 0


def test_no_privacy_and_no_support(dpa, ours):
    e = dpa.dp_event
    for lost in (e.NonPrivateDpEvent(), e.GaussianDpEvent(0.0), e.PoissonSampledDpEvent(0.1, e.GaussianDpEvent(0.0))):
        assert ours().compose(lost).get_epsilon(1e-5) == math.inf and ours().compose(lost).get_delta(1.0) == 1
    assert ours().compose(e.PoissonSampledDpEvent(0.0, e.GaussianDpEvent(1.0))).get_epsilon(1e-5) == 0
    inside = e.ComposedDpEvent([e.GaussianDpEvent(1.0)])
    for event, name in ((e.SampledWithReplacementDpEvent(100, 10, e.GaussianDpEvent(1.0)), "SampledWithReplacementDpEvent"), (e.UnsupportedDpEvent(), "UnsupportedDpEvent"),
                        (e.RepeatAndSelectDpEvent(e.GaussianDpEvent(1.0), 1.0, 1.0), "RepeatAndSelectDpEvent"), (e.PoissonSampledDpEvent(0.1, inside), "ComposedDpEvent"),
                        (e.SingleEpochTreeAggregationDpEvent(1.0, 4), "SingleEpochTreeAggregationDpEvent"), (e.GaussianDpEvent(-1.0), "noise_multiplier")):
        accountant = ours()
        assert not accountant.supports(event)
        with pytest.raises(dpa.UnsupportedEventError, match=name):
            accountant.compose(e.ComposedDpEvent([e.GaussianDpEvent(1.0), event]))
        assert accountant.get_epsilon(1e-5) == 0  # nothing of a refused tree was counted


@pytest.mark.parametrize("bad", (None, "1", True, math.nan, -1, 1j))
def test_bad_questions_are_named(dpa, ours, bad):
    accountant = ours().compose(dpa.GaussianDpEvent(1.0))
    for name, call in (("target_delta", lambda: accountant.get_epsilon(bad)), ("target_epsilon", lambda: accountant.get_delta(bad)), ("neighboring_relation", lambda: ours(bad)), ("tolerance", lambda: ours(tolerance=bad))):
        with pytest.raises(ValueError, match=name):
            call()


# Opacus

@pytest.fixture(scope="module")
def opacus():
    pytest.importorskip("opacus", reason="Opacus is not installed (it comes with the dev extra)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import opacus

        import databloom.opacus  # registers itself
    return opacus


@pytest.mark.filterwarnings("ignore")
def test_an_opacus_training_loop(opacus):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(1)
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
    model = torch.nn.Linear(3, 1)
    engine = opacus.PrivacyEngine(accountant="databloom")
    model, optimizer, loader = engine.make_private(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, batch_size=10), noise_multiplier=1.1, max_grad_norm=1.0)
    before = engine.get_epsilon(1e-5)
    for x, y in loader:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    expected = dp_sgd_epsilon(noise_multiplier=1.1, sampling_probability=0.25, steps=4, delta=1e-5, tolerance=1e-4)
    assert before == 0 and len(engine.accountant) == 4 and engine.get_epsilon(1e-5) == expected.upper
    assert engine.accountant.bounds(1e-5).lower == expected.lower
    other = opacus.accountants.create_accountant("databloom")
    other.load_state_dict(engine.accountant.state_dict())
    assert other.get_epsilon(1e-5) == expected.upper
    with pytest.raises(ValueError, match="alphas"):
        other.get_epsilon(1e-5, alphas=[2.0])
    rdp = opacus.accountants.create_accountant("rdp")
    rdp.history = list(other.history)
    assert other.get_epsilon(1e-5) < rdp.get_epsilon(1e-5)


@pytest.mark.filterwarnings("ignore")
def test_opacus_steps_of_several_kinds(opacus):
    accountant = opacus.accountants.create_accountant("databloom")
    for noise, rate, count in ((1.0, 0.1, 3), (2.0, 0.1, 2), (1.0, 1.2, 1)):
        for _ in range(count):
            accountant.step(noise_multiplier=noise, sample_rate=rate)
    assert accountant.history == [(1.0, 0.1, 3), (2.0, 0.1, 2), (1.0, 1.0, 1)]
    parts = [(PoissonSubsampled(Gaussian(1.0), 0.1), 3), (PoissonSubsampled(Gaussian(2.0), 0.1), 2), (Gaussian(1.0), 1)]
    assert accountant.get_epsilon(1e-5) == pytest.approx(epsilon_bounds(parts, delta=1e-5).upper, rel=1e-3)
    for bad in (None, "1", math.nan, -1.0, 1j):
        for name, call in (("noise_multiplier", lambda: accountant.step(noise_multiplier=bad, sample_rate=0.1)), ("sample_rate", lambda: accountant.step(noise_multiplier=1.0, sample_rate=bad)), ("delta", lambda: accountant.get_epsilon(bad))):
            with pytest.raises(ValueError, match=name):
                call()
    accountant.step(noise_multiplier=0.0, sample_rate=0.1)
    assert accountant.get_epsilon(1e-5) == math.inf and accountant.bounds(1e-5) is None


# tensorflow-privacy

def test_the_statement():
    assert list(step_counts(60_000, 256, 60).values()) == [14063, 14100]  # tensorflow/privacy issue 103
    statement = dp_sgd_statement(60_000, 256, 60, 1.0, 1e-6)
    larger = dp_sgd_epsilon(noise_multiplier=1.0, sampling_probability=256 / 60_000, steps=14100, delta=1e-6)
    assert statement.bounds.upper == larger.upper and statement.other.steps == 14063
    assert "14,063" in statement.text and "14,100" in statement.text and "ambiguous" in statement.text and "Poisson" in statement.text and "shuffled" in statement.text
    assert statement.no_amplification.upper == pytest.approx(epsilon_bounds(Gaussian(1.0), 60, delta=1e-6).upper)
    known = dp_sgd_statement(60_000, 256, 60, 1.0, 1e-6, steps=100)
    assert known.other is None and "ambiguous" not in known.text and known.bounds.steps == 100
    even = dp_sgd_statement(10_000, 100, 3, 1.0)
    assert even.other is None and even.bounds.delta == pytest.approx(1e-5) and "chosen here" in even.text
    assert dp_sgd_statement(60_000, 256, 60, 2.0, 1e-6, used_microbatching=True).bounds.upper == statement.bounds.upper
    users = dp_sgd_statement(60_000, 256, 60, 1.0, 1e-6, steps=100, max_examples_per_user=2)
    assert users.bounds.lower > known.bounds.upper and "user" in users.text
    assert statement.to_dict()["other"]["steps"] == 14063 and str(statement) == statement.text


def test_fractions_of_epochs_add_no_step():
    assert list(step_counts(1000, 100, 0.1).values()) == [1, 1] and list(step_counts(1000, 100, 0.3).values()) == [3, 3]
    assert list(step_counts(10**6, 10**3, 2.3).values()) == [2300, 2300]


@pytest.mark.parametrize("bad", (None, "1", True, math.nan, math.inf, -1, 0, 1j, []))
def test_bad_inputs_of_the_statement_are_named(bad):
    run = dict(number_of_examples=1000, batch_size=10, number_of_epochs=1, noise_multiplier=1.0, delta=1e-6)
    for name in [*run, "steps", "tolerance", "max_examples_per_user", "used_microbatching"]:
        if (bad is None and name in ("delta", "steps", "max_examples_per_user")) or (bad is True and name == "used_microbatching"):
            continue
        with pytest.raises(ValueError, match=name):
            dp_sgd_statement(**{**run, name: bad})
