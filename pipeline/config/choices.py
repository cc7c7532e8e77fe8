"""The values of keys with a fixed set of choices."""

from enum import StrEnum


class ComputeDtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Int8OrSame(StrEnum):
    """`same`: as `model.dtype`."""

    same = "same"
    int8 = "int8"


class StorageDtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    int8 = "int8"
    float8_e4m3fn = "float8_e4m3fn"
    float8_e5m2 = "float8_e5m2"


class Attention(StrEnum):
    auto = "auto"
    xla = "xla"
    splash = "splash"
    cudnn = "cudnn"


class Weights(StrEnum):
    auto = "auto"
    replicated = "replicated"
    tensor = "tensor"
    fsdp = "fsdp"


class Init(StrEnum):
    checkpoint = "checkpoint"
    random = "random"


class Packing(StrEnum):
    pack = "pack"
    pad = "pad"


class LongDocuments(StrEnum):
    split = "split"
    cut = "cut"


class Positions(StrEnum):
    all = "all"
    last = "last"
    every = "every"
    token = "token"
    regex = "regex"
    sample = "sample"


class When(StrEnum):
    document = "document"
    decode = "decode"


class Keep(StrEnum):
    features = "features"
    both = "both"


class FeatureDtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


class LongPrompts(StrEnum):
    refuse = "refuse"
    cut = "cut"


class OnError(StrEnum):
    fail = "fail"
    skip = "skip"


class OnNotFinite(StrEnum):
    fail = "fail"
    warn = "warn"


class SpecialTokens(StrEnum):
    tokenizer = "tokenizer"
    none = "none"


class Compression(StrEnum):
    none = "none"
    zstd = "zstd"


class Template(StrEnum):
    plain = "plain"
    chat = "chat"


class Geometry(StrEnum):
    none = "none"
    rotations = "rotations"
    dihedral = "dihedral"
