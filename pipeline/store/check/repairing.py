"""Shell commands to repair a store: they delete objects that the next run writes again."""

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise

from pipeline.store.format.commits import COMMITS_PREFIX, parse_commit_key
from pipeline.store.format.keys import stream_prefix
from pipeline.store.format.problems import Problem, Remedy
from pipeline.store.format.statistics import MERGED_PREFIX
from pipeline.store.generated.group_keys import GENERATED_PREFIX
from pipeline.store.io.storage import Storage

_BLOCK = re.compile(r"_.*/stream-(\d{5,12})/block-(\d{6,12})\.\w+")
_SHARD = re.compile(r"[^/]+/c/(\d{1,18})(?:/0)*")
_GROUP = re.compile(r"_generated/stream-(\d{5,12})/(?:group-(\d{6,12})\.parquet)?")
_MOST_LINES = 20

# For these, the objects that have the problem are deleted.
_DELETED_REMEDIES = (
    Remedy.rewrite_array,
    Remedy.tabulate,
    Remedy.index_again,
    Remedy.discard,
    Remedy.regenerate_kept,
)
_COMMANDS = {"gs://": "gcloud storage rm", "s3://": "aws s3 rm"}
_RECURSIVE_COMMANDS = {"gs://": "gcloud storage rm --recursive", "s3://": "aws s3 rm --recursive"}


def repair_steps(storage: Storage, num_streams: int | None, problems: Sequence[Problem]) -> Iterator[str]:
    """The remedies of the problems, one line each, followed by indented commands that delete objects. Does not delete
    anything itself.

    num_streams: the store's; None if its root cannot be read.
    """
    for remedy in dict.fromkeys(problem.remedy for problem in problems):
        keys = [problem.where for problem in problems if problem.remedy is remedy]
        commands: list[str] = []
        if remedy is Remedy.recompute and num_streams is not None:
            commands = _delete_records(storage, num_streams, keys)
        elif remedy is Remedy.regenerate:
            commands = _delete_groups(storage, keys)
        elif remedy is Remedy.merge_again:
            commands = [_command(storage, MERGED_PREFIX, recursive=True)]
        elif remedy in _DELETED_REMEDIES:
            commands = [_command(storage, key) for key in dict.fromkeys(keys) if "/" in key]  # the root is in no folder
        yield Remedy.rerun_missing if remedy is Remedy.recompute and not commands else remedy
        shown = commands[:_MOST_LINES] if remedy in _DELETED_REMEDIES else commands
        yield from (f"    {command}" for command in shown)
        if len(shown) < len(commands):
            yield f"    ... and {len(commands) - len(shown)} more: all that are named above"


def _delete_records(storage: Storage, num_streams: int, keys: Sequence[str]) -> list[str]:
    """Commands to delete the records of the blocks to which `keys` belong, and of all later blocks of their streams."""
    first_blocks: dict[int, int] = {}
    others: list[str] = []
    for key in keys:
        stream_and_block = _stream_and_block(key, num_streams)
        if stream_and_block is not None and stream_and_block[0] < num_streams:
            stream, block = stream_and_block
            first_blocks[stream] = min(block, first_blocks.get(stream, block))
        elif record := parse_commit_key(key):  # of a stream that the store does not have, of which one record is named
            others.append(stream_prefix(COMMITS_PREFIX, record[0]))
        elif key.startswith(COMMITS_PREFIX) and "." in key:  # among the records, but not a record of a stream
            others.append(key)
    commands = [_command(storage, key, recursive=key.endswith("/")) for key in dict.fromkeys(others)]
    for stream, first in sorted(first_blocks.items()):
        parsed = filter(None, map(parse_commit_key, storage.list_keys(stream_prefix(COMMITS_PREFIX, stream))))
        blocks = sorted(block for _, block in parsed if block >= first)
        commands += _numbered(storage, f"{stream_prefix(COMMITS_PREFIX, stream)}block-", blocks, ".json")
    return commands


def _stream_and_block(key: str, num_streams: int) -> tuple[int, int] | None:
    """The stream and block of an object; None if it belongs to no block."""
    if match := _BLOCK.fullmatch(key):
        return int(match[1]), int(match[2])
    if match := _SHARD.fullmatch(key):
        block, stream = divmod(int(match[1]), num_streams)
        return stream, block
    return None


def _delete_groups(storage: Storage, keys: Sequence[str]) -> list[str]:
    """Commands to delete the groups with these keys, and all later groups of their streams."""
    commands = []
    damaged = [match for match in map(_GROUP.fullmatch, keys) if match]
    for stream in sorted({int(match[1]) for match in damaged}):
        prefix = stream_prefix(GENERATED_PREFIX, stream)
        stored = [match for match in map(_GROUP.fullmatch, storage.list_keys(prefix)) if match and match[2]]
        indices = sorted(int(match[2]) for match in stored)
        gap = next((k for k, index in enumerate(indices) if index != k), len(indices))
        first = min([gap, *(int(match[2]) for match in damaged if int(match[1]) == stream and match[2])])
        later = [index for index in indices if index >= first]
        commands += _numbered(storage, f"{prefix}group-", later, ".parquet")
    return commands


def _numbered(storage: Storage, prefix: str, numbers: Sequence[int], suffix: str) -> list[str]:
    """Commands to delete objects with these ascending numbers in their keys: one per run of consecutive numbers, with
    the shell's braces."""
    # In one pair of braces, bash gives all numbers the same width; keys have six digits, and more from a million on.
    starts = [
        k for k, (before, number) in enumerate(pairwise([-2, *numbers])) if number != before + 1 or number == 10**6
    ]
    commands = []
    for start, stop in pairwise([*starts, len(numbers)]):
        first, last = numbers[start], numbers[stop - 1]
        if first == last:
            commands.append(_command(storage, prefix) + f"{first:06d}{suffix}")
            continue
        braces = f"{{{first:06d}..{last:06d}}}"
        if storage.path.startswith("s3://"):  # its command takes only one object
            commands.append(f"for n in {braces}; do {_command(storage, prefix)}$n{suffix}; done")
        else:
            commands.append(_command(storage, prefix) + braces + suffix)
    return commands


def _command(storage: Storage, key: str, *, recursive: bool = False) -> str:
    """The shell command that deletes an object; only the object's URL for storage without a command."""
    if storage.directory is not None:
        return f"{'rm -r' if recursive else 'rm'} {shlex.quote(storage.directory + key)}"
    commands = _RECURSIVE_COMMANDS if recursive else _COMMANDS
    command = commands.get(storage.path[:5])
    return " ".join(filter(None, [command, shlex.quote(storage.url(key))]))
