"""All processes of a slice train one SAE on activations that they compute at the same time: an example of `Stream`.

    python scripts/examples/train_sae_on_hosts.py --slice                      # on every host of a TPU slice
    python scripts/examples/train_sae_on_hosts.py --coordinator localhost:9000 --processes 2 --process 0     # and 1

Each process computes activations for its share of the data on its own devices, so that processes do not wait for each
other. A training step uses a batch from each process, as one array divided by tokens over all devices of all processes.
The SAE is on every device, and XLA sums its gradients. The stream's plan reserves the memory for training. The last
line is the loss of the last steps, which is the same in all processes.

Shapes: B tokens of all processes, D features.
"""

import argparse
import tempfile
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from train_sae_on_stream import BATCH, BUFFER, EXPANSION, TINY, Training, step, write_text

from pipeline import Stream

WIDTH = 128  # of the bundled model
TRAINING_BYTES = 4 * 4 * (2 * EXPANSION * WIDTH**2 + WIDTH)  # float32: the SAE, Adam's two moments, gradients


def replicate(training: Training, mesh: Mesh) -> None:
    """Puts the state, which every process has made from the same seed, on all devices."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(np.asarray, nnx.state(training))
    nnx.update(training, jax.tree.map(lambda x: jax.make_array_from_process_local_data(everywhere, x), state))


def main(steps: int) -> float:
    """The mean loss of the last ten steps. Predicting the mean activation would give 1."""
    mesh = Mesh(jax.devices(), ("data",))
    by_tokens = NamedSharding(mesh, PartitionSpec("data"))
    with tempfile.TemporaryDirectory() as folder:
        data = {"path": write_text(Path(folder)), "row_groups_per_shard": 1, "num_streams": jax.process_count()}
        options = {"model_dtype": "float32", "reserved_mib": TRAINING_BYTES / 2**20, "progress": False}
        stream = Stream(TINY, layers=[3], data=data, **options)
        normalisation = stream.normalisation(num_tokens=8192)  # the same in all processes
        options = {"shuffle_buffer_tokens": BUFFER, "seed": 0, "dtype": "float32", "normalisation": normalisation}
        batches = stream.batches(BATCH, **options)  # the default rank is process_index, out of process_count

        training, losses = Training(WIDTH), []
        replicate(training, mesh)
        for _, batch in zip(range(steps), batches, strict=False):  # ranks have different numbers: stop before the end
            x = jax.make_array_from_process_local_data(by_tokens, np.ascontiguousarray(batch.activations))
            losses.append(float(step(training, x)))
        batches.close()
    loss = float(np.mean(losses[-10:]))
    print(f"{jax.process_count()} processes, {x.shape[0]} tokens a step: loss {losses[0]:.4f} -> {loss:.4f}")
    assert loss < 0.6 * losses[0], losses
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--slice", action="store_true", help="join the processes of a TPU slice")
    parser.add_argument("--coordinator", help="elsewhere: host:port of process 0")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    arguments = parser.parse_args()
    if arguments.slice or arguments.coordinator is not None:
        jax.distributed.initialize(arguments.coordinator, arguments.processes, arguments.process)
    main(arguments.steps)
