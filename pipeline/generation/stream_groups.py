"""A stream's prompts, and the groups of their completions, which are stored in order."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from pipeline.core.sites import ActivationKey
from pipeline.data.demand import Demand
from pipeline.data.documents import STREAM_START, Cursor, SkippedDocument
from pipeline.data.tokenised import StreamDocuments, TokenisedDocument
from pipeline.generation.generator import Completion, Prompt
from pipeline.store.generated.documents import GeneratedGroups, Group


@dataclass
class _OpenGroup:
    """A group in which completions are missing."""

    items: list[TokenisedDocument | SkippedDocument]
    next: Cursor
    exhausted: bool
    num_missing: int
    kept: dict[int, Mapping[ActivationKey, np.ndarray]]  # activations, by index in `items`


class StreamGroups:
    """The groups that are still to be generated for a stream, until the stored groups meet `demand` or the prompts end.

    The stored groups depend only on the prompts and the demand: a group is stored after all earlier groups, and dropped
    if those meet the demand.
    """

    def __init__(
        self,
        groups: GeneratedGroups,
        prompts: StreamDocuments,
        demand: Demand,
        start: Cursor,
        number: Callable[[Cursor], int],
        describe: Callable[[TokenisedDocument, Completion], dict[str, object]],
        kept: Sequence[ActivationKey] = (),
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        """`demand` counts documents from `start` on. `number` returns a prompt's number for its cursor, and `describe`
        the columns of a completed document. `kept` are the activations that completions include. `before_write`
        is called before each group is stored.

        Raises StoreInvalid for a damaged stored group.
        """
        self._groups = groups
        self._number = number
        self._describe = describe
        self._demand = demand
        self._kept = kept
        self._before_write = before_write
        self._start = start
        first = start.ordinal // groups.size
        self._num_stored = groups.count([key.name for key in kept], first)
        last = groups.read(self._num_stored - 1) if self._num_stored else None
        self._next = last.next if last else STREAM_START
        self._is_over = last is not None and last.exhausted
        if demand.has_limit:
            for index in range(first, self._num_stored):
                self._count(demand, groups.read(index).documents)
        self._num_shards = prompts.num_shards
        self._prompts = prompts.read(self._next)
        self._open: deque[_OpenGroup] = deque()
        self._pending: dict[int, tuple[_OpenGroup, int]] = {}  # prompt number -> its group, its index in the items

    @property
    def stream(self) -> int:
        return self._groups.stream

    @property
    def is_done(self) -> bool:
        """Whether no more prompts are needed, because the open groups will meet the demand even with the shortest
        completions, or because there are no more prompts."""
        expected = copy(self._demand)
        for group in self._open:
            self._count(expected, [item for item in group.items if isinstance(item, TokenisedDocument)])
        return self._is_over or expected.is_met

    def next_prompts(self) -> list[Prompt]:
        """The prompts of the next group. Raises InputError for an invalid document, unless these are skipped."""
        items: list[TokenisedDocument | SkippedDocument] = []
        prompts: list[Prompt] = []
        indices: list[int] = []
        while len(prompts) < self._groups.size and (item := next(self._prompts, None)) is not None:
            if isinstance(item, TokenisedDocument):
                self._next = replace(item.cursor, document=item.cursor.document + 1, ordinal=item.cursor.ordinal + 1)
                prompts.append(Prompt(self._number(item.cursor), item.tokens))
                indices.append(len(items))
            items.append(item)
        self._is_over = len(prompts) < self._groups.size
        if self._is_over:
            self._next = Cursor(shard=self._num_shards, ordinal=self._next.ordinal)
        group = _OpenGroup(items, self._next, self._is_over, len(prompts), {})
        self._open.append(group)
        self._pending |= {prompt.number: (group, index) for prompt, index in zip(prompts, indices, strict=True)}
        self._store_complete()
        return prompts

    def wants(self, prompt: Prompt) -> bool:
        """Whether a prompt from `next_prompts` is still needed."""
        return prompt.number in self._pending

    def complete(self, completion: Completion) -> None:
        """Adds a completion, and stores the groups that are then complete."""
        if completion.number not in self._pending:  # its group was dropped
            return
        group, index = self._pending.pop(completion.number)
        prompt = group.items[index]
        document = replace(prompt.document, info=prompt.document.info | self._describe(prompt, completion))
        group.items[index] = replace(
            prompt, document=document, tokens=np.concatenate([prompt.tokens, completion.tokens])
        )
        if self._kept:
            group.kept[index] = completion.activations
        group.num_missing -= 1
        self._store_complete()

    def _store_complete(self) -> None:
        while self._open and not self._open[0].num_missing and not self._demand.is_met:
            group = self._open.popleft()
            stored = Group(self._num_stored, tuple(group.items), group.next, group.exhausted)
            self._before_write()
            stored = self._groups.write(stored, self._kept_activations(group))  # perhaps another run's
            self._num_stored += 1
            self._count(self._demand, stored.documents)
        if self._demand.is_met:
            self._open.clear()
            self._pending.clear()

    def _kept_activations(self, group: _OpenGroup) -> dict[str, np.ndarray]:
        """The activations of the group's documents, concatenated, by array name."""
        documents = [group.kept[index] for index in sorted(group.kept)]
        if not documents:
            return {key.name: np.empty(0) for key in self._kept}
        return {key.name: np.concatenate([arrays[key] for arrays in documents]) for key in self._kept}

    def _count(self, demand: Demand, documents: Sequence[TokenisedDocument]) -> None:
        for document in documents:
            if document.cursor.ordinal >= self._start.ordinal:
                demand.add(len(document.tokens))
