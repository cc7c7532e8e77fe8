"""The SAEs of `capture.encode`: which array each encodes, and how its features are stored.

Some were trained on what TransformerLens computes, where that is not what the checkpoint computes:

* It moves what the biases of LayerNorm and values add to a head's output, the same vector at all positions since
  attention sums to 1, into the bias of the output projection (`fold_ln`, `fold_value_biases`).
* Its `ln1.hook_normalized` and `ln2.hook_normalized` are before the weights of an RMSNorm.
* It subtracts the mean from what is written into the residual stream (`center_writing_weights`): of models with
  LayerNorm only, whatever it was asked.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
from jax.sharding import Mesh

from pipeline.config.schema import CaptureConfig
from pipeline.core.errors import ConfigError
from pipeline.core.messages import shown
from pipeline.core.sites import ActivationKey, Site
from pipeline.models.architecture import Norm
from pipeline.models.registry import Model
from pipeline.models.sae.autoencoder import SAE, Change
from pipeline.models.sae.formats import hook_z
from pipeline.models.sae.loading import open_sae
from pipeline.models.sae.params import SAEParams, load_params, needed_arrays
from pipeline.models.sae.spec import InputScaling
from pipeline.planning.capture import captured_keys
from pipeline.step.spec import EncoderSpec
from pipeline.store.format.keys import ENCODER_NAME, MAX_ENCODER_NAME, features_name

log = logging.getLogger("pipeline")

_EXAMPLE = """'capture.encode={blocks.12.resid_post: "hf://owner/name/folder"}'"""


@dataclass(frozen=True)
class Encoder:
    """An SAE whose checkpoint is open, and how its features are stored."""

    spec: EncoderSpec
    sae: SAE

    def load(self, dtype: str, mesh: Mesh) -> SAEParams:
        """Loads the arrays that the step needs onto the devices."""
        return load_params(self.spec.sae, self.spec.arrays, self.sae.read, dtype, mesh)

    def identity(self) -> dict[str, object]:
        """What determines the features, as plain JSON, wherever the checkpoint is stored. Reads its arrays."""
        spec, sae = self.spec, self.sae
        threshold = {"threshold": spec.threshold} if spec.threshold else {}
        error = {"error": True} if spec.decodes else {}
        return {
            "features": spec.name,
            "array": spec.key.name,
            "width": spec.sae.width,
            "top": spec.top,
            "dtype": spec.dtype,
            **threshold,
            **error,
            "activation": str(spec.sae.activation),
            "sha256": sae.digest(spec.arrays),
        }


def open_encoders(capture: CaptureConfig, model: Model) -> tuple[Encoder, ...]:
    """Opens the SAEs that `capture` names, in the order of the arrays that they encode, without reading weights.

    Raises ConfigError for an SAE that does not fit its array, and CheckpointError for one that cannot be read.
    """
    if not capture.encode:
        return ()
    encoders = []
    for key, name, address in _requests(capture, captured_keys(capture, model)):
        sae = open_sae(address)
        width = model.width(key)
        if sae.spec.d_in != width:
            raise ConfigError(
                f"capture.encode: the SAE {address} reads activations of width {sae.spec.d_in}, but {key.name} has "
                f"width {width}. Give the SAE for this model, layer and site."
            )
        sae = for_checkpoint(sae, key, model)
        _compare_sites(sae, address, key, model)
        decodes = capture.encode_error
        if decodes and (sae.spec.is_transcoder or sae.spec.d_out != width):
            raise ConfigError(
                f"capture.encode_error is set, but {address} is a transcoder: its output does not reconstruct its "
                "input. Set capture.encode_error=false."
            )
        spec = EncoderSpec(
            key=key,
            name=features_name(key.name, name),
            sae=sae.spec,
            arrays=needed_arrays(sae.shapes, decodes),
            top=capture.encode_top,
            dtype=capture.features_dtype,
            threshold=capture.encode_threshold,
            indexed=capture.encode_index,
            decodes=decodes,
        )
        encoders.append(Encoder(spec, sae))
    return tuple(encoders)


def _compare_sites(sae: SAE, address: str, key: ActivationKey, model: Model) -> None:
    """Warns if the SAE was trained on a different array, according to its files or its repository's name."""
    same = {  # other names of the same array
        Site.embed: ("hook_embed", "blocks.0.hook_resid_pre"),
        Site.resid_pre: (f"blocks.{key.layer - 1}.hook_resid_post",) if key.layer else ("hook_embed",),
        Site.resid_mid: (f"blocks.{key.layer}.hook_mlp_in",),
        Site.resid_post: (f"blocks.{key.layer + 1}.hook_resid_pre",),
    }
    trained, hook = sae.hook_name or "", model.hook_name(key)
    names, place = {hook, *same.get(key.site, ())}, hook
    norm, output = {Site.attn_out: ("attention.post_norm", "attn"), Site.mlp_out: ("mlp.post_norm", "mlp")}.get(
        key.site, ("", "")
    )
    if norm not in model.table.values():
        names.add(f"blocks.{key.layer}.{output}.hook_out")
    elif trained == f"blocks.{key.layer}.{output}.hook_out":
        place += ", after the norm that follows the module"
    if "hook_" in trained and trained not in names:
        log.warning(
            "according to its files, the SAE %s was trained on %s, but it encodes %s (%s)",
            *(address, trained, key.name, place),
        )


def _requests(capture: CaptureConfig, keys: Sequence[ActivationKey]) -> Iterator[tuple[ActivationKey, str, str]]:
    """For each SAE: the array that it encodes, its name among the array's SAEs ("" if it is the only one), and its
    address."""
    if not isinstance(capture.encode, Mapping):
        raise ConfigError(
            f"capture.encode is {shown(capture.encode)}. Set it to a mapping from captured arrays to SAEs, e.g. "
            f"{_EXAMPLE}."
        )
    patterns: dict[ActivationKey, str] = {}
    for pattern in capture.encode:
        matches = [key for key in keys if fnmatchcase(key.name, str(pattern))]
        if not matches:
            raise ConfigError(
                f"capture.encode names {shown(pattern)}, which is not a captured array. Captured arrays: "
                f"{shown(', '.join(key.name for key in keys))}. Name one of them, or add its layer and site to "
                f"capture.layers and capture.sites."
            )
        for key in matches:
            if key in patterns:
                raise ConfigError(
                    f"capture.encode has {shown(patterns[key])} and {shown(pattern)}, which both match {key.name}. "
                    f"To use several SAEs for an array, give a list."
                )
            patterns[key] = pattern
        _require_different(pattern, [_addresses(pattern, capture.encode[pattern], key.layer) for key in matches])
    for key in (key for key in keys if key in patterns):
        addresses = _addresses(patterns[key], capture.encode[patterns[key]], key.layer)
        yield from ((key, name, address) for name, address in addresses.items())


def _require_different(pattern: str, addresses: Sequence[Mapping[str, str]]) -> None:
    """Raises ConfigError if a pattern has one SAE for several of its arrays. addresses: of each of them."""
    counts = Counter(address for of_array in addresses for address in {*of_array.values()})
    if same := [address for address, count in counts.items() if count > 1]:
        raise ConfigError(
            f"capture.encode has the same SAE {shown(same[0])} for several arrays of {shown(pattern)}. Write {{layer}} "
            f"in place of the layer's number in the address, or name each array separately."
        )


def _addresses(pattern: str, addresses: object, layer: int) -> dict[str, str]:
    """The addresses of the SAEs for a layer's array, by name. The name is "" for a single SAE, and the folder's name
    for SAEs in a list."""
    named = {"": addresses} if isinstance(addresses, str) else addresses
    if isinstance(named, Sequence) and all(isinstance(address, str) for address in named):
        folders = (_fill_layer(address, layer).rstrip("/").rpartition("/")[2] for address in named)
        names = (re.sub("[^A-Za-z0-9_-]", "_", folder)[:MAX_ENCODER_NAME] for folder in folders)
        named = dict(zip(names, named, strict=True))
    is_valid = isinstance(named, Mapping) and all(
        isinstance(address, str) and address.strip() and (name == "" or re.fullmatch(ENCODER_NAME, str(name)))
        for name, address in named.items()
    )
    if not is_valid or not named or (len(named) < len(addresses) and not isinstance(addresses, str)):
        raise ConfigError(
            f"capture.encode has {shown(addresses)} for {shown(pattern)}. Set it to an address, a list of addresses "
            f"whose folders have different names, or a mapping from names (letters, digits, - and _) to addresses, "
            f"e.g. {_EXAMPLE}."
        )
    return {str(name): _fill_layer(address, layer) for name, address in named.items()}


def _fill_layer(address: str, layer: int) -> str:
    return address.replace("{layer}", str(layer))


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
