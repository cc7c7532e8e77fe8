"""What the instructions of a program do: which run, which are collectives or kernels, and what they read and write."""

from scripts.audit.hlo import Computation, Instruction, Module

_KINDS = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")
MOVES = frozenset({"copy", "transpose"})
_VIEWS = frozenset({"bitcast", "reshape", "get-tuple-element", "tuple", "parameter", "optimization-barrier"})
_FREE = _VIEWS | {"constant", "while", "conditional", "call", "call-start", "after-all", "partition-id", "replica-id"}
SLICES = frozenset({"dynamic-slice", "slice", "gather"})
PALLAS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu")  # libtpu does not estimate it
KERNELS = (*PALLAS, "__cu")  # cuDNN, cuBLAS. Other custom calls are bookkeeping


def is_launched(instruction: Instruction) -> bool:
    is_free = instruction.opcode in _FREE or instruction.target == "AllocateBuffer"
    return not is_free and not instruction.opcode.endswith("-done")


def is_collective(instruction: Instruction) -> bool:
    return instruction.opcode.removesuffix("-start") in _KINDS


def hbm_bytes(module: Module, instruction: Instruction, computation: Computation, trips: int = 1) -> int:
    """Bytes that an instruction reads from and writes to HBM. A slice reads only its result, an update writes only what
    it changes, and a kernel reads each operand once: of what a loop only carries, such as stacked weights, once in all
    `trips` of the loop whose body `computation` is. Collectives are counted separately."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done") or is_collective(instruction):
        return 0
    if opcode == "custom-call" and not instruction.target.startswith(KERNELS):
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
    if opcode in SLICES:
        return (instruction.num_bytes if operands[0].hbm_bytes else 0) + instruction.hbm_bytes
    if opcode.endswith("-start"):  # a copy or slice; its tuple starts with source and result, in either order
        taken = min(array.num_bytes for array in instruction.arrays[:2])
        return taken * sum(array.is_in_hbm for array in instruction.arrays[:2])
    if opcode in ("dynamic-update-slice", "scatter"):
        update = operands[1 if opcode == "dynamic-update-slice" else -1]
        return update.hbm_bytes + (update.num_bytes if instruction.hbm_bytes else 0)
    shares = [trips if opcode == "custom-call" and _is_carried(operand, computation) else 1 for operand in operands]
    read = sum(operand.hbm_bytes // share for operand, share in zip(operands, shares, strict=True))
    return read + instruction.hbm_bytes


def _is_carried(operand: Instruction, body: Computation) -> bool:
    """Whether an operand is an element of the loop's state that the loop does not change."""
    while operand.opcode == "bitcast":
        operand = body.instructions[operand.operands[0]]
    index = operand.attribute(r"\bindex=(\d+)")
    if operand.opcode != "get-tuple-element" or body.root.opcode != "tuple":
        return False
    return body.parameters[0].name in operand.operands and body.root.operands[int(index)] == operand.name


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
        elif user.opcode in SLICES and index == 0:
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
    is_part = is_collective(instruction) or instruction.target.startswith("AsyncCollective")
    return instruction.opcode == "tuple" or is_part


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
