"""Writes SAEs with the libraries that train them, and the outputs of these libraries, for test_saes_of_libraries.

    python -m tests.models.sae_libraries FOLDER

Each case gets a folder with its checkpoint and reference.npz: x [n, D], features [n, F], out [n, O]. Prints the names.
"""

import json
import subprocess
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

from tests.models import sae_files

D, F, K, TOKENS = sae_files.D_IN, 160, 6, 1000
CONVERT = Path(__file__).resolve().parents[2] / "scripts/convert_sae.py"
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
    return lambda x: (sae.encode(x), sae(x))


def load_sae_lens(folder: Path) -> Coder:
    return sae_lens_coder(sae_lens.SAE.load_from_disk(str(folder), dtype="float32"))


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
            pickled = folder.with_name(f"{folder.name}-pickled")
            pickled.mkdir()
            torch.save(coder.state_dict(), pickled / "ae.pt")
            config = {"dict_class": cls.__name__, "activation_dim": D, "dict_size": F}
            (pickled / "config.json").write_text(json.dumps({"trainer": config}))
            subprocess.run([sys.executable, str(CONVERT), str(pickled), str(folder)], check=True, stdout=sys.stderr)

        compute = lambda x, coder=coder: (coder.encode(x), coder(x))  # noqa: E731
        yield f"dictionary_learning-{cls.__name__}", write, lambda _, compute=compute: compute


def of_the_hub() -> Iterator[Case]:
    """Formats that SAELens reads from the Hub. Here its loaders read them from a folder."""
    sizes = {"d_in": D, "d_sae": sae_files.WIDTH, "dtype": "float32"}
    scope, scope_2 = sae_files.write_gemma_scope, sae_files.write_gemma_scope_2
    for name, write, loader, repo, path, overrides in (
        ("gemma_scope", scope, "gemma_2_sae", "google/gemma-scope-2b-pt-res", "layer_1", sizes),
        (
            *("gemma_scope-transcoder", scope, "gemma_2_transcoder", "google/gemma-scope-2b-pt-transcoders"),
            *("layer_1/width_16k", sizes | {"d_out": D}),
        ),
        ("gemma_scope_2", scope_2, "gemma_3_sae", "google/gemma-scope-2-1b-pt", "resid_post/layer_12", {}),
        (
            *("gemma_scope_2-transcoder", lambda folder, rng: scope_2(folder, rng, kind="transcoder"), "gemma_3_sae"),
            *("google/gemma-scope-2-1b-pt", "transcoder/layer_12", {}),
        ),
        (
            *("llama_scope", sae_files.write_llama_scope, "llama_scope_sae", "fnlp/Llama3_1-8B-Base-LXR-8x"),
            *("L24R-8x", {"dtype": "float32"}),
        ),
    ):
        load = getattr(loaders, f"{loader}_huggingface_loader")
        options = {"repo_id": repo, "folder_name": path, "cfg_overrides": overrides}
        yield (
            name,
            lambda folder, write=write: write(folder, np.random.default_rng(0)),
            lambda folder, load=load, options=options: load_published(folder, load, options),
        )


def load_published(folder: Path, loader: Callable, options: dict) -> Coder:
    """Calls one of SAELens' loaders, which gets files of a local folder instead of one on the Hub."""

    def download(repo_id: str, filename: str, subfolder: str = "", **_: object) -> str:
        path = f"{subfolder}/{filename}".removeprefix("/").removeprefix(options["folder_name"])
        return str(folder / path.removeprefix("/"))

    def shapes(repo_id: str, filename: str) -> dict[str, list[int]]:
        weights = loaders.load_safetensors_weights(download(repo_id, filename))
        return {name: list(values.shape) for name, values in weights.items()}

    with mock.patch.multiple(loaders, hf_hub_download=download, get_safetensors_tensor_shapes=shapes):
        config, state, _ = loader(device="cpu", force_download=False, **options)
    config = loaders.handle_config_defaulting(config)
    sae_class, config_class = get_sae_class(config["architecture"])
    sae = sae_class(config_class.from_dict(config))
    sae.load_state_dict({key: values.float() for key, values in state.items()})
    if (file := folder / "hyperparams.json").exists():  # of Llama Scope, whose inputs are scaled
        norms = json.loads(file.read_text())["dataset_average_activation_norm"]
        sae.fold_activation_norm_scaling_factor(D**0.5 / norms["in"])
    return sae_lens_coder(sae)


CASES = (
    *(of_sae_lens, of_sae_lens_in_training, of_sae_lens_with_a_scaling_factor, of_older_sae_lens),
    *(of_sparsify, of_dictionary_learning, of_the_hub),
)


def main(root: Path) -> None:
    torch.manual_seed(0)
    x, names = torch.randn(TOKENS, D) * 2, []
    for name, write, load in (case for cases in CASES for case in cases()):
        write(root / name)
        with torch.no_grad():
            features, out = load(root / name)(x)
        np.savez(root / name / "reference.npz", x=x.numpy(), features=features.numpy(), out=out.numpy())
        names.append(name)
    print(json.dumps(names))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
