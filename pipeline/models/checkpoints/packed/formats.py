"""The formats of packed weights, and the choice of one by config.json."""

from collections.abc import Mapping

from pipeline.models.checkpoints.packed.fp8 import Fp8
from pipeline.models.checkpoints.packed.int4 import Int4
from pipeline.models.checkpoints.packed.int4_columns import Columns
from pipeline.models.checkpoints.packed.mxfp4 import Mxfp4
from pipeline.models.checkpoints.packed.packing import Packing, QuantizationConfig

_FORMATS: Mapping[str, type[Packing]] = {  # by `quant_method`
    **{"mxfp4": Mxfp4, "fp8": Fp8, "compressed-tensors": Int4, "gptq": Columns, "awq": Columns}
}


def read_packing(config: QuantizationConfig) -> Packing:
    """The format of packed weights. Raises CheckpointError if it is not implemented."""
    return _FORMATS[config.choice("quant_method", _FORMATS)](config)
