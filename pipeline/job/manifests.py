"""The manifest of a job's input files: the first process makes it, and all share it. The store keeps the files."""

from pipeline.cluster.processes import from_first_process
from pipeline.core.errors import InputError
from pipeline.data.manifest import MakeManifest, Manifest, entries_from_bytes, entries_to_bytes
from pipeline.store.format.keys import MANIFEST_KEY
from pipeline.store.io.storage import Storage


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

    def require_unchanged(self) -> None:
        """Raises InputError, naming files, if files differ from those that the store keeps."""
        if self.changes:
            raise InputError(f"{self._storage.path}: {self.changes}.")

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
