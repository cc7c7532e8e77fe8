"""Writes docs/coverage.md: which models and which published SAEs are read. `make coverage`.

Supported families are those of pipeline/models/registry.py, formats the modules of pipeline/models/sae/formats.
Published SAEs are those in SAELens's registry, as it is installed; model types are checked against the installed
transformers. `--check` writes nothing, and exits with 1 if the file is out of date.
"""

import pkgutil
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from pipeline.models import registry
from pipeline.models.sae import formats

FILE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
# SAELens's loader (`conversion_func`) -> the module that reads the same files.
FORMATS = {
    "sae_lens": "saelens",
    "gemma_2": "gemma_scope",
    "gemma_2_transcoder": "gemma_scope",
    "gemma_3": "gemma_scope",
    "dictionary_learning_1": "dictionary_learning",
    "qwen_scope": "qwen_scope",
    "mwhanna_transcoder": "circuit_tracer",
    "mntss_clt_layer_transcoder": "circuit_tracer",
    "llama_scope": "llama_scope",
    "llama_scope_r1_distill": "llama_scope",
    "connor_rob_hook_z": "hook_z",
    "goodfire": "goodfire",
    "deepseek_r1": "goodfire",
    "sparsify": "sparsify",
}
UNREAD_FORMATS = {"temporal": "its features depend on the tokens before, and SAEs are applied to each token here"}
MODEL_TYPES = {  # of the models in SAELens's registry, by a pattern for the whole name
    r"gemma-2-.*": "gemma2",
    r"gemma-2b(-it)?": "gemma",
    r"google/gemma-3-(270m|1b)\b.*": "gemma3_text",
    r"google/gemma-3-.*": "gemma3",
    r"gpt2-small": "gpt2",
    r"pythia-.*": "gpt_neox",
    r"(meta-llama/.*|.*Distill-Llama.*)": "llama",
    r"mistral-7b": "mistral",
    r"openai/gpt-oss-.*": "gpt_oss",
    r"Qwen/Qwen2\.5-.*": "qwen2",
    r"Qwen/Qwen3\.5-.*-A3B.*": "qwen3_5_moe",
    r"Qwen/Qwen3\.5-.*": "qwen3_5",
    r"(Qwen/Qwen|qwen)3-.*-A3B.*": "qwen3_moe",
    r"(Qwen/Qwen|qwen)3-.*": "qwen3",
}
ASKED_FOR = """
    llama llama4 mistral mixtral mistral3 ministral3 qwen2 qwen2_moe qwen2_5_vl qwen3 qwen3_moe qwen3_next qwen3_vl
    qwen3_5 qwen3_5_moe gemma gemma2 gemma3 gemma3_text gemma3n gemma4 gemma4_unified gpt2 gpt_neo gpt_neox gptj gpt_oss
    opt bloom phi phi3 phimoe olmo olmo2 olmo3 olmoe smollm3 stablelm starcoder2 falcon cohere cohere2 deepseek_v2
    deepseek_v3 deepseek_v32 kimi_k2 kimi_k25 minimax_m2 glm4 glm4_moe granite granitemoe nemotron_h lfm2 mamba exaone4
    seed_oss bert roberta modernbert
""".split()  # noqa: SIM905 - five lines of words are easier to read than sixty of one
NOT_IN_TRANSFORMERS = {"kimi_k2"}  # its repository has code of its own
MISSING_BLOCKS = {  # why a type that is asked for is not supported; others need no new block
    "gemma3n": "AltUp, LAuReL",
    "bloom": "ALiBi",
    "falcon": "ALiBi in some sizes",
    "phimoe": "SparseMixer's routing",
    "mamba": "state space layers",
    "modernbert": "an encoder with local attention",
}


def model_type(name: str) -> str:
    """The `model_type` of a model in SAELens's registry, or its name if the script does not know it."""
    return next((kind for pattern, kind in MODEL_TYPES.items() if re.fullmatch(pattern, name)), name)


def table() -> Iterator[str]:
    """The lines of the document."""
    families = set(registry.FAMILIES)
    modules = {module.name for module in pkgutil.iter_modules(formats.__path__)}
    releases = yaml.safe_load((Path(find_spec("sae_lens").origin).parent / "pretrained_saes.yaml").read_text())
    saes = Counter()
    for release in releases.values():
        saes[release["conversion_func"] or "sae_lens", model_type(release["model"])] += len(release["saes"])
    read = {pair: number for pair, number in saes.items() if FORMATS.get(pair[0]) in modules and pair[1] in families}
    total, num_read = sum(saes.values()), sum(read.values())
    yield "# Coverage\n"
    yield (
        f"`make coverage` writes this file from the program's families and formats, SAELens {version('sae-lens')} and "
        f"transformers {version('transformers')}.\n"
    )
    yield "## Published SAEs\n"
    yield (
        f"SAELens's registry has {total:,} SAEs in {len(releases)} releases. The model and the format of "
        f"{num_read:,} of them ({100 * num_read / total:.2f} %) are read, counted by loader and model: the files "
        "themselves were not opened. Each loader is compared with SAELens's on random checkpoints (`make test-saes`).\n"
    )
    yield "| SAELens's loader | SAEs | in `pipeline/models/sae/formats` | of supported models |\n|---|---|---|---|"
    by_loader, by_type = _sums(saes, 0), _sums(saes, 1)
    for loader, number in by_loader.items():
        module = FORMATS.get(loader)
        reason = UNREAD_FORMATS.get(loader, "not read yet")
        cell = f"`{module}.py`" if module in modules else f"none: {reason}"
        yield f"| `{loader}` | {number:,} | {cell} | {_sums(read, 0).get(loader, 0):,} |"
    yield "\n| model type | SAEs | |\n|---|---|---|"
    for kind, number in by_type.items():
        yield f"| `{kind}` | {number:,} | {'' if kind in families else 'not supported'} |"
    unknown = {kind for kind in ASKED_FOR if kind not in {*CONFIG_MAPPING_NAMES, *NOT_IN_TRANSFORMERS}}
    if unknown:
        raise SystemExit(f"transformers {version('transformers')} has no {', '.join(sorted(unknown))}. Edit ASKED_FOR.")
    supported = [kind for kind in ASKED_FOR if kind in families]
    yield "\n## Model types\n"
    yield (
        f"Of the {len(ASKED_FOR)} model types that users of TransformerLens, SAELens, nnsight and vLLM ask for most, "
        f"{len(supported)} are supported: {', '.join(f'`{kind}`' for kind in supported)}.\n"
    )
    missing: Mapping[str, list[str]] = defaultdict(list)
    for kind in ASKED_FOR:
        if kind not in families:
            missing[MISSING_BLOCKS.get(kind, "no new block")].append(f"`{kind}`")
    yield "| not supported | needs |\n|---|---|"
    for reason, kinds in missing.items():
        yield f"| {', '.join(kinds)} | {reason} |"
    others = sorted(families - {*ASKED_FOR})
    yield f"\nAlso supported: {', '.join(f'`{kind}`' for kind in others)}."


def _sums(numbers: Mapping[tuple[str, str], int], place: int) -> dict[str, int]:
    """The sums by the first or the second of each pair, the largest first."""
    sums = Counter()
    for pair, number in numbers.items():
        sums[pair[place]] += number
    return dict(sums.most_common())


if __name__ == "__main__":
    text = "".join(f"{line}\n" for line in table())
    if "--check" not in sys.argv:
        FILE.write_text(text)
    elif text != FILE.read_text():
        sys.exit(f"{FILE} is out of date. Run make coverage.")
