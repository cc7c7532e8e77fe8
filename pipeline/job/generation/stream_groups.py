"""A stream's prompts, and the groups of their completions, which are stored in order."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from pipeline.data.documents import STREAM_START, Cursor, SkippedDocument
from pipeline.data.feed import Demand
from pipeline.data.tokenised import StreamDocuments, TokenisedDocument
from pipeline.job.generation.generator import Completion, Prompt
from pipeline.store.generated.documents import GeneratedGroups, Group


@dataclass
class _OpenGroup:
    """A group in which completions are missing: `missing` has the index in its items by prompt number and sample."""

    group: Group
    missing: dict[tuple[int, int], int]


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
        before_write: Callable[[], None] = lambda: None,
        samples: int = 1,
    ) -> None:
        """`demand` counts documents from `start` on. `number` returns a prompt's number for its cursor, and `describe`
        the columns of a completed document. `before_write` is called before each group is stored. `samples` of each
        prompt are documents, one after the other.

        Raises StoreInvalid for a damaged stored group.
        """
        self._groups = groups
        self._number = number
        self._describe = describe
        self._demand = demand
        self._before_write = before_write
        self._samples = samples
        self._start = start
        stored, first = set(groups.stored()), start.ordinal // groups.size
        index, last = first, None
        while index in stored:
            if demand.has_limit or index + 1 not in stored:
                last = groups.read(index)
                self._count(demand, last.documents)
            index += 1
        if last is None and first - 1 in stored:
            last = groups.read(first - 1)
        self._is_over = last is not None and last.exhausted
        # Without the group before, the prompts of earlier groups, which are not needed any more, are read again.
        self._new_groups = (
            islice(self._read_groups(prompts, STREAM_START, 0), index, None)
            if last is None
            else self._read_groups(prompts, last.next, index)
        )
        self._open: deque[_OpenGroup] = deque()

    @property
    def stream(self) -> int:
        return self._groups.stream

    @property
    def is_done(self) -> bool:
        """Whether no more prompts are needed, because the open groups will meet the demand even with the shortest
        completions, or because there are no more prompts."""
        expected = copy(self._demand)
        for open_group in self._open:
            self._count(expected, open_group.group.documents)
        return self._is_over or expected.is_met

    def next_prompts(self) -> list[Prompt]:
        """The prompts of the next group. Raises InputError for an invalid document, unless these are skipped."""
        group = next(self._new_groups)
        self._is_over = group.exhausted
        missing = {
            (self._number(item.cursor), item.cursor.ordinal % self._samples): index
            for index, item in enumerate(group.items)
            if isinstance(item, TokenisedDocument)
        }
        self._open.append(_OpenGroup(group, missing))
        tokens = {number: group.items[index].tokens for (number, _), index in missing.items()}
        prompts = [Prompt(*item) for item in tokens.items()]
        self._store_complete()
        return prompts

    def wants(self, prompt: Prompt) -> bool:
        """Whether a prompt from `next_prompts` is still needed."""
        return any((prompt.number, 0) in open_group.missing for open_group in self._open)

    def complete(self, completion: Completion) -> None:
        """Adds a completion, and stores the groups that are then complete."""
        place = (completion.number, completion.sample)
        open_group = next((each for each in self._open if place in each.missing), None)
        if open_group is None:  # its group was dropped
            return
        group, index = open_group.group, open_group.missing.pop(place)
        prompt = group.items[index]
        document = replace(prompt.document, info=prompt.document.info | self._describe(prompt, completion))
        tokens = np.concatenate([prompt.tokens, completion.tokens])
        group.items[index] = replace(prompt, document=document, tokens=tokens)
        group.activations[index] = {key.name: values for key, values in completion.activations.items()}
        self._store_complete()

    def _read_groups(self, prompts: StreamDocuments, start: Cursor, index: int) -> Iterator[Group]:
        """The groups of prompts from `start` on, numbered from `index` on. The last one has fewer than the others.
        `start` and `Group.next` count prompts, and the cursors of a group's documents count samples."""
        documents, is_last = prompts.read(start), False
        while not is_last:
            items: list[TokenisedDocument | SkippedDocument] = []
            num_samples = 0
            while num_samples < self._groups.size and (item := next(documents, None)) is not None:
                if isinstance(item, SkippedDocument):
                    items.append(item)
                    continue
                start = replace(item.cursor, document=item.cursor.document + 1, ordinal=item.cursor.ordinal + 1)
                items += (self._sample(item, number) for number in range(self._samples))
                num_samples += self._samples
            is_last = num_samples < self._groups.size
            end = Cursor(shard=prompts.num_shards, ordinal=start.ordinal)
            yield Group(index, items, end if is_last else start, is_last)
            index += 1

    def _sample(self, prompt: TokenisedDocument, number: int) -> TokenisedDocument:
        """One of a prompt's documents."""
        if self._samples == 1:
            return prompt
        document = replace(
            prompt.document, id=f"{prompt.document.id}/{number}", info={**prompt.document.info, "sample": number}
        )
        cursor = replace(prompt.cursor, ordinal=prompt.cursor.ordinal * self._samples + number)
        return replace(prompt, document=document, cursor=cursor)

    def _store_complete(self) -> None:
        while self._open and not self._open[0].missing and not self._demand.is_met:
            self._before_write()
            stored = self._groups.write(self._open.popleft().group)  # perhaps another run's
            self._count(self._demand, stored.documents)
        if self._demand.is_met:
            self._open.clear()

    def _count(self, demand: Demand, documents: Sequence[TokenisedDocument]) -> None:
        for document in documents:
            if document.cursor.ordinal >= self._start.ordinal:
                demand.add(len(document.tokens))
