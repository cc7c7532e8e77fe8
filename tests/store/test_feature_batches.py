"""SAE features in batches and documents of stores with and without activations."""

from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from pipeline.core.errors import StoreError
from pipeline.store import ActivationStore, FeatureBatch, TokenFilter, open_aligned
from pipeline.store.format.layout import ArraySpec, StoreLayout, feature_specs
from pipeline.store.read.buffers import reading_order
from pipeline.store.read.options import BatchArrays, BatchOptions
from pipeline.store.write.store_writer import StoreWriter
from tests.store.example_store import (
    CAPTURE,
    NUM_STREAMS,
    Block,
    activation,
    all_tokens,
    blocks,
    commit_block,
    layout,
    metadata,
    token_ids,
    tokens_of,
)

ARRAY, ENCODED = "embed", "blocks.1.resid_post"
WIDTH = 40
ENCODERS = (  # name, number of stored features, dtype
    (f"{ENCODED}.wide", 5, "bfloat16"),
    (f"{ENCODED}.narrow", 3, "float32"),
)
ALL_TOKENS_OF_A_BLOCK = (1, 3)  # documents without features; Zarr then stores no object
TINY_MIB = 0.001  # a few pieces of a block


def features_of(documents: np.ndarray, tokens: np.ndarray, top: int) -> dict[str, np.ndarray]:
    """Features [..., top] that identify the token. Some tokens have none, the others 1 to 7."""
    none_fires = (tokens % 4 == 0) | np.isin(documents, ALL_TOKENS_OF_A_BLOCK)
    n_active = np.where(none_fires, 0, tokens % 7 + 1).astype(np.int32)
    rank = np.arange(top)
    fires = rank < n_active[..., None]
    index = (documents[..., None] * 3 + tokens[..., None] + 11 * rank) % WIDTH
    value = 20 - rank + tokens[..., None] % 8 / 8
    return {
        "index": np.where(fires, index, -1).astype(np.int32),
        "value": np.where(fires, value, 0),
        "n_active": n_active,
    }


def with_features(block: Block, shape: StoreLayout) -> Block:
    valid = block.arrays["segments"] > 0
    arrays = {name: block.arrays[name] for name in ("tokens", "segments", "positions", "documents")}
    arrays |= {spec.name: block.arrays[spec.name] for spec in shape.arrays}
    for name, top, _ in ENCODERS:
        for part, values in features_of(arrays["documents"], arrays["tokens"], top).items():
            spec = next(spec for spec in shape.outputs if spec.name == f"features.{name}.{part}")
            stored = np.full(shape.shard_shape(spec), spec.fill, spec.dtype)
            stored[valid] = values[valid]
            arrays[spec.name] = stored
    return replace(block, arrays=arrays)


def write(path: str, keeps_activations: bool) -> str:
    plain = layout()
    kept = tuple(spec for spec in plain.arrays if spec.name == ARRAY and keeps_activations)
    specs = (feature_specs(f"features.{name}", top, dtype, "position") for name, top, dtype in ENCODERS)
    shape = replace(plain, arrays=kept, outputs=tuple(spec for three in specs for spec in three))
    encode = [
        {"features": f"features.{name}", "array": ENCODED, "width": WIDTH, "top": top, "dtype": dtype}
        for name, top, dtype in ENCODERS
    ]
    capture = CAPTURE | {"arrays": [spec.name for spec in kept], "encode": encode}
    writer = StoreWriter.open(path, metadata(capture=capture), shape)
    for stream in range(NUM_STREAMS):
        for block in blocks(stream):
            commit_block(writer, with_features(block, shape))
    writer.finish()
    return path


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> ActivationStore:
    """A store of features and activations."""
    return ActivationStore.open(write(str(tmp_path_factory.mktemp("both")), keeps_activations=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> ActivationStore:
    """A store of features without activations."""
    return ActivationStore.open(write(str(tmp_path_factory.mktemp("alone")), keeps_activations=False))


def as_float32(values) -> np.ndarray:
    return np.asarray(values.float() if hasattr(values, "float") else values).astype(np.float32)


def assert_is_of_tokens(features: Mapping[str, FeatureBatch], documents: np.ndarray, tokens: np.ndarray) -> None:
    assert list(features) == [name for name, *_ in ENCODERS]
    for name, top, _ in ENCODERS:
        for part, values in features_of(documents, tokens, top).items():
            np.testing.assert_array_equal(as_float32(getattr(features[name], part)), values)


@pytest.mark.parametrize("stack", [False, True])
def test_features_come_with_activations(both, stack):
    outputs = (f"features.{ENCODED}.wide.n_active", f"features.{ENCODED}.narrow.index")
    options = {"shuffle": True, "features": True, "stack": stack, "outputs": outputs, "buffer_mib": TINY_MIB}
    batches = list(both.batches([ARRAY], 32, token_filter=TokenFilter(skip_first=1), **options))
    for batch in batches:
        assert_is_of_tokens(batch.features, batch.documents, batch.tokens)
        values = batch.activations[:, 0] if stack else batch.activations[ARRAY]
        token = values[:, 1].astype(int)  # the example stores it there
        np.testing.assert_array_equal(batch.tokens, token_ids(batch.documents, token))
        np.testing.assert_array_equal(values, activation(ARRAY, batch.documents, token))
        assert list(batch.outputs) == list(outputs)
        np.testing.assert_array_equal(batch.outputs[outputs[0]], batch.features[f"{ENCODED}.wide"].n_active)
        np.testing.assert_array_equal(batch.outputs[outputs[1]], batch.features[f"{ENCODED}.narrow"].index)
    rows = both.read_tokens(both.rows)
    kept = rows.positions[rows.segments > 0] > 0
    expected = [pair for pair, is_kept in zip(all_tokens(), kept, strict=True) if is_kept]
    assert sorted(tokens_of(batches)) == sorted(expected)


def test_batches_have_the_features_of_rows_and_documents(both, alone):
    for store, keys in ((both, ARRAY), (alone, [])):
        [batch] = store.batches(keys, 1000, features=True)
        valid = store.read_tokens(store.rows).segments > 0
        documents = [store.document(number) for number in sorted(set(store.documents()["document"].to_pylist()))]
        outputs = store.read_outputs(store.rows)
        for name, features in batch.features.items():
            in_order = np.argsort(batch.documents, kind="stable")
            for part in ("index", "value", "n_active"):
                values = getattr(features, part)
                np.testing.assert_array_equal(values, outputs[f"features.{name}.{part}"][valid])
                of_documents = np.concatenate([getattr(document.features[name], part) for document in documents])
                np.testing.assert_array_equal(values[in_order], of_documents)
        for document in documents:
            numbers = np.full(len(document.tokens), document.document)
            assert_is_of_tokens(document.features, numbers, document.tokens)
            assert list(document.outputs) == list(outputs)
            assert list(document.activations) == [key.name for key in store.keys]


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_dense_and_csr_are_the_same_matrix(alone, framework):
    sparse = pytest.importorskip("scipy.sparse")
    pytest.importorskip(framework)
    for batch in alone.batches([], 1000, features=True, framework=framework):
        documents, tokens = np.asarray(batch.documents), np.asarray(batch.tokens)
        assert_is_of_tokens(batch.features, documents, tokens)
        for name, top, dtype in ENCODERS:
            features = batch.features[name]
            dense = features.dense()
            assert type(dense) is type(features.value)
            assert str(dense.dtype).removeprefix("torch.") == ("float32" if framework == "numpy" else dtype)
            wanted = np.zeros((len(tokens), WIDTH), np.float32)
            expected = features_of(documents, tokens, top)
            for row, (index, value) in enumerate(zip(expected["index"], expected["value"], strict=True)):
                wanted[row, index[index >= 0]] = value[index >= 0]
            np.testing.assert_array_equal(as_float32(dense), wanted)
            assert features.csr()[0].dtype == np.float32
            matrix = sparse.csr_matrix(features.csr(), shape=wanted.shape)
            assert matrix.has_canonical_format
            np.testing.assert_array_equal(matrix.toarray(), wanted)


def test_dense_and_csr_handle_no_feature_and_no_token():
    index, value = np.full((2, 3), -1, np.int32), np.zeros((2, 3), ml_dtypes.bfloat16)
    for tokens in (0, 2):
        features = FeatureBatch(index[:tokens], value[:tokens], np.zeros(tokens, np.int32), WIDTH)
        assert features.dense().shape == (tokens, WIDTH)
        assert not features.dense().any()
        data, indices, indptr = features.csr()
        assert len(data) == len(indices) == 0
        assert indptr.tolist() == [0] * (tokens + 1)


@pytest.mark.parametrize(
    ("width", "keys", "piece_rows", "pieces_per_buffer"),
    [
        (4096, ["embed"], 1, 31),  # rows of 8 MiB, with 144 KiB of features
        (4096, [], 84, 21),  # rows of 96 KiB and 48 KiB in chunks of 4 rows; 85 rows would have less than 8 MiB
        (2, ["embed"], 128, 13),  # rows of 4 KiB in chunks of 128 rows, with 18 MiB of features
    ],
)
def test_pieces_are_whole_chunks_of_activations_or_of_features(alone, width, keys, piece_rows, pieces_per_buffer):
    specs = feature_specs("features.embed", 24, "bfloat16", "position")
    shape = StoreLayout(1, 256, 1024, (ArraySpec("embed", "bfloat16", width),), outputs=specs)
    arrays = BatchArrays(shape, tuple(keys), features={"features.embed": WIDTH})
    order = reading_order(alone.blocks, [arrays], BatchOptions(8, features=True, shuffle=True))
    assert (order.piece_rows, order.pieces_per_buffer) == (piece_rows, pieces_per_buffer)


def test_aligned_stores_have_features(both, alone):
    aligned = open_aligned([both, alone])
    batches = list(aligned.batches([ARRAY, []], 32, features=True, shuffle=True))
    assert sorted(tokens_of(batches)) == sorted(all_tokens())
    for batch in batches:
        assert batch.activations[0].shape == (len(batch.tokens), 4)
        assert batch.activations[1] == {}
        for features in batch.features:
            assert_is_of_tokens(features, batch.documents, batch.tokens)


def test_missing_features_and_activations_are_refused(both, alone, read_only):
    with pytest.raises(StoreError, match="has no features \\(capture.encode\\). Remove features=True."):
        ActivationStore.open(read_only).batches(ARRAY, 8, features=True)
    for store, has in ((both, ARRAY), (alone, "features only: use batches\\(\\[\\], ..., features=True\\)")):
        with pytest.raises(StoreError, match=f"keys is empty; .* has {has}."):
            store.batches([], 8)
        with pytest.raises(StoreError, match=f"has no array '{ENCODED}', or several: it has {has}."):
            store.batches(ENCODED, 8, features=True)
    with pytest.raises(ValueError, match="stack=True needs equal widths and dtypes, got {}."):
        alone.batches([], 8, features=True, stack=True)
