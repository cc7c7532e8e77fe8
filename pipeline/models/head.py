"""The language-model head, which generation and `capture.outputs` need: the last norm's output -> logits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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
    bias: str | None = None  # a tensor
    read_scale: Callable[[HfConfig], float] = lambda config: 1.0
    tied_by_text: bool = False  # in multimodal checkpoints, `text_config` may say whether it is tied
    tied_by_text_only: bool = False  # the language model has its own head


@dataclass(frozen=True)
class Head:
    """A head. Scores are scaled before they are capped."""

    tensor: str | None  # HF key; None: the embedding is the head
    softcap: float | None  # logits become softcap * tanh(logits / softcap)
    bias: str | None = None  # HF key
    scale: float = 1.0  # of the logits


class HeadWeights(NamedTuple):
    """The head's weights, or those for some vocabulary entries."""

    matrix: Float[Array, "V D"]
    bias: Float[Array, " V"] | None


def read_head(config: HfConfig, family: HeadFormat) -> Head:
    """Reads the head. In multimodal checkpoints, some attributes are in `text_config`."""
    text = config.nested("text_config") if "text_config" in config else config
    is_tied = (text if family.tied_by_text_only else config).flag("tie_word_embeddings", family.is_tied)
    if family.tied_by_text:
        is_tied |= text.flag("tie_word_embeddings", False)
    softcap = text.optional_float("final_logit_softcapping", family.softcap)
    return Head(None if is_tied else family.tensor, softcap, family.bias, family.read_scale(config))


def head_leaf(head: Head, arch: Architecture) -> dict[str, Leaf]:
    """Describes the head's weights, without reading them; {} if the embedding is the head and there is no bias."""
    tensors = {"head": head.tensor, "head_bias": head.bias}
    return {key: make_leaf(arch, key, tensor) for key, tensor in tensors.items() if tensor is not None}


@jax.named_scope("head")
def logits(head: Head, params: Params, x: Float[Array, "B D"]) -> Float32[Array, "B V"]:
    """The logits of the next token, from the last norm's output x at one position of each row."""
    return scores(head, x, head_weights(head, params))


def head_weights(head: Head, params: Params) -> HeadWeights:
    return HeadWeights(params["head"] if head.tensor else params["embed"], params.get("head_bias"))


def scores(head: Head, x: Float[Array, "B D"], weights: HeadWeights) -> Float32[Array, "B V"]:
    """Logits for the vocabulary entries of `weights`."""
    products = jnp.einsum("BD,VD->BV", x, weights.matrix, preferred_element_type=jnp.float32)
    if weights.bias is not None:
        products += weights.bias
    if head.scale != 1.0:
        products *= head.scale
    return products if head.softcap is None else jnp.tanh(products / head.softcap) * head.softcap
