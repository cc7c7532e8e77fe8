"""Blocks whose values in an array are all 0: Zarr stores no object, which is not taken for damage."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np
import pytest

from pipeline.core.errors import StoreInvalid
from pipeline.export import main as export
from pipeline.inspect import main as inspect
from pipeline.store import ActivationStore
from pipeline.store.check.scope import Level, Scope
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.commits import commit_key
from pipeline.store.format.layout import StoreLayout, output_specs, scale_spec
from pipeline.store.format.scaled import scale_name
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter
from tests.store.emulators import new_bucket
from tests.store.example_store import CAPTURE, NUM_STREAMS, Block, blocks, commit_block, layout, metadata
from tests.store.test_object_storage import requests

NAME, OTHER = "blocks.3.resid_post", "blocks.1.resid_post"
EVERY_BLOCK = [(stream, block.record.block) for stream in range(NUM_STREAMS) for block in blocks(stream)]
ONE_BLOCK = [(1, 0)]


@dataclass(frozen=True)
class Case:
    """A kind of store. The arrays `zeros` are 0 in some blocks."""

    zeros: Sequence[str]
    dtype: str = "bfloat16"
    compression: str = "none"
    outputs: Sequence[str] = ()

    @property
    def layout(self) -> StoreLayout:
        plain = layout(self.compression, self.dtype)
        scales = tuple(scale_spec(spec, 1) for spec in plain.arrays) if self.dtype == "int8" else ()
        hooked = (replace(spec, attributes={"d": spec.width, "hook_name": spec.name}) for spec in plain.arrays)
        outputs = output_specs(self.outputs, 1, "position")
        return replace(plain, arrays=tuple(hooked), scales=scales, outputs=outputs)

    def blocks(self, places: Sequence[tuple[int, int]]) -> Iterator[Block]:
        """All blocks of the store; at these places (stream, block) its arrays are 0."""
        for stream, number in EVERY_BLOCK:
            block = list(blocks(stream, dtype=self.dtype))[number]
            valid = block.arrays["segments"] > 0
            extra = {spec.name: np.zeros(self.layout.shard_shape(spec), spec.dtype) for spec in self._extra_arrays}
            for name, values in extra.items():
                values[valid] = -1 if name == "top_logprobs" else 1
            arrays = block.arrays | extra
            if (stream, number) in places:
                arrays |= {name: np.zeros_like(arrays[name]) for name in self.zeros}
            yield replace(block, arrays=arrays)

    @property
    def _extra_arrays(self):
        return (*self.layout.scales, *self.layout.outputs)

    def write(self, path: str, places: Sequence[tuple[int, int]], streams: Sequence[int] = range(NUM_STREAMS)) -> str:
        capture = CAPTURE | {"dtype": self.dtype, "outputs": list(self.outputs), "top_logprobs": 1}
        writer = StoreWriter.open(path, metadata(store={"compression": self.compression}, capture=capture), self.layout)
        for block in self.blocks(places):
            if block.record.stream in streams:
                commit_block(writer, block)
        writer.finish(force=True)
        return path

    def key(self, name: str, place: tuple[int, int]) -> str:
        return self.layout.shard_key(next(spec for spec in self.layout.all_arrays if spec.name == name), *place)


CASES = {
    "activations": Case([NAME]),
    "compressed": Case([NAME], compression="zstd"),
    "int8": Case([NAME, scale_name(NAME)], dtype="int8"),
    "outputs": Case(["entropy", "top_logprobs", "top_ids"], outputs=["entropy", "top_logprobs"]),
    "token ids": Case(["tokens", NAME, OTHER]),
}


def found(path: str, level: Level = Level.all) -> list[str]:
    return [str(problem) for problem in verify_store(path, scope=Scope(level=level))]


def listed(*columns: np.ndarray) -> np.ndarray:
    """[n, ...] in float32, a row per token: id, position, document, values."""
    return np.concatenate([np.reshape(column, (len(column), -1)).astype(np.float32) for column in columns], axis=1)


def expected(case: Case, places: Sequence[tuple[int, int]]) -> dict[tuple[int, int], np.ndarray]:
    """The expected rows of `listed` by block, in row order."""
    names = (NAME, OTHER, *(spec.name for spec in case.layout.outputs))
    tokens = {}
    for block in case.blocks(places):
        valid = block.arrays["segments"] > 0
        arrays = {name: values[valid] for name, values in block.arrays.items()}
        for name in (NAME, OTHER) if case.layout.scales else ():
            arrays[name] = arrays[name] * arrays[scale_name(name)]
        sides = (arrays[name] for name in ("tokens", "positions", "documents"))
        number = case.layout.shard_index(block.record.stream, block.record.block)
        tokens[number] = listed(*sides, *(arrays[name] for name in names))
    return dict(sorted(tokens.items()))


def by_rows(store: ActivationStore) -> np.ndarray:
    rows = store.read_tokens(store.rows)
    valid = rows.segments > 0
    values = [store.read(layer, "resid_post", store.rows)[valid] for layer in (3, 1)]
    values += [output[valid] for output in store.read_outputs(store.rows).values()]
    return listed(rows.tokens[valid], rows.positions[valid], rows.documents[valid], *values)


def by_documents(store: ActivationStore) -> np.ndarray:
    parts = []
    for number in sorted(set(store.documents["document"].to_pylist())):
        document = store.document(number)
        numbers = np.full(len(document.tokens), number)
        values = (document.activations[NAME], document.activations[OTHER], *document.outputs.values())
        parts.append(listed(document.tokens, document.positions, numbers, *values))
    return np.concatenate(parts)


def by_batches(**options) -> Callable[[ActivationStore], np.ndarray]:
    def read(store: ActivationStore) -> np.ndarray:
        outputs = tuple(store.read_outputs(store.rows))
        batches = list(store.batches([NAME, OTHER], 16, outputs=outputs, **options))
        if options.get("stack"):
            activations = [[batch.activations[:, 0], batch.activations[:, 1]] for batch in batches]
        else:
            activations = [[batch.activations[NAME], batch.activations[OTHER]] for batch in batches]
        sides = [(batch.tokens, batch.positions, batch.documents) for batch in batches]
        return np.concatenate(
            [
                listed(*side, *values, *batch.outputs.values())
                for side, values, batch in zip(sides, activations, batches, strict=True)
            ]
        )

    return read


def by_torch(store: ActivationStore) -> np.ndarray:
    torch_dataset = pytest.importorskip("pipeline.store.read.torch_dataset", exc_type=ImportError)
    outputs = tuple(store.read_outputs(store.rows))
    batches = torch_dataset.ActivationDataset(store.path, [NAME, OTHER], 16, outputs=outputs)
    parts = []
    for batch in batches:
        values = [values.float().numpy() for values in (*batch["activations"].values(), *batch["outputs"].values())]
        parts.append(listed(*(batch[name].numpy() for name in ("tokens", "positions", "documents")), *values))
    return np.concatenate(parts)


READERS = {
    "rows": by_rows,
    "documents": by_documents,
    "batches in order": by_batches(),
    "shuffled batches": by_batches(shuffle=True, buffer_mib=0.001),
    "stacked": by_batches(shuffle=True, stack=True),
    "torch": by_torch,
}


def in_one_order(tokens: np.ndarray) -> np.ndarray:
    return tokens[np.lexsort(tokens.T)]


def assert_readers_give(path: str, tokens: np.ndarray) -> None:
    for name, read in READERS.items():
        np.testing.assert_array_equal(in_one_order(read(ActivationStore.open(path))), tokens, err_msg=name)


@pytest.mark.parametrize(
    ("places", "store_path"), [(ONE_BLOCK, "local"), (EVERY_BLOCK, "memory")], indirect=["store_path"]
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_store_with_zero_blocks_is_sound_and_read_as_zeros(store_path, case, places):
    case.write(store_path, places)
    stored = set(Storage.open(store_path).list_keys())
    assert {case.key(name, at) in stored for name in case.zeros for at in places} == {False}
    assert {level: found(store_path, level) for level in Level} == {level: [] for level in Level}
    assert_readers_give(store_path, in_one_order(np.concatenate(list(expected(case, places).values()))))


@pytest.mark.parametrize("store_path", ["memory"], indirect=True)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_deleted_object_of_another_block_is_reported(store_path, case):
    """Even if the array has no objects for zero blocks."""
    case.write(store_path, ONE_BLOCK)
    for name in case.zeros:
        key = case.key(name, (0, 0))
        storage = Storage.open(store_path)
        content = storage.read(key)
        storage.write(key, None)
        for level in (Level.objects, Level.all):
            assert found(store_path, level) == [f"{key}: is missing, although the block is committed"]
        for read in (by_rows, by_batches(), by_batches(shuffle=True)):
            with pytest.raises(StoreInvalid, match=f"{key} is missing, although the block is committed"):
                read(ActivationStore.open(store_path))
        storage.write(key, content)


def test_an_object_instead_of_zeros_has_another_digest(store_path):
    case = CASES["activations"]
    case.write(store_path, ONE_BLOCK)
    storage, key = Storage.open(store_path), case.key(NAME, ONE_BLOCK[0])
    storage.write(key, storage.read(case.key(NAME, (0, 1))))
    assert found(store_path, Level.objects) == []
    [problem] = found(store_path, Level.checksums)
    assert problem.startswith(f"{key}: the digest of the values is ")


def test_an_unreadable_record_is_not_taken_for_zeros(store_path):
    case = CASES["activations"]
    case.write(store_path, ONE_BLOCK)
    storage, key = Storage.open(store_path), commit_key(*ONE_BLOCK[0])
    for content in (storage.read(key)[:-9], None):
        storage.write(key, content)
        with pytest.raises(StoreInvalid, match=key):
            list(ActivationStore.open(store_path).batches(NAME, 16))


def test_a_remote_reader_reads_the_record_of_a_block_without_object(gcs, monkeypatch):
    """Once per reader. Blocks with objects take no further requests."""
    monkeypatch.setattr("pipeline.store.io.storage._REREAD_DELAYS_S", (0.0,))
    case, asked = CASES["activations"], []
    for places in ([], ONE_BLOCK):
        path = case.write(f"{new_bucket('gs', gcs.backend)}/store", places)
        store = ActivationStore.open(path)
        gcs.reset()
        tokens = [listed(batch.tokens, batch.activations) for batch in store.batches(NAME, 64, epochs=2)]
        asked.append(requests(gcs, path))
        own = np.concatenate(list(expected(case, places).values()))[:, [0, *range(3, 9)]]
        np.testing.assert_array_equal(np.concatenate(tokens), np.concatenate([own, own]))
        assert found(path) == []
    record, shard = commit_key(*ONE_BLOCK[0]), case.key(NAME, ONE_BLOCK[0])
    listings = [{at: n for at, n in part.items() if at[1].endswith("*")} for part in asked]
    assert [sum(part.values()) for part in listings] == [0, 1]
    assert [part["GET", record] for part in asked] == [0, 1]
    others = [
        {at: n for at, n in part.items() if at[1] not in (record, shard) and at not in listings[1]} for part in asked
    ]
    assert others[0] == others[1]
    key = case.key(NAME, (0, 0))
    Storage.open(path).write(key, None)
    assert found(path, Level.objects) == [f"{key}: is missing, although the block is committed"]
    with pytest.raises(StoreInvalid, match=f"{key} is missing, although the block is committed"):
        list(store.batches(NAME, 64))


def test_zero_blocks_are_exported_and_inspected(tmp_path, capsys):
    datasets = pytest.importorskip("datasets")
    path = CASES["activations"].write(str(tmp_path / "store"), EVERY_BLOCK)
    assert export([f"store.path={path}", f"export.path={tmp_path / 'cache'}"]) == 0
    exported = datasets.load_from_disk(tmp_path / "cache").with_format("numpy")
    assert not exported[NAME][:].any()
    assert exported[OTHER][:].any()
    assert inspect([f"store.path={path}", f"inspect.html={tmp_path / 'page.html'}"]) == 0
    assert NAME in capsys.readouterr().out
