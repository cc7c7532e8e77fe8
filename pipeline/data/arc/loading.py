"""Opens collections of ARC tasks: a directory of task files, Kaggle's challenges, JSON lines, or a Hub dataset.

Opening a collection reads its files (a Hub dataset is downloaded and memory-mapped) but does not parse tasks: an
invalid task is noticed, or skipped, when it is loaded. A file with several tasks must be valid JSON.
"""

import codecs
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fsspec

from pipeline.config.schema import ArcData
from pipeline.core.errors import InputError
from pipeline.data.arc.tasks import Task, parse_task
from pipeline.data.files import InputFile, NoSuchFiles, find_files, hub_data_set, in_parallel, input_errors
from pipeline.data.manifest import FileEntry
from pipeline.data.rows import require_utf8

if TYPE_CHECKING:
    import datasets

_NAME_KEYS = ("id", "task_id", "name")


@dataclass(frozen=True)
class TaskCollection:
    """Tasks in a fixed order. load: parses task i; raises InputError if it is invalid. files: those that were read."""

    size: int
    load: Callable[[int], Task]
    files: tuple[FileEntry, ...]

    @property
    def identity(self) -> dict[str, object]:
        """What identifies all tasks, as plain JSON values."""
        contents = "\n".join(f"{file.name} {file.content}" for file in self.files)
        return {"num_tasks": self.size, "tasks_sha256": hashlib.sha256(contents.encode()).hexdigest()}


def open_tasks(config: ArcData) -> TaskCollection:
    """Opens the tasks at `data.path`.

    Raises InputError for missing or invalid files, and ConfigError for settings that contradict each other.
    """
    if repo := hub_data_set(config.path, is_whole=True):
        return _hub_tasks(repo, config)
    files = find_files(config.path, ".json")
    contents = in_parallel(InputFile.read_bytes, files)
    entries = tuple(map(_entry, files, contents))
    if len(files) == 1 and files[0].name.endswith(".jsonl"):
        return _json_lines(files[0], contents[0], entries)
    if len(files) == 1 and config.path.endswith(".json"):
        return _one_file(files[0], contents[0], entries, config.path)
    if several := [file.path for file in files if file.name.endswith("_challenges.json")]:
        raise InputError(f"{several[0]} has many tasks, and a folder's files one each. Set data.path to this file.")

    def load(number: int) -> Task:
        """A task per file, named after the file's path in the directory."""
        name = files[number].name.removesuffix(".json")
        return parse_task(name, files[number].path, _json(contents[number], files[number].path))

    return TaskCollection(len(files), load, entries)


def _one_file(file: InputFile, content: bytes, entries: tuple[FileEntry, ...], path: str) -> TaskCollection:
    """A file with a single task, or Kaggle's `{task id: task}`: x_challenges.json, whose test outputs are in
    x_solutions.json if that exists."""
    tasks = _json(content, file.path)
    if isinstance(tasks, dict) and ("train" in tasks or "examples" in tasks):
        tasks = {file.name.removesuffix(".json"): tasks}
    if not isinstance(tasks, dict) or not tasks:
        raise InputError(f"{file.path} has no tasks, expected an object of tasks by id. Correct data.path.")
    solutions: dict[str, Any] = {}
    solutions_path = path.replace("_challenges.json", "_solutions.json")
    name = file.name.replace("_challenges.json", "_solutions.json")  # the path may be a glob
    others: list[InputFile] = []
    with suppress(NoSuchFiles):
        others = find_files(solutions_path, ".json")
    for other in (other for other in others if other.name == name != file.name):
        content = other.read_bytes()
        entries += (_entry(other, content),)
        solutions = _json(content, other.path)
        if not isinstance(solutions, dict):
            raise InputError(f"{other.path} is not an object of solutions by task id. Correct or remove it.")
    names = list(tasks)

    def load(number: int) -> Task:
        name = names[number]
        return parse_task(name, file.path, tasks[name], solutions.get(name))

    return TaskCollection(len(names), load, entries)


def _json_lines(file: InputFile, content: bytes, entries: tuple[FileEntry, ...]) -> TaskCollection:
    """One task per line, named after its id, or else after the file and the line number, from 1."""
    require_utf8(content, file.path)
    text = content.removeprefix(codecs.BOM_UTF8)
    lines = [(number, line) for number, line in enumerate(text.split(b"\n"), 1) if line.strip()]

    def load(index: int) -> Task:
        number, line = lines[index]
        place = f"{file.path} line {number}"
        value = _json(line, place)
        return parse_task(_name(value, f"{file.name.removesuffix('.jsonl')}-{number}"), place, value)

    return TaskCollection(len(lines), load, entries)


def _hub_tasks(repo: str, config: ArcData) -> TaskCollection:
    """A Hub dataset, downloaded and memory-mapped. Raises the same errors as `open_builder`.

    It is identified by the git blob ids of the split's files, which are digests of their content.
    """
    from pipeline.data.dataset_files import dataset_errors, open_builder

    builder = open_builder(f"hf://datasets/{repo}", split=config.split, revision=config.revision)
    with dataset_errors(config.path):
        builder.download_and_prepare()
        rows = builder.as_dataset(split=config.split)
    with input_errors(config.path):
        paths = [fsspec.core.url_to_fs(str(file)) for file in builder.config.data_files[config.split]]
        infos = [(path.rpartition("/")[2], filesystem.info(path)) for filesystem, path in paths]
    return dataset_tasks(
        rows, config.path, tuple(FileEntry(name, info["size"], f"blob_id:{info['blob_id']}") for name, info in infos)
    )


def dataset_tasks(rows: "datasets.Dataset", place: str, files: tuple[FileEntry, ...]) -> TaskCollection:
    """The tasks in a dataset with the columns `train` and `test`, or `examples` (as in barc0's datasets).

    place: for messages. files: identify the rows. Raises InputError for other columns.
    """
    if "examples" not in rows.column_names and not {"train", "test"} <= set(rows.column_names):
        raise InputError(
            f"{place} has the columns {', '.join(rows.column_names)}, expected examples, or train and test. "
            "Correct data.path."
        )

    def load(number: int) -> Task:
        row = rows[number]
        return parse_task(_name(row, f"row-{number}"), f"{place} row {number}", row)

    return TaskCollection(len(rows), load, files)


def _entry(file: InputFile, content: bytes) -> FileEntry:
    return FileEntry(file.name, len(content), f"sha256:{hashlib.sha256(content).hexdigest()}")


def _name(value: Any, otherwise: str) -> str:
    if isinstance(value, dict):
        for key in _NAME_KEYS:
            if isinstance(value.get(key), str | int):
                return str(value[key])
    return otherwise


def _json(text: bytes, place: str) -> Any:
    require_utf8(text, place)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise InputError(
            f"{place} is not JSON: {error}. Repair it, or set data.on_error=skip if it is one task."
        ) from error
