"""Teaches zarr-python (3.1 and later) the data type `bfloat16`, which TensorStore writes.

zarr-python finds the class through the entry-point group `zarr.data_type` once this package is installed:

    [project.entry-points."zarr.data_type"]
    bfloat16 = "pipeline.store.zarr_dtype:BFloat16"
    [project.entry-points."zarr.buffer"]
    bfloat16 = "pipeline.store.zarr_dtype:ZarrBuffer"

The type is registered at https://github.com/zarr-developers/zarr-extensions/tree/main/data-types/bfloat16.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import ml_dtypes
import numpy as np
from zarr.buffer.cpu import Buffer
from zarr.core.dtype.common import HasEndianness
from zarr.dtype import ZDType, data_type_registry

try:
    from zarr.errors import DataTypeValidationError
except ImportError:  # before zarr-python 3.2
    from zarr.dtype import DataTypeValidationError

_NATIVE = np.dtype(ml_dtypes.bfloat16)
_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class BFloat16(ZDType[type(_NATIVE), ml_dtypes.bfloat16], HasEndianness):
    """bfloat16 in Zarr v3, as `ml_dtypes.bfloat16` in numpy. Zarr v2 has no such type.

    numpy cannot swap the bytes of ml_dtypes' types, so a big-endian array is refused.
    """

    dtype_cls: ClassVar[type[np.dtype]] = type(_NATIVE)
    _zarr_v3_name: ClassVar[str] = "bfloat16"

    item_size: ClassVar[int] = 2

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype) -> Self:
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"expected {_NATIVE!r}, got {dtype!r}")
        return cls()

    def to_native_dtype(self) -> np.dtype:
        if self.endianness == "big":
            raise NotImplementedError("big-endian bfloat16 cannot be read into numpy")
        return _NATIVE

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError(f"Zarr v2 has no bfloat16, got {data!r}")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"expected {cls._zarr_v3_name!r}, got {data!r}")
        return cls()

    def to_json(self, zarr_format: int) -> str:
        if zarr_format != 3:
            raise ValueError(f"bfloat16 exists in Zarr v3 only, not v{zarr_format}")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (bool, int, float, np.number, np.bool_, ml_dtypes.bfloat16))

    def cast_scalar(self, data: object) -> ml_dtypes.bfloat16:
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} is not a number")
        return ml_dtypes.bfloat16(data)

    def default_scalar(self) -> ml_dtypes.bfloat16:
        return ml_dtypes.bfloat16(0)

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> ml_dtypes.bfloat16:
        """From a number, `NaN`, `Infinity`, `-Infinity`, or the bits as `0x7fc0`."""
        if isinstance(data, str) and data.startswith("0x") and len(data) == 6:
            return np.uint16(int(data, 16)).view(ml_dtypes.bfloat16)
        if isinstance(data, str) and data in _NAMES:
            return ml_dtypes.bfloat16(_NAMES[data])
        if isinstance(data, bool) or not isinstance(data, (int, float)):
            raise TypeError(f"{data!r} is not a fill value of bfloat16")
        return ml_dtypes.bfloat16(data)

    def to_json_scalar(self, data: object, *, zarr_format: int) -> float | str:
        value = float(self.cast_scalar(data))
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return value


# zarr-python 3.1 collects the entry points of `zarr.data_type` but loads none of them (3.2 does). It does load those
# of `zarr.buffer`, before it opens any array, so this module is named there too: loading it registers the type, and
# what the entry point gives is zarr's own buffer, under the name that it has already.
data_type_registry.register("bfloat16", BFloat16)
ZarrBuffer = Buffer
