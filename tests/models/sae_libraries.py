"""Writes SAEs with the libraries that train them, and the outputs of these libraries, for test_saes_of_libraries.

    python -m tests.models.sae_libraries FOLDER

Each case gets a folder with its checkpoint and reference.npz: x [n, D], features [n, F], out [n, O]. Prints the paths
to open, below FOLDER.
"""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import sae_lens
import torch
from dictionary_learning import dictionary
from dictionary_learning.trainers.batch_top_k import BatchTopKSAE
from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKSAE
from dictionary_learning.trainers.top_k import AutoEncoderTopK
from sae_lens.loading import pretrained_sae_loaders as loaders
from sae_lens.registry import get_sae_class
from sparsify import SparseCoder, SparseCoderConfig

from tests.models import sae_files, torch_saes

D, F, K, TOKENS = sae_files.D_IN, 160, 6, 1000
Coder = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # from x to features and out
Case = tuple[str, Callable[[Path], object], Callable[[Path], Coder]]  # name, writer of the checkpoint, its library


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """Sets random parameters, with which about a tenth of the features fire."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (D**-0.5 if parameter.ndim > 1 else 0.2))
            if name in ("b_enc", "b_mag", "b_gate", "encoder.bias", "gate_bias", "mag_bias"):
                parameter -= 0.8
            if "threshold" in name:
                parameter.copy_(torch.rand_like(parameter) * 0.5)
    return module.eval()


def of_sae_lens() -> Iterator[Case]:
    scalings = ("none", "constant_norm_rescale", "layer_norm")
    more = {"topk": {"k": K}}
    for name, scaling, subtracts in product(("standard", "gated", "topk", "jumprelu"), scalings, (True, False)):
        config = {"normalize_activations": scaling, "apply_b_dec_to_input": subtracts, **more.get(name, {})}
        yield sae_lens_case(f"{name}-{scaling}-{subtracts}", name, config)
    yield sae_lens_case("topk-norms", "topk", {"k": K, "rescale_acts_by_decoder_norm": True})
    transcoder = {"d_out": D + 4, "apply_b_dec_to_input": False}
    for name in ("transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"):
        yield sae_lens_case(name, name, transcoder)
    yield sae_lens_case("transcoder-layer_norm", "transcoder", transcoder | {"normalize_activations": "layer_norm"})


def sae_lens_case(name: str, architecture: str, config: dict) -> Case:
    sae_class, config_class = get_sae_class(architecture)
    sae = randomised(sae_class(config_class(d_in=D, d_sae=F, **config)))
    return f"sae_lens-{name}", lambda folder: sae.save_model(str(folder)), load_sae_lens


def sae_lens_coder(sae: sae_lens.SAE) -> Coder:
    if sae.cfg.reshape_activations == "hook_z":  # of heads, one after the other
        return lambda x: (sae.encode(x.reshape(len(x), 3, -1)), sae(x.reshape(len(x), 3, -1)).reshape(x.shape))
    return lambda x: (sae.encode(x), sae(x))


def load_sae_lens(folder: Path) -> Coder:
    return sae_lens_coder(sae_lens.SAE.load_from_disk(str(folder), dtype="float32"))


def of_sae_lens_with_other_inputs() -> Iterator[Case]:
    """SAEs of heads, which SAELens concatenates, and of a model with a centred residual stream, as TransformerLens
    makes it."""
    sae_class, config_class = get_sae_class("jumprelu")
    for name, config, change in (
        ("hook_z", {"reshape_activations": "hook_z"}, lambda x: x.reshape(len(x), 3, -1)),
        ("centred", {}, lambda x: x - x.mean(dim=1, keepdim=True)),
    ):
        kwargs = {"center_writing_weights": True} if name == "centred" else {}
        hook_name = "blocks.0.hook_resid_pre" if kwargs else "blocks.0.attn.hook_z"
        metadata = sae_lens.saes.sae.SAEMetadata(hook_name=hook_name, model_from_pretrained_kwargs=kwargs)
        sae = randomised(sae_class(config_class(d_in=D, d_sae=F, metadata=metadata, **config)))

        def load(folder: Path, change: Callable = change, name: str = name) -> Coder:
            sae = sae_lens.SAE.load_from_disk(str(folder), dtype="float32")
            mean = (lambda x: x.mean(dim=1, keepdim=True)) if name == "centred" else lambda x: 0
            return lambda x: (sae.encode(change(x)), sae(change(x)).reshape(x.shape) + mean(x))

        yield f"sae_lens-{name}", lambda folder, sae=sae: sae.save_model(str(folder)), load


def of_sae_lens_in_training() -> Iterator[Case]:
    """JumpReLU SAEs saved from training SAEs that have processed batches."""
    widths = {"matryoshka_widths": [F // 4, F // 2, F]}
    for name, config in (("BatchTopKTrainingSAE", {}), ("MatryoshkaBatchTopKTrainingSAE", widths)):
        for rescales in (True, False):
            options = {"rescale_acts_by_decoder_norm": rescales, "topk_threshold_lr": 0.3, **config}
            sae = getattr(sae_lens, name)(getattr(sae_lens, f"{name}Config")(d_in=D, d_sae=F, k=K, **options))
            randomised(sae)
            for _ in range(20):
                sae.update_topk_threshold(sae.encode(torch.randn(256, D)))
            write = lambda folder, sae=sae: sae.save_inference_model(str(folder))  # noqa: E731
            yield f"{name}-{rescales}", write, load_sae_lens


def of_sae_lens_with_a_scaling_factor() -> Iterator[Case]:
    """SAEs with a factor for activations in another file, which SAELens and this package fold into the weights."""
    for name in ("standard", "gated", "jumprelu", "topk"):
        config = {"k": K, "rescale_acts_by_decoder_norm": True} if name == "topk" else {}
        _, save, _ = sae_lens_case(name, name, config | {"normalize_activations": "expected_average_only_in"})

        def write(folder: Path, save: Callable = save) -> None:
            save(folder)
            sae_files.write_json(folder / "activation_scaler.json", {"scaling_factor": 0.37, "has_whitening": False})

        def load(folder: Path) -> Coder:
            sae = sae_lens.SAE.load_from_disk(str(folder), dtype="float32")
            sae.fold_activation_norm_scaling_factor(0.37)
            return sae_lens_coder(sae)

        yield f"sae_lens-{name}-scaling_factor", write, load


def of_older_sae_lens() -> Iterator[Case]:
    """cfg.json of versions before 6, which SAELens converts."""
    for name in ("standard", "gated", "topk", "jumprelu"):
        write = lambda folder, name=name: sae_files.write_saelens(  # noqa: E731
            folder, name, np.random.default_rng(0), is_old=True
        )
        yield f"sae_lens-3-{name}", write, load_sae_lens


def of_sparsify() -> Iterator[Case]:
    for transcode, skip in product((False, True), repeat=2):
        config = SparseCoderConfig(num_latents=F, k=K, transcode=transcode, skip_connection=skip)
        coder = randomised(SparseCoder(D, config))

        def compute(x: torch.Tensor, coder: SparseCoder = coder) -> tuple[torch.Tensor, torch.Tensor]:
            encoded = coder.encode(x)
            features = torch.zeros(len(x), F).scatter_(1, encoded.top_indices, encoded.top_acts)
            return features, coder(x).sae_out

        yield f"sparsify-{transcode}-{skip}", coder.save_to_disk, lambda _, compute=compute: compute


def of_dictionary_learning() -> Iterator[Case]:
    groups = {"group_sizes": [F // 4, F // 4, F // 2]}
    for cls, config in (
        *((dictionary.AutoEncoder, {}), (dictionary.AutoEncoderNew, {}), (dictionary.GatedAutoEncoder, {})),
        *((dictionary.JumpReluAutoEncoder, {}), (AutoEncoderTopK, {"k": K}), (BatchTopKSAE, {"k": K})),
        (MatryoshkaBatchTopKSAE, {"k": K, **groups}),
    ):
        coder = randomised(cls(D, F, **config))
        if hasattr(coder, "threshold") and coder.threshold.ndim == 0:
            coder.threshold.fill_(0.3)

        def write(folder: Path, coder: torch.nn.Module = coder, cls: type = cls) -> None:
            folder.mkdir()
            torch_saes.write(cls.__name__, folder, coder.state_dict(), torch.save, k=K, dict_size=F)

        compute = lambda x, coder=coder: (coder.encode(x), coder(x))  # noqa: E731
        yield f"dictionary_learning-{cls.__name__}", write, lambda _, compute=compute: compute


def of_torch_files() -> Iterator[Case]:
    """Files of torch.save that SAELens's loaders read from the Hub."""
    for kind, loader, repo in (
        *((kind, "dictionary_learning_sae", "canrager/lm_sae") for kind in torch_saes.CLASSES if "New" not in kind),
        ("Qwen-Scope", "qwen_scope_sae", f"Qwen/{torch_saes.FILES['Qwen-Scope'].partition('/')[0]}"),
        ("Goodfire", "get_goodfire", "Goodfire/Llama-3.1-8B-Instruct-SAE-l19"),
        ("DeepSeek-R1", "deepseek_r1_sae", "qresearch/DeepSeek-R1-Distill-Llama-8B-SAE-l19"),
        ("hook_z", "connor_rob_hook_z", "ckkissane/attn-saes-gpt2-small-all-layers"),
    ):
        suffix = "_1" if "dictionary" in loader else ""
        load = getattr(loaders, f"{loader}_huggingface_loader{suffix}")
        state = torch_saes.state_dict(kind, np.random.default_rng(0))
        path = "" if kind in torch_saes.CLASSES else torch_saes.FILES[kind].rpartition("/")[2]
        sizes = {"d_in": D, "d_sae": torch_saes.num_features(kind), "dtype": "float32"}
        options = {"repo_id": repo, "folder_name": path, "cfg_overrides": {} if kind in torch_saes.CLASSES else sizes}
        yield (
            f"{loader}-{kind}",
            lambda folder, kind=kind, state=state: torch_saes.write(kind, folder, state, torch.save),
            lambda folder, load=load, options=options: load_published(folder, load, options),
        )


def of_the_hub() -> Iterator[Case]:
    """Formats that SAELens reads from the Hub. Here its loaders read them from a folder. It ignores Llama Scope's
    sparsity_include_decoder_norm, which is the same where norms are 1."""
    sizes = {"d_in": D, "d_sae": sae_files.WIDTH, "dtype": "float32"}
    scope, scope_2, r1 = sae_files.write_gemma_scope, sae_files.write_gemma_scope_2, sae_files.write_llama_scope_r1
    pt_2, hook = "google/gemma-scope-2-1b-pt", "blocks.15.hook_resid_mid"
    tracer, wandb = sae_files.write_circuit_tracer, {"d_model": D, "d_feature": sae_files.WIDTH, "batch_size": 8}
    cases: dict[str, tuple[str, str, str, dict, Callable, dict]] = {  # loader, repo, folder, overrides, writer, options
        "gemma_scope": ("gemma_2_sae", "google/gemma-scope-2b-pt-res", "layer_1", sizes, scope, {}),
        "gemma_scope-embedding": (
            "gemma_2_sae",
            "google/gemma-scope-2b-pt-res",
            "embedding/width_4k",
            sizes,
            scope,
            {},
        ),
        "gemma_scope-transcoder": (
            *("gemma_2_transcoder", "google/gemma-scope-2b-pt-transcoders", "layer_1/width_16k"),
            *(sizes | {"d_out": D}, scope, {}),
        ),
        "gemma_scope_2": ("gemma_3_sae", pt_2, "resid_post/layer_12", {}, scope_2, {}),
        "gemma_scope_2-transcoder": ("gemma_3_sae", pt_2, "transcoder/layer_12", {}, scope_2, {"kind": "transcoder"}),
        "llama_scope": (
            *("llama_scope_sae", "fnlp/Llama3_1-8B-Base-LXR-8x", "L24R-8x", {"dtype": "float32"}),
            *(sae_files.write_llama_scope, {}),
        ),
        "llama_scope_r1": (
            *("llama_scope_r1_distill_sae", "fnlp/Llama-Scope-R1-Distill", "L15R"),
            *({"d_sae": sae_files.WIDTH}, r1, {"hook_point_out": hook, "sparsity_include_decoder_norm": False}),
        ),
        "mwhanna": ("mwhanna_transcoder", "mwhanna/tiny", "layer_7.safetensors", {}, tracer, {"d_out": D}),
        "mntss": ("mntss_clt_layer", "mntss/tiny", "7", {}, sae_files.write_cross_layer, {}),
    }
    for name, (loader, repo, path, overrides, write, options) in cases.items():

        def save(folder: Path, path: str = path, write: Callable = write, options: dict = options) -> object:
            folder = folder / path if "embedding" in path else folder
            written = write(folder, np.random.default_rng(0), **options)
            sae_files.write_json(folder / "wandb-config.yaml", {key: {"value": value} for key, value in wandb.items()})
            return written

        load = getattr(loaders, f"{loader}_huggingface_loader")
        arguments = {"repo_id": repo, "folder_name": path, "cfg_overrides": overrides}
        yield name, save, lambda folder, load=load, arguments=arguments: load_published(folder, load, arguments)


def load_published(folder: Path, loader: Callable, options: dict) -> Coder:
    """Calls one of SAELens' loaders, which gets files of a local folder instead of one on the Hub."""
    is_embedding = "embedding" in options["folder_name"]

    def download(repo_id: str, filename: str, subfolder: str = "", **_: object) -> str:
        path = f"{subfolder}/{filename}".removeprefix("/")
        path = path if is_embedding else path.removeprefix(f"{options['folder_name']}/")
        return str(next(folder.rglob(path)))

    def shapes(repo_id: str, filename: str) -> dict[str, list[int]]:
        weights = loaders.load_safetensors_weights(download(repo_id, filename))
        return {name: list(values.shape) for name, values in weights.items()}

    with mock.patch.multiple(loaders, hf_hub_download=download, get_safetensors_tensor_shapes=shapes):
        config, state, _ = loader(device="cpu", force_download=False, **options)
    config = loaders.handle_config_defaulting(config)
    sae_class, config_class = get_sae_class(config["architecture"])
    sae = sae_class(config_class.from_dict(config))
    sae.load_state_dict({key: values.float() for key, values in state.items()})
    if config["normalize_activations"] == "expected_average_only_in":  # SAELens' registry has the factor
        sae.fold_activation_norm_scaling_factor(D**0.5 / 5.125)
    if is_embedding:  # SAELens scales W_dec, but not b_dec
        sae.b_dec.data *= D**0.5
    return sae_lens_coder(sae)


CASES = (
    *(of_sae_lens, of_sae_lens_with_other_inputs, of_sae_lens_in_training, of_sae_lens_with_a_scaling_factor),
    *(of_older_sae_lens, of_sparsify, of_dictionary_learning, of_torch_files, of_the_hub),
)


def main(root: Path) -> None:
    torch.manual_seed(0)
    x, names = torch.randn(TOKENS, D) * 2, []
    for name, write, load in (case for cases in CASES for case in cases()):
        written = write(root / name)
        with torch.no_grad():
            features, out = load(root / name)(x)
        np.savez(root / name / "reference.npz", x=x.numpy(), features=features.numpy(), out=out.numpy())
        path = written.folder if isinstance(written, sae_files.Written) else written
        names.append(str(path.relative_to(root)) if isinstance(path, Path) else name)
    print(json.dumps(names))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
