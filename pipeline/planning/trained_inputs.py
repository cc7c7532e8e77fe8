"""SAEs trained on what TransformerLens computes, where that is not what the checkpoint computes.

* It moves what the biases of LayerNorm and values add to a head's output, the same vector at all positions since
  attention sums to 1, into the bias of the output projection (`fold_ln`, `fold_value_biases`).
* Its `ln1.hook_normalized` and `ln2.hook_normalized` are before the weights of an RMSNorm.
* It subtracts the mean from what is written into the residual stream (`center_writing_weights`): of models with
  LayerNorm only, whatever it was asked.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pipeline.core.errors import ConfigError
from pipeline.core.sites import ActivationKey, Site
from pipeline.models.architecture import Norm
from pipeline.models.registry import Model
from pipeline.models.sae.autoencoder import SAE, Change
from pipeline.models.sae.formats import hook_z
from pipeline.models.sae.spec import InputScaling

_NORM, _MATRIX, _BIAS = "h.*.ln_1.bias", "h.*.attn.c_attn.weight", "h.*.attn.c_attn.bias"


def for_checkpoint(sae: SAE, key: ActivationKey, model: Model) -> SAE:
    """The SAE for the array as the checkpoint computes it: the same features, and the reconstruction of that array.
    Raises ConfigError for an SAE of GPT-2's heads and a model that is not GPT-2, and for an SAE from before a norm's
    weights that scales its input."""
    if sae.spec.input_scaling is InputScaling.centred and model.arch.norm is not Norm.layer:
        sae = replace(sae, spec=replace(sae.spec, input_scaling=InputScaling.none, undo_scaling=False))
    return _after_norm_weights(_with_value_biases(sae, key, model), key, model)


def _after_norm_weights(sae: SAE, key: ActivationKey, model: Model) -> SAE:
    place, weight = {Site.attn_in: ("ln1", "attention.norm"), Site.mlp_in: ("ln2", "mlp.norm")}.get(key.site, ("", ""))
    name = next((name for name, entry in model.table.items() if entry == weight), None)
    if name is None or model.arch.norm is Norm.layer or sae.hook_name != f"blocks.{key.layer}.{place}.hook_normalized":
        return sae
    if sae.spec.input_scaling is not InputScaling.none:
        raise ConfigError(
            f"capture.encode: {sae.tensors.name} is an SAE for {sae.hook_name}, before the norm's weights, and scales "
            f"its input ({sae.spec.input_scaling}), which is not implemented together. Use another SAE."
        )

    def scales() -> np.ndarray:
        d = sae.spec.d_in
        values = np.ones(d, np.float32) if model.random_seed is not None else _weights(model, name, key.layer, d)
        return values + np.float32(model.arch.norm is Norm.rms_plus_one)

    changes: dict[str, Change] = {
        "w_enc": lambda values: values / scales()[:, None],
        "w_skip": lambda values: values / scales()[:, None],
        "b_in": lambda values: values * scales(),
    }
    if not sae.spec.is_transcoder:  # whose output is another array
        changes |= dict.fromkeys(("w_dec", "b_out"), lambda values: values * scales())
    return replace(_changed(sae, changes), hook_name=model.hook_name(key))


def _with_value_biases(sae: SAE, key: ActivationKey, model: Model) -> SAE:
    if sae.format != hook_z.FORMAT or key.site is not Site.attn_z:
        return sae
    if not {_NORM, _MATRIX, _BIAS} <= model.table.keys():
        raise ConfigError(
            f"capture.encode: {sae.tensors.name} is an SAE for GPT-2's heads, expected model.path to be a GPT-2. Set "
            f"model.path=gpt2, or use another SAE."
        )

    def add(values: np.ndarray) -> np.ndarray:
        return values + _value_biases(model, key.layer)

    return _changed(sae, {"b_in": add, "b_out": add})


def _changed(sae: SAE, changes: Mapping[str, Change]) -> SAE:
    """The SAE with these changes of its arrays, after those that it makes."""

    def both(first: Change | None, second: Change) -> Change:
        return second if first is None else lambda values: second(first(values))

    changed = {
        name: replace(source, change=both(source.change, changes[name]))
        for name, source in sae.sources.items()
        if name in changes
    }
    return replace(sae, sources={**sae.sources, **changed})


def _value_biases(model: Model, layer: int) -> np.ndarray:
    """What biases add to the outputs of a layer's heads, float32 [D]."""
    d = model.arch.d_model
    if model.random_seed is not None:
        return np.zeros(d, np.float32)
    matrix = _weights(model, _MATRIX, layer, d)[:, 2 * d :]
    return _weights(model, _NORM, layer, d) @ matrix + _weights(model, _BIAS, layer, 3 * d)[2 * d :]


def _weights(model: Model, name: str, layer: int, num_rows: int) -> np.ndarray:
    """The first rows of a layer's tensor, in float32. name: its HF key."""
    full_name = model.checkpoint.full_name(name.replace("*", str(layer)))
    return model.checkpoint.rows(full_name, 0, num_rows).astype(np.float32)
