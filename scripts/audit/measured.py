"""Runs the step of an audited case on this machine's devices, with random weights and documents of 300 tokens.

    python -m scripts.audit.measured CASE [STEPS]

Prints a line of JSON, for the report of a first day.
"""

import json
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

from pipeline.cluster.sharding import put_rows
from pipeline.job.loaded_step import load_weights
from pipeline.step.compiled_step import compile_step
from scripts.audit.cases import GPU_CASES, TPU_CASES, Case, planned

_DOCUMENT = 300  # tokens


def measure(case: Case, num_steps: int) -> dict[str, Any]:
    """The median time of a step, its memory per device, and what attention it has. Raises ConfigError."""
    with planned(case) as (config, model, plan):
        partition = plan.weights.partition()
        params = load_weights(config, model, plan, partition, ())
        step = compile_step(model, plan.step, params, partition)
        tokens = np.random.default_rng(0).integers(0, model.vocab_size, (step.spec.rows, step.spec.length), np.int32)
        places = np.broadcast_to(np.arange(step.spec.length, dtype=np.int32), tokens.shape)
        rows = {"tokens": tokens, "segments": 1 + places // _DOCUMENT, "positions": places % _DOCUMENT}
        batch = put_rows(step.mesh, rows).values()
        seconds = []
        for _ in range(1 + num_steps):
            began = time.perf_counter()
            jax.block_until_ready(step(params, *batch))
            seconds.append(time.perf_counter() - began)
    step_s, spec = statistics.median(seconds[1:]), plan.step
    flops = model.flops_per_token(spec.forward_keys, spec.length, spec.head_share) * tokens.size
    return {
        "step_ms": step_s * 1e3,
        "tokens_per_s": tokens.size / step_s,
        "flops_per_s": flops / step_s / step.mesh.size,  # of a device
        "temporary_bytes": step.memory.temporary_bytes,
        "attention": step.attention.describe(),
    }


if __name__ == "__main__":
    print(json.dumps(measure((TPU_CASES | GPU_CASES)[sys.argv[1]], int((sys.argv[2:] or ["10"])[0]))))
