"""Stores on emulators of Google Cloud Storage and Amazon S3, also while network and service fail at random."""

import random
from collections import Counter

import numpy as np
import pytest

from pipeline.core.errors import StoreError, StoreInvalid, StoreMismatch
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.metadata import read_root
from pipeline.store.format.tables import table_key
from pipeline.store.io.options import StorageOptions
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter
from tests.conftest import SECRET
from tests.store.emulators import new_bucket
from tests.store.example_store import (
    Image,
    blocks,
    commit_block,
    comparable_image,
    copy_store,
    layout,
    metadata,
    read_image,
    stored_tokens,
    write_store,
)
from tests.store.fault_proxy import CONTENT_FAULTS, NETWORK_FAULTS, Fault, FaultProxy

MAX_RUNS = 40
IMPATIENT = StorageOptions(retries=2, retry_delay_s=0.01)  # some runs end with an error
WRITE = {"gs": "POST", "s3": "PUT"}  # the method of a request that writes an object


@pytest.fixture(params=["gs", "s3"])
def service(request, monkeypatch) -> tuple[str, FaultProxy]:
    """The URL for a new store, and the proxy in front of the service. Missing objects are read again at once."""
    monkeypatch.setattr("pipeline.store.io.storage._REREAD_DELAYS_S", (0.0,))
    proxy = request.getfixturevalue("gcs" if request.param == "gs" else "s3")
    return f"{new_bucket(request.param, proxy.backend)}/some/store", proxy


def requests(proxy: FaultProxy, path: str) -> Counter[tuple[str, str]]:
    """The number of requests to objects of the store by method and key."""
    prefix = path.split("/", 3)[3] + "/"
    return Counter(
        {(method, key[len(prefix) :]): n for (method, key), n in proxy.requests.items() if key.startswith(prefix)}
    )


def test_a_store_is_written_extended_verified_and_read(service, tmp_path):
    """Its objects are those of a local store, without credentials."""
    path, _ = service
    assert read_root(Storage.open(path)) is None
    write_store(path, finish=False, max_blocks=1)
    assert ActivationStore.open(path).num_tokens == stored_tokens(1)
    write_store(path, max_blocks=1)
    assert verify_store(path) == []
    write_store(path)
    assert verify_store(path) == []
    store = ActivationStore.open(path)
    assert store.complete
    batches = store.batches("blocks.1.resid_post", 50, shuffle=True)
    assert sum(len(batch.tokens) for batch in batches) == stored_tokens()
    with pytest.raises(StoreMismatch):
        StoreWriter.open(path, metadata(tokenizer={"sha256": "other"}), layout())
    write_store(str(tmp_path), max_blocks=1)
    write_store(str(tmp_path))
    assert comparable_image(path) == comparable_image(str(tmp_path))
    assert [key for key, content in read_image(path).items() if SECRET.encode() in content] == []


def test_a_block_takes_one_write_per_object_and_no_reads(service):
    path, proxy = service
    writer = StoreWriter.open(path, metadata(), layout())
    writer.streams.all()
    block = next(blocks(0))
    proxy.reset()
    commit_block(writer, block)
    keys = [layout().shard_key(spec, 0, 0) for spec in layout().all_arrays]
    keys += [table_key(0, 0), block.record.key]
    expected = {(WRITE[path[:2]], key): 1 for key in keys}
    if path.startswith("s3"):  # TensorStore asks services other than Amazon's before it writes
        expected |= {("HEAD", key): 1 for key in keys}
    assert requests(proxy, path) == expected


def test_exhausted_retries_name_the_object_and_the_store_resumes(service):
    path, proxy = service
    impatient = Storage.open(path, IMPATIENT)
    block = next(blocks(0))
    message = f"^{path}/.*: ABORTED: .*All 2 retry attempts failed.*run the same"
    for fault in [fault for fault in NETWORK_FAULTS if fault is not Fault.hang]:
        writer = StoreWriter.open(impatient, metadata(store={"compression": "none"}), layout())
        proxy.reset(rate=1, kinds=[fault])
        with pytest.raises(StoreError, match=message) as caught:
            commit_block(writer, block)
        assert caught.value.exit_code == 1
        assert SECRET not in str(caught.value)
        if fault in (Fault.too_many_requests, Fault.unavailable):  # curl itself retries some closed connections
            assert max(proxy.requests.values()) == 3
        proxy.reset()
        assert ActivationStore.open(path).num_tokens == 0
    write_store(path)
    assert verify_store(path) == []


def test_a_service_that_does_not_answer_is_given_up(gcs):
    """After TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS, which is 3 in the tests."""
    path = new_bucket("gs", gcs.backend)
    storage = Storage.open(path, StorageOptions(retries=0))
    gcs.reset(rate=1, kinds=[Fault.hang], hang_s=50)  # then the connection closes, which is another error
    with pytest.raises(StoreError, match="Timeout was reached"):
        storage.read("key")


def test_a_reader_survives_wrong_answers_and_never_returns_them(s3, monkeypatch):
    """TensorStore would read a missing object as zeros."""
    monkeypatch.setattr("pipeline.store.io.storage._REREAD_DELAYS_S", (0.0,) * 50)  # for 15 % of all answers
    path = f"{new_bucket('s3', s3.backend)}/store"
    copy_store(path)
    store = ActivationStore.open(path)
    names, options = [key.name for key in store.keys], {"shuffle": True, "seed": 3, "buffer_mib": 0.001}

    def contents(store: ActivationStore) -> list:
        batches = store.batches(names, 16, **options)
        found = [values for batch in batches for values in (batch.tokens, *batch.activations.values())]
        found += [store.read(key, store.rows) for key in store.keys]
        return [*found, store.read_tokens(store.rows).documents, store.documents().to_pylist()]

    expected = contents(store)
    for kinds in (*([kind] for kind in CONTENT_FAULTS), CONTENT_FAULTS):
        s3.reset(rate=0.15, seed=5, kinds=kinds)
        storage = Storage.open(path)
        again = ActivationStore.open(storage)
        for values, quiet in zip(contents(again), expected, strict=True):
            np.testing.assert_array_equal(values, quiet, err_msg=str(kinds))
        assert s3.faults.total() > 10


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Image:
    path = str(tmp_path_factory.mktemp("clean") / "store")
    write_store(path)
    return comparable_image(path)


def assert_survives(scheme: str, proxy: FaultProxy, seed: int, clean: Image) -> tuple[int, int]:
    """Runs until the store is finished, as a launcher does. Returns the numbers of runs and faults."""
    path = f"{new_bucket(scheme, proxy.backend)}/store"
    proxy.reset(rate=random.Random(seed).uniform(0.02, 0.4), seed=seed)
    runs = 1
    while (error := run(path)) is not None:
        assert error.exit_code == 1
        assert str(error).startswith(path)
        assert "run the same command again" in str(error)
        runs += 1
        assert runs <= MAX_RUNS
    faults = proxy.faults.total()
    proxy.reset()
    assert comparable_image(path) == clean
    assert verify_store(path) == []
    return runs, faults


def run(path: str) -> StoreError | None:
    try:
        write_store(Storage.open(path, IMPATIENT))
    except StoreError as error:
        return error
    return None


@pytest.mark.parametrize(("scheme", "seed"), [("gs", 0), ("s3", 1)])
def test_a_store_written_through_faults_equals_a_clean_one(scheme, seed, clean, request):
    _, faults = assert_survives(scheme, request.getfixturevalue("gcs" if scheme == "gs" else "s3"), seed, clean)
    assert faults


@pytest.mark.parametrize("times", [1, 3])
def test_a_root_that_seems_missing_at_first_is_found(times, s3):
    path = f"{new_bucket('s3', s3.backend)}/store"
    expected = write_store(path, finish=False).metadata
    s3.reset(missing={"store/zarr.json": times})
    assert StoreWriter.open(path, expected, layout()).metadata == expected
    assert s3.faults.total() == times


def test_a_missing_root_is_requested_five_times(s3, monkeypatch):
    monkeypatch.setattr("pipeline.store.io.storage._REREAD_DELAYS_S", (0.0,) * 4)
    path = f"{new_bucket('s3', s3.backend)}/store"
    s3.reset()
    with pytest.raises(StoreInvalid, match="no activation store"):
        ActivationStore.open(path)
    assert s3.requests["GET", "store/zarr.json"] == 5


@pytest.mark.slow
def test_fifty_stores_written_through_faults_equal_clean_ones(gcs, s3, clean):
    """Each with another rate and order of faults."""
    found = [assert_survives(*((("gs", gcs), ("s3", s3))[seed % 2]), seed, clean) for seed in range(100, 150)]
    runs, faults = (sum(column) for column in zip(*found, strict=True))
    print(f"50 stores, {runs} runs, {faults} faults")
    assert runs > 50  # some ended with an error and were resumed
