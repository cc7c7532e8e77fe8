"""The supported model families, and `open_model`, which chooses one by config.json."""

import logging
from dataclasses import dataclass, replace

from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.core.hub import is_hub_id
from pipeline.core.messages import shown
from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.models.architecture import Architecture, our_keys
from pipeline.models.checkpoints.adapter import CONFIG_FILE, AdaptedCheckpoint, Adapter
from pipeline.models.checkpoints.checkpoint import Checkpoint
from pipeline.models.checkpoints.checkpoint_files import Files, open_files, open_folder
from pipeline.models.checkpoints.loading import check_tensors
from pipeline.models.families import (
    bert,
    cohere,
    deepseek,
    exaone,
    gemma,
    gemma4,
    glm4,
    gpt2,
    gpt_neo,
    gpt_neox,
    gptj,
    granite,
    lfm2,
    llama,
    llama4,
    mistral,
    moe,
    nemotron_h,
    olmo,
    opt,
    phi,
    phi3,
    qwen,
    qwen_delta,
    qwen_vl,
    smollm3,
    stablelm,
    starcoder2,
)
from pipeline.models.families.hf_attention import check_sizes
from pipeline.models.families.hf_config import HfConfig, Reader
from pipeline.models.head import Head, HeadFormat, head_leaf, read_head
from pipeline.models.model import Model

log = logging.getLogger("pipeline")

_LM_HEAD = HeadFormat()


@dataclass(frozen=True)
class Family:
    """One value of config.json's `model_type`. `classes` is the prefix of its class names in transformers."""

    read: Reader
    classes: str
    head: HeadFormat | None = _LM_HEAD  # None: encoders


FAMILIES = {
    "bert": Family(bert.read, "Bert", head=None),
    "camembert": Family(bert.read_roberta, "Camembert", head=None),
    "cohere": Family(cohere.read, "Cohere", HeadFormat(is_tied=True, read_scale=cohere.logit_scale)),
    "cohere2": Family(cohere.read_cohere2, "Cohere2", HeadFormat(is_tied=True, read_scale=cohere.logit_scale)),
    "deepseek_v2": Family(deepseek.read_v2, "DeepseekV2"),
    "deepseek_v3": Family(deepseek.read_v3, "DeepseekV3"),
    "deepseek_v32": Family(deepseek.read_v32, "DeepseekV32"),
    "exaone4": Family(exaone.read, "Exaone4"),
    "gemma": Family(gemma.read_gemma, "Gemma", HeadFormat(is_tied=True)),
    "gemma2": Family(gemma.read_gemma2, "Gemma2", HeadFormat(is_tied=True, softcap=30.0)),
    "gemma3": Family(gemma.read_gemma3_multimodal, "Gemma3", HeadFormat(is_tied=True)),
    "gemma3_text": Family(gemma.read_gemma3, "Gemma3", HeadFormat(is_tied=True)),
    "gemma4": Family(gemma4.read_multimodal, "Gemma4", HeadFormat(is_tied=True)),
    "gemma4_text": Family(gemma4.read, "Gemma4", HeadFormat(is_tied=True)),
    "gemma4_unified": Family(gemma4.read_unified_multimodal, "Gemma4Unified", HeadFormat(is_tied=True)),
    "gemma4_unified_text": Family(gemma4.read_unified, "Gemma4Unified", HeadFormat(is_tied=True)),
    "glm": Family(glm4.read_glm, "Glm"),
    "glm4": Family(glm4.read_glm4, "Glm4"),
    "glm4_moe": Family(glm4.read_glm4_moe, "Glm4Moe"),
    "gpt2": Family(gpt2.read, "GPT2", HeadFormat(is_tied=True)),
    "gpt_neo": Family(gpt_neo.read, "GPTNeo", HeadFormat(is_tied=True)),
    "gpt_neox": Family(gpt_neox.read, "GPTNeoX", HeadFormat("embed_out.weight")),
    "gpt_oss": Family(moe.read_gpt_oss, "GptOss"),
    "gptj": Family(gptj.read, "GPTJ", HeadFormat(bias="lm_head.bias")),
    "granite": Family(granite.read, "Granite", HeadFormat(read_scale=granite.logit_scale)),
    "granitemoe": Family(granite.read_moe, "GraniteMoe", HeadFormat(read_scale=granite.logit_scale)),
    "kimi_k2": Family(deepseek.read_v3, "DeepseekV3"),
    "kimi_k25": Family(deepseek.read_kimi_k25, "Kimi_K25", HeadFormat(is_tied=True)),
    "lfm2": Family(lfm2.read, "Lfm2", HeadFormat(is_tied=True)),
    "llama": Family(llama.read, "Llama"),
    "llama4": Family(llama4.read_multimodal, "Llama4", HeadFormat(tied_by_text_only=True)),
    "llama4_text": Family(llama4.read, "Llama4"),
    "minimax_m2": Family(moe.read_minimax_m2, "MiniMaxM2"),
    "ministral3": Family(mistral.read_ministral, "Ministral3"),
    "mistral": Family(mistral.read, "Mistral"),
    "mistral3": Family(mistral.read_multimodal, "Mistral3", HeadFormat(tied_by_text=True)),
    "mixtral": Family(moe.read_mixtral, "Mixtral"),
    "nemotron_h": Family(nemotron_h.read, "NemotronH"),
    "olmo": Family(olmo.read_olmo, "Olmo"),
    "olmo2": Family(olmo.read_olmo2, "Olmo2"),
    "olmo3": Family(olmo.read_olmo3, "Olmo3"),
    "olmoe": Family(moe.read_olmoe, "Olmoe"),
    "opt": Family(opt.read, "OPT", HeadFormat(is_tied=True)),
    "phi": Family(phi.read, "Phi", HeadFormat(bias="lm_head.bias")),
    "phi3": Family(phi3.read, "Phi3"),
    "qwen2": Family(qwen.read_qwen2, "Qwen2"),
    "qwen2_5_vl": Family(qwen_vl.read_qwen2_vl, "Qwen2_5_VL", HeadFormat(tied_by_text=True)),
    "qwen2_moe": Family(moe.read_qwen2_moe, "Qwen2Moe"),
    "qwen2_vl": Family(qwen_vl.read_qwen2_vl, "Qwen2VL", HeadFormat(tied_by_text=True)),
    "qwen3": Family(qwen.read_qwen3, "Qwen3"),
    "qwen3_5": Family(qwen_delta.read_qwen3_5_multimodal, "Qwen3_5"),
    "qwen3_5_moe": Family(qwen_delta.read_qwen3_5_moe_multimodal, "Qwen3_5Moe"),
    "qwen3_5_moe_text": Family(qwen_delta.read_qwen3_5_moe, "Qwen3_5Moe"),
    "qwen3_5_text": Family(qwen_delta.read_qwen3_5, "Qwen3_5"),
    "qwen3_moe": Family(moe.read_qwen3_moe, "Qwen3Moe"),
    "qwen3_next": Family(qwen_delta.read_qwen3_next, "Qwen3Next"),
    "qwen3_vl": Family(qwen_vl.read_qwen3_vl, "Qwen3VL"),
    "qwen3_vl_moe": Family(qwen_vl.read_qwen3_vl_moe, "Qwen3VLMoe"),
    "roberta": Family(bert.read_roberta, "Roberta", head=None),
    "seed_oss": Family(llama.read_seed_oss, "SeedOss"),
    "smollm3": Family(smollm3.read, "SmolLM3", HeadFormat(is_tied=True)),
    "stablelm": Family(stablelm.read, "StableLm"),
    "starcoder2": Family(starcoder2.read, "Starcoder2", HeadFormat(is_tied=True)),
    "xlm-roberta": Family(bert.read_roberta, "XLMRoberta", head=None),
}
_HEADS = (
    *("Model", "TextModel", "LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForPreTraining", "ForConditionalGeneration"),
    *("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForNextSentencePrediction"),
)


def open_model(
    path: str, *, revision: str | None = None, init: str = "checkpoint", seed: int = 0, adapter: str | None = None
) -> Model:
    """Opens a model: reads config.json and, unless it is on the Hub, the headers of the checkpoint's weight files.

    `path` is a directory, a remote path (`gs://...`) or a Hub id; `revision` applies to a Hub id. `init=random` needs
    only config.json. `adapter` is a PEFT adapter, which is merged into the weights: a directory, a remote path, a Hub
    id, or `hf://owner/name@revision/folder`.

    Raises ConfigError for an unknown `init` or an adapter with `init=random`, CheckpointError if the model is not
    supported or its tensors or those of the adapter do not match config.json, and PipelineError if the network fails.
    """
    if init not in ("checkpoint", "random"):
        raise ConfigError(f"model.init is {init!r}. Set it to checkpoint or random.")
    if init == "random" and adapter is not None:
        raise ConfigError("model.adapter is set, which does not apply with model.init=random. Remove one of them.")
    files = open_files(path, revision)
    checkpoint = Checkpoint(files)
    checkpoint.packing  # noqa: B018 - refuses formats that are not implemented
    config = HfConfig(checkpoint.config, f"{checkpoint.where}/config.json")
    config.ignore("quantization_config")  # which `checkpoint.packing` reads
    config.ignore("auto_map")  # code in the repository is never run; transformers ignores it without trust_remote_code
    name = config.choice("model_type", tuple(FAMILIES))
    family = FAMILIES[name]
    _check_classes(config, family)
    try:
        arch, table = family.read(config)
    except ArithmeticError as error:
        raise CheckpointError(f"{config.where}: {error} while sizes were computed. Is the file damaged?") from error
    head = None if family.head is None else read_head(config, family.head)
    check_sizes(config, arch)
    config.finish()
    model = Model(name, arch, table, checkpoint, head, seed if init == "random" else None)
    if adapter is not None:
        model = replace(model, checkpoint=_adapted(model, files, adapter, family.head or _LM_HEAD))
    if init == "checkpoint" and checkpoint.commit is None:  # files on the Hub are downloaded when they are needed
        check_tensors(checkpoint, arch, table, model.leaves(_last(arch)))
    return model


def _adapted(model: Model, files: Files, address: str, head: HeadFormat) -> AdaptedCheckpoint:
    """The model's checkpoint with an adapter. Warns if the adapter names another base model."""
    address = f"hf://{address}" if is_hub_id(address) else address
    tensors = model.leaves(_last(model.arch)) | head_leaf(Head(head.tensor, None, head.bias), model.arch)
    adapter = Adapter(open_folder(address, (CONFIG_FILE,), "model.adapter"), model.arch, model.table, tensors)
    base, path = (name.rstrip("/").rpartition("/")[2].lower() for name in (adapter.base or "", files.where))
    if base != path:
        log.warning(
            "The adapter %s is for %s, and its tensors fit the model %s. Check that this is its base model.",
            *(adapter.where, shown(adapter.base), files.where),
        )
    embeds = [hf_key for hf_key, entry in model.table.items() if "embed" in our_keys(entry)]
    is_tied = model.head is not None and model.head.tensor is None
    return AdaptedCheckpoint(files, adapter, is_tied and bool(adapter.changed & {*embeds, head.tensor}))


def _last(arch: Architecture) -> tuple[ActivationKey, ...]:
    """What needs all weights except the head."""
    return ActivationKey(arch.num_layers - 1, Site.resid_post), FINAL_NORM


def _check_classes(config: HfConfig, family: Family) -> None:
    known = [family.classes + head for head in _HEADS]
    spellings = {name.replace("_", "") for name in known}  # KimiK25 in its own code, Kimi_K25 in transformers
    unknown = [name for name in config.strings("architectures") if name.replace("_", "") not in spellings]
    if unknown:
        raise CheckpointError(
            f"{config.where}: architectures is {shown(unknown)}, which is not implemented (implemented: "
            f"{', '.join(known)}). Use another model."
        )
