"""Prints docs/performance.md's table of the blocks that splash attention skips in packed rows. Only does arithmetic.

python -m scripts.bench.attention_blocks
"""

import numpy as np
from jaxtyping import Bool, Int32

from pipeline.config.choices import LongDocuments
from pipeline.data.packing import fill, pack, windows
from pipeline.models.attention.segment_blocks import reached_blocks
from pipeline.models.attention.splash import block_size

NUM_ROWS, SIGMA = 64, 1.0  # sigma: standard deviation of the logarithm of a document's length


def packed_segments(mean_tokens: float, length: int) -> Int32[np.ndarray, "R T"]:
    """The segments of rows that a job fills with documents of log-normal lengths. Long documents are split."""
    random = np.random.default_rng(0)
    num_documents = int(2 * NUM_ROWS * length / mean_tokens) + NUM_ROWS
    lengths = random.lognormal(np.log(mean_tokens) - SIGMA**2 / 2, SIGMA, num_documents)
    lengths = np.minimum(lengths, NUM_ROWS * length).astype(int) + 1
    sizes = [end - begin for n in lengths for begin, end in windows(int(n), length, LongDocuments.split)]
    placement = pack(np.array(sizes), NUM_ROWS, length)
    tokens = [np.zeros(size, np.int32) for size in sizes[: placement.num_pieces]]
    return fill(placement, tokens, np.arange(placement.num_pieces), length).segments


def computed_share(
    segments: Int32[np.ndarray, "R T"], block: int, causal: bool = True, window: int | None = None
) -> float:
    """The share of the unmasked blocks of queries and keys (on and below the diagonal, and within the window) that a
    segment reaches."""
    num_rows, length = segments.shape
    allowed = _allowed_blocks(length // block, block, causal, window)
    return float((np.asarray(reached_blocks(segments, block)) & allowed).sum() / (num_rows * allowed.sum()))


def _allowed_blocks(num_blocks: int, block: int, causal: bool, window: int | None) -> Bool[np.ndarray, "Q Q"]:
    order = np.arange(num_blocks)
    distances = order[:, None] - order
    allowed = distances >= 0 if causal else np.ones_like(distances, bool)
    return allowed if window is None else allowed & (distances * block < window + block - 1)


def table(lengths: tuple[int, ...] = (2048, 4096, 8192, 32768)) -> list[str]:
    """Returns one line per row length and block size."""
    lines = []
    for length in lengths:
        for block in sorted({512, block_size(length, item_bytes=2)}):
            shares = [1 - computed_share(packed_segments(mean, length), block) for mean in (400, 1000)]
            lines.append(f"| {length:,} | {block:,} | " + " | ".join(f"{share:.2f}" for share in shares) + " |")
    return lines


if __name__ == "__main__":
    print(*table(), sep="\n")
