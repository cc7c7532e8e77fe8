"""Generation on several devices and in several processes. Each case starts processes with its number of devices."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.jobs import free_port, run_together

pytestmark = pytest.mark.heavy
CONFIG = {  # a layer with a DeltaNet, one with attention
    "model_type": "qwen3_5_text",
    "full_attention_interval": 2,
    "head_dim": 8,
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 102,
}
LATENT_CONFIG = {  # latents are not divided along `tensor`
    "model_type": "deepseek_v3",
    **{"kv_lora_rank": 12, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **{"first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    **{"n_shared_experts": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    **{name: CONFIG[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")},
    "num_hidden_layers": 2,
}

PROGRAM = """
import sys
import jax, numpy as np
from pipeline.cluster import processes, sharding
from pipeline.config.schema import DistributedConfig
from pipeline.planning.generation_plan import Sampling
from pipeline.job.generation.decode import compile_programs
from pipeline.job.generation.generator import Generator, Prompt
from pipeline.planning.generation_plan import GenerationSpec
from pipeline.models.partition import Partition
from pipeline.models.registry import open_model
from pipeline.core.sites import Site, activation_keys

port, num_processes, process, *runs = sys.argv[1:]
num_processes, process = int(num_processes), int(process)
if num_processes > 1:
    processes.join(DistributedConfig(f"localhost:{port}", num_processes, process))
KEYS = (*activation_keys((0,), (Site.resid_post,)), *activation_keys((1,), (Site.attn_z,)))
prompts = [Prompt(k, np.random.default_rng(k).integers(0, 101, 1 + k % 7, dtype=np.int32)) for k in range(14)]
mine = [prompts, [], prompts[:10], prompts[10:]][process + 2 * (num_processes > 1)]
for path, kind in zip(runs[::2], runs[1::2]):
    model = open_model(path, init="random")
    tensor, fsdp, group = (int(letter) for letter in kind)
    devices = jax.devices()[:1] if kind == "101" else jax.devices()
    partition = Partition(sharding.make_mesh(tensor, devices), bool(fsdp), group)
    params = model.load_leaves(model.generation.leaves(KEYS), "float32", partition.leaf_sharding)
    generator = Generator(compile_programs(model, params, partition, GenerationSpec(
        rows=4, max_prompt=8, max_new_tokens=12, end_tokens=tuple(range(6)), keys=KEYS,
        sampling=Sampling(temperature=1.0, seed=1), segment_steps=4, block=8, speculate=2 if model.arch.latent else 0,
    )), params)
    found = {}
    for each in generator.run(iter(mine)):
        found[f"tokens {each.number}"] = each.tokens
        found |= {f"{key.name} {each.number}": values for key, values in each.activations.items()}
    np.savez(f"{path}/{num_processes}-{process}-{kind}.npz", **found)
"""


def commands(processes: int, devices: int, *runs: Path | str) -> list[list[str]]:
    """The program, for each process. A run is a model's folder and a kind of three digits: the devices along `tensor`,
    1 for fsdp, and the expert group's. 101 is one device."""
    common = ["env", f"JAX_NUM_CPU_DEVICES={devices}", sys.executable, "-c", PROGRAM, str(free_port()), str(processes)]
    return [[*common, str(process), *map(str, runs)] for process in range(processes)]


def completions(path: Path, processes: int, kind: str) -> dict[str, np.ndarray]:
    """The completions of all processes. No two processes complete the same prompt."""
    files = [path / f"{processes}-{process}-{kind}.npz" for process in range(processes)]
    parts = [dict(np.load(file)) for file in files]
    whole = {name: values for part in parts for name, values in part.items()}
    assert len(whole) == sum(map(len, parts))
    return whole


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The folders of the models with their completions on one device and on divisions, computed at the same time. For
    latent attention and experts, with proposals and exchanged tokens."""
    paths = {name: tmp_path_factory.mktemp(name) for name in ("delta", "latent")}
    for path, config in zip(paths.values(), (CONFIG, LATENT_CONFIG), strict=True):
        (path / "config.json").write_text(json.dumps(config))
    delta, latent = paths.values()
    run_together([*commands(1, 4, delta, "101", latent, "101", latent, "212"), *commands(2, 2, delta, "211")])
    return paths


@pytest.mark.parametrize(("name", "processes", "kind"), [("latent", 1, "212"), ("delta", 2, "211")])
def test_divided_rows_heads_and_weights_give_the_same_completions(folders, name, processes, kind) -> None:
    """The second of two processes finishes its prompts long before the first; both stay until the last row has ended.
    Rows divided alone are tested by jobs in two processes (`test_generate.py`)."""
    expected, got = completions(folders[name], 1, "101"), completions(folders[name], processes, kind)
    assert len({values.size for array, values in expected.items() if "tokens" in array}) > 3
    assert got.keys() == expected.keys()
    for array, values in expected.items():
        if "tokens" in array:
            np.testing.assert_array_equal(got[array], values, err_msg=array)
        else:
            np.testing.assert_allclose(got[array], values, rtol=0, atol=1e-5 * np.abs(values).max(), err_msg=array)
