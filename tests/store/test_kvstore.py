import pytest

from pipeline.errors import ConfigError
from pipeline.store.kvstore import configure_storage, context, object_url, open_kvstore, read_key, read_keys, write_key


@pytest.fixture(autouse=True)
def defaults():
    yield
    configure_storage()


def test_the_settings_reach_tensorstore():
    configure_storage(retries=3, retry_delay_s=0.5, concurrency=7, copy_threads=2)
    spec = context().spec.to_json()
    assert spec["gcs_request_retries"] == {"max_retries": 3, "initial_delay": "500ms", "max_delay": "16s"}
    assert spec["s3_request_retries"] == spec["gcs_request_retries"]
    assert {spec[f"{kind}_concurrency"]["limit"] for kind in ("gcs_request", "s3_request", "file_io")} == {7}
    assert spec["data_copy_concurrency"] == {"limit": 2}
    write_key(open_kvstore("memory://settings"), "key", b"value")
    configure_storage()
    assert read_key(open_kvstore("memory://settings"), "key") == b"value"


@pytest.mark.parametrize("wrong", [{"retries": -1}, {"retry_delay_s": -1}, {"concurrency": 0}, {"copy_threads": 0}])
def test_what_is_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"store\.retries, retry_delay_s, concurrency or copy_threads"):
        configure_storage(**wrong)


def test_more_objects_than_are_asked_for_at_once_are_read_in_order(tmp_path):
    kvstore = open_kvstore(str(tmp_path))
    keys = [f"{i:04}" for i in range(1000)]
    for key in keys[::2]:
        write_key(kvstore, key, key.encode())
    assert list(read_keys(kvstore, keys)) == [key.encode() if i % 2 == 0 else None for i, key in enumerate(keys)]


def test_an_object_of_another_s3_service_has_a_name(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:9000")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    kvstore = open_kvstore("s3://bucket/some/store")
    spec = {"driver": "s3", "bucket": "bucket", "path": "some/store/"}
    assert kvstore.spec().to_json() == spec | {"endpoint": "http://localhost:9000", "aws_region": "eu-west-1"}
    assert object_url(kvstore, "zarr.json") == "s3://bucket/some/store/zarr.json"
