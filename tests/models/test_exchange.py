"""What each process reads of weights that fsdp divides, and what the devices hold after the exchange."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.jobs import free_port, run_program, run_together
from tests.models.hf_reference import save_random

pytestmark = pytest.mark.heavy
SIZES = {"hidden_size": 448, "intermediate_size": 256, "num_attention_heads": 28, "head_dim": 64, "vocab_size": 256}
SIZES |= {"num_key_value_heads": 4, "num_hidden_layers": 3}
SPARSE = SIZES | {"num_experts": 64, "moe_intermediate_size": 64}
LATENT = SIZES | {
    "moe_intermediate_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
}
LATENT |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 32, "n_group": 4}

READ = """
import sys
import jax, numpy as np
from pipeline.cluster.sharding import make_mesh
from pipeline.core.sites import ActivationKey, Site
from pipeline.models.checkpoints.leaf_reading import Exchange, read_items, read_leaf
from pipeline.models.checkpoints.safetensors_file import SafetensorsFile
from pipeline.models.leaves import quantised_leaves
from pipeline.models.partition import Partition
from pipeline.models.registry import open_model
from pipeline.planning.slice.chips import parse_slice
from pipeline.planning.slice.compile_check import slice_devices

read, rows = [], SafetensorsFile.rows

def counted(self, name, start, stop):
    values = rows(self, name, start, stop)
    read.append(values.nbytes)
    return values

SafetensorsFile.rows = counted
partition = Partition(make_mesh(1, slice_devices(parse_slice("v5e-64"))), fsdp=True)
for path in sys.argv[1:]:
    model = open_model(path)
    needed = model.leaves((ActivationKey(model.num_layers - 1, Site.resid_post),))
    for quantised in (None, "int8", "int4"):
        for process in (0, 7, 15):
            held = 0
            read.clear()
            for leaf in jax.tree.leaves(quantised_leaves(needed, quantised)):
                sharding, dtype = partition.leaf_sharding(leaf), leaf.dtype("float32")
                indices = sharding.devices_indices_map(leaf.shape).items()
                parts = {repr(index): index for device, index in indices if device.process_index == process}
                held += 4 * len(parts) * np.prod(sharding.shard_shape(leaf.shape))
                exchange = Exchange.of(leaf, sharding)
                if exchange is not None:
                    read_items(model.checkpoint, leaf, dtype, exchange.items(process))
                else:
                    read_leaf(model.checkpoint, leaf, dtype, [*parts.values()])
            print(path.rpartition("/")[2], quantised, process, sum(read) / held)
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, for 64 devices of 16 hosts")
def test_each_of_sixteen_hosts_reads_what_it_holds(tmp_path: Path) -> None:
    models = {"llama": SIZES, "qwen3_moe": SPARSE, "deepseek_v3": LATENT}
    for family, sizes in models.items():
        save_random(family, tmp_path / family, **sizes)
    done = run_program(READ, *(str(tmp_path / family) for family in models))
    assert done.returncode == 0, done.stderr
    ratios = [line.split() for line in done.stdout.splitlines()]
    assert len(ratios) == len(models) * 3 * 3
    for *case, ratio in ratios:
        assert float(ratio) <= 1.3, case


LOAD = """
import sys
import jax, numpy as np
from pipeline.cluster.sharding import make_mesh
from pipeline.core.sites import ActivationKey, Site
from pipeline.models.checkpoints.leaf_reading import Exchange
from pipeline.models.leaves import quantised_leaves
from pipeline.models.partition import Partition
from pipeline.models.registry import open_model

port, process = sys.argv[1:3]
jax.distributed.initialize(f"localhost:{port}", 2, int(process))
whole, exchanged = jax.sharding.SingleDeviceSharding(jax.local_devices()[0]), set()
for path in sys.argv[3:]:
    model = open_model(path)
    keys = (ActivationKey(model.num_layers - 1, Site.resid_post),)
    for tensor, quantised in ((1, None), (1, "int4"), (2, "int8")):
        partition = Partition(make_mesh(tensor), fsdp=True)
        expected = model.load(keys, "float32", whole, quantised=quantised)
        got = model.load(keys, "float32", partition.leaf_sharding, quantised=quantised)
        for leaf in jax.tree.leaves(quantised_leaves(model.leaves(keys), quantised)):
            exchange = Exchange.of(leaf, partition.leaf_sharding(leaf))
            exchanged |= {(path.rpartition("/")[2], str(quantised))} if exchange else set()
        for (name, array), values in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected)):
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(shard.data, np.asarray(values)[shard.index], err_msg=f"{path} {name}")
print(sorted(exchanged))
"""
FAMILIES = ("llama", "gpt2", "gpt_oss")


def test_devices_hold_their_parts_after_an_exchange(tmp_path: Path) -> None:
    """Two processes of four devices, with fsdp and with a tensor axis."""
    for family in FAMILIES:
        save_random(family, tmp_path / family)
    paths = [str(tmp_path / family) for family in FAMILIES]
    common = ["env", "JAX_NUM_CPU_DEVICES=4", sys.executable, "-c", LOAD, str(free_port())]
    outputs = run_together([[*common, str(process), *paths] for process in range(2)])
    assert all(f"('{family}', 'None')" in outputs[0] for family in FAMILIES), outputs[0]
    assert "('llama', 'int4')" in outputs[0], outputs[0]
