"""Which mesh the devices of a run form, and how the weights are divided over it. Pure arithmetic on ints."""

from collections.abc import Mapping

from pipeline.cluster.topology import Topology
from pipeline.config.choices import Weights
from pipeline.config.schema import MeshConfig
from pipeline.core.errors import ConfigError
from pipeline.store.format.layout import MIB

MAX_WEIGHTS_SHARE = 0.6  # of a device's memory, before they are divided: the rest is for activations


def mesh_shape(options: MeshConfig, topology: Topology, tensor_dims: Mapping[str, int]) -> tuple[int, int]:
    """Devices along `data` and along `tensor`, which divides the model's `tensor_dims`. Raises ConfigError."""
    tensor = options.tensor
    if tensor < 1:
        raise ConfigError(f"mesh.tensor is {tensor}. Set it to at least 1.")
    data = options.data if options.data is not None else max(1, topology.devices // tensor)
    if data * tensor != topology.devices:
        raise ConfigError(
            f"mesh.data * mesh.tensor = {data} * {tensor} is not the number of devices, {topology.devices}. "
            f"Set mesh.data=null and mesh.tensor to a divisor of {topology.devices}."
        )
    of_process = topology.devices // topology.processes
    if of_process % tensor:
        raise ConfigError(
            f"mesh.tensor={tensor} does not divide the {of_process} devices of a process "
            f"({topology.devices} devices / {topology.processes} processes): rows must stay within their process. "
            f"Set mesh.tensor to a divisor of {of_process}."
        )
    for name, size in tensor_dims.items():
        if size % tensor:
            raise ConfigError(
                f"mesh.tensor={tensor} does not divide the model's {size} {name}: {size} = {size // tensor} * {tensor} "
                f"+ {size % tensor}. Set mesh.tensor to a common divisor of "
                f"{', '.join(f'{size} {name}' for name, size in tensor_dims.items())}."
            )
    return data, tensor


def divide_weights(
    wanted: Weights, matrices: int, others: int, data: int, tensor: int, topology: Topology
) -> tuple[Weights, int, tuple[str, ...]]:
    """How the weights are divided, the bytes on each device, and why, where that was not asked for.

    `matrices` and `others` are the bytes of the layers' matrices and of all other weights. Raises ConfigError for what
    contradicts the mesh, and for what does not fit.
    """
    sizes = {
        Weights.replicated: matrices + others,
        Weights.tensor: matrices // tensor + others,
        Weights.fsdp: matrices // (tensor * data) + others,
    }
    if (wanted is Weights.tensor and tensor == 1) or (wanted is Weights.replicated and tensor > 1):
        raise ConfigError(
            f"model.weights={wanted} with mesh.tensor={tensor}: expected tensor with more than 1, replicated with 1. "
            f"Set model.weights=auto."
        )
    whole = Weights.tensor if tensor > 1 else Weights.replicated
    note: tuple[str, ...] = ()
    if wanted is Weights.auto:
        wanted = whole
        if topology.device_bytes is not None and sizes[whole] > MAX_WEIGHTS_SHARE * topology.device_bytes and data > 1:
            wanted = Weights.fsdp
            note = (
                f"weights are divided over the {data} devices along data: {sizes[whole] / MIB:.0f} MiB {whole} would "
                f"be more than {MAX_WEIGHTS_SHARE:.0%} of a device's {topology.device_bytes / MIB:.0f} MiB",
            )
    if topology.device_bytes is not None and sizes[wanted] > topology.device_bytes:
        raise ConfigError(
            f"the weights, {wanted}, take {sizes[wanted] / MIB:.0f} MiB on each device, which has "
            f"{topology.device_bytes / MIB:.0f} MiB. Use more devices with model.weights=fsdp, a larger mesh.tensor, "
            f"or model.weights_dtype=int8."
        )
    return wanted, sizes[wanted], note
