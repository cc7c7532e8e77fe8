"""Which commits of the Hugging Face Hub a job reads: one commit per repository, the same in all processes.

The first process resolves the revision, so that a push in the meantime changes nothing. A store is resumed at the
commits that it was made with, unless the configuration names another revision.
"""

from dataclasses import replace

from pipeline.cluster.processes import from_first_process
from pipeline.config.schema import DataConfig, GenerateData, RunConfig
from pipeline.core.hub import dataset_commit, is_hub_id
from pipeline.data.sources import hub_repository
from pipeline.models.checkpoints.checkpoint_files import open_files
from pipeline.store.format.metadata import StoreMetadata


def model_revision(config: RunConfig, stored: StoreMetadata | None) -> str | None:
    """The commit of a model of the Hub; `model.revision` for other models.

    `stored` is the metadata of the existing store, if any.
    """
    path, revision = config.model.path, config.model.revision
    if not is_hub_id(path):
        return revision
    if revision is None and stored is not None:
        stored_model = stored.config.get("model")
        if isinstance(stored_model, dict) and stored_model.get("path") == path:
            revision = stored.model.get("commit")
    return from_first_process(lambda: open_files(path, revision).commit)


def with_commit(data: DataConfig, stored_data: object) -> DataConfig:
    """The data with a commit as its revision if it is a data set of the Hub.

    `stored_data` is `data` in the configuration that made the existing store, if any. A store made by an earlier
    version may record no revision, and is then resumed without one.
    """
    stored = stored_data if isinstance(stored_data, dict) else {}
    if isinstance(data, GenerateData):
        return replace(data, prompts=with_commit(data.prompts, stored.get("prompts")))
    repo = hub_repository(data)
    if repo is None:
        return data
    revision = data.revision
    if revision is None and all(stored.get(name) == getattr(data, name, None) for name in ("source", "path", "repo")):
        revision = stored.get("revision")
        if not isinstance(revision, str):
            return data
    return replace(data, revision=from_first_process(lambda: dataset_commit(repo, revision)))
