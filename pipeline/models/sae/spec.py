"""What a sparse autoencoder (SAE) or transcoder computes, and on what it was trained, independent of its checkpoint's
format.

D: d_in, F: width (features), O: d_out. x_D are a token's activations; `ARRAYS` lists the other arrays, of which a
checkpoint has those that its architecture needs.

    scaled_D = x_D                                 InputScaling.none
             = c_D, where c_D = x_D - mean(x_D)    InputScaling.centred
             = x_D * sqrt(D) / norm(x_D)           InputScaling.constant_norm
             = c_D / (std(c_D) + layer_norm_eps)   InputScaling.layer_norm, std with D - 1
    input_D = scaled_D - b_in                      without b_in: scaled_D
    pre_F = input_D @ w_enc + b_enc
    pre_F = pre_F * feature_scale                  with feature_scale

    value_F = max(pre_F, 0)                        FeatureActivation.relu
            = max(pre_F, 0) where pre_F > threshold, else 0                  FeatureActivation.jumprelu
            = max(pre_F, 0) for the k largest of pre_F, else 0               FeatureActivation.topk
            = max((input_D @ w_enc) * gate_scale + b_enc, 0)
              where input_D @ w_enc + gate_bias > 0, else 0                  FeatureActivation.gated

    out_O = (value_F / feature_scale) @ w_dec + b_out     without feature_scale: value_F @ w_dec + b_out
    out_O is mapped back by the inverse of the scaling    with undo_scaling
    out_O = out_O + x_D @ w_skip                          with w_skip; x_D is not scaled

A feature fires if its value is above 0.
"""

import re
from dataclasses import dataclass
from enum import StrEnum


class FeatureActivation(StrEnum):
    """How features fire; see the module's docstring."""

    relu = "relu"
    jumprelu = "jumprelu"
    topk = "topk"
    gated = "gated"


class InputScaling(StrEnum):
    """How each token's activations are scaled first; see the module's docstring."""

    none = "none"
    centred = "centred"
    constant_norm = "constant_norm"
    layer_norm = "layer_norm"


@dataclass(frozen=True)
class SAESpec:
    """The static part of an SAE or transcoder: everything except its arrays."""

    d_in: int  # D, size of the activations that it reads
    width: int  # F, number of features
    d_out: int  # O, size of the activations that it reconstructs or predicts
    activation: FeatureActivation
    k: int | None = None  # topk only: how many features may fire for a token, from 1 to width
    input_scaling: InputScaling = InputScaling.none
    layer_norm_eps: float = 1e-5  # for InputScaling.layer_norm: added to the standard deviation, not to the variance
    undo_scaling: bool = False  # whether decoding ends with the inverse of input_scaling; the inverse has no epsilon
    is_transcoder: bool | None = False  # whether it predicts a different site; None: the files do not say

    def axis_sizes(self, axes: str) -> tuple[int, ...]:
        """The sizes of axes, given by the letters of `ARRAYS`."""
        sizes = {"D": self.d_in, "F": self.width, "O": self.d_out}
        return tuple(sizes[axis] for axis in axes)


# Name: axes. All arrays are C-ordered; dtypes are float32, float16 or bfloat16.
ARRAYS: dict[str, str] = {
    "w_enc": "DF",
    "b_enc": "F",  # gated: b_mag
    "b_in": "D",  # subtracted from the scaled input
    "threshold": "F",  # jumprelu; compared with pre_F, after its bias
    "gate_scale": "F",  # gated: exp(r_mag)
    "gate_bias": "F",  # gated: b_gate
    "feature_scale": "F",  # topk: norms of the decoder's rows, if they multiply pre-activations
    "w_dec": "FO",
    "b_out": "O",
    "w_skip": "DO",  # skip transcoders
}


@dataclass(frozen=True)
class SAEContext:
    """What an SAE's files, or the authors of its format, say about the activations that it was trained on. None: they
    do not say."""

    model_name: str | None = None  # a Hub id, or TransformerLens' name of the model
    context_size: int | None = None  # tokens that the model saw at a time
    prepend_bos: bool | None = None  # whether contexts begin with the tokenizer's BOS, or what the model has in place
    separator: str | int | None = None  # between documents of a context: bos, eos, sep, or a token id
    concatenates: bool | None = None  # whether a context holds several documents, which attend to each other
    excluded_tokens: bool | tuple[int, ...] | None = None  # no activations of these ids; True: of special tokens
    positions: tuple[int | None, ...] | None = None  # the slice of a context's positions that was used


MODULE_HOOKS = {  # TransformerLens' names of the input and the output of a decoder layer and its modules
    "layer": ("hook_resid_pre", "hook_resid_post"),
    "attention": ("attn.hook_in", "attn.hook_out"),
    "mlp": ("mlp.hook_in", "mlp.hook_out"),
}
_MODULES = {  # of a decoder layer in transformers
    "output": "hook_resid_post",
    "self_attn.o_proj.input": "attn.hook_z",
    "pre_feedforward_layernorm.output": "mlp.hook_in",
    "post_feedforward_layernorm.output": "hook_mlp_out",
}


def hook_of_module(name: str | None) -> str | None:
    """TransformerLens' name of a place that is named as in transformers: `model.layers.12.output` is
    `blocks.12.hook_resid_post`. None for any other place."""
    match = re.fullmatch(r"(?:\w+\.)*layers\.(\d+)\.(.+)", name or "")
    return f"blocks.{match[1]}.{_MODULES[match[2]]}" if match and match[2] in _MODULES else None
