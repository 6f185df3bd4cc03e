"""SDV's PAR and mostlyai-engine on the bench of PhysioNet 2012, in environments of their own, at equal time.

    DATABLOOM_DATA=... python benchmarks/ehr_peers.py make sdv ENV       # a virtual environment with the peer
    DATABLOOM_DATA=... python benchmarks/ehr_peers.py run sdv ENV --seeds 0 1 2 --seconds 120 --out peers.json

The parent writes the training patients to a folder, the worker (this same file in the peer's environment, which needs no
databloom) fits and samples, and the parent judges what came back exactly as it judges its own model.
"""
import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

packages = {"sdv": ["sdv==2.0.0", "pyarrow"], "mostlyai": ["mostlyai-engine==2.7.3", "pyarrow"]}


def make(peer, env):
    "A fresh environment with one peer in it."
    subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
    python = Path(env) / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", "torch==2.13.0", *packages[peer]], check=True)
    if peer == "mostlyai":                                       # its torchvision breaks transformers with this torch
        subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio"], check=True)


def work_sdv(static, rows, seconds, n):
    "PAR for as many epochs as fit into the time, judged by the first two."
    from sdv.metadata import Metadata
    from sdv.sequential import PARSynthesizer
    table = rows.merge(static, on="id").astype({"Gender": str, "ICUType": str})
    metadata = Metadata.detect_from_dataframes({"stays": table}, infer_keys=None)
    metadata.update_column("id", sdtype="id", table_name="stays")
    metadata.set_sequence_key("id", table_name="stays")
    metadata.set_sequence_index("step", table_name="stays")
    for name in ("Gender", "ICUType", "In-hospital_death", "MechVent"):
        metadata.update_column(name, sdtype="categorical", table_name="stays")
    context = [c for c in static if c != "id"]
    data = {"stays": table}
    trial = PARSynthesizer(metadata, context_columns=context, epochs=1)
    began = time.perf_counter()
    trial.fit(data)
    epochs = max(1, int(seconds / (time.perf_counter() - began)))
    model = PARSynthesizer(metadata, context_columns=context, epochs=epochs)
    began = time.perf_counter()
    model.fit(data)
    spent, made = time.perf_counter() - began, model.sample_sequences(num_sequences=n)
    made = made["stays"] if isinstance(made, dict) else made
    return made[["id", *context]].drop_duplicates("id"), made[list(rows)], {"epochs": epochs, "fit wall s": spent}


def work_mostlyai(static, rows, seconds, n):
    "TabularARGN for statics, then for rows given statics; the time is divided between both."
    from mostlyai import engine
    spent, made = time.perf_counter(), {}
    root = Path(tempfile.mkdtemp())
    engine.split(tgt_data=static, tgt_primary_key="id", workspace_dir=root / "static", tgt_encoding_types={"Gender": "TABULAR_CATEGORICAL", "ICUType": "TABULAR_CATEGORICAL"})
    engine.split(tgt_data=rows, tgt_context_key="id", ctx_data=static, ctx_primary_key="id", workspace_dir=root / "rows")
    for name, share in (("static", 0.2), ("rows", 0.8)):
        for stage in (engine.analyze, engine.encode):
            stage(workspace_dir=root / name)
        engine.train(workspace_dir=root / name, max_training_time=share * seconds / 60)
    spent = time.perf_counter() - spent
    import pandas as pd
    engine.generate(workspace_dir=root / "static", sample_size=n)
    made["static"] = pd.read_parquet(root / "static" / "SyntheticData")
    engine.generate(workspace_dir=root / "rows", ctx_data=made["static"])
    made["rows"] = pd.read_parquet(root / "rows" / "SyntheticData")
    return made["static"], made["rows"], {"fit wall s": spent}


def worker(peer, folder, seconds, n):
    "Runs in the peer's environment: tables in, tables out."
    import pandas as pd
    folder = Path(folder)
    static, rows = (pd.read_parquet(folder / f"{t}.parquet") for t in ("static", "temporal"))
    made_static, made_rows, about = {"sdv": work_sdv, "mostlyai": work_mostlyai}[peer](static, rows, seconds, n)
    made_static.to_parquet(folder / "made_static.parquet"), made_rows.to_parquet(folder / "made_rows.parquet")
    (folder / "about.json").write_text(json.dumps(about))


def imported(folder, bench):
    "What a peer made, as a cohort; rows of equal time are counted and dropped."
    import numpy as np
    import pandas as pd
    from databloom.cohorts import Cohort, describe_dtypes, restore_dtypes
    static, rows = (pd.read_parquet(Path(folder) / f"made_{t}.parquet") for t in ("static", "rows"))
    number = {v: i + 1 for i, v in enumerate(static["id"])}
    static["id"], rows["id"] = np.arange(1, len(static) + 1), rows["id"].map(number)
    falling = int((rows.groupby("id")["step"].diff().dropna() <= 0).sum())
    rows = rows.dropna(subset=["id", "step"]).drop_duplicates(["id", "step"])
    rows["MechVent"] = rows["MechVent"].fillna(0).astype(float).round().clip(0, 1)
    for name in ("Gender", "ICUType", "In-hospital_death"):
        static[name] = pd.to_numeric(static[name], errors="coerce")
    frames = [restore_dtypes(f[list(t.columns)], describe_dtypes(t)) for f, t in ((static, bench.training.static), (rows, bench.training.temporal))]
    return Cohort(bench.training.schema, *frames), falling


def run(peer, env, seeds, seconds, out, n=10_000):
    "Fit, sample and judge a peer on each seed."
    from databloom.core import plain
    from databloom.ehr_bench import physionet2012_bench
    from ehr_model import judged
    results = json.loads(out.read_text()) if out.is_file() else []
    for seed in seeds:
        bench = physionet2012_bench(seed)
        with tempfile.TemporaryDirectory() as folder:
            bench.training.static.to_parquet(Path(folder) / "static.parquet"), bench.training.temporal.to_parquet(Path(folder) / "temporal.parquet")
            subprocess.run([str(Path(env) / "bin" / "python"), __file__, "worker", peer, folder, str(seconds), str(n)], check=True)
            made, falling = imported(folder, bench)
            about = json.loads((Path(folder) / "about.json").read_text())
        sample = lambda k, s: made if k >= len(made) else made.select(made.ids[:k])
        results.append(plain({"model": peer, "seed": seed, **about, **judged(bench, seed, sample), "order": falling}))
        out.write_text(json.dumps(results))


def main():
    if sys.argv[1:2] == ["worker"]:
        return worker(sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["make", "run"])
    parser.add_argument("peer", choices=sorted(packages))
    parser.add_argument("env", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path, default=Path("ehr_peers.json"))
    given = parser.parse_args()
    make(given.peer, given.env) if given.action == "make" else run(given.peer, given.env, given.seeds, given.seconds, given.out)


if __name__ == "__main__":
    main()
