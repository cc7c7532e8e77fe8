"""Prints docs/performance.md's table of the blocks that splash attention skips in packed rows. Only does arithmetic.

python -m scripts.bench.attention_blocks
"""

from pipeline.models.attention.splash import block_size
from pipeline.planning.slice.packed_rows import computed_share, packed_segments


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
