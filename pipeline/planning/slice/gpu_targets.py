"""NVIDIA GPUs to compile for. JAX's CUDA plugin needs no GPU, driver or library of NVIDIA's for that.

Products are not tuned by running them, and cuDNN's kernels are not built, so a program on a GPU may choose others.
"""

from collections.abc import Sequence

import jax
from jax.experimental import topologies

from pipeline.core.errors import ConfigError

# XLA's GpuTargetConfigProto. Limits: "Technical specifications per compute capability" in NVIDIA's CUDA programming
# guide. The rest: XLA's description of the H100 (openxla/xla, backends/gpu/target_config/specs), and "NVIDIA Ada GPU
# Architecture".
_CONFIG = """
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{name}"
gpu_device_info {{
  runtime_version: "12.8.0" cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
  core_count: {cores} clock_rate_ghz: {clock_ghz} device_memory_size: {memory} memory_bandwidth: {memory_per_s}
  l2_cache_size: {cache} shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared_per_block}
  shared_memory_per_block: 49152 threads_per_core_limit: {threads} fpus_per_core: 128 threads_per_warp: 32
  threads_per_block_limit: 1024 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}"""
_CUDNN = 91000  # 9.10
_GPUS = {  # sizes in bytes; shared memory and threads of a core, a streaming multiprocessor
    "h100": {
        **{"name": "NVIDIA H100 80GB HBM3", "capability": (9, 0), "cores": 132, "clock_ghz": 1.98},
        **{"memory": 84_942_979_072, "memory_per_s": 3_352_320_000_000, "cache": 50 << 20},
        **{"shared": 228 << 10, "shared_per_block": 227 << 10, "threads": 2048},
    },
    "rtx4090": {
        **{"name": "NVIDIA GeForce RTX 4090", "capability": (8, 9), "cores": 128, "clock_ghz": 2.52},
        **{"memory": 25_393_692_672, "memory_per_s": 1_008_096_000_000, "cache": 72 << 20},
        **{"shared": 100 << 10, "shared_per_block": 99 << 10, "threads": 1536},
    },
}


def gpu_devices(name: str, count: int) -> Sequence[jax.Device]:
    """`count` GPUs of one machine, to compile for. Raises ConfigError if JAX's CUDA plugin is missing.

    From then on, this process lowers cuDNN's attention for this GPU. Otherwise JAX would ask the GPU of this machine,
    if there is one, for its compute capability and for the version of cuDNN.
    """
    from jax._src.cudnn import fused_attention_stablehlo as attention

    gpu = _GPUS[name]
    options = {"target_config": _CONFIG.format(**gpu), "topology": f"1x1x{count}"}
    try:
        description = topologies.get_topology_desc(platform="cuda", **options)
    except NotImplementedError as error:
        raise ConfigError(
            f"topology={name}-{count} requires JAX's CUDA plugin, which is not installed. Run pip install -e '.[cuda]'."
        ) from error
    attention.check_cudnn_version = lambda: _CUDNN
    attention.check_compute_capability = lambda least: gpu["capability"] >= tuple(map(int, least.split(".")))
    attention.is_cuda_compute_capability_equal = lambda capability: False  # asked for Blackwell's only
    return description.devices
