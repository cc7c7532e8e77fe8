"""A store of real activations: the bundled model on English prose, made by the main job."""

from pathlib import Path

from tests.jobs import run, write_text


def make_store(directory: Path) -> str:
    """Layers 2 and 4 of about 40,000 tokens, in blocks of a few thousand. The path of the store."""
    text = write_text(directory / "text", files=1, documents=80)
    path = str(directory / "store")
    done = run(f"data.path={text}", f"store.path={path}", "store.shard_mib=1", "run.max_tokens=40000")
    assert done.returncode == 0, done.stderr
    return path
