"""Groups are stored in order, as many as needed, wherever a run resumes and in whatever order completions end."""

import random
from collections import deque

import numpy as np
import pyarrow as pa
import pytest

from pipeline.data.documents import STREAM_START, Cursor, Document, SkippedDocument
from pipeline.data.feed import Demand
from pipeline.data.stream import TokenStream
from pipeline.data.tokenised import TokenisedDocument
from pipeline.job.generation.generator import Completion
from pipeline.job.generation.stream_groups import StreamGroups
from pipeline.store.generated.documents import COMPLETION_SCHEMA, GeneratedGroups
from pipeline.store.io.storage import Storage

SIZE = 3
ROWS, LENGTH = 2, 10


class Prompts:
    """Prompts of two tokens in two source shards of five; the fourth of each shard is skipped."""

    num_shards = 2
    info_schema = pa.schema([])

    def read(self, start: Cursor, should_stop=lambda: False):
        ordinal = start.ordinal
        for shard in range(start.shard, 2):
            for row in range(start.document if shard == start.shard else 0, 5):
                if row == 3:
                    yield SkippedDocument(str(shard), row, "bad")
                    continue
                tokens = np.array([shard, row], np.int32)
                yield TokenisedDocument(
                    Document(f"{shard}-{row}", "", str(shard), row), tokens, Cursor(shard, row, 0, ordinal)
                )
                ordinal += 1


def open_stream(path, budget: int | None = None, start: Cursor = STREAM_START) -> StreamGroups:
    rows = TokenStream(Prompts(), stream=0, num_streams=1, rows_per_block=ROWS, length=LENGTH)
    groups = GeneratedGroups(Storage.open(path), stream=0, num_streams=1, size=SIZE, info_schema=COMPLETION_SCHEMA)
    return StreamGroups(
        groups,
        Prompts(),
        Demand(rows, start, budget),
        start,
        number=lambda cursor: 10 * cursor.shard + cursor.document,
        describe=lambda prompt, completion: {"n_prompt": 2, "n_completion": len(completion.tokens)},
    )


def work(stream: StreamGroups, rng: random.Random, at_most: int = 1000) -> int:
    """Completes prompts in random order, four at a time. Returns their number. An answer depends only on its prompt."""
    prompts, under_way, done = deque(), [], 0
    while done < at_most:
        while len(under_way) < 4 and (prompts or not stream.is_done):
            if not prompts:
                prompts.extend(stream.next_prompts())
            if prompts:
                under_way.append(prompts.popleft())
        if not under_way:
            break
        prompt = under_way.pop(rng.randrange(len(under_way)))
        answer = np.full(1 + prompt.number % 4, prompt.number, np.int32)
        stream.complete(Completion(prompt.number, answer, "length", {}))
        done += 1
    return done


def stored(path) -> dict[str, bytes]:
    storage = Storage.open(path)
    return {key: storage.read(key) for key in storage.list_keys("_generated/")}


@pytest.mark.parametrize(("budget", "num_groups"), [(None, 3), (2, 2), (1000, 3)])
def test_the_groups_do_not_depend_on_the_order_or_on_interruptions(tmp_path, budget, num_groups):
    work(open_stream(tmp_path / "whole", budget), random.Random(0))
    expected = stored(tmp_path / "whole")
    assert len(expected) == num_groups
    for seed in range(1, 6):
        rng, path = random.Random(seed), tmp_path / str(seed)
        while not (stream := open_stream(path, budget)).is_done:
            work(stream, rng, at_most=rng.randrange(1, 9))
        assert stored(path) == expected


def test_no_prompt_is_wanted_once_the_budget_is_met(tmp_path):
    """Long answers meet the budget with fewer prompts than short ones."""
    stream = open_stream(tmp_path, 2)
    prompts = stream.next_prompts() + stream.next_prompts()
    assert not stream.is_done
    for prompt in prompts[:SIZE]:
        assert stream.wants(prompt)
        stream.complete(Completion(prompt.number, np.full(30, 1, np.int32), "length", {}))
    assert stream.is_done
    assert not any(map(stream.wants, prompts))
    assert len(stored(tmp_path)) == 1


def test_a_larger_budget_resumes_from_the_stored_groups(tmp_path):
    work(open_stream(tmp_path / "whole"), random.Random(0))
    assert work(open_stream(tmp_path / "store", 2), random.Random(0)) >= 2 * SIZE
    before = stored(tmp_path / "store")
    assert work(open_stream(tmp_path / "store"), random.Random(1)) == 8 - SIZE * len(before)
    assert stored(tmp_path / "store") == stored(tmp_path / "whole")
    assert open_stream(tmp_path / "store").is_done


def test_missing_groups_are_generated_again_if_they_are_needed(tmp_path):
    """Groups may be deleted when blocks have their documents, and damaged ones are."""
    work(open_stream(tmp_path), random.Random(0))
    whole, storage = stored(tmp_path), Storage.open(tmp_path)
    keys = sorted(whole)
    for lost in ([0], [1], [2], [0, 1], [0, 2], [0, 1, 2]):
        for start in (STREAM_START, Cursor(0, 4, 0, 3), Cursor(1, 0, 0, 4)):
            for group in lost:
                storage.write(keys[group], None)
            needed = range(start.ordinal // SIZE, 3)
            while not (stream := open_stream(tmp_path, start=start)).is_done:
                work(stream, random.Random(1), at_most=4)
            assert stored(tmp_path) == {
                key: whole[key] for group, key in enumerate(keys) if group in needed or group not in lost
            }
            work(open_stream(tmp_path), random.Random(0))
    assert stored(tmp_path) == whole
