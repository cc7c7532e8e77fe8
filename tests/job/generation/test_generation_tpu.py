"""Generation compiled for TPU slices, where libtpu is installed (the extra `tpu`); no TPU is needed."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from pipeline.planning.slice.chips import CHIPS
from scripts.bench.published_shapes import SHAPES
from tests.jobs import run_program

pytestmark = pytest.mark.heavy
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (the extra `tpu`)")
ROWS_PER_CHIP, MAX_PROMPT, NUM_NEW = 4, 1024, 1024

PROGRAM = """
import json, sys
from pipeline.planning.slice.compile_check import slice_devices
from pipeline.cluster.sharding import make_mesh
from pipeline.job.generation.decode import compile_programs
from pipeline.planning.generation_plan import GenerationSpec
from pipeline.planning.generation_plan import Sampling
from pipeline.models.partition import Partition
from pipeline.models.registry import open_model
from pipeline.models.checkpoints.loading import abstract_params
from pipeline.planning.slice.chips import parse_slice

path, where, tensor, rows_per_chip, max_prompt, num_new = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
devices = slice_devices(parse_slice(where))
model, partition = open_model(path, init="random"), Partition(make_mesh(tensor, devices))
programs = compile_programs(
    model, abstract_params(model.generation.leaves(), "bfloat16", partition.leaf_sharding), partition,
    GenerationSpec(
        rows=rows_per_chip * len(devices), max_prompt=max_prompt, max_new_tokens=num_new, end_tokens=(0,),
        sampling=Sampling(), dtype="bfloat16", speculate=3,
    ),
)
report = {"attention": programs.attention.name}
for name in ("prefill", "segment"):
    memory = getattr(programs, name).memory_analysis()
    report[name] = {
        "written_in_place_bytes": memory.alias_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "hlo": getattr(programs, name).as_text(),
    }
json.dump(report, sys.stdout)
"""


def compiled(path: Path, num_layers: int, tensor: int) -> dict:
    """Compiles Qwen2.5-7B's shape with `num_layers` layers for 64 v5e chips, with heads divided over `tensor` chips."""
    (path / "config.json").write_text(json.dumps(SHAPES["Qwen2.5-7B"] | {"num_hidden_layers": num_layers}))
    arguments = [str(path), "v5e:8x8", str(tensor), str(ROWS_PER_CHIP), str(MAX_PROMPT), str(NUM_NEW)]
    done = run_program(PROGRAM, *arguments, timeout_s=3600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_in_place(report: dict, num_layers: int, tensor: int) -> None:
    """Asserts that caches are neither copied nor exchanged between chips, no weights are gathered, nothing runs row by
    row, and each program fits."""
    shape = SHAPES["Qwen2.5-7B"]
    rows, heads = ROWS_PER_CHIP * tensor, shape["num_key_value_heads"] // tensor
    width = shape["hidden_size"] // shape["num_attention_heads"]
    cache = f"bf16[{rows},{heads},{MAX_PROMPT + NUM_NEW},{width}]"
    cache_bytes = 2 * 2 * rows * heads * (MAX_PROMPT + NUM_NEW) * width
    assert report["attention"] == "splash"
    for program in (report["prefill"], report["segment"]):
        assert program["written_in_place_bytes"] >= num_layers * cache_bytes
        assert not re.search(
            rf"= {re.escape(cache)}\S* (copy|all-gather|all-to-all|collective-permute)\(", program["hlo"]
        )
        assert not re.search(r"= bf16\[\S* all-gather(-start)?\(", program["hlo"])
        assert program["peak_bytes"] < CHIPS["v5e"].hbm_bytes
    assert report["segment"]["hlo"].count(" while(") == 1 + num_layers  # over decoding steps, and over blocks of slots


@needs_libtpu
def test_caches_stay_in_place(tmp_path) -> None:
    assert_in_place(compiled(tmp_path, 1, tensor=2), 1, tensor=2)


@needs_libtpu
@pytest.mark.slow  # minutes: each layer is compiled separately
def test_a_large_model_fits(tmp_path) -> None:
    assert_in_place(compiled(tmp_path, 28, tensor=4), 28, tensor=4)
