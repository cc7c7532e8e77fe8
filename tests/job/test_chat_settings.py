"""The settings of a chat template: its variables, and its date, which a store keeps."""

import json
import shutil
from pathlib import Path

import pytest

from pipeline.config import composing
from pipeline.core.errors import ConfigError
from pipeline.job.job import Job
from pipeline.job.opening import open_job
from tests.jobs import create_store

ASSETS = composing.PACKAGE / "assets" / "tiny-qwen2"
GRID = {"input": [[1, 1]], "output": [[2, 2]]}
TEMPLATES = {
    "dated": "{{ strftime_now('%d %b %Y') }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}",
    "plain": "{{ messages[0].content }}{{ enable_thinking }}",
}


@pytest.fixture(params=["arc", "generate", "generate from chats"])
def overrides(request, tmp_path) -> list[str]:
    """A job whose documents are chats."""
    (tmp_path / "a.json").write_text(json.dumps({"train": [GRID], "test": [GRID]}))
    shutil.copytree(ASSETS, tmp_path / "model")
    data = ["data=arc" if request.param == "arc" else "data=generate"]
    data.append("data.prompts.template=chat" if request.param == "generate from chats" else "data.template=chat")
    places = [f"data.path={tmp_path}/a.json", f"model.path={tmp_path}/model", f"store.path={tmp_path}/store"]
    return [*data, *places, "capture.layers=[0]", "batch.rows=1", "run.progress=false"]


def opened(folder: Path, template: str, *overrides: str) -> Job:
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATES[template])
    return open_job(composing.compose([*overrides]))


def identity(job: Job) -> dict[str, object]:
    return dict(job.data_identity.get("prompts", job.data_identity))


def text(job: Job) -> str:
    return next(iter(job.source.read(0, 0))).text


def test_a_store_keeps_its_date(overrides, tmp_path):
    first = opened(tmp_path, "dated", *overrides, "data.date=2026-07-01")
    assert text(first) == "01 Jul 2026"
    assert identity(first)["date"] == "2026-07-01"
    create_store(*overrides, "data.date=2026-07-01")
    resumed = opened(tmp_path, "dated", *overrides)
    assert text(resumed) == "01 Jul 2026"
    assert identity(resumed) == identity(first)
    assert identity(opened(tmp_path, "dated", *overrides, "data.date=2026-07-02")) != identity(first)


def test_variables_reach_the_template_and_the_identity(overrides, tmp_path):
    jobs = [
        opened(tmp_path, "plain", *overrides, *more) for more in ([], ["data.template_kwargs={enable_thinking: false}"])
    ]
    assert [text(job).endswith("False") for job in jobs] == [False, True]
    assert identity(jobs[1]) == identity(jobs[0]) | {"template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "data.template_kwargs={enable_thinkng: false}",
            "data.template_kwargs has enable_thinkng, which the chat template",
        ),
        ("data.template_kwargs=[a]", r"data.template_kwargs is \['a'\], expected values by name"),
        ("data.date=2026-02-30", "data.date is '2026-02-30'. Set it to a date, as in 2026-07-01"),
        ("data.date=2026-07-01", "but the chat template writes no date"),
        ("data.date=yesterday", "data.date is 'yesterday'. Set it to a date"),
    ],
)
@pytest.mark.parametrize("overrides", ["arc"], indirect=True)
def test_wrong_settings_are_refused(overrides, setting, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, "plain", *overrides, setting)


@pytest.mark.parametrize("setting", ["data.template_kwargs={a: 1}", "data.date=2026-07-01"])
@pytest.mark.parametrize("overrides", ["arc"], indirect=True)
def test_settings_without_a_chat_template_are_refused(overrides, setting, tmp_path):
    with pytest.raises(
        ConfigError, match="but no chat template is used. Set it to null, or data.template=chat with data=arc"
    ):
        opened(tmp_path, "plain", *overrides, "data.template=plain", setting)
