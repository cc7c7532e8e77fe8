import re
import string
from dataclasses import fields, replace

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from pipeline.config import limits
from pipeline.config import schema as config
from pipeline.config.choices import ComputeDtype
from pipeline.config.composing import PACKAGE, compose
from pipeline.core.errors import ConfigError
from tests.jobs import ROOT

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("data.path", f"https://somebody:{SECRET}@example.org/texts"),
        ("data.path", f"https://example.org/a.parquet?X-Amz-Date=1&X-Amz-Signature={SECRET}"),
        ("model.path", f"https://example.org/model?sv=1&sig={SECRET}"),
        ("data.path", f"https://example.org/a.parquet?v=1&pwd={SECRET}"),
        ("store.path", f"gs://bucket/store?auth={SECRET}"),
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
def test_other_paths_are_used_unchanged(path):
    assert compose(["data=fineweb", f'data.path="{path}"']).data.path == path


def test_the_readme_names_every_character_that_needs_quotes():
    parser = OverridesParser.create()

    def survives(path: str, quote: str = "") -> bool:
        try:
            return parser.parse_override(f"data.path={quote}{path}{quote}").value() == path
        except HydraException:
            return False

    [listed] = re.findall(r"any of\s``(.*?)``", (ROOT / "README.md").read_text())
    needs_quotes = {character for character in string.punctuation if not survives(f"/a{character}b")}
    assert needs_quotes == set(listed.split())
    assert all(survives(f"/a{character}b", "'" if character == '"' else '"') for character in needs_quotes)


def test_the_default_job_is_the_schemas_with_the_files_changes():
    text = config.ParquetData(
        source="parquet", path="build/demo/text", repo="HuggingFaceFW/fineweb", subset="sample/10BT"
    )
    assert compose([]) == config.RunConfig(
        model=config.ModelConfig(path=str(PACKAGE / "assets" / "tiny-qwen2"), dtype=ComputeDtype.float32),
        data=text,
        capture=config.CaptureConfig(layers=[2, 4]),
        store=config.StoreConfig(path="build/demo/stores/default"),
    )
    edu = compose(["data=fineweb_edu"]).data
    assert edu == replace(text, path=None, repo="HuggingFaceFW/fineweb-edu")


def test_the_configuration_file_repeats_no_default_of_the_schema():
    stated = yaml.safe_load((ROOT / "configs" / "config.yaml").read_text())
    groups = {name: values for name, values in stated.items() if name not in ("defaults", "hydra")}
    defaults = {field.name: field.default_factory() for field in fields(config.RunConfig) if field.name in groups}
    assert groups.keys() == defaults.keys()
    for name, values in groups.items():
        assert all(getattr(defaults[name], key) != value for key, value in values.items())


NUMBERS = (int, float, int | None, float | None)


def test_every_number_has_limits():
    """Without limits, a number would be used as typed: negative, huge, NaN."""
    classes = {name: getattr(config, name) for name in limits.LIMITS}
    for name, cls in classes.items():
        types = {field.name: field.type for field in fields(cls)}
        assert limits.LIMITS[name].keys() <= types.keys()
        assert {key for key, kind in types.items() if kind in NUMBERS} <= limits.LIMITS[name].keys()
        for key, limit in limits.LIMITS[name].items():
            assert isinstance(limit, limits.Between) == (types[key] in NUMBERS), (name, key)
    schema = [cls for cls in vars(config).values() if isinstance(cls, type) and hasattr(cls, "__dataclass_fields__")]
    assert {cls.__name__ for cls in schema} == limits.LIMITS.keys()


REFUSED = {
    "run.max_tokens=0": "run.max_tokens is 0. Set it to a whole number of at least 1 and at most 1,000,.*or to null",
    "run.max_tokens=99999999999999999999": "run.max_tokens is 99999999999999999999. Set it to",
    "run.stall_timeout_s=0": "run.stall_timeout_s is 0.0. Set it to a number of at least 1",
    "run.stall_timeout_s=-1": "run.stall_timeout_s is -1.0",
    "run.stall_timeout_s=nan": "run.stall_timeout_s is nan",
    "run.stall_timeout_s=inf": "run.stall_timeout_s is inf",
    "run.metrics_interval_s=-1": "run.metrics_interval_s is -1.0. Set it to a number of at least 0",
    "run.metrics_interval_s=nan": "run.metrics_interval_s is nan",
    "run.lease_s=0": "run.lease_s is 0.0",
    "run.max_inflight_mib=inf": "run.max_inflight_mib is inf",
    "run.profile_after=-1": "run.profile_after is -1",
    "run.profile_steps=0": "run.profile_steps is 0",
    "run.profile=gs://bucket/trace": "run.profile is 'gs://bucket/trace'. Set it to a local folder",
    "run.compilation_cache=FILE": "run.compilation_cache is '.*. Set it to a folder that exists or can be created",
    "run.compilation_cache=FILE/below": "run.compilation_cache",
    "run.profile=FILE": "run.profile is",
    "store.path=FILE/below": "store.path is",
    "store.path=''": "store.path is ''. Set it to a folder",
    "store.path=' '": "store.path is ' '",
    "store.path='~nosuchuser/x'": "store.path is '~nosuchuser/x'.*home directory",
    "store.path=LONG": r"store.path is 'a{79}... \(302 characters\). Set it to",
    "data.path=LONG": "data.path is 'aaa",
    "store.path=DEEP": "store.path is 'a/a/",
    "model.path=''": "model.path is ''",
    "store.shard_mib=0": "store.shard_mib is 0.0. Set it to a number of more than 0",
    "store.shard_mib=nan": "store.shard_mib is nan",
    "store.rows_per_block=0": "store.rows_per_block is 0",
    "store.retry_delay_s=1e20": r"store.retry_delay_s is 1e\+20",
    "store.retries=-1": "store.retries is -1",
    "store.concurrency=0": "store.concurrency is 0",
    "store.copy_threads=1000000000": "store.copy_threads is 1000000000. Set it to .* at most 10,000, or to null",
    "capture.rate=0": "capture.rate is 0.0. Set it to a number of more than 0 and less than 1",
    "capture.seed=-1": "capture.seed is -1",
    "distributed.coordinator=nowhere": "distributed.coordinator is 'nowhere'. Set it to host:port",
    "distributed.coordinator='host:99999'": "distributed.coordinator is 'host:99999'",
    "distributed.coordinator='a b:1'": "distributed.coordinator is 'a b:1'",
    "distributed.coordinator='http://host:1'": "distributed.coordinator is 'http://host:1'",
    "distributed.num_processes=0": "distributed.num_processes is 0",
    "distributed.process_id=-1": "distributed.process_id is -1",
    "distributed.heartbeat_timeout_s=99999999999": "distributed.heartbeat_timeout_s is 99999999999",
    "plan.mfu=nan": "plan.mfu is nan. Set it to a number of more than 0 and at most 1",
    "plan.usd_per_tb_month=-1": "plan.usd_per_tb_month is -1.0",
    "batch.rows=0": "batch.rows is 0",
    "mesh.tensor=0": "mesh.tensor is 0",
    "topology=''": "topology is ''. Set it to a non-empty string, or to null",
    "+run.foo=1": "run.foo is not a key of the configuration",
    "++run.max_token=1": "run.max_token is not a key of the configuration. Did you mean run.max_tokens",
    "+foo={a: 1}": "foo is not a key of the configuration",
    "data=hf data.path=json data.data_files={a:true}": "data.data_files is .*. Set it to a non-empty string, or a",
    "capture.sites=resid_post": r"Set capture.sites to a list of strings, as in \[a,b\]",
    "data=hf data.path=x data.info_columns=${batch.rows}": "data.info_columns is 8. Set it to a list of strings",
    "data=hf data.path=x data.text=${data.info_columns}": "data.text",
    "capture=${batch.rows}": "capture is 8. Set it to a group of keys",
    "data=[1]": r"data=\[1\] is not a choice",
    "++capture.sites.x=1": "capture.sites",
    "data=3": "data=3 is not a choice.*e.g. data=fineweb",
    "data=nothing": "data=nothing is not one of ai2_arc, arc, demo, fineweb, fineweb_edu, generate, hf. "
    "For json files: data=hf data.path=json data.data_files=FILE.$",
    "data=csv": "For csv files: data=hf data.path=csv data.data_files=FILE.$",
    "model=gpt3": r"model=gpt3 is not one of bert_base, .*tiny. For any checkpoint.*: model.path=owner/name.$",
    "+experiment=nope": r"experiment=nope is not one of demo_arc, [a-z_, ]*\.$",
    "capture.layers=[2,": r"A list with spaces needs quotes for the shell: 'capture.layers=\[2, 3\]'.",
    "data.text={{ body }}": """needs quotes within quotes: 'data.text="{{ body }}"'. Correct the command line""",
    "data.path=/a, b": """'data.path="/a, b"'""",
    """data.path=it's "x\"""": r"x\" \^\. Correct",
    "mine.jsonl": "missing EQUAL at '<EOF>'. Correct the command line",
    "run.max_tokens=10,000": "A string with special characters needs quotes",
    "data=generate": r"no value for data.path. Set it on the command line, e.g. data.path=\.\.\.$",
    "++run.token_budget=1": "run.token_budget is not a key of the configuration. --cfg job prints all keys",
    "data.prompts=3": "data.prompts is not a key of the configuration. It belongs to another choice of data",
    "capture.layers={a: 1}": "capture.layers",
    "run=3": "run=3.*Set run to a group of keys",
    "~run.exclusive": "~run.exclusive.*does not support deletion",
    "run.max_tokens=1e20": "run.max_tokens is 100000000000000000000. Set it to a whole number of at least 1",
    "capture.dtype=float99": "Set capture.dtype to one of float32, bfloat16",
    "run.max_tokens=${nothing.here}": "run.max_tokens has no value: Interpolation key 'nothing.here' not found",
    "run.lease_s=${run.lease_s}": "run.lease_s has no value: Recursive interpolation",
}


@pytest.mark.parametrize(("override", "message"), REFUSED.items(), ids=REFUSED)
def test_a_wrong_value_is_refused_with_the_allowed_ones(tmp_path, override, message):
    file = tmp_path / "file"
    file.touch()
    for name, value in {"FILE": file, "LONG": "a" * 300, "DEEP": "a/" * 2000}.items():
        override = override.replace(name, str(value))
    with pytest.raises(ConfigError, match=message):
        compose(override.split(" ") if override.startswith("data=hf") else [override])


@pytest.mark.parametrize(
    "override",
    [
        *(
            "run.max_tokens=1",
            "run.metrics_interval_s=0",
            "run.exclusive=1 store.path=gs://a/b",
            "model.init=random model.seed=-5",
        ),
        *("distributed.coordinator='[::1]:1234'", "distributed.coordinator=host-1.example.org:8476"),
        "store.path=gs://bucket/store store.retries=0 store.retry_delay_s=0",
        *("run.compilation_cache=gs://bucket/cache", "topology=v5e-4 plan.mfu=1", "data.path=a/*.x"),
    ],
)
def test_values_at_their_limits_are_accepted(override):
    compose(override.split(" "))


@pytest.mark.parametrize("value", ["2", "-1", "2.5", "maybe", "nan", "inf"])
def test_a_bool_must_be_true_or_false(value):
    """OmegaConf converts every number except 0 to true."""
    with pytest.raises(ConfigError, match="run.exclusive to true or false"):
        compose([f"run.exclusive={value}"])
