"""The folder of an SAE's checkpoint: local, at a remote path, or in a repository of the Hugging Face Hub."""

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
    "Pickled weights are never read. Convert them, in an environment that has torch: "
    "python scripts/convert_sae.py INPUT OUTPUT."
)


def open_folder(address: str, markers: tuple[str, ...]) -> Files:
    """The folder at an address, or the one around the file that it names. `markers` are files of which every folder of
    an SAE has one; a repository of the Hub is found by them.

    Raises CheckpointError if there is no such folder, PipelineError where a retry might help.
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
        f"{_KEY} is {address!r:.300}: expected a folder, a remote one (gs://...) or one of the Hub "
        f"(hf://owner/name/folder), got none of them. Check the path."
    )


class _HubFolder:
    """A folder of a repository, at the commit of its revision when it is opened."""

    is_remote = False  # files are fetched into the Hub's cache as a whole

    def __init__(self, address: str, markers: tuple[str, ...]) -> None:
        self.where = address
        match = _HUB.fullmatch(address)
        if match is None or match[1].startswith(("datasets/", "spaces/")):
            raise CheckpointError(
                f"{_KEY} is {address!r:.300}: expected hf://owner/name/folder of a model, with hf://owner/name@revision/"
                f"folder for another revision than main. Check the address."
            )
        repo, revision, folder = match[1], match[2], match[3]
        self._prefix = f"{folder}/" if folder else ""
        self._repository = self._open(repo, revision, markers)
        self.commit = self._repository.commit

    def _open(self, repo: str, revision: str | None, markers: tuple[str, ...]) -> Repository:
        files = [self._prefix + marker for marker in markers]
        files.sort(key=lambda file: not self._is_cached(repo, file, revision))  # offline, only those can be opened
        for file in files:
            repository = open_repository(repo, revision, file=file, key=_KEY, invalid=CheckpointError)
            if repository is not None:
                return repository
        raise CheckpointError(
            f"{self.where} has none of {', '.join(markers)}: expected the folder of an SAE. Check the folder's name."
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
    """A JSON file of the folder."""
    return SAEConfig(read_json(files, name), f"{files.where}/{name}")


def open_file(files: Files, name: str) -> ByteSource:
    """A file of the folder. Raises CheckpointError where there is none."""
    try:
        return files.open(name)
    except FileNotFoundError:
        raise CheckpointError(f"{files.where} has no {name}. Download the missing file.") from None
