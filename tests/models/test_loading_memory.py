"""The host memory that loading takes, measured in another process."""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.jobs import run_program

pytestmark = pytest.mark.heavy
MIB = 1 << 20
SLACK_MIB = 96  # pieces that four threads read, and the allocator's overhead
WIDTH, MLP, VOCAB = 1024, 4096, 16384
LAYER_MIB = (4 * WIDTH * WIDTH + 3 * WIDTH * MLP) * 2 / MIB  # in bfloat16
EMBED_MIB = VOCAB * WIDTH * 2 / MIB  # the largest tensor

PROGRAM = """
import json, sys
from pathlib import Path
import jax
from jax.sharding import SingleDeviceSharding
from pipeline.models.registry import open_model
from pipeline.core.sites import ActivationKey, Site

def memory_mib(name):
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0]) / 1024

path, layer, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
quantised = None if sys.argv[4] == "same" else sys.argv[4]
model = open_model(path)
jax.block_until_ready(jax.numpy.zeros(3))
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = memory_mib("VmRSS")
keys = (ActivationKey(layer, Site.resid_post),)
params = model.load(keys, dtype, SingleDeviceSharding(jax.devices()[0]), quantised=quantised)
devices = sum(array.nbytes for array in jax.tree.leaves(params)) / 2**20
print(json.dumps({"devices": devices, "peak": memory_mib("VmHWM") - before}))
"""


def save_checkpoint(path: Path, num_layers: int, in_fp8: bool = False) -> None:
    """Writes a LLaMA in bfloat16, or with matrices in FP8. Each layer has a file."""
    config = {"model_type": "llama", "hidden_size": WIDTH, "intermediate_size": MLP, "vocab_size": VOCAB}
    config |= {"num_hidden_layers": num_layers, "num_attention_heads": 16}
    config |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}} if in_fp8 else {}
    (path / "config.json").write_text(json.dumps(config))
    values = np.random.default_rng(0).normal(0, 0.02, max(VOCAB, MLP) * WIDTH).astype(ml_dtypes.bfloat16)

    def tensor(*shape: int) -> np.ndarray:
        return values[: np.prod(shape)].reshape(shape)

    layer = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
    layer |= {"mlp.gate_proj": (MLP, WIDTH), "mlp.up_proj": (MLP, WIDTH), "mlp.down_proj": (WIDTH, MLP)}
    layer |= {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
    files = [{"model.embed_tokens.weight": tensor(VOCAB, WIDTH), "model.norm.weight": tensor(WIDTH)}]
    for number in range(num_layers):
        tensors = {f"model.layers.{number}.{name}.weight": tensor(*shape) for name, shape in layer.items()}
        for name in [name for name in tensors if in_fp8 and tensors[name].ndim == 2]:
            tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = np.ones([size // 128 for size in tensors[name].shape], np.float32)
        files.append(tensors)
    weight_map = {}
    for number, tensors in enumerate(files):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, path / name)
        weight_map |= dict.fromkeys(tensors, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load(path: Path, layer: int, dtype: str, weights_dtype: str) -> dict[str, float]:
    result = run_program(PROGRAM, str(path), str(layer), dtype, weights_dtype)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "num_layers",
    [8, pytest.param(30, marks=pytest.mark.slow, id="1 GB")],
)
def test_loading_takes_the_weights_and_one_tensor(num_layers: int, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, num_layers)
    whole_mib = num_layers * LAYER_MIB + EMBED_MIB
    cases = {
        ("float32", "same"): 2 * whole_mib,
        ("bfloat16", "int4"): num_layers * LAYER_MIB * 8.25 / 16 + EMBED_MIB,  # a byte per value on CPUs
    }
    for (dtype, weights_dtype), expected_mib in cases.items():
        used = load(tmp_path, num_layers - 1, dtype, weights_dtype)
        assert used["devices"] == pytest.approx(expected_mib, rel=0.01)
        assert used["peak"] < used["devices"] + EMBED_MIB + SLACK_MIB, (dtype, weights_dtype)
    first = load(tmp_path, 0, "bfloat16", "same")
    assert first["peak"] < LAYER_MIB + 2 * EMBED_MIB + SLACK_MIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_fp8_takes_the_weights_and_one_tensor(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 8, in_fp8=True)
    used = load(tmp_path, 7, "bfloat16", "int8")
    assert used["devices"] == pytest.approx(8 * LAYER_MIB / 2 + EMBED_MIB, rel=0.01)
    assert used["peak"] < used["devices"] + EMBED_MIB + SLACK_MIB
