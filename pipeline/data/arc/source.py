"""ARC-AGI tasks as documents: one prompt per test input and augmentation."""

from collections.abc import Callable, Iterator

import pyarrow as pa

from pipeline.config.choices import OnError, Template
from pipeline.config.schema import ArcData
from pipeline.core.errors import InputError
from pipeline.data.arc.loading import open_tasks
from pipeline.data.arc.prompts import chat_messages, grid_encoder, grid_text, plain_prompt
from pipeline.data.arc.tasks import Task, augmentation, augmented_parts
from pipeline.data.documents import Document, SkippedDocument
from pipeline.data.manifest import MakeManifest, Manifest, make_alone
from pipeline.data.text.templates import RenderError
from pipeline.data.text.tokenizer import TextTokenizer

# The settings, in addition to the tasks, that determine the documents.
_SETTINGS = ("encoder", "symbols", "template", "include_solution", "augmentations", "augment", "seed")
_TASKS_PER_SHARD = 8  # few, since a source shard is the least that a process can work on


class ArcSource:
    """A source whose shards are groups of 8 consecutive tasks.

    A task's versions follow each other; the first one is unchanged. Each version has one document per test input:
    `<task>#<test>`, or `<task>#<test>@<version>` if it is augmented. A skipped task counts as one document.
    """

    shards: tuple[str, ...]
    info_schema = pa.schema(
        [
            ("task", pa.string()),
            ("test", pa.int64()),
            ("augmentation", pa.int64()),
            ("geometry", pa.string()),  # a name of tasks.py
            ("colors", pa.string()),  # ten digits: the new colours of 0, 1, ...
            ("order", pa.string()),  # the examples' original numbers, in their new order
        ]
    )

    def __init__(
        self, config: ArcData, tokenizer: TextTokenizer, agree: Callable[[MakeManifest], Manifest] = make_alone
    ) -> None:
        """Opens the tasks. agree: as in `open_source`. Raises InputError, and ConfigError for an unusable encoder or
        augmentation."""
        self._config = config
        self._tokenizer = tokenizer
        self._encoder = grid_encoder(config)
        augmented_parts(config)
        self._tasks = open_tasks(config)
        agree(lambda: Manifest(self._tasks.files))
        self._starts = range(0, self._tasks.size, _TASKS_PER_SHARD)
        self.shards = tuple(f"tasks-{first:06d}" for first in self._starts)

    def read(self, shard: int, start: int) -> Iterator[Document | SkippedDocument]:
        """The documents of a group of tasks from number `start` on. Earlier ones are not rendered."""
        index = 0
        first = self._starts[shard]
        for number in range(first, min(first + _TASKS_PER_SHARD, self._tasks.size)):
            try:
                task = self._tasks.load(number)
            except InputError as error:
                if self._config.on_error is OnError.fail:
                    raise
                if index >= start:
                    yield SkippedDocument(self.shards[shard], index, str(error))
                index += 1
                continue
            for version in range(self._config.augmentations):
                for test in range(len(task.tests)):
                    if index >= start:
                        yield self._document(task, version, test, self.shards[shard], index)
                    index += 1

    def fingerprint(self) -> dict[str, object]:
        """The tasks' digest, and every setting that determines prompts."""
        settings = {name: getattr(self._config, name) for name in _SETTINGS}
        settings = {name: str(value) if isinstance(value, str) else value for name, value in settings.items()}
        chat = self._tokenizer.chat_identity() if self._config.template is Template.chat else {}
        return {"source": "arc", **self._tasks.identity, **settings, **chat}

    def _document(self, task: Task, version: int, test: int, shard: str, index: int) -> Document | SkippedDocument:
        """Raises InputError for a chat that cannot be rendered, unless these are skipped."""
        config = self._config
        change = augmentation(config, task, version)
        info = {
            "task": task.name,
            "test": test,
            "augmentation": version,
            "geometry": change.geometry,
            "colors": "".join(map(str, change.colors)),
            "order": ",".join(map(str, change.order)),
        }
        name = f"{task.name}#{test}@{version}" if version else f"{task.name}#{test}"
        changed = change.apply(task)
        solution = changed.tests[test].output
        try:
            text = self._text(changed, test)
        except RenderError as error:
            skip = SkippedDocument(shard, index, f"task {name}: {error}")
            return skip.if_allowed(config.on_error, f"{shard} document {index}", "Set data.template=plain")
        return Document(name, text, shard, index, info, answer=None if solution is None else grid_text(solution))

    def _text(self, task: Task, test: int) -> str:
        include_solution = self._config.include_solution
        if self._config.template is Template.plain:
            return plain_prompt(task, test, self._encoder, include_solution=include_solution)
        messages = chat_messages(task, test, self._encoder, include_solution=include_solution)
        return self._tokenizer.chat().render(messages, add_generation_prompt=len(messages) == 1)
