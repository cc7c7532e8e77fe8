import pytest

from pipeline.cli import compose
from pipeline.errors import ConfigError

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("data.path", f"https://somebody:{SECRET}@example.org/texts"),
        ("data.path", f"https://example.org/a.parquet?X-Amz-Date=1&X-Amz-Signature={SECRET}"),
        ("model.path", f"https://example.org/model?sv=1&sig={SECRET}"),
        ("store.path", f"s3://somebody:{SECRET}@bucket/store"),
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(key, url):
    with pytest.raises(ConfigError, match=f"{key} has a URL with credentials") as caught:
        compose(["data=fineweb", f'{key}="{url}"'])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "path", ["hf://datasets/owner/name@refs%2Fpr%2F1/data", "gs://bucket/a b", "/home/me@work/key=3/a.parquet"]
)
def test_other_paths_are_taken_as_they_are(path):
    assert compose(["data=fineweb", f'data.path="{path}"']).data.path == path
