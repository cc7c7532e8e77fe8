"""The language-model head, which generation and `capture.outputs` need: the last norm's output -> logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pipeline.models.architecture import Architecture
from pipeline.models.decoder import Params
from pipeline.models.families.hf_config import HfConfig
from pipeline.models.leaves import Leaf, make_leaf


@dataclass(frozen=True)
class HeadFormat:
    """A family's head. `is_tied` and `softcap` apply if config.json has no such key: the defaults of transformers."""

    tensor: str = "lm_head.weight"
    is_tied: bool = False
    softcap: float | None = None


@dataclass(frozen=True)
class Head:
    """A head without bias."""

    tensor: str | None  # HF key; None: the embedding is the head
    softcap: float | None  # logits become softcap * tanh(logits / softcap)


def read_head(config: HfConfig, family: HeadFormat) -> Head:
    is_tied = config.flag("tie_word_embeddings", family.is_tied)
    softcap = config.optional_float("final_logit_softcapping", family.softcap)
    return Head(None if is_tied else family.tensor, softcap)


def head_leaf(head: Head, arch: Architecture) -> dict[str, Leaf]:
    """Describes the head's weight, without reading it; {} if the embedding is the head."""
    return {} if head.tensor is None else {"head": make_leaf(arch, "head", head.tensor)}


@jax.named_scope("head")
def logits(head: Head, params: Params, x: Float[Array, "B D"]) -> Float32[Array, "B V"]:
    """The logits of the next token, from the last norm's output x at one position of each row."""
    return scores(head, x, head_weight(head, params))


def head_weight(head: Head, params: Params) -> Float[Array, "V D"]:
    return params["head"] if head.tensor else params["embed"]


def scores(head: Head, x: Float[Array, "B D"], weight: Float[Array, "V D"]) -> Float32[Array, "B V"]:
    """Logits for the vocabulary entries whose head rows are in `weight`."""
    products = jnp.einsum("BD,VD->BV", x, weight, preferred_element_type=jnp.float32)
    return products if head.softcap is None else jnp.tanh(products / head.softcap) * head.softcap
