"""Measures every stage except the model on this machine: `make bench-host` writes build/bench-host.json.

    python -m scripts.bench.bench_host [--tokens 300000] [--repetitions 3]

The job captures three layers in bfloat16 from a model with Qwen2.5-0.5B's shape, in rows of 1024, with a step that only
broadcasts its tokens. Each stage runs alone, then all together as in `pipeline.run`. Rates are per core: tokens or
bytes per CPU second of all threads, which other users of the machine affect little. A floor is the same work by the
library alone, measured in the same run: `tokenizers` for the feed, a copy in memory for the copies, TensorStore for the
writes.
"""

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tensorstore as ts
from jaxtyping import Array
from tokenizers import Tokenizer

from pipeline.cluster import sharding
from pipeline.config import composing
from pipeline.data.documents import Document, TokenBlock
from pipeline.job.job import Job
from pipeline.job.loaded_step import LoadedStep, step_inputs
from pipeline.job.writing.block_writer import commit_record
from pipeline.job.writing.transfer import start_copies
from pipeline.models.attention.choosing import XLA
from pipeline.step.compiled_step import CompiledStep, StepOutputs
from pipeline.step.stored_values import RowStatistics
from pipeline.store.format.arrays import zarr_metadata
from pipeline.store.format.layout import SIDE_ARRAYS
from pipeline.store.write.store_writer import StoreWriter
from scripts.bench.bench_job import fill_store, open_benchmark, prepare
from scripts.bench.published_shapes import write_shapes

BUILD = Path("build/bench-host")
TOKENIZER = composing.PACKAGE / "assets/tiny-qwen2"
ROWS, LENGTH, LAYERS = 8, 1024, (5, 11, 17)


@dataclass
class Stage:
    """A stage of the job, or a floor. `num_tokens` and `num_bytes` are per run."""

    name: str
    run: Callable[[], None]
    num_tokens: int
    num_bytes: int = 0
    floor: str | None = None
    cpu_s: list[float] = field(default_factory=list)

    def measure(self) -> None:
        began = time.process_time()
        self.run()
        self.cpu_s.append(time.process_time() - began)

    def cells(self, stages: dict[str, "Stage"]) -> tuple[str, ...]:
        """The stage's line of the table."""
        seconds, share = statistics.median(self.cpu_s), ""
        if self.floor:
            floor = stages[self.floor]
            ratios = (theirs / ours for theirs, ours in zip(floor.cpu_s, self.cpu_s, strict=True))
            share = f"{statistics.median(ratios) * self.num_tokens / floor.num_tokens:.2f} of {self.floor}"
        gb = f"{self.num_bytes / seconds / 1e9:.2f}" if self.num_bytes else ""
        return self.name, f"{self.num_tokens / seconds:,.0f}", gb, share


def open_broadcast_job(max_tokens: int | None) -> Job:
    """Opens the job. Its model has no weights; only its shape is used."""
    overrides = [f"model.path={BUILD / 'shapes/Qwen2.5-0.5B'}", f"capture.layers={list(LAYERS)}", "store.shard_mib=32"]
    overrides += [f"batch.rows={ROWS}", f"batch.length={LENGTH}", f"run.max_tokens={max_tokens or 'null'}"]
    overrides.append("data.num_streams=1")  # the stages below read the first
    return open_benchmark(BUILD, "store", *overrides)


def broadcast_step(job: Job) -> LoadedStep:
    """A step with the job's shapes that sets all activations of a token to its id."""
    plan = job.plan
    mesh = sharding.make_mesh()
    by_rows = sharding.row_sharding(mesh)

    def step(_params: None, tokens: Array, segments: Array, _positions: Array) -> StepOutputs:
        def filled(*shape: int) -> Array:
            return jnp.broadcast_to(tokens[:, :1, None].astype(jnp.float32), shape)

        activations = tuple(
            jnp.broadcast_to(tokens[:, :, None], (*tokens.shape, array.width)).astype(array.dtype)
            for array in plan.step.stored_arrays
        )
        sums = {name: filled(len(tokens), *shape) for name, shape in plan.step.statistics_shapes.items()}
        counts = jnp.zeros(1 + len(plan.step.keys), jnp.int32).at[0].set((segments != 0).sum())
        return StepOutputs(activations, RowStatistics(**sums) if sums else None, counts)

    batch = jax.ShapeDtypeStruct((plan.step.rows, plan.step.length), jnp.int32, sharding=by_rows)
    executable = jax.jit(step).lower(None, batch, batch, batch).compile()
    compiled = CompiledStep(mesh, plan.step, XLA, executable)
    return LoadedStep(compiled, lambda _block, _rows: None, plan.mesh.process_rows)


def write_blocks(job: Job, blocks: Sequence[TokenBlock], buffers: Sequence[np.ndarray]) -> None:
    """Writes and commits blocks, each with the activations in `buffers`."""
    shutil.rmtree(job.config.store.path, ignore_errors=True)
    store = StoreWriter.open(job.config.store.path, job.metadata, job.layout)
    for block in blocks:
        arrays = {spec.name: getattr(block, spec.name) for spec in SIDE_ARRAYS}
        arrays |= {spec.name: values for spec, values in zip(job.layout.arrays, buffers, strict=True)}
        store.start_block(commit_record(block), arrays, block.table).result()


def write_arrays(job: Job, num_blocks: int, buffers: Sequence[np.ndarray]) -> None:
    """Writes the same activations by TensorStore alone, with the same chunks and checksums."""
    directory = BUILD / "floor"
    shutil.rmtree(directory, ignore_errors=True)
    for spec, values in zip(job.layout.arrays, buffers, strict=True):
        metadata = zarr_metadata(job.layout, spec, num_blocks * len(values))
        place = f"file://{directory.resolve()}/{spec.name}/"
        array = ts.open({"driver": "zarr3", "kvstore": place, "metadata": metadata}, create=True).result()
        for block in range(num_blocks):
            rows = slice(block * len(values), (block + 1) * len(values))
            array[rows].write(values, can_reference_source_data_indefinitely=True).result()


def stages(job: Job) -> list[Stage]:
    """Every stage and floor, ready to be measured."""
    plan, whole_text = job.plan, open_broadcast_job(None)
    shards = range(len(job.source.shards))
    texts = [item.text for shard in shards for item in job.source.read(shard, 0) if isinstance(item, Document)]
    num_tokens = sum(len(tokens) for tokens in job.tokenizer.encode(texts))
    library = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    blocks = [block for block in job.work()[0].blocks(lambda: False) if block.num_rows == plan.rows_per_block]
    stored_tokens = sum(block.num_tokens for block in blocks)
    num_steps = len(blocks) * plan.rows_per_block // ROWS

    step = broadcast_step(job)
    batch = sharding.put_rows(step.compiled.mesh, step_inputs(blocks[0], slice(0, ROWS), plan.step))
    activations = step.compiled(None, batch["tokens"], batch["segments"], batch["positions"]).arrays
    source = [np.array(values) for values in activations]
    buffers = [np.zeros(job.layout.block_shape(spec), ml_dtypes.bfloat16) for spec in job.layout.arrays]
    sizes = stored_tokens, len(blocks) * plan.memory.block_bytes

    def copy_steps() -> None:
        for _ in range(num_steps):
            for part in start_copies(activations, plan.mesh.first_row):
                np.copyto(buffers[part.output][part.rows, *part.rest], part.wait())

    def copy_memory() -> None:
        for _ in range(num_steps):
            for target, values in zip(buffers, source, strict=True):
                np.copyto(target[:ROWS].view(np.uint8), values.view(np.uint8))

    return [
        Stage("tokenizers alone", lambda: library.encode_batch_fast(texts), num_tokens),
        Stage("memcpy", copy_memory, *sizes),
        Stage("TensorStore alone", lambda: write_arrays(job, len(blocks), buffers), *sizes),
        Stage("feed", lambda: list(whole_text.work()[0].blocks(lambda: False)), num_tokens, 0, "tokenizers alone"),
        Stage("device to buffers", copy_steps, *sizes, "memcpy"),
        Stage("write and commit", lambda: write_blocks(job, blocks, buffers), *sizes, "TensorStore alone"),
        Stage("whole job", lambda: fill_store(job, step, job.config.store.path), *sizes),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=300_000, help="to copy and store; the feed reads the whole text")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    prepare(BUILD)
    write_shapes(BUILD / "shapes")
    measured = stages(open_broadcast_job(options.tokens))
    for stage in measured:
        stage.run()  # warms up: memory, threads, the page cache
    for _ in range(options.repetitions):
        for stage in measured:
            stage.measure()
    by_name = {stage.name: stage for stage in measured}
    rows = [stage.cells(by_name) for stage in measured]
    print("| stage | tokens per core and s | GB per core and s | of its floor |\n|---|---|---|---|")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    result = {"stages": rows, "cores": os.cpu_count(), "jax": jax.__version__}
    Path("build/bench-host.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
