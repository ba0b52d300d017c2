"""The published table of one node of eight MI300X, measured by others, as an experiment would have found it."""

from __future__ import annotations

from hpcjobs.throughput_table import Row, ThroughputTable

BATCH_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
COMPUTE_ONLY = {
    "spx": (1628, 2982, 4820, 6676, 8630, 10190, 10744, 10713),
    "dpx": (3005, 5240, 7542, 8035, 9872, 11235, 11426),
    "qpx": (5214, 7966, 8137, 9929, 12259, 12920),
    "cpx": (7332, 8778, 10136, 12249, 13982),
}
END_TO_END = {
    "spx": (1543, 2648, 4528, 6255, 7089, 6852, 5901, 4866),
    "dpx": (2855, 5001, 7206, 7609, 8049, 7414, 6593),
    "qpx": (4980, 7621, 7570, 7036, 7192, 6861),
    "cpx": (6944, 8309, 7384, 6824, 6702),
}
WORKERS = {"spx": 8, "dpx": 16, "qpx": 32, "cpx": 63}


def published_table(cluster: str | None = "mi300x-generic") -> ThroughputTable:
    rows = []
    for mode, workers in WORKERS.items():
        for place, batch_size in enumerate(BATCH_SIZES):
            speeds = [column[mode][place : place + 1] for column in (END_TO_END, COMPUTE_ONLY)]
            measured = {
                "end_to_end": next(iter(speeds[0]), None), "compute_only": next(iter(speeds[1]), None), "spread": 0.0
            }  # fmt: skip
            status = "ok" if speeds[0] else "oom" if place == len(END_TO_END[mode]) else "not tried"
            rows.append(Row(mode, 1, batch_size, "auto", status, workers, workers, **measured))  # type: ignore[arg-type]
    node = {"gpu": "AMD Instinct MI300X", "gpu_memory_gb": None, "cores": 192, "mps": False}
    objective = "autospeed_model.objective:train_trial"
    return ThroughputTable("published", cluster, "published:elsewhere", objective, {}, node, 60.0, tuple(rows))
