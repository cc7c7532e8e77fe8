"""The folder of an SAE's checkpoint: local, at a remote path, or in a repository on the Hugging Face Hub."""

import os
import re

import huggingface_hub

from pipeline.core.addresses import unusable_path
from pipeline.core.errors import CheckpointError
from pipeline.core.hub import open_repository
from pipeline.core.messages import shown
from pipeline.models.checkpoints.checkpoint_files import Files, read_json
from pipeline.models.checkpoints.json_config import JsonConfig

_KEY = "the SAE's address"
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
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
    if address.endswith(PICKLES):
        raise CheckpointError(f"{_KEY} is {address!r:.300}. {CONVERT}")
    for marker in markers:
        address = address.removesuffix(f"/{marker}")
    if address.startswith("hf:"):
        return _open_hub(address, markers)
    if "://" in address or os.path.isdir(address):
        return Files(address, _KEY)
    raise CheckpointError(
        f"{_KEY} is {address!r:.300}: expected a folder, a remote folder (gs://...) or a folder on the Hub "
        f"(hf://owner/name/folder), got none of them. Check the path."
    )


def _open_hub(address: str, markers: tuple[str, ...]) -> Files:
    match = _HUB.fullmatch(address)
    if match is None or match[1].startswith(("datasets/", "spaces/")):
        raise CheckpointError(
            f"{_KEY} is {address!r:.300}: expected hf://owner/name/folder in a model repository, or "
            f"hf://owner/name@revision/folder. Check the address."
        )
    repo, revision, folder = match.groups()

    def is_cached(file: str) -> bool:
        return isinstance(huggingface_hub.try_to_load_from_cache(repo, file, revision=revision), str)

    files = [f"{folder}/{marker}" if folder else marker for marker in markers]
    for file in sorted(files, key=is_cached, reverse=True):  # offline, only cached files can be opened
        repository = open_repository(repo, revision, file=file, key=_KEY, invalid=CheckpointError)
        if repository is not None:
            return Files(address, _KEY, repository, folder)
    raise CheckpointError(
        f"{address} has none of {', '.join(markers)}: expected an SAE's folder. Check the folder's name."
    )


class SAEConfig(JsonConfig):
    """A reader of an SAE's configuration that accounts for every attribute.

    An attribute is either read by the format or known to have no effect. Any other is refused before arrays are read.
    """

    user, results = "SAE", "features"

    def text(self, key: str) -> str | None:
        """A string; None if it is absent."""
        return self._take(key, (str,), "a string", None)

    def expect(self, key: str, value: object) -> None:
        """Reads an attribute for which only one value, or its absence, is implemented."""
        self._taken.add(key)
        if key in self.values and self.values[key] != value:
            raise self._not_implemented(key, self.values[key], shown(value))


def read_config(files: Files, name: str) -> SAEConfig:
    """Reads a JSON file in the folder. Raises CheckpointError if it is missing or damaged."""
    return SAEConfig(read_json(files, name), f"{files.where}/{name}")
