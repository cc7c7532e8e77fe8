"""The data types `bfloat16` and `float8_e4m3fn` for zarr-python (3.1 and later), as TensorStore writes them.

zarr-python finds the classes through entry points once this package is installed:

    [project.entry-points."zarr.data_type"]
    bfloat16 = "pipeline.store.format.zarr_dtype:BFloat16"  # and so on
    [project.entry-points."zarr.buffer"]
    bfloat16 = "pipeline.store.format.zarr_dtype:ZarrBuffer"

bfloat16 is registered at https://github.com/zarr-developers/zarr-extensions/tree/main/data-types/bfloat16;
float8_e4m3fn has the name of ml_dtypes.
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

_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class _MlDtype(ZDType):
    """A Zarr v3 data type for the ml_dtypes type of the same name. Zarr v2 has no such types."""

    native: ClassVar[np.dtype]

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype) -> Self:
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"expected {cls.native!r}, got {dtype!r}")
        return cls()

    def to_native_dtype(self) -> np.dtype:
        return self.native

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError(f"Zarr v2 has no {cls._zarr_v3_name}, got {data!r}")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"expected {cls._zarr_v3_name!r}, got {data!r}")
        return cls()

    def to_json(self, zarr_format: int) -> str:
        if zarr_format != 3:
            raise ValueError(f"{self._zarr_v3_name} exists in Zarr v3 only, not v{zarr_format}")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (bool, int, float, np.number, np.bool_, self.native.type))

    def cast_scalar(self, data: object) -> np.generic:
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} is not a number")
        return self.native.type(data)

    def default_scalar(self) -> np.generic:
        return self.native.type(0)

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> np.generic:
        """A scalar from a JSON number, `NaN`, `Infinity`, `-Infinity`, or the bits in hex, as in `0x7fc0`."""
        if isinstance(data, str) and data.startswith("0x") and len(data) == 2 + 2 * self.native.itemsize:
            return np.array(int(data, 16), f"u{self.native.itemsize}").view(self.native)[()]
        if isinstance(data, str) and data in _NAMES:
            return self.native.type(_NAMES[data])
        if isinstance(data, bool) or not isinstance(data, (int, float)):
            raise TypeError(f"{data!r} is not a fill value of {self._zarr_v3_name}")
        return self.native.type(data)

    def to_json_scalar(self, data: object, *, zarr_format: int) -> float | str:
        value = float(self.cast_scalar(data))
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return value


@dataclass(frozen=True, kw_only=True)
class BFloat16(_MlDtype, HasEndianness):
    """numpy cannot swap the bytes of ml_dtypes' types, so a big-endian array is refused."""

    native = np.dtype(ml_dtypes.bfloat16)
    dtype_cls: ClassVar[type[np.dtype]] = type(native)
    _zarr_v3_name: ClassVar[str] = "bfloat16"

    item_size: ClassVar[int] = 2

    def to_native_dtype(self) -> np.dtype:
        if self.endianness == "big":
            raise NotImplementedError("big-endian bfloat16 cannot be read into numpy")
        return self.native


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FN(_MlDtype):
    native = np.dtype(ml_dtypes.float8_e4m3fn)
    dtype_cls: ClassVar[type[np.dtype]] = type(native)
    _zarr_v3_name: ClassVar[str] = "float8_e4m3fn"

    item_size: ClassVar[int] = 1


# zarr-python 3.1 collects the entry points of `zarr.data_type` but does not load them (3.2 does). It does load those
# of `zarr.buffer` before it opens any array, so this module is listed there too: importing it registers the types.
# That entry point itself is zarr's own buffer, registered under its usual name.
for _type in (BFloat16, Float8E4M3FN):
    data_type_registry.register(_type._zarr_v3_name, _type)
ZarrBuffer = Buffer
