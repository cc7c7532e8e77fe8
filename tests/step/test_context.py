"""Long rows whose positions are divided over devices along `context`."""

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.models.attention.spec import AttentionSpec
from pipeline.models.attention.splash import chunk_block, chunk_blocks
from pipeline.models.exchange.context import device_chunks
from pipeline.store.read.reader import ActivationStore
from tests.jobs import assert_same_store, committed, local_processes, run_processes, wait_for_blocks, write_text
from tests.models.hf_reference import VOCAB_SIZE, save_random, torch
from tests.step.divisions import CONFIGS, Division, run_divisions

pytestmark = pytest.mark.heavy


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_family_computes_the_same_in_long_rows(tmp_path):
    """Documents of 5 to 4,096 tokens. `test_mesh.py` has some families with shorter rows."""
    divisions = [Division(2, True, context=4), Division(2, context=4), Division(fsdp=True, context=8)]
    cases = {(name, None): [Division(context=2)] if name in ("delta", "mamba") else divisions for name in CONFIGS}
    report = run_divisions(tmp_path, 4, 4096, cases)
    errors = {f"{name} {each}": report[f"{name} {each}"]["error"] for name, _ in cases for each in cases[name, None]}
    assert max(errors.values()) < 1e-5, errors


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
