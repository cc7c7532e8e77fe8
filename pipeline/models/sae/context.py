"""The activations on which an SAE was trained: of which model, at which place, in which contexts."""

import re
from dataclasses import dataclass


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
