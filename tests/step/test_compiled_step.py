import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.cluster.sharding import make_mesh, replicated, row_sharding
from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.models.partition import Partition
from pipeline.models.registry import Model, open_model
from pipeline.step.compiled_step import CompiledStep, compile_step
from pipeline.step.compiler import compiler_options
from pipeline.store.format.layout import LARGEST, OUTPUT_NAMES, OUTPUTS, SELECTED, output_specs, scale_name
from tests.models.hf_reference import save_random
from tests.specs import SPARSE_SITES, step_spec

pytestmark = pytest.mark.heavy
ROWS, LENGTH, NUM_LAYERS = 4, 24, 3
KEYS = activation_keys(tuple(range(NUM_LAYERS)), tuple(site for site in Site if site not in SPARSE_SITES))
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return open_model(str(path), init="random")


def batch() -> dict[str, np.ndarray]:
    """Two packed documents and padding in each row, and a row of padding alone."""
    tokens = np.random.default_rng(0).integers(0, 101, (ROWS, LENGTH), dtype=np.int32)
    segments = np.repeat(np.array([[1] * 9 + [2] * 12 + [0] * 3], np.int32), ROWS, axis=0)
    segments[3] = 0
    positions = np.repeat(np.array([[*range(9), *range(12), 0, 0, 0]], np.int32), ROWS, axis=0)
    return {"tokens": tokens, "segments": segments, "positions": positions}


def compiled(model: Model, dtype: str, keys=KEYS, **options: object) -> tuple[CompiledStep, object]:
    mesh = make_mesh()
    params = model.load(keys, "float32", replicated(mesh))
    spec = step_spec(model, keys, rows=ROWS, length=LENGTH, dtype=dtype, **options)
    return compile_step(model, spec, params, Partition(mesh)), params


def on_devices(step: CompiledStep, inputs: dict[str, np.ndarray]) -> tuple[jax.Array, ...]:
    return tuple(jax.device_put(array, row_sharding(step.mesh)) for array in inputs.values())


def program(path: Path, num_layers: int, num_captured: int) -> tuple[int, int]:
    """The numbers of instructions and loops in a compiled step whose captured layers are evenly spread."""
    (path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_layers}))
    layers = tuple(round(num_layers * (number + 1) / num_captured) - 1 for number in range(num_captured))
    model, mesh, keys = open_model(str(path), init="random"), make_mesh(), activation_keys(layers, (Site.resid_post,))
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=replicated(mesh)), model.leaves(keys)
    )
    spec = step_spec(model, keys, rows=ROWS, length=LENGTH, dtype="bfloat16", attention="xla")
    step = compile_step(model, spec, params, Partition(mesh))
    text = step.executable.as_text()
    return len(re.findall(r"^\s+(?:ROOT )?%\S+ = ", text, re.MULTILINE)), len(re.findall(r" while\(", text))


def test_the_program_grows_with_the_captured_layers_not_with_depth(tmp_path: Path) -> None:
    one, two, three = (program(tmp_path, 12, num_captured) for num_captured in (1, 2, 3))
    assert [loops for _, loops in (one, two, three)] == [1, 2, 3]
    assert three[0] - two[0] == pytest.approx(two[0] - one[0], rel=0.05)
    assert program(tmp_path, 40, 2) == two


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_what_no_captured_site_needs_is_loaded_but_not_computed(family: str, tmp_path: Path) -> None:
    save_random(family, tmp_path)
    model = open_model(str(tmp_path))

    def layer_scopes(site: Site) -> tuple[set[str], int]:
        """The blocks of layer 0 in the optimised program, and the bytes of its arguments."""
        step, params = compiled(model, "float32", activation_keys((0,), (site,)))
        assert {"attention", "mlp"} == params["runs"][0].keys()
        scopes = re.findall(r'op_name="[^"]*/(attention|mlp|experts)/', step.executable.as_text())
        return {*scopes}, step.memory.argument_bytes

    (before, before_bytes), (after, after_bytes) = layer_scopes(Site.attn_out), layer_scopes(Site.mlp_out)
    assert before == {"attention"}
    assert after > before
    assert before_bytes == after_bytes


@pytest.fixture(scope="module")
def float32_step(model: Model) -> tuple[CompiledStep, object]:
    """The step of all keys, and its weights."""
    return compiled(model, "float32")


@pytest.fixture(scope="module")
def model_activations(model: Model, float32_step: tuple[CompiledStep, object]) -> dict[ActivationKey, jax.Array]:
    """What the model itself computes of the batch."""
    _, params = float32_step
    return jax.jit(model.apply, static_argnames="keys")(params, *batch().values(), keys=KEYS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_are_the_models_activations_in_the_stored_dtype(
    model: Model,
    float32_step: tuple[CompiledStep, object],
    model_activations: dict[ActivationKey, jax.Array],
    dtype: str,
) -> None:
    """float32: of all layers; bfloat16: of the first layer."""
    keys = KEYS if dtype == "float32" else tuple(key for key in KEYS if key.layer == 0)
    step, params = float32_step if dtype == "float32" else compiled(model, dtype, keys)
    inputs = batch()
    activations, _, counts = step(params, *on_devices(step, inputs))
    assert counts.dtype == np.int32
    assert np.asarray(counts).tolist() == [np.count_nonzero(inputs["segments"])] + [0] * len(keys)
    assert int(counts[0]) == 63
    valid = inputs["segments"] != 0
    for key, got in zip(keys, activations, strict=True):
        assert (got.shape, got.dtype) == ((ROWS, LENGTH, model.width(key, LENGTH)), np.dtype(dtype)), key.name
        assert got.sharding == row_sharding(step.mesh)
        values = np.asarray(got, np.float32)
        assert not values[~valid].any(), key.name
        np.testing.assert_allclose(
            values[valid], np.asarray(model_activations[key].astype(dtype), np.float32)[valid], rtol=2**-7, atol=1e-6
        )


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bfloat16", {"statistics": False}),
        ("int8", {"scale_group": 8}),
        ("float8_e4m3fn", {"selected": 5, "head_outputs": output_specs(OUTPUTS, 3, SELECTED.slots)}),
    ],
)
def test_the_outputs_have_the_shapes_and_dtypes_of_the_specification(model: Model, dtype: str, options: dict) -> None:
    mesh = make_mesh()
    spec = step_spec(model, KEYS[-2:], rows=ROWS, length=LENGTH, dtype=dtype, **options)
    params = model.load(spec.forward_keys, "float32", replicated(mesh), with_head=bool(spec.head_outputs))
    outputs = compile_step(model, spec, params, Partition(mesh)).executable.out_info
    assert [(values.shape, values.dtype.name) for values in outputs.arrays] == [
        ((ROWS, spec.slots, *array.token_shape), array.dtype) for array in spec.stored_arrays
    ]
    computed = {} if outputs.statistics is None else outputs.statistics._asdict()
    shapes = {name: values.shape[1:] for name, values in computed.items() if values is not None}
    assert shapes == spec.statistics_shapes
    names = [key.name for key in KEYS[-2:]]
    scales = [scale_name(name) for name in names] if dtype in LARGEST else []
    assert [array.name for array in spec.stored_arrays] == [*names, *scales, *(OUTPUT_NAMES if spec.selected else [])]


def test_products_of_long_rows_are_right() -> None:
    """Weighted means of 20,000 values for two heads, as in the attention of a long row."""
    rng = np.random.default_rng(0)
    weights, values = rng.random((2, 128, 20_000), np.float32), rng.random((2, 20_000, 16), np.float32)
    lowered = jax.jit(jnp.matmul).lower(weights, values)
    got = lowered.compile(compiler_options(make_mesh()))(weights, values)
    np.testing.assert_allclose(got, weights.astype(np.float64) @ values, rtol=1e-5)


def test_rows_of_another_shape_are_refused(model: Model) -> None:
    step, params = compiled(model, "float32", KEYS[:1])
    shorter = {name: array[:, :-1] for name, array in batch().items()}
    with pytest.raises(TypeError, match=r"compiled with int32\[4,24\] and called with int32\[4,23\]"):
        step(params, *on_devices(step, shorter))
