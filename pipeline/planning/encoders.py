"""The SAEs of `capture.encode`: what each encodes, and what is stored of its features."""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from jax.sharding import Mesh

from pipeline.config.choices import When
from pipeline.config.limits import shown
from pipeline.config.schema import CaptureConfig
from pipeline.core.errors import ConfigError
from pipeline.core.sites import ActivationKey, Site
from pipeline.models.sae.loading import SAE, open_sae
from pipeline.models.sae.params import SAEParams, load_params, needed_arrays
from pipeline.planning.capture import captured_keys
from pipeline.planning.model_facts import ModelFacts
from pipeline.step.spec import EncoderSpec
from pipeline.store.format.keys import ENCODER_NAME, MAX_ENCODER_NAME, features_name
from pipeline.store.format.metadata import StoreMetadata

log = logging.getLogger("pipeline")

_EXAMPLE = """'capture.encode={blocks.12.resid_post: "hf://owner/name/folder"}'"""


@dataclass(frozen=True)
class Encoder:
    """An SAE whose checkpoint is open, and what is stored of its features."""

    spec: EncoderSpec
    sae: SAE

    def load(self, dtype: str, mesh: Mesh) -> SAEParams:
        """What encoding needs, on the devices."""
        return load_params(self.spec.sae, self.spec.arrays, self.sae.read, dtype, mesh)

    def identity(self) -> dict[str, object]:
        """What determines the features, as plain JSON: independent of where the checkpoint is stored."""
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


def open_encoders(
    capture: CaptureConfig, model: ModelFacts, stored: StoreMetadata | None = None
) -> tuple[Encoder, ...]:
    """Opens the SAEs that `capture` names, in the order of the arrays that they encode. Reads no weights.
    `stored`: the metadata of the store that is resumed, which has an index by feature or not.

    Raises ConfigError for one that does not fit its array, and CheckpointError for one that cannot be read.
    """
    if not capture.encode:
        return ()
    if capture.when is When.decode:
        raise ConfigError(
            "capture.encode with capture.when=decode, which keeps activations while decoding, and encodes none. Set "
            "capture.when=document, or capture.encode=null."
        )
    encoders = []
    for key, name, address in _requests(capture, captured_keys(capture, model)):
        if key.site is Site.attn_pattern:
            raise ConfigError(
                f"capture.encode names {key.name}, whose width is that of a row, which no SAE has been trained on."
            )
        sae = open_sae(address)
        width = model.width(key)
        if sae.spec.d_in != width:
            raise ConfigError(
                f"capture.encode: the SAE {address} reads activations of {sae.spec.d_in} numbers, but {key.name} has "
                f"{width}. Give the SAE of this model, layer and site."
            )
        _compare_places(sae, address, key, model)
        if sae.spec.k is not None and sae.spec.k < capture.encode_top:
            log.warning(
                "%s has at most %d features in a token: the other slots of capture.encode_top=%d stay empty",
                *(address, sae.spec.k, capture.encode_top),
            )
        decodes = capture.encode_error
        if decodes and sae.spec.is_transcoder is None:
            log.warning(
                "the files of %s do not say whether it is a transcoder: if it is, capture.encode_error compares its "
                "prediction of another array with what it reads, which means nothing",
                address,
            )
        if decodes and (sae.spec.is_transcoder or sae.spec.d_out != width):
            raise ConfigError(
                f"capture.encode_error with the transcoder {address}, which predicts another array than it reads. Set "
                "capture.encode_error=false, or leave it out."
            )
        spec = EncoderSpec(
            key=key,
            name=features_name(key.name, name),
            sae=sae.spec,
            arrays=needed_arrays(sae.shapes, decodes),
            top=capture.encode_top,
            dtype=str(capture.encode_dtype),
            threshold=capture.encode_threshold,
            indexed=capture.encode_index if stored is None else bool(stored.indexed_features),
            decodes=decodes,
        )
        encoders.append(Encoder(spec, sae))
    return tuple(encoders)


def _compare_places(sae: SAE, address: str, key: ActivationKey, model: ModelFacts) -> None:
    """Warns of an SAE that was trained on another array, as far as its file says so in TransformerLens' names."""
    trained, names = sae.hook_name or "", {model.hook_name(key)}
    if key.site is Site.resid_post:  # also the input of the next layer
        names.add(f"blocks.{key.layer + 1}.hook_resid_pre")
    if ".hook_" in trained and trained not in names:
        log.warning(
            "the SAE %s was trained on %s, by its own account, and encodes %s (%s)",
            *(address, trained, key.name, model.hook_name(key)),
        )


def _requests(capture: CaptureConfig, keys: Sequence[ActivationKey]) -> Iterator[tuple[ActivationKey, str, str]]:
    """Of each SAE the array that it encodes, its name among the array's SAEs ("" for the only one), and its address."""
    if not isinstance(capture.encode, Mapping):
        raise ConfigError(
            f"capture.encode is {shown(capture.encode)}. Set it to SAEs by captured array, e.g. {_EXAMPLE}."
        )
    patterns: dict[ActivationKey, str] = {}
    for pattern, addresses in capture.encode.items():
        matches = [key for key in keys if fnmatchcase(key.name, str(pattern))]
        if not matches:
            raise ConfigError(
                f"capture.encode names {shown(pattern)}, which is none of the captured arrays: "
                f"{shown(', '.join(key.name for key in keys))}. Name one of them, or add it to capture.layers and "
                f"capture.sites."
            )
        if len({key.site for key in matches}) > 1:
            raise ConfigError(
                f"capture.encode gives {shown(pattern)}, which is {shown(', '.join(key.name for key in matches))}, one "
                f"SAE. Write a * for the layer alone, as in blocks.*.resid_post."
            )
        for key in matches:
            if key in patterns:
                raise ConfigError(
                    f"capture.encode has {shown(patterns[key])} and {shown(pattern)}, which both are {key.name}. Give "
                    f"several SAEs of an array as a list."
                )
            patterns[key] = pattern
        if len(matches) > 1:
            _require_layer(pattern, addresses)
    for key in (key for key in keys if key in patterns):
        yield from ((key, *named) for named in _named(patterns[key], capture.encode[patterns[key]], key.layer).items())


def _require_layer(pattern: str, addresses: object) -> None:
    """Raises ConfigError unless arrays of several layers have SAEs of their own."""
    first, second = (_named(pattern, addresses, layer).values() for layer in (0, 1))
    if same := [address for address in first if address in second]:
        raise ConfigError(
            f"capture.encode gives all of {shown(pattern)} the one SAE {shown(same[0])}. Write {{layer}} where its "
            f"address has the number of the layer, or name each array by itself."
        )


def _named(pattern: str, addresses: object, layer: int) -> dict[str, str]:
    """The addresses of the SAEs of a layer's array, by name, which is "" for the only one. In a list the names are
    those of the folders."""
    if isinstance(addresses, str):
        addresses = {"": addresses}
    elif isinstance(addresses, Sequence) and all(isinstance(address, str) for address in addresses):
        folders = [_of_layer(address, layer).rstrip("/").rpartition("/")[2] for address in addresses]
        names = [re.sub("[^A-Za-z0-9_-]", "_", folder)[:MAX_ENCODER_NAME] for folder in folders]
        names = names if len(names) > 1 else [""] * len(names)
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ConfigError(
                f"capture.encode has two SAEs of {shown(pattern)} in folders called {shown(repeated[0])}. Name them: "
                f"{{first: ..., second: ...}}."
            )
        addresses = dict(zip(names, addresses, strict=True))
    is_sound = isinstance(addresses, Mapping) and all(
        isinstance(address, str) and address.strip() and (name == "" or re.fullmatch(ENCODER_NAME, str(name)))
        for name, address in addresses.items()
    )
    if not is_sound or not addresses:
        raise ConfigError(
            f"capture.encode gives {shown(pattern)} the SAE {shown(addresses)}. Set it to an address, a list of "
            f"addresses, or addresses by names of letters, digits, - and _, e.g. {_EXAMPLE}."
        )
    return {str(name): _of_layer(address, layer) for name, address in addresses.items()}


def _of_layer(address: str, layer: int) -> str:
    return address.replace("{layer}", str(layer))
