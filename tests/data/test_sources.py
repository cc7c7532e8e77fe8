from dataclasses import fields
from pathlib import Path

import hydra
import pytest
import yaml
from hydra.errors import ConfigCompositionException
from material import word_tokenizer, write_parquet

from pipeline.config.checks import run_config
from pipeline.config.hydra_schemas import register
from pipeline.config.schema import ArcData, HfData, ParquetData
from pipeline.core.errors import ConfigError
from pipeline.data.arc.source import ArcSource
from pipeline.data.documents import DOCUMENT_SCHEMA, Source
from pipeline.data.hf import HfSource
from pipeline.data.parquet import ParquetSource
from pipeline.data.sources import open_source

CONFIGS = Path(__file__).parents[2] / "configs"
CLASSES = {
    "fineweb": ParquetData,
    "fineweb_edu": ParquetData,
    "arc": ArcData,
    "ai2_arc": HfData,
    "hf": HfData,
}


def compose(name: str, *overrides: str):
    register()
    with hydra.initialize_config_dir(str(CONFIGS), version_base=None):
        composed = hydra.compose("config", [f"data={name}", "model.path=m", "store.path=s", *overrides])
    return run_config(composed).data


@pytest.mark.parametrize(("name", "config"), CLASSES.items())
def test_a_config_file_states_only_what_differs_from_its_class(name, config):
    stated = yaml.safe_load((CONFIGS / "data" / f"{name}.yaml").read_text())
    del stated["defaults"]
    defaults = {field.name: field.default for field in fields(config)}
    assert stated.keys() <= defaults.keys()
    assert all(value != defaults[key] for key, value in stated.items())
    assert isinstance(compose(name, "data.path=p"), config)
    if name in ("arc", "hf"):
        assert compose(name, "data.path=p") == config(source=name, path="p")


@pytest.mark.parametrize("name", ["fineweb", "fineweb_edu", "ai2_arc", "hf"])
def test_only_augmentations_have_a_seed(name):
    with pytest.raises(ConfigCompositionException, match="data.seed"):
        compose(name, "data.path=p", "data.seed=1")
    assert compose("arc", "data.path=p", "data.augmentations=2", "data.seed=1").seed == 1


@pytest.mark.parametrize(
    ("name", "kind"), [("fineweb", ParquetSource), ("fineweb_edu", ParquetSource), ("arc", ArcSource), ("hf", HfSource)]
)
def test_the_config_determines_the_source(tmp_path, name, kind):
    write_parquet(str(tmp_path / "a.parquet"), {"text": ["w2"], "id": ["1"]})
    (tmp_path / "a.json").write_text('{"train": [], "test": [{"input": [[1]]}]}')
    path = tmp_path / "a.json" if name == "arc" else tmp_path / "a.parquet"
    overrides = ["data.path=parquet", f"data.data_files={path}"] if name == "hf" else [f"data.path={path}"]
    source = open_source(compose(name, *overrides), word_tokenizer())
    assert isinstance(source, kind)
    assert isinstance(source, Source)
    assert not set(source.info_schema.names) & set(DOCUMENT_SCHEMA.names)
    assert [document.index for document in source.read(0, 0)] == [0]


def test_a_source_with_the_keys_of_another_is_refused():
    with pytest.raises(ConfigError, match=r"data.source=arc with the keys of ParquetData. Choose the data with"):
        open_source(ParquetData(source="arc", path="p"), word_tokenizer())
