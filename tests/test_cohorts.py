"Cohorts: every odd input either works or is refused with table, column, row count and rule; rows never change owner."
import datetime
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from databloom.cohorts import (Cohort, CohortError, Column, Schema, describe_dtypes, from_events, from_long, from_wide, infer_kind,
                               infer_schema, pivot_events, restore_dtypes)


def schema(kind="numeric", static_kind="numeric"):
    return Schema("id", "time", (Column("s", static_kind),), (Column("x", kind),))


def make(x, kind="numeric", ids=(1, 1, 2, 3), time=(0, 1, 0, 0), s=(1.0, 2.0, 3.0), people=(1, 2, 3)):
    static = pd.DataFrame({"id": list(people), "s": list(s)})
    temporal = pd.DataFrame({"id": list(ids), "time": list(time), "x": x})
    return Cohort(schema(kind), static, temporal)


def problems(**kwargs):
    with pytest.raises(CohortError) as error:
        make(**kwargs)
    return error.value.problems


# ---------------------------------------------------------------- works

def test_all_missing_works():
    assert make([np.nan] * 4).numbers("x").tolist() != [0.0] * 4
    for kind in ("numeric", "integer", "binary", "categorical", "datetime"):
        cohort = make(pd.Series([None] * 4, dtype=object), kind)
        assert cohort.temporal.x.isna().all()
        assert cohort.describe().to_frame().set_index("column").missing["x"] == 1.0
    assert infer_kind(pd.Series([None, None], dtype=object)) == "numeric"


def test_constant_and_single_visit_work():
    cohort = make([5.0] * 4)
    assert cohort.numbers("x").tolist() == [5.0] * 4
    single = make([1.0, 2.0, 3.0], ids=(1, 2, 3), time=(0, 0, 0))
    assert single.lengths.tolist() == [1, 1, 1]
    long = from_long(pd.DataFrame({"id": [1, 2], "time": [0, 0], "x": [1.0, 2.0]}))
    assert long.schema.names("temporal") == ["x"]       # with one visit each, nothing is known to be static


def test_unsorted_works_and_is_sorted():
    cohort = make([1.0, 2.0, 3.0, 4.0], ids=(3, 1, 2, 1), time=(0, 5, 0, 2))
    assert cohort.temporal.id.tolist() == [1, 1, 2, 3]
    assert cohort.temporal.x.tolist() == [4.0, 2.0, 3.0, 1.0]
    odd_index = pd.DataFrame({"id": [1, 2, 3], "s": [1.0, 2, 3]}, index=[9, 9, 4])
    assert Cohort(Schema("id", None, (Column("s", "numeric"),)), odd_index).static.index.tolist() == [0, 1, 2]


def test_patient_without_rows_and_static_only():
    cohort = make([1.0, 2.0], ids=(1, 1), time=(0, 1))
    assert cohort.lengths.tolist() == [2, 0, 0]
    alone = Cohort(Schema("id", None, (Column("s", "numeric"),)), pd.DataFrame({"id": [1], "s": [1.0]}))
    assert len(alone) == 1 and len(alone.temporal) == 0 and alone.lengths.tolist() == [0]
    assert "Cohort of 1 patients" in repr(alone)


def test_a_table_may_be_left_out(tmp_path):
    made = Schema("id", "time", (), (Column("x", "numeric"), Column("when", "datetime")))
    rows = pd.DataFrame({"id": ["b", "a", "b"], "time": [0, 0, 1], "x": [1.0, 2.0, 3.0], "when": pd.to_datetime(["2020-01-01"] * 3)})
    cohort = Cohort(made, None, rows)
    assert cohort.ids.tolist() == ["a", "b"] and cohort.lengths.tolist() == [1, 2]
    empty = Cohort(made, pd.DataFrame({"id": [3, 1]}))
    assert empty.lengths.tolist() == [0, 0] and empty.temporal.id.dtype == "int64"
    for format in ("parquet", "csv"):
        for one in (cohort, empty, empty.select([1]), Cohort(Schema("id"), pd.DataFrame({"id": ["x"]}))):
            assert Cohort.load(one.save(tmp_path, format)).equals(one)
    (tmp_path / "temporal.csv").unlink()
    with pytest.raises(ValueError, match="a folder with temporal.csv"):
        Cohort.load(tmp_path)
    with pytest.raises(ValueError, match="static must be a pandas DataFrame"):
        Cohort(Schema("id"), None)


def test_times_of_every_dtype():
    for time in (pd.array([3, 1, 0, 0], dtype="Int64"), pd.array([3.5, 1, 0, 0], dtype="Float64"), pd.Series([3, 1, 0, 0], dtype=object),
                 pd.to_datetime(["2020-01-02", "2020-01-01"] * 2).tz_localize("UTC"), ["2020-01-02T10:00", "2020-01-01"] * 2):
        cohort = make([1.0, 2.0, 3.0, 4.0], time=time)
        assert cohort.temporal.x.tolist() == [2.0, 1.0, 3.0, 4.0]
        with pytest.raises(CohortError, match="one row per time"):
            make([1.0] * 4, ids=(1, 1, 1, 1), time=pd.Series(time).iloc[[0, 1, 0, 1]].tolist())


def test_huge_integers_stay_exact(tmp_path):
    big = [2**53 + 1, 2**62 + 1, None, -(2**53) - 1]
    for values in (pd.array(big, dtype="Int64"), pd.Series(big, dtype=object)):
        cohort = make(values, "integer", people=(2**60 + 1, 2**60 + 2, 2**60 + 3), ids=[2**60 + 1] * 2 + [2**60 + 2, 2**60 + 3])
        for format in ("parquet", "csv"):
            cohort.save(tmp_path, format)
            again = Cohort.load(tmp_path)
            assert [None if v is pd.NA else int(v) for v in again.temporal.x] == big
            assert again.ids.tolist() == [2**60 + 1, 2**60 + 2, 2**60 + 3]
            assert again.equals(cohort)


def test_huge_integers_that_are_lost_are_refused():
    [problem] = problems(x=[float(2**53), 1.0, np.nan, 2.0], kind="integer")
    assert (problem.table, problem.column, problem.rows) == ("temporal", "x", 1) and "int64" in problem.rule
    assert problems(x=pd.Series([10**30, 1, 2, 3], dtype=object), kind="integer")[0].rows == 1
    with pytest.raises(CohortError, match="an id fits in int64"):
        make([1.0] * 4, people=np.array([2**64 - 1, 2, 3], dtype="uint64"), ids=(2, 2, 3, 3), time=(0, 1, 0, 1))


def test_rare_category_works(tmp_path):
    values = pd.Categorical(["a"] * 3 + ["rare"], categories=["never", "a", "rare"], ordered=True)
    cohort = make(values, "categorical")
    for format in ("parquet", "csv"):
        cohort.save(tmp_path, format)
        again = Cohort.load(tmp_path)
        assert again.temporal.x.cat.categories.tolist() == ["never", "a", "rare"] and again.temporal.x.cat.ordered
        assert again.labels("x").tolist() == ["a", "a", "a", "rare"]
    assert "rare 25.0%" in str(cohort.describe())


# ---------------------------------------------------------------- is refused, and how

def test_duplicate_time_is_refused_or_merged():
    [problem] = problems(x=[1.0, 2.0, 3.0, 4.0], time=(0, 0, 0, 0))
    assert (problem.table, problem.column, problem.rows) == ("temporal", "time", 1) and "one row per time" in problem.rule
    frame = pd.DataFrame({"id": [1, 1, 1, 2], "time": [0, 0, 1, 0], "x": [1.0, np.nan, 3.0, 4.0], "c": ["a", "b", "c", "d"]})
    for how, x, c in (("first", 1.0, "a"), ("last", 1.0, "b"), ("mean", 1.0, "b")):
        merged = from_long(frame, static=[], duplicates=how).temporal
        assert (merged.x[0], merged.c[0]) == (x, c) and len(merged) == 3
    with pytest.raises(CohortError, match="temporal.time: 1 row breaks"):
        from_long(frame, static=[])
    label = from_long(frame.assign(y=[0, 1, 1, 0]), static=[], duplicates="mean")
    assert label.schema.kind_of("y") == "binary" and label.temporal.y.tolist() == [1, 1, 0]
    with pytest.raises(CohortError, match="long.z: 4 rows break"):
        from_long(frame.assign(z=[[1], [2], [3], [4]]))
    with pytest.raises(ValueError, match="duplicates must be one of"):
        from_long(frame, static=[], duplicates="sum")


@pytest.mark.parametrize("kind, values, rows", [
    ("numeric", pd.Series([1.0, "2", "x", None], dtype=object), 2),
    ("numeric", pd.Series([1.0, np.inf, -np.inf, 0.0]), 2),
    ("numeric", pd.Series([True, False, True, True]), 4),
    ("numeric", pd.Series(["1", "2", "3", None], dtype="str"), 3),
    ("numeric", pd.Series([1 + 2j] * 4), 4),
    ("integer", pd.Series([1.5, 2.0, np.nan, 3.0]), 1),
    ("integer", pd.Series(["1", 2, 3, 4], dtype=object), 1),
    ("binary", pd.Series([0, 1, 2, 1]), 1),
    ("binary", pd.Series(["yes", "no", "no", "no"], dtype="str"), 4),
    ("categorical", pd.Series(["a", "b", 3, None], dtype=object), 1),
    ("categorical", pd.Series([1.5, 1.0, 2.0, 3.0]), 1),
    ("categorical", pd.Categorical(["a", 1, "b", "b"]), 1),
    ("datetime", pd.Series(["2020-01-01", "01/02/2020", None, "2020-13-01"], dtype=object), 2),
    ("datetime", pd.Series([1, 2, 3, 4]), 4),
])
def test_mixed_types_are_refused_with_the_number_of_rows(kind, values, rows):
    [problem] = problems(x=values, kind=kind)
    assert (problem.table, problem.column, problem.rows) == ("temporal", "x", rows)
    assert problem.rule.startswith(kind) and "row " in problem.example


def test_inferring_a_mixed_column_is_refused():
    frame = pd.DataFrame({"id": [1, 2], "time": [0, 0], "x": pd.Series([1.0, "high"], dtype=object)})
    with pytest.raises(CohortError, match="temporal.x: 2 rows break the rule: values are of one type, not float and str"):
        infer_schema(None, frame)
    with pytest.raises(CohortError, match="hours"):
        infer_kind(pd.Series([pd.Timedelta("1h")]))


@pytest.mark.parametrize("people, ids, words", [
    ([1, 2, "3"], [1, 1, 2, 3], "static.id: 1 row breaks"),
    ([1, 2, 3], ["1", "1", "2", "3"], "temporal.id: 4 rows break the rule: ids have the same type"),
    ([1.0, 2.5, 3.0], [1, 1, 2, 3], "static.id: 1 row breaks"),
    ([1, None, 3], [1, 1, 1, 3], "static.id: 1 row breaks the rule: an id is never missing"),
    ([1, 2, 2], [1, 1, 2, 2], "static.id: 1 row breaks the rule: an id occurs once"),
    ([1, 2, 3], [1, 1, 2, 9], "temporal.id: 1 row breaks the rule: a temporal row's id is in the static table"),
    ([True, False, True], [1, 1, 1, 1], "static.id: 3 rows break"),
])
def test_mixed_ids_are_refused(people, ids, words):
    time = (0, 1, 2, 3)
    with pytest.raises(CohortError) as error:
        make([1.0] * 4, people=pd.Series(people, dtype=object if len({type(p) for p in people}) > 1 else None), ids=ids, time=time)
    assert words in str(error.value)


def test_ids_of_equal_meaning_work():
    for people, ids in (([1.0, 2.0, 3.0], [1, 1, 2, 3]), (pd.Series([1, 2, 3], dtype="Int64"), np.array([1, 1, 2, 3], dtype="int32")),
                        (["a", "b", "c"], pd.Categorical(["a", "a", "b", "c"])), (pd.Series(["007", "7", "8"], dtype=object), ["007", "007", "7", "8"])):
        assert make([1.0, 2.0, 3.0, 4.0], people=people, ids=ids).lengths.tolist() == [2, 1, 1]


@pytest.mark.parametrize("time, words", [
    ([0, 1, np.nan, 0], "a time is never missing"), ([0, 1, np.inf, 0], "finite numbers or all dates"),
    (["morning", "noon", "noon", "noon"], "finite numbers or all dates"),
])
def test_bad_times_are_refused(time, words):
    assert words in str(problems(x=[1.0] * 4, time=time)[0])


def test_times_may_be_dates(tmp_path):
    cohort = make([1.0] * 4, time=pd.to_datetime(["2020-01-02", "2020-01-01", "2020-01-01", "2020-01-01"]))
    assert cohort.temporal.time.is_monotonic_increasing or cohort.temporal.time[0] < cohort.temporal.time[1]
    for format in ("parquet", "csv"):
        assert Cohort.load(cohort.save(tmp_path, format)).equals(cohort)


def test_missing_and_extra_columns():
    static, temporal = pd.DataFrame({"id": [1], "s": [1.0], "more": [2]}), pd.DataFrame({"id": [1], "time": [0]})
    with pytest.raises(CohortError) as error:
        Cohort(schema(), static, temporal)
    assert [(p.table, p.column) for p in error.value.problems] == [("static", "more"), ("temporal", "x")]
    with pytest.raises(CohortError, match="at least one patient"):
        Cohort(schema(), static.iloc[:0][["id", "s"]], temporal.iloc[:0].assign(x=[]))
    twice = pd.DataFrame([[1, 2, 3]], columns=["id", "s", "s"])
    with pytest.raises(CohortError, match="a column name occurs once"):
        Cohort(Schema("id", None, (Column("s", "numeric"),)), twice)
    with pytest.raises(ValueError, match="static must be a pandas DataFrame"):
        Cohort(schema(), [1, 2])
    with pytest.raises(ValueError, match="schema must be a Schema"):
        Cohort({"id": "id"}, static)


def test_one_line_messages_even_for_many_problems():
    names = [f"c{i}" for i in range(30)]
    static = pd.DataFrame({"id": [1], **{n: ["text"] for n in names}})
    with pytest.raises(CohortError) as error:
        Cohort(Schema("id", None, [(n, "numeric") for n in names]), static)
    assert len(error.value.problems) == 30 and "\n" not in str(error.value) and "and 22 more" in str(error.value)


# ---------------------------------------------------------------- schema

def test_schema_files(tmp_path):
    made = schema()
    for suffix in ("json", "yaml", "yml"):
        made.save(tmp_path / f"s.{suffix}")
        assert Schema.load(tmp_path / f"s.{suffix}") == made
    (tmp_path / "hand.yaml").write_text("id: pid\ntime: hour\noutcome: died\nstatic: {age: numeric, died: binary}\ntemporal:\n  - {name: HR, kind: numeric}\n")
    hand = Schema.load(tmp_path / "hand.yaml")
    assert hand.names("temporal") == ["HR"] and hand.outcome_table == "static"
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="bad.json must be valid json"):
        Schema.load(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="keys of a schema"):
        Schema.from_dict({"id": "id", "statics": {}})
    with pytest.raises(ValueError, match="the kind of column 'a'"):
        Schema.from_dict({"id": "id", "static": {"a": "float"}})
    with pytest.raises(ValueError, match="a mapping with at least"):
        Schema.from_dict([1])
    with pytest.raises(ValueError, match="suffix"):
        made.save(tmp_path / "s.txt")
    with pytest.raises(Exception):
        made.id = "other"                                  # frozen


# ---------------------------------------------------------------- round trips

def every_dtype():
    static = pd.DataFrame({
        "id": ["b", "a", "c"], "f32": np.array([1.5, np.nan, 1 / 3], dtype="float32"), "f64": [0.1 + 0.2, np.nan, 1e-300],
        "i64": [1, 2, 3], "I64": pd.array([2**60 + 1, None, 3], dtype="Int64"), "i8": np.array([1, 0, 1], dtype="int8"),
        "bool": [True, False, True], "boolean": pd.array([True, None, False], dtype="boolean"),
        "cat": pd.Categorical(["x", None, "y"], categories=["y", "x", "z"], ordered=True), "codes": pd.Categorical([3, 1, None], categories=[1, 2, 3]),
        "text": ["a,b", 'q"uote', "new\nline"], "object": pd.Series(["u", None, "v"], dtype=object),
        "when": pd.to_datetime(["2020-01-01 10:00:00.123456", None, "1999-12-31"], format="ISO8601"),
        "zone": pd.to_datetime(["2020-01-01 10:00", None, "1999-12-31 00:00"]).tz_localize("Europe/Berlin"),
    })
    temporal = pd.DataFrame({"time": [2.5, 0.5, 1.0], "id": ["a", "a", "b"], "Float64": pd.array([1.25, None, 3.0], dtype="Float64"),
                             "only": [np.nan] * 3})
    kinds = {"i64": "integer", "I64": "integer", "i8": "binary", "bool": "binary", "boolean": "binary", "cat": "categorical",
             "codes": "categorical", "text": "categorical", "object": "categorical", "when": "datetime", "zone": "datetime"}
    made = Schema("id", "time", [(n, kinds.get(n, "numeric")) for n in static if n != "id"], [("Float64", "numeric"), ("only", "numeric")])
    return made, static, temporal


@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_every_dtype_and_the_order_of_columns_come_back(tmp_path, format):
    made, static, temporal = every_dtype()
    cohort = Cohort(made, static, temporal)
    assert list(cohort.static) == list(static) and list(cohort.temporal) == ["time", "id", "Float64", "only"]
    for name in static:
        assert str(cohort.static[name].dtype) == str(static[name].dtype), name
    again = Cohort.load(cohort.save(tmp_path / "c", format))
    pd.testing.assert_frame_equal(again.static, cohort.static)
    pd.testing.assert_frame_equal(again.temporal, cohort.temporal)
    assert again.schema == made and again.equals(cohort)
    assert describe_dtypes(restore_dtypes(cohort.static.astype(object), describe_dtypes(cohort.static))) == describe_dtypes(cohort.static)


def test_csv_refuses_what_it_cannot_hold(tmp_path):
    cohort = make(["", "a", "b", None], "categorical")
    with pytest.raises(ValueError, match="format must be 'parquet', since temporal has empty text in x"):
        cohort.save(tmp_path, "csv")
    assert Cohort.load(cohort.save(tmp_path)).equals(cohort)
    with pytest.raises(ValueError, match="a folder with a schema.json"):
        Cohort.load(tmp_path / "nothing")
    for word in ("NA", "None", "nan", "NULL"):             # words that other readers take for missing
        other = make([word, "a", "b", None], "categorical")
        assert Cohort.load(other.save(tmp_path / word, "csv")).labels("x").tolist() == [word, "a", "b", None]


def test_saving_again_in_another_format_leaves_no_stale_file(tmp_path):
    make([1.0] * 4).save(tmp_path)
    make([2.0] * 4).save(tmp_path, "csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["schema.json", "static.csv", "temporal.csv"]
    assert Cohort.load(tmp_path).numbers("x").tolist() == [2.0] * 4


def test_frames_given_are_not_changed():
    static = pd.DataFrame({"id": [2, 1], "s": pd.Series([1, None], dtype=object)})
    before = static.copy(deep=True)
    cohort = Cohort(Schema("id", None, (Column("s", "integer"),)), static)
    pd.testing.assert_frame_equal(static, before)
    mine, _ = cohort.to_frames()
    mine["s"] = 99
    assert 99 not in cohort.static.s.dropna().tolist()
    long = pd.DataFrame({"id": [1.0, 2.0], "time": [0, 0], "x": [1.0, 2.0]})
    before = long.copy(deep=True)
    from_long(long)
    pd.testing.assert_frame_equal(long, before)


# ---------------------------------------------------------------- whose row is it

@st.composite
def wards(draw):
    "Long tables in which every value carries its patient: value // 1000 is the id."
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    people, rows = draw(st.integers(1, 8)), draw(st.integers(1, 25))
    ids = rng.integers(1, people + 1, rows)
    frame = pd.DataFrame({"id": ids, "time": rng.permutation(rows)})
    for name in ("a", "b"):
        frame[name] = np.where(rng.random(rows) < 0.5, np.nan, ids * 1000.0 + rng.integers(0, 999, rows))
    frame["age"] = np.where(rng.random(rows) < 0.4, np.nan, ids * 1000.0)
    return frame


def owners_are_right(cohort, names):
    for name in names:
        table = getattr(cohort, cohort.schema.table_of(name))
        seen = table[table[name].notna()]
        assert ((seen[name] // 1000).astype(int) == seen.id).all(), name


@settings(max_examples=100, deadline=None)
@given(wards())
def test_no_value_changes_its_patient(frame):
    cohort = from_long(frame, static=["age"])
    owners_are_right(cohort, ["a", "b", "age"])
    known = frame.dropna(subset="age").groupby("id").age.first()
    assert cohort.static.set_index("id").age.dropna().to_dict() == known.to_dict()   # missing stays missing
    assert cohort.temporal[["a", "b"]].notna().sum().tolist() == frame[["a", "b"]].notna().sum().tolist()
    events = frame.melt(["id", "time"], ["a", "b"], "variable", "value").dropna()
    if len(events):
        for options in ({}, {"step": 3, "aggregate": "mean"}, {"step": 3, "aggregate": "first"}, {"step": 3, "aggregate": "last"}):
            made = from_events(events, **options)
            owners_are_right(made, made.schema.names("temporal"))
    part = cohort.select(cohort.ids[::2])
    owners_are_right(part, ["a", "b", "age"])
    assert part.lengths.tolist() == cohort.lengths[::2].tolist()


@settings(max_examples=40, deadline=None)
@given(wards())
def test_wide_form_keeps_owners(frame):
    wide = frame.pivot(index="id", columns="time", values=["a", "b"])
    wide.columns = [f"{name}_{time}" for name, time in wide.columns]
    cohort = from_wide(wide.reset_index())
    owners_are_right(cohort, ["a", "b"])
    assert cohort.temporal.a.notna().sum() == frame.a.notna().sum()


@settings(max_examples=30, deadline=None)
@given(wards(), st.integers(0, 100))
def test_splits_are_disjoint_and_complete(frame, seed):
    cohort = from_long(frame, static=["age"])
    if len(cohort) < 2:
        return
    parts = cohort.split((0.5, 0.5), random_state=seed)
    assert sorted(np.concatenate([p.ids for p in parts]).tolist()) == cohort.ids.tolist()
    assert sum(len(p.temporal) for p in parts) == len(cohort.temporal)
    again = cohort.split((0.5, 0.5), random_state=seed)
    assert all(a.equals(b) for a, b in zip(parts, again))
    for part in parts:
        owners_are_right(part, ["a", "b", "age"])


def test_split_and_select_refuse_nonsense():
    cohort = make([1.0] * 4)
    for bad in ((0.8, 0.4), (0,), (), (-0.5, 0.5), ("a",), (0.01, 0.99)):
        with pytest.raises(ValueError, match="fractions must be"):
            cohort.split(bad)
    for bad in ([9], [1, 1], []):
        with pytest.raises(ValueError, match="ids must be"):
            cohort.select(bad)
    assert len(cohort.split(0.67, 0)[0]) == 2
    assert cohort.select([3, 1]).ids.tolist() == [1, 3]


# ---------------------------------------------------------------- forms

def test_static_columns_are_those_that_never_change():
    frame = pd.DataFrame({"id": [1, 1, 2, 2], "time": [0, 1, 0, 1], "age": [60, 60, 50, 50], "sex": ["F", "F", "M", "M"],
                          "lab": [np.nan, 3.0, np.nan, np.nan], "unit": [1.0, 1.0, np.nan, np.nan], "never": [np.nan] * 4})
    assert from_long(frame).schema.names("static") == ["age", "sex", "unit"]
    with pytest.raises(CohortError, match="static.lab2: 2 rows break the rule: a static column has one value per patient"):
        from_long(frame.assign(lab2=[1, 2, 1, 2]), static=["lab2"])
    with pytest.raises(CohortError, match="long.agee"):
        from_long(frame, static=["agee"])
    kept = from_long(frame.astype({"age": "Int64", "sex": "category"})).static
    assert [str(d) for d in kept.dtypes] == ["int64", "Int64", "category", "float64"]


def test_pivot_agrees_with_pandas():
    rng = np.random.default_rng(0)
    events = pd.DataFrame({"id": rng.integers(0, 50, 5000), "time": rng.integers(0, 600, 5000), "variable": rng.choice(list("abcdef"), 5000), "value": rng.normal(size=5000)})
    mine = pivot_events(events, step=60, aggregate="mean")
    other = events.assign(time=events.time // 60).pivot_table(index=["id", "time"], columns="variable", values="value", aggfunc="mean").reset_index()
    np.testing.assert_allclose(mine.to_numpy(float), other.to_numpy(float))
    assert mine.columns.tolist() == ["id", "time", *"abcdef"]
    for how in ("first", "last"):
        mine = pivot_events(events, step=60, aggregate=how)
        other = events.assign(time=events.time // 60).pivot_table(index=["id", "time"], columns="variable", values="value", aggfunc=how).reset_index()
        np.testing.assert_array_equal(mine.to_numpy(float), other.to_numpy(float))


def test_events_of_words_and_numbers():
    events = pd.DataFrame({"id": [1, 1, 1], "time": [0, 0, 1], "variable": ["HR", "rhythm", "HR"], "value": pd.Series([80, "sinus", 90.5], dtype=object)})
    cohort = from_events(events)
    assert cohort.schema.kind_of("HR") == "numeric" and cohort.schema.kind_of("rhythm") == "categorical"
    assert cohort.temporal.HR.tolist() == [80.0, 90.5]
    with pytest.raises(CohortError, match="only numbers have a mean"):
        from_events(events, aggregate="mean")
    with pytest.raises(CohortError, match="events.value: 3 rows|the column is in the table"):
        from_events(events.drop(columns="value"))
    with pytest.raises(CohortError, match="never missing"):
        from_events(events.assign(id=[1, None, 1]))
    dates = events.assign(time=pd.to_datetime(["2020-01-01"] * 2 + ["2020-01-02"]))
    assert from_events(dates).lengths.tolist() == [2]
    with pytest.raises(ValueError, match="step must be None"):
        from_events(dates, step=2)


def test_patients_without_events_stay_when_static_names_them():
    events = pd.DataFrame({"id": [2], "time": [0], "variable": ["HR"], "value": [80.0]})
    cohort = from_events(events, pd.DataFrame({"id": [1, 2], "age": [50.0, 60.0]}))
    assert cohort.lengths.tolist() == [0, 1]


def test_patients_are_not_lost_on_the_way():
    events = pd.DataFrame({"id": [2, 3], "time": [0, 0], "variable": ["HR", "HR"], "value": [80.0, np.nan]})
    assert from_events(events).lengths.tolist() == [1, 0]
    frame = pd.DataFrame({"id": [1, 1, 2], "time": [0.0, 0.0, np.nan], "x": [1.0, 2.0, 3.0]})
    for how in ("first", "mean"):
        with pytest.raises(CohortError, match="temporal.time: 1 row breaks the rule: a time is never missing"):
            from_long(frame, static=[], duplicates=how)


def test_infer_schema_kinds():
    frame = pd.DataFrame({"id": [1, 2], "f": [1.5, 2.0], "i": [1, 7], "b": [0, 1], "bf": [1.0, np.nan], "t": [True, False], "c": ["a", "b"],
                          "d": pd.to_datetime(["2020-01-01", "2020-01-02"]), "o": pd.Series([datetime.date(2020, 1, 1), None], dtype=object),
                          "n": pd.array([1, None], dtype="Int64"), "e": [np.nan, np.nan]})
    kinds = {c.name: c.kind for c in infer_schema(frame).static}
    assert kinds == {"f": "numeric", "i": "integer", "b": "binary", "bf": "binary", "t": "binary", "c": "categorical", "d": "datetime",
                     "o": "datetime", "n": "binary", "e": "numeric"}
    with pytest.raises(CohortError, match="static.patient"):
        infer_schema(frame, id="patient")


def test_numbers_and_labels_for_every_dtype():
    made, static, temporal = every_dtype()
    cohort = Cohort(made, static, temporal)
    for name in ("f32", "I64", "i8", "bool", "boolean", "when", "zone", "Float64", "only"):
        values = cohort.numbers(name)
        series = getattr(cohort, made.table_of(name))[name]
        assert values.dtype == np.float64 and np.isnan(values).tolist() == series.isna().tolist()
    assert cohort.labels("codes").tolist() == ["1", "3", None] and cohort.labels("boolean").tolist() == [None, "1", "0"]
    assert cohort.numbers("when")[1] == pd.Timestamp("2020-01-01 10:00:00.123456").timestamp()
    with pytest.raises(ValueError, match="column must be one of"):
        cohort.numbers("nothing")


def test_without_pandas_the_extra_is_named():
    code = ("import sys; sys.modules['pandas'] = None\n"
            "try:\n    import databloom.cohorts\nexcept ImportError as error:\n    print(error)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'databloom[ehr]'" in out.stdout


def test_arrow_dtypes_become_the_everyday_ones(tmp_path):
    import pyarrow as pa
    arrow = lambda values, kind: pd.array(values, dtype=pd.ArrowDtype(kind))
    stamp = pd.Timestamp("2020-01-01 10:00:00.000001")
    static = pd.DataFrame({"id": arrow([1, 2], pa.int32()), "i": arrow([2**60 + 1, None], pa.int64()), "s": arrow(["a", None], pa.string()),
                           "d": arrow([1.5, None], pa.float64()), "b": arrow([True, None], pa.bool_()), "t": arrow([stamp, None], pa.timestamp("us")),
                           "z": arrow([stamp.tz_localize("UTC"), None], pa.timestamp("us", tz="UTC"))})
    made = infer_schema(static, time=None)
    assert [column.kind for column in made.static] == ["integer", "categorical", "numeric", "binary", "datetime", "datetime"]
    cohort = Cohort(made, static)
    assert cohort.static.i[0] == 2**60 + 1 and cohort.labels("s").tolist() == ["a", None] and cohort.static.t[0] == stamp
    for format in ("parquet", "csv"):
        assert Cohort.load(cohort.save(tmp_path, format)).equals(cohort)
