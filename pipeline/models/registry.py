"""The supported model families, and `open_model`, which chooses one by config.json."""

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.core.messages import shown
from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.models.architecture import Architecture, KeyTable
from pipeline.models.checkpoints.checkpoint import Checkpoint
from pipeline.models.checkpoints.checkpoint_files import open_files
from pipeline.models.checkpoints.loading import check_tensors
from pipeline.models.families import (
    bert,
    deepseek,
    gemma,
    gemma4,
    gpt2,
    gpt_neox,
    llama,
    moe,
    olmo,
    phi3,
    qwen,
    qwen_delta,
    smollm3,
)
from pipeline.models.families.hf_attention import check_long_ropes
from pipeline.models.families.hf_config import HfConfig, refuse_unreadable
from pipeline.models.head import HeadFormat, read_head
from pipeline.models.model import Model

_LM_HEAD = HeadFormat()


@dataclass(frozen=True)
class Family:
    """One value of config.json's `model_type`. `classes` is the prefix of its class names in transformers.

    `read` raises CheckpointError for values that are not implemented.
    """

    read: Callable[[HfConfig], tuple[Architecture, KeyTable]]
    classes: str
    head: HeadFormat | None = _LM_HEAD  # None: encoders


_FAMILIES = {
    "bert": Family(bert.read, "Bert", head=None),
    "deepseek_v2": Family(deepseek.read_v2, "DeepseekV2"),
    "deepseek_v3": Family(deepseek.read_v3, "DeepseekV3"),
    "gemma2": Family(gemma.read_gemma2, "Gemma2", HeadFormat(is_tied=True, softcap=30.0)),
    "gemma3_text": Family(gemma.read_gemma3, "Gemma3", HeadFormat(is_tied=True)),
    "gemma4": Family(gemma4.read_multimodal, "Gemma4", HeadFormat(is_tied=True)),
    "gemma4_text": Family(gemma4.read, "Gemma4", HeadFormat(is_tied=True)),
    "gpt2": Family(gpt2.read, "GPT2", HeadFormat(is_tied=True)),
    "gpt_oss": Family(moe.read_gpt_oss, "GptOss"),
    "gpt_neox": Family(gpt_neox.read, "GPTNeoX", HeadFormat("embed_out.weight")),
    "llama": Family(llama.read, "Llama"),
    "mistral": Family(llama.read_mistral, "Mistral"),
    "mixtral": Family(moe.read_mixtral, "Mixtral"),
    "olmo2": Family(olmo.read_olmo2, "Olmo2"),
    "olmo3": Family(olmo.read_olmo3, "Olmo3"),
    "olmoe": Family(moe.read_olmoe, "Olmoe"),
    "phi3": Family(phi3.read, "Phi3"),
    "qwen2": Family(qwen.read_qwen2, "Qwen2"),
    "qwen2_moe": Family(moe.read_qwen2_moe, "Qwen2Moe"),
    "qwen3": Family(qwen.read_qwen3, "Qwen3"),
    "qwen3_5": Family(qwen_delta.read_qwen3_5_multimodal, "Qwen3_5"),
    "qwen3_5_moe": Family(qwen_delta.read_qwen3_5_moe_multimodal, "Qwen3_5Moe"),
    "qwen3_5_moe_text": Family(qwen_delta.read_qwen3_5_moe, "Qwen3_5Moe"),
    "qwen3_5_text": Family(qwen_delta.read_qwen3_5, "Qwen3_5"),
    "qwen3_moe": Family(moe.read_qwen3_moe, "Qwen3Moe"),
    "qwen3_next": Family(qwen_delta.read_qwen3_next, "Qwen3Next"),
    "smollm3": Family(smollm3.read, "SmolLM3", HeadFormat(is_tied=True)),
}
_HEADS = (
    *("Model", "TextModel", "LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForPreTraining", "ForConditionalGeneration"),
    *("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForNextSentencePrediction"),
)


def open_model(path: str, *, revision: str | None = None, init: str = "checkpoint", seed: int = 0) -> Model:
    """Opens a model: reads config.json and, unless it is on the Hub, the headers of the checkpoint's safetensors files.

    `path` is a directory, a remote path (`gs://...`) or a Hub id; `revision` applies to a Hub id. `init=random` needs
    only config.json.

    Raises ConfigError for an unknown `init`, CheckpointError if the model is not supported or its tensors do not match
    config.json, and PipelineError if the network fails.
    """
    if init not in ("checkpoint", "random"):
        raise ConfigError(f"model.init is {init!r}. Set it to checkpoint or random.")
    checkpoint = Checkpoint(open_files(path, revision))
    config = HfConfig(checkpoint.config, f"{checkpoint.where}/config.json")
    refuse_unreadable(config, _FAMILIES)
    name = config.choice("model_type", tuple(_FAMILIES))
    family = _FAMILIES[name]
    _check_classes(config, family)
    arch, table = family.read(config)
    head = None if family.head is None else read_head(config, family.head)
    check_long_ropes(config, arch)
    config.finish()
    model = Model(name, arch, table, checkpoint, head, seed if init == "random" else None)
    if init == "checkpoint" and checkpoint.commit is None:  # files on the Hub are downloaded when they are needed
        last = ActivationKey(arch.num_layers - 1, Site.resid_post), FINAL_NORM
        check_tensors(checkpoint, arch, table, model.leaves(last))
    return model


def _check_classes(config: HfConfig, family: Family) -> None:
    known = [family.classes + head for head in _HEADS]
    unknown = [name for name in config.strings("architectures") if name not in known]
    if unknown:
        raise CheckpointError(
            f"{config.where}: architectures is {shown(unknown)}, which is not implemented (implemented: "
            f"{', '.join(known)}). Use another model."
        )
