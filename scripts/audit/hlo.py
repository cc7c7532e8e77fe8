"""Parses the text of an optimised HLO module into computations, instructions and arrays, without interpreting them."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

_HEADER = re.compile(r"^(ENTRY )?%(\S+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_BITS = re.compile(r"[a-z]+?(\d+)")


@dataclass(frozen=True)
class Array:
    """The type and layout of an array. It is in HBM unless the layout names a different memory, such as S(1), VMEM."""

    dtype: str
    shape: tuple[int, ...]
    minor_to_major: tuple[int, ...]
    tiling: str  # including the memory, e.g. T(8,128)(2,1)S(1)

    @property
    def described(self) -> str:
        """For example bf16[4,2048]."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def is_in_hbm(self) -> bool:
        return "S(" not in self.tiling

    @property
    def num_bytes(self) -> int:
        """The bytes including the padding of the first tile."""
        physical = [self.shape[axis] for axis in reversed(self.minor_to_major)]
        tile = re.match(r"T\(([\d,]+)\)", self.tiling)
        sizes = [int(size) for size in tile[1].split(",")] if tile and physical else []
        for axis, size in zip(range(-len(sizes), 0), sizes, strict=True):
            if -axis <= len(physical):
                physical[axis] = -(-physical[axis] // size) * size
        return math.prod(physical) * _bits(self.dtype) // 8

    @property
    def data_bytes(self) -> int:
        """The bytes without padding."""
        return math.prod(self.shape) * _bits(self.dtype) // 8


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    match = _BITS.match(dtype)
    return int(match[1]) if match else 0  # tokens have no size


@dataclass(frozen=True)
class Instruction:
    """An instruction. `arrays` are the arrays of its result; tuples are flattened."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    argument: str  # the text between the parentheses
    attributes: str  # the text after them
    is_root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(self.argument))

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression in the attributes."""
        match = re.search(pattern, self.attributes)
        return match and match[1]

    def called(self, attribute: str) -> str | None:
        """The computation that an attribute such as `body` names."""
        return self.attribute(rf"\b{attribute}=%([\w.\-]+)")

    @property
    def op_name(self) -> str:
        """The operation in the traced program that it comes from."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    @property
    def target(self) -> str:
        """What a custom call calls."""
        return self.attribute(r'custom_call_target="([^"]+)"') or ""

    @property
    def num_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays)

    @property
    def data_bytes(self) -> int:
        return sum(array.data_bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays if array.is_in_hbm)


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order in which they run."""

    name: str
    instructions: Mapping[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions.values() if instruction.is_root)

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        parameters = [instruction for instruction in self.instructions.values() if instruction.opcode == "parameter"]
        return tuple(sorted(parameters, key=lambda parameter: int(parameter.argument)))

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Instruction name -> the instructions that use its result."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in dict.fromkeys(instruction.operands):
                users.setdefault(name, []).append(instruction)
        return {name: tuple(instructions) for name, instructions in users.items()}


@dataclass(frozen=True)
class Module:
    """A program."""

    entry: Computation
    computations: Mapping[str, Computation]


def parse(text: str) -> Module:
    """Parses a module. Raises ValueError for a text without an entry computation."""
    computations: dict[str, Computation] = {}
    entry = None
    for is_entry, name, lines in _blocks(text):
        parsed = (_instruction(line) for line in lines)
        computations[name] = Computation(name, {instruction.name: instruction for instruction in parsed})
        entry = computations[name] if is_entry else entry
    if entry is None:
        raise ValueError("the text has no line `ENTRY %name (...) -> ... {`: expected an HLO module")
    return Module(entry, computations)


def _blocks(text: str) -> Iterator[tuple[bool, str, list[str]]]:
    """For each computation: whether it is the entry, its name, and its instructions, one line each."""
    header, lines = None, []
    for line in text.splitlines():
        if header is None:
            header, lines = _HEADER.match(line), []
        elif line == "}" or line.startswith("}, "):  # such as `}, execution_thread="sparsecore"`
            yield bool(header[1]), header[2], lines
            header = None
        elif _INSTRUCTION.match(line):
            lines.append(line)
        else:
            lines[-1] += line  # an attribute with several lines, such as a kernel's metadata


def _instruction(line: str) -> Instruction:
    match = _INSTRUCTION.match(line)
    shape_end = _closing(match[3], 0) + 1 if match[3].startswith("(") else match[3].index(" ")
    shape, rest = match[3][:shape_end], match[3][shape_end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    return Instruction(
        name=match[2],
        opcode=rest[:opening],
        arrays=tuple(_array(*parts) for parts in _ARRAY.findall(shape)),
        argument=rest[opening + 1 : closing],
        attributes=rest[closing + 1 :],
        is_root=bool(match[1]),
    )


def _closing(text: str, opening: int) -> int:
    """The index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"a parenthesis is not closed: {text[:200]}")


def _array(dtype: str, shape: str, minor_to_major: str, tiling: str) -> Array:
    sizes = tuple(int(size) for size in shape.split(",") if size)
    order = tuple(int(axis) for axis in minor_to_major.split(",") if axis) or tuple(reversed(range(len(sizes))))
    return Array(dtype, sizes, order, tiling)
