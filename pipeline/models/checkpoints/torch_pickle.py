"""The pickle stream in a file of torch.save: parsed, never executed.

A pickle is a program for a stack machine that can call any function. Here `pickletools.genops`, which calls nothing,
splits it into instructions. Only those that a state dict needs are followed, and only the functions in `_GLOBALS` may
be named: they are not called, but replaced by what is written below.
"""

import pickletools
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from pipeline.core.messages import shown

_PROTOCOL = 2  # the default of torch.save
_MAX_NUMBER = 2**48  # limits the product of sizes
_MAX_AXES = 32
_DTYPES: Mapping[str, np.dtype] = {
    f"torch {name}Storage": np.dtype(dtype)
    for name, dtype in (
        *(("Float", np.float32), ("Half", np.float16), ("BFloat16", ml_dtypes.bfloat16), ("Double", np.float64)),
        *(("Long", np.int64), ("Int", np.int32), ("Short", np.int16), ("Char", np.int8), ("Byte", np.uint8)),
        ("Bool", np.bool_),
    )
}
_DICT, _TENSOR = "collections OrderedDict", "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_GLOBALS = {_DICT, _TENSOR, _PARAMETER, *_DTYPES}
_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class NotAStateDict(ValueError):
    """The stream has this in place of what a state dict has."""


@dataclass(frozen=True)
class _Global:
    name: str  # module and function or class


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: np.dtype
    size: int


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's elements are. All numbers count elements, and are not negative; whether they fit each other and
    the file has not been checked."""

    key: str  # of a storage, which the file's member data/key contains
    dtype: np.dtype
    storage_size: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_KINDS = {
    **{kind: f"a {kind.__name__}" for kind in (dict, list, tuple, str)},
    **{int: "a whole number", float: "a number", bool: "a bool", type(None): "None", object: "a mark"},
    **{StoredTensor: "a tensor", _Storage: "a storage", _Global: "a function or class"},
}


def parse_pickle(stream: bytes) -> object:
    """The saved object: dicts (also for OrderedDict), lists, tuples, StoredTensors and plain values, in any nesting,
    even in circles. Raises NotAStateDict for anything else, and another ValueError, LookupError or TypeError if the
    stream is damaged."""
    stack: list = []
    memo: dict[int, object] = {}

    def pop_marked() -> list:
        items = []
        while (item := stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    for opcode, argument, _ in pickletools.genops(stream):
        match opcode.name:
            case "PROTO":
                if argument != _PROTOCOL:
                    raise NotAStateDict(f"pickle protocol {argument}, which torch.save uses only if it is asked to")
            case "MARK":
                stack.append(_MARK)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "BINUNICODE" | "BINFLOAT" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_TUPLE":
                stack.append(_CONSTANTS[opcode.name])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "TUPLE":
                stack.append(tuple(pop_marked()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = [stack.pop() for _ in range(int(opcode.name[-1]))]
                stack.append(tuple(items[::-1]))
            case "APPEND" | "APPENDS":
                items = pop_marked() if opcode.name == "APPENDS" else [stack.pop()]
                _require(stack[-1], list).extend(items)
            case "SETITEM" | "SETITEMS":
                items = pop_marked() if opcode.name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                _set_items(_require(stack[-1], dict), items)
            case "GLOBAL":
                stack.append(_global(argument))
            case "BINPERSID":
                stack.append(_storage(*_require(stack.pop(), tuple)))
            case "REDUCE":
                arguments = _require(stack.pop(), tuple)
                stack.append(_result(_require(stack.pop(), _Global).name, arguments))
            case "BUILD":  # attributes of a state dict, such as the versions of its modules
                stack.pop()
                _require(stack[-1], dict)
            case "STOP":
                [result] = stack
            case name:
                raise NotAStateDict(f"the pickle instruction {name}{'' if argument is None else f' {shown(argument)}'}")
    return result


def kind_of(value: object) -> str:
    """What a value is, for messages."""
    return _KINDS.get(type(value), f"a value of type {type(value).__name__}")


def _require(value: object, kind: type) -> object:
    if type(value) is not kind:
        raise NotAStateDict(f"{kind_of(value)} in place of {_KINDS[kind]}")
    return value


def _set_items(target: dict, items: list) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, int):  # the hash of nested tuples may take forever
            raise NotAStateDict(f"{kind_of(key)} as the key of a dict")
        target[key] = value


def _global(name: str) -> _Global:
    if name not in _GLOBALS:
        raise NotAStateDict(f"the function or class {name.replace(' ', '.'):.200}")
    return _Global(name)


def _storage(kind: object, dtype: object, key: object, location: object, size: object) -> _Storage:
    """The storage that a persistent id stands for. The location is the device that it was on."""
    name = _require(dtype, _Global).name
    if kind != "storage" or name not in _DTYPES:
        raise NotAStateDict(f"the persistent id of {name}")
    return _Storage(_require(key, str), _DTYPES[name], _number(size))


def _result(function: str, arguments: tuple) -> object:
    """What a function of `_GLOBALS` returns."""
    if function == _DICT and not arguments:
        return {}
    if function == _PARAMETER and arguments:
        return _require(arguments[0], StoredTensor)
    if function == _TENSOR and len(arguments) == 6:  # the last two are about gradients; a seventh may change the values
        storage, offset, shape, strides, *_ = arguments
        shape, strides = (tuple(map(_number, _require(numbers, tuple))) for numbers in (shape, strides))
        if len(shape) != len(strides) or len(shape) > _MAX_AXES:
            raise NotAStateDict(f"a tensor with {len(shape)} sizes and {len(strides)} strides")
        storage = _require(storage, _Storage)
        return StoredTensor(storage.key, storage.dtype, storage.size, _number(offset), shape, strides)
    raise NotAStateDict(f"{function.replace(' ', '.')} with {len(arguments)} arguments")


def _number(value: object) -> int:
    """A size, offset or stride."""
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise NotAStateDict(f"{shown(value) if type(value) is int else kind_of(value)} as the size of a tensor")
    return value
