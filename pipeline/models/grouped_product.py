"""On GPUs: products of each token with the matrices of its expert, as one Triton kernel.

A program of the kernel computes some outputs of a block of tokens of one expert. It gathers its tokens, so they are not
copied first.

Letters: S tokens, R pairs of a token and one of its experts, sorted by expert, E experts, N blocks, I inputs,
O outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num

from pipeline.models.quantised_weights import QuantisedWeight

_MAX_ROWS, _COLUMNS = 128, 128  # of a program's products
_INPUT_BYTES = 128  # of a token and of an output's weights, per step of the loop over inputs
_NEIGHBOURS = 8  # blocks whose programs run at about the same time, and find each other's weights in the cache


@dataclass(frozen=True)
class RowBlocks:
    """Blocks of at most `size` consecutive pairs of one expert. Blocks that are not needed are empty."""

    blocks: Int32[Array, "3 N"]  # the expert, the first pair, and the one after the last
    size: int

    @classmethod
    def of(cls, ends: Int32[Array, " E"], num_rows: int) -> "RowBlocks":
        """Divides pairs that are sorted by expert and end at `ends`; there are enough blocks for any routing."""
        experts, starts = jnp.arange(len(ends)), jnp.pad(ends[:-1], (1, 0))
        size = min(_MAX_ROWS, 1 << max(num_rows // len(ends), 16).bit_length() - 1)
        numbers = jnp.arange(-(-(num_rows // size + len(ends)) // _NEIGHBOURS) * _NEIGHBOURS)[:, None]
        firsts = starts // size + experts  # so an expert has one block more than whole ones
        starts += (numbers - firsts) * size
        is_of_expert = (numbers >= firsts) & (starts < ends)  # of one at most
        values = jnp.stack(jnp.broadcast_arrays(experts, starts, jnp.minimum(starts + size, ends)))
        return cls(jnp.sum(jnp.where(is_of_expert, values, 0), axis=2), size)


@dataclass(frozen=True)
class Matrices:
    """A matrix of each expert, and its bias, if any."""

    weight: Num[Array, "E O I"] | QuantisedWeight  # not in groups
    bias: Float[Array, "E O"] | None


def grouped_product(
    x: Float[Array, "S I"],
    num_pairs: int,
    matrices: Sequence[Matrices],
    blocks: RowBlocks,
    combine: Callable[..., Float32[Array, "rows columns"]],
    read_rows: Int32[Array, " R"] | None = None,
    written_rows: Int32[Array, " R"] | None = None,
    interpret: bool = False,
) -> Float[Array, "R O"]:
    """`combine` of the products, in float32, of token `read_rows[r]` with the matrices of pair r's expert, written to
    row `written_rows[r]`. Both are r by default. Rows of pairs that are in no block are undefined. `interpret` runs the
    kernel on a CPU, for tests."""
    # Imported here, so that machines without a GPU do not import Pallas.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    arrays = [_operands(each, x.dtype) for each in matrices]
    num_outputs, num_inputs = arrays[0]["values"].shape[1:]
    columns = min(_COLUMNS // len(matrices), max(16, pl.next_power_of_2(num_outputs)))
    step = min(_INPUT_BYTES // x.dtype.itemsize, max(16, pl.next_power_of_2(num_inputs)))
    num_columns = pl.cdiv(num_outputs, columns)

    def kernel(blocks_ref, read_rows, written_rows, x, arrays, y) -> None:
        neighbours, program = jnp.divmod(pl.program_id(0), _NEIGHBOURS * num_columns)
        block = neighbours * _NEIGHBOURS + program % _NEIGHBOURS
        expert, start, stop = (blocks_ref[number, block] for number in range(3))
        pairs, outputs = start + jnp.arange(blocks.size), program // _NEIGHBOURS * columns + jnp.arange(columns)
        is_pair, is_output = pairs < stop, outputs < num_outputs

        @pl.when(start < stop)
        def _() -> None:
            tokens = _load_rows(read_rows, pairs, is_pair)

            def add(number: Int32[Array, ""], totals: list[Array]) -> list[Array]:
                inputs = number * step + jnp.arange(step)
                load = partial(_load, columns=inputs, has_column=inputs < num_inputs)
                left = load(x, (), tokens, is_pair)
                rights = [load(stack["values"], (expert,), outputs, is_output).astype(x.dtype) for stack in arrays]
                product = partial(jnp.einsum, "ri,oi->ro", preferred_element_type=jnp.float32)
                return [total + product(left, right) for total, right in zip(totals, rights, strict=True)]

            totals = [jnp.zeros((blocks.size, columns), jnp.float32) for _ in arrays]
            totals = jax.lax.fori_loop(0, pl.cdiv(num_inputs, step), add, totals)
            for number, stack in enumerate(arrays):
                for name, apply in (("scale", jnp.multiply), ("bias", jnp.add)):
                    if name in stack:
                        values = triton.load(stack[name].at[expert, outputs], mask=is_output, other=0)
                        totals[number] = apply(totals[number], values.astype(jnp.float32))
            mask, written = is_pair[:, None] & is_output, _load_rows(written_rows, pairs, is_pair)
            triton.store(y.at[written[:, None], outputs[None]], combine(*totals).astype(y.dtype), mask=mask)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((num_pairs, num_outputs), x.dtype),
        grid=(blocks.blocks.shape[1] * num_columns,),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name="grouped_product",
    )(blocks.blocks, read_rows, written_rows, x, arrays)


def _load_rows(rows, pairs, is_pair) -> Array:
    """The rows of pairs; one after the last where there is no pair."""
    from jax.experimental.pallas import triton

    return pairs if rows is None else triton.load(rows.at[pairs], mask=is_pair, other=rows.shape[0])


def _load(matrix, prefix, rows, has_row, columns, has_column) -> Array:
    """A part of a matrix, 0 outside of it."""
    from jax.experimental.pallas import triton

    mask = has_row[:, None] & has_column
    return triton.load(matrix.at[*prefix, rows[:, None], columns[None]], mask=mask, other=0)


def _operands(matrices: Matrices, dtype: jnp.dtype) -> dict[str, Array]:
    """The arrays by name. Those of 2 to 4 GiB in int8 are converted, since Pallas would index that many bytes with
    signed integers of 32 bits."""
    weight, bias = matrices.weight, {} if matrices.bias is None else {"bias": matrices.bias}
    if not isinstance(weight, QuantisedWeight):
        return {"values": weight} | bias
    values = weight.values.astype(dtype) if 1 << 31 <= weight.values.nbytes <= 1 << 32 else weight.values
    return {"values": values, "scale": weight.scale} | bias
