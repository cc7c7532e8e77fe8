"""A key without effect is refused where it was typed, ignored where a file or a sweep set it, and never recorded."""

import sys

import pytest

from pipeline.cli import main
from pipeline.config import schema
from pipeline.config.composing import compose
from pipeline.config.schema import all_fields
from pipeline.core.errors import ConfigError

ARC, HF, TEXT = "data=arc data.path=tasks", "data=hf data.path=json data.data_files=x", "data=fineweb data.path=x"
GENERATE = "data=generate data.path=tasks"
POSITIONS = "capture.positions"

# The job, a key without effect in it, and what gives it one.
ROWS = [
    ("", "model.revision=main", "model.path=owner/name"),
    ("", "model.seed=1", "model.init=random"),
    ("model.init=random", "model.adapter=a", "model.init=checkpoint"),
    (GENERATE, "data.suffix=a", "data=arc"),
    (TEXT, "data.revision=a", "data.path=hf://datasets/a/b/c"),
    (ARC, "data.split=a", "data.path=hf://datasets/a/b"),
    (ARC, "data.revision=a", "data.path=hf://datasets/a/b"),
    (ARC, "data.symbols=abcdefghij", "data.encoder=digits+symbols"),
    *((ARC, key, "data.augmentations=2") for key in ("data.augment=colors", "data.seed=1")),
    (HF, "data.subset=a", "data.path=folder"),
    (HF, "data.revision=a", "data.path=owner/name"),
    *(
        (GENERATE, key, "data.temperature=0.5")
        for key in ("data.top_k=3", "data.top_p=0.9", "data.seed=1", "data.samples=2")
    ),
    (f"{GENERATE} data.temperature=0.5", "data.beams=2", "data.temperature=0"),
    (f"{HF} data.messages=m", "data.text=a", "data.messages=null"),
    (f"{HF} data.tokens=a", "data.text=a", "data.tokens=null"),
    *((f"{TEXT} data.tokens=a", key, "data.tokens=null") for key in ("data.suffix=a", "data.template_kwargs={a:1}")),
    (f"{HF} data.messages=m", "data.tokens=a", "data.messages=null"),
    (f"{TEXT} data.tokens=a", "data.text_column=b", "data.tokens=null"),
    ("", "batch.separator=a", "batch.packing=concat"),
    ("", "batch.contexts=sae", "capture.encode={a:b}"),
    ("batch.long_documents=cut", "batch.overlap=3", "batch.long_documents=split"),
    *((HF, key, "data.messages=m") for key in ("data.tools=a", "data.roles={a:b}")),
    (TEXT, "capture.when=decode", GENERATE),
    ("", "capture.every=3", f"{POSITIONS}=every"),
    ("", "capture.token=a", f"{POSITIONS}=token"),
    ("", "capture.regex=a", f"{POSITIONS}=regex"),
    ("", "capture.labels=[user]", f"{POSITIONS}=labels"),
    ("", "capture.rate=0.5", f"{POSITIONS}=sample"),
    ("", "capture.seed=1", f"{POSITIONS}=sample"),
    *(("", "capture.per_row=3", f"{POSITIONS}={choice}") for choice in ("last", "token", "regex", "labels")),
    ("", "capture.scale_group=3", "capture.dtype=int8"),
    ("capture.outputs=[loss]", "capture.top_logprobs=3", "capture.outputs=[top_logprobs]"),
    *(("", f"capture.{key}", "capture.encode={a:b}") for key in ("encode_top=3", "encode_threshold=1", "keep=both")),
    *(("", f"capture.{key}", "capture.encode={a:b}") for key in ("encode_error=true", "encode_index=false")),
    ("store.rows_per_block=8", "store.shard_mib=3", "store.rows_per_block=null"),
    ("", "store.retry_delay_s=2", "store.path=gs://a/b"),
    ("", "run.exclusive=true", "store.path=gs://a/b"),
    *(("", f"plan.{key}", "topology=v5e-4") for key in ("json=true", "mfu=0.5", "usd_per_chip_hour=0.5")),
]


def overrides(*parts: str) -> list[str]:
    return [override for part in parts for override in part.split()]


def test_every_key_that_needs_another_has_a_row():
    needing = {key for key, field in all_fields() if field.metadata["needs"]}
    assert needing == {given.partition("=")[0] for _, given, _ in ROWS}


@pytest.mark.parametrize(("job", "given", "remedy"), ROWS)
def test_a_typed_key_without_effect_is_refused_with_what_it_needs(job, given, remedy):
    key = given.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{key} is .*, but has an effect only with .* Set that, or remove {key}."):
        compose(overrides(job, given))
    group, name = key.split(".")
    with_effect = getattr(compose(overrides(job, given, remedy)), group)
    assert getattr(with_effect, name) != getattr(type(with_effect), name, None)  # the default
    if group == "data" and key != "data.suffix" and job.startswith("data=arc"):
        prompts = [override.replace("data.", "data.prompts.") for override in overrides(job, given)[2:]]
        with pytest.raises(ConfigError, match=f"data.prompts.{name} is .* only with data.prompts."):
            compose(overrides(GENERATE, *prompts))


def test_defaults_may_be_typed():
    compose(overrides(ARC, "data.seed=0", "capture.encode_top=64", "model.revision=null"))


def test_a_value_from_a_file_is_ignored_with_a_warning(caplog):
    config = compose(["+experiment=demo_text", "capture.encode=null"])
    assert config.capture == compose(["capture.layers=[2,4]"]).capture
    assert "capture.encode_top is 16, but has an effect only with capture.encode. It is ignored." in caplog.text


def test_a_sweep_may_vary_what_a_key_needs(monkeypatch, tmp_path):
    jobs: list[schema.RunConfig] = []
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # main sets it for the process, which other tests share
    swept = overrides(ARC, "data.seed=3", "data.augmentations=1,2", f"hydra.sweep.dir={tmp_path}")
    monkeypatch.setattr(sys, "argv", ["run", "-m", *swept])
    main.main(jobs.append, "")
    assert [job.data.seed for job in jobs] == [0, 3]
    monkeypatch.setattr(sys, "argv", ["run", *overrides(ARC, "data.seed=3")])
    with pytest.raises(SystemExit, match="2"):
        main.main(jobs.append, "")
