"""Opens datasets with `datasets`, and turns its errors into the program's, with what is wrong and what to do."""

import csv
import glob
import gzip
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import quote

import datasets
import pyarrow as pa
import yaml
from datasets.data_files import has_magic, resolve_pattern
from datasets.exceptions import DatasetsError
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as LOADERS
from huggingface_hub.errors import LocalEntryNotFoundError

from pipeline.core.errors import ConfigError, InputError, PipelineError
from pipeline.core.hub import is_hub_id, refused_by_hub, repeat_requests
from pipeline.core.requests import named_errors

# `datasets` would report every opening, also of local files, to a server on the Internet, and without access to it
# wait many seconds for a name server.
datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False

_DAMAGE = (ValueError, DatasetsError, EOFError, RecursionError, OverflowError)
_DAMAGE += (zlib.error, lzma.LZMAError, zipfile.BadZipFile, csv.Error, pa.ArrowException)


def open_builder(
    path: str,
    subset: str | None = None,
    *,
    split: str,
    data_files: Sequence[str] | None = None,
    revision: str | None = None,
) -> datasets.DatasetBuilder:
    """A builder with the dataset's files by split; reads none of them. The arguments are those of
    `datasets.load_dataset_builder`.

    Raises InputError if the dataset or a file does not exist, ConfigError for an unknown subset or split, and
    PipelineError if the Hub cannot be reached.
    """
    if path in LOADERS:
        if not data_files:  # `datasets` would read the working directory
            raise ConfigError(f"data.path={path} is a loader. Set data.data_files to the files to read.")
    elif "://" not in path and not os.path.isdir(path) and (os.path.isfile(path) or not is_hub_id(path)):
        raise ConfigError(
            f"data.path is {path!r:.200}, which is not a directory, a loader or a Hub id. Correct it; a file is read "
            "with data.data_files=FILE and data.path=json, csv, text, arrow or parquet."
        )
    elif os.path.isdir(path) and has_magic(path):
        raise ConfigError(
            f"data.path is {path}, in which `datasets` takes *, ? and [ as parts of a pattern. Rename the directory, "
            f"or set data.path=json, csv, text, arrow or parquet and data.data_files={glob.escape(path)}/*."
        )
    repeat_requests()
    with dataset_errors(path):
        for pattern in filter(has_magic, data_files or ()):  # `datasets` leaves out globs without files
            resolve_pattern(pattern, _base(path, revision))
        try:
            builder = datasets.load_dataset_builder(path, subset, data_files=data_files, revision=revision)
        except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:  # its values are used unchecked
            raise InputError(
                f"{path}: the header of its card, README.md, cannot be used: {error}. Correct the header."
            ) from error
    if builder.config.data_files is None:
        raise PipelineError(
            f"{path} cannot be read from the Hub, and its copy in the cache of `datasets` does not list its files. "
            "Check the network and HF_HUB_OFFLINE, and try again."
        )
    splits = [str(name) for name in builder.config.data_files]
    if splits and split not in splits:
        raise ConfigError(
            f"data.split={split}, but {path} has the splits {', '.join(splits)}. Set data.split to one of them."
        )
    return builder


def _base(path: str, revision: str | None) -> str:
    """The folder to which the data files' patterns are relative."""
    if path in LOADERS:
        return os.getcwd()
    return path if os.path.isdir(path) else f"hf://datasets/{path}@{quote(revision or 'main', safe='')}"


@contextmanager
def dataset_errors(path: str) -> Iterator[None]:
    """Turns errors of calls that open the dataset `path` into those of `open_builder`."""
    with named_errors(path, key="data.path", invalid=ConfigError):
        try:
            with refused_by_hub(path, "data.path", InputError):
                yield
        except (FileNotFoundError, DatasetsError, RuntimeError) as error:  # RuntimeError: the dataset is a script
            if _is_unreachable(error):
                raise PipelineError(f"{path} cannot be read: {error}. Check access to it, and try again.") from error
            raise InputError(f"{path}: {error!s:.300}. Set data.path and data.data_files to a dataset.") from error
        except ValueError as error:
            raise ConfigError(
                f"data.path={path}: {str(error).rstrip('.')}. Set data.subset and data.data_files."
            ) from error
        except Exception as error:
            if not is_damage(error) and not isinstance(error, StopIteration):  # `datasets` raises it if there is no row
                raise
            raise InputError(
                f"data.path={path}: a file is damaged or empty: {str(error) or 'it has no rows'}. Repair or replace "
                "the files of data.data_files."
            ) from error


def is_damage(error: Exception) -> bool:
    """Whether `error` means that a file's content is damaged or has a different format, not that the file cannot be
    reached.

    Errors of pyarrow, json and Unicode are ValueErrors. For damage inside a file, pyarrow raises an OSError without
    errno; a truncated compressed file causes an EOFError.
    """
    if isinstance(error, OSError):
        return type(error) in (OSError, gzip.BadGzipFile) and error.errno is None
    return isinstance(error, _DAMAGE)


def _is_unreachable(error: BaseException) -> bool:
    """Whether the network caused `error`: `datasets` reports some network errors as files that do not exist."""
    if isinstance(error, ConnectionError | TimeoutError | LocalEntryNotFoundError):
        return True
    return error.__context__ is not None and _is_unreachable(error.__context__)
