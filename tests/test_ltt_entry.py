"""The entry of chapter 03 for users, and its command line."""

import json
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from databloom import ltt_calibration as ltt
from databloom.ltt_calibration import LearnThenTest, learn_then_test


def example(n=600, k=12, seed=0, top=0.2):
    "Graded losses whose true risk grows from setting to setting."
    rng = np.random.default_rng(seed)
    return (rng.random((n, k)) < np.linspace(0.01, top, k) * 2) * rng.beta(5, 5, (n, k))


SETTINGS = [round(0.95 - 0.05 * j, 2) for j in range(12)]


@pytest.mark.parametrize("method", [m for m in ltt.p_value_methods if m not in ("binomial", "clt")])
@pytest.mark.parametrize("test", ltt.test_procedures)
def test_table_and_function_give_the_same(method, test):
    table, asked = example(), []

    def losses_at(setting):
        asked.append(setting)
        return table[:, SETTINGS.index(setting)]

    from_table = learn_then_test(table, 0.1, 0.05, settings=SETTINGS, method=method, test=test)
    from_function = learn_then_test(losses_at, 0.1, 0.05, settings=SETTINGS, method=method, test=test)
    assert from_table.valid == from_function.valid and from_table.chosen == from_function.chosen
    known = ~np.isnan(from_function.p_values)
    np.testing.assert_allclose(from_function.p_values[known], from_table.p_values[known], rtol=1e-12)
    assert len(asked) == len(set(asked))
    if test == "fixed_sequence":
        assert len(asked) == len(from_table.valid) + 1
    inside = np.isin(SETTINGS, from_table.valid)
    tested = known & (from_function.levels > 0)
    assert ((from_function.bounds <= 0.1) == inside)[tested].all()  # the bound at the setting's level says the same


def test_the_valid_set_is_that_of_the_p_values():
    table = example()
    result = learn_then_test(table, 0.1, method="hoeffding_bentkus", settings=SETTINGS)
    p = ltt.hoeffding_bentkus_p_value(table, 0.1)
    np.testing.assert_allclose(result.p_values, p)
    assert result.valid == tuple(np.array(SETTINGS)[ltt.fixed_sequence(p, 0.05)])
    assert result.chosen == result.valid[-1]
    np.testing.assert_allclose(result.risks, table.mean(axis=0))


def test_stops_at_first_failure_and_never_pays_for_the_rest():
    def losses_at(setting):
        if setting < 3:
            return np.zeros(100)
        if setting == 3:
            return np.ones(100)
        raise AssertionError("a setting beyond the failure was asked for")

    result = learn_then_test(losses_at, 0.1, settings=[0, 1, 2, 3, 4, 5])
    assert result.valid == (0, 1, 2) and result.chosen == 2 and "stopped at setting 3" in result.stopped
    assert np.isnan(result.p_values[4:]).all() and json.loads(result.to_json())["p_values"][4] is None


def test_none_is_explicit():
    result = learn_then_test(np.ones((100, 3)), 0.1, settings=[0.9, 0.8, 0.7])
    assert result.chosen is None and result.valid == () and result.answer == "none: use the reference system"
    data = json.loads(result.to_json())
    assert data["chosen"] is None and data["valid"] == [] and data["answer"].startswith("none")
    assert str(result).startswith("none: use the reference system")
    result.plot()


def test_too_few_examples_warn_with_the_number():
    for method in ("hoeffding", "hoeffding_bentkus", "wsr", "empirical_bernstein", "binomial"):
        needed = ltt.examples_needed(0.1, 0.05, method)
        with pytest.warns(UserWarning, match=str(needed)):
            assert learn_then_test(np.zeros((needed - 1, 2)), 0.1, method=method).chosen is None
        assert learn_then_test(np.zeros((needed, 2)), 0.1, method=method).chosen == 1
        spread = ltt.examples_needed(0.1, 0.05, method, tests=2)
        assert spread > needed and learn_then_test(np.zeros((spread, 2)), 0.1, method=method, test="holm").chosen == 1
        with pytest.warns(UserWarning, match=str(spread)):
            learn_then_test(np.zeros((spread - 1, 2)), 0.1, method=method, test="bonferroni")


@pytest.mark.parametrize("method", ["hoeffding_bentkus", "wsr", "empirical_bernstein"])
def test_a_stated_range_is_a_rescaling(method):
    table = example()
    plain = learn_then_test(table, 0.1, method=method)
    wide = learn_then_test(20 * table - 10, -8.0, method=method, loss_range=(-10, 10))
    assert plain.valid == wide.valid
    np.testing.assert_allclose(wide.p_values, plain.p_values, rtol=1e-6, atol=1e-15)
    np.testing.assert_allclose(wide.risks, 20 * plain.risks - 10)
    np.testing.assert_allclose(wide.bounds, 20 * plain.bounds - 10, atol=1e-6)
    column = 20 * table[:, 3] - 10
    assert ltt.p_value(column, -8.0, method, loss_range=(-10, 10)) == pytest.approx(ltt.p_value(table[:, 3], 0.1, method), rel=1e-6)
    assert ltt.upper_bound(column, 0.05, method, loss_range=(-10, 10)) == pytest.approx(20 * ltt.upper_bound(table[:, 3], 0.05, method) - 10)
    for bad in (10, -10, 11):
        with pytest.raises(ValueError, match="alpha"):
            learn_then_test(20 * table - 10, bad, loss_range=(-10, 10))


def test_several_risks_each_with_its_level():
    one, two = example(seed=1), example(seed=2, top=0.4)[:, ::-1]
    both = learn_then_test({"a": one, "b": two}, {"a": 0.1, "b": 0.3}, test="holm", method="hb")
    listed = learn_then_test([one, two], [0.1, 0.3], test="holm", method="hb")
    assert both.valid == listed.valid and both.risks.shape == (12, 2)
    expected = np.maximum(ltt.hoeffding_bentkus_p_value(one, 0.1), ltt.hoeffding_bentkus_p_value(two, 0.3))
    np.testing.assert_allclose(both.p_values, expected)
    assert {"risk a", "bound b", "p_value", "valid"} <= set(both.to_frame().columns)
    from_function = learn_then_test(
        lambda j: {"a": one[:, j], "b": two[:, j]}, {"a": 0.1, "b": 0.3}, settings=range(12), test="holm", method="hb"
    )
    assert from_function.valid == both.valid
    both.plot()
    for losses in ({"a": one}, one, [one, two, two], {"a": one, "c": two}):
        with pytest.raises(ValueError, match="losses"):
            learn_then_test(losses, {"a": 0.1, "b": 0.3})
    with pytest.raises(ValueError, match="same settings"):
        learn_then_test({"a": one, "b": two[:, :3]}, {"a": 0.1, "b": 0.3})


def test_groups_are_the_examples():
    table = example(n=60)
    rows = np.repeat(np.arange(60), 10)
    rng = np.random.default_rng(0)
    shuffle = rng.permutation(600)
    grouped = learn_then_test(table[rows][shuffle], 0.3, groups=rows[shuffle].astype(str), random_state=None)
    assert grouped.n == 60
    order = rows[shuffle][np.sort(np.unique(rows[shuffle], return_index=True)[1])]
    direct = learn_then_test(table[order], 0.3, random_state=None)
    np.testing.assert_allclose(grouped.p_values, direct.p_values)
    for groups in ([1, 2], [None] * 600, [float("nan")] * 600):
        with pytest.raises(ValueError, match="groups"):
            learn_then_test(table[rows], 0.3, groups=groups)


def test_group_means():
    means, labels = ltt.group_losses([[0.0, 1.0], [1.0, 1.0], [0.5, 0.0]], ["x", "y", "x"])
    assert labels == ["x", "y"]
    np.testing.assert_allclose(means, [[0.25, 0.5], [1.0, 1.0]])


def test_the_shuffle_protects_a_sorted_table():
    "Rows sorted by loss would let betting win before the losses come."
    rng = np.random.default_rng(0)
    wrong = {0: 0, None: 0}
    for _ in range(200):
        table = np.sort((rng.random((300, 1)) < 0.2).astype(float), axis=0)
        for seed in wrong:
            wrong[seed] += bool(learn_then_test(table, 0.2, random_state=seed).valid)
    assert wrong[None] == 200 and wrong[0] < 25


def test_preferences_and_costs():
    table, costs = np.zeros((200, 4)), [4.0, 1.0, 3.0, 2.0]
    assert learn_then_test(table, 0.1).chosen == 3
    assert learn_then_test(table, 0.1, prefer="first").chosen == 0
    assert learn_then_test(table, 0.1, costs=costs).chosen == 1
    assert learn_then_test(table, 0.1, costs=np.tile(costs, (200, 1))).prefer == "cost"
    table[:5] = [0.5, 0.2, 0.0, 0.4]
    assert learn_then_test(table, 0.1, prefer="risk").chosen == 2
    with pytest.raises(ValueError, match="costs"):
        learn_then_test(table, 0.1, prefer="cost")
    with pytest.raises(ValueError, match="costs"):
        learn_then_test(table, 0.1, costs=[1.0])


def test_split_uses_disjoint_examples():
    table, asked = example(800), []
    result = learn_then_test(lambda j: asked.append(j) or table[:, j], 0.1, settings=range(12), test="split_fixed_sequence")
    assert result.n == 400 and sorted(asked) == list(range(12))
    pareto = learn_then_test(table, 0.1, test="split_fixed_sequence", costs=np.linspace(1, 0, 12))
    assert pareto.chosen == min(pareto.valid, key=lambda j: 1 - j / 11) and len(pareto.order) <= 12
    worse = np.column_stack([table, table[:, 5:6], table[:, 5:6]])  # two more of the same risk, one of them worse in the other risk
    other = np.column_stack([table[:, ::-1], 0.5 * table[:, 6], 1 - table[:, 6]])
    both = learn_then_test([worse, other], [0.3, 0.3], test="split_fixed_sequence")
    assert 12 in both.order and 13 not in both.order and both.valid
    with pytest.raises(ValueError, match="learn_fraction"):
        learn_then_test(np.zeros((1, 2)), 0.1, test="split_fixed_sequence")


def test_explicit_order_and_labels():
    table = example()[:, [3, 0, 11]]
    names = ["middle", "safe", "wild"]
    result = learn_then_test(table, 0.1, settings=names, order=["safe", "middle", "wild"])
    assert result.valid == ("middle", "safe") and result.chosen == "middle" and result.order == ("safe", "middle", "wild")
    assert learn_then_test(table, 0.1, settings=names, order=["safe"]).valid == ("safe",)
    grid = learn_then_test(np.zeros((100, 4)), 0.1, settings=[(0, 0), (0, 1), (1, 0), (1, 1)], test="graphical", graph=ltt.grid_graph(2, 2))
    assert len(grid.valid) == 4 and json.loads(grid.to_json())["chosen"] == [1, 1]
    for order in (["safe", "safe"], ["unknown"], []):
        with pytest.raises(ValueError, match="order"):
            learn_then_test(table, 0.1, settings=names, order=order)


def test_bad_input_is_refused_by_name():
    good = np.zeros((50, 3))
    cases = {
        "losses": [dict(losses=np.empty((0, 3))), dict(losses=good + np.nan), dict(losses=good - 0.1), dict(losses=good + 1.1),
                   dict(losses=np.zeros((2, 2, 2))), dict(losses=[["a"]]), dict(losses=np.empty((5, 0)))],
        "alpha": [dict(alpha=a) for a in (0, 1, -0.1, 2, np.nan, None, "x")],
        "delta": [dict(delta=d) for d in (0, 1, -1, np.inf, None, "x")],
        "settings": [dict(settings=s) for s in ([0.3, 0.1, 0.2], [0.1, 0.1, 0.2], [1, 2], ["a", "a", "b"], [0.1, np.nan, 0.3], [])],
        "method": [dict(method="magic"), dict(method=None)],
        "test": [dict(test="magic"), dict(test=None)],
        "starts": [dict(starts=4), dict(starts=0), dict(starts=[0, 0])],
        "loss_range": [dict(loss_range=(1, 0)), dict(loss_range=3), dict(loss_range=(0, np.inf))],
        "prefer": [dict(prefer="magic")],
        "random_state": [dict(random_state=-1)],
        "weights": [dict(test="graphical", graph=([1, 1, 1], np.zeros((3, 3))))],
    }
    for word, options in cases.items():
        for option in options:
            with pytest.raises(ValueError, match=word):
                learn_then_test(**{**dict(losses=good, alpha=0.1), **option})
    for test in ("holm", "bonferroni"):  # order does not matter here
        assert len(learn_then_test(np.zeros((100, 3)), 0.1, settings=[0.3, 0.1, 0.2], test=test).valid) == 3
    with pytest.raises(ValueError, match="settings"):
        learn_then_test(lambda s: np.zeros(50), 0.1)
    with pytest.raises(ValueError, match="losses"):
        learn_then_test(lambda s: np.zeros(50 + s), 0.1, settings=[1, 2, 3])
    with pytest.raises(ValueError, match="binomial"):
        learn_then_test(good + 0.3, 0.5, method="binomial")


def test_estimator_manners():
    from sklearn.base import clone

    estimator = LearnThenTest(alpha=0.1, method="hb", starts=2)
    copy = clone(estimator)
    assert copy.get_params() == estimator.get_params() and copy is not estimator
    assert copy.set_params(starts=1).fit(example(), SETTINGS) is copy
    assert copy.valid_ == learn_then_test(example(), 0.1, settings=SETTINGS, method="hb").valid
    with pytest.raises(ValueError, match="parameter"):
        copy.set_params(magic=1)


def test_result_as_data(tmp_path):
    result = learn_then_test(example(), 0.1, settings=np.array(SETTINGS))
    data = json.loads(result.to_json(tmp_path / "result.json"))
    assert data == json.loads((tmp_path / "result.json").read_text())
    assert data["valid"] == list(result.valid) and data["settings"] == SETTINGS and len(data["p_values"]) == 12
    frame = result.to_frame()
    assert frame["valid"].sum() == len(result.valid) and frame["setting"].tolist() == SETTINGS
    with pytest.raises(AttributeError):
        result.chosen = 3


def test_differences_and_distances():
    reference = np.array([0.2, 0.5, 0.0])
    table = np.array([[0.3, 0.1], [0.4, 0.9], [0.0, 0.0]])
    np.testing.assert_allclose(ltt.difference_losses(table, reference), [[0.1, 0], [0, 0.4], [0, 0]])
    np.testing.assert_allclose(ltt.difference_losses(table, reference, clip=False), table - reference[:, None])
    with pytest.raises(ValueError, match="reference"):
        ltt.difference_losses(table, reference[:2])
    assert ltt.distance_losses("abc", "abd", lambda a, b: float(a != b)).tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="distance"):
        ltt.distance_losses("abc", "abd", lambda a, b: 2.0)


def test_planner():
    assert [ltt.examples_needed(a, 0.05, "hoeffding") for a in (0.02, 0.05, 0.1, 0.25)] == [3745, 600, 150, 24]
    assert [ltt.examples_needed(a, 0.05, "hb") for a in (0.02, 0.05, 0.1, 0.25)] == [149, 59, 29, 11]
    for method in ("wsr", "empirical_bernstein", "bentkus"):
        for alpha in (0.02, 0.3):
            n = ltt.examples_needed(alpha, 0.05, method)
            p = ltt.p_value_methods[method].p
            assert p(np.zeros(n), alpha, 0.05) <= 0.05 < p(np.zeros(n - 1), alpha, 0.05)
    plan = ltt.plan(0.1, risk=0.03, method="binomial")
    again = ltt.power(plan.examples, 0.1, method="binomial", risk=0.03, draws=4000, random_state=9)
    assert plan.minimum == 29 and abs(again - 0.8) < 0.15 and "29" in str(plan)
    assert json.loads(plan.to_json())["examples"] == plan.examples
    assert ltt.plan(0.1, pilot=np.full(10, 0.099), most=200).examples is None
    for bad in (dict(risk=0.2), dict(risk=None), dict(risk=0.05, sd=0.9), dict(risk=-1)):
        with pytest.raises(ValueError):
            ltt.plan(0.1, **bad)


def test_violation_rates_of_a_stored_table():
    world = example(3000, 12, seed=3)
    rates = ltt.violation_rates(world, 0.1, n=300, methods=("naive", "wsr", "hb"), draws=300)
    assert np.mean(rates["naive"] > 0.1) > 0.1
    for name in ("wsr", "hb"):
        assert (rates[name] > 0.1).sum() <= 24  # 99 % limit of a binomial of 300 at .05


def test_large_table_in_little_time_and_memory():
    "Half a gigabyte and a second and a half of one core: see benchmarks/ltt.py for the clock on the wall."
    losses = np.random.default_rng(0).beta(0.5, 4.5, (20_000, 100)) * np.linspace(0.2, 1, 100)
    tracemalloc.start()
    start = time.process_time()
    learn_then_test(losses, 0.1)
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 1.5 and peak < 500e6, (seconds, peak)


def command(*args):
    return subprocess.run([sys.executable, "-c", "from databloom.cli import main; main()", "calibrate", *map(str, args)],
                          capture_output=True, text=True, timeout=120)


@pytest.fixture
def losses_csv(tmp_path):
    path = tmp_path / "losses.csv"
    np.savetxt(path, example(), delimiter=",", header=",".join(map(str, SETTINGS)), comments="", fmt="%.6f")
    return path


def test_command_line(losses_csv, tmp_path):
    done = command(losses_csv, "--alpha", 0.1, "--delta", 0.05, "--method", "wsr", "--test", "fixed-sequence", "--json", "--plot", tmp_path / "p.png")
    data = json.loads(done.stdout)
    expected = learn_then_test(np.round(example(), 6), 0.1, settings=SETTINGS)
    assert done.returncode == 0 and done.stderr == ""
    assert data["valid"] == [str(s) for s in expected.valid] and data["chosen"] == str(expected.chosen)
    np.testing.assert_allclose(data["p_values"], expected.p_values)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    quiet = command(losses_csv, "--alpha", 0.1, "--quiet")
    assert quiet.stdout.startswith(f"use setting {expected.chosen}") and quiet.stdout.count("\n") == 1
    nothing = command(losses_csv, "--alpha", 0.001)
    assert nothing.returncode == 0 and nothing.stdout.startswith("none: use the reference system")


def test_command_line_with_groups(tmp_path):
    table = example(n=60, k=3)
    lines = ["patient,a,b,c"] + [f"p{i}," + ",".join(f"{v:.4f}" for v in row) for i, row in enumerate(table) for _ in range(2)]
    (tmp_path / "visits.csv").write_text("\ufeff" + "\n".join(lines) + "\n\n", encoding="utf-8")
    data = json.loads(command(tmp_path / "visits.csv", "--alpha", 0.3, "--group", "patient", "--json").stdout)
    assert data["n"] == 60 and data["settings"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "text, options, message",
    [
        ("0.9,0.8\n0.1,0.2\n0.3,1.7\n", [], "row 3, column '0.8'"),
        ("0.9,0.8\n0.1,\n", [], "row 2, column '0.8'"),
        ("0.9,0.8\n0.1,nan\n", [], "row 2, column '0.8'"),
        ("0.9,0.8\n0.1\n", [], "row 2"),
        ("0.9,0.8\n", [], "no row"),
        ("", [], "empty"),
        (",0.9\n0,0.1\n", [], "column 1"),
        ("0.9,0.8,0.85\n0,0,0\n", [], "sorted"),
        ("0.9,0.9\n0,0\n", [], "different"),
        ("a,a\n0,0\n", [], "different"),
        ("a,b\n0,0\n", ["--group", "c"], "group"),
        ("a,b\n0,0\n", ["--method", "magic"], "method"),
        ("a,b\n0,0\n", ["--test", "magic"], "test"),
        ("a,b\n0,0\n", ["--delta", "1"], "delta"),
        ("a,b\n0,0\n", ["--plot", "x.txt"], "plot"),
        ("a,b\n0,0\n", ["--alpha", "nan"], "alpha"),
    ],
)
def test_command_line_refusals(text, options, message, tmp_path, capsys):
    from databloom.cli import main

    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", str(tmp_path / "t.csv"), *([] if "--alpha" in options else ["--alpha", "0.1"]), *options])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.count("\n") == 1 and message in err
