"""Gemma Scope (https://huggingface.co/google/gemma-scope): params.npz; and Gemma Scope 2
(https://huggingface.co/google/gemma-scope-2): params.safetensors, mostly with a config.json.

All are JumpReLU SAEs or transcoders. b_dec is not subtracted from the input. What the files do not say is in the
repository's and the folders' names: google/gemma-scope-2b-pt-res/layer_12/width_16k/average_l0_82,
google/gemma-scope-2-1b-pt/resid_post_all/layer_10_width_16k_l0_small.
"""

import re
from dataclasses import replace

import numpy as np

from pipeline.models.checkpoints.checkpoint_files import Files, read_config
from pipeline.models.checkpoints.safetensors_file import SafetensorsFile, TensorFile
from pipeline.models.checkpoints.zip_archive import NpzFile
from pipeline.models.sae.autoencoder import (
    SAE,
    Sources,
    TensorSource,
    axis_sizes,
    check_tensors,
    coder_sources,
    divide_by,
    multiply_by,
)
from pipeline.models.sae.spec import FeatureActivation, SAEContext, SAESpec, hook_of_module

WEIGHTS = "params.npz"
CONFIG_2, WEIGHTS_2 = "config.json", "params.safetensors"
_HARMLESS = ("l0", "hf_hook_point_out")
_REPOSITORY = re.compile(r"gemma-scope-(\d+b)-(pt|it)-(res|att|mlp|transcoders)\b")
_EMBEDDING = re.compile(r"(/gemma-scope-[^/]+/embedding|/embedding/width_[^/]+)(/|$)")
_MODEL_2 = re.compile(r"gemma-(?:v3|3|scope-2)-(\d+[mb](?:-it|-pt)?)\b")  # in repositories' names, and in config.json
CROSS_LAYER = r"params_layer_(\d+)\.safetensors"
_HOOKS = {
    "res": "hook_resid_post",
    "att": "attn.hook_z",
    "mlp": "hook_mlp_out",
    "transcoders": "ln2.hook_normalized",  # the norm's weights were folded into the MLP
}
_HOOKS_2 = {  # by the beginning of a folder's name
    "resid_post": "hook_resid_post",
    "attn_out": "attn.hook_z",
    "mlp_out": "hook_mlp_out",
    "transcoder": "mlp.hook_in",
}


def read_sae(files: Files) -> SAE:
    """Reads an SAE or transcoder. Which of them it is, the file does not say, but the repository's name does."""
    tensors = NpzFile(files.open(WEIGHTS))
    sizes = axis_sizes(tensors, {"b_enc": "F", "b_dec": "D"})
    repository, layer = _REPOSITORY.search(files.where), re.search(r"/layer_(\d+)(/|$)", files.where)
    hook_name, kind, context = None, None, SAEContext()
    if repository:
        size, tuning, kind = repository.groups()
        hook_name = layer and f"blocks.{layer[1]}.{_HOOKS[kind]}"
        context = _context(f"google/gemma-2-{size}{'-it' if tuning == 'it' else ''}")
    sources = _sources(tensors)
    if _EMBEDDING.search(files.where):  # of its matrix's rows, sqrt(d) times as small as the site's values
        hook_name, factor = "hook_embed", float(np.sqrt(sizes["D"]))
        sources["w_enc"] = replace(sources["w_enc"], change=divide_by(factor))
        for name in ("w_dec", "b_out"):
            sources[name] = replace(sources[name], change=multiply_by(factor))
    is_transcoder = None if kind is None else kind == "transcoders"
    spec = SAESpec(sizes["D"], sizes["F"], sizes["D"], FeatureActivation.jumprelu, is_transcoder=is_transcoder)
    return check_tensors(SAE("gemma_scope", spec, hook_name, tensors, sources, context))


def read_sae_2(files: Files) -> SAE:
    """Reads an SAE or transcoder, with or without a skip connection."""
    tensors = SafetensorsFile(files.open(WEIGHTS_2))
    model_name = files.where
    place = re.search(r"/(resid_post|attn_out|mlp_out|transcoder)(?:_all)?/layer_(\d+)_", f"{files.where}/")
    hook_name = place and f"blocks.{place[2]}.{_HOOKS_2[place[1]]}"
    is_transcoder = place and place[1] == "transcoder"
    has_skip = "affine_skip_connection" in tensors.shapes
    sizes = axis_sizes(tensors, {"b_enc": "F", "w_enc": "DF", "b_dec": "O"})
    width = sizes["F"]
    if files.has(CONFIG_2):
        config = read_config(files, CONFIG_2, "SAE")
        config.choice("architecture", ["jump_relu"])
        kind = config.choice("type", ["sae", "transcoder"], default="transcoder" if is_transcoder else "sae")
        is_transcoder, has_skip = kind == "transcoder", config.flag("affine_connection", default=has_skip)
        width = config.positive_int("width", default=width)
        hook_name = hook_of_module(config.text("hf_hook_point_in")) or hook_name
        model_name = config.text("model_name") or model_name
        config.finish(_HARMLESS)
    spec = SAESpec(sizes["D"], width, sizes["O"], FeatureActivation.jumprelu, is_transcoder=is_transcoder)
    sources = _sources(tensors)
    if has_skip:
        sources["w_skip"] = TensorSource("affine_skip_connection", "DO")
    return check_tensors(SAE("gemma_scope_2", spec, hook_name, tensors, sources, _context_2(model_name)))


def read_cross_layer(files: Files, name: str) -> SAE:
    """Reads the encoder of one layer of a cross-layer transcoder. Its features write to this layer and all later ones:
    there is no decoder here."""
    tensors = SafetensorsFile(files.open(name))
    sizes = axis_sizes(tensors, {"b_enc": "F", "w_enc": "DF"})
    spec = SAESpec(sizes["D"], sizes["F"], sizes["D"], FeatureActivation.jumprelu, is_transcoder=True)
    sources = {key: source for key, source in _sources(tensors).items() if key in ("w_enc", "b_enc", "threshold")}
    hook_name = f"blocks.{re.fullmatch(CROSS_LAYER, name)[1]}.mlp.hook_in"
    sae = SAE("gemma_scope_2", spec, hook_name, tensors, sources, _context_2(files.where))
    return check_tensors(sae, ("w_dec", "b_dec", "affine_skip_connection"))


def _context_2(named: str) -> SAEContext:
    """named: where the model's name may be."""
    model = _MODEL_2.search(named)
    return _context(f"google/gemma-3-{model[1]}".replace("270m-pt", "270m")) if model else SAEContext()


def _context(model_name: str) -> SAEContext:
    return SAEContext(model_name, context_size=1024, prepend_bos=True)


def _sources(tensors: TensorFile) -> Sources:
    encoder, decoder = ("w_enc", "w_dec") if "w_enc" in tensors.shapes else ("W_enc", "W_dec")
    return coder_sources("DF FO", encoder, "b_enc", decoder, "b_dec") | {"threshold": TensorSource("threshold", "F")}
