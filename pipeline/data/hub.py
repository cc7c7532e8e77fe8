"""Opening a data set with `datasets`, whose errors become the program's: what is wrong, and what to try again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import datasets
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import LocalEntryNotFoundError

from pipeline.access import named_errors
from pipeline.errors import ConfigError, InputError, PipelineError
from pipeline.hub import refused_by_hub, repeat_requests


def open_builder(
    path: str,
    subset: str | None = None,
    *,
    split: str,
    data_files: str | Sequence[str] | None = None,
    revision: str | None = None,
) -> datasets.DatasetBuilder:
    """The data set's files by split, of which none is read. Arguments are those of `datasets.load_dataset_builder`.

    Raises InputError for what is not there, ConfigError for a subset or split that it lacks, and PipelineError when
    the Hub cannot be reached.
    """
    repeat_requests()
    with dataset_errors(path):
        builder = datasets.load_dataset_builder(path, subset, data_files=data_files, revision=revision)
    splits = [str(name) for name in builder.config.data_files or ()]
    if splits and split not in splits:
        raise ConfigError(
            f"data.split={split}, but {path} has the splits {', '.join(splits)}. Set data.split to one of them."
        )
    return builder


@contextmanager
def dataset_errors(path: str) -> Iterator[None]:
    """Around calls that open the data set `path`: raises as `open_builder` does."""
    with named_errors(path, key="data.path", invalid=ConfigError):
        try:
            with refused_by_hub(path, "data.path", InputError):
                yield
        except (FileNotFoundError, DatasetsError, RuntimeError) as error:  # RuntimeError: a data set that is a script
            if _is_unreachable(error):
                raise PipelineError(f"{path} cannot be read: {error}. Check access to it, and try again.") from error
            raise InputError(f"{path}: {error}. Set data.path and data.data_files to a data set.") from error
        except ValueError as error:
            raise ConfigError(f"data.path={path}: {error}. Set data.subset and data.data_files.") from error


def _is_unreachable(error: BaseException) -> bool:
    """Whether what lies behind `error` is the network: `datasets` reports some of it as files that do not exist."""
    if isinstance(error, ConnectionError | TimeoutError | LocalEntryNotFoundError):
        return True
    return error.__context__ is not None and _is_unreachable(error.__context__)
