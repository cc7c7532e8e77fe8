"""The SAEs of `capture.encode`: which array each encodes, and how its features are stored."""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from jax.sharding import Mesh

from pipeline.config.schema import CaptureConfig
from pipeline.core.errors import ConfigError
from pipeline.core.messages import shown
from pipeline.core.sites import ActivationKey, Site
from pipeline.models.registry import Model
from pipeline.models.sae.loading import SAE, open_sae
from pipeline.models.sae.params import SAEParams, load_params, needed_arrays
from pipeline.planning.capture import captured_keys
from pipeline.planning.trained_inputs import for_checkpoint
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
