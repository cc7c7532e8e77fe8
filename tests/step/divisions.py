"""A program that divides steps of tiny models over eight devices in several ways, and compares them with one device."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import itemsize_bits
from jaxtyping import PyTree

from pipeline.cluster.sharding import make_mesh, put_rows
from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.job.writing.transfer import start_copies
from pipeline.models import token_outputs
from pipeline.models.attention import context
from pipeline.models.checkpoints.loading import abstract_params
from pipeline.models.exchange import tables, tokens
from pipeline.models.head import Head
from pipeline.models.partition import Partition
from pipeline.models.registry import Model, open_model
from pipeline.models.sae import encoding
from pipeline.models.sae.params import load_params, params_bytes
from pipeline.step.compiled_step import compile_step
from pipeline.store.format.layout import OUTPUTS, SELECTED, TOKENS, output_specs
from tests.jobs import run_program
from tests.models.test_sae_encoding import CASES, sae_arrays
from tests.specs import step_spec

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 104,
}
TWO_LAYERS = CONFIG | {"num_hidden_layers": 2}
EXPERTS = CONFIG | {
    "model_type": "qwen2_moe",
    **{"num_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 24},
}
CONFIGS = {
    "dense": CONFIG,
    "experts": EXPERTS,
    # Three devices divide none of its axes alone, as 128 do in gpt-oss-20b.
    "gpt_oss": TWO_LAYERS
    | {"model_type": "gpt_oss", "hidden_size": 40, "intermediate_size": 40, "head_dim": 8, "sliding_window": 8}
    | {"num_local_experts": 4, "num_experts_per_tok": 3},
    "deepseek": TWO_LAYERS
    | {"model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
    | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 8, "num_experts_per_tok": 3}
    | {"n_group": 4, "topk_group": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    "delta": TWO_LAYERS
    | {"model_type": "qwen3_5_text", "head_dim": 8, "full_attention_interval": 2, "linear_num_key_heads": 2}
    | {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "conv": TWO_LAYERS | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_bias": True},
    "mamba": CONFIG
    | {"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "full_attention", "mlp"], "head_dim": 8}
    | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
    "gemma4": CONFIG
    | {"model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 16, "sliding_window": 8}
    | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_kv_shared_layers": 1}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 104, "enable_moe_block": True}
    | {"num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 16},
    "llama4": TWO_LAYERS
    | {"model_type": "llama4_text", "head_dim": 8, "no_rope_layers": [1, 0]}  # the second is global
    | {"intermediate_size": 16, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2}
    | {"num_local_experts": 8, "num_experts_per_tok": 3, "attention_chunk_size": 5, "floor_scale": 4},
    "roberta": {name: size for name, size in CONFIG.items() if name != "num_key_value_heads"}
    | {"model_type": "roberta", "num_hidden_layers": 1, "max_position_embeddings": 4098, "type_vocab_size": 2},
    "gemma2": CONFIG | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8},
}

Case = tuple[str, str | None]  # a model of CONFIGS, and the dtype of its quantised weights
Batch = Mapping[str, np.ndarray]

ROUTED = Site.router_logits, Site.router_weights, Site.router_indices, Site.expert_out, Site.mlp_out
INNER = Site.attn_in, Site.q, Site.attn_entropy, Site.attn_z, Site.attn_out, Site.mlp_in, Site.mlp_pre, Site.mlp_post
MIXER = activation_keys((0,), (Site.attn_in, Site.attn_out))
KEYS = {
    "dense": activation_keys((0,), (*INNER, Site.head_out)),
    "experts": activation_keys((2,), ROUTED),
    "gpt_oss": activation_keys((1,), (*INNER[1:4], *ROUTED)),
    "deepseek": activation_keys((1,), (Site.q, Site.k, Site.v, Site.attn_z, *ROUTED)),
    "delta": (*MIXER, *activation_keys((1,), INNER)),
    "conv": (*MIXER, *activation_keys((1,), INNER)),
    "mamba": (*MIXER, *activation_keys((2,), INNER[-3:])),
    "gemma4": (*activation_keys((1,), (*INNER, Site.v, *ROUTED)), *activation_keys((2,), (Site.attn_z,))),
    "llama4": activation_keys((1,), (Site.q, Site.attn_z, *ROUTED)),
    "roberta": activation_keys((0,), INNER),
    "gemma2": activation_keys((0, 1), INNER),
}


class Division(NamedTuple):
    tensor: int = 1
    fsdp: bool = False
    group: int = 1  # devices that exchange tokens
    context: int = 1
    devices: int = 8
    selects: bool = False  # whether the step stores selected tokens only

    @property
    def data(self) -> int:
        return self.devices // (self.tensor * self.context)


class Outputs(NamedTuple):
    params: PyTree
    arrays: dict[str, np.ndarray]
    collectives: list[str]
    planned_bytes: int  # of all weights on a device
    shard_bytes: int  # of those on the first device


def documents(rows: int, length: int) -> dict[str, np.ndarray]:
    """Rows of packed documents of 5 tokens to whole rows, most of them with some padding at the end, and 7 positions
    of each row that are selected."""
    rng = np.random.default_rng(0)
    segments, positions = np.zeros((2, rows, length), np.int32)
    for row in range(rows):
        start = 0
        while start < length - 5:
            size = length if row == 0 else min(length - start, int(np.exp(rng.uniform(np.log(5), np.log(length)))))
            segments[row, start : start + size] = segments[row].max() + 1
            positions[row, start : start + size] = range(size)
            start += size
    tokens = rng.integers(0, 101, (rows, length), np.int32)
    selected = rng.permuted(np.tile(np.arange(length - 5, dtype=np.int32), (rows, 1)), axis=1)[:, :8]
    selected = np.append(np.sort(selected[:, :7], axis=1), np.full((rows, 1), -1, np.int32), axis=1)
    return {"tokens": tokens, "segments": segments, "positions": positions, "selected": selected}


def compute(
    model: Model,
    keys: Sequence[ActivationKey],
    batch: Batch,
    division: Division,
    *,
    quantised: str | None = None,
    is_complete: bool = False,
    whole: Outputs | None = None,
) -> Outputs:
    """The last residual stream is captured, too. With `is_complete`, also statistics and the head's outputs, unless the
    model has no head. `whole` has the outputs on one device."""
    (rows, length), num_selected = batch["tokens"].shape, batch["selected"].shape[1]
    devices = jax.devices()[: division.devices]
    partition = Partition(make_mesh(division.tensor, devices, division.context), division.fsdp, division.group)
    keys = (*keys, ActivationKey(model.num_layers - 1, Site.resid_post))
    with_head = is_complete and model.head is not None
    slots = (SELECTED if division.selects else TOKENS).slots
    spec = step_spec(
        *(model, keys),
        **{"rows": rows, "length": length, "dtype": "float32", "statistics": is_complete and not division.selects},
        **({"selected": num_selected} if division.selects else {}),
        head_outputs=output_specs(OUTPUTS, 4, slots) if with_head else (),
    )
    if whole is None or quantised:
        place = partition.leaf_sharding
        params = model.load(spec.forward_keys, "float32", place, with_head=with_head, quantised=quantised)
    else:  # divide the leaves loaded for one device: nothing to compile, as random numbers on devices would be
        leaves = model.leaves(spec.forward_keys, with_head=with_head)
        shapes = abstract_params(leaves, "float32", partition.leaf_sharding)
        held = {name: whole.params[name] for name in shapes}
        params = jax.tree.map(lambda x, to: jax.device_put(np.asarray(x), to.sharding), held, shapes)
    step = compile_step(model, spec, params, partition)
    inputs = {name: values for name, values in batch.items() if name != "selected" or division.selects}
    computed = step(params, *put_rows(partition.mesh, inputs).values())
    assert np.asarray(computed.counts)[0] == np.count_nonzero(batch["segments"])
    assert not np.asarray(computed.counts)[1:].any(), computed.counts
    outputs = jax.tree.leaves(computed.stored)
    arrays = [np.full(output.shape, np.inf, np.float32) for output in outputs]
    for copy in start_copies(outputs, first_row=0):  # as the writer does
        place = arrays[copy.output][copy.place(0)]
        assert np.isposinf(place).all()  # each element once
        place[...] = copy.wait()
    names = [*(array.name for array in spec.stored_arrays), *(("moments", "norms") if spec.statistics else ())]
    weights = model.weight_bytes(spec.forward_keys, "float32", quantised, with_head=with_head)
    data, along = (division.data, division.context) if division.fsdp else (1, 1)
    shards = [array.addressable_shards[0].data for array in jax.tree.leaves(params)]
    return Outputs(
        params,
        dict(zip(names, arrays, strict=True)),
        collectives(step.executable.as_text()),
        weights.on_device(division.tensor, data, division.group, along),
        sum(shard.size * itemsize_bits(shard.dtype) for shard in shards) // 8,
    )


def collectives(hlo: str) -> list[str]:
    """The kinds and shapes of the collective operations in a compiled program."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    found = (re.search(rf" = (.*?) ({kinds})(-start)?\(", line) for line in hlo.splitlines())
    return [f"{match[2]} {match[1]}" for match in found if match]


def error(name: str, got: np.ndarray, expected: np.ndarray) -> float:
    """Relative to the norm of the expected values. Both may lack the same values, as the loss of a document's last
    token. Of the likeliest tokens, two that are equally likely up to rounding may change places."""
    assert (np.isnan(got) == np.isnan(expected)).all(), name
    if name == "top_ids":
        return float((got != expected).mean()) / 100
    got, expected = np.nan_to_num(got), np.nan_to_num(expected)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def in_slots(values: np.ndarray, selected: np.ndarray) -> np.ndarray:
    """The values [B, T, ...] of the selected positions [B, K]; 0 for -1."""
    taken = values[np.arange(len(selected))[:, None], selected]
    taken[selected < 0] = 0
    return taken


def report_of_steps(path: str, rows: int, length: int, cases: list) -> dict[str, dict]:
    context.BY_HEADS = 0  # as in long rows
    tokens._MIN_CAPACITY, tables._PART_BYTES = 2, 4096  # several rounds, and parts
    jax.lax.empty = lambda shape, dtype: jnp.full(shape, jnp.nan, dtype)  # undefined memory must not leak
    batch, report = documents(rows, length), {}
    for name, quantised, divisions in cases:
        model = open_model(f"{path}/{name}", init="random")
        is_complete = any(Division(*division).context > 1 for division in divisions)
        compute_divided = partial(compute, model, KEYS[name], batch, quantised=quantised)
        whole = compute_divided(division=Division(devices=1), is_complete=is_complete)
        for division in (Division(*division) for division in divisions):
            got = compute_divided(division=division, is_complete=division.context > 1, whole=whole)
            expected = {array: whole.arrays[array] for array in got.arrays}
            if division.selects:
                expected = {array: in_slots(values, batch["selected"]) for array, values in expected.items()}
            report[f"{name} {division}"] = {
                "error": max(error(array, values, expected[array]) for array, values in got.arrays.items()),
                "share": got.shard_bytes / whole.shard_bytes,
                "planned": got.planned_bytes,
                "loaded": got.shard_bytes,
                "collectives": got.collectives,
            }
    return report


def report_of_heads() -> dict[str, dict]:
    token_outputs.CHUNK = 24  # of 96 tokens per device, or 48: several chunks
    rng, report, whole = np.random.default_rng(0), {}, None
    sizes = (8, 24, 8), (96, 8), (96,)  # many values are equal
    x, *arrays = (jnp.asarray(rng.integers(-2, 3, shape), "float32") for shape in sizes)
    params, next_tokens = dict(zip(("head", "head_bias"), arrays, strict=True)), rng.integers(0, 96, (8, 24), np.int32)
    head = Head("lm_head.weight", softcap=None, bias="lm_head.bias")
    for tensor, fsdp in ((0, False), (4, False), (2, True)):
        partition = Partition(make_mesh(tensor) if tensor else None, fsdp)
        compute = jax.jit(partial(token_outputs.token_outputs, head, num_top=8, partition=partition))
        if tensor:
            params = jax.device_put(params, jax.NamedSharding(partition.mesh, jax.P("tensor")))
        compiled = compute.lower(params, x, next_tokens).compile()
        got = [np.asarray(values) for values in compiled(params, x, next_tokens)]
        whole = whole or got
        errors = [float(np.abs(a - b).max()) for a, b in zip(got, whole, strict=True)]
        report[f"head {tensor} {fsdp}"] = {"error": max(errors), "collectives": collectives(compiled.as_text())}
    return report


def report_of_features() -> dict[str, dict]:
    encoding.TILE_VALUES, encoding.GROUP = 100, 5
    rng, mesh, report = np.random.default_rng(0), make_mesh(2), {}
    for name in ("topk", "gated"):
        sae = CASES[name]
        arrays = sae_arrays(sae, rng)
        x = jnp.asarray(3 * rng.normal(size=(8, 3, sae.d_in)), "float32")
        params = load_params(sae, arrays, arrays.__getitem__, "float32", mesh)
        whole, divided = (
            jax.device_get(jax.jit(partial(encoding.encode, sae, slots=3, decodes=True, **over))(params=held, x=x))
            for held, over in ((arrays, {}), (params, {"mesh": mesh}))
        )
        pairs = zip((divided.value, *divided.reconstruction), (whole.value, *whole.reconstruction), strict=True)
        report[name] = {
            "equal": bool((divided.index == whole.index).all() and (divided.n_active == whole.n_active).all()),
            "error": max(float((np.abs(a - b) / (1 + np.abs(b))).max()) for a, b in pairs),
            "fire": int(whole.n_active.sum()),
            "loaded": sum(array.addressable_shards[0].data.nbytes for array in params.values()),
            "planned": params_bytes(sae, arrays, "float32", 2),
        }
    return report


def main(path: str, rows: int, length: int, cases: list) -> None:
    """Prints what all divisions of all cases give."""
    report = report_of_steps(path, rows, length, cases) | report_of_heads() | report_of_features()
    json.dump(report, sys.stdout)


def run_divisions(path: Path, rows: int, length: int, cases: Mapping[Case, Sequence[Division]]) -> dict[str, dict]:
    """Runs `main` in a process with eight devices. `path` is a folder for the models."""
    for name, config in CONFIGS.items():
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config))
    arguments = json.dumps([str(path), rows, length, [(*case, divisions) for case, divisions in cases.items()]])
    program = "import json, sys; from tests.step.divisions import main; main(*json.loads(sys.argv[1]))"
    done = run_program(program, arguments, devices=8, timeout_s=3600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
