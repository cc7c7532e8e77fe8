"""Stores of jobs that encode activations with SAEs, compared with the published definitions in numpy."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline import Stream, delete, export, finalize, inspect, verify
from pipeline.config import composing
from pipeline.core.errors import ArgumentError, CheckpointError, ConfigError, StoreError, StoreMismatch
from pipeline.job.opening import open_job
from pipeline.models.sae.loading import open_sae
from pipeline.store import ActivationStore
from pipeline.store.check.problems import Scope
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.metadata import change_root
from pipeline.store.inspection.views import view_features
from pipeline.store.io.storage import Storage
from tests.job.test_processes import chaos
from tests.jobs import assert_same_store, committed, run_here, run_processes, write_random_model, write_text
from tests.models import sae_files
from tests.models.sae_files import D_IN, decode_dense, encode_dense
from tests.token_batches import tokens_of

pytestmark = pytest.mark.heavy
TOP = 8
SHAPE = {
    **{"model_type": "qwen2", "hidden_size": D_IN, "intermediate_size": 24, "num_attention_heads": 3},
    **{"num_hidden_layers": 3, "num_key_value_heads": 3},
}
FORMATS = {
    **{
        name: lambda folder, rng, name=name: sae_files.write_saelens(folder, name, rng)
        for name in ("standard", "gated", "topk", "jumprelu")
    },
    "layer_norm": lambda folder, rng: sae_files.write_saelens(
        folder, "standard", rng, normalize_activations="layer_norm"
    ),
    "gemma_scope": sae_files.write_gemma_scope,
    "sparsify": sae_files.write_sparsify,
    "llama_scope": sae_files.write_llama_scope,
}
ARRAY = "blocks.1.attn_in"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Texts, and an SAE in each format."""
    folder = tmp_path_factory.mktemp("features")
    write_text(folder / "text", files=2, documents=20)
    for number, (name, write) in enumerate(FORMATS.items()):
        write(folder / name, np.random.default_rng(number))
    return folder


@pytest.fixture(scope="module")
def overrides(folder, compilation_cache) -> list[str]:
    model = [*write_random_model(folder / "model", **SHAPE), "model.dtype=float32"]
    sizes = ["batch.rows=4", "batch.length=64", "store.shard_mib=0.02", "data.num_streams=2"]
    return [
        f"data.path={folder}/text",
        *model,
        *sizes,
        compilation_cache,
        "capture.layers=[1]",
        "capture.sites=[attn_in]",
        f"capture.encode_top={TOP}",
    ]


def encode(addresses: str | dict[str, str], array: str = ARRAY) -> str:
    """The override that encodes an array with an SAE, or with several by name."""
    if isinstance(addresses, str):
        return f'capture.encode={{{array}: "{addresses}"}}'
    named = ", ".join(f'{name}: "{address}"' for name, address in addresses.items())
    return f"capture.encode={{{array}: {{{named}}}}}"


@pytest.fixture(scope="module")
def both(folder, overrides, tmp_path_factory) -> ActivationStore:
    """Activations, features of all formats and their errors of reconstruction, in float32."""
    path = tmp_path_factory.mktemp("store") / "store"
    saes = {name: str(folder / name) for name in FORMATS}
    settings = ["capture.dtype=float32", "capture.keep=both", "capture.encode_error=true", "run.max_tokens=1000"]
    run_here(*overrides, *settings, encode(saes), f"store.path={path}")
    assert verify_store(str(path)) == []
    return ActivationStore.open(str(path))


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_features_of_each_token_are_stored(folder, both, name) -> None:
    valid = both.read_tokens(slice(None)).segments > 0
    outputs = both.read_outputs(slice(None))
    index, value, n_active = (outputs[f"features.{ARRAY}.{name}.{part}"] for part in ("index", "value", "n_active"))
    assert (index[~valid] == -1).all()
    assert not value[~valid].any()
    assert not n_active[~valid].any()
    index, value, n_active = index[valid], value[valid], n_active[valid]
    activations, sae = both.read("blocks.1.attn_in", slice(None))[valid], open_sae(str(folder / name))
    expected = encode_dense(sae, activations)
    order = np.argsort(-expected, axis=1, kind="stable")[:, :TOP]
    largest = np.take_along_axis(expected, order, axis=1)
    # Tokens with a value at a threshold, or with two that are nearly equal, may differ by rounding.
    is_clear = ((encode_dense(sae, activations * (1 + 1e-5)) > 0) == (expected > 0)).all(axis=1)
    is_clear &= ((encode_dense(sae, activations * (1 - 1e-5)) > 0) == (expected > 0)).all(axis=1)
    ranked = -np.sort(-expected, axis=1)[:, : TOP + 1]
    is_clear &= ((np.diff(ranked, axis=1) < -1e-5) | (ranked[:, 1:] == 0)).all(axis=1)
    assert is_clear.mean() > 0.9
    np.testing.assert_array_equal(n_active[is_clear], (expected > 0).sum(axis=1)[is_clear])
    np.testing.assert_array_equal(index[is_clear], np.where(largest > 0, order, -1)[is_clear])
    np.testing.assert_allclose(value, largest, atol=1e-5)
    assert n_active.max() > (4 if sae.spec.k else TOP)


def test_the_metadata_describes_the_saes(folder, alone, both) -> None:
    described = {sae["features"]: sae for sae in both.metadata.encoders}
    assert list(described) == [f"features.{ARRAY}.{name}" for name in FORMATS]
    [described] = ActivationStore.open(str(alone[1])).metadata.encoders
    assert (described["activation"], described["top"], described["width"]) == ("jumprelu", TOP, 40)
    sae = open_sae(str(folder / "jumprelu"))
    assert described["sha256"] == sae.digest(sae.shapes.keys() - {"w_dec", "b_out"})  # the decoder does not matter


@pytest.fixture(scope="module")
def alone(folder, overrides, tmp_path_factory) -> tuple[list[str], Path]:
    """A store that has features and no activations, and the overrides that made it."""
    path = tmp_path_factory.mktemp("store") / "store"
    features = [*overrides, encode(str(folder / "jumprelu")), "run.max_tokens=6000"]
    run_here(*features, f"store.path={path}")
    return features, path


def test_a_stream_computes_the_features_of_the_store(alone, tmp_path) -> None:
    """And the same errors of reconstruction."""
    features = [*alone[0], "capture.encode_error=true", "run.max_tokens=2000"]
    run_here(*features, f"store.path={tmp_path / 'store'}")
    options = {"features": True, "outputs": (f"features.{ARRAY}.squared_error", f"features.{ARRAY}.cosine")}
    batches = list(Stream.from_config(features).batches(50, shuffle_buffer_tokens=2048, **options))
    assert batches[0].activations == {}
    assert tokens_of(batches) == tokens_of(ActivationStore.open(str(tmp_path / "store")).batches([], 50, **options))


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_chaos_leaves_the_same_features(folder, overrides, tmp_path, tensor) -> None:
    """Runs of one, two and four processes, four devices in all, are killed or get SIGTERM."""
    model = write_random_model(tmp_path / "model", **SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 2})
    text = [f"data.path={write_text(tmp_path / 'text', files=4, documents=60)}", "data.num_streams=4"]
    several = {name: str(folder / name) for name in ("jumprelu", "topk")}
    job = [*overrides, *text, encode(several), "capture.encode_error=true", "batch.rows=8"]
    job += [*model, f"mesh.tensor={tensor}"]
    assert run_processes(1, 4, *job, f"store.path={tmp_path}/reference").returncode == 0
    for number in range(3):
        store = tmp_path / str(number)
        setups = [(1, 4), (2, 2), *([(4, 1)] if tensor == 1 else [])]
        rounds = chaos(job, store, committed(tmp_path / "reference"), rounds=5, seed=number, setups=setups)
        assert sum(code != 0 for _, code, _ in rounds) >= 3
        assert run_processes(2, 2, *job, f"store.path={store}").returncode == 0
        assert_same_store(store, tmp_path / "reference")
        assert verify_store(str(store)) == []


def test_another_sae_or_option_is_refused(folder, alone, tmp_path) -> None:
    features, path = alone
    moved = shutil.copytree(folder / "jumprelu", tmp_path / "elsewhere")
    store = f"store.path={path}"
    run_here(*features, encode(str(moved)), store)  # the same, from another place
    tensors = sae_files.write_saelens(tmp_path / "other", "jumprelu", np.random.default_rng(99))
    for change in (encode(str(tensors.folder)), "capture.encode_threshold=0.5"):
        with pytest.raises(StoreMismatch, match="capture.encode"):
            run_here(*features, change, store)
    named = encode({"a": str(moved), "b": str(moved)})
    with pytest.raises(StoreMismatch, match=rf"encode\[0\]\.features: .*, this run asks for 'features.{ARRAY}.a'"):
        run_here(*features, named, store)


def test_reconstruction_errors_equal_numpys(folder, alone, both) -> None:
    valid, outputs = both.read_tokens(slice(None)).segments > 0, both.read_outputs(slice(None))
    x = both.read("blocks.1.attn_in", slice(None))[valid].astype(np.float64)
    for name in FORMATS:
        sae = open_sae(str(folder / name))
        out = decode_dense(sae, encode_dense(sae, x), x)
        error = np.square(x - out).sum(axis=1)
        cosine = (x * out).sum(axis=1) / np.linalg.norm(x, axis=1) / np.linalg.norm(out, axis=1)
        for part, expected in (("squared_error", error), ("cosine", cosine)):
            stored = outputs[f"features.{ARRAY}.{name}.{part}"]
            assert np.isclose(stored[valid], expected, rtol=1e-3, atol=1e-4).mean() > 0.99  # else at a threshold
            assert not stored[~valid].any()
        statistics = both.feature_statistics(f"{ARRAY}.{name}")
        assert statistics.tokens == len(x)
        explained = 1 - error.sum() / np.square(x - x.mean(axis=0)).sum()
        assert statistics.explained_variance == pytest.approx(explained, rel=1e-3)
        assert statistics.cosine == pytest.approx(cosine.mean(), abs=1e-4)
    assert ActivationStore.open(str(alone[1])).feature_statistics(ARRAY).explained_variance is None


def fired(store: ActivationStore, name: str, feature: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, slots and values of a feature, by reading all features of all tokens."""
    outputs = store.read_outputs(slice(None))
    index, value = (outputs[f"features.{name}.{part}"] for part in ("index", "value"))
    row, slot, rank = np.nonzero(index == feature)
    return store.rows[row], slot, value[row, slot, rank].astype(np.float32)


def assert_indexed(store: ActivationStore, name: str) -> None:
    """Asserts that the index by feature and the statistics agree with the arrays of all features."""
    valid, outputs = store.read_selected(slice(None)) >= 0, store.read_outputs(slice(None))
    n_active = outputs[f"features.{name}.n_active"][valid]
    statistics = store.feature_statistics(name)
    assert statistics.tokens == valid.sum()
    assert statistics.l0 == pytest.approx(n_active.mean())
    for feature in range(len(statistics.count)):
        rows, slots, values = fired(store, name, feature)
        firings = store.feature(name, feature)
        for expected, found in zip((rows, slots, values), (firings.rows, firings.slots, firings.values), strict=True):
            np.testing.assert_array_equal(found, expected)
        assert statistics.count[feature] == len(values)
        assert statistics.maximum[feature] == max(values, default=0)
        assert statistics.mean[feature] == pytest.approx(values.mean() if len(values) else 0)
        strongest, order = store.feature(name, feature, top=3), np.argsort(-values, kind="stable")[:3]
        for expected, found in zip((rows, slots, values), vars(strongest).values(), strict=True):
            np.testing.assert_array_equal(found, expected[order])
    assert statistics.count.sum() == (outputs[f"features.{name}.index"] >= 0).sum() > 0


@pytest.mark.parametrize("name", ["standard", "jumprelu"])
def test_the_index_by_feature_agrees_with_the_arrays(both, name) -> None:
    assert_indexed(both, f"{ARRAY}.{name}")


def test_an_unfinished_store_has_an_index_by_feature(alone, tmp_path) -> None:
    copy = shutil.copytree(alone[1], tmp_path / "store")
    last = max((copy / "_commits/stream-00000").glob("*.json"))
    record = last.read_bytes()
    last.unlink()
    change_root(Storage.open(copy), lambda root: replace(root, complete=False, summary=None))
    store = ActivationStore.open(str(copy))
    assert 0 < len(store.blocks) < len(ActivationStore.open(str(alone[1])).blocks)
    assert_indexed(store, ARRAY)
    last.write_bytes(record)
    assert_indexed(store, ARRAY)  # a reader keeps the rows that it opened
    assert_indexed(ActivationStore.open(str(copy)), ARRAY)


def test_missing_features_are_refused(alone) -> None:
    store = ActivationStore.open(str(alone[1]))
    for ask, error, message in (
        (lambda: store.feature("blocks.2.attn_in", 0), StoreError, "it has: blocks.1.attn_in"),
        (lambda: store.feature(ARRAY, 40), StoreError, "the SAE has features 0 to 39"),
        (lambda: store.feature(ARRAY, -1), ArgumentError, "expected an integer of at least 0"),
        (lambda: store.feature(ARRAY, 0, top=0), ArgumentError, "top is 0, expected an integer of at least 1"),
        (lambda: store.feature_statistics("x"), StoreError, "no features of 'x'"),
    ):
        with pytest.raises(error, match=message):
            ask()


def test_the_index_and_the_statistics_can_be_left_out(folder, overrides, tmp_path) -> None:
    some = [*overrides, encode(str(folder / "jumprelu")), "run.max_tokens=600"]  # compiled for `alone`
    run_here(*some, "capture.encode_index=false", f"store.path={tmp_path}/a")
    run_here(*some, "capture.statistics=false", f"store.path={tmp_path}/b")
    first, second = (ActivationStore.open(f"{tmp_path}/{name}") for name in "ab")
    assert verify_store(f"{tmp_path}/a") == verify_store(f"{tmp_path}/b") == []
    assert not (tmp_path / "a/_features").exists()
    with pytest.raises(StoreError, match="made with capture.encode_index=false"):
        first.feature(ARRAY, 0)
    with pytest.raises(StoreError, match="made with capture.statistics=false"):
        second.feature_statistics(ARRAY)
    for feature, count in enumerate(first.feature_statistics(ARRAY).count):
        assert len(second.feature(ARRAY, feature).rows) == count


INDEX = f"_features/{ARRAY}/stream-00001/block-000000.csc"
DAMAGE = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "entry": lambda path: flip(path, 9),
    "firing": lambda path: flip(path, -1),
    "another block's": lambda path: shutil.copyfile(path.with_name("block-000001.csc"), path),
    "missing": lambda path: path.unlink(),
}


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_names_a_damaged_index(alone, tmp_path, damage) -> None:
    copy = shutil.copytree(alone[1], tmp_path / "store")
    DAMAGE[damage](copy / INDEX)
    assert [problem.where for problem in verify_store(str(copy), scope=Scope())] == [INDEX]
    if damage in ("firing", "missing"):
        listed = verify_store(str(copy), scope=Scope(sample=0))
        assert [problem.where for problem in listed] == ([INDEX] if damage == "missing" else [])
    store = ActivationStore.open(str(copy))
    with pytest.raises(StoreError, match=INDEX):
        [store.feature(ARRAY, feature) for feature in range(40)]


@pytest.mark.parametrize("module", [inspect, verify, finalize, delete, export], ids=lambda module: module.__name__)
def test_commands_take_a_store_without_activations(alone, tmp_path, capsys, module) -> None:
    _, path = alone
    copy = shutil.copytree(path, tmp_path / "store")
    arguments = {
        delete: [f"store.path={copy}", "confirm=true"],
        inspect: [f"store.path={copy}", f"inspect.html={tmp_path}/page.html"],
        export: [f"store.path={copy}", f"export.path={tmp_path}/exported"],
    }
    code = module.main(arguments.get(module, [f"store.path={copy}"]))
    assert code == (2 if module is export else 0)
    assert module is not export or "has no activations to export" in capsys.readouterr().err
    if module is delete:
        assert not copy.exists() or not list(copy.iterdir())


def test_features_of_selected_tokens_are_stored_and_shown(folder, overrides, tmp_path, capsys) -> None:
    saes, last = encode(str(folder / "gated")), ["capture.positions=last", "run.max_tokens=1000"]
    run_here(*overrides, saes, *last, "capture.keep=both", "capture.dtype=float32", f"store.path={tmp_path}/store")
    assert verify_store(f"{tmp_path}/store") == []
    store = ActivationStore.open(f"{tmp_path}/store")
    valid = store.read_selected(slice(None)) >= 0
    expected = encode_dense(open_sae(str(folder / "gated")), store.read("blocks.1.attn_in", slice(None))[valid])
    outputs = store.read_outputs(slice(None))
    index, n_active = outputs[f"features.{ARRAY}.index"], outputs[f"features.{ARRAY}.n_active"]
    assert abs(n_active[valid] - (expected > 0).sum(axis=1)).mean() < 0.1
    assert not n_active[~valid].any()
    to_delphi = [f"export.path={tmp_path}/latents", "export.format=delphi", "export.context=1"]
    assert export.main([f"store.path={tmp_path}/store", *to_delphi]) == 2
    assert "delphi shows the text around them" in capsys.readouterr().err
    feature = int(index[valid][:, 0][0])
    (view,) = view_features(store, features=(feature,), contexts=1000).features
    assert view.contexts
    stored = sum(int(np.isfinite(context.values).sum()) for context in view.contexts)
    assert stored == sum(context.values[context.strongest] > 0 for context in view.contexts)  # others are unselected
    assert sum(len(context.tokens) for context in view.contexts) > stored


def test_wrong_configurations_and_saes_that_do_not_fit_are_refused(folder, overrides, tmp_path) -> None:
    gated, folded = str(folder / "gated"), {"model_from_pretrained_kwargs": {"fold_ln": True}}
    rng = np.random.default_rng(0)
    folded = str(sae_files.write_saelens(tmp_path / "sae", "standard", rng, metadata=folded).folder)
    decoding = ["capture.when=decode", "data=generate", "data@data.prompts=fineweb", encode(gated)]
    for error, message, *more in (
        (ConfigError, "a mapping from captured arrays to SAEs", "capture.encode=5"),
        (ConfigError, "a mapping from captured arrays to SAEs", "capture.encode=[a]"),
        (ConfigError, "which is not a captured array", "capture.encode={blocks.2.attn_in: a}"),
        (ConfigError, "for an array, give a list", f"capture.encode={{{ARRAY}: a, blocks.*.attn_in: a}}"),
        (ConfigError, "Set it to an address", f"capture.encode={{{ARRAY}: []}}"),
        (ConfigError, "Set it to an address", f"capture.encode={{{ARRAY}: {{a: [b]}}}}"),
        (ConfigError, "Set it to an address", f"capture.encode={{{ARRAY}: {{a.b: c}}}}"),
        (ConfigError, "whose folders have different names", f"capture.encode={{{ARRAY}: [x/a, y/a]}}"),
        (ConfigError, "has the same SAE", "capture.layers=all", encode(gated, "blocks.*.attn_in")),
        (ConfigError, "has the same SAE", "capture.sites=[attn_in,resid_post]", encode(gated, "blocks.1.*")),
        (ConfigError, "has width 24", "capture.sites=[mlp_post]", encode(gated, "blocks.1.mlp_post")),
        (ConfigError, "capture.when=document", *decoding),
        (CheckpointError, "text", encode(str(folder / "text"))),
        (CheckpointError, "fold_ln is True", encode(folded)),
    ):
        with pytest.raises(error, match=message):
            open_job(composing.compose([*overrides, *more, f"store.path={tmp_path}/store"]))


def test_a_wildcard_gives_each_layer_its_own_sae(folder, overrides, tmp_path) -> None:
    for layer, name in enumerate(("gated", "topk", "standard")):
        shutil.copytree(folder / name, tmp_path / f"saes/layer_{layer}/x")
    every = encode(f"{tmp_path}/saes/layer_{{layer}}/x", "blocks.*.attn_in")
    job = open_job(composing.compose([*overrides, "capture.layers=all", every, f"store.path={tmp_path}/store"]))
    assert [(encoder.spec.key.layer, encoder.spec.name) for encoder in job.encoders] == [
        (layer, f"features.blocks.{layer}.attn_in") for layer in range(3)
    ]
    assert [encoder.spec.sae.activation for encoder in job.encoders] == ["gated", "topk", "relu"]


def test_folders_named_after_the_layer_name_several_saes(folder, overrides, tmp_path) -> None:
    shutil.copytree(folder / "gated", tmp_path / "one/1")
    both = f'capture.encode={{{ARRAY}: ["{tmp_path}/one/{{layer}}", "{folder}/jumprelu"]}}'
    job = open_job(composing.compose([*overrides, both, f"store.path={tmp_path}/store"]))
    assert [encoder.spec.name for encoder in job.encoders] == [f"features.{ARRAY}.1", f"features.{ARRAY}.jumprelu"]


def test_an_sae_trained_on_another_array_is_warned_about(folder, overrides, tmp_path, caplog) -> None:
    with caplog.at_level("WARNING", logger="pipeline"):
        open_job(composing.compose([*overrides, encode(str(folder / "gated")), f"store.path={tmp_path}/store"]))
    assert "was trained on blocks.1.hook_resid_post, but it encodes blocks.1.attn_in" in caplog.text
