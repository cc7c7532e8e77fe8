import pytest

from pipeline.core.errors import ConfigError
from pipeline.planning.slice.chips import CHIPS, parse_slice

SLICES = {
    "v5e-1": ("v5e:1x1", 1, 1),
    "v5e-4": ("v5e:2x2", 4, 1),
    "v5e-8": ("v5e:2x4", 8, 1),  # a virtual machine of eight chips; machines of larger slices have four
    "v6e-8": ("v6e:2x4", 8, 1),
    "v6e-16": ("v6e:4x4", 16, 4),
    "v5litepod-64": ("v5e:8x8", 64, 16),
    "v5e-256": ("v5e:16x16", 256, 64),
    "v6e-32": ("v6e:4x8", 32, 8),
    "v4-8": ("v4:2x2x1", 4, 1),  # the number counts cores, two per chip
    "v4-16": ("v4:2x2x2", 8, 2),
    "v5p-128": ("v5p:4x4x4", 64, 16),
    "v5p-64": ("v5p:2x4x4", 32, 8),
    "v5p:4x4x12": ("v5p:4x4x12", 192, 48),
}


@pytest.mark.parametrize(("name", "expected"), SLICES.items())
def test_names_of_slices_give_their_chips_and_hosts(name: str, expected: tuple[str, int, int]) -> None:
    tpu_slice = parse_slice(name)
    assert (tpu_slice.name, tpu_slice.num_chips, tpu_slice.num_hosts) == expected


REFUSED = {
    "v7x-64": "Set it to a TPU slice.*v4, v5e, v5p, v6e",
    "h100-8": "Set it to a TPU slice",
    "v5e": "Set it to a TPU slice",
    "v5e-0": "Give the shape, e.g. v5e:4x4",
    "v5e-12": "Give the shape",
    "v5p-7": "Give the shape, e.g. v5p:4x4x4",
    "v5e:4x4x4": "have 2 dimensions",
    "v4:8x8": "have 3 dimensions",
}


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_slice(name)


def test_critical_tokens_match_the_scaling_book() -> None:
    """The book has 240 for v5e and 560 for v6e."""
    assert round(CHIPS["v5e"].critical_tokens) == 241
    assert round(CHIPS["v6e"].critical_tokens) == 560
