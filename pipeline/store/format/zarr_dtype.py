"""The data types `bfloat16` and `float8_e4m3fn` for zarr-python (3.1 and later), as TensorStore writes them.

zarr-python finds the classes through entry points once this package is installed:

    [project.entry-points."zarr.data_type"]
    bfloat16 = "pipeline.store.format.zarr_dtype:BFloat16"  # and so on
    [project.entry-points."zarr.buffer"]
    bfloat16 = "pipeline.store.format.zarr_dtype:ZarrBuffer"

bfloat16 is registered at https://github.com/zarr-developers/zarr-extensions/tree/main/data-types/bfloat16;
float8_e4m3fn has the name of ml_dtypes.
"""

from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes
import numpy as np
from zarr.buffer.cpu import Buffer
from zarr.dtype import Float16, Int8, data_type_registry


class _MlDtype:
    """What both types change of types of zarr-python. Scalars are those of its floats, in another numpy dtype."""

    native: ClassVar[np.dtype]
    _zarr_v3_name: ClassVar[str]
    _zarr_v2_names = (None,)  # no array of Zarr v2 has such a name
    _check_scalar = Float16._check_scalar
    to_json_scalar = Float16.to_json_scalar
    from_json_scalar = Float16.from_json_scalar

    def to_native_dtype(self) -> np.dtype:
        return self.native

    def to_json(self, zarr_format: int) -> str:
        return self._zarr_v3_name


@dataclass(frozen=True, kw_only=True)
class BFloat16(_MlDtype, Float16):
    native = np.dtype(ml_dtypes.bfloat16)
    dtype_cls = type(native)
    _zarr_v3_name = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FN(_MlDtype, Int8):  # not a float of zarr's, which have an order of bytes that the metadata must name
    native = np.dtype(ml_dtypes.float8_e4m3fn)
    dtype_cls = type(native)
    _zarr_v3_name = "float8_e4m3fn"


# zarr-python 3.1 collects the entry points of `zarr.data_type` but does not load them (3.2 does). It does load those
# of `zarr.buffer` before it opens any array, so this module is listed there too: importing it registers the types.
# That entry point itself is zarr's own buffer, registered under its usual name.
for _type in (BFloat16, Float8E4M3FN):
    data_type_registry.register(_type._zarr_v3_name, _type)
ZarrBuffer = Buffer
