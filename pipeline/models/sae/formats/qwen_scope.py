"""Qwen-Scope (https://huggingface.co/collections/Qwen/qwen-scope): layerN.sae.pt, all layers in one folder. The model,
the width in units of 1,024 and k are in the repository's name, such as SAE-Res-Qwen3-8B-Base-W64K-L0_50."""

import re

from pipeline.core.errors import CheckpointError
from pipeline.models.checkpoints.checkpoint_files import Files
from pipeline.models.checkpoints.torch_file import TorchFile
from pipeline.models.sae.autoencoder import SAE, axis_sizes, check_tensors, coder_sources
from pipeline.models.sae.spec import FeatureActivation, SAEContext, SAESpec

WEIGHTS = r"layer(\d+)\.sae\.pt"
_REPOSITORY = re.compile(r"SAE-Res-(.+)-W(\d+)K-L0_(\d+)")


def read_sae(files: Files, name: str) -> SAE:
    """Reads a TopK SAE of the residual stream. b_dec is not subtracted from the input."""
    repository = _REPOSITORY.search(files.where)
    if repository is None:
        raise CheckpointError(
            f"{files.where}: expected a folder with the name of Qwen-Scope's repository, such as "
            f"SAE-Res-Qwen3-8B-Base-W64K-L0_50, since {name} does not contain its k (50). Rename the folder."
        )
    tensors = TorchFile(files.open(name))
    sizes = axis_sizes(tensors, {"b_dec": "D", "b_enc": "F"})
    width, k = 1024 * int(repository[2]), int(repository[3])
    if width != sizes["F"] or not 0 < k <= width:
        raise CheckpointError(
            f"{tensors.name} has {sizes['F']:,} features, of which {k} fire, expected {width:,} as in the name "
            f"{repository[0]}. Is the file from that repository?"
        )
    sources = coder_sources("FD OF", "W_enc", "b_enc", "W_dec", "b_dec")
    spec = SAESpec(sizes["D"], width, sizes["D"], FeatureActivation.topk, k)
    hook_name = f"blocks.{re.fullmatch(WEIGHTS, name)[1]}.hook_resid_post"
    return check_tensors(SAE("qwen_scope", spec, hook_name, tensors, sources, SAEContext(f"Qwen/{repository[1]}")))
