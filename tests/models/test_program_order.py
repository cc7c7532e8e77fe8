"""Every process of a job must trace the same program. The processes of this test hash strings differently."""

import os

import pytest

from tests.jobs import run_program

pytestmark = pytest.mark.heavy
PROGRAM = """
import jax
from pipeline.cluster.sharding import make_mesh
from pipeline.config.composing import PACKAGE
from pipeline.core.sites import activation_keys
from pipeline.models.partition import Partition
from pipeline.models.registry import open_model

model, partition = open_model(str(PACKAGE / "assets" / "tiny-qwen2"), init="random"), Partition(make_mesh(2))
keys = activation_keys((1,), model.sites)  # of a layer apart, after one of a scan
params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float32"), model.leaves(keys))
rows = (jax.ShapeDtypeStruct((2, 8), "int32"),) * 3
apply = jax.jit(lambda params, *rows: model.apply(params, *rows, keys, partition=partition))
print(apply.lower(params, *rows).as_text())
"""


def lowered(hash_seed: str) -> str:
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": hash_seed}
    done = run_program(PROGRAM, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_does_not_depend_on_hash_order() -> None:
    text = lowered("0")
    assert text.count("sharding_constraint") > 3
    assert text == lowered("1")
