"""An Extractor returns the values of the store that the command writes, for all options and kinds of documents."""

import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from pipeline import Extractor
from pipeline.cluster.sharding import make_mesh
from pipeline.config.composing import PACKAGE
from pipeline.core.errors import ConfigError, InputError, NotFiniteError, PipelineError, StoreMismatch
from pipeline.library import ExtractedDocument
from pipeline.step.compiler import compiler_options
from pipeline.store import ActivationStore
from tests.jobs import ROOT, assert_same_store, run_here, write_model_of_zeros, write_text

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("cached_steps")]
TINY, SAE = "${assets:tiny-qwen2}", "${assets:tiny-sae}"
FLOAT32 = {"model_dtype": "float32", "dtype": "float32"}
LENGTH = 64
SMALL = {"rows": 4, "length": LENGTH, "shard_mib": 0.125, "progress": False}
CHAT = [{"role": "user", "content": "What is a list?"}, {"role": "assistant", "content": "A sequence."}]
KEY = "blocks.2.resid_post"
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with one parquet file of documents, some of several windows."""
    return write_text(tmp_path_factory.mktemp("text"), files=1, documents=10, max_characters=1000)


@pytest.fixture(scope="module")
def texts(text) -> list[str]:
    return pq.read_table(text)["text"].to_pylist()


@pytest.fixture(scope="module")
def extractor() -> Extractor:
    return Extractor(TINY, layers=[2, 4], **FLOAT32, **SMALL)


JOBS = {
    "bfloat16, pad and cut": (
        {"dtype": "bfloat16", "model_dtype": "bfloat16", "packing": "pad", "long_documents": "cut"},
        ["capture.dtype=bfloat16", "model.dtype=bfloat16", "batch.packing=pad", "batch.long_documents=cut"],
    ),
    "int8, last": (
        {"dtype": "int8", "scale_group": 32, "positions": "last", "per_row": 2, "shard_mib": 0.005},
        [
            *("capture.dtype=int8", "capture.scale_group=32", "store.shard_mib=0.005"),
            *("capture.positions=last", "capture.per_row=2"),
        ],
    ),
    "windows that restart": (
        {"prefix": "<|endoftext|>", "windows": "restart"},
        ['data.prefix="<|endoftext|>"', "batch.windows=restart"],
    ),
    "outputs, regex": (
        {
            **{"layers": [4], "sites": ["mlp_out", "final_norm"], "outputs": ["loss", "top_logprobs", "entropy"]},
            **{"positions": "regex", "regex": "^ [A-Z]", "shard_mib": 0.01},
        },
        [
            *("capture.layers=[4]", "capture.sites=[mlp_out,final_norm]"),
            *("capture.outputs=[loss,top_logprobs,entropy]", "store.shard_mib=0.01"),
            *("capture.positions=regex", 'capture.regex="^ [A-Z]"'),
        ],
    ),
    "features": (
        {"encode": {"blocks.4.resid_post": SAE}, "encode_error": True, "keep": "both"},
        [f"capture.encode={{blocks.4.resid_post: '{SAE}'}}", "capture.encode_error=true", "capture.keep=both"],
    ),
}


def run_job(text: Path, path: Path, *overrides: str) -> ActivationStore:
    """Runs the command's job, with the settings of the fixture `extractor` and these overrides."""
    job = [f"data.path={text}", f"store.path={path}", "batch.rows=4", f"batch.length={LENGTH}", "store.shard_mib=0.125"]
    run_here(*job, "capture.layers=[2,4]", "capture.dtype=float32", "model.dtype=float32", *overrides)
    return ActivationStore.open(path)


@pytest.fixture(scope="module")
def store(text, tmp_path_factory) -> ActivationStore:
    """The command's store of the texts. Only for reading."""
    return run_job(text, tmp_path_factory.mktemp("store") / "store")


def assert_same_results(results: list[ExtractedDocument], store: ActivationStore) -> None:
    """Compares all results with the store's documents, bit by bit."""
    assert len(store.blocks) > 1
    for number, result in enumerate(results):
        document = store.document(number)
        np.testing.assert_array_equal(result.tokens, document.text)
        np.testing.assert_array_equal(result.positions, document.places)
        np.testing.assert_array_equal(result.positions % LENGTH, document.positions)
        assert result.positions.dtype == np.int32
        assert result.activations.keys() == document.activations.keys()
        assert result.outputs.keys() == document.outputs.keys()
        for name, values in result.outputs.items():
            assert values.tobytes() == document.outputs[name].tobytes()
        assert list(result.features) == list(document.features)
        for name, features in result.features.items():
            assert features.dense().tobytes() == document.features[name].dense().tobytes()
        for name, values in result.activations.items():
            if name in result.scales:
                scales = np.repeat(result.scales[name], 32, axis=1)
                values = values.astype(np.float32) * scales
            assert values.tobytes() == document.activations[name].tobytes(), (number, name)
    table = store.documents()  # a document in two blocks has two rows
    cut = dict(zip(table["document"].to_pylist(), table["n_cut"].to_pylist(), strict=True))
    assert {number: result.num_cut for number, result in enumerate(results)} == cut


@pytest.mark.parametrize(("options", "overrides"), JOBS.values(), ids=JOBS)
def test_results_equal_the_stores_bit_by_bit(text, texts, tmp_path, options, overrides):
    """Steps have the shape of the command's if the documents fill several."""
    results = Extractor(TINY, **{"layers": [2, 4]} | FLOAT32 | SMALL | options)(texts)
    assert_same_results(results, run_job(text, tmp_path / "store", *overrides))
    assert any(result.num_cut for result in results) == ("long_documents" in options)


def test_a_model_without_a_tokenizer_takes_token_ids(extractor, texts, store, tmp_path):
    ids = extractor.tokenizer.encode(texts)
    folder = tmp_path / "model"
    files = shutil.ignore_patterns("tokenizer*")
    shutil.copytree(PACKAGE / "assets/tiny-qwen2", folder, ignore=files)
    other = Extractor(str(folder), layers=[2, 4], **FLOAT32, **SMALL)
    assert_same_results(other(ids), store)
    saved = other.save(tmp_path / "saved", [tokens.tolist() for tokens in ids])
    assert saved.metadata.data["tokens"] == "tokens"
    assert saved.metadata.tokenizer == {}
    for name in store.arrays:
        assert saved.arrays[name].read().result().tobytes() == store.arrays[name].read().result().tobytes(), name
    for call in (other, partial(other.save, tmp_path / "texts")):
        with pytest.raises(InputError, match="the model has no tokenizer"):
            call(["a text"])
    for options in ({"windows": "restart"}, {"positions": "regex", "regex": "a"}):
        with pytest.raises(InputError, match=r"no tokenizer\.json"):
            Extractor(str(folder), layers=[2], **FLOAT32, **SMALL | options)


def test_results_and_a_saved_store_equal_the_commands_store(extractor, text, texts, store, tmp_path):
    assert_same_results(extractor(texts), store)
    ids = pq.read_table(text)["id"].to_pylist()
    saved = extractor.save(tmp_path / "saved", texts, ids=ids)
    assert saved.complete
    assert saved.documents().drop_columns(["source"]).equals(store.documents().drop_columns(["source"]))
    for name in store.arrays:
        assert saved.arrays[name].read().result().tobytes() == store.arrays[name].read().result().tobytes(), name
    for number in (3, 9):  # alone: in a step of another shape, so the values are not equal bit by bit
        [result] = extractor([texts[number]])
        stored = saved.document(ids[number]).activations[KEY]
        np.testing.assert_allclose(result.activations[KEY], stored, rtol=1e-5, atol=1e-5)


def test_texts_token_ids_and_chats_give_the_same_results(extractor):
    rendered = "<|im_start|>user\nWhat is a list?<|im_end|>\n<|im_start|>assistant\nA sequence.<|im_end|>\n"
    chat, text = extractor([CHAT, rendered])
    [prompted] = extractor([CHAT[:1]], add_generation_prompt=True)
    listed, array = extractor([chat.tokens.tolist(), chat.tokens.astype(np.int64)])
    assert extractor.tokenizer.decode(chat.tokens) == rendered
    assert extractor.tokenizer.decode(prompted.tokens).endswith("<|im_start|>assistant\n")
    for other in (text, listed, array):
        np.testing.assert_array_equal(other.tokens, chat.tokens)
        np.testing.assert_allclose(other.activations[KEY], chat.activations[KEY], rtol=1e-5, atol=1e-5)
    assert extractor([]) == []


def test_a_later_window_does_not_see_an_earlier_one(extractor):
    tokens = np.random.default_rng(0).integers(0, 2048, 300)
    joined, *windows = extractor([tokens, *np.split(tokens, range(LENGTH, 300, LENGTH))])
    values = np.concatenate([window.activations[KEY] for window in windows])
    np.testing.assert_allclose(joined.activations[KEY], values, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(joined.positions, np.arange(300))


def test_layers_sites_and_dtypes_are_named_as_other_libraries_do():
    extractor = Extractor(TINY, layers=-1, sites="hook_resid_post", dtype=jax.numpy.bfloat16, **SMALL)
    assert list(extractor.hook_names) == ["blocks.5.resid_post"]
    [result], [stored] = extractor(["a list"]), extractor(["a list"], dtype="stored")
    values = result.activations["blocks.5.hook_resid_post"]
    assert values.dtype == np.float32
    assert stored.activations["5.resid_post"].dtype == "bfloat16"
    np.testing.assert_array_equal(values, stored.activations["resid_post"].astype(np.float32))


def test_framework_jax_returns_jax_arrays(extractor):
    [numpy_result] = extractor(["a list"])
    [jax_result] = extractor(["a list"], framework="jax")
    assert isinstance(jax_result.activations[KEY], jax.Array)
    np.testing.assert_array_equal(np.asarray(jax_result.activations[KEY]), numpy_result.activations[KEY])
    assert isinstance(jax_result.tokens, np.ndarray)
    with pytest.raises(ValueError, match="framework is 'tensorflow'. Choose one of numpy"):
        extractor(["a list"], framework="tensorflow")


def test_features_without_activations_are_returned_as_jax_arrays_and_saved(tmp_path):
    extractor = Extractor(TINY, layers=[4], encode={"blocks.4.resid_post": SAE}, encode_top=8, **FLOAT32, **SMALL)
    [result] = extractor(["The capital of France is Paris."], framework="jax")
    features = result.features["blocks.4.resid_post"]
    assert result.activations == {}
    assert isinstance(features.index, jax.Array)
    assert features.index.shape == features.value.shape == (len(result.tokens), 8)
    assert features.dense().shape == (len(result.tokens), features.width)
    assert extractor.save(tmp_path / "store", ["A text."]).document(0).features.keys() == result.features.keys()


def test_on_error_skip_skips_bad_documents(tmp_path):
    extractor = Extractor(TINY, layers=[2], on_error="skip", **FLOAT32, **SMALL)
    results = extractor(["", "a", [], [5000], "\ud800", [7]])
    assert [len(result.tokens) for result in results] == [0, 1, 0, 0, 0, 1]
    assert [result.skipped is None for result in results] == [False, True, False, False, False, True]
    assert results[0].activations[KEY].shape == (0, 128)
    assert results[0].activations[KEY].dtype == np.float32
    assert all(result.skipped for result in extractor([""]))
    store = extractor.save(tmp_path / "store", ["", "a list", "\ud800"])
    assert store.documents()["id"].to_pylist() == ["1"]


def test_calls_of_different_sizes_compile_few_programs():
    compiled = []
    compiler_options(make_mesh())  # compiles a program, once in a process

    def listen(event: str, duration: float, **_: object) -> None:
        if event == COMPILE_EVENT:
            compiled.append(event)

    extractor = Extractor(TINY, layers=[0], **FLOAT32, rows=4, length=128, progress=False)
    sizes = np.random.default_rng(0).integers(1, 150, 12)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for call, size in enumerate(sizes):
            [*_, last] = extractor([[1] * size] * (1 + call % 10))
            assert last.activations["blocks.0.resid_post"].shape == (size, 128)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert 1 < len(extractor.compiled_shapes) <= 6
    assert len(set(extractor.compiled_shapes)) == len(extractor.compiled_shapes) == len(compiled)
    assert set(extractor.compiled_shapes) <= set(extractor.shapes)


def test_options_that_are_refused():
    for options, error, message in (
        ({"layers": [-7]}, ConfigError, "capture.layers contains -7, but the model has layers 0..5"),
        ({"layers": 2.5}, ConfigError, "capture.layers is 2.5"),
        ({"sites": ["resid"]}, ConfigError, "capture.sites contains"),
        ({"dtype": "float64"}, ConfigError, "capture.dtype is 'float64'. Set it to one of"),
        ({"model_dtype": "float16"}, ConfigError, "model.dtype is 'float16'. Set it to one of"),
        ({"length": 5000}, ConfigError, "batch.length is 5000, but the model has 1024 positions"),
        ({"attention": "splash"}, ConfigError, "model.attention=splash cannot be used"),
        (
            {"packing": "concat", "separator": ""},
            ConfigError,
            "a call's results would depend on its other documents. Use save()",
        ),
        ({"lenght": 5}, ConfigError, "no option 'lenght'. Did you mean length?"),
        ({"model": "/no/such/folder"}, PipelineError, "/no/such/folder"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            Extractor(**{"model": TINY, "layers": [2], "length": 64, "progress": False} | options)(["a"])


def test_documents_that_are_refused(extractor):
    for documents, message in (
        ("a text", "documents is 'a text'. Expected a list of texts"),
        (CHAT, "For a single document, give"),
        (7, "documents is 7"),
        ([3, 4], "documents[0] is 3. Expected a text"),
        (["a", 1.5], "documents[1] is 1.5"),
        (["a", [[1, 2]]], "documents[1] is [[1, 2]]"),
        (["a", [0.5]], "documents[1] is [0.5]"),
        (["a", ""], "documents row 1: the text is empty"),
        (["a", []], "documents row 1: 'tokens' has no tokens"),
        ([[1, 2048]], "documents row 0 (id 0): token id 2048 is outside the model's vocabulary of 2048"),
        ([[-1]], "documents row 0: 'tokens' has the token ids -1 to -1"),
        (["\ud800"], "documents row 0: the text has a lone surrogate"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            extractor(documents)


def test_token_ids_and_too_few_ids_are_refused_by_save(extractor, tmp_path):
    for documents, ids, message in (
        (["a", [1, 2]], None, "documents[1] is [1, 2]. Expected a text (or only token ids), or a chat"),
        (["a", "b"], ["one"], "ids has 1 entries for 2 documents"),
        (["a"], ["\ud800"], r"ids has '\ud800': it has a lone surrogate"),
    ):
        with pytest.raises(InputError) as raised:
            extractor.save(tmp_path / "store", documents, ids=ids)
        assert message in str(raised.value)
    assert not (tmp_path / "store").exists()


def test_activations_that_overflow_the_dtype_are_refused(tmp_path):
    path = str(write_model_of_zeros(tmp_path / "model"))  # its last norm is large
    options = {"layers": [5], "sites": "final_norm", "model_dtype": "float32", "dtype": "float16", **SMALL}
    with pytest.raises(NotFiniteError, match=r"not finite as float16: final_norm \(2 tokens\)"):
        Extractor(path, **options)([[1, 2]])
    [result] = Extractor(path, on_not_finite="warn", **options)([[1, 2]])
    assert not np.isfinite(result.activations["final_norm"]).all()


def test_a_model_that_changes_on_disk_is_not_saved(tmp_path):
    path = write_model_of_zeros(tmp_path / "model")
    extractor = Extractor(str(path), layers=[2], **FLOAT32, **SMALL)
    weights = load_file(path / "model.safetensors")
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"] * 2}, path / "model.safetensors")
    with pytest.raises(StoreMismatch, match="changed after this Extractor loaded it"):
        extractor.save(tmp_path / "store", ["a text"])


def test_a_saved_store_is_resumed_extended_or_refused(extractor, texts, tmp_path):
    path, whole = tmp_path / "store", tmp_path / "whole"
    part = extractor.save(path, texts, max_tokens=1000)
    assert 1000 <= part.num_tokens < 1000 + part.metadata.rows_per_block * LENGTH
    before = {file: file.stat().st_mtime_ns for file in path.glob("_commits/*/*.json")}
    assert extractor.save(path, texts, max_tokens=np.array(1000)).num_tokens == part.num_tokens
    assert before == {file: file.stat().st_mtime_ns for file in path.glob("_commits/*/*.json")}
    with pytest.raises(StoreMismatch, match="data"):
        extractor.save(path, [*texts[1:], texts[0]], max_tokens=1500)
    other = Extractor(TINY, layers=[2], **FLOAT32, **SMALL)
    with pytest.raises(StoreMismatch, match="capture"):
        other.save(path, texts, max_tokens=1500)

    def extend() -> None:
        extractor.save(path, texts)

    thread = threading.Thread(target=extend)  # a thread that may not handle signals
    thread.start()
    thread.join()
    extractor.save(whole, texts)
    assert_same_store(path, whole)


def test_chats_are_saved(extractor, tmp_path):
    store = extractor.save(tmp_path / "store", [CHAT], ids=["first"])
    [result] = extractor([CHAT])
    np.testing.assert_array_equal(store.document("first").tokens, result.tokens)


def test_the_packages_reader_writer_and_verify_import_neither_jax_nor_hydra():
    program = """
import sys
from pipeline.store import ActivationStore
print([name for name in ("tokenizers", "huggingface_hub", "jinja2", "fsspec") if name in sys.modules])
import pipeline, pipeline.store, pipeline.store.write.store_writer, pipeline.verify
heavy = ("jax", "flax", "hydra", "omegaconf", "torch", "pipeline.library")
print([name for name in heavy if name in sys.modules])
try:
    pipeline.Extracter
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["[]", "[]", "module 'pipeline' has no attribute 'Extracter'"], done.stderr
