"""Stores of every kind for the damage fuzzer, as images.

Real jobs with the bundled model make them, in a second or two each.
"""

import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.planning import host_memory
from pipeline.store.indexes.ids import index_ids
from pipeline.store.io.storage import Storage
from tests.jobs import run_first_stream, run_here, write_model_of_zeros
from tests.models.sae_files import write_saelens
from tests.store.example_store import Image, read_image

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
KINDS = tuple(OVERRIDES)
SAMPLED_KINDS = ("int8", "decode_unfinished")  # together they have every kind of object


@dataclass(frozen=True)
class Specimen:
    """A sound store of one kind. older: its earlier states. command: the overrides that made it, except its path."""

    kind: str
    image: Image
    command: tuple[str, ...] = ()
    older: tuple[Image, ...] = ()


def make_specimen(kind: str, folder: Path) -> Specimen:
    """Makes a store of this kind in `folder`, which keeps its text."""
    text, path = folder / "text", folder / kind
    if not text.exists():
        _write_text(text)
    command = (f"data.path={text}", *_BASE, *OVERRIDES[kind])
    if kind == "zeros":
        command += (f"model.path={write_model_of_zeros(folder / 'model')}",)
    if kind == "features":
        sae = write_saelens(folder / "sae", "jumprelu", np.random.default_rng(0), num_inputs=128).folder
        command += (f"capture.encode={{blocks.1.resid_post: {sae}}}",)
    older = ()
    if kind == "extended":
        run_here(*command, f"store.path={path}", "run.max_tokens=300")
        index_ids(Storage.open(path))
        older = (read_image(str(path)),)
    if kind.endswith("unfinished"):
        run_first_stream(*command, f"store.path={path}")
        return Specimen(kind, read_image(str(path)))
    with pytest.MonkeyPatch.context() as patch:
        if kind == "divided":
            patch.setattr(host_memory, "LARGEST_SHARD_BYTES", 0)
        run_here(*command, f"store.path={path}")
    if kind in ("extended", "int8"):
        index_ids(Storage.open(path))
    return Specimen(kind, read_image(str(path)), command, older)


def _write_text(folder: Path) -> None:
    """Two files: some documents fill blocks without padding, others do not fill a row."""
    folder.mkdir()
    topics = sorted(pydoc_data.topics.topics.items())
    for file in range(2):
        lengths = (60, 2200, 300, 90, 130, 500, 100)[file:]
        chosen = topics[10 * file : 10 * file + len(lengths)]
        texts = [(text * 40)[:length] for (_, text), length in zip(chosen, lengths, strict=True)]
        pq.write_table(pa.table({"text": texts, "id": [name for name, _ in chosen]}), folder / f"{file}.parquet")
