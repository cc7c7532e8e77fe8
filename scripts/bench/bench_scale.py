"""Measures how the cost of a store's bookkeeping grows with its blocks: requests, seconds, CPU and memory.

    python -m scripts.bench.bench_scale [--blocks 10000 100000] [--streams 100] [--paths start finish ...]

Each path runs in a separate process against `gcs_standin` with 50 ms per request, on stores made by `scale_store`.
"start of one process" is done by every process of a job; the other paths run once. A path is stopped after `--limit-s`,
and its line then shows the requests until then. Exponents in B are of requests and of seconds, relative to the next
smaller size. All paths take an hour; for a million blocks, making the stores alone takes minutes. Writes
build/bench-scale.json.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from scripts.bench.gcs_standin import environment, server
from scripts.bench.scale_paths import PATHS, shape_and_target
from scripts.bench.scale_store import BUILD, make_store

RESULTS = Path("build/bench-scale.json")
LEASE_STREAMS = 10_000
KINDS = ("list", "get", "put", "delete")


def measure(name: str, blocks: int, streams: int, latency_s: float = 0.05, limit_s: float = 300) -> dict[str, Any]:
    """The results of one path on one store. Raises CalledProcessError if it fails."""
    shape, target = shape_and_target(name, blocks, streams)
    result = BUILD / f"result-{os.getpid()}.json"
    with server(make_store(shape, target)) as url:
        options = {"--blocks": blocks, "--streams": streams, "--latency-s": latency_s, "--limit-s": limit_s}
        arguments = [str(part) for option in options.items() for part in option]
        command = [sys.executable, "-m", "scripts.bench.scale_paths", name, url, str(result), *arguments]
        variables = {**os.environ, **environment(url), "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, check=True, env=variables)
    return {"path": name, "blocks": blocks, "streams": streams} | json.loads(result.read_text())


def exponent(smaller: dict[str, Any], larger: dict[str, Any], key: str) -> float | None:
    """x in cost ~ B ** x; None if one of the two was stopped early."""
    if smaller["is_over_limit"] or larger["is_over_limit"]:
        return None
    costs = [_cost(cell, key) for cell in (smaller, larger)]
    if min(costs) <= 0:
        return None
    return math.log(costs[1] / costs[0]) / math.log(larger["blocks"] / smaller["blocks"])


def _cost(cell: dict[str, Any], key: str) -> float:
    return sum(cell["requests"].get(kind, 0) for kind in KINDS) if key == "requests" else cell[key]


def markdown(cells: Sequence[dict[str, Any]]) -> str:
    """The table, with one line per path and size, and exponents relative to the next smaller size."""
    lines = [
        "| path | B | S | seconds | list | get | put | delete | CPU s | peak MiB | requests ~ B^ | seconds ~ B^ |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    before = {id(later): earlier for earlier, later in pairwise(cells) if earlier["path"] == later["path"]}
    for cell in cells:
        earlier = before.get(id(cell))
        exponents = [None if earlier is None else exponent(earlier, cell, key) for key in ("requests", "seconds")]
        requests = cell["requests"]
        seconds = f"> {cell['seconds']:.0f}" if cell["is_over_limit"] else f"{cell['seconds']:.1f}"
        columns = [
            PATHS[cell["path"]].title,
            f"{cell['blocks']:,}",
            f"{cell['streams']:,}",
            seconds,
            *(f"{requests.get(kind, 0):,}" for kind in KINDS),
            f"{cell['cpu_s']:.1f}",
            str(cell["peak_mib"]),
            *("" if x is None else f"{x:.2f}" for x in exponents),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--streams", type=int, default=100, help=f"but {LEASE_STREAMS} where streams are leased")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--latency-s", type=float, default=0.05)
    parser.add_argument("--limit-s", type=float, default=300, help="per path and store")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    cells = []
    for name, blocks in product(options.paths, sorted(options.blocks)):
        streams = LEASE_STREAMS if name.startswith("lease") else options.streams
        cells.append(measure(name, blocks, streams, options.latency_s, options.limit_s))
        print(json.dumps(cells[-1]), file=sys.stderr, flush=True)
        RESULTS.write_text(json.dumps(cells, indent=1) + "\n")
    print(markdown(cells))


if __name__ == "__main__":
    main()
