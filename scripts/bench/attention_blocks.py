"""Prints docs/performance.md's table of the blocks that splash attention skips in packed rows. Arithmetic alone.

python -m scripts.bench.attention_blocks
"""

import numpy as np
from jaxtyping import Int32

from pipeline.config.choices import LongDocuments
from pipeline.data.packing import fill, pack, windows
from pipeline.models.attention.splash import block_size, blocks_to_run

NUM_ROWS, SIGMA = 64, 1.0  # sigma: standard deviation of the logarithm of a document's length


def packed_segments(mean_tokens: float, length: int) -> Int32[np.ndarray, "R T"]:
    """The segments of rows that a job fills with documents of log-normal lengths. Long ones are split."""
    random = np.random.default_rng(0)
    num_documents = int(2 * NUM_ROWS * length / mean_tokens) + NUM_ROWS
    lengths = random.lognormal(np.log(mean_tokens) - SIGMA**2 / 2, SIGMA, num_documents).astype(int) + 1
    sizes = [end - begin for n in lengths for begin, end in windows(int(n), length, LongDocuments.split)]
    placement = pack(np.array(sizes), NUM_ROWS, length)
    tokens = [np.zeros(size, np.int32) for size in sizes[: placement.num_pieces]]
    return fill(placement, tokens, np.arange(placement.num_pieces), length).segments


def skipped_share(segments: Int32[np.ndarray, "R T"], block: int) -> float:
    """Of the blocks on and below the diagonal: what is left is what causal attention costs."""
    num_rows, length = segments.shape
    causal = np.tri(length // block, dtype=bool)
    key_blocks = np.broadcast_to(np.arange(length // block), causal.shape)
    runs, _ = blocks_to_run(segments, causal, key_blocks, block)
    return 1 - float(runs.sum()) / (num_rows * causal.sum())


def table(lengths: tuple[int, ...] = (2048, 4096, 8192, 32768)) -> list[str]:
    """A line for each length of rows and size of blocks."""
    lines = []
    for length in lengths:
        for block in sorted({512, block_size(length, item_bytes=2)}):
            shares = [skipped_share(packed_segments(mean, length), block) for mean in (400, 1000)]
            lines.append(f"| {length:,} | {block:,} | " + " | ".join(f"{share:.2f}" for share in shares) + " |")
    return lines


if __name__ == "__main__":
    print(*table(), sep="\n")
