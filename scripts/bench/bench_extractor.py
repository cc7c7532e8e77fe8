"""Measures an Extractor's overhead over its forward pass: python -m scripts.bench.bench_extractor [--repetitions 5]

The model has GPT-2's shape and random weights; `resid_post` of two layers is captured in bfloat16, from documents of
256 tokens. For calls with one document, with the documents of one step, and of four steps, this divides the time of a
call, from token lists to arrays of documents, by the time of the compiled steps alone on rows that are already on the
devices. The two alternate, and the medians are compared, without the first call, which compiles.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from pipeline import Extractor
from pipeline.cluster.sharding import put_rows, row_sharding
from pipeline.step.compiled_step import StepOutputs

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
ROWS, LENGTH, DOCUMENT = 8, 512, 256


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def bare_steps(extractor: Extractor, num_steps: int) -> Callable[[], StepOutputs]:
    """Returns a function that runs the step that was compiled last, on packed documents."""
    shape = extractor.compiled_shapes[-1]
    step = extractor._loaded(shape)
    tokens = np.ones(shape, np.int32)
    place = np.broadcast_to(np.arange(shape.length, dtype=np.int32), shape)
    inputs = {"tokens": tokens, "segments": place // DOCUMENT + 1, "positions": place % DOCUMENT}
    inputs = put_rows(row_sharding(step.compiled.mesh), inputs)
    params = step.operands.for_rows(None, slice(0, shape.rows))

    def run() -> StepOutputs:
        outputs = [step.compiled(params, *inputs.values()) for _ in range(num_steps)]
        return jax.block_until_ready(outputs[-1])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    repetitions = parser.parse_args().repetitions
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(GPT2))
        options = {"init": "random", "tokenizer": "${assets:tiny-qwen2}", "rows": ROWS, "length": LENGTH}
        extractor = Extractor(folder, layers=[3, 7], **options, progress=False)
    print(f"{jax.devices()[0].device_kind}, {jax.device_count()} devices")
    per_step = ROWS * LENGTH // DOCUMENT
    for num_documents, num_steps in ((1, 1), (per_step, 1), (4 * per_step, 4)):
        documents = [[1] * DOCUMENT] * num_documents
        first = seconds(lambda documents=documents: extractor(documents))
        bare = bare_steps(extractor, num_steps)
        bare()
        pairs = [(seconds(lambda documents=documents: extractor(documents)), seconds(bare)) for _ in range(repetitions)]
        call, forward = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(
            f"{num_documents:3} documents, {num_steps} steps: first call {first:.2f} s, "
            f"later ones {1e3 * call:.1f} ms, the forward pass {1e3 * forward:.1f} ms, ratio {call / forward:.3f}"
        )


if __name__ == "__main__":
    main()
