"""Writes SAEs with the libraries that train them, and the outputs of these libraries, for test_saes_of_libraries.

    python tests/models/sae_libraries.py FOLDER

Each case gets a folder with its checkpoint and reference.npz: x [n, D], features [n, F], out [n, O]. Prints the names.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import sae_lens
import torch
from dictionary_learning import dictionary
from dictionary_learning.trainers.batch_top_k import BatchTopKSAE
from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKSAE
from dictionary_learning.trainers.top_k import AutoEncoderTopK
from sparsify import SparseCoder, SparseCoderConfig

D, F, K, TOKENS = 24, 160, 12, 1000
CONVERT = Path(__file__).resolve().parents[2] / "scripts/convert_sae.py"
Coder = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # from x to features and out
Case = tuple[str, Callable[[Path], object], Coder]  # name, writer of the checkpoint, forward pass


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
    more = {"TopKSAE": {"k": K}}
    for name, scaling, subtracts in product(
        ("StandardSAE", "GatedSAE", "TopKSAE", "JumpReLUSAE"), scalings, (True, False)
    ):
        config = {"normalize_activations": scaling, "apply_b_dec_to_input": subtracts, **more.get(name, {})}
        yield sae_lens_case(f"{name}-{scaling}-{subtracts}", name, config)
    yield sae_lens_case("TopKSAE-norms", "TopKSAE", {"k": K, "rescale_acts_by_decoder_norm": True})
    for name in ("Transcoder", "SkipTranscoder", "JumpReLUTranscoder", "JumpReLUSkipTranscoder"):
        yield sae_lens_case(name, name, {"d_out": D + 4, "apply_b_dec_to_input": False})
    widths = {"matryoshka_widths": [F // 4, F // 2, F]}
    for name, config in (("BatchTopKTrainingSAE", {}), ("MatryoshkaBatchTopKTrainingSAE", widths)):
        config = getattr(sae_lens, f"{name}Config")(d_in=D, d_sae=F, k=K, **config)
        sae = randomised(getattr(sae_lens, name)(config))
        sae.topk_threshold.fill_(0.3)
        yield name, lambda folder, sae=sae: sae.save_inference_model(str(folder)), None


def sae_lens_case(name: str, class_name: str, config: dict) -> Case:
    sae = getattr(sae_lens, class_name)(getattr(sae_lens, f"{class_name}Config")(d_in=D, d_sae=F, **config))
    randomised(sae)
    return f"sae_lens-{name}", lambda folder: sae.save_model(str(folder)), None


def load_sae_lens(folder: Path) -> Coder:
    sae = sae_lens.SAE.load_from_disk(str(folder))
    return lambda x: (sae.encode(x), sae(x))


def of_sparsify() -> Iterator[Case]:
    for transcode, skip in ((False, False), (True, False), (True, True)):
        config = SparseCoderConfig(num_latents=F, k=K, transcode=transcode, skip_connection=skip)
        coder = randomised(SparseCoder(D, config))

        def compute(x: torch.Tensor, coder: SparseCoder = coder) -> tuple[torch.Tensor, torch.Tensor]:
            encoded = coder.encode(x)
            features = torch.zeros(len(x), F).scatter_(1, encoded.top_indices, encoded.top_acts)
            return features, coder(x).sae_out

        yield f"sparsify-{transcode}-{skip}", coder.save_to_disk, compute


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

        yield f"dictionary_learning-{cls.__name__}", write, lambda x, coder=coder: (coder.encode(x), coder(x))


def main(root: Path) -> None:
    torch.manual_seed(0)
    x, names = torch.randn(TOKENS, D) * 2, []
    for name, write, compute in (*of_sae_lens(), *of_sparsify(), *of_dictionary_learning()):
        write(root / name)
        with torch.no_grad():
            features, out = (compute or load_sae_lens(root / name))(x)
        np.savez(root / name / "reference.npz", x=x.numpy(), features=features.numpy(), out=out.numpy())
        names.append(name)
    print(json.dumps(names))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
