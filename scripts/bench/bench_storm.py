"""Measures how clients return after a service refused every request for a while: python -m scripts.bench.bench_storm

Each client writes small objects, one at a time, to `gcs_standin`, with the store's defaults for retries. The server
then answers 429 for `--refuse-s`. Prints how long afterwards each client had its first success, and how many requests
arrived per second: clients that all wait equally long return in bursts. Writes build/bench-storm.json.
"""

import argparse
import json
import os
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.core.errors import StoreError
from pipeline.store.io.storage import Storage, StorageOptions
from scripts.bench.gcs_standin import control, environment, server

CONTENT = bytes(1024)
WARM_UP_S = 3


def write_until(client: int, recovered: list[float | None], is_over: threading.Event, refused: threading.Event) -> int:
    """Writes until `is_over`. Records the first success after the refusals. Returns the number of failed writes."""
    storage, failures = Storage.open("gs://bench-storm/store", StorageOptions(concurrency=32)), 0
    while not is_over.is_set():
        try:
            storage.write(f"object-{client}", CONTENT)
        except StoreError:
            failures += 1
            continue
        if refused.is_set() and recovered[client] is None:
            recovered[client] = time.monotonic()
    return failures


def storm(url: str, num_clients: int, refuse_s: float, latency_s: float, timeout_s: float) -> dict[str, object]:
    control(url, latency_s=latency_s)
    recovered: list[float | None] = [None] * num_clients
    is_over, refused = threading.Event(), threading.Event()
    with ThreadPoolExecutor(num_clients) as pool:
        clients = [pool.submit(write_until, client, recovered, is_over, refused) for client in range(num_clients)]
        time.sleep(WARM_UP_S)
        before = control(url, refuse_s=refuse_s, log_arrivals=True)["counters"]["put"] / WARM_UP_S
        began = time.monotonic()
        time.sleep(refuse_s)
        refused.set()
        end = time.monotonic()
        while None in recovered and time.monotonic() - end < timeout_s:
            time.sleep(0.1)
        is_over.set()
        failures = sum(client.result() for client in clients)
    report = control(url)
    seconds = sorted(at - end for at in recovered if at is not None)
    arrivals = [at - began for at in report["arrivals"]]
    return {
        "clients": num_clients,
        "refuse_s": refuse_s,
        "requests_per_s_before": round(before, 1),
        "recovered": len(seconds),
        "first_s": round(seconds[0], 2) if seconds else None,
        "median_s": round(statistics.median(seconds), 2) if seconds else None,
        "last_s": round(seconds[-1], 2) if seconds else None,
        "failed_writes": failures,
        "refused_requests": report["counters"].get("refused", 0),
        "most_in_100_ms": max(Counter(int(at * 10) for at in arrivals).values(), default=0),
        "arrivals_per_s": dict(sorted(Counter(int(at) for at in arrivals).items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--refuse-s", type=float, default=30)
    parser.add_argument("--latency-s", type=float, default=0.05)
    parser.add_argument("--timeout-s", type=float, default=120, help="after the refusals")
    options = parser.parse_args()
    with server() as url:
        os.environ.update(environment(url))
        result = storm(url, options.clients, options.refuse_s, options.latency_s, options.timeout_s)
    Path("build").mkdir(exist_ok=True)
    Path("build/bench-storm.json").write_text(json.dumps(result, indent=1) + "\n")
    arrivals = result.pop("arrivals_per_s")
    print("\n".join(f"{name.replace('_', ' '):24}{value}" for name, value in result.items()))
    widest = max(arrivals.values())
    for second, count in arrivals.items():
        print(f"{second:4} s {count:6} {'#' * round(60 * count / widest)}")


if __name__ == "__main__":
    main()
