"""The inputs that all processes of a job agree on: commits on the Hub, the date of chat templates, and the manifest of
the input files."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline.cluster.processes import any_process, from_first_process
from pipeline.config.schema import DataConfig, GenerateData, ModelConfig, RunConfig
from pipeline.core.errors import ConfigError
from pipeline.core.hub import dataset_commit, is_hub_id
from pipeline.core.messages import shown
from pipeline.data.manifest import MakeManifest, Manifest, entries_from_bytes, entries_to_bytes
from pipeline.data.sources import hub_repository, renders_chat
from pipeline.models.checkpoints.checkpoint_files import open_files
from pipeline.store.format.keys import MANIFEST_KEY
from pipeline.store.format.metadata import StoreMetadata
from pipeline.store.io.storage import Storage


def pinned(config: RunConfig, stored: StoreMetadata | None) -> tuple[RunConfig, str | None]:
    """The configuration with the commit of a Hub data set as its revision, and with the date for chat templates; and
    the revision of the model, the commit of a Hub model. Every process of the job must call this.

    The first process resolves these for all, so that a push meanwhile changes nothing. A store is resumed at the
    commits and the date that it was created with, unless the configuration names others. stored: the metadata of the
    existing store, if any. Raises ConfigError for a setting of chat templates if there are no chats, and if a directory
    is on some hosts only.
    """
    _require_chat(config.data)
    before = dict(stored.config) if stored else {}
    model, data = config.model, config.data
    documents = data.prompts if isinstance(data, GenerateData) else data
    repo = hub_repository(documents)
    are_on_hub = {"model": is_hub_id(model.path), "data": repo is not None}

    def resolve() -> str:
        stored_data = before.get("data") if isinstance(before.get("data"), dict) else {}
        pins = {"date": data.date or stored_data.get("date") or datetime.date.today().isoformat()}
        if are_on_hub["model"]:
            kept = _stored_commit(model, before.get("model"), ("path", "revision"), "commit")
            pins["model"] = open_files(model.path, kept or model.revision).commit
        if are_on_hub["data"]:
            stored_documents = stored_data.get("prompts") if isinstance(data, GenerateData) else stored_data
            kept = _stored_commit(documents, stored_documents, ("source", "path"), "revision")
            pins["data"] = dataset_commit(repo, documents.revision or kept)
        return json.dumps(pins)

    pins = json.loads(from_first_process(resolve))
    # Whether a path is on the Hub depends on the host's files, so every process compares.
    for name, path in (("model", model.path), ("data", data.path)):
        if any_process((name in pins) != are_on_hub[name]):
            raise ConfigError(
                f"{name}.path={path} is a local directory on some hosts of this job; the others would read it from the "
                "Hub. Put the directory on all hosts or on none, or give its absolute path."
            )
    changes = {"revision": pins["data"]} if "data" in pins else {}
    changes |= {"date": pins["date"]} if renders_chat(data) else {}
    if isinstance(data, GenerateData):
        changes |= {"prompts": replace(documents, **changes)}
    return replace(config, data=replace(data, **changes)), pins.get("model", model.revision)


def _require_chat(data: DataConfig) -> None:
    """Raises ConfigError for a setting of chat templates if no template is used."""
    for name in () if renders_chat(data) else ("template_kwargs", "date"):
        if getattr(data, name) is not None:
            raise ConfigError(
                f"data.{name} is {shown(getattr(data, name))}, but no chat template is used. Set it to null, or "
                "data.template=chat with data=arc or data=generate, or data.messages with data=hf."
            )


def _stored_commit(settings: ModelConfig | DataConfig, stored: object, names: Sequence[str], commit: str) -> str | None:
    """The commit in the existing store's settings, if those in `names` are the same."""
    if not isinstance(stored, Mapping) or any(stored.get(name) != getattr(settings, name, None) for name in names):
        return None
    return stored[commit] if isinstance(stored.get(commit), str) else None


class JobManifest:
    """Makes the manifest on the first process, which compares its files with those that the store keeps."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._to_keep: bytes | None = None
        self.changes = ""  # how the files differ from those that the store keeps, in all processes

    def agree(self, make: MakeManifest) -> Manifest:
        """The manifest, the same in all processes. Every process must call this. Raises as `make`."""
        manifest = Manifest.from_json(from_first_process(lambda: self._make(make).to_json()))
        self.changes = manifest.changes
        return manifest

    def keep(self) -> None:
        """Writes this process's manifest into the store, which must exist. Raises StoreError."""
        if self._to_keep is not None:
            self._storage.write(MANIFEST_KEY, self._to_keep)
            self._to_keep = None

    def _make(self, make: MakeManifest) -> Manifest:
        stored = self._storage.read(MANIFEST_KEY)
        known = () if stored is None else entries_from_bytes(stored, self._storage.url(MANIFEST_KEY))
        manifest = make().compared(known)
        same = [(file.name, file.size, file.rows) for file in known]
        if manifest.changes or same != [(file.name, file.size, file.rows) for file in manifest.files]:
            self._to_keep = entries_to_bytes(manifest.files)
        return manifest
