"""A store written while network and service fail at random equals one written without faults."""

import random

import pytest

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.metadata import read_root
from pipeline.store.io.options import StorageOptions
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter
from tests.store.emulators import new_bucket
from tests.store.example_store import comparable_image, layout, write_store
from tests.store.fault_proxy import FaultProxy

pytestmark = pytest.mark.heavy
MAX_RUNS = 40


IMPATIENT = StorageOptions(retries=2, retry_delay_s=0.01)  # some runs end with an error


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> dict[str, bytes]:
    path = str(tmp_path_factory.mktemp("clean") / "store")
    write_store(path)
    return comparable_image(path)


def assert_survives(scheme: str, proxy: FaultProxy, seed: int, clean: dict[str, bytes]) -> tuple[int, int]:
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
@pytest.mark.parametrize("is_planned", [True, False])
def test_a_root_that_seems_missing_at_first_is_found(is_planned, times, s3):
    path = f"{new_bucket('s3', s3.backend)}/store"
    expected = write_store(path, finish=False).metadata
    s3.reset(missing={"store/zarr.json": times})
    found = (
        read_root(Storage.open(path)).metadata if is_planned else StoreWriter.open(path, expected, layout()).metadata
    )
    assert found == expected
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
