"""The step on eight devices, divided in every way. It runs in another process, which starts with eight devices."""

import json
import math
import re
import shutil

import numpy as np
import pytest

from pipeline.config.composing import PACKAGE
from pipeline.store.read.reader import ActivationStore
from tests.jobs import assert_same_store, run_here, run_processes, run_program, write_text

pytestmark = pytest.mark.heavy
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "vocab_size": 104,
}

EXPERTS = CONFIG | {
    "model_type": "qwen2_moe",
    "num_hidden_layers": 4,
    "mlp_only_layers": [1],
    "num_experts": 8,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 24,
}

TWO_LAYERS = CONFIG | {"num_hidden_layers": 2}
GPT_OSS = TWO_LAYERS | {
    "model_type": "gpt_oss",
    "head_dim": 8,
    "sliding_window": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
}

DEEPSEEK = TWO_LAYERS | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 16},
    "first_k_dense_replace": 1,
}

DELTA = TWO_LAYERS | {
    "model_type": "qwen3_5_text",
    "head_dim": 8,
    "full_attention_interval": 2,
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
GEMMA4 = CONFIG | {
    "model_type": "gemma4_text",
    **{"head_dim": 8, "global_head_dim": 16, "sliding_window": 8, "num_hidden_layers": 4},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    **{"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 104},
    **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 16},
}
LLAMA4 = CONFIG | {
    "model_type": "llama4_text",
    "num_hidden_layers": 4,  # the fourth is global
    **{"head_dim": 8, "intermediate_size": 16, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
    **{"num_local_experts": 8, "num_experts_per_tok": 3, "attention_chunk_size": 5, "floor_scale": 4},
}
CONV = TWO_LAYERS | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_bias": True}
MAMBA = CONFIG | {
    "model_type": "nemotron_h",
    "head_dim": 8,
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "full_attention", "mlp"],
    **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
}
CONFIGS = {
    "dense": CONFIG,
    "experts": EXPERTS,
    "gpt_oss": GPT_OSS,
    "deepseek": DEEPSEEK,
    "delta": DELTA,
    "conv": CONV,
    "mamba": MAMBA,
    "gemma4": GEMMA4,
    "llama4": LLAMA4,
}

SHARES = {(1, False): 1, (1, True): 1 / 8, (2, False): 1 / 2, (2, True): 1 / 8}  # by tensor and fsdp
DIVISIONS = {  # by model, and its weights' dtype: tensor, fsdp, and the devices that exchange tokens
    ("dense", "int4"): [(2, True, 1)],
    ("dense", None): [(1, False, 1), (1, True, 1), (2, False, 1)],
    ("experts", None): [(2, False, 1), (1, True, 8)],
    ("gpt_oss", None): [(2, True, 2)],
    ("deepseek", "int8"): [(2, True, 4)],
    ("delta", None): [(2, False, 1)],
    ("conv", None): [(2, True, 1)],
    ("mamba", None): [(2, True, 1)],
    ("gemma4", None): [(2, True, 2)],
    ("llama4", None): [(2, True, 4)],
}  # EXPERTS also has attention and a dense MLP as in CONFIG

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from pipeline.cluster.sharding import make_mesh, put_rows
from pipeline.step.compiled_step import compile_step
from tests.specs import step_spec
from pipeline.models import token_outputs
from pipeline.models.exchange import tables, tokens
from pipeline.models.checkpoints.loading import abstract_params
from pipeline.models.head import Head
from pipeline.models.sae import encoding
from pipeline.models.sae.params import load_params, params_bytes
from pipeline.models.leaves import quantised_leaves
from pipeline.models.partition import Partition
from pipeline.models.registry import open_model
from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.job.writing.transfer import start_copies
from tests.models.test_sae_encoding import CASES, sae_arrays

MODELS = {name: open_model(f"{sys.argv[1]}/{name}", init="random") for name in sys.argv[3:]}
ROUTED = Site.router_logits, Site.router_weights, Site.router_indices, Site.expert_out, Site.mlp_out
INNER = Site.attn_in, Site.q, Site.attn_entropy, Site.attn_z, Site.attn_out, Site.mlp_in, Site.mlp_pre, Site.mlp_post
KEYS = {"dense": activation_keys((0,), (*INNER, Site.head_out))}
KEYS["experts"] = activation_keys((0,), ROUTED)
KEYS["gpt_oss"] = activation_keys((1,), ROUTED)
KEYS["deepseek"] = activation_keys((1,), (Site.q, Site.k, Site.v, Site.attn_z, *ROUTED))
KEYS["delta"] = (*activation_keys((0,), (Site.attn_in, Site.attn_out)), *activation_keys((1,), INNER))
KEYS["conv"] = (*activation_keys((0,), (Site.attn_in, Site.attn_out)), *activation_keys((1,), INNER))
KEYS["mamba"] = (*activation_keys((0,), (Site.attn_in, Site.attn_out)), *activation_keys((2,), INNER[-3:]))
KEYS["gemma4"] = (*activation_keys((1,), (*INNER, Site.v, *ROUTED)), *activation_keys((3,), (Site.attn_z,)))
KEYS["llama4"] = activation_keys((1,), (Site.q, Site.attn_z, *ROUTED))
rng = np.random.default_rng(0)
batch = {
    "tokens": rng.integers(0, 101, (8, 24), dtype=np.int32),
    "segments": np.repeat(np.array([[1] * 9 + [2] * 12 + [0] * 3], np.int32), 8, axis=0),
    "positions": np.repeat(np.array([[*range(9), *range(12), 0, 0, 0]], np.int32), 8, axis=0),
}

loaded = {}

def outputs(name, tensor, fsdp, group, devices=None, quantised=None):
    model = MODELS[name]
    keys = (*KEYS[name], ActivationKey(model.num_layers - 1, Site.resid_post))
    partition = Partition(make_mesh(tensor, devices), fsdp, group)
    if devices or quantised == "int4":
        params = model.load(keys, "float32", partition.leaf_sharding, quantised=quantised)
        loaded[name, quantised] = params
    else:  # divide the leaves loaded for one device: nothing to compile, as copies of arrays on a device would be
        shapes = abstract_params(quantised_leaves(model.leaves(keys), quantised), "float32", partition.leaf_sharding)
        params = jax.tree.map(lambda x, to: jax.device_put(np.asarray(x), to.sharding), loaded[name, quantised], shapes)
    # without statistics where their sums along a tensor axis would be fused with those of the layers
    spec = step_spec(model, keys, rows=8, length=24, dtype="float32", statistics=tensor == 1)
    step = compile_step(model, spec, params, partition)
    activations, _, counts = step(params, **put_rows(partition.mesh, batch))
    assert int(counts[0]) == 8 * 21
    whole = [np.full(array.shape, np.nan, np.float32) for array in activations]
    for copy in start_copies(activations, first_row=0):  # as the writer does
        place = whole[copy.output][copy.rows, *copy.rest]
        assert np.isnan(place).all()  # each element once
        place[...] = copy.wait()
    divided = [params["runs"], *(params[name] for name in ("embed", "layer_embed") if name in params)]
    on_first = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(divided))
    return whole, step.executable.as_text(), on_first

tokens._MIN_CAPACITY, tables._PART_BYTES = 2, 4096  # several rounds, and parts
jax.lax.empty = lambda shape, dtype: jnp.full(shape, jnp.nan, dtype)  # undefined memory must not leak
report = {}
for name, quantised, divisions in json.loads(sys.argv[2]):
    expected, _, all_bytes = outputs(name, 1, False, 1, jax.devices()[:1], quantised)
    for tensor, fsdp, group in divisions:
        got, text, first_bytes = outputs(name, tensor, fsdp, group, quantised=quantised)
        errors = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, expected)]
        report[f"{name} {tensor} {fsdp} {group} {quantised}"] = {
            "error": max(errors), "share": first_bytes / all_bytes, "hlo": text if not quantised else ""
        }

token_outputs.CHUNK = 24  # of 96 tokens per device, or 48: several chunks
x, *head_arrays = (jnp.asarray(rng.integers(-2, 3, shape), "float32") for shape in ((8, 24, 8), (96, 8), (96,)))
head_params = dict(zip(("head", "head_bias"), head_arrays))  # many values are equal
heads = {}
for tensor, fsdp in ((0, False), (4, False), (2, True)):
    partition = Partition(make_mesh(tensor) if tensor else None, fsdp)
    head = Head("lm_head.weight", softcap=None, bias="lm_head.bias")
    compute = jax.jit(lambda x, n, params: token_outputs.token_outputs(head, params, x, n, 8, partition))
    if tensor:
        head_params = jax.device_put(head_params, jax.NamedSharding(partition.mesh, jax.P("tensor")))
    compiled = compute.lower(x, batch["tokens"] % 96, head_params).compile()
    heads[tensor, fsdp] = [np.asarray(values) for values in compiled(x, batch["tokens"] % 96, head_params)]
    report[f"head {tensor} {fsdp}"] = {
        "errors": [float(np.abs(a - b).max()) for a, b in zip(heads[tensor, fsdp], heads[0, False])],
        "hlo": compiled.as_text(),
    }

encoding.TILE_VALUES, encoding.GROUP = 100, 5
for name in ("jumprelu", "topk", "gated"):
    sae = CASES[name]
    arrays = sae_arrays(sae, rng)
    x = jnp.asarray(3 * rng.normal(size=(8, 3, sae.d_in)), "float32")
    alone = jax.jit(lambda x, arrays: encoding.encode(sae, arrays, x, 3, decodes=True))(x, arrays)
    mesh = make_mesh(2)
    params = load_params(sae, arrays, arrays.__getitem__, "float32", mesh)
    divided = jax.jit(lambda x, params: encoding.encode(sae, params, x, 3, mesh=mesh, decodes=True))(x, params)
    divided, alone = jax.device_get((divided, alone))
    report[f"features {name}"] = {
        "equal": bool((divided.index == alone.index).all() and (divided.n_active == alone.n_active).all()),
        "error": max(
            float((np.abs(a - b) / (1 + np.abs(b))).max())
            for a, b in zip((divided.value, *divided.reconstruction), (alone.value, *alone.reconstruction))
        ),
        "fire": int(alone.n_active.sum()),
        "bytes": sum(array.addressable_shards[0].data.nbytes for array in params.values()),
        "planned": params_bytes(sae, arrays, "float32", 2),
    }
json.dump(report, sys.stdout)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[str, dict]:
    path = tmp_path_factory.mktemp("model")
    for name, config in CONFIGS.items():
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config))
    divisions = json.dumps([(*model, divisions) for model, divisions in DIVISIONS.items()])
    done = run_program(PROGRAM, str(path), divisions, *CONFIGS, devices=8, timeout_s=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["jumprelu", "topk", "gated"])
def test_features_do_not_depend_on_the_mesh(report, name):
    features = report[f"features {name}"]
    assert features["equal"]
    assert features["error"] < 1e-5
    assert features["fire"] > 0
    assert features["bytes"] == features["planned"]


@pytest.mark.parametrize(
    ("model", "quantised", "tensor", "fsdp", "group"),
    [(*model, *division) for model, divisions in DIVISIONS.items() for division in divisions],
)
def test_every_division_computes_the_same_and_holds_its_share_of_the_weights(
    report, model, quantised, tensor, fsdp, group
):
    share = SHARES[tensor, fsdp]
    found = report[f"{model} {tensor} {fsdp} {group} {quantised}"]
    assert found["error"] < 1e-5
    assert share <= found["share"] < share + 0.2  # norms, biases, routers and scales are whole


@pytest.mark.parametrize(("tensor", "fsdp"), [(4, False), (2, True)])
def test_a_divided_vocabulary_gives_the_same_outputs(report, tensor, fsdp):
    """Without fsdp, devices exchange only a few numbers per token."""
    found = report[f"head {tensor} {fsdp}"]
    assert max(found["errors"]) < 1e-5
    if fsdp:
        return
    shapes = [shape for line in collectives(found["hlo"]) for shape in re.findall(r"\[([\d,]+)\]", line)]
    exchanged = [math.prod(map(int, shape.split(","))) for shape in shapes]
    num_tokens, num_candidates = 24 * tensor, 8 * tensor  # per device
    assert max(exchanged) == num_tokens * num_candidates


def collectives(hlo: str) -> list[str]:
    """The kinds and shapes of the collective operations in a compiled program."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    found = (re.search(rf" = (.*?) ({kinds})(-start)?\(", line) for line in hlo.splitlines())
    return [f"{match[2]} {match[1]}" for match in found if match]


def test_divided_experts_exchange_sums_and_no_tokens(report):
    """Every layer sums over its experts; the captured layer also sums the output of each of a token's experts."""
    rows, layers = 2, 4  # per device
    found = collectives(report["experts 2 False 1 None"]["hlo"])
    assert {kind.split()[0] for kind in found} == {"all-reduce"}
    exchanged = [list(map(int, shape.split(","))) for kind in found for shape in re.findall(r"f32\[([\d,]+)\]", kind)]
    widths = [math.prod(shape) // (rows * 24) for shape in exchanged]
    assert set(widths) == {32, 3 * 32}
    assert widths.count(3 * 32) == 1
    assert len(widths) <= 1 + 3 * layers  # attention, experts, and the shared one


def test_the_replicated_step_has_no_collective_but_the_sum_of_the_counts(report):
    (only,) = collectives(report["dense 1 False 1 None"]["hlo"])
    assert only.startswith("all-reduce (s32[], s32[]")


def test_the_fsdp_step_gathers_weights_and_nothing_else(report):
    found = collectives(report["dense 1 True 1 None"]["hlo"])
    gathers = [each for each in found if each.startswith("all-gather f32[")]
    assert len(found) == len(gathers) + 1, found
    sizes = {32 * 32, 2 * 8 * 32, 48 * 32}  # q and o; k and v; gate, up and down
    for gather in gathers:
        shape = [int(size) for size in re.search(r"\[([\d,]+)\]", gather)[1].split(",")]
        assert math.prod(shape) in sizes, gather


def test_divided_delta_nets_sum_as_often_as_attention(report):
    found = collectives(report["delta 2 False 1 None"]["hlo"])
    assert {each.split(" ")[0] for each in found} == {"all-reduce"}
    sums = [each for each in found if each.startswith("all-reduce f32[2,24,32]")]
    assert len(sums) == 1 + 2 * 2  # the embedding, and both layers


def test_a_job_with_divided_weights_and_positions_makes_nearly_the_same_store(tmp_path):
    """Sums along tensor and context have another order, and round to other bfloat16 numbers. The next test divides rows
    and weights over two processes."""
    job = [
        "data.num_streams=2",
        f"data.path={write_text(tmp_path / 'text', files=2, documents=15)}",
        *("batch.rows=4", "batch.length=128", "capture.layers=[1]", "capture.sites=[resid_post,attn_z]"),
        *("run.progress=false", "store.rows_per_block=8", "run.max_tokens=4000", "capture.outputs=[loss]"),
    ]
    run_here(*job, f"store.path={tmp_path / 'one'}")
    result = run_processes(1, 4, *job, "mesh.tensor=2", "mesh.context=2", f"store.path={tmp_path / 'divided'}")
    assert result.returncode == 0, result.stdout
    one, divided = ActivationStore.open(tmp_path / "one"), ActivationStore.open(tmp_path / "divided")
    assert np.array_equal(one.rows, divided.rows)
    for site in ("resid_post", "attn_z"):
        a, b = (store.read(f"blocks.1.{site}", one.rows, np.float32) for store in (one, divided))
        assert np.linalg.norm(a - b) <= 0.01 * np.linalg.norm(a)


def test_processes_that_exchange_tokens_make_the_same_store(tmp_path, monkeypatch):
    """Two processes divide the experts, and gather the other weights; each token's outputs return to its own device, so
    even sums are the same."""
    monkeypatch.delenv("XLA_FLAGS")  # with those of the tests, sums in programs for other shapes have another order
    shutil.copytree(PACKAGE / "assets" / "tiny-qwen2", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    sparse = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_hidden_layers": 1}
    sparse |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | sparse))
    job = [
        *(f"model.path={tmp_path / 'model'}", "model.init=random", "data.num_streams=2"),
        f"data.path={write_text(tmp_path / 'text', files=2, documents=15)}",
        *("batch.rows=4", "batch.length=64", "capture.layers=[0]", "capture.sites=[resid_post,expert_out]"),
        *("run.progress=false", "store.rows_per_block=8", "run.max_tokens=1000", "capture.outputs=[loss]"),
    ]
    for name, processes, weights in (("one", 1, "replicated"), ("divided", 2, "fsdp")):
        result = run_processes(processes, processes, *job, f"model.weights={weights}", f"store.path={tmp_path / name}")
        assert result.returncode == 0, result.stdout
    assert "4 neighbouring devices exchange tokens" in result.stdout
    assert_same_store(tmp_path / "divided", tmp_path / "one")


def test_the_tensor_step_sums_twice_a_layer_and_gathers_no_activations(report):
    """Once after attention, once after the MLP (Shoeybi et al., arXiv 1909.08053), and once for the embedding."""
    found = collectives(report["dense 2 False 1 None"]["hlo"])
    sums = [each for each in found if each.startswith("all-reduce f32[2,24,32]")]
    of_counts = [each for each in found if each.startswith("all-reduce") and "f32[" not in each]
    assert len(sums) == 1 + 2 * 2  # layer 0, and the body of the scan over layers 1 to 5
    assert len(found) == len(sums) + len(of_counts), found
