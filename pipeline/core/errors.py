"""The exceptions that the program raises on purpose, and the exit code each ends the process with.

    PipelineError            1   anything that a retry might fix, or a bug
    ├── ConfigError          2   a value of the configuration is wrong; do not retry
    │   └── ArgumentError    2   an argument of a library call is wrong; also a ValueError
    ├── InputError           2   a document, task file, tokenizer or parquet file is wrong; do not retry
    ├── NotFiniteError       2   an activation does not fit into the stored dtype, or is NaN; do not retry
    ├── CheckpointError      2   the model's files are missing, damaged or of an unknown kind; do not retry
    ├── StoreError           1   the store cannot be read or written (full disk, permissions, network)
    │   ├── StoreInvalid     2   store.path holds no store of this version, or a damaged one; do not retry
    │   └── StoreMismatch    2   the store on disk was made with a different configuration; do not retry
    └── Interrupted         42   SIGTERM or SIGINT: what is complete is committed; run again to resume

A message has four parts: the subject, what was expected, what was found, and what to do.
"""

from pipeline.core.addresses import without_credentials
from pipeline.core.messages import printable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INVALID = 2
EXIT_INTERRUPTED = 42


class PipelineError(Exception):
    """Base of every error that the program raises on purpose. Its text shows no credentials of a URL."""

    exit_code = EXIT_FAILED

    def __str__(self) -> str:
        return printable(without_credentials(super().__str__()))


class ConfigError(PipelineError):
    """A configuration value is wrong. The message names the key, the value and the remedy."""

    exit_code = EXIT_INVALID


class ArgumentError(ConfigError, ValueError):
    """An argument of a library call is wrong. The message names the argument, the value and what is expected."""


class InputError(PipelineError):
    """Source data or a tokenizer is wrong. The message names the file and, where there is one, the row."""

    exit_code = EXIT_INVALID


class CheckpointError(PipelineError):
    """A model checkpoint is missing, damaged, or has an attribute that this program does not implement."""

    exit_code = EXIT_INVALID


class NotFiniteError(PipelineError):
    """An activation is infinite or NaN in the stored dtype. Its block is not stored."""

    exit_code = EXIT_INVALID


class StoreError(PipelineError):
    """The store cannot be read or written. Committed blocks stay valid."""


class StoreInvalid(StoreError):
    """The store's path holds no intact store of this version. A retry would fail in the same way."""

    exit_code = EXIT_INVALID
    was_read_again = False  # True after several attempts with the same result


class StoreMismatch(StoreError):
    """The store was made by a configuration with another fingerprint."""

    exit_code = EXIT_INVALID


class Interrupted(PipelineError):
    """The run was asked to stop and did; the same command resumes it."""

    exit_code = EXIT_INTERRUPTED
