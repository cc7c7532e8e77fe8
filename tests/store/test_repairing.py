"""The commands for repairing a store delete what its next run writes again."""

import pytest

from pipeline.store.check.repairing import _numbered, repair_steps
from pipeline.store.format.commits import commit_key
from pipeline.store.format.problems import Problem, Remedy
from pipeline.store.generated.group_keys import group_key
from pipeline.store.io.storage import Storage

NUM_STREAMS = 2
BLOCKS = {0: range(12), 1: (0, 1, 2, 4)}  # by stream, the blocks with a record
COMMITS = "rm {}/_commits/stream-0000"


@pytest.fixture
def storage(tmp_path) -> Storage:
    storage = Storage.open(str(tmp_path / "store"))
    for stream, blocks in BLOCKS.items():
        for block in blocks:
            storage.write(commit_key(stream, block), b"{}")
    for index in range(4):
        storage.write(group_key(1, index), b"")
    return storage


@pytest.mark.parametrize(
    ("remedy", "keys", "commands"),
    [
        (Remedy.recompute, ["embed/c/14/0/0"], [COMMITS + "0/block-{{000007..000011}}.json"]),
        (Remedy.recompute, ["blocks.2.resid_post/c/20/0/0"], [COMMITS + "0/block-{{000010..000011}}.json"]),
        (Remedy.recompute, ["_documents/stream-00000/block-000011.parquet"], [COMMITS + "0/block-000011.json"]),
        (
            Remedy.recompute,
            ["_features/blocks.4.resid_post/stream-00000/block-000011.csc"],
            [COMMITS + "0/block-000011.json"],
        ),
        (
            Remedy.recompute,
            ["_stats/stream-00001/block-000004.parquet", "tokens/c/3/0"],
            [COMMITS + "1/block-{{000001..000002}}.json", COMMITS + "1/block-000004.json"],
        ),
        (Remedy.recompute, ["_commits/stream-00001/a b.txt"], ["rm '{}/_commits/stream-00001/a b.txt'"]),
        (
            Remedy.recompute,
            ["_commits/stream-00007/block-000000.json"],
            ["rm -r {}/_commits/stream-00007/"],
        ),
        (Remedy.rewrite_array, ["embed/zarr.json", "zarr.json"], ["rm {}/embed/zarr.json"]),
        (Remedy.tabulate, ["_blocks/all.npy", "_blocks/all.npy"], ["rm {}/_blocks/all.npy"]),
        (Remedy.merge_again, ["stats/zarr.json", "stats/embed/"], ["rm -r {}/stats/"]),
        (Remedy.regenerate, [group_key(1, 2)], ["rm {}/_generated/stream-00001/group-{{000002..000003}}.parquet"]),
        (Remedy.other_dtype, ["embed/c/3/0/0"], []),
        (Remedy.restore, ["zarr.json"], []),
    ],
)
def test_commands_delete_the_objects_to_be_written_again(storage, remedy, keys, commands):
    first, *steps = repair_steps(storage, NUM_STREAMS, [Problem(key, "is wrong", remedy) for key in keys])
    assert first == remedy
    assert steps == [f"    {command.format(storage.path)}" for command in commands]


def test_a_missing_last_record_needs_no_deletion(storage):
    steps = repair_steps(
        storage, NUM_STREAMS, [Problem("_commits/stream-00001", "the store was completed with 5 blocks")]
    )
    assert list(steps) == [Remedy.rerun_missing]


def test_a_long_list_is_cut(storage):
    problems = [Problem(f"embed/c/{k}/0/0", "belongs to no committed block", Remedy.discard) for k in range(30)]
    _, *commands, rest = repair_steps(storage, NUM_STREAMS, problems)
    assert (len(commands), rest) == (20, "    ... and 10 more: all that are named above")


@pytest.mark.parametrize(
    ("url", "file", "folder"),
    [
        ("gs://bucket/store", "gcloud storage rm", "gcloud storage rm --recursive"),
        ("s3://bucket/store", "aws s3 rm", "aws s3 rm --recursive"),
    ],
)
def test_buckets_get_the_commands_of_their_tools(url, file, folder):
    problems = [Problem("_blocks/all.npy", "", Remedy.tabulate), Problem("stats/", "", Remedy.merge_again)]
    steps = list(repair_steps(Storage.open(url), NUM_STREAMS, problems))
    assert steps[1::2] == [f"    {file} {url}/_blocks/all.npy", f"    {folder} {url}/stats/"]


def test_commands_for_records_on_s3_use_loops_and_are_never_cut():
    numbers = [*range(0, 60, 2), *range(100, 103)]
    commands = _numbered(Storage.open("s3://bucket/store"), "_commits/stream-00001/block-", numbers, ".json")
    assert len(commands) == 31
    assert commands[0] == "aws s3 rm s3://bucket/store/_commits/stream-00001/block-000000.json"
    assert commands[-1] == (
        "for n in {000100..000102}; do aws s3 rm s3://bucket/store/_commits/stream-00001/block-$n.json; done"
    )


def test_braces_keep_the_width_of_keys_beyond_a_million(storage):
    commands = _numbered(storage, "block-", range(999_998, 1_000_002), ".json")
    numbers = [command.partition("block-")[2] for command in commands]
    assert numbers == ["{999998..999999}.json", "{1000000..1000001}.json"]


def test_the_commands_for_many_damaged_streams_are_all_printed(tmp_path):
    storage = Storage.open(str(tmp_path / "store"))
    for stream in range(30):
        storage.write(commit_key(stream, 0), b"{}")
    problems = [Problem(f"embed/c/{stream}/0/0", "is wrong", Remedy.recompute) for stream in range(30)]
    assert len(list(repair_steps(storage, 30, problems))) == 31
