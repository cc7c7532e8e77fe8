"""Counts the requests of each path of a store's bookkeeping, for small stores: python -m scripts.bench.scale_growth

Uses one process and no latency, so that it is fast enough for tests. Prints the requests by path and number of blocks,
as JSON.
"""

import json
import os
from collections.abc import Sequence

from scripts.bench.gcs_standin import Behaviour, Objects, StandIn, environment, serving
from scripts.bench.scale_paths import PATHS, shape_and_target
from scripts.bench.scale_store import make_store

BLOCKS = (640, 1280)  # in each stream multiples of `index_step`
STREAMS = 10
MEASURED = ("start", "extend", "finish", "open", "open unfinished", "document", "document id")
KINDS = ("list", "get", "put", "delete")


def requests(names: Sequence[str], blocks: Sequence[int]) -> dict[str, dict[int, int]]:
    """Requests by path and number of blocks. TensorStore must not have been used for `gs://` before in this process."""
    stand_in = StandIn(Behaviour(latency_s=0))
    counts: dict[str, dict[int, int]] = {name: {} for name in names}
    with serving(stand_in) as url:
        os.environ.update(environment(url))
        for name in names:
            for num_blocks in blocks:
                stand_in.objects = Objects(make_store(*shape_and_target(name, num_blocks, STREAMS)))
                run = PATHS[name].prepare(num_blocks, STREAMS)
                before = stand_in.counters.copy()
                run()
                counts[name][num_blocks] = sum(stand_in.counters[kind] - before[kind] for kind in KINDS)
    return counts


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(json.dumps(requests(MEASURED, BLOCKS)))
