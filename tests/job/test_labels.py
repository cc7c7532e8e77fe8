"""Labels of tokens: from a data set of conversations through packing, windows, resuming and selection to readers."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from pipeline import Extractor, Stream
from pipeline.config import composing
from pipeline.core.errors import ArgumentError, ConfigError, InputError, StoreError
from pipeline.data.text.labels import Label, Role
from pipeline.data.text.tokenizer import load_tokenizer
from pipeline.inspect import main as inspect
from pipeline.store import ActivationStore, TokenFilter
from pipeline.store.check.verifying import verify_store
from tests.jobs import assert_same_store, run_first_stream, run_here
from tests.store.written_check import assert_well_written

pytestmark = pytest.mark.heavy
MODEL = str(composing.PACKAGE / "assets" / "tiny-qwen2")
TOKENIZER = load_tokenizer(MODEL)
KEY = "blocks.0.resid_post"


def conversation(rng: random.Random) -> list[dict[str, str]]:
    def text() -> str:
        return " ".join(rng.choices(["the", "cat", "sat", "é", "☃", "mat"], k=rng.randint(0, 40)))

    roles = ["system"] * rng.randint(0, 1) + ["user", "assistant"] * rng.randint(1, 4)
    return [{"role": role, "content": text()} for role in roles]


@pytest.fixture(scope="module")
def conversations(tmp_path_factory) -> list[list[dict[str, str]]]:
    rng = random.Random(0)
    return [conversation(rng) for _ in range(40)]


@pytest.fixture(scope="module")
def overrides(conversations, tmp_path_factory, compilation_cache) -> list[str]:
    folder = tmp_path_factory.mktemp("conversations")
    for part in range(2):
        lines = [json.dumps({"messages": messages}) for messages in conversations[part::2]]
        (folder / f"{part}.jsonl").write_text("\n".join(lines))
    return [
        *("data=hf", "data.path=json", f"data.data_files={folder}/*.jsonl", "data.messages=messages"),
        *("data.num_streams=2", "batch.rows=2", "batch.length=64", "store.rows_per_block=4", "run.progress=false"),
        *("capture.layers=[0]", "capture.dtype=float32", "model.dtype=float32", f"model.path={MODEL}"),
        compilation_cache,
    ]


@pytest.fixture(scope="module")
def store(overrides, tmp_path_factory) -> ActivationStore:
    path = tmp_path_factory.mktemp("whole") / "store"
    run_here(*overrides, f"store.path={path}")
    return ActivationStore.open(path)


def numbers(store: ActivationStore) -> dict[int, int]:
    """The index of each document's conversation, by the document's number."""
    ids = {row["document"]: row["id"] for row in store.documents(["document", "id"]).to_pylist()}
    return {number: 2 * int(id.split("#")[1]) + int(id[0]) for number, id in ids.items()}


def expected_labels(messages: list[dict[str, str]]) -> tuple[list[int], list[list[int]]]:
    """The tokens and labels of a conversation in the bundled model's template, each part tokenised on its own."""
    tokens, labels, exchange = [], [], -1
    for number, message in enumerate(messages):
        role = Role[message["role"]]
        exchange += role is Role.user
        is_answer = role is Role.assistant
        header, end = f"<|im_start|>{message['role']}\n", "<|im_end|>"
        for text, part, written in (
            (header, 1, 0),
            (message["content"], 2, is_answer),
            (end, 1, is_answer),
            ("\n", 1, 0),
        ):
            ids = TOKENIZER.encode([text])[0].tolist() if text else []
            tokens += ids
            labels += [[number, max(exchange, 0), role, part, int(written)]] * len(ids)
    return tokens, labels


def test_every_token_has_its_label(store, conversations):
    assert verify_store(store.path) == []
    assert_well_written(store.path)
    for number, index in numbers(store).items():
        document = store.document(number)
        tokens, labels = expected_labels(conversations[index])
        assert document.text.tolist() == tokens
        np.testing.assert_array_equal(document.labels, labels)
    sides = store.read_tokens(store.rows)
    assert not sides.labels[sides.segments == 0].any()


def test_a_resumed_store_is_the_same(store, overrides, tmp_path):
    run_first_stream(*overrides, f"store.path={tmp_path}")
    assert 0 < len(ActivationStore.open(tmp_path).blocks) < len(store.blocks)
    run_here(*overrides, f"store.path={tmp_path}")
    assert_same_store(tmp_path, Path(store.path))


def test_selected_tokens_are_those_with_the_labels(store, overrides, tmp_path):
    settings = ["capture.positions=labels", "capture.labels=[written,last_of_exchange]", "capture.per_row=4"]
    run_here(*overrides, *settings, f"store.path={tmp_path}")
    some = ActivationStore.open(tmp_path)
    assert verify_store(tmp_path) == []
    for number in numbers(store):
        whole, chosen = store.document(number), some.document(number)
        written = whole.labels[:, Label.written]
        kept = (written == 1) & np.append(np.diff(written) < 0, False)
        np.testing.assert_array_equal(chosen.places, np.flatnonzero(kept))
        np.testing.assert_array_equal(chosen.labels, whole.labels[kept])
        np.testing.assert_allclose(chosen.activations[KEY], whole.activations[KEY][kept], atol=1e-5, rtol=1e-4)


def test_batches_have_labels_and_filter_by_them(store, overrides):
    def tokens(batches) -> list[tuple]:
        return sorted(
            (*map(int, (b.documents[k], b.tokens[k])), *b.labels[k].tolist())
            for b in batches
            for k in range(len(b.tokens))
        )

    every = tokens(store.batches(KEY, 100, labels=True))
    assert len(every) == store.num_tokens
    stream = Stream.from_config(overrides)
    for words in (["written"], ["system", "user", "text"]):
        token_filter = TokenFilter(labels=words)
        wanted = (
            [row for row in every if row[-1] == 1]
            if words == ["written"]
            else [row for row in every if row[-3] in (Role.system, Role.user) and row[-2] == 2]
        )
        assert tokens(store.batches(KEY, 100, shuffle=True, token_filter=token_filter, framework="torch")) == wanted
        ranks = [store.batches(KEY, 50, rank=rank, world=2, token_filter=token_filter) for rank in (0, 1)]
        found = tokens(batch for rank in ranks for batch in rank)
        assert {*found} <= {*wanted}
        assert len(found) > len(wanted) - 4 * 50  # ranks have equally many whole batches
        assert tokens(stream.batches(100, token_filter=token_filter)) == wanted
    assert next(iter(store.batches(KEY, 10))).labels is None
    with pytest.raises(ArgumentError, match="labels contains 'answer'. Choose from system, .*written"):
        TokenFilter(labels=["answer"])


def test_a_store_without_labels_says_so(small_store):
    plain = ActivationStore.open(small_store)
    assert plain.read_tokens(plain.rows[:1]).labels is None
    for options in ({"labels": True}, {"token_filter": TokenFilter(labels=["written"])}):
        with pytest.raises(StoreError, match=r"has no labels of tokens \(data.messages\)"):
            plain.batches(plain.keys[0], 8, **options)


def test_labels_need_conversations(overrides, tmp_path):
    with pytest.raises(ConfigError, match="capture.positions=labels needs conversations"):
        run_here(
            *overrides,
            "data.messages=null",
            "data.text=a",
            "capture.positions=labels",
            "capture.labels=[user]",
            f"store.path={tmp_path}/a",
        )


def test_the_page_names_labels(store, tmp_path):
    page = tmp_path / "page.html"
    assert inspect([f"store.path={store.path}", f"inspect.html={page}", f"inspect.tokens={store.num_tokens}"]) == 0
    assert "assistant, text" in page.read_text()


def test_an_extractor_labels_chats(store, conversations, compilation_cache, tmp_path):
    extractor = Extractor(MODEL, [0], dtype="float32", model_dtype="float32", progress=False)
    selecting = Extractor(
        MODEL,
        [0],
        dtype="float32",
        model_dtype="float32",
        progress=False,
        positions="labels",
        labels=["written"],
    )
    chats = conversations[:4]
    for result, some, chat in zip(
        extractor([*chats, "a text"]), [*selecting(chats), None], [*chats, None], strict=True
    ):
        if chat is None:
            assert result.labels is None
            continue
        number = next(number for number, index in numbers(store).items() if conversations[index] == chat)
        np.testing.assert_array_equal(result.labels, store.document(number).labels)
        np.testing.assert_array_equal(some.positions, np.flatnonzero(result.labels[:, Label.written]))
    with pytest.raises(ConfigError, match="needs conversations"):
        selecting(["a text"])
    with pytest.raises(ConfigError, match=r"save\(\) stores texts without labels. Call the Extractor"):
        selecting.save(tmp_path, chats)
    with pytest.raises(InputError, match=r"documents row 0: message 0 has no content, but message"):
        extractor([[{"role": "user", "message": "hello"}]])
