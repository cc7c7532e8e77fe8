"""The commits of the Hugging Face Hub that a job reads, and its date: the same in all processes.

The first process resolves the revision for all, so that a push meanwhile changes nothing. A store is resumed at the
commits that it was created with, unless the configuration names a different revision.
"""

import datetime
from collections.abc import Callable, Mapping
from dataclasses import replace

from pipeline.cluster.processes import any_process, from_first_process
from pipeline.config.limits import shown
from pipeline.config.schema import DataConfig, GenerateData, RunConfig
from pipeline.core.errors import ConfigError
from pipeline.core.hub import dataset_commit, is_hub_id
from pipeline.data.sources import hub_repository, renders_chat
from pipeline.models.checkpoints.checkpoint_files import open_files
from pipeline.store.format.metadata import StoreMetadata

_LOCAL = "local"  # used instead of a commit: not on the Hub


def model_revision(config: RunConfig, stored: StoreMetadata | None) -> str | None:
    """The commit of a Hub model; `model.revision` for other models. Every process of the job must call this.

    stored: the metadata of the existing store, if any. Raises ConfigError if the hosts' files differ.
    """
    path, revision = config.model.path, config.model.revision

    def resolve() -> str:
        return open_files(path, _stored_commit(config, stored) or revision).commit

    return _agreed("model.path", path, is_hub_id(path), resolve) or revision


def _stored_commit(config: RunConfig, stored: StoreMetadata | None) -> str | None:
    """The commit of the existing store's model, if the configuration names the same model and revision."""
    model = stored.config.get("model") if stored else None
    if not isinstance(model, Mapping) or model.get("path") != config.model.path:
        return None
    if model.get("revision") != config.model.revision:
        return None
    commit = model.get("commit")
    return commit if isinstance(commit, str) else None


def with_commit(data: DataConfig, stored_data: object) -> DataConfig:
    """The data with a commit as its revision if it is a Hub data set. Every process of the job must call this.

    stored_data: `data` in the configuration that created the existing store, if any.
    """
    stored = stored_data if isinstance(stored_data, dict) else {}
    if isinstance(data, GenerateData):
        return replace(data, prompts=with_commit(data.prompts, stored.get("prompts")))
    repo = hub_repository(data)

    def resolve() -> str:
        revision = data.revision
        if revision is None and all(
            stored.get(name) == getattr(data, name, None) for name in ("source", "path", "repo")
        ):
            revision = stored.get("revision")
        return dataset_commit(repo, revision)

    commit = _agreed("data.path", data.path, repo is not None, resolve)
    return data if commit is None else replace(data, revision=commit)


def with_date(data: DataConfig, stored_data: object) -> DataConfig:
    """The data with the date for its chat template: the configured one, or that of the existing store, or today.

    stored_data: as in `with_commit`. Every process of the job must call this. Raises ConfigError for a setting of chat
    templates if there are no chats.
    """
    if not renders_chat(data):
        for name in ("template_kwargs", "date"):
            if getattr(data, name) is not None:
                raise ConfigError(
                    f"data.{name} is {shown(getattr(data, name))}, but no chat template is used. Set it to null, or "
                    "data.template=chat with data=arc or data=generate."
                )
        return data
    stored = stored_data.get("date") if isinstance(stored_data, dict) else None
    date = from_first_process(lambda: data.date or stored or datetime.date.today().isoformat())
    prompts = {"prompts": replace(data.prompts, date=date)} if isinstance(data, GenerateData) else {}
    return replace(data, date=date, **prompts)


def _agreed(key: str, path: str | None, is_hub: bool, resolve: Callable[[], str]) -> str | None:
    """The commit that `resolve` returns on the first process; None if `path` is not on the Hub.

    Whether `path` is on the Hub (`is_hub`) depends on the host's files, so every process takes part in the exchange.
    Raises ConfigError on every process if the hosts differ.
    """
    commit = from_first_process(resolve if is_hub else lambda: _LOCAL)
    if any_process((commit == _LOCAL) == is_hub):
        raise ConfigError(
            f"{key}={path} is a local directory on some hosts of this job; the others would read it from the Hub. Put "
            f"the directory on all hosts or on none, or give its absolute path."
        )
    return None if commit == _LOCAL else commit
