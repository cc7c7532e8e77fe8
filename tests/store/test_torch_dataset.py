import pickle
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.heavy
DataLoader = torch.utils.data.DataLoader

from pipeline.store import ActivationStore  # noqa: E402
from pipeline.store.read.torch_dataset import ActivationDataset  # noqa: E402
from tests.hub import contents, hub_for_this_process  # noqa: E402
from tests.store.example_store import all_tokens, copy_store, write_store  # noqa: E402


def tokens_of(batches) -> list[tuple[int, int]]:
    return [pair for b in batches for pair in zip(b["documents"].tolist(), b["tokens"].tolist(), strict=True)]


def test_a_data_loader_gets_whole_batches(tmp_path):
    copy_store(str(tmp_path))
    store = ActivationStore.open(tmp_path)
    dataset = ActivationDataset(store, ["blocks.1.resid_post", "blocks.3.resid_post"], 16, stack=True)
    batches = list(DataLoader(dataset, batch_size=None))
    assert batches[0]["activations"].shape == (16, 2, 6)
    assert batches[0]["activations"].dtype == torch.bfloat16
    assert tokens_of(batches) == all_tokens()


def test_every_epoch_reads_the_commit_of_the_first(tmp_path, monkeypatch):
    copy_store(str(tmp_path / "store"))
    with hub_for_this_process(tmp_path, monkeypatch) as server:
        server.push("datasets/owner/acts", contents(tmp_path / "store"))
        dataset = ActivationDataset("hf://datasets/owner/acts", "blocks.1.resid_post", 16)
        server.push("datasets/owner/acts", {"zarr.json": b"{}"})
        assert tokens_of(dataset) == all_tokens()


def test_an_open_stores_blocks_are_read_in_every_pass(tmp_path):
    write_store(tmp_path, finish=False, max_blocks=1)
    dataset = ActivationDataset(ActivationStore.open(tmp_path), "blocks.1.resid_post", 16)
    before = tokens_of(dataset)
    write_store(tmp_path)
    assert tokens_of(dataset) == tokens_of(pickle.loads(pickle.dumps(dataset))) == before


def passes_of(path: Path, num_passes: int, workers: int) -> list[list[tuple[int, int]]]:
    """The tokens of each pass, from all workers, sorted."""
    store, options = ActivationStore.open(path), {"shuffle": True, "seed": 1, "framework": "torch", "world": workers}
    readers = [store.batches("blocks.1.resid_post", 4, rank=rank, **options) for rank in range(workers)]
    return [sorted(tokens_of(vars(batch) for reader in readers for batch in reader)) for _ in range(num_passes)]


def test_every_iteration_is_another_pass_unless_the_epoch_is_set(tmp_path):
    copy_store(str(tmp_path))
    dataset = ActivationDataset(tmp_path, "blocks.1.resid_post", 4, shuffle=True, seed=1)
    loader = DataLoader(dataset, batch_size=None)
    passes = [tokens_of(loader) for _ in range(3)]
    assert len({tuple(tokens) for tokens in passes}) == 3
    assert all(sorted(tokens) == sorted(all_tokens()) for tokens in passes)
    for epoch in (2, 0, 0):
        dataset.set_epoch(epoch)
        assert tokens_of(loader) == passes[epoch]


def test_workers_divide_the_store_and_agree_on_the_pass(tmp_path):
    copy_store(str(tmp_path))
    dataset = ActivationDataset(tmp_path, "blocks.1.resid_post", 4, shuffle=True, seed=1)
    options = {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True}
    loader = DataLoader(dataset, batch_size=None, **options)
    expected = passes_of(tmp_path, 2, 2)
    seen = [sorted(tokens_of(loader)) for _ in range(2)]
    assert seen == expected
    assert expected[0] != expected[1]
    assert all(len(set(tokens)) == len(tokens) >= 0.6 * len(all_tokens()) for tokens in seen)
    dataset.set_epoch(0)
    assert sorted(tokens_of(loader)) == expected[0]
