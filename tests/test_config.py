import re
import string

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from pipeline.cli import compose
from pipeline.errors import ConfigError
from tests.jobs import ROOT

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


def test_the_readme_names_every_character_that_needs_quotes():
    parser = OverridesParser.create()

    def survives(path: str, quote: str = "") -> bool:
        try:
            return parser.parse_override(f"data.path={quote}{path}{quote}").value() == path
        except HydraException:
            return False

    [listed] = re.findall(r"any of ``(.*?)``", (ROOT / "README.md").read_text())
    needs_quotes = {character for character in string.punctuation if not survives(f"/a{character}b")}
    assert needs_quotes == set(listed.split())
    assert all(survives(f"/a{character}b", "'" if character == '"' else '"') for character in needs_quotes)
