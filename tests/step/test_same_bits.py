"""A row's activations have the same bits for one device and for many, on CPUs. Another process has the devices."""

import json
import os

import pytest

from tests.jobs import run_program
from tests.step.divisions import CONFIGS

pytestmark = pytest.mark.heavy
PROGRAM = """
import json, sys
from pipeline.core.sites import Site, activation_keys
from pipeline.models.registry import open_model
from tests.step.divisions import Division, compute, documents

SITES = Site.attn_entropy, Site.attn_out, Site.router_weights, Site.router_indices, Site.expert_out, Site.resid_post
model, batch, keys = open_model(sys.argv[1], init="random"), documents(8, 96), activation_keys((0,), SITES)
divisions = Division(devices=1), Division(fsdp=True, group=4)
one, eight = (compute(model, keys, batch, division).arrays for division in divisions)
json.dump({name: one[name].tobytes() == eight[name].tobytes() for name in one}, sys.stdout)
"""


def test_a_row_has_the_same_bits_for_any_number_of_devices(tmp_path) -> None:
    """The second layer is dense. Four neighbours exchange tokens, and all devices gather the other weights."""
    config = CONFIGS["experts"] | {"num_hidden_layers": 2, "mlp_only_layers": [1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # Compiled as for users: without LLVM's optimisations, sums over some numbers of rows differ in their last bits.
    done = run_program(PROGRAM, str(tmp_path), devices=8, env=os.environ | {"XLA_FLAGS": ""}, timeout_s=600)
    assert done.returncode == 0, done.stderr
    equal = json.loads(done.stdout)
    assert len(equal) == 6 + 1
    assert all(equal.values()), equal
