"""The folder of an SAE's checkpoint: local, at a remote path, or in a repository on the Hugging Face Hub."""

import os
import re
from collections.abc import Collection

import huggingface_hub

from pipeline.core.addresses import unusable_path
from pipeline.core.errors import CheckpointError
from pipeline.core.hub import open_repository
from pipeline.core.messages import shown
from pipeline.models.checkpoints.checkpoint_files import Files, read_json
from pipeline.models.checkpoints.json_config import JsonConfig

_KEY = "the SAE's address"
_MAX_YAML = 64 << 10  # bytes
_SCALAR = re.compile(r"""'([^']*)'|"([^"\\]*)"|([^][{}&*!|>'"%@`,?:\s-](?:[^:]|:(?=\S))*|~|)""")  # YAML without escapes
_NULLS = ("", "~", "null", "Null", "NULL")
_HUB = re.compile(r"hf://(?:models/)?([\w.-]+/[\w.-]+)(?:@([^/\s]+))?(?:/(.*))?", re.DOTALL)


def open_folder(address: str, markers: tuple[str, ...], key: str = _KEY) -> Files:
    """Opens the folder at an address, or the folder of the file at the address. Every folder of an SAE contains one of
    the files `markers`; repositories on the Hub are checked for them. `key` names the setting in messages.

    Raises CheckpointError if there is no such folder, and PipelineError if a retry might help.
    """
    address = _normalised(address, key)
    for marker in markers:
        address = address.removesuffix(f"/{marker}")
    if address.startswith("hf:"):
        return _open_hub(address, markers, key)
    if "://" in address or os.path.isdir(address):
        return Files(address, key)
    raise CheckpointError(
        f"{key} is {address!r:.300}: expected a folder, a remote folder (gs://...) or a folder on the Hub "
        f"(hf://owner/name/folder), got none of them. Check the path."
    )


def open_file(address: str) -> tuple[Files, str]:
    """Opens the folder of a file, which holds the SAEs of several layers; also returns the file's name.

    Raises CheckpointError if there is no such file, and PipelineError if a retry might help.
    """
    address = _normalised(address, _KEY)
    folder, _, name = address.rpartition("/")
    files = _open_hub(folder, (name,), _KEY) if address.startswith("hf:") else Files(folder or "/", _KEY)
    if not files.has(name):
        raise CheckpointError(f"{_KEY} is {address!r:.300}, but there is no such file. Check the path.")
    return files, name


def _normalised(address: str, key: str) -> str:
    """The address without a slash at the end. A local one is made absolute: formats read names of folders in it.

    Raises CheckpointError if it can only be a mistake."""
    if problem := unusable_path(address, key):
        raise CheckpointError(problem)
    if address.startswith("hf:") or "://" in address:
        return address.rstrip("/")
    return os.path.abspath(os.path.expanduser(address))


def _open_hub(address: str, markers: tuple[str, ...], key: str) -> Files:
    match = _HUB.fullmatch(address)
    if match is None or match[1].startswith(("datasets/", "spaces/")):
        raise CheckpointError(
            f"{key} is {address!r:.300}: expected hf://owner/name/folder in a model repository, or "
            f"hf://owner/name@revision/folder. Check the address."
        )
    repo, revision, folder = match.groups()

    def is_cached(file: str) -> bool:
        return isinstance(huggingface_hub.try_to_load_from_cache(repo, file, revision=revision), str)

    files = [f"{folder}/{marker}" if folder else marker for marker in markers]
    for file in sorted(files, key=is_cached, reverse=True):  # offline, only cached files can be opened
        repository = open_repository(repo, revision, file=file, key=key, invalid=CheckpointError)
        if repository is not None:
            return Files(address, key, repository, folder)
    raise CheckpointError(f"{key}: {address} has none of {', '.join(markers)}. Check the folder's name.")


class SAEConfig(JsonConfig):
    """A reader of an SAE's configuration that accounts for every attribute.

    An attribute is either read by the format or known to have no effect. Any other is refused before arrays are read.
    """

    user, results = "SAE", "features"


def read_config(files: Files, name: str) -> SAEConfig:
    """Reads a JSON file in the folder. Raises CheckpointError if it is missing or damaged."""
    return SAEConfig(read_json(files, name), f"{files.where}/{name}")


def read_flat_yaml(files: Files, name: str, keys: Collection[str]) -> SAEConfig:
    """Reads the strings that a YAML file in the folder has for these keys, each on one line; null is absent. Other keys
    are ignored. A YAML parser would take minutes for some small files.

    Raises CheckpointError if the file is damaged, or writes these keys in another way."""
    source, values = files.open(name), {}
    if source.size > _MAX_YAML:
        raise CheckpointError(
            f"{source.name} has {source.size:,} bytes, expected at most {_MAX_YAML:,}. Download it again."
        )
    lines = source.read(0, source.size).tobytes().decode("utf-8-sig", errors="replace").split("\n")
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        key, colon, value = line.partition(":")
        if colon and key in keys:
            scalar = _SCALAR.fullmatch(value.partition(" #")[0].strip())
            goes_on = following.startswith((" ", "\t", "- "))
            if scalar is None or key in values or goes_on:
                raise CheckpointError(
                    f"{source.name}: expected one string on the line of {key}, got {shown(value.strip())}. Download it "
                    f"again."
                )
            text = next((group for group in scalar.groups() if group is not None), "")
            values[key] = None if text in _NULLS else text
    return SAEConfig(values, source.name)
