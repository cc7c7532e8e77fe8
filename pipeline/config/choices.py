"""The values of keys with a fixed set of choices. A choice's value is its name."""

from enum import StrEnum

ComputeDtype = StrEnum("ComputeDtype", "float32 bfloat16")
WeightsDtype = StrEnum("WeightsDtype", "same int8 int4")  # `same`: as `model.dtype`
Int8OrSame = StrEnum("Int8OrSame", "same int8")
StorageDtype = StrEnum("StorageDtype", "float32 bfloat16 float16 int8 float8_e4m3fn")
Attention = StrEnum("Attention", "auto xla splash flash")
Weights = StrEnum("Weights", "auto replicated tensor fsdp")
Init = StrEnum("Init", "checkpoint random")
Packing = StrEnum("Packing", "pack pad concat")
Windows = StrEnum("Windows", "continued restart")
Contexts = StrEnum("Contexts", "given sae")
LongDocuments = StrEnum("LongDocuments", "split cut")
LongPrompts = StrEnum("LongPrompts", "refuse cut")
Positions = StrEnum("Positions", "all last every token regex labels sample")
When = StrEnum("When", "document decode")
Keep = StrEnum("Keep", "features both")
OnError = StrEnum("OnError", "fail skip")
OnNotFinite = StrEnum("OnNotFinite", "fail warn")
SpecialTokens = StrEnum("SpecialTokens", "tokenizer none")
Compression = StrEnum("Compression", "none zstd")
Template = StrEnum("Template", "plain chat")
