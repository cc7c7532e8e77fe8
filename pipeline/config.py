"""The configuration's types. Every key of `configs/` is declared here; Hydra refuses any other.

A run composes YAML into these frozen dataclasses once (`run_config`); no dict travels further. What each value
may be is in `limits.py`; what one says about another (a layer that the model lacks, rows that do not divide) is checked
in `plan.py`.
"""

import difflib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, BooleanNode, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from pipeline.addresses import has_credentials, unusable_store_path
from pipeline.errors import ConfigError
from pipeline.limits import require_within_limits, shown


class ComputeDtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class WeightsDtype(StrEnum):
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


@dataclass(frozen=True)
class ModelConfig:
    path: str = MISSING  # a directory, a remote path (gs://...), or a Hub id
    revision: str | None = None  # of a Hub id
    dtype: ComputeDtype = ComputeDtype.bfloat16
    weights_dtype: WeightsDtype = WeightsDtype.same  # of the layers' matrices: as `dtype`, or int8 with scales
    attention: Attention = Attention.auto
    weights: Weights = Weights.auto
    init: Init = Init.checkpoint  # random: only config.json (and the tokenizer) are read
    seed: int = 0  # of init=random
    tokenizer: str | None = None  # a directory or Hub id, when it is not the model's


@dataclass(frozen=True)
class DataConfig:
    """What every source has. `source` names the class in `data/`."""

    source: str = MISSING
    num_streams: int | None = None  # null: chosen by Plan for a new store, kept for an old one
    on_error: OnError = OnError.fail
    special_tokens: SpecialTokens = SpecialTokens.tokenizer  # what the tokenizer adds by itself (BOS, CLS ... SEP)
    prefix: str | None = None  # one token's text, put before every document (e.g. <|endoftext|>)
    suffix: str | None = None  # one token's text, put after every document


@dataclass(frozen=True)
class ParquetData(DataConfig):
    """FineWeb's schema in parquet files: local, remote, or of a Hub data set."""

    path: str | None = None  # file, directory or glob, local or remote (gs://, hf://, s3:// with s3fs); null: the Hub's
    repo: str = MISSING  # Hub data set, used when path is null
    subset: str = MISSING  # of the Hub data set, e.g. sample/10BT
    revision: str | None = None
    row_groups_per_shard: int | None = None  # null: a file is one source shard
    text_column: str = "text"
    id_column: str | None = "id"  # null: ids are made of file name and row


@dataclass(frozen=True)
class ArcData(DataConfig):
    """ARC-AGI grid tasks as prompts."""

    path: str = MISSING  # a directory of task files, a *_challenges.json, a .jsonl, or hf://datasets/owner/name
    split: str = "train"  # of a Hub data set
    revision: str | None = None
    solutions: str | None = None  # path of *_solutions.json
    encoder: str = "digits"  # digits | separated | repeated | symbols, or several joined by +
    symbols: str = "0123456789"  # ten characters, the colours 0 to 9, of encoder=symbols
    repeat: int = 2  # of encoder=repeated
    row_numbers: bool = False
    shape_header: bool = False
    code_block: bool = False
    template: Template = Template.plain
    include_solution: bool = False  # whether the test output, where known, ends the prompt
    augmentations: int = 1  # documents per task; the first is the task itself
    geometry: Geometry = Geometry.dihedral  # what augmented documents may do to the grids
    permute_colors: bool = True
    permute_examples: bool = True
    seed: int = 0  # of the augmentations
    tasks_per_shard: int = 64


@dataclass(frozen=True)
class HfData(DataConfig):
    """Any data set that `datasets` can stream, by a text template."""

    path: str = MISSING  # a Hub id, a local directory, or a loader's name (json, csv, parquet, text)
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    data_files: Any = None  # str or list of str: what `datasets.load_dataset(data_files=...)` takes
    text: str = "{{ text }}"  # jinja template over the row's columns; {{ choices.text[0] }} reaches into nested ones
    id_column: str | None = None  # null: ids are made of file name and row
    info_columns: list[str] = field(default_factory=list)  # kept beside each document as text, e.g. labels


@dataclass(frozen=True)
class GenerateData(DataConfig):
    """What the model itself writes: another source's documents are prompts, each continued by the model."""

    path: str | None = MISSING  # of the prompts
    prompts: Any = MISSING  # ParquetData | ArcData | HfData
    template: Template = Template.plain  # chat: each document is a user's message
    prompt_length: int = 512  # token slots for a prompt
    long_prompts: LongPrompts = LongPrompts.refuse  # refuse: as on_error says; cut: keep BOS and the last tokens
    max_new_tokens: int = 256
    temperature: float = 0.0  # 0: greedy
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0  # of the sampling
    end_tokens: list[str] | None = None  # texts of single tokens; null: the model's own
    rows: int = 8  # documents that are written at once, over all processes of a worker
    group: int = 64  # documents that are written to the store together


@dataclass(frozen=True)
class BatchConfig:
    rows: int = 8  # per step, over all processes of a worker
    length: int = 1024
    packing: Packing = Packing.pack
    long_documents: LongDocuments = LongDocuments.split


@dataclass(frozen=True)
class CaptureConfig:
    layers: Any = MISSING  # list of layer numbers, or "all"
    sites: list[str] = field(default_factory=lambda: ["resid_post"])
    when: When = When.document  # of data=generate: computed from whole documents, or kept while the model writes them
    positions: Positions = Positions.all  # of which tokens; the settings that belong to each choice follow
    every: int | None = None  # of positions=every: the k-th, 2k-th, ... token of each window of a document
    token: str | None = None  # of positions=token: one token's text, e.g. <|im_end|>
    regex: str | None = None  # of positions=regex: searched for in each token's text, e.g. ^ ?[A-Z]
    rate: float | None = None  # of positions=sample: the share of tokens
    seed: int | None = None  # of positions=sample; null: 0
    per_row: int | None = None  # of last, token, regex: a row's slots for such tokens; null: length / 16
    dtype: StorageDtype = StorageDtype.bfloat16
    int8_group: int | None = None  # of dtype=int8: neighbouring features that share a scale; null: all of a token's
    statistics: bool = True  # of every array: mean, variance, norms; computed on the devices
    on_not_finite: OnNotFinite = OnNotFinite.fail  # what a value does that is NaN or too large for `dtype`


@dataclass(frozen=True)
class StoreConfig:
    path: str = MISSING
    shard_mib: float = 16.0  # target size of one activation array's store shard
    compression: Compression = Compression.none
    retries: int = 16  # of a request that failed, each after twice as long a time, before the run ends
    retry_delay_s: float = 1.0  # before the first retry; at most 32 times as long before later ones
    concurrency: int | None = None  # requests under way at once; null: 32, for local files the cores or at least 4
    copy_threads: int | None = None  # that encode and decode chunks; null: the cores


@dataclass(frozen=True)
class MeshConfig:
    data: int | None = None  # null: all devices
    tensor: int = 1


@dataclass(frozen=True)
class DistributedConfig:
    """The processes of one worker. A TPU pod, GKE, Slurm and MPI say the first three themselves."""

    coordinator: str | None = None  # host:port of process 0
    num_processes: int | None = None
    process_id: int | None = None
    join_timeout_s: int = 300  # how long the first waits for the last
    heartbeat_timeout_s: int = 20  # how long a process may be silent before the others end


@dataclass(frozen=True)
class RunOptions:
    max_tokens: int | None = None  # valid tokens to store; null: all of the data
    worker_index: int = 0
    worker_count: int = 1
    claim: bool = False  # workers claim streams in the store, and may join and leave at any time
    lease_s: float = 60.0  # of run.claim: how long a worker may be silent before others take over its streams
    max_inflight_mib: float = 2048.0  # activations between device and host; at most 4 steps, 1 on two cores
    stall_timeout_s: float = 600.0  # without a finished step: a report; after twice as long the run ends, resumable
    compilation_cache: str | None = None  # a directory or gs:// URL where compiled programs are kept; null: nowhere
    profile: str | None = None  # a local directory for a jax.profiler trace of some steps; null: none
    profile_after: int = 10  # steps before the trace
    profile_steps: int = 20  # steps in the trace
    progress: bool = True
    metrics_interval_s: float = 10.0


@dataclass(frozen=True)
class PlanConfig:
    """What `pipeline.plan` assumes and does when `topology` names a TPU slice."""

    search: bool = False  # find the largest batch.rows that fits
    json: bool = False
    mfu: float = 0.4  # the part of the chips' peak that the forward pass reaches
    fill: float = 0.95  # the part of the token slots that holds a valid token
    store_gb_per_s: float | None = None  # that the store takes; null: a new bucket's 1000 objects a second
    usd_per_chip_hour: float | None = None  # null: the list price
    usd_per_tb_month: float = 20.0


@dataclass(frozen=True)
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: Any = MISSING  # ParquetData | ArcData | HfData | GenerateData
    batch: BatchConfig = field(default_factory=BatchConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    run: RunOptions = field(default_factory=RunOptions)
    topology: str | None = None  # a TPU slice to plan for, e.g. v5e-64; null: the devices at hand
    plan: PlanConfig = field(default_factory=PlanConfig)


class _Boolean(BooleanNode):
    """True or false, where OmegaConf takes every number but 0 for true."""

    def _validate_and_convert_impl(self, value: Any) -> bool:
        try:
            is_another_number = int(value) not in (0, 1)
        except (TypeError, ValueError, OverflowError):
            is_another_number = False
        if is_another_number:
            raise ValidationError("Value '$VALUE' is not a valid bool")
        return super()._validate_and_convert_impl(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Boolean":
        copied = _Boolean()
        self._deepcopy_impl(copied, memo)
        return copied


def _prepared(node: DictConfig) -> DictConfig:
    """Lets Hydra merge into a config made from frozen dataclasses, which OmegaConf marks read-only, and has its bools
    be bools."""
    node._set_flag("readonly", None)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not (child._is_missing() or child._is_none()):
            _prepared(child)
        elif type(child) is BooleanNode:
            node._set_item_impl(key, _Boolean(child._value(), key, node, is_optional=child._is_optional()))
    return node


def register() -> None:
    """Puts the schemas where the YAML files' `defaults` find them."""
    store = ConfigStore.instance()
    store.store(name="schema", node=_prepared(OmegaConf.structured(RunConfig)))
    for name, cls in {"parquet": ParquetData, "arc": ArcData, "hf": HfData, "generate": GenerateData}.items():
        store.store(group="data", name=f"{name}_schema", node=_prepared(OmegaConf.structured(cls)))


def run_config(composed: DictConfig) -> RunConfig:
    """The typed, frozen configuration. Raises ConfigError for a mandatory key without a value, a key that is none, a
    value beyond its limits, and credentials."""
    if unknown := next(_unknown_keys(composed), None):
        raise ConfigError(f"{unknown} is no key of the configuration. {key_remedy(unknown)}")
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError(f"no value for {', '.join(missing)}. Give one on the command line, e.g. {missing[0]}=...")
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'the configuration'} has no value: {_first_line(error)}.") from error
    _require_no_credentials(config)
    _require_data(config.data, "data", "data=fineweb")
    if isinstance(config.data, GenerateData):
        _require_data(config.data.prompts, "data.prompts", "data@data.prompts=arc")
    require_within_limits(config)
    if reason := unusable_store_path(config.store.path):
        raise ConfigError(reason)
    return config


def key_remedy(key: str) -> str:
    """What to do about a key that there is not: the likeliest one that was meant, and where all are."""
    keys = list(all_keys(RunConfig))
    similar = "" if key in keys else next(iter(difflib.get_close_matches(key, keys, n=1)), "")
    another = "Another choice of data has it. " if key in keys else f"Did you mean {similar}? " if similar else ""
    return f"{another}--cfg job prints all keys."


def all_keys(cls: type = RunConfig, prefix: str = "") -> Iterator[str]:
    """The dotted keys of the schema, with those of every source of data."""
    groups = (ParquetData, ArcData, HfData, GenerateData)
    for key in fields(cls):
        if prefix + key.name == "data":
            for group in groups:
                yield from all_keys(group, "data.")
        elif is_dataclass(key.type):
            yield from all_keys(key.type, f"{prefix}{key.name}.")
        else:
            yield prefix + key.name


def _unknown_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Keys that the dataclasses do not have, as `+run.foo=1` adds them."""
    cls = OmegaConf.get_type(node)
    known = {key.name for key in fields(cls)} if is_dataclass(cls) else None
    for key in node:
        child = node._get_node(key)
        if known is not None and key not in known:
            yield f"{prefix}{key}"
        elif isinstance(child, DictConfig) and not (child._is_missing() or child._is_none()):
            yield from _unknown_keys(child, f"{prefix}{key}.")


def _require_data(data: object, key: str, choice: str) -> None:
    if not isinstance(data, DataConfig):
        raise ConfigError(f"{key} is {shown(data)}, and no source of documents. Choose one, e.g. {choice}.")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _require_no_credentials(config: RunConfig) -> None:
    """The configuration is stored and logged, so no URL in it may carry a password or a signature."""
    for group, values in asdict(config).items():
        named = {f"{group}.{key}": value for key, value in values.items()} if isinstance(values, dict) else {}
        for key, value in named.items():
            if has_credentials(str(value)):
                raise ConfigError(
                    f"{key} has a URL with credentials in it, which would be stored and logged. Give them as "
                    f"the storage's own tools expect them (GOOGLE_APPLICATION_CREDENTIALS, AWS_PROFILE, ...)."
                )
