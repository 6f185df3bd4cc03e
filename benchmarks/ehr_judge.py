"""Ten thousand patients of 24 features judged: wall time, processor time and peak memory (`python benchmarks/ehr_judge.py [patients]`)."""
import resource
import sys
import time

from databloom.ehr_report import judge
from databloom.icu_simulator import simulate_icu

if __name__ == "__main__":
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    real, synthetic, holdout = simulate_icu(3 * n, random_state=0, hours=4, max_hours=48).split((1 / 3, 1 / 3, 1 / 3), random_state=1)
    wall, processor = time.perf_counter(), time.process_time()
    clock = lambda share, stage: print(f"{time.perf_counter() - wall:7.1f} s wall {time.process_time() - processor:7.1f} s processor "
                                f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:5.2f} GB  {stage}", flush=True)
    report = judge(real, synthetic, holdout, progress=clock)
    clock(1.0, "done")
    features = len(real.schema.static) + len(real.schema.temporal)
    print(f"{len(real):,} patients x {features} features, {len(real.temporal):,} rows: {report.verdict}, {report.reason}")
