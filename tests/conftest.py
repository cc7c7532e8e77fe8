"""What every test may use: the real material beside the checkout, when it is there."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real ARC tasks, English documents and the Qwen2 tokenizer. Tests that need them are skipped elsewhere."""
    if not SHARED.is_dir():
        pytest.skip("the real material (../shared) is not on this machine")
    return SHARED
