import pytest

torch = pytest.importorskip("torch")
DataLoader = torch.utils.data.DataLoader

from pipeline.store.read.torch_dataset import ActivationDataset  # noqa: E402
from tests.hub import contents, hub_for_this_process  # noqa: E402
from tests.store.example_store import all_tokens, copy_store  # noqa: E402


def tokens_of(batches) -> list[tuple[int, int]]:
    return [pair for b in batches for pair in zip(b["documents"].tolist(), b["tokens"].tolist(), strict=True)]


def test_a_data_loader_gets_whole_batches(tmp_path):
    copy_store(str(tmp_path))
    dataset = ActivationDataset(tmp_path, [(1, "resid_post"), (3, "resid_post")], 16, stack=True)
    batches = list(DataLoader(dataset, batch_size=None))
    assert batches[0]["activations"].shape == (16, 2, 6)
    assert batches[0]["activations"].dtype == torch.bfloat16
    assert tokens_of(batches) == all_tokens()


def test_every_epoch_reads_the_commit_of_the_first(tmp_path, monkeypatch):
    copy_store(str(tmp_path / "store"))
    with hub_for_this_process(tmp_path, monkeypatch) as server:
        server.push("datasets/owner/acts", contents(tmp_path / "store"))
        dataset = ActivationDataset("hf://datasets/owner/acts", (1, "resid_post"), 16)
        server.push("datasets/owner/acts", {"zarr.json": b"{}"})
        assert tokens_of(dataset) == all_tokens()


def test_workers_divide_the_store(tmp_path):
    copy_store(str(tmp_path))
    dataset = ActivationDataset(tmp_path, (1, "resid_post"), 4, shuffle=True, seed=1)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    seen = tokens_of(loader)
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(all_tokens())
    assert len(seen) >= 0.6 * len(all_tokens())
