"""Analyses the HLO text of an optimised program: loops, collectives, copies, HBM traffic, estimated cycles.

Pure functions of the text, for TPUs and GPUs. Everything in a loop counts as often as the loop's body runs, and once if
that is not known, as of rounds in which tokens are exchanged. Of the loop over decoding steps one iteration is counted,
and nothing outside of it.
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from scripts.audit.hlo import Array, Computation, Instruction, Module, parse
from scripts.audit.instructions import KERNELS, MOVES, PALLAS, SLICES, hbm_bytes, is_collective, is_launched

LARGE_BYTES = 8 << 20  # of a copy or transpose
LARGE_FLOAT32_BYTES = {"tpu": 8 << 20, "gpu": 64 << 20}
_NO_ESTIMATE = f'"estimated_cycles":"{(1 << 63) - 1}"'


@dataclass(frozen=True)
class Loop:
    """A `while`. `trips` is None if the text does not contain the number of iterations."""

    op_name: str
    trips: int | None
    runs: float  # how often the loop itself runs
    cycles: int  # estimated, for one iteration without inner loops
    body: str  # the name of its computation


@dataclass(frozen=True)
class Collectives:
    """The collectives of one kind. A collective fused with computation has several instructions but counts once."""

    count: float
    received_bytes: int  # per device, at least: (n-1)/n of a gathered array, twice that for an all-reduce
    overlapped: float  # those with computation between start and end. Not known of fused ones


@dataclass(frozen=True)
class Move:
    """Copies and transposes of one shape and operation, with their padded bytes in HBM."""

    op_name: str
    shape: str
    count: float
    num_bytes: int  # total, read and written


@dataclass(frozen=True)
class Analysis:
    """The analysis of a program. Bytes are per device, including the padding of layouts."""

    is_of_one_iteration: bool  # whether only one iteration of the loop over decoding steps is counted
    cycles: int  # estimated by the compiler, without collectives and Pallas kernels
    unestimated: float  # instructions that the compiler has no estimate for
    loops: tuple[Loop, ...]
    collectives: Mapping[str, Collectives]
    launches: float  # operations that a GPU starts
    large_moves: tuple[Move, ...]
    large_float32: tuple[str, ...]  # arrays of LARGE_FLOAT32_BYTES and more in HBM
    squares: tuple[str, ...]  # arrays [.., .., T, T] in HBM
    remat: tuple[str, ...]  # instructions that are rematerialised to save memory
    kernels: Mapping[str, float]  # of Pallas and of libraries
    hbm_bytes: int  # read and written


def analyse(text: str, platform: str = "tpu", length: int = 0, is_decoding: bool = False, inner: int = 1) -> Analysis:
    """Analyses the text of a program for rows of `length` tokens. `is_decoding` counts one iteration of its loop of
    unknown length, in which other such loops have `inner` iterations. Raises ValueError if it is not an HLO module.

    On a GPU, a slice of the layers' stacked weights that is not fused with what reads it counts as a copy.
    """
    module = parse(text)
    decoding_step = _unknown_loop(module) if is_decoding else None
    counts, loops = _executions(module, decoding_step or [module.entry], inner)
    trips = {loop.body: loop.trips or inner for loop in loops}
    steps = [
        (instruction, computation, counts[name])
        for name, computation in module.computations.items()
        if name in counts
        for instruction in computation.instructions.values()
    ]
    collectives = _collectives(module, counts)
    return Analysis(
        is_of_one_iteration=decoding_step is not None,
        cycles=round(sum(count * _cycles(instruction) for instruction, _, count in steps)),
        unestimated=sum(count for instruction, _, count in steps if _NO_ESTIMATE in instruction.attributes),
        loops=tuple(loops),
        collectives=_by_kind(collectives),
        launches=sum(_launches(module, computation) for computation in decoding_step or [module.entry]),
        large_moves=_large_moves(module, steps, MOVES | SLICES if platform == "gpu" else MOVES),
        large_float32=_shapes(
            steps, lambda array: array.dtype == "f32" and array.num_bytes >= LARGE_FLOAT32_BYTES[platform]
        ),
        squares=_shapes(steps, lambda array: len(array.shape) > 3 and array.shape[-2:] == (length, length)),
        remat=tuple(sorted({instruction.name for instruction, *_ in steps if ".remat" in instruction.name})),
        kernels=_kernels(steps),
        hbm_bytes=round(
            sum(
                count * hbm_bytes(module, instruction, computation, trips.get(computation.name, 1))
                for instruction, computation, count in steps
            )
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


def _executions(module: Module, run: list[Computation], unknown: int) -> tuple[dict[str, float], list[Loop]]:
    """How often each computation that is not fused into an instruction runs, and the loops, if those of `run` run
    once, and loops of unknown length `unknown` times."""
    counts: dict[str, float] = defaultdict(float)
    loops: list[Loop] = []

    def visit(computation: Computation, count: float) -> None:
        counts[computation.name] += count
        for instruction in computation.instructions.values():
            inner = _inner(module, instruction, computation)
            if instruction.opcode == "while":
                trips, body = trip_count(module, instruction, computation), inner[0][0]
                cycles = sum(map(_cycles, body.instructions.values()))
                loops.append(Loop(instruction.op_name, trips, count, cycles, body.name))
                inner = [(called, unknown if trips is None else times) for called, times in inner]
            for called, times in inner:
                visit(called, count * times)

    for computation in run:
        visit(computation, 1)
    return counts, loops


def _inner(module: Module, instruction: Instruction, computation: Computation) -> list[tuple[Computation, float]]:
    """The computations that an instruction runs, such as a loop's body and condition, and how often each."""
    match instruction.opcode:
        case "while":
            trips = trip_count(module, instruction, computation)
            names, times = [instruction.called("body"), instruction.called("condition")], 1 if trips is None else trips
        case "conditional":  # the text does not contain how often each is taken
            names = _branches(instruction)
            times = 1 / len(names)
        case "call" | "call-start":  # the second for a TPU's sparse cores, which copy meanwhile
            names, times = [instruction.called("to_apply")], 1
        case _:
            return []
    return [(module.computations[name], times) for name in names]


def _launches(module: Module, computation: Computation) -> float:
    """The operations that one run of a computation starts. A GPU computes the conditions of loops of unknown length."""
    total = 0.0
    for instruction in computation.instructions.values():
        is_counted = instruction.opcode == "while" and trip_count(module, instruction, computation) is not None
        inner = _inner(module, instruction, computation)[: 1 if is_counted else None]
        total += is_launched(instruction) + sum(times * _launches(module, called) for called, times in inner)
    return total


def _branches(conditional: Instruction) -> list[str]:
    several = conditional.attribute(r"branch_computations=\{([^}]*)\}")
    if several is not None:
        return [name.strip().lstrip("%") for name in several.split(",")]
    return [conditional.called("true_computation"), conditional.called("false_computation")]


def trip_count(module: Module, loop: Instruction, computation: Computation) -> int | None:
    """How often the body of a `while` runs, if it counts from one constant to another, or the compiler says it; else
    None."""
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    return _counted_trips(module, loop, computation) if known is None else int(known)


def _counted_trips(module: Module, loop: Instruction, computation: Computation) -> int | None:
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
    return int(instruction.attribute(r"\bindex=(\d+)")) if instruction.opcode == "get-tuple-element" else None


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
    """0 if there is no estimate. The compiler writes the largest int64 where it has no model: for work that a sparse
    core does (`*_offload_custom_fusion`), and for copies on TPU7x."""
    if _NO_ESTIMATE in instruction.attributes:
        return 0
    return int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)


@dataclass(frozen=True)
class _Collective:
    kind: str
    count: float
    received_bytes: int
    hbm_bytes: int
    is_overlapped: bool


def _collectives(module: Module, counts: Mapping[str, float]) -> list[_Collective]:
    """The collectives. The instructions of one that is fused with computation have a chain's number in common."""
    collectives: dict[str, _Collective] = {}
    for computation, count in _with_fused(module, counts):
        for instruction in computation.instructions.values():
            kind = instruction.opcode.removesuffix("-start")
            if not is_collective(instruction):
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
                collectives[chain] = _Collective(kind, count, received, hbm, _is_overlapped(instruction, computation))
    return list(collectives.values())


def _is_overlapped(start: Instruction, computation: Computation) -> bool:
    """Whether something runs between the start and the end of a collective."""
    if not start.opcode.endswith("-start") or '"is_sync":true' in start.attributes:
        return False
    scheduled = iter(computation.instructions.values())
    after = itertools.dropwhile(lambda instruction: instruction is not start, scheduled)
    until = itertools.takewhile(lambda other: other is start or start.name not in other.operands, after)
    return any(is_launched(other) and not is_collective(other) for other in until)


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
    result = {}
    for kind in sorted({collective.kind for collective in collectives}):
        same = [collective for collective in collectives if collective.kind == kind]
        received = sum(collective.count * collective.received_bytes for collective in same)
        overlapped = sum(collective.count for collective in same if collective.is_overlapped)
        result[kind] = Collectives(sum(collective.count for collective in same), round(received), overlapped)
    return result


_Steps = list[tuple[Instruction, Computation, float]]


def _large_moves(module: Module, steps: _Steps, moves: frozenset[str]) -> tuple[Move, ...]:
    """Large copies and transposes (`moves`) that read or write HBM, including fusions of nothing else."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for instruction, computation, count in steps:
        if instruction.num_bytes < LARGE_BYTES or not _is_move(module, instruction, moves):
            continue
        num_bytes = hbm_bytes(module, instruction, computation)
        if num_bytes:
            array = instruction.arrays[0]
            key = re.sub(r"\d+_to_\d+", "N", instruction.op_name), array.described
            counts[key] += count
            sizes[key] += count * num_bytes
    large = [Move(name, shape, count, round(sizes[name, shape])) for (name, shape), count in counts.items()]
    return tuple(sorted(large, key=lambda move: (-move.num_bytes, move.op_name, move.shape)))


def _is_move(module: Module, instruction: Instruction, moves: frozenset[str]) -> bool:
    """Whether an instruction, or a fusion from its first parameter on, only copies, transposes or slices."""
    called = instruction.called("calls")
    if called is None:
        return instruction.opcode in moves
    fused = module.computations[called]
    step, opcodes = fused.root, set()
    while step.opcode in moves | {"bitcast", "reshape"}:
        opcodes.add(step.opcode)
        step = fused.instructions[step.operands[0]]
    return step.opcode == "parameter" and bool(opcodes & moves)


def _shapes(steps: _Steps, is_wanted: Callable[[Array], bool]) -> tuple[str, ...]:
    """The shapes of the wanted arrays that instructions write to HBM."""
    arrays = (array for instruction, *_ in steps if is_launched(instruction) for array in instruction.arrays)
    return tuple(sorted({array.described for array in arrays if array.is_in_hbm and is_wanted(array)}))


def _kernels(steps: _Steps) -> dict[str, float]:
    """Kernels of Pallas by their own name, those of libraries by the library's."""
    kernels: Counter[str] = Counter()
    for instruction, _, count in steps:
        target = instruction.target
        if target.startswith(KERNELS):
            kernels[re.sub(r"\.\d+$", "", instruction.name) if target.startswith(PALLAS) else target] += count
    return dict(sorted(kernels.items()))
