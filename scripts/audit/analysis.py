"""Analyses the HLO text of an optimised program: loops, collectives, copies, HBM traffic, estimated cycles.

Pure functions of the text. Everything in a loop counts as often as the loop's body runs. If the entry of a program has
a loop of unknown length, such as the loop over decoding steps, one iteration of it is counted, and nothing outside of
it.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from scripts.audit.hlo import Computation, Instruction, Module, parse

LARGE_BYTES = 8 << 20

_KINDS = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")
_MOVES = frozenset({"copy", "transpose"})
_VIEWS = frozenset({"bitcast", "reshape", "get-tuple-element", "tuple", "parameter", "optimization-barrier"})
_FREE = _VIEWS | {"constant", "while", "conditional", "call", "after-all", "partition-id", "replica-id"}
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_KERNEL = "tpu_custom_call"  # Pallas: libtpu does not estimate it


@dataclass(frozen=True)
class Loop:
    """A `while`. `trips` is None if the text does not contain the number of iterations."""

    op_name: str
    trips: int | None
    runs: float  # how often the loop itself runs
    cycles: int  # estimated, for one iteration without inner loops


@dataclass(frozen=True)
class Collectives:
    """The collectives of one kind. A collective fused with computation has several instructions but counts once."""

    count: float
    received_bytes: int  # per chip, at least: (n-1)/n of a gathered array, twice that for an all-reduce


@dataclass(frozen=True)
class Move:
    """Copies and transposes of one shape and operation, with their padded bytes in HBM."""

    op_name: str
    shape: str
    count: float
    num_bytes: int  # total, read and written


@dataclass(frozen=True)
class Analysis:
    """The analysis of a program. Bytes are per chip, including the padding of layouts."""

    is_of_one_iteration: bool  # whether one iteration of a loop of unknown length is counted
    cycles: int  # estimated by the compiler, without collectives and Pallas kernels
    loops: tuple[Loop, ...]
    collectives: Mapping[str, Collectives]
    large_moves: tuple[Move, ...]
    large_float32: tuple[str, ...]  # arrays of 8 MiB and more in HBM
    remat: tuple[str, ...]  # instructions that are rematerialised to save memory
    kernels: Mapping[str, float]  # Pallas kernels
    hbm_bytes: int  # read and written


def analyse(text: str) -> Analysis:
    """Analyses the text of a program. Raises ValueError if it is not an HLO module."""
    module = parse(text)
    counts, loops = _executions(module)
    steps = [
        (instruction, computation, counts[name])
        for name, computation in module.computations.items()
        if name in counts
        for instruction in computation.instructions.values()
    ]
    collectives = _collectives(module, counts)
    return Analysis(
        is_of_one_iteration=_unknown_loop(module) is not None,
        cycles=round(sum(count * _cycles(instruction) for instruction, _, count in steps)),
        loops=tuple(loops),
        collectives=_by_kind(collectives),
        large_moves=_large_moves(module, steps),
        large_float32=tuple(sorted({shape for instruction, *_ in steps for shape in _float32(instruction)})),
        remat=tuple(sorted({instruction.name for instruction, *_ in steps if ".remat" in instruction.name})),
        kernels=_kernels(steps),
        hbm_bytes=round(
            sum(count * _hbm_bytes(module, instruction, computation) for instruction, computation, count in steps)
            + sum(collective.count * collective.hbm_bytes for collective in collectives)
        ),
    )


def _unknown_loop(module: Module) -> list[Computation] | None:
    """Condition and body of the entry's loop of unknown length; None if there is no such loop, or more than one."""
    loops = [instruction for instruction in module.entry.instructions.values() if instruction.opcode == "while"]
    unknown = [loop for loop in loops if trip_count(module, loop, module.entry) is None]
    return (
        [module.computations[unknown[0].called(name)] for name in ("condition", "body")] if len(unknown) == 1 else None
    )


def _executions(module: Module) -> tuple[dict[str, float], list[Loop]]:
    """How often each computation that is not fused into an instruction runs, and the loops. If the entry has a loop of
    unknown length, for one iteration of it."""
    counts: dict[str, float] = defaultdict(float)
    loops: list[Loop] = []

    def visit(computation: Computation, count: float) -> None:
        counts[computation.name] += count
        for instruction in computation.instructions.values():
            if instruction.opcode == "while":
                trips = trip_count(module, instruction, computation)
                body = module.computations[instruction.called("body")]
                cycles = sum(map(_cycles, body.instructions.values()))
                loops.append(Loop(instruction.op_name, trips, count, cycles))
                for name in ("body", "condition"):
                    visit(module.computations[instruction.called(name)], count * (1 if trips is None else trips))
            elif instruction.opcode == "conditional":
                branches = _branches(instruction)
                for name in branches:  # the text does not contain how often each is taken
                    visit(module.computations[name], count / len(branches))
            elif instruction.opcode == "call":
                visit(module.computations[instruction.called("to_apply")], count)

    for computation in _unknown_loop(module) or [module.entry]:
        visit(computation, 1)
    return counts, loops


def _branches(conditional: Instruction) -> list[str]:
    several = conditional.attribute(r"branch_computations=\{([^}]*)\}")
    if several is not None:
        return [name.strip().lstrip("%") for name in several.split(",")]
    return [conditional.called("true_computation"), conditional.called("false_computation")]


def trip_count(module: Module, loop: Instruction, computation: Computation) -> int | None:
    """How often the body of a `while` runs, if it counts from one constant to another; else None."""
    condition, body = (module.computations[loop.called(name)] for name in ("condition", "body"))
    compare = condition.root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter, limit = (_source(condition, name) for name in compare.operands)
    index = _tuple_index(counter)
    if index is None:
        return None
    initial = computation.instructions[loop.operands[0]]
    start = _constant(_source(computation, initial.operands[index])) if initial.opcode == "tuple" else None
    end, step = _constant(limit), _step(body, index)
    return None if None in (start, end, step) else max(0, math.ceil((end - start) / step))


def _source(computation: Computation, name: str) -> Instruction:
    """The instruction behind copies and bitcasts."""
    instruction = computation.instructions[name]
    while instruction.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _tuple_index(instruction: Instruction) -> int | None:
    index = instruction.attribute(r"\bindex=(\d+)") if instruction.opcode == "get-tuple-element" else None
    return None if index is None else int(index)


def _constant(instruction: Instruction) -> int | None:
    is_integer = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.argument)
    return int(instruction.argument) if is_integer else None


def _step(body: Computation, index: int) -> int | None:
    """The positive constant that one iteration adds to the counter; None if there is no such constant."""
    if body.root.opcode != "tuple":
        return None
    add = _source(body, body.root.operands[index])
    if add.opcode != "add":
        return None
    terms = [_source(body, name) for name in add.operands]
    steps = [_constant(term) for term in terms if _tuple_index(term) != index]
    return steps[0] if len(steps) == 1 and steps[0] is not None and steps[0] > 0 else None


def _cycles(instruction: Instruction) -> int:
    return int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)


@dataclass(frozen=True)
class _Collective:
    kind: str
    count: float
    received_bytes: int
    hbm_bytes: int


def _collectives(module: Module, counts: Mapping[str, float]) -> list[_Collective]:
    """The collectives. The instructions of one that is fused with computation have a chain's number in common."""
    collectives: dict[str, _Collective] = {}
    for computation, count in _with_fused(module, counts):
        for instruction in computation.instructions.values():
            kind = instruction.opcode.removesuffix("-start")
            if not _is_collective(instruction):
                continue
            chain = instruction.attribute(r'chain_id="(\d+)"') or instruction.name
            operands = [computation.instructions[name] for name in instruction.operands]
            results = instruction.arrays
            if instruction.opcode.endswith("-start") and len(results) > len(operands):  # starts with the operands
                results = results[len(operands) : 2 * len(operands)]
            sizes = sum(operand.data_bytes for operand in operands), sum(array.data_bytes for array in results)
            received = _received(kind, *sizes, group_size(instruction.attributes))
            hbm = sum(operand.hbm_bytes for operand in operands)
            hbm += sum(array.num_bytes for array in results if array.is_in_hbm)
            known = collectives.get(chain)
            if known is None or known.count < count:
                collectives[chain] = _Collective(kind, count, received, hbm)
    return list(collectives.values())


def _is_collective(instruction: Instruction) -> bool:
    return instruction.opcode.removesuffix("-start") in _KINDS


def _with_fused(module: Module, counts: Mapping[str, float]) -> Iterator[tuple[Computation, float]]:
    """Every computation that runs, including fused ones."""

    def visit(computation: Computation, count: float) -> Iterator[tuple[Computation, float]]:
        yield computation, count
        for instruction in computation.instructions.values():
            called = instruction.called("calls")
            if called is not None:
                yield from visit(module.computations[called], count)

    for name, count in counts.items():
        yield from visit(module.computations[name], count)


def _received(kind: str, operand_bytes: int, result_bytes: int, group: int) -> int:
    share = (group - 1) / group
    match kind:
        case "all-gather":
            return round(result_bytes * share)
        case "all-reduce":
            return round(2 * operand_bytes * share)
        case "reduce-scatter" | "all-to-all":
            return round(operand_bytes * share)
        case _:
            return operand_bytes


def group_size(attributes: str) -> int:
    """The number of devices in a group of a collective. Raises ValueError for an unknown notation."""
    if lists := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return len(lists[1].split(","))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\S+)? \{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[name]) for name, part in axes)
    if "source_target_pairs=" in attributes:
        return 2
    raise ValueError(f"unknown notation of a collective's groups: {attributes[:300]}")


def _by_kind(collectives: list[_Collective]) -> dict[str, Collectives]:
    counts: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for collective in collectives:
        counts[collective.kind] += collective.count
        received[collective.kind] += collective.count * collective.received_bytes
    return {kind: Collectives(counts[kind], round(received[kind])) for kind in sorted(counts)}


_Steps = list[tuple[Instruction, Computation, float]]


def _large_moves(module: Module, steps: _Steps) -> tuple[Move, ...]:
    """Large copies and transposes that read or write HBM, including fusions that only copy or transpose."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for instruction, computation, count in steps:
        if not _is_move(module, instruction) or instruction.num_bytes < LARGE_BYTES:
            continue
        num_bytes = _hbm_bytes(module, instruction, computation)
        if num_bytes:
            array = instruction.arrays[0]
            shape = f"{array.dtype}[{','.join(map(str, array.shape))}]"
            key = re.sub(r"\d+_to_\d+", "N", instruction.op_name), shape
            counts[key] += count
            sizes[key] += count * num_bytes
    moves = [Move(name, shape, count, round(sizes[name, shape])) for (name, shape), count in counts.items()]
    return tuple(sorted(moves, key=lambda move: (-move.num_bytes, move.op_name, move.shape)))


def _is_move(module: Module, instruction: Instruction) -> bool:
    called = instruction.called("calls")
    if called is None:
        return instruction.opcode in _MOVES
    opcodes = {inner.opcode for inner in module.computations[called].instructions.values()}
    return bool(opcodes & _MOVES) and opcodes <= _MOVES | _VIEWS


def _float32(instruction: Instruction) -> Iterator[str]:
    """The large float32 arrays that an instruction writes to HBM."""
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return
    for array in instruction.arrays:
        if array.dtype == "f32" and array.is_in_hbm and array.num_bytes >= LARGE_BYTES:
            yield f"f32[{','.join(map(str, array.shape))}]"


def _kernels(steps: _Steps) -> dict[str, float]:
    kernels: Counter[str] = Counter()
    for instruction, _, count in steps:
        if instruction.attribute(r'custom_call_target="(\w+)"') == _KERNEL:
            kernels[re.sub(r"\.\d+$", "", instruction.name)] += count
    return dict(sorted(kernels.items()))


def _hbm_bytes(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Bytes that an instruction reads from and writes to HBM. A slice reads only its result, an update writes only what
    it changes, and a Pallas kernel reads each operand once. Collectives are counted separately."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done") or _is_collective(instruction):
        return 0
    target = instruction.attribute(r'custom_call_target="(\w+)"')
    if target is not None and target != _KERNEL:
        return 0  # bookkeeping, such as ConcatBitcast
    operands = [computation.instructions[name] for name in instruction.operands]
    called = instruction.called("calls")
    if called is not None:
        fused = module.computations[called]
        reads = sum(
            _read(module, fused, parameter, operand.hbm_bytes)
            for operand, parameter in zip(operands, fused.parameters, strict=True)
            if operand.hbm_bytes
        )
        return reads + _written(module, fused)
    if opcode in _SLICES:
        return (instruction.num_bytes if operands[0].hbm_bytes else 0) + instruction.hbm_bytes
    if opcode.endswith("-start"):  # a copy or slice; its tuple starts with source and result, in either order
        taken = min(array.num_bytes for array in instruction.arrays[:2])
        return taken * sum(array.is_in_hbm for array in instruction.arrays[:2])
    if opcode in ("dynamic-update-slice", "scatter"):
        update = operands[1 if opcode == "dynamic-update-slice" else -1]
        return update.hbm_bytes + (update.num_bytes if instruction.hbm_bytes else 0)
    return sum(operand.hbm_bytes for operand in operands) + instruction.hbm_bytes


def _read(module: Module, fused: Computation, parameter: Instruction, whole: int) -> int:
    """Bytes that a fusion reads of one of its operands, which has `whole` bytes."""
    num_bytes = 0
    for user in fused.users.get(parameter.name, ()):
        index = user.operands.index(parameter.name)
        called = user.called("calls")
        inner = None if called is None else module.computations[called]
        if user.opcode == "bitcast" or (inner and _viewed(inner) is inner.parameters[index]):
            num_bytes += _read(module, fused, user, whole)
        elif inner:
            num_bytes += _read(module, inner, inner.parameters[index], whole)
        elif user.opcode in _SLICES and index == 0:
            num_bytes += user.num_bytes
        elif not _passes_on(user) and not (user.opcode in ("dynamic-update-slice", "scatter") and index == 0):
            return whole
    return min(num_bytes, whole)


def _viewed(computation: Computation) -> Instruction:
    """The instruction whose result a computation returns, before bitcasts."""
    instruction = computation.root
    while instruction.opcode == "bitcast":
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _passes_on(instruction: Instruction) -> bool:
    """Whether an instruction in a fusion only forwards its operands, or is part of a collective."""
    target = instruction.attribute(r'custom_call_target="(\w+)"') or ""
    return instruction.opcode == "tuple" or _is_collective(instruction) or target.startswith("AsyncCollective")


def _written(module: Module, fused: Computation) -> int:
    """Bytes that a fusion writes to HBM."""
    root = fused.root
    results = [fused.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0
    for result in results:
        source = result
        while source.opcode == "bitcast":
            source = fused.instructions[source.operands[0]]
        called = source.called("calls")
        if not result.hbm_bytes or source.opcode == "parameter" or _passes_on(source):
            continue
        if source.opcode in ("dynamic-update-slice", "scatter"):
            update = source.operands[1 if source.opcode == "dynamic-update-slice" else -1]
            total += fused.instructions[update].num_bytes
        elif called is not None:
            total += _written(module, module.computations[called])
        else:
            total += result.hbm_bytes
    return total
