"""Prints docs/performance.md's table of predicted bounds for published models on TPU slices. Only does arithmetic.

python scripts/bench/predict_tpu.py
"""

import tempfile
from pathlib import Path

from published_shapes import SHAPES, write_shapes

from pipeline.core.sites import Site, activation_keys
from pipeline.models.registry import open_model
from pipeline.planning.slice.chips import parse_slice
from pipeline.planning.slice.roofline import BUCKET_WRITES_PER_S, Cost, throughput_limits

LENGTH, MFU, FILL, SHARD_BYTES = 2048, 0.4, 0.95, 128 << 20
SMALL_OBJECTS = 7  # per block: side arrays, document table, statistics, commit record


def rows() -> list[str]:
    """One line per model, choice of layers and slice."""
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        write_shapes(Path(directory))
        for name in SHAPES:
            model = open_model(f"{directory}/{name}", init="random")
            depth = model.num_layers
            for label, layers in {"3": (depth // 4, depth // 2, 3 * depth // 4), "all": tuple(range(depth))}.items():
                keys = activation_keys(layers, (Site.resid_post,))
                flops = model.flops_per_token(keys, LENGTH)
                cost = Cost(flops, 2 * len(keys) * model.width(keys[0]), FILL)
                for topology in ("v5e-64", "v6e-64"):
                    blocks_per_s = BUCKET_WRITES_PER_S / (len(keys) + SMALL_OBJECTS)
                    bytes_per_s = blocks_per_s * len(keys) * SHARD_BYTES
                    limit = throughput_limits(cost, parse_slice(topology), MFU, bytes_per_s)
                    rates = " | ".join(f"{rate / 1e3:,.0f}" for rate in limit.rates.values())
                    lines.append(
                        f"| {name} | {label} | {topology} | {cost.flops / 1e9:.2f} | {cost.stored_bytes / 1e3:.1f} | "
                        f"{rates} | {limit.binding.replace('_', ' ')} | {limit.tokens_per_s / 1e3:,.0f} |"
                    )
    return lines


if __name__ == "__main__":
    header = (
        *("model", "layers", "slice", "GFLOP/slot", "TB per 10^9 tokens"),
        *("compute", "to host", "host copy", "network", "store", "bound by", "at the limit"),
    )
    print("\n".join([f"| {' | '.join(header)} |", "|---" * len(header) + "|", *rows()]))
