"""The head's outputs for each token: the loss of the next token, the entropy, and the likeliest next tokens.

Computed in chunks of the vocabulary and tiles of tokens, in float32, so that no array holds the logits of all tokens.

Letters: B rows, S slots of a row, D model dim, V vocabulary, n tokens of a tile, c ids of a chunk, k likeliest ids.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from pipeline.models.attention.arithmetic import map_parts
from pipeline.models.decoder import Params
from pipeline.models.exchange.context import context_axis
from pipeline.models.head import Head, HeadWeights, head_weights, scores
from pipeline.models.partition import TABLE_ROWS, Partition

CHUNK = 4096  # vocabulary ids at a time
TILE = 2048  # tokens at a time: 32 MiB of logits


class TokenOutputs(NamedTuple):
    """In nats. `loss` belongs to the given next tokens. `top_ids` are the likeliest ids; ties go to the lower id."""

    loss: Float32[Array, "B S"]
    entropy: Float32[Array, "B S"]
    top_logprobs: Float32[Array, "B S k"]
    top_ids: Int32[Array, "B S k"]


class _Partial(NamedTuple):
    """Each token's results over a part of the vocabulary."""

    greatest: Float32[Array, " n"]  # the greatest score
    total: Float32[Array, " n"]  # sum of exp(score - greatest)
    weighted: Float32[Array, " n"]  # sum of exp(score - greatest) * (score - greatest)
    target: Float32[Array, " n"]  # the next token's score; 0 if it is not in this part
    top: Float32[Array, "n k"]
    ids: Int32[Array, "n k"]


@jax.named_scope("token_outputs")
def token_outputs(
    head: Head,
    params: Params,
    x: Float[Array, "B S D"],
    next_tokens: Int32[Array, "B S"],
    num_top: int,
    partition: Partition = Partition(),  # noqa: B008  frozen
) -> TokenOutputs:
    """Computes the outputs from `x`, the last norm's output, with rows divided along the mesh's `data` axis, and
    slots along `context` if they are divisible.

    If the vocabulary is divided along `tensor`, each device computes its part, and the devices exchange a few numbers
    per token. If fsdp divides it along `data`, devices copy a chunk at a time from each other.
    """
    weights = head_weights(head, params)
    if partition.mesh is None:
        return _on_device(x, next_tokens, weights, head=head, num_top=num_top)
    vocabulary, group = partition.vocabulary(len(weights.matrix))
    mesh, axis = partition.mesh_with(group, context=partition.context), "tensor" if "tensor" in vocabulary else None
    rows = PartitionSpec(TABLE_ROWS, context_axis(partition.mesh, x.shape[1]))
    # check_vma=False: JAX does not infer that results computed from gathered candidates are equal along `tensor`.
    compute = jax.shard_map(
        partial(_on_device, head=head, num_top=num_top, axis=axis, group=group),
        mesh=mesh,
        in_specs=(rows, rows, HeadWeights(PartitionSpec(vocabulary), PartitionSpec(axis))),
        out_specs=TokenOutputs(rows, rows, rows, rows),
        check_vma=False,
    )
    return compute(x, next_tokens, weights)


def _on_device(
    x: Float[Array, "B S D"],
    next_tokens: Int32[Array, "B S"],
    weights: HeadWeights,
    *,
    head: Head,
    num_top: int,
    axis: str | None = None,
    group: int = 1,
) -> TokenOutputs:
    """If the mesh's `axis` divides the vocabulary, `weights` are this device's part; `group` devices along `data`
    divide its matrix."""
    first = jax.lax.axis_index(axis) * len(weights.matrix) * group if axis else 0
    tokens = x.reshape(-1, x.shape[2]), next_tokens.reshape(-1)
    reduced = _reduce_vocabulary(*tokens, weights=weights, first=first, head=head, num_top=num_top, group=group)
    if axis:
        reduced = _merge_devices(reduced, axis)
    log_total = jnp.log(reduced.total)
    outputs = TokenOutputs(
        loss=reduced.greatest + log_total - reduced.target,
        entropy=log_total - reduced.weighted / reduced.total,
        top_logprobs=reduced.top - (reduced.greatest + log_total)[:, None],
        top_ids=reduced.ids,
    )
    return TokenOutputs(*(value.reshape(*x.shape[:2], *value.shape[1:]) for value in outputs))


def _reduce_vocabulary(
    x: Float[Array, "n D"],
    next_tokens: Int32[Array, " n"],
    *,
    weights: HeadWeights,
    first: int | Int32[Array, ""],
    head: Head,
    num_top: int,
    group: int,
) -> _Partial:
    """`first` is the id of the first row of `weights`, or of those of the group."""
    copied = partial(_rows, group=group)

    def add(start: int | Int32[Array, ""], reduced: _Partial, size: int) -> _Partial:
        bias = None if weights.bias is None else _rows(weights.bias, start, size)
        rows = HeadWeights(copied(weights.matrix, start, size), bias)

        def add_tile(tile: tuple[Array, Array, _Partial]) -> _Partial:
            return _add_chunk(tile[2], scores(head, tile[0], rows), tile[1], first + start, num_top)

        return map_parts(add_tile, (x, next_tokens, reduced), TILE, axis=0)

    num_chunks, rest = divmod(len(weights.matrix) * group, CHUNK)
    lowest = jnp.finfo(jnp.float32).min
    zeros = jnp.zeros(len(x), jnp.float32)
    top = jnp.full((len(x), num_top), lowest)
    reduced = _Partial(zeros + lowest, zeros, zeros, zeros, top, jnp.zeros_like(top, jnp.int32))
    if num_chunks:
        reduced = jax.lax.fori_loop(0, num_chunks, lambda i, reduced: add(i * CHUNK, reduced, CHUNK), reduced)
    return add(num_chunks * CHUNK, reduced, rest) if rest else reduced


def _add_chunk(
    reduced: _Partial,
    chunk: Float32[Array, "n c"],
    next_tokens: Int32[Array, " n"],
    first: int | Int32[Array, ""],
    num_top: int,
) -> _Partial:
    size = chunk.shape[1]
    greatest = jnp.maximum(reduced.greatest, jnp.max(chunk, axis=1))
    total, weighted = _rescaled(reduced, greatest)
    shifted = chunk - greatest[:, None]
    columns = next_tokens - first
    target_scores = jnp.take_along_axis(chunk, jnp.clip(columns, 0, size - 1)[:, None], axis=1)[:, 0]
    target = jnp.where((columns >= 0) & (columns < size), target_scores, reduced.target)
    top, ids = reduced.top, reduced.ids
    if num_top:
        best, indices = jax.lax.top_k(chunk, min(num_top, size))
        top, ids = _likeliest(jnp.concatenate([top, best], 1), jnp.concatenate([ids, indices + first], 1), num_top)
    return _Partial(
        greatest=greatest,
        total=total + jnp.sum(jnp.exp(shifted), axis=1),
        weighted=weighted + jnp.sum(jnp.exp(shifted) * shifted, axis=1),
        target=target,
        top=top,
        ids=ids,
    )


def _rescaled(reduced: _Partial, greatest: Float32[Array, " n"]) -> tuple[Float32[Array, " n"], Float32[Array, " n"]]:
    """`total` and `weighted` relative to a new greatest score."""
    shift = reduced.greatest - greatest
    return reduced.total * jnp.exp(shift), (reduced.weighted + reduced.total * shift) * jnp.exp(shift)


def _likeliest(
    top: Float32[Array, "n m"], ids: Int32[Array, "n m"], num_top: int
) -> tuple[Float32[Array, "n k"], Int32[Array, "n k"]]:
    """The best candidates. They are ordered by id, so ties go to the lower id."""
    best, indices = jax.lax.top_k(top, num_top)
    return best, jnp.take_along_axis(ids, indices, axis=1)


def _merge_devices(reduced: _Partial, axis: str) -> _Partial:
    """Merges the results of the devices along `axis`."""
    greatest = jax.lax.pmax(reduced.greatest, axis)
    total, weighted = (jax.lax.psum(value, axis) for value in _rescaled(reduced, greatest))
    top, ids = reduced.top, reduced.ids
    if num_top := top.shape[1]:
        candidates = (jax.lax.all_gather(value, axis, axis=1, tiled=True) for value in (top, ids))
        top, ids = _likeliest(*candidates, num_top)
    return _Partial(greatest, total, weighted, jax.lax.psum(reduced.target, axis), top, ids)


def _rows(
    weight: Float[Array, "V ..."], start: int | Int32[Array, ""], size: int, group: int = 1
) -> Float[Array, "c ..."]:
    """Rows of the head; if `group` devices along `data` divide it, of those of all. Without the barrier, XLA's CPU
    backend would convert the whole bfloat16 weight to float32 before the loop."""
    weight, start = jax.lax.optimization_barrier((weight, start))
    if group == 1:
        return jax.lax.dynamic_slice_in_dim(weight, start, size)
    rows = start + jnp.arange(size) - jax.lax.axis_index("data") * len(weight)
    is_here = (rows >= 0) & (rows < len(weight))
    return jax.lax.psum(jnp.where(is_here[:, None], weight[rows], 0), "data")  # exact: one device has the row
