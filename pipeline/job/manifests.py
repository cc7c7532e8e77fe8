"""The manifest of a job's parquet files: the first process makes it, and all share it. The store keeps the footers."""

from pipeline.cluster.processes import from_first_process
from pipeline.config.schema import ParquetData
from pipeline.data.manifest import Manifest, footers_from_bytes, footers_to_bytes
from pipeline.data.parquet import make_manifest
from pipeline.store.format.keys import MANIFEST_KEY
from pipeline.store.io.storage import Storage


class JobManifest:
    """Makes the manifest on the first process, which lists the files and reads the footers that the store lacks."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._to_keep: bytes | None = None

    def agree(self, config: ParquetData) -> Manifest:
        """The manifest, the same in all processes. Every process must call this. Raises as `make_manifest`."""
        return Manifest.from_json(from_first_process(lambda: self._make(config).to_json()))

    def keep(self) -> None:
        """Writes footers that this process has read into the store, which must exist. Raises StoreError."""
        if self._to_keep is not None:
            self._storage.write(MANIFEST_KEY, self._to_keep)
            self._to_keep = None

    def _make(self, config: ParquetData) -> Manifest:
        if config.row_groups_per_shard is None:
            return make_manifest(config)
        stored = self._storage.read(MANIFEST_KEY)
        known = {} if stored is None else footers_from_bytes(stored, self._storage.url(MANIFEST_KEY))
        manifest = make_manifest(config, known)
        content = footers_to_bytes(manifest.files)
        self._to_keep = content if content != stored else None
        return manifest
