"""What the model's head says of each token: the loss of the next one, the entropy, the likeliest next tokens.

Computed in chunks of the vocabulary and of the tokens, in float32: no array holds the logits of all tokens.

Letters: B rows, S slots of a row, D model dim, V vocabulary, n tokens of a tile, c ids of a chunk, k likeliest ids.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from pipeline.models.decoder import Params
from pipeline.models.head import Head, head_weight, scores

CHUNK = 4096  # ids of the vocabulary at once
TILE = 2048  # tokens at once: 32 MiB of logits


class TokenOutputs(NamedTuple):
    """In nats. `loss` is that of the given next tokens; of equally likely ids the lower comes first."""

    loss: Float32[Array, "B S"]
    entropy: Float32[Array, "B S"]
    top_logprobs: Float32[Array, "B S k"]
    top_ids: Int32[Array, "B S k"]


class _Seen(NamedTuple):
    """Of the part of the vocabulary that was seen, of each token. Sums are relative to the greatest score."""

    greatest: Float32[Array, " n"]
    total: Float32[Array, " n"]  # of exp(score - greatest)
    weighted: Float32[Array, " n"]  # of exp(score - greatest) * (score - greatest)
    target: Float32[Array, " n"]  # the next token's score; 0 where it was not seen
    top: Float32[Array, "n k"]
    ids: Int32[Array, "n k"]


@jax.named_scope("token_outputs")
def token_outputs(
    head: Head,
    params: Params,
    x: Float[Array, "B S D"],
    next_tokens: Int32[Array, "B S"],
    num_top: int,
    mesh: Mesh | None = None,
) -> TokenOutputs:
    """`x` is the last norm's output, with rows along the mesh's `data` axis. The vocabulary may be divided along
    `tensor`; then each device computes its part, and they exchange a few numbers for each token."""
    weight = head_weight(head, params)
    if mesh is None:
        return _on_device(x, next_tokens, weight, head=head, num_top=num_top)
    is_divided = weight.shape[0] % mesh.shape["tensor"] == 0 and mesh.shape["tensor"] > 1
    rows, vocabulary = PartitionSpec("data"), PartitionSpec("tensor" if is_divided else None)
    # check_vma=False: JAX does not see that what is made of gathered candidates is the same along `tensor`.
    compute = jax.shard_map(
        partial(_on_device, head=head, num_top=num_top, axis="tensor" if is_divided else None),
        mesh=mesh,
        in_specs=(rows, rows, vocabulary),
        out_specs=TokenOutputs(rows, rows, rows, rows),
        check_vma=False,
    )
    return compute(x, next_tokens, weight)


def _on_device(
    x: Float[Array, "B S D"],
    next_tokens: Int32[Array, "B S"],
    weight: Float[Array, "V D"],
    *,
    head: Head,
    num_top: int,
    axis: str | None = None,
) -> TokenOutputs:
    """`weight` is this device's part of the vocabulary where the mesh's `axis` divides it."""
    first = jax.lax.axis_index(axis) * weight.shape[0] if axis else 0
    see = partial(_see_vocabulary, weight=weight, first=first, head=head, num_top=num_top)
    seen = _in_tiles(see, x.reshape(-1, x.shape[2]), next_tokens.reshape(-1))
    if axis:
        seen = _joined(seen, axis)
    log_total = jnp.log(seen.total)
    outputs = TokenOutputs(
        loss=seen.greatest + log_total - seen.target,
        entropy=log_total - seen.weighted / seen.total,
        top_logprobs=seen.top - (seen.greatest + log_total)[:, None],
        top_ids=seen.ids,
    )
    return TokenOutputs(*(value.reshape(*x.shape[:2], *value.shape[1:]) for value in outputs))


def _in_tiles(
    see: Callable[[Float[Array, "n D"], Int32[Array, " n"]], _Seen],
    x: Float[Array, "tokens D"],
    next_tokens: Int32[Array, " tokens"],
) -> _Seen:
    num_tokens = len(x)
    if num_tokens <= TILE:
        return see(x, next_tokens)
    missing = -num_tokens % TILE
    tiles = (
        jnp.pad(x, ((0, missing), (0, 0))).reshape(-1, TILE, x.shape[1]),
        jnp.pad(next_tokens, (0, missing)).reshape(-1, TILE),
    )
    seen = jax.lax.map(lambda tile: see(*tile), tiles)
    return jax.tree.map(lambda value: value.reshape(num_tokens + missing, *value.shape[2:])[:num_tokens], seen)


def _see_vocabulary(
    x: Float[Array, "n D"],
    next_tokens: Int32[Array, " n"],
    *,
    weight: Float[Array, "V D"],
    first: int | Int32[Array, ""],
    head: Head,
    num_top: int,
) -> _Seen:
    """`first` is the id of the first row of `weight`."""

    def see(start: int | Int32[Array, ""], seen: _Seen, size: int) -> _Seen:
        chunk = scores(head, x, _rows(weight, start, size))
        return _see_chunk(seen, chunk, next_tokens, first + start, num_top)

    num_chunks, rest = divmod(weight.shape[0], CHUNK)
    lowest = jnp.finfo(jnp.float32).min
    zeros = jnp.zeros(len(x), jnp.float32)
    top = jnp.full((len(x), num_top), lowest)
    seen = _Seen(zeros + lowest, zeros, zeros, zeros, top, jnp.zeros_like(top, jnp.int32))
    if num_chunks:
        seen = jax.lax.fori_loop(0, num_chunks, lambda i, seen: see(i * CHUNK, seen, CHUNK), seen)
    return see(num_chunks * CHUNK, seen, rest) if rest else seen


def _see_chunk(
    seen: _Seen,
    chunk: Float32[Array, "n c"],
    next_tokens: Int32[Array, " n"],
    first: int | Int32[Array, ""],
    num_top: int,
) -> _Seen:
    size = chunk.shape[1]
    greatest = jnp.maximum(seen.greatest, jnp.max(chunk, axis=1))
    total, weighted = _rescaled(seen, greatest)
    shifted = chunk - greatest[:, None]
    places = next_tokens - first
    own = jnp.take_along_axis(chunk, jnp.clip(places, 0, size - 1)[:, None], axis=1)[:, 0]
    target = jnp.where((places >= 0) & (places < size), own, seen.target)
    top, ids = seen.top, seen.ids
    if num_top:
        best, at = jax.lax.top_k(chunk, min(num_top, size))
        top, ids = _likeliest(jnp.concatenate([top, best], 1), jnp.concatenate([ids, at + first], 1), num_top)
    return _Seen(
        greatest=greatest,
        total=total + jnp.sum(jnp.exp(shifted), axis=1),
        weighted=weighted + jnp.sum(jnp.exp(shifted) * shifted, axis=1),
        target=target,
        top=top,
        ids=ids,
    )


def _rescaled(seen: _Seen, greatest: Float32[Array, " n"]) -> tuple[Float32[Array, " n"], Float32[Array, " n"]]:
    """`total` and `weighted` relative to another greatest score."""
    down = seen.greatest - greatest
    return seen.total * jnp.exp(down), (seen.weighted + seen.total * down) * jnp.exp(down)


def _likeliest(
    top: Float32[Array, "n m"], ids: Int32[Array, "n m"], num_top: int
) -> tuple[Float32[Array, "n k"], Int32[Array, "n k"]]:
    """Of equal scores the earlier: candidates stand in the order of their ids."""
    best, at = jax.lax.top_k(top, num_top)
    return best, jnp.take_along_axis(ids, at, axis=1)


def _joined(seen: _Seen, axis: str) -> _Seen:
    """What the devices along `axis` have seen together."""
    greatest = jax.lax.pmax(seen.greatest, axis)
    total, weighted = (jax.lax.psum(value, axis) for value in _rescaled(seen, greatest))
    top, ids = seen.top, seen.ids
    if num_top := top.shape[1]:
        candidates = (jax.lax.all_gather(value, axis, axis=1, tiled=True) for value in (top, ids))
        top, ids = _likeliest(*candidates, num_top)
    return _Seen(greatest, total, weighted, jax.lax.psum(seen.target, axis), top, ids)


def _rows(weight: Float[Array, "V D"], start: int | Int32[Array, ""], size: int) -> Float[Array, "c D"]:
    """Without the barrier, XLA's CPU backend converts all of a bfloat16 weight to float32 before the loop."""
    weight, start = jax.lax.optimization_barrier((weight, start))
    return jax.lax.dynamic_slice_in_dim(weight, start, size)
