"""Stores of every kind for the damage fuzzer, as images.

Real jobs with the bundled model make them, in a second or two each.
"""

import os
import pydoc_data.topics
import signal
import tempfile
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import composing
from pipeline.core.errors import EXIT_INTERRUPTED
from pipeline.planning import host_memory
from pipeline.store.format.keys import Kind, parse_key
from pipeline.store.format.metadata import StoreRoot
from pipeline.store.io.storage import Storage
from pipeline.store.write.indexing import index_ids
from tests.jobs import run_and_signal, write_model_of_zeros
from tests.models.sae_files import write_saelens
from tests.store.example_store import Image, read_image, write_image

_BASE = (
    *("data.num_streams=2", "batch.rows=2", "batch.length=32", "capture.layers=[1,3]", "store.shard_mib=0.07"),
    "run.progress=false",
)
_GENERATE = (
    *("data=generate", "data@data.prompts=fineweb", "data.rows=4", "data.group=2", "data.prompt_length=120"),
    *("data.max_new_tokens=8", "data.on_error=skip", "data.temperature=1", "data.end_tokens=[.]"),
    "store.shard_mib=0.02",
)
OVERRIDES = {
    "bf16": (),
    "float32": ("capture.dtype=float32", "store.shard_mib=0.14"),
    "int8": ("capture.dtype=int8", "capture.scale_group=32", "store.shard_mib=0.035"),
    "int8_weights": ("model.weights_dtype=int8",),
    "divided": ("store.shard_mib=0.005",),  # a block of two rows is four store shards
    "selected": ("capture.positions=every", "capture.every=5", "store.shard_mib=0.013"),
    "zeros": ("capture.sites=[mlp_out,resid_post]",),  # the model's layer 1 has an MLP that outputs zeros
    "features": ("capture.encode_top=8", "capture.layers=[1]", "store.shard_mib=0.02"),  # no activations
    "zstd": ("store.compression=zstd",),
    "without_statistics": ("capture.statistics=false",),
    "extended": (),
    "unfinished": (),
    "generated": _GENERATE,
    "decode": (*_GENERATE, "capture.when=decode"),
    "decode_unfinished": (*_GENERATE, "capture.when=decode"),
}
_UNFINISHED = ("unfinished", "decode_unfinished")
KINDS = tuple(OVERRIDES)
SAMPLED_KINDS = ("int8", "decode_unfinished")  # together they have every kind of object


@dataclass(frozen=True)
class Specimen:
    """A sound store of one kind. `older`: its earlier states. `command`: the overrides that resume it, except its path;
    `finished`: the store that results from this."""

    kind: str
    image: Image
    older: tuple[Image, ...] = ()
    command: tuple[str, ...] = ()
    finished: Image | None = None


def make_specimen(kind: str, folder: Path, is_resumable: bool = True) -> Specimen:
    """Makes a store of this kind in `folder`, which keeps its text.

    Without `is_resumable`, the finished form of an unfinished store of decoding is not made, which saves seconds.
    """
    text, path = folder / "text", folder / kind
    if not text.exists():
        _write_text(text)
    command = (f"data.path={text}", *_BASE, *OVERRIDES[kind])
    if kind == "zeros":
        command += (f"model.path={write_model_of_zeros(folder / 'model')}",)
    if kind == "features":
        sae = write_saelens(folder / "sae", "jumprelu", np.random.default_rng(0), num_inputs=128).folder
        command += (f"capture.encode={{blocks.1.resid_post: {sae}}}",)
    before = ()
    if kind == "extended":
        _run(*command, f"store.path={path}", "run.max_tokens=300")
        index_ids(Storage.open(path))
        before = (read_image(str(path)),)
    if kind in _UNFINISHED:
        ended = run_and_signal(signal.SIGTERM, path, 3, (1, 2), *command)
        assert ended.returncode == EXIT_INTERRUPTED, ended.stdout
        before = (read_image(str(path)),)
    if not is_resumable and kind in _UNFINISHED:
        return Specimen(kind, before[0])
    with pytest.MonkeyPatch.context() as patch:
        if kind == "divided":
            patch.setattr(host_memory, "LARGEST_SHARD_BYTES", 0)
        _run(*command, f"store.path={path}")
    if kind in ("extended", "int8"):
        index_ids(Storage.open(path))
    finished = read_image(str(path))
    if kind in _UNFINISHED:
        return Specimen(kind, before[0], (_without_blocks(before[0], 1), finished), command, finished)
    return Specimen(kind, finished, before, command, finished)


@cache
def sampled_specimen(kind: str) -> Specimen:
    """A store for a few cases of damage, which no job resumes."""
    with tempfile.TemporaryDirectory() as folder:
        return make_specimen(kind, Path(folder), is_resumable=False)


def resume(specimen: Specimen, image: Image, folder: Path) -> Image:
    """The store that results when its job is run again on `image`. Raises what the job raises."""
    path = folder / uuid.uuid4().hex
    write_image(str(path), image)
    _run(*specimen.command, f"store.path={path}")
    return read_image(str(path))


def _write_text(folder: Path) -> None:
    """Two files: some documents fill blocks without padding, others do not fill a row."""
    folder.mkdir()
    topics = sorted(pydoc_data.topics.topics.items())
    for file in range(2):
        lengths = (60, 2200, 300, 90, 130, 500, 100)[file:]
        chosen = topics[10 * file : 10 * file + len(lengths)]
        texts = [(text * 40)[:length] for (_, text), length in zip(chosen, lengths, strict=True)]
        pq.write_table(pa.table({"text": texts, "id": [name for name, _ in chosen]}), folder / f"{file}.parquet")


def _run(*overrides: str) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from pipeline.job.running import run

    run(composing.compose(list(overrides)))


def _without_blocks(image: Image, first: int) -> Image:
    """An unfinished store as it was when its streams had `first` blocks: without objects of later blocks."""
    num_streams = StoreRoot.from_json(image["zarr.json"], "it").metadata.num_streams

    def is_later(key: str) -> bool:
        parsed = parse_key(key)
        if parsed is None or parsed.number is None or parsed.kind in (Kind.group,):
            return False
        return parsed.number >= first * (num_streams if parsed.kind is Kind.shard else 1)

    return {key: content for key, content in image.items() if not is_later(key)}
