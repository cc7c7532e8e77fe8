"""The tokens that `capture.positions` selects, and their slots."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from material import memory_source, text_stream, word_tokenizer

from pipeline.config.choices import LongDocuments, Packing, Positions
from pipeline.config.schema import BatchConfig, CaptureConfig
from pipeline.core.errors import ConfigError
from pipeline.data.selection import open_selection, slots_per_row

LENGTH = 12
BATCH = BatchConfig(length=LENGTH)
TOKENIZER = word_tokenizer()
SELECTIONS = {
    "last": CaptureConfig(positions=Positions.last, per_row=3),
    "every": CaptureConfig(positions=Positions.every, every=5),
    "token": CaptureConfig(positions=Positions.token, token="w7", per_row=3),
    "regex": CaptureConfig(positions=Positions.regex, regex="[37]$", per_row=2),
    "sample": CaptureConfig(positions=Positions.sample, rate=0.4, seed=3),
}


def blocks(shards, capture: CaptureConfig, packing=Packing.pack, long_documents=LongDocuments.split):
    selection = open_selection(capture, BATCH, TOKENIZER)
    stream = text_stream(
        memory_source("/selection", shards),
        TOKENIZER,
        rows_per_block=3,
        length=LENGTH,
        packing=packing,
        long_documents=long_documents,
        selection=selection,
    )
    return list(stream.blocks())


def selected(blocks) -> dict[int, list[int]]:
    """By document, the indices of its selected tokens (counted over its windows), in stored order."""
    found, seen = {}, {}
    for block in blocks:
        for r in range(block.num_rows):
            places = np.full(LENGTH, -1)
            for t in np.flatnonzero(block.segments[r]).tolist():
                document = int(block.documents[r, t])
                places[t] = seen[document] = seen.get(document, -1) + 1
            here = block.selected[r][block.selected[r] >= 0]
            assert (np.diff(here) > 0).all()
            for t in here.tolist():
                found.setdefault(int(block.documents[r, t]), []).append(int(places[t]))
    return found


def expected(name: str, ids: list[int]) -> list[int]:
    """The selected indices, without a limit on slots. Not for samples."""
    windows = range(0, len(ids), LENGTH)
    return {
        "last": [len(ids) - 1],
        "every": [w + p for w in windows for p in range(4, min(LENGTH, len(ids) - w), 5)],
        "token": [p for p, i in enumerate(ids) if i == 7],
        "regex": [p for p, i in enumerate(ids) if i % 10 in (3, 7)],
    }[name]


documents = st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=30), min_size=1, max_size=12)


@pytest.mark.parametrize("name", ["last", "every", "token", "regex"])
@pytest.mark.parametrize("packing", [Packing.pack, Packing.pad])
@given(shard=documents)
def test_every_selected_token_has_a_slot_or_is_counted(name, packing, shard):
    made = blocks([shard], SELECTIONS[name], packing)
    tables = [
        dict(zip(b.table["document"].to_pylist(), b.table["n_unselected"].to_pylist(), strict=True)) for b in made
    ]
    left_out = {k: sum(table.get(k, 0) for table in tables) for k in range(len(shard))}
    slots = SELECTIONS[name].per_row or LENGTH // 5
    found = selected(made)
    for document, ids in enumerate(shard):
        wanted = expected(name, ids)
        kept = [p for k, p in enumerate(wanted) if sum(q // LENGTH == p // LENGTH for q in wanted[:k]) < slots]
        assert found.get(document, []) == kept
        assert left_out[document] == len(wanted) - len(kept)
    assert sum(block.num_tokens for block in made) == sum(map(len, shard))


@given(shard=documents)
def test_a_sample_does_not_depend_on_packing_unless_rows_are_full(shard):
    capture = replace(SELECTIONS["sample"], rate=0.2)  # at most 8 of 12
    assert slots_per_row(capture, BATCH) == 8
    packed, padded, joined = (blocks([shard], capture, packing) for packing in Packing)
    assume(not any(sum(b.table["n_unselected"].to_pylist()) for b in (*packed, *padded, *joined)))
    assert selected(packed) == selected(padded) == selected(joined)


def test_a_sample_follows_its_rate_and_seed():
    shard = [[2] * 120 for _ in range(200)]
    capture = CaptureConfig(positions=Positions.sample, rate=0.1)
    found = [selected(blocks([shard], replace(capture, seed=seed))) for seed in (None, 0, 1)]
    assert found[0] == found[1] != found[2]
    for places in (found[0], found[2]):
        count = sum(map(len, places.values()))
        assert abs(count - 2400) < 5 * np.sqrt(2400)
        of_place = np.bincount(np.concatenate(list(places.values())), minlength=120)
        assert abs(of_place - 20).max() < 5 * np.sqrt(20)


def test_a_full_row_keeps_the_sampled_tokens_with_the_lowest_numbers(monkeypatch):
    monkeypatch.setattr("pipeline.data.selection._SIGMAS", 0)  # so that many rows are full
    shard = [[2] * LENGTH for _ in range(40)]
    capture = CaptureConfig(positions=Positions.sample, rate=0.25)
    assert slots_per_row(capture, BATCH) == 3
    found, counts = selected(blocks([shard], capture)), []
    for document, ids in enumerate(shard):
        places, numbers = open_selection(capture, BATCH, TOKENIZER).choose(np.array(ids, np.int32), document, 0, True)
        assert found.get(document, []) == sorted(places[np.argsort(numbers)[:3]].tolist())
        counts.append(len(places))
    assert max(counts) > 3
    (block,) = blocks([[[2] * LENGTH]], replace(capture, rate=1 - 1e-9))
    assert block.selected.tolist() == [list(range(LENGTH))]


def test_the_last_token_of_a_cut_document_is_the_last_kept_one():
    made = blocks([[[2] * 30, [3] * 5]], SELECTIONS["last"], long_documents=LongDocuments.cut)
    assert selected(made) == {0: [LENGTH - 1], 1: [4]}


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({}, None),
        ({"positions": Positions.every, "every": 8}, 32),
        ({"positions": Positions.every, "every": 100}, 2),
        ({"positions": Positions.last}, 16),
        ({"positions": Positions.last, "per_row": 4}, 4),
        ({"positions": Positions.sample, "rate": 0.1}, 45),  # 25.6 + 4 * 4.8
        ({"positions": Positions.sample, "rate": 0.99}, 256),
    ],
)
def test_slots_of_a_row_follow_the_settings(settings, slots):
    assert slots_per_row(CaptureConfig(**settings), BatchConfig(length=256)) == slots


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"positions": "every"}, "capture.positions=every needs capture.every"),
        ({"positions": "token"}, "capture.positions=token needs capture.token"),
        ({"positions": "every", "every": 13}, "capture.every is 13. Set it to 2 to 12"),
        ({"positions": "last", "per_row": 13}, "capture.per_row is 13. Set it to 1 to 12"),
        ({"positions": "token", "token": "w1 w2"}, "capture.token='w1 w2' is 2 tokens"),
        ({"positions": "regex", "regex": "("}, "capture.regex='\\(' is not a regular expression"),
        ({"positions": "regex", "regex": "no such"}, "capture.regex='no such' matches none of the 1000 tokens"),
    ],
)
def test_contradictory_settings_are_refused(settings, message):
    settings["positions"] = Positions(settings.get("positions", "all"))
    with pytest.raises(ConfigError, match=message):
        open_selection(CaptureConfig(**settings), BATCH, TOKENIZER)
