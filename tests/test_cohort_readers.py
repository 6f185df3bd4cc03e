"Readers on generated files of the official layouts, downloads against a loopback server, the bench on the real data."
import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from databloom import cohort_readers as readers
from databloom.cohorts import Cohort, CohortError, Schema
from databloom.core import data_folder
from databloom.ehr_bench import bench_rows, measurements, physionet2012_bench, physionet2012_cohort
from databloom.icu_simulator import simulate_icu

icu = data_folder("icu")
needs_data = pytest.mark.skipif(icu is None, reason="DATABLOOM_DATA is not set")


# ---------------------------------------------------------------- layouts

def write_2012(folder, static, events, letter="a"):
    "The official layout from the two plain tables."
    place = folder / f"set-{letter}"
    place.mkdir(parents=True, exist_ok=True)
    outcomes = ["SAPS-I", "SOFA", "Length_of_stay", "Survival", "In-hospital_death"]
    for row in static.to_dict("records"):
        mine = events[events.id == row["id"]]
        lines = ["Time,Parameter,Value", f"00:00,RecordID,{row['id']}"]
        lines += [f"00:00,{name},{-1 if np.isnan(row[name]) else row[name]:g}" for name in ("Age", "Gender", "Height", "ICUType")]
        if not ((mine.parameter == "Weight") & (mine.minute == 0)).any():
            lines.append("00:00,Weight,-1")
        lines += [f"{m // 60:02d}:{m % 60:02d},{p},{float(v)!r}" for m, p, v in zip(mine.minute, mine.parameter, mine.value)]
        (place / f"{row['id']}.txt").write_text("\n".join(lines) + "\n")
    static.rename(columns={"id": "RecordID"})[["RecordID", *outcomes]].to_csv(folder / f"Outcomes-{letter}.txt", index=False)


@needs_data
def test_official_and_compact_2012_agree(tmp_path):
    static, events = readers.physionet2012_tables(icu, "a")
    static = static.iloc[:60]
    events = events[events.id.isin(static.id)]
    write_2012(tmp_path, static, events)
    mine, my_events = readers.physionet2012_tables(tmp_path)
    pd.testing.assert_frame_equal(mine[list(static)], static.reset_index(drop=True), check_dtype=False)
    key = ["id", "minute", "parameter", "value"]
    tidy = lambda e: e.assign(parameter=e.parameter.astype("str"), value=e.value.astype("float64"))[key].sort_values(key).reset_index(drop=True)
    pd.testing.assert_frame_equal(tidy(my_events), tidy(events), check_dtype=False)
    cohort = readers.read_physionet2012(tmp_path)
    assert len(cohort) == 60 and "SOFA" not in cohort.schema.names("static")
    leaky = readers.read_physionet2012(tmp_path, leaky=True, step=60)
    assert "SOFA" in leaky.schema.names("static") and leaky.temporal.bin.max() <= 48
    assert not (leaky.numbers("Survival") == -1).any()


def test_bad_2012_files_are_named(tmp_path):
    folder = tmp_path / "set-a"
    folder.mkdir()
    with pytest.raises(ValueError, match="a folder with p2012_static.parquet"):
        readers.read_physionet2012(tmp_path)
    with pytest.raises(ValueError, match="folder must be an existing folder"):
        readers.read_physionet2012(tmp_path / "nothing")
    head = "Time,Parameter,Value\n"
    (folder / "1.txt").write_text(head + "00:00,RecordID,1\n00:00,Age,50\n1:5,HR,80\n")
    with pytest.raises(ValueError, match="Time must be HH:MM, got '1:5'"):
        readers.read_physionet2012(tmp_path)
    (folder / "1.txt").write_text(head + "00:00,RecordID,2\n00:00,Age,50\n")
    with pytest.raises(ValueError, match="1.txt does not"):
        readers.read_physionet2012(tmp_path)
    (folder / "1.txt").write_text("a,b\n")
    (folder / "2.txt").write_text(head)
    with pytest.raises(ValueError, match="2.txt must have the header of 1.txt"):
        readers.read_physionet2012(tmp_path)


def test_2012_without_outcomes_blank_lines_and_windows_ends(tmp_path):
    (tmp_path / "7.txt").write_bytes(b"Time,Parameter,Value\r\n00:00,RecordID,7\r\n00:00,Age,50\r\n\r\n00:30,,\r\n00:10,HR,80\r\n\r\n")
    (tmp_path / "8.txt").write_text("Time,Parameter,Value\n00:00,RecordID,8\n00:00,Age,60\n00:10,HR,90\n")
    cohort = readers.read_physionet2012(tmp_path)
    assert cohort.temporal.HR.tolist() == [80, 90] and cohort.static.Age.tolist() == [50, 60]
    assert cohort.static["In-hospital_death"].isna().all()


def write_2019(frame, folder, letter="A"):
    place = folder / "training" / f"training_set{letter}"
    place.mkdir(parents=True)
    for id, rows in frame.groupby("id"):
        rows.drop(columns="id").to_csv(place / f"p{id:06d}.psv", sep="|", index=False, na_rep="NaN")


@needs_data
def test_official_and_compact_2019_agree(tmp_path):
    frame = pd.read_parquet(icu / "p2019_setA.parquet")
    frame = frame[frame.id <= 60]
    write_2019(frame.astype({c: "float64" for c in frame if frame[c].dtype == "float32"}), tmp_path)
    mine = readers.read_physionet2019(tmp_path, sets="A")
    frame.to_parquet(tmp_path / "p2019_setA.parquet")
    other = readers.read_physionet2019(tmp_path)
    assert mine.schema == other.schema and mine.schema.names("static") == ["Age", "Gender", "Unit1", "Unit2", "HospAdmTime"]
    for a, b in zip(mine.to_frames(), other.to_frames()):
        pd.testing.assert_frame_equal(a, b, check_dtype=False, rtol=1e-6)
    with pytest.raises(ValueError, match="sets must be one of 'A', 'B'"):
        readers.read_physionet2019(tmp_path, sets="C")


def test_bad_2019_files_are_named(tmp_path):
    (tmp_path / "p000001.psv").write_text("HR|ICULOS|SepsisLabel\n80|1|0\n")
    (tmp_path / "p000002.psv").write_text("HR|Temp|ICULOS|SepsisLabel\n80|37|1|0\n")
    with pytest.raises(ValueError, match="p000002.psv must have the header of p000001.psv"):
        readers.read_physionet2019(tmp_path)
    (tmp_path / "p000002.psv").write_text("HR|ICULOS|SepsisLabel\n80|1|0\n80|1|0\n")
    with pytest.raises(CohortError, match="temporal.ICULOS: 1 row breaks the rule: a patient has one row per time"):
        readers.read_physionet2019(tmp_path)
    (tmp_path / "p000002.psv").unlink()
    (tmp_path / "p000001.psv").write_text("HR|hour\n80|1\n")
    with pytest.raises(ValueError, match="must have the columns ICULOS and SepsisLabel"):
        readers.read_physionet2019(tmp_path)


def test_sepsisexp(tmp_path):
    features = [f"f{i}" for i in range(42)] + ["Age"]
    rng = np.random.default_rng(0)
    for k, letter in enumerate("ABCD"):
        ids = np.repeat([10 * k + 1, 10 * k + 2], 4)
        frame = pd.DataFrame(rng.normal(size=(8, 43)), columns=features).assign(Age=ids + 40.0)
        frame.loc[0, "f1"] = np.nan
        frame.insert(0, "id", ids)
        frame.insert(1, "sepsis", [0, 0, 1, 1] * 2)
        frame.insert(2, "severity", [0, 1, 2, 4] * 2)
        frame.insert(3, "timestep", [0.5, 1.0, 1.5, 2.0] * 2)
        frame.to_csv(tmp_path / f"sepsisexp_timeseries_partition-{letter}.tsv", sep="\t", index=False)
    cohort = readers.read_sepsisexp(tmp_path)
    assert len(cohort) == 8 and cohort.schema.outcome == "severity" and len(cohort.schema.temporal) == 44
    assert cohort.labels("partition").tolist() == list("AABBCCDD")
    assert len(readers.read_sepsisexp(tmp_path, ("A", "C"))) == 4
    with pytest.raises(ValueError, match="partitions must be"):
        readers.read_sepsisexp(tmp_path, ("E",))
    (tmp_path / "sepsisexp_timeseries_partition-A.tsv").write_text("a\tb\tc\td\n")
    with pytest.raises(ValueError, match="partition-A.tsv must begin with"):
        readers.read_sepsisexp(tmp_path)


@pytest.mark.parametrize("format", ["parquet", "csv", "csv.gz", "tsv"])
def test_folders(tmp_path, format):
    cohort = simulate_icu(20, random_state=0)
    static, temporal = cohort.to_frames()
    for name, frame in (("static", static), ("temporal", temporal)):
        if format == "parquet":
            frame.to_parquet(tmp_path / f"{name}.parquet")
        else:
            frame.to_csv(tmp_path / f"{name}.{format}", index=False, sep="\t" if format == "tsv" else ",")
    plain = readers.read_folder(tmp_path, time="ICULOS", outcome="died")
    assert plain.ids.tolist() == cohort.ids.tolist() and plain.schema.outcome_table == "static"
    cohort.schema.save(tmp_path / "schema.yaml")
    read = readers.read_folder(tmp_path)
    assert read.schema == cohort.schema
    for column in cohort.schema.static + cohort.schema.temporal:
        if column.kind == "categorical":
            assert read.labels(column.name).tolist() == cohort.labels(column.name).tolist()
        else:
            np.testing.assert_array_equal(read.numbers(column.name), cohort.numbers(column.name))


def test_long_folder_own_folder_and_refusals(tmp_path):
    cohort = simulate_icu(5, random_state=0)
    assert readers.read_folder(cohort.save(tmp_path / "own")).equals(cohort)
    (tmp_path / "long").mkdir()
    cohort.static.merge(cohort.temporal, on="id").to_csv(tmp_path / "long/stays.csv", index=False)
    long = readers.read_folder(tmp_path / "long", time="ICULOS", outcome="died")
    assert {"age", "sex", "died"} <= set(long.schema.names("static")) and len(long) == 5
    (tmp_path / "long/more.csv").write_text("id\n")
    with pytest.raises(ValueError, match="exactly one long table"):
        readers.read_folder(tmp_path / "long")
    with pytest.raises(ValueError, match="an existing folder"):
        readers.read_folder(tmp_path / "nothing")


def test_tables_keep_ids_integers_and_words(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("id,n,x,b,word,big\n01,1,0.1,True,None,9007199254740993\n1,,1e-3,False,NA,\n")
    frame = readers.read_table(path, "id")
    assert frame.id.tolist() == ["01", "1"] and str(frame.n.dtype) == "Int64" and frame.x.tolist() == [0.1, 0.001]
    assert frame.b.dtype == bool and frame.word[0] == "None" and pd.isna(frame.word[1])
    assert int(frame.big[0]) == 9007199254740993
    path.write_text("id\n12\n13\n")
    assert str(readers.read_table(path, "id").id.dtype) == "int64"
    with pytest.raises(ValueError, match="file must be"):
        readers.read_table(tmp_path / "t.xlsx")


# ---------------------------------------------------------------- databases

def mimic(folder, n=40, zipped=False):
    "A generated MIMIC-III dump; returns the stays that should come out."
    rng = np.random.default_rng(1)
    subjects = np.arange(1000, 1000 + n)
    born = pd.Timestamp("2080-06-15") + pd.to_timedelta(rng.integers(0, 10000, n), "D")
    patients = pd.DataFrame({"ROW_ID": 1, "SUBJECT_ID": subjects, "GENDER": rng.choice(["F", "M"], n), "DOB": born, "DOD": "", "EXPIRE_FLAG": 0})
    stays, admissions, chart, lab = [], [], [], []
    for k, subject in enumerate(subjects):
        for visit in range(1 + k % 3):
            came = born[k] + pd.Timedelta(days=365.25 * 50 + 900 * visit, hours=float(rng.integers(0, 24)))
            hadm, stay, los = 20000 + 10 * k + visit, 40000 + 10 * k + visit, float(rng.uniform(0.5, 3))
            admissions.append([hadm, subject, "EMERGENCY", "Medicare", rng.choice(["CATHOLIC", ""]), "MARRIED", "WHITE", int(rng.random() < 0.3)])
            stays.append([subject, hadm, stay, "metavision", "MICU", came, came + pd.Timedelta(days=los), los])
            for _ in range(30):
                when = came + pd.Timedelta(hours=float(rng.uniform(-5, 24 * los + 5)))
                chart.append([subject, hadm, stay, int(rng.choice([211, 220045, 51, 678, 1])), when, "x", float(rng.normal(90, 5)), rng.choice(["", "0", "1"])])
                lab.append([subject, hadm, int(rng.choice([50813, 50912, 7])), when, "x", float(rng.uniform(1, 3))])
    tables = {
        "PATIENTS": patients,
        "ADMISSIONS": pd.DataFrame(admissions, columns=["HADM_ID", "SUBJECT_ID", "ADMISSION_TYPE", "INSURANCE", "RELIGION", "MARITAL_STATUS", "ETHNICITY", "HOSPITAL_EXPIRE_FLAG"]),
        "ICUSTAYS": pd.DataFrame(stays, columns=["SUBJECT_ID", "HADM_ID", "ICUSTAY_ID", "DBSOURCE", "FIRST_CAREUNIT", "INTIME", "OUTTIME", "LOS"]),
        "CHARTEVENTS": pd.DataFrame(chart, columns=["SUBJECT_ID", "HADM_ID", "ICUSTAY_ID", "ITEMID", "CHARTTIME", "VALUE", "VALUENUM", "ERROR"]),
        "LABEVENTS": pd.DataFrame(lab, columns=["SUBJECT_ID", "HADM_ID", "ITEMID", "CHARTTIME", "VALUE", "VALUENUM"]),
    }
    for name, frame in tables.items():
        if zipped:
            frame.rename(columns=str.lower).to_csv(folder / f"{name.lower()}.csv.gz", index=False)
        else:
            frame.sample(frac=1, random_state=0).to_csv(folder / f"{name}.csv", index=False)
    return tables


@pytest.mark.parametrize("zipped", [False, True])
def test_mimic3(tmp_path, zipped):
    tables = mimic(tmp_path, zipped=zipped)
    cohort = readers.read_mimic3(tmp_path)
    assert len(cohort) == 40 and set(cohort.static.age) <= {49, 50}
    first = tables["ICUSTAYS"].sort_values("INTIME").drop_duplicates("SUBJECT_ID").set_index("SUBJECT_ID")
    assert (cohort.temporal.hour < cohort.temporal.id.map(first.LOS) * 24).all() and cohort.temporal.hour.min() >= 0
    chart = tables["CHARTEVENTS"].merge(first[["ICUSTAY_ID", "INTIME", "LOS"]], on="ICUSTAY_ID")
    hour = (chart.CHARTTIME - chart.INTIME) / pd.Timedelta(hours=1)
    heart = chart[chart.ITEMID.isin([211, 220045]) & (chart.ERROR != "1") & (hour >= 0) & (hour < chart.LOS * 24)].assign(hour=np.floor(hour))
    expected = heart.groupby(["SUBJECT_ID", "hour"]).VALUENUM.mean()
    mine = cohort.temporal.set_index(["id", "hour"]).HR.dropna()
    np.testing.assert_allclose(mine.to_numpy(), expected.to_numpy())
    temp = cohort.numbers("Temp")
    assert 25 < np.nanmin(temp) < np.nanmax(temp) < 45
    assert set(cohort.labels("religion")) == {"CATHOLIC", None}


def test_mimic3_missing_table_and_column(tmp_path):
    mimic(tmp_path, 3)
    (tmp_path / "LABEVENTS.csv").unlink()
    with pytest.raises(ValueError, match="a folder with LABEVENTS.csv"):
        readers.read_mimic3(tmp_path)
    (tmp_path / "LABEVENTS.csv").write_text("SUBJECT_ID,HADM_ID\n")
    with pytest.raises(ValueError, match="LABEVENTS.csv must have the columns ITEMID, CHARTTIME, VALUENUM"):
        readers.read_mimic3(tmp_path)


def test_eicu(tmp_path):
    rng = np.random.default_rng(2)
    n = 30
    patient = pd.DataFrame({
        "patientunitstayid": np.arange(n) + 500, "patienthealthsystemstayid": np.arange(n) // 2, "uniquepid": [f"0-{k // 3}" for k in range(n)],
        "unitvisitnumber": np.arange(n) % 2 + 1, "hospitaldischargeyear": 2014, "gender": "Female", "age": ["> 89", "64", ""] * 10, "ethnicity": "Asian",
        "unittype": "MICU", "admissionheight": 170.0, "admissionweight": np.nan, "hospitaldischargestatus": ["Alive", "Expired", ""] * 10, "unitdischargeoffset": 600})
    patient.to_csv(tmp_path / "patient.csv", index=False)
    m = 2000
    who, when = rng.integers(500, 500 + n, m), rng.integers(-60, 700, m)
    value = rng.normal(80, 5, m)
    names = ["temperature", "sao2", "heartrate", "respiration", "systemicsystolic", "systemicdiastolic", "systemicmean"]
    pd.DataFrame({"patientunitstayid": who, "observationoffset": when, **{c: value for c in names}}).to_csv(tmp_path / "vitalPeriodic.csv.gz", index=False)
    pd.DataFrame({"patientunitstayid": who, "observationoffset": when, "noninvasivesystolic": 100, "noninvasivediastolic": 50, "noninvasivemean": 66}).to_csv(tmp_path / "vitalAperiodic.csv", index=False)
    pd.DataFrame({"patientunitstayid": who, "labresultoffset": when, "labname": rng.choice(["lactate", "creatinine", "x"], m), "labresult": value}).to_csv(tmp_path / "lab.csv", index=False)
    cohort = readers.read_eicu(tmp_path)
    assert cohort.ids.tolist() == list(range(500, 530, 3))               # one stay per person, the first
    assert cohort.static.age.isna().sum() == 0 and set(cohort.static.age) == {90.0}
    assert cohort.temporal.hour.between(0, 9).all()
    frame = pd.DataFrame({"id": who, "hour": when // 60, "v": value})
    expected = frame[(when >= 0) & (when < 600) & (who % 3 == 500 % 3)].groupby(["id", "hour"]).v.mean()
    np.testing.assert_allclose(cohort.temporal.set_index(["id", "hour"]).HR.dropna().to_numpy(), expected.to_numpy())
    assert "lactate" not in cohort.schema.names("temporal") and "Lactate" in cohort.schema.names("temporal")


def test_meds(tmp_path):
    place = tmp_path / "data" / "tuning"
    place.mkdir(parents=True)
    (tmp_path / "metadata").mkdir()
    frame = pd.DataFrame({
        "subject_id": np.array([5, 5, 5, 5, 6, 6], dtype="int64"), "time": pd.to_datetime([None, "2020-01-01", "2020-01-01", "2020-01-02", "2020-05-01", "2020-05-01"]),
        "code": ["EYE//blue", "HR", "HR", "RARE", "HR", "HR"], "numeric_value": np.array([np.nan, 80, 90, 1, 70, 70], dtype="float32")})
    frame.iloc[:4].to_parquet(place / "0.parquet")
    frame.iloc[4:].to_parquet(place / "1.parquet")
    cohort = readers.read_meds(tmp_path)
    assert cohort.temporal.HR.tolist()[0] == 85.0 and cohort.temporal.time.tolist() == [0.0, 24.0, 0.0]
    assert cohort.labels("EYE").tolist() == ["blue", None] and cohort.static.MEDS_DEATH.tolist() == [0, 0]
    assert readers.read_meds(tmp_path, top=1).schema.names("temporal") == ["HR"]
    dated = readers.read_meds(tmp_path, codes=["RARE"], clock="datetime")
    assert dated.lengths.tolist() == [1, 0] and dated.temporal.time[0] == pd.Timestamp("2020-01-02")
    with pytest.raises(ValueError, match="codes must be"):
        readers.read_meds(tmp_path, codes=["NOPE"])
    with pytest.raises(ValueError, match="a MEDS folder"):
        readers.read_meds(tmp_path / "metadata")


# ---------------------------------------------------------------- downloads

class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.server.asked.append(self.path)
        super().do_GET()


@pytest.fixture
def server(tmp_path):
    root = tmp_path / "served"
    root.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=root))
    server.asked, server.root, server.url = [], root, f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def publish(server, database, files):
    place = server.root / database / "1.0.0"
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    (place / "SHA256SUMS.txt").write_text("".join(f"{hashlib.sha256(c).hexdigest()} {n}\n" for n, c in files.items()))
    return place


PSV = b"HR|Age|Gender|Unit1|Unit2|HospAdmTime|ICULOS|SepsisLabel\n80|60|1|NaN|NaN|-1|1|0\n"


def test_download_2019_checks_and_keeps(server, tmp_path):
    files = {f"training/training_set{s}/p{k:06d}.psv": PSV for s, k in (("A", 1), ("A", 2), ("B", 100001))}
    place = publish(server, "challenge-2019", {**files, "LICENSE.txt": b"x"})
    mine = tmp_path / "mine"
    folder = readers.download_physionet2019(mine, sets=("A",), base=server.url)
    assert readers.read_physionet2019(folder).ids.tolist() == [1, 2]
    assert not any("LICENSE" in path or "setB" in path for path in server.asked)
    server.asked.clear()
    readers.download_physionet2019(mine, sets=("A",), base=server.url)
    assert server.asked == ["/challenge-2019/1.0.0/SHA256SUMS.txt"]             # nothing again but the list
    (mine / "training/training_setA/p000001.psv").write_bytes(b"damaged on disk")
    readers.download_physionet2019(mine, sets=("A",), base=server.url)
    assert (mine / "training/training_setA/p000001.psv").read_bytes() == PSV
    (place / "training/training_setA/p000002.psv").write_bytes(b"tampered")
    (mine / "training/training_setA/p000002.psv").unlink()
    with pytest.raises(ValueError, match="p000002.psv must have the checksum of the publisher's list"):
        readers.download_physionet2019(mine, sets=("A",), base=server.url)
    assert not (mine / "training/training_setA/p000002.psv").exists()
    assert [p.name for p in mine.iterdir()] .count("SHA256SUMS.txt") == 1


@pytest.mark.parametrize("packed", ["tar.gz", "zip", None])
def test_download_2012_packed_or_not(server, tmp_path, packed):
    stay = b"Time,Parameter,Value\n00:00,RecordID,5\n00:00,Age,50\n00:07,HR,73\n"
    outcomes = b"RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death\n5,1,2,3,-1,1\n"
    buffer = io.BytesIO()
    if packed == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("set-a/5.txt", stay)
    elif packed:
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            info = tarfile.TarInfo("set-a/5.txt")
            info.size = len(stay)
            archive.addfile(info, io.BytesIO(stay))
    files = {"Outcomes-a.txt": outcomes, **({f"set-a.{packed}": buffer.getvalue()} if packed else {"set-a/5.txt": stay})}
    publish(server, "challenge-2012", files)
    cohort = readers.read_physionet2012(readers.download_physionet2012(tmp_path / "mine", sets=("a",), base=server.url, progress=packed == "zip"))
    assert cohort.ids.tolist() == [5] and cohort.static["In-hospital_death"].tolist() == [1] and cohort.temporal.HR.tolist() == [73]
    with pytest.raises(ValueError, match="sets must be one of"):
        readers.download_physionet2012(tmp_path, sets=("z",), base=server.url)
    with pytest.raises(ValueError, match="patterns must be"):
        readers.download_physionet2012(tmp_path / "mine", sets=("b",), base=server.url)


def test_a_malicious_list_or_archive_writes_nothing_outside(server, tmp_path):
    place = publish(server, "challenge-2019", {"a.psv": PSV})
    for path in ("../outside.psv", "/etc/outside.psv", "x/../../outside.psv", "..\\outside.psv", "C:/outside.psv"):
        (place / "SHA256SUMS.txt").write_text(f"{hashlib.sha256(PSV).hexdigest()}  {path}\n")
        with pytest.raises(ValueError, match="a path inside the folder"):
            readers.fetch_release("challenge-2019", "1.0.0", tmp_path / "mine", base=server.url)
    (place / "SHA256SUMS.txt").write_text("<html>not found</html>\n")
    with pytest.raises(ValueError, match="line 1 of the checksum list"):
        readers.fetch_release("challenge-2019", "1.0.0", tmp_path / "mine", base=server.url)
    for bad in ("..", "a/b", "", None):
        with pytest.raises(ValueError, match="database must be"):
            readers.fetch_release(bad, "1.0.0", tmp_path / "mine", base=server.url)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        info = tarfile.TarInfo("../evil.txt")
        archive.addfile(info, io.BytesIO())
    publish(server, "challenge-2012", {"set-a.tar.gz": buffer.getvalue(), "Outcomes-a.txt": b"x"})
    with pytest.raises(Exception, match="evil.txt"):
        readers.download_physionet2012(tmp_path / "mine", sets=("a",), base=server.url)
    assert not (tmp_path / "evil.txt").exists() and not (tmp_path / "outside.psv").exists()


# ---------------------------------------------------------------- the bench

def slow_bench_rows(events):
    "The bench's rows by an independent, slower way: pandas groups."
    e = events.assign(parameter=events.parameter.astype("str").replace({"NISysABP": "SysABP"}), value=events.value.astype("float64"))
    e = e[e.parameter.isin([*measurements, "MechVent"]) & (e.minute < 2880)]
    p, v = e.parameter, e.value
    e = e[~(((p == "Temp") & (v < 25)) | ((p == "SysABP") & (v <= 20)) | ((p == "HR") & (v <= 0)) | ((p == "WBC") & (v > 500)))]
    out = e.assign(step=e.minute // 240).groupby(["id", "step", "parameter"]).value.mean().unstack().reindex(columns=[*measurements, "MechVent"])
    return out.assign(MechVent=out.MechVent.fillna(0).round()).reset_index()


@needs_data
def test_bench_rows_agree_with_pandas():
    _, events = readers.physionet2012_tables(icu, "a")
    events = events[events.id < 134000]
    mine, other = bench_rows(events), slow_bench_rows(events)
    assert len(mine) == len(other) > 6000
    np.testing.assert_allclose(mine.to_numpy(float), other[list(mine)].to_numpy(float), rtol=1e-6)


@needs_data
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bench_is_the_one_of_the_note(seed):
    bench = physionet2012_bench(seed, icu)
    sizes = [len(getattr(bench, part)) for part in ("training", "holdout", "second", "test")]
    assert sizes[:2] == [1500, 1500] and abs(sizes[2] - 990) < 5 and sizes[3] == 1995
    ids = [set(getattr(bench, part).ids) for part in ("training", "holdout", "second", "test")]
    assert len(set.union(*ids)) == sum(sizes)
    whole = physionet2012_cohort(icu, "a")
    order = np.random.default_rng(seed).permutation(np.sort(whole.ids))
    assert set(order[:1500]) == ids[0] and set(order[1500:3000]) == ids[1]
    if seed == 0:
        assert round(bench.training.numbers("In-hospital_death").mean(), 4) == 0.1387      # the published row's death rate
    missing = lambda cohort: np.array([np.isnan(cohort.numbers(name)).mean() for name in measurements])
    assert np.abs(missing(bench.training) - missing(bench.second)).mean() < 0.01
    assert abs(np.abs(missing(bench.test) - missing(bench.training)).mean() - 0.036) < 0.003        # the shift that the note names
    again = physionet2012_bench(seed, icu)
    assert again.training.equals(bench.training)


@needs_data
def test_bench_refuses_bad_sizes():
    with pytest.raises(ValueError, match="n must be"):
        physionet2012_bench(0, icu, n=3000)


def test_bench_without_data_says_so(monkeypatch):
    monkeypatch.delenv("DATABLOOM_DATA", raising=False)
    with pytest.raises(ValueError, match="DATABLOOM_DATA is not set"):
        physionet2012_bench()
