"""The folder of an SAE's checkpoint: local, at a remote path, or in a repository on the Hugging Face Hub."""

import os
import re
from pathlib import Path

import huggingface_hub

from pipeline.core.addresses import unusable_path
from pipeline.core.errors import CheckpointError
from pipeline.core.hub import Repository, open_repository
from pipeline.models.checkpoints.checkpoint_files import Files, LocalFiles, RemoteFiles, read_json
from pipeline.models.checkpoints.safetensors_file import ByteSource
from pipeline.models.sae.config import SAEConfig

_KEY = "the SAE's address"
_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
_HUB = re.compile(r"hf://(?:models/)?([\w.-]+/[\w.-]+)(?:@([^/\s]+))?(?:/(.*))?", re.DOTALL)
CONVERT = (
    "Pickled weights are never read. Convert them, in an environment with torch: "
    "python scripts/convert_sae.py INPUT OUTPUT."
)


def open_folder(address: str, markers: tuple[str, ...]) -> Files:
    """Opens the folder at an address, or the folder of the file at the address. Every folder of an SAE contains one of
    the files `markers`; repositories on the Hub are checked for them.

    Raises CheckpointError if there is no such folder, and PipelineError if a retry might help.
    """
    if problem := unusable_path(address, _KEY):
        raise CheckpointError(problem)
    address = os.path.expanduser(address.rstrip("/"))
    if address.endswith(_PICKLES):
        raise CheckpointError(f"{_KEY} is {address!r:.300}. {CONVERT}")
    for marker in markers:
        address = address.removesuffix(f"/{marker}")
    if address.startswith("hf:"):
        return _HubFolder(address, markers)
    if "://" in address:
        return RemoteFiles(address, _KEY)
    if os.path.isdir(address):
        return LocalFiles(Path(address))
    raise CheckpointError(
        f"{_KEY} is {address!r:.300}: expected a folder, a remote folder (gs://...) or a folder on the Hub "
        f"(hf://owner/name/folder), got none of them. Check the path."
    )


class _HubFolder:
    """A folder in a repository, at the commit that its revision had when it was opened."""

    is_remote = False  # whole files are downloaded into the Hub's cache

    def __init__(self, address: str, markers: tuple[str, ...]) -> None:
        self.where = address
        match = _HUB.fullmatch(address)
        if match is None or match[1].startswith(("datasets/", "spaces/")):
            raise CheckpointError(
                f"{_KEY} is {address!r:.300}: expected hf://owner/name/folder in a model repository, or "
                f"hf://owner/name@revision/folder. Check the address."
            )
        repo, revision, folder = match[1], match[2], match[3]
        self._prefix = f"{folder}/" if folder else ""
        self._repository = self._open(repo, revision, markers)
        self.commit = self._repository.commit

    def _open(self, repo: str, revision: str | None, markers: tuple[str, ...]) -> Repository:
        files = [self._prefix + marker for marker in markers]
        files.sort(key=lambda file: not self._is_cached(repo, file, revision))  # only these open offline
        for file in files:
            repository = open_repository(repo, revision, file=file, key=_KEY, invalid=CheckpointError)
            if repository is not None:
                return repository
        raise CheckpointError(
            f"{self.where} has none of {', '.join(markers)}: expected an SAE's folder. Check the folder's name."
        )

    @staticmethod
    def _is_cached(repo: str, file: str, revision: str | None) -> bool:
        return isinstance(huggingface_hub.try_to_load_from_cache(repo, file, revision=revision), str)

    def has(self, name: str) -> bool:
        return self._repository.file(self._prefix + name) is not None

    def open(self, name: str) -> ByteSource:
        path = self._repository.file(self._prefix + name)
        if path is None:
            raise FileNotFoundError(f"{self.where}/{name}")
        return LocalFiles(path.parent).open(path.name)

    def names(self) -> list[str]:
        names = (name for name in self._repository.names() if name.startswith(self._prefix))
        return [name.removeprefix(self._prefix) for name in names]


def read_config(files: Files, name: str) -> SAEConfig:
    """Reads a JSON file in the folder. Raises CheckpointError if it is missing or damaged."""
    return SAEConfig(read_json(files, name), f"{files.where}/{name}")


def open_file(files: Files, name: str) -> ByteSource:
    """Opens a file in the folder. Raises CheckpointError if it is missing."""
    try:
        return files.open(name)
    except FileNotFoundError:
        raise CheckpointError(f"{files.where} has no {name}. Download the missing file.") from None
