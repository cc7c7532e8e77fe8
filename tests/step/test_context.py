"""Rows whose positions are divided over devices along `context`, against rows on one device."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.models.attention.spec import AttentionSpec
from pipeline.models.attention.splash import chunk_block, chunk_blocks
from pipeline.models.exchange.context import device_chunks
from pipeline.store.read.reader import ActivationStore
from tests.jobs import (
    assert_same_store,
    committed,
    local_processes,
    run_processes,
    run_program,
    wait_for_blocks,
    write_text,
)
from tests.models.hf_reference import VOCAB_SIZE, save_random, torch
from tests.step.test_mesh import CONFIG, CONFIGS, TWO_LAYERS

pytestmark = pytest.mark.heavy

ROBERTA = {name: CONFIG[name] for name in CONFIG if name != "num_key_value_heads"} | {
    "model_type": "roberta",
    "num_hidden_layers": 2,
    **{"max_position_embeddings": 4098, "type_vocab_size": 2},
}
WINDOWS = CONFIG | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8}
MODELS = CONFIGS | {"dense": TWO_LAYERS, "roberta": ROBERTA, "gemma2": WINDOWS}
DIVISIONS = {"dense": [(4, 2, True)], "gpt_oss": [(2, 1, False)], "delta": [(2, 1, True)], "llama4": [(4, 1, False)]}
DIVISIONS |= {"roberta": [(4, 1, False)]}
"""Sizes of `context` and `tensor`, and whether fsdp divides the weights, by model."""

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from pipeline.cluster.sharding import make_mesh, put_rows
from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.job.writing.transfer import start_copies
from pipeline.models.attention import context
from pipeline.models.partition import Partition
from pipeline.models.registry import open_model
from pipeline.models.weight_specs import has_site
from pipeline.step.compiled_step import compile_step
from pipeline.store.format.layout import OUTPUTS, SELECTED, TOKENS, output_specs
from tests.specs import step_spec

context.BY_HEADS = 0  # as in long rows
path, length, divisions = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
rng, rows = np.random.default_rng(0), 2
tokens = rng.integers(0, 101, (rows, length), dtype=np.int32)
segments, positions = np.zeros((2, rows, length), np.int32)
for row in range(rows):  # documents of 20 tokens to whole rows, and some padding
    start = 0
    while start < length - 20:
        size = min(length - start, length if row == 0 else int(np.exp(rng.uniform(np.log(20), np.log(length)))))
        segments[row, start : start + size] = segments[row].max() + 1
        positions[row, start : start + size] = range(size)
        start += size
selected = np.sort(rng.permuted(np.tile(np.arange(length), (rows, 1)), axis=1)[:, :8].astype(np.int32), axis=1)
selected[:, -1] = -1
batch = {"tokens": tokens, "segments": segments, "positions": positions}

def outputs(model, num_context, tensor, fsdp, selects):
    devices = jax.devices() if num_context > 1 else jax.devices()[:1]
    data = len(devices) // (num_context * tensor)
    partition = Partition(make_mesh(tensor, devices, num_context), fsdp)
    keys = activation_keys((0, 1), (Site.q, Site.attn_entropy, Site.attn_z, Site.attn_out, Site.mlp_out))
    keys = [key for key in keys if has_site(model.arch, key.layer, key.site)]
    keys.append(ActivationKey(model.num_layers - 1, Site.resid_post))
    extra = {"selected": 8} if selects else {}
    if model.head is not None:
        extra["head_outputs"] = output_specs(OUTPUTS, 4, (SELECTED if selects else TOKENS).slots)
    spec = step_spec(model, keys, rows=rows * data, length=length, dtype="float32", **extra)
    params = model.load(spec.forward_keys, "float32", partition.leaf_sharding, with_head=model.head is not None)
    step = compile_step(model, spec, params, partition)
    inputs = batch | ({"selected": selected} if selects else {})
    inputs = {name: np.tile(values, (data, 1)) for name, values in inputs.items()}
    computed = step(params, **put_rows(partition.mesh, inputs)) if not selects else step(
        params, *put_rows(partition.mesh, inputs).values()
    )
    leaves = jax.tree.leaves(computed.stored)
    whole = [np.full(leaf.shape, np.nan, np.float32) for leaf in leaves]
    for copy in start_copies(leaves, first_row=0):  # as the writer does
        whole[copy.output][copy.place(0)] = copy.wait()
    assert [np.asarray(computed.counts)[1:].sum()] == [0], computed.counts
    are_ids = [jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in leaves]
    return [(values[:rows], ids) for values, ids in zip(whole, are_ids, strict=True)]

report = {}
for name, divided in divisions.items():
    model = open_model(f"{path}/{name}", init="random")
    selects = name == "dense"
    expected = outputs(model, 1, 1, False, selects)
    for division in divided:
        got = outputs(model, *division, selects)
        errors = []
        for (a, ids), (b, _) in zip(got, expected, strict=True):
            assert (np.isnan(a) == np.isnan(b)).all()  # the loss of a document's last token
            if ids:  # of the likeliest tokens: two that are equally likely up to rounding may change places
                errors.append(float((a != b).mean()) / 100)
                continue
            a, b = np.nan_to_num(a), np.nan_to_num(b)
            errors.append(float(np.linalg.norm(a - b) / np.linalg.norm(b)))
        report[f"{name} {division}"] = max(errors)
json.dump(report, sys.stdout)
"""


def errors(tmp_path: Path, length: int, divisions: dict[str, list]) -> dict[str, float]:
    """The largest relative error of an output, by model and division."""
    for name in divisions:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(MODELS[name]))
    done = run_program(PROGRAM, str(tmp_path), str(length), json.dumps(divisions), devices=8, timeout_s=3600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_divided_positions_compute_the_same(tmp_path):
    """All outputs: activations, statistics and the head's, of all tokens or, in the dense model, of selected ones."""
    found = errors(tmp_path, 96, DIVISIONS)
    assert len(found) == sum(map(len, DIVISIONS.values()))
    assert max(found.values()) < 1e-5, found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_family_computes_the_same_in_long_rows(tmp_path):
    """Documents of 20 to 4,096 tokens."""
    recurrent = {name: [(2, 1, False)] for name in ("delta", "mamba")}  # two key heads
    divisions = {name: [(2, 2, True), (4, 2, False), (8, 1, True)] for name in MODELS} | recurrent
    found = errors(tmp_path, 4096, divisions)
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize(
    ("sizes", "window", "total", "ratio"),
    [
        ([131072], None, 8256, 1),
        ([65536, 65536], None, 4160, 1),
        ([4096] * 32, None, 320, 1),
        ([131072], 4096, 630, 1.05),
        ([65536, 30000, 35536], None, 3174, 1.35),
    ],
)
@pytest.mark.parametrize("context", [4, 16])
def test_every_device_runs_as_many_blocks(context, sizes, window, total, ratio):
    """Of 1,024 queries and keys. Rows of several documents have less to compute, and no device has more."""
    segments = jnp.asarray(np.repeat(np.arange(len(sizes)) + 1, sizes)[None], jnp.int32)
    spec, chunks = AttentionSpec(causal=True, scale=1.0, window=window), device_chunks(context, segments.shape[1])
    block = chunk_block(segments.shape[1] // len(chunks), segments.shape[1], item_bytes=2)
    runs = [chunk_blocks(segments[:, chunk], segments, chunk.start, spec, block)[0].sum() for chunk in chunks]
    blocks = np.array(runs).reshape(context, 2).sum(axis=1)
    assert blocks.sum() == total
    assert blocks.max() <= ratio * blocks.mean()
    assert blocks.max() <= 128 * 129 / 2 / context


@pytest.mark.slow  # tests/job/test_processes.py kills and resumes processes that divide rows
def test_a_killed_job_with_divided_positions_resumes_to_the_same_bytes(tmp_path):
    job = (
        *(f"data.path={write_text(tmp_path / 'text', files=2, documents=15)}", "data.num_streams=2", "mesh.context=2"),
        *("batch.rows=4", "batch.length=128", "capture.layers=[1]", "capture.sites=[resid_post,attn_z]"),
        *("capture.outputs=[loss]", "run.progress=false", "store.rows_per_block=8", "run.max_tokens=6000"),
    )
    undisturbed, resumed = tmp_path / "undisturbed", tmp_path / "resumed"
    with local_processes(2, 2, *job, f"store.path={resumed}") as launcher:
        wait_for_blocks(launcher, resumed, 2)
    num_committed = committed(resumed)
    for store in (undisturbed, resumed):
        result = run_processes(2, 2, *job, f"store.path={store}")
        assert result.returncode == 0, result.stdout
    assert 2 <= num_committed < committed(undisturbed)
    assert_same_store(resumed, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_document_of_32768_tokens_equals_transformers(tmp_path):
    """A whole run, on eight devices, against a single forward pass, whose attention does not keep its weights."""
    length = 32768
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    reference = save_random("qwen2", tmp_path / "model", max_position_embeddings=length, **sizes)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, length)
    pq.write_table(pa.table({"input_ids": [tokens], "id": ["long"]}), tmp_path / "documents.parquet")
    result = run_processes(
        *(1, 8, f"data.path={tmp_path / 'documents.parquet'}", "data.tokens=input_ids", "data.num_streams=1"),
        *(f"model.path={tmp_path / 'model'}", "model.dtype=float32", "mesh.context=8"),
        *(f"store.path={tmp_path / 'store'}", "batch.rows=1", f"batch.length={length}", "capture.layers=all"),
        *("capture.dtype=float32", "capture.sites=[resid_post,final_norm]", "run.progress=false"),
        timeout_s=3000,
    )
    assert result.returncode == 0, result.stdout
    reference.set_attn_implementation("sdpa")
    with torch.no_grad():
        outputs = reference.base_model(torch.from_numpy(tokens[None]), output_hidden_states=True)
    expected = {"blocks.0.resid_post": outputs.hidden_states[1], "final_norm": outputs.last_hidden_state}
    store = ActivationStore.open(tmp_path / "store")
    for name, wanted in expected.items():
        got = store.read(name, store.rows, np.float32)
        assert np.linalg.norm(got - wanted.numpy()) <= 1e-4 * np.linalg.norm(wanted.numpy()), name
