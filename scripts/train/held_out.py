"""The demo's documents that are held out from training the bundled weights: one in twenty, by name."""

import hashlib

from scripts.demo.make_demo_text import Text

HELD_OUT_SHARE = 0.05


def is_held_out(text: Text) -> bool:
    return hashlib.sha256(text.name.encode()).digest()[0] < 256 * HELD_OUT_SHARE
