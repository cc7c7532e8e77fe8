"""Compares SAEs saved by the libraries that define the formats: encoded by these libraries and by this package.

Run it by hand, in an environment with these libraries and the imports of `pipeline.models.sae`:

    python -m venv /tmp/references
    /tmp/references/bin/pip install sae-lens eai-sparsify dictionary-learning ml_dtypes fsspec
    SPARSIFY_DISABLE_TRITON=1 PYTHONPATH=. /tmp/references/bin/python -m tests.models.sae_references

Prints a line for each case: tokens whose active features differ, and the largest differences of values and of
reconstructions, relative to the largest value. Exits with 1 if one is not below 1e-5, or active features differ.
"""

import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from dictionary_learning.dictionary import AutoEncoder, AutoEncoderNew, GatedAutoEncoder, JumpReluAutoEncoder
from dictionary_learning.trainers.batch_top_k import BatchTopKSAE
from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKSAE
from dictionary_learning.trainers.top_k import AutoEncoderTopK
from sae_lens import SAE as LensSAE
from sae_lens import BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig
from sae_lens.loading import pretrained_sae_loaders as loaders
from sae_lens.registry import get_sae_class
from sparsify import SparseCoder, SparseCoderConfig

from pipeline.models.sae.loading import open_sae
from tests.models import sae_files

D_IN, WIDTH, D_OUT, K, NUM_TOKENS, LIMIT = 64, 512, 48, 16, 1000, 1e-5
CONVERT = Path(__file__).parents[2] / "scripts" / "convert_sae.py"
Reference = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Case = tuple[str, Path, Reference]


def randomised(module: torch.nn.Module, seed: int) -> None:
    """Sets random parameters, with positive thresholds."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        scale = D_IN**-0.5 if parameter.ndim == 2 else 0.3
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * scale
        if name == "threshold":
            parameter.data.abs_()


def lens_forward(sae: LensSAE) -> Reference:
    return lambda x: (sae.encode(x), sae(x))


def saelens_cases(root: Path) -> Iterator[Case]:
    transcoders = ("transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder")
    scalings = ("none", "constant_norm_rescale", "layer_norm")
    options = [
        *(
            (name, {"apply_b_dec_to_input": flag})
            for name in ("standard", "gated", "jumprelu")
            for flag in (True, False)
        ),
        *(("topk", {"k": K, "rescale_acts_by_decoder_norm": flag}) for flag in (True, False)),
        *(("standard", {"normalize_activations": scaling}) for scaling in scalings[1:]),
        *(("topk", {"k": K, "normalize_activations": scaling}) for scaling in scalings[1:]),
        *((name, {"d_out": D_OUT, "apply_b_dec_to_input": False}) for name in transcoders),
        ("transcoder", {"d_out": D_OUT, "apply_b_dec_to_input": False, "normalize_activations": "layer_norm"}),
    ]
    for number, (architecture, config) in enumerate(options):
        sae_class, config_class = get_sae_class(architecture)
        sae = sae_class(config_class(d_in=D_IN, d_sae=WIDTH, **config))
        randomised(sae, number)
        folder = root / f"saelens-{number}"
        sae.save_model(folder)
        said = ", ".join(f"{key}={value}" for key, value in config.items() if key != "d_out")
        yield f"saelens {architecture} {said}", folder, lens_forward(LensSAE.load_from_disk(folder, dtype="float32"))


def batch_topk_cases(root: Path) -> Iterator[Case]:
    """JumpReLU SAEs saved from a training SAE that has processed batches."""
    for rescales in (True, False):
        options = {"k": K, "rescale_acts_by_decoder_norm": rescales, "topk_threshold_lr": 0.3}
        sae = BatchTopKTrainingSAE(BatchTopKTrainingSAEConfig(d_in=D_IN, d_sae=WIDTH, **options))
        randomised(sae, 100)
        for _ in range(20):
            sae.update_topk_threshold(sae.encode(torch.randn(256, D_IN)))
        folder = root / f"batchtopk-{rescales}"
        sae.save_inference_model(folder)
        reference = lens_forward(LensSAE.load_from_disk(folder, dtype="float32"))
        yield f"saelens batchtopk rescale_acts_by_decoder_norm={rescales}", folder, reference


def folded_cases(root: Path) -> Iterator[Case]:
    """SAEs with a scaling factor for activations, which SAELens and this package fold (activation_scaler.json)."""
    for number, (architecture, config) in enumerate(
        (("standard", {}), ("gated", {}), ("jumprelu", {}), ("topk", {"k": K, "rescale_acts_by_decoder_norm": True}))
    ):
        sae_class, config_class = get_sae_class(architecture)
        sae = sae_class(
            config_class(d_in=D_IN, d_sae=WIDTH, normalize_activations="expected_average_only_in", **config)
        )
        randomised(sae, 200 + number)
        folder = root / f"folded-{number}"
        sae.save_model(folder)
        sae_files.write_json(folder / "activation_scaler.json", {"scaling_factor": 0.37, "has_whitening": False})
        reference = LensSAE.load_from_disk(folder, dtype="float32")
        reference.fold_activation_norm_scaling_factor(0.37)
        yield f"saelens {architecture} expected_average_only_in", folder, lens_forward(reference)


def old_saelens_cases(root: Path, rng: np.random.Generator) -> Iterator[Case]:
    """cfg.json of versions before 6, which SAELens converts."""
    for architecture in ("standard", "gated", "topk", "jumprelu"):
        folder = root / f"old-{architecture}"
        sae_files.write_saelens(folder, architecture, rng, is_old=True)
        yield f"saelens 3 {architecture}", folder, lens_forward(LensSAE.load_from_disk(folder, dtype="float32"))


def sparsify_cases(root: Path) -> Iterator[Case]:
    for number, (transcode, skip) in enumerate(((False, False), (False, True), (True, False), (True, True))):
        config = SparseCoderConfig(num_latents=WIDTH, k=K, transcode=transcode, skip_connection=skip)
        coder = SparseCoder(D_IN, config)
        randomised(coder, 300 + number)
        folder = root / f"sparsify-{number}"
        coder.save_to_disk(folder)
        loaded = SparseCoder.load_from_disk(folder)

        def forward(x: torch.Tensor, coder: SparseCoder = loaded) -> tuple[torch.Tensor, torch.Tensor]:
            top_acts, top_indices, _ = coder.encode(x)
            values = torch.zeros(len(x), coder.num_latents).scatter(1, top_indices, top_acts)
            return values, coder(x).sae_out

        yield f"sparsify transcode={transcode}, skip_connection={skip}", folder, forward


def converted_cases(root: Path) -> Iterator[Case]:
    """SAEs of dictionary_learning, by scripts/convert_sae.py; the reference is `encode` and `decode` of their class."""
    classes = {
        "AutoEncoder": AutoEncoder(D_IN, WIDTH),
        "AutoEncoderNew": AutoEncoderNew(D_IN, WIDTH),
        "AutoEncoderTopK": AutoEncoderTopK(D_IN, WIDTH, K),
        "BatchTopKSAE": BatchTopKSAE(D_IN, WIDTH, K),
        "MatryoshkaBatchTopKSAE": MatryoshkaBatchTopKSAE(D_IN, WIDTH, K, [100, WIDTH - 100]),
        "JumpReluAutoEncoder": JumpReluAutoEncoder(D_IN, WIDTH),
        "GatedAutoEncoder": GatedAutoEncoder(D_IN, WIDTH),
    }
    for number, (name, coder) in enumerate(classes.items()):
        randomised(coder, 400 + number)
        if "Batch" in name:
            coder.threshold.fill_(1.5)
        folder = root / f"dictionary-{name}"
        sae_files.write_json(folder / "config.json", {"trainer": {"dict_class": name, "k": K}})
        torch.save(coder.state_dict(), folder / "ae.pt")
        subprocess.run([sys.executable, CONVERT, folder, folder / "out"], check=True, stdout=subprocess.DEVNULL)
        forward = lambda x, coder=coder: (coder.encode(x), coder.decode(coder.encode(x)))  # noqa: E731
        yield f"dictionary_learning {name}, converted", folder / "out", forward


def published_cases(root: Path, rng: np.random.Generator) -> Iterator[Case]:
    """Formats that SAELens reads from the Hub. Here its loaders read them from a folder."""
    gemma, llama = "google/gemma-scope-2b-pt-res", "fnlp/Llama3_1-8B-Base-LXR-8x"
    sizes = {"d_in": sae_files.D_IN, "d_sae": sae_files.WIDTH, "dtype": "float32"}
    local = {"repo_id": None, "device": "cpu", "force_download": False}
    writers = {
        "gemma_scope": (sae_files.write_gemma_scope, loaders.gemma_2_sae_huggingface_loader, gemma, "layer_1", sizes),
        "gemma_scope transcoder": (
            sae_files.write_gemma_scope,
            loaders.gemma_2_transcoder_huggingface_loader,
            "google/gemma-scope-2b-pt-transcoders",
            "layer_1/width_16k",
            sizes | {"d_out": sae_files.D_IN},
        ),
        "gemma_scope_2": (
            sae_files.write_gemma_scope_2,
            loaders.gemma_3_sae_huggingface_loader,
            "google/gemma-scope-2-1b-pt",
            "resid_post/layer_12",
            {},
        ),
        "gemma_scope_2 transcoder": (
            lambda folder, rng: sae_files.write_gemma_scope_2(folder, rng, kind="transcoder"),
            loaders.gemma_3_sae_huggingface_loader,
            "google/gemma-scope-2-1b-pt",
            "transcoder/layer_12",
            {},
        ),
        "llama_scope": (
            sae_files.write_llama_scope,
            loaders.llama_scope_sae_huggingface_loader,
            llama,
            "L24R-8x",
            {"dtype": "float32"},
        ),
    }
    for number, (name, (write, loader, repo, folder_name, overrides)) in enumerate(writers.items()):
        written = write(root / f"published-{number}" / folder_name, rng)
        config, state = read_from_folder(loader, written.folder, folder_name, local | {"repo_id": repo}, overrides)
        config = loaders.handle_config_defaulting(config)
        sae_class, config_class = get_sae_class(config["architecture"])
        sae = sae_class(config_class.from_dict(config))
        sae.load_state_dict({key: values.float() for key, values in state.items()})
        if name == "llama_scope":
            norms = written.config["dataset_average_activation_norm"]
            sae.fold_activation_norm_scaling_factor(sae_files.D_IN**0.5 / norms["in"])
        yield name, written.folder, lens_forward(sae)


def read_from_folder(
    loader: Callable, folder: Path, folder_name: str, options: dict[str, object], overrides: dict[str, object]
) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """What one of SAELens' loaders returns for a local folder instead of one on the Hub."""

    def download(repo_id: str, filename: str, subfolder: str = "", **_: object) -> str:
        return str(folder / f"{subfolder}/{filename}".removeprefix("/").removeprefix(folder_name).removeprefix("/"))

    def shapes(repo_id: str, filename: str) -> dict[str, list[int]]:
        weights = loaders.load_safetensors_weights(download(repo_id, filename))
        return {name: list(values.shape) for name, values in weights.items()}

    downloaded, fetched = loaders.hf_hub_download, loaders.get_safetensors_tensor_shapes
    loaders.hf_hub_download, loaders.get_safetensors_tensor_shapes = download, shapes
    try:
        config, state, _ = loader(folder_name=folder_name, cfg_overrides=overrides, **options)
    finally:
        loaders.hf_hub_download, loaders.get_safetensors_tensor_shapes = downloaded, fetched
    return config, state


def compared(folder: Path, reference: Reference, rng: np.random.Generator) -> tuple[int, float, float, float]:
    """Tokens with different active features, differences of values and reconstructions, active features per token."""
    sae = open_sae(str(folder))
    x = sae_files.normal(rng, NUM_TOKENS, sae.spec.d_in, scale=2.0)
    with torch.no_grad():
        expected, expected_out = (values.numpy() for values in reference(torch.from_numpy(x)))
    values = sae_files.encode_dense(sae, x)
    out = sae_files.decode_dense(sae, values, x)
    num_other = int(((values > 0) != (expected > 0)).any(axis=-1).sum())
    value_error = np.abs(values - expected).max() / np.abs(expected).max()
    out_error = np.abs(out - expected_out).max() / np.abs(expected_out).max()
    return num_other, float(value_error), float(out_error), float((expected > 0).sum(axis=-1).mean())


def main() -> int:
    warnings.simplefilter("ignore")
    rng, is_wrong = np.random.default_rng(0), False
    print(f"{'case':<75} {'other sets':>10} {'values':>9} {'out':>9} {'active':>7}")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for case, folder, reference in (
            *saelens_cases(root),
            *batch_topk_cases(root),
            *folded_cases(root),
            *old_saelens_cases(root, rng),
            *sparsify_cases(root),
            *converted_cases(root),
            *published_cases(root, rng),
        ):
            num_other, value_error, out_error, num_active = compared(folder, reference, rng)
            print(f"{case:<75} {num_other:>10} {value_error:>9.1e} {out_error:>9.1e} {num_active:>7.1f}")
            is_wrong |= num_other > 0 or not value_error < LIMIT or not out_error < LIMIT
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
