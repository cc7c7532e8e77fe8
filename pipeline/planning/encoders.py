"""The SAEs of `capture.encode`: what each encodes, and what is stored of its features."""

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
from pipeline.core.sites import ActivationKey
from pipeline.models.sae.loading import SAE, open_sae
from pipeline.models.sae.params import SAEParams, encoder_arrays, load_params
from pipeline.planning.capture import captured_keys
from pipeline.planning.model_facts import ModelFacts
from pipeline.step.spec import EncoderSpec
from pipeline.store.format.keys import ENCODER_NAME, features_name

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
        return {
            "features": spec.name,
            "array": spec.key.name,
            "width": spec.sae.width,
            "top": spec.top,
            "dtype": spec.dtype,
            **threshold,
            "activation": str(spec.sae.activation),
            "format": sae.format,
            "sha256": sae.identity,
        }


def open_encoders(capture: CaptureConfig, model: ModelFacts) -> tuple[Encoder, ...]:
    """Opens the SAEs that `capture` names, in the order of the arrays that they encode. Reads no weights.

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
        sae = open_sae(address)
        width = model.width(key.site)
        if sae.spec.d_in != width:
            raise ConfigError(
                f"capture.encode: the SAE {address} reads activations of {sae.spec.d_in} numbers, but {key.name} has "
                f"{width}. Give the SAE of this model, layer and site."
            )
        spec = EncoderSpec(
            key=key,
            name=features_name(key.name, name),
            sae=sae.spec,
            arrays=encoder_arrays(sae.shapes),
            top=capture.encode_top,
            dtype=str(capture.encode_dtype),
            threshold=capture.encode_threshold,
        )
        encoders.append(Encoder(spec, sae))
    return tuple(encoders)


def _requests(capture: CaptureConfig, keys: Sequence[ActivationKey]) -> Iterator[tuple[ActivationKey, str, str]]:
    """Of each SAE the array that it encodes, its name among the array's SAEs ("" for the only one), and its address."""
    if not isinstance(capture.encode, Mapping):
        raise ConfigError(
            f"capture.encode is {shown(capture.encode)}. Set it to SAEs by captured array, e.g. {_EXAMPLE}."
        )
    patterns: dict[ActivationKey, str] = {}
    for pattern in capture.encode:
        matches = [key for key in keys if fnmatchcase(key.name, str(pattern))]
        if not matches:
            raise ConfigError(
                f"capture.encode names {shown(pattern)}, which is none of the captured arrays: "
                f"{shown(', '.join(key.name for key in keys))}. Name one of them, or add it to capture.layers and "
                f"capture.sites."
            )
        for key in matches:
            if key in patterns:
                raise ConfigError(
                    f"capture.encode has {shown(patterns[key])} and {shown(pattern)}, which both are {key.name}. Give "
                    f"several SAEs of an array as a list."
                )
            patterns[key] = pattern
            if len(matches) > 1:
                _require_layer(pattern, capture.encode[pattern])
    for key in (key for key in keys if key in patterns):
        for name, address in _named(patterns[key], capture.encode[patterns[key]]).items():
            yield key, name, address.replace("{layer}", str(key.layer))


def _require_layer(pattern: str, addresses: object) -> None:
    """Raises ConfigError unless arrays of several layers have SAEs of their own."""
    if without := [address for address in _named(pattern, addresses).values() if "{layer}" not in address]:
        raise ConfigError(
            f"capture.encode gives all of {shown(pattern)} the one SAE {shown(without[0])}. Write {{layer}} where its "
            f"address has the number of the layer, or name each array by itself."
        )


def _named(pattern: str, addresses: object) -> dict[str, str]:
    """The addresses of an array's SAEs by name, which is "" for the only one. In a list the names are those of the
    folders."""
    if isinstance(addresses, str):
        addresses = {"": addresses}
    elif isinstance(addresses, Sequence) and all(isinstance(address, str) for address in addresses):
        names = [re.sub("[^A-Za-z0-9_-]", "_", address.rstrip("/").rpartition("/")[2]) for address in addresses]
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
    return {str(name): address for name, address in addresses.items()}
