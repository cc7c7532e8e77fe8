"""Models and tokenizers of the Hub: one commit per start, identity by content, and requests that fail temporarily."""

import json
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest

from pipeline.config import composing
from pipeline.config.schema import HfData
from pipeline.core import hub
from pipeline.core.errors import CheckpointError, InputError, PipelineError
from pipeline.data.files import find_files
from pipeline.data.hf import HfSource
from pipeline.data.text.tokenizer import load_tokenizer
from pipeline.job.job import Job
from pipeline.job.opening import open_job
from pipeline.models.registry import open_model
from pipeline.store.write.store_writer import StoreWriter
from tests.hub import Hub, contents, hub_for_this_process, lead_to
from tests.jobs import write_text
from tests.models.adapter_files import write_adapter
from tests.store.fault_proxy import Fault, FaultProxy

TINY = contents(composing.PACKAGE / "assets" / "tiny-qwen2")
MODEL, TEXT = "models/owner/tiny", "datasets/owner/text"
ROWS = b"\n".join(json.dumps({"text": f"a text, number {row}; " * 30}).encode() for row in range(60))
FAULTS = (Fault.too_many_requests, Fault.unavailable, Fault.refused, Fault.unanswered, Fault.short)


@pytest.fixture
def server(tmp_path: Path, monkeypatch) -> Iterator[Hub]:
    """A local Hub, with an empty cache."""
    with hub_for_this_process(tmp_path, monkeypatch) as server:
        server.push(MODEL, TINY)
        yield server


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The seconds that would have been waited between attempts."""
    waits: list[float] = []
    clock = SimpleNamespace(sleep=waits.append, time=time.time)
    monkeypatch.setattr("pipeline.core.requests.time", clock)
    monkeypatch.setattr("huggingface_hub.file_download.time", clock)
    return waits


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"), files=1, documents=8)


def job(text: Path, store: Path, *overrides: str) -> Job:
    return open_job(
        composing.compose([f"data.path={text}", f"store.path={store}", "model.path=owner/tiny", *overrides])
    )


def with_other_weights(files: dict[str, bytes]) -> dict[str, bytes]:
    weights = files["model.safetensors"]
    return files | {"model.safetensors": weights[:-2] + bytes([weights[-2] ^ 1, weights[-1]])}


def with_other_config(files: dict[str, bytes]) -> dict[str, bytes]:
    return files | {"config.json": files["config.json"].replace(b'"rope_theta": 10000.0', b'"rope_theta": 50000.0')}


PUSHES = {
    "model card": (lambda files: files | {"README.md": b"a better description"}, []),
    "weights": (with_other_weights, ["model.weights"]),
    "config": (with_other_config, ["model.architecture.rope.theta"]),
    "tokenizer": (lambda files: files | {"tokenizer.json": files["tokenizer.json"] + b"\n"}, ["tokenizer.sha256"]),
}


@pytest.mark.parametrize("case", PUSHES)
def test_a_push_matters_if_it_changes_the_content(case: str, server: Hub, text: Path, tmp_path: Path) -> None:
    edit, different = PUSHES[case]
    before = job(text, tmp_path / "store").metadata
    commit = server.push(MODEL, edit(TINY))
    after = job(text, tmp_path / "store").metadata
    assert [difference.key for difference in before.differences(after)] == different
    assert after.config["model"]["commit"] == commit != before.config["model"]["commit"]


def test_a_copy_on_disk_is_the_same_model(server: Hub, text: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, content in TINY.items():
        (copy / name).write_bytes(content)
    ours = job(text, tmp_path / "store").metadata
    assert job(text, tmp_path / "store", f"model.path={copy}").metadata.fingerprint() == ours.fingerprint()


@pytest.mark.parametrize(
    ("made_with", "resumed_with", "moves"),
    [("null", "null", False), ("main", "main", False), ("null", "main", True)],
)
def test_a_store_is_resumed_at_its_commit(
    made_with: str, resumed_with: str, moves: bool, server: Hub, text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    first = job(text, path, f"model.revision={made_with}")
    StoreWriter.open(str(path), first.metadata, first.layout)
    commit = first.model.checkpoint.commit
    moved = server.push(MODEL, with_other_weights(TINY) | {"README.md": b"a better description"})
    again = job(text, path, f"model.revision={resumed_with}")
    assert again.model.checkpoint.commit == (moved if moves else commit)
    assert [difference.key for difference in first.metadata.differences(again.metadata)] == ["model.weights"] * moves


def test_an_adapter_of_the_hub_is_one_at_a_commit(server: Hub, text: Path, tmp_path: Path) -> None:
    def adapter(scale: float) -> dict[str, bytes]:
        factor = np.full((4, 128), scale, np.float32)
        module = "model.layers.0.self_attn.q_proj"
        write_adapter(tmp_path / "local", {f"{module}.lora_A.weight": factor, f"{module}.lora_B.weight": factor.T})
        return contents(tmp_path / "local")

    commit = server.push("models/owner/lora", adapter(1.0) | {f"deep/{name}": x for name, x in adapter(2.0).items()})
    first = job(text, tmp_path / "store", "model.adapter=owner/lora").metadata
    assert first.config["model"]["adapter_commit"] == commit != first.config["model"]["commit"]
    server.push("models/owner/lora", adapter(3.0))
    for address, same in ((f"hf://owner/lora@{commit}", True), (f"hf://owner/lora@{commit}/deep", False)):
        found = job(text, tmp_path / "store", f"model.adapter={address}").metadata
        assert [difference.key for difference in first.differences(found)] == ([] if same else ["model.adapter"])
    moved = job(text, tmp_path / "store", "model.adapter=owner/lora").metadata
    assert [difference.key for difference in first.differences(moved)] == ["model.adapter"]
    with pytest.raises(CheckpointError, match=r"model.adapter: hf://owner/tiny has none of adapter_config.json"):
        job(text, tmp_path / "store", "model.adapter=owner/tiny")


def test_all_files_are_of_one_commit(server: Hub, text: Path, tmp_path: Path) -> None:
    (commit,) = server.refs.values()

    def push_after_the_first_request(request: str) -> None:
        if len(server.requests) == 2:
            server.push(MODEL, PUSHES["tokenizer"][0](with_other_weights(TINY)))

    expected = job(text, tmp_path / "store", f"model.path={composing.PACKAGE}/assets/tiny-qwen2").metadata.fingerprint()
    server.before = push_after_the_first_request
    metadata = job(text, tmp_path / "store").metadata
    assert len(server.commits) == 2
    assert metadata.config["model"]["commit"] == commit
    assert metadata.fingerprint() == expected


def test_a_plan_fetches_no_weights(server: Hub, text: Path, tmp_path: Path) -> None:
    job(text, tmp_path / "store")
    assert not [request for request in server.requests if "safetensors" in request]


@pytest.mark.parametrize("fault", FAULTS)
def test_requests_that_fail_temporarily_are_repeated(fault: Fault, server: Hub, waits, monkeypatch) -> None:
    server.push(TEXT, {"README.md": b"---\nlicense: mit\n---\n", "data/train.jsonl": ROWS, "data/one.parquet": ROWS})
    reference = everything()
    with FaultProxy(server.address).serving() as proxy:
        proxy.reset(0.35, seed=len(fault), kinds=[fault])
        lead_to(proxy.url, monkeypatch)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", huggingface_hub.constants.HF_HUB_CACHE + "2")
        assert everything() == reference
        assert proxy.faults[fault] >= 5
    assert len(waits) >= 5


def everything() -> dict[str, object]:
    """Everything that a start requests: a model, its tokenizer, a listing of files, and a data set's first row."""
    model, tokenizer = open_model("owner/tiny"), load_tokenizer("owner/tiny")
    source = HfSource(HfData(source="hf", path="owner/text", text="{{ text }}", data_files="data/*.jsonl"), None)
    return {
        "model": model.identity(),
        "tokenizer": tokenizer.identity() | {"chat": tokenizer.chat_identity()},
        "files": [(file.name, file.size) for file in find_files("hf://datasets/owner/text/data", ".parquet")],
        "source": source.fingerprint() | {"shards": source.shards, "first": next(source.read(0, 0)).text},
    }


def test_processes_of_a_host_fetch_each_file_once(server: Hub) -> None:
    (commit,) = server.refs.values()
    arrived = threading.Barrier(4)

    def start() -> None:
        arrived.wait()
        open_model("owner/tiny", revision=commit).checkpoint.generation_config  # noqa: B018
        load_tokenizer("owner/tiny", revision=commit)

    with ThreadPoolExecutor(4) as pool:
        for started in [pool.submit(start) for _ in range(4)]:
            started.result()
    requests = [request for request in server.requests if request.startswith("GET") and "/resolve/" in request]
    assert len(requests) == len({*requests}), sorted(requests)


def test_a_cache_that_cannot_be_written_is_read(server: Hub) -> None:
    commit = open_model("owner/tiny").checkpoint.commit
    locks = Path(huggingface_hub.constants.HF_HUB_CACHE) / ".locks"
    shutil.rmtree(locks)
    locks.touch()  # root may write into any folder
    for revision in (None, commit):
        assert open_model("owner/tiny", revision=revision).checkpoint.config["model_type"] == "qwen2"


def test_the_number_of_attempts_is_bounded(server: Hub, waits) -> None:
    server.failures = [(503, {})] * 100
    with pytest.raises(
        PipelineError,
        match=r"HEAD http.*owner/tiny.* failed 9 times, most recently with: .*503.*try again.*If model.path",
    ):
        open_model("owner/tiny")
    assert sum("owner/tiny" in request for request in server.requests) == 9
    assert 60 < sum(waits) < 120
    assert hub.HubUnavailable.exit_code == 1


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7),
        ({"RateLimit": '"api";r=0;t=55'}, 56),
        ({"Retry-After": "99999999999"}, 310),
    ],
)
def test_the_server_determines_the_wait(headers: dict[str, str], seconds: float, server: Hub, waits) -> None:
    server.failures = [(429, headers)]
    open_model("owner/tiny")
    assert waits == [seconds]


def test_a_commit_has_a_longer_timeout() -> None:
    """A second attempt would conflict with the one that the Hub is still processing."""
    seen = []

    def answer(request: hub.httpx.Request) -> hub.httpx.Response:
        seen.append(request.extensions["timeout"])
        return hub.httpx.Response(200)

    client = hub._Client(transport=hub.httpx.MockTransport(answer), timeout=30.0)
    for verb in ("preupload", "commit"):
        client.post(f"{huggingface_hub.constants.ENDPOINT}/api/datasets/owner/name/{verb}/main")
    assert [timeouts["read"] for timeouts in seen] == [30.0, 300.0]
    assert [timeouts["write"] for timeouts in seen] == [30.0, 300.0]


def test_requests_to_other_services_are_not_repeated(waits) -> None:
    """`datasets` asks for figures that it does not need; waiting for them would delay every start by a minute."""
    hub.repeat_requests()
    for url in ("http://datasets-server.127.0.0.1:1/info", "http://127.0.0.1:1/api/telemetry/x"):
        with pytest.raises(hub.httpx.TransportError):
            hub.get_session().head(url)
    assert waits == []


@pytest.mark.parametrize("status", [401, 404])
def test_refused_requests_are_not_repeated(status: int, server: Hub, waits) -> None:
    server.statuses = {MODEL: status, TEXT: status}
    for opened, kind, key in [
        (lambda: open_model("owner/tiny"), CheckpointError, "model.path=owner/tiny"),
        (lambda: load_tokenizer("owner/tiny"), InputError, "model.tokenizer or model.path=owner/tiny"),
        (lambda: find_files("hf://datasets/owner/text", ".parquet"), InputError, "data.path"),
    ]:
        with pytest.raises(kind, match=key) as caught:
            opened()
        assert caught.value.exit_code == 2
    assert waits == []


@pytest.mark.parametrize("path", ["./tiny", "some/owner/tiny", "owner/tiny/", "folder/tiny", "/nowhere/tiny"])
def test_a_local_path_is_not_requested_from_the_hub(path: str, server: Hub, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected a directory.*got none of them.*Check the path"):
        open_model(path)
    with pytest.raises(InputError, match="is neither a directory nor a Hub id"):
        load_tokenizer(path)
    assert server.requests == []


def test_an_unknown_revision_is_refused(server: Hub) -> None:
    with pytest.raises(CheckpointError, match="revision nowhere.*Check the spelling"):
        open_model("owner/tiny", revision="nowhere")


def test_without_the_hub_the_cache_is_used_and_absence_is_not_guessed(server: Hub, waits, caplog, monkeypatch) -> None:
    commit = open_model("owner/tiny").checkpoint.commit
    lead_to("http://127.0.0.1:1", monkeypatch)
    with caplog.at_level(logging.WARNING, "pipeline"):
        model = open_model("owner/tiny")
    assert model.checkpoint.commit == commit
    assert f"Using commit {commit} of owner/tiny from the Hub's cache" in caplog.text
    with pytest.raises(hub.HubUnavailable):  # not "has no weights", which is not retried
        model.identity()
    with pytest.raises(hub.HubUnavailable):
        model.checkpoint.generation_config  # noqa: B018
