"""The configuration's types: every key, its default and its meaning. Hydra refuses any other key.

A run composes the command line and the YAML files, which contain only differences from these defaults, into these
frozen dataclasses (`run_config`); the rest of the program sees no dict. `limits.py` has the values that each key
allows, and `effects.py` checks that a value has an effect. `pipeline.planning` checks values against each other and
against the model. `make readme` writes the README's table of keys from this file.
"""

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.choices import (
    Attention,
    Compression,
    ComputeDtype,
    FeatureDtype,
    Geometry,
    Init,
    Int8OrSame,
    Keep,
    LongDocuments,
    LongPrompts,
    OnError,
    OnNotFinite,
    Packing,
    Positions,
    SpecialTokens,
    StorageDtype,
    Template,
    Weights,
    When,
)

REQUIRED = "???"  # a key without a default: omegaconf.MISSING, which is not imported here


def key(default: Any, doc: str, needs: str = "", *, has_text: bool = False) -> Any:
    """A key's default, and its row in the README's table. Enum keys name every choice in `doc`.

    needs: when the key has an effect, if not always: another key of the group, or a dotted one, alone or followed by
    `=` or `!=` and patterns, e.g. `positions=last|token`. `HUB` is any name on the Hub; ` or ` joins alternatives.
    has_text: whether a key of type Any contains text.
    """
    return field(default=default, metadata={"doc": doc, "needs": needs, "has_text": has_text})


def list_key(default: tuple[str, ...], doc: str) -> Any:
    return field(default_factory=lambda: list(default), metadata={"doc": doc})


@dataclass(frozen=True)
class ModelConfig:
    """The model."""

    path: str = key(
        REQUIRED, "HF directory, remote path (`gs://...`) or Hub id; `${assets:tiny-qwen2}` is the bundled model"
    )
    revision: str | None = key(None, "a branch, tag or commit; null: `main`", "path=HUB")
    dtype: ComputeDtype = key(ComputeDtype.bfloat16, "compute in `bfloat16` or `float32`")
    weights_dtype: Int8OrSame = key(
        Int8OrSame.same,
        "the layers' matrices: `same` as `model.dtype`, or `int8` with scales, in half or a quarter of the memory",
    )
    activations_dtype: Int8OrSame = key(
        Int8OrSame.same,
        "the inputs of int8 matrices: `same` as `model.dtype`, or `int8`, scaled per token (not for experts): faster "
        "on TPUs, less exact",
        "weights_dtype=int8",
    )
    attention: Attention = key(Attention.auto, "`splash` (TPU), `cudnn` (GPU), `xla`, or `auto`: see Limits")
    weights: Weights = key(Weights.auto, "`replicated`, `tensor`, `fsdp`, or `auto`: chosen to fit the devices")
    init: Init = key(Init.checkpoint, "`checkpoint`, or `random`: reads only config.json and the tokenizer")
    seed: int = key(0, "seed of the weights", "init=random")
    tokenizer: str | None = key(None, "directory or Hub id of the tokenizer; null: the model's")

    @property
    def has_int8_weights(self) -> bool:
        return self.weights_dtype is Int8OrSame.int8

    @property
    def has_int8_inputs(self) -> bool:
        return self.activations_dtype is Int8OrSame.int8


@dataclass(frozen=True)
class DataConfig:
    """The documents, from any source."""

    source: str = key(REQUIRED, "set by the choice of `data`")  # names the class in `data/`
    num_streams: int | None = key(
        None,
        "number of independent sequences of rows, fixed when a store is created; null: chosen then, from the data and "
        "the number of processes",
    )
    on_error: OnError = key(OnError.fail, "`fail`, or `skip` and record bad documents and the damaged parts of files")
    special_tokens: SpecialTokens = key(
        SpecialTokens.tokenizer, "`tokenizer`: those it adds (BOS, CLS ... SEP) where a text lacks them, or `none`"
    )
    prefix: str | None = key(None, "text of a single token to put before every document, e.g. `<|endoftext|>`")
    suffix: str | None = key(None, "text of a single token to put after every document", "data!=generate")
    template_kwargs: Any = key(  # any JSON value by str
        None, "with `template=chat`: variables for the chat template, e.g. `{enable_thinking: false}`; null: none"
    )
    date: str | None = key(
        None,
        "the date that a chat template with `strftime_now` writes, e.g. `2026-07-01`; null: when the store is created",
    )


@dataclass(frozen=True)
class ParquetData(DataConfig):
    """Parquet files with FineWeb's columns: local, remote, or in a Hub data set."""

    path: str | None = key(
        None,
        "file, directory or glob, local or remote (`gs://`, `hf://`; `s3://` with s3fs); null: `repo` and `subset`",
    )
    repo: str = key(REQUIRED, "Hub data set to stream", "path=null")
    subset: str = key(REQUIRED, "the Hub data set's folder of parquet files", "path=null")
    revision: str | None = key(None, "a branch, tag or commit; null: `main`", "path=null")
    row_groups_per_shard: int | None = key(
        None, "row groups per source shard, the unit divided among streams; null: a file is one source shard"
    )
    text_column: str = key("text", "column of the text")
    id_column: str | None = key("id", "column of the document ids; null: file name and row number")


@dataclass(frozen=True)
class ArcData(DataConfig):
    """ARC-AGI grid tasks as prompts: a document per test input and augmentation."""

    path: str = key(REQUIRED, "directory of task files, `*_challenges.json`, `.jsonl`, or `hf://datasets/owner/name`")
    split: str = key("train", "split of the data set", "path=hf://*")
    revision: str | None = key(None, "a branch, tag or commit; null: `main`", "path=hf://*")
    solutions: str | None = key(None, "the `*_solutions.json` for a `*_challenges.json`", "path=*.json")
    encoder: str = key("digits", "`digits`, `separated`, `repeated`, `symbols`, or several joined by `+`")
    symbols: str = key("0123456789", "ten characters for the colours 0 to 9", "encoder=*symbols*")
    repeat: int = key(2, "how often each symbol is written", "encoder=*repeated*")
    row_numbers: bool = key(False, "begin each row of a grid with its number, from 1")
    shape_header: bool = key(False, "a line such as `shape: 3x4` (rows x columns) before the rows")
    code_block: bool = key(False, "put the grid into a fenced code block")
    template: Template = key(
        Template.plain, "`plain`, or `chat`: the tokenizer's chat template (with `special_tokens=none` if it adds them)"
    )
    include_solution: bool = key(False, "end the prompt with the test's output, if it is known")
    augmentations: int = key(1, "versions of each task; the first is the original task")
    geometry: Geometry = key(
        Geometry.dihedral, "`none`, `rotations`, or `dihedral`: rotations and mirror images", "augmentations!=1"
    )
    permute_colors: bool = key(True, "permute the colours", "augmentations!=1")
    permute_examples: bool = key(True, "change the order of the examples", "augmentations!=1")
    seed: int = key(0, "seed of the augmented versions", "augmentations!=1")
    tasks_per_shard: int = key(64, "tasks per source shard, the unit divided among streams")


@dataclass(frozen=True)
class HfData(DataConfig):
    """Any data set that `datasets` can stream. A Jinja template turns a row into text."""

    path: str = key(REQUIRED, "Hub id, local directory, or a loader's name (json, csv, parquet, text)")
    subset: str | None = key(None, "the data set's configuration", "path!=json|csv|text|arrow|parquet")
    split: str = key("train", "the data set's split")
    revision: str | None = key(None, "a branch, tag or commit; null: `main`", "path=HUB")
    data_files: Any = key(None, "for a loader: a file, a glob, or a list of these", has_text=True)  # or list
    text: str = key(
        "{{ text }}", "template over the row's columns; `{{ choices.text[0] }}` selects from a nested column"
    )
    id_column: str | None = key(None, "column of the document ids; null: file name and row number")
    info_columns: list[str] = list_key((), "columns stored with each document as text, e.g. labels")


@dataclass(frozen=True)
class GenerateData(DataConfig):
    """Text that the model generates. The prompts are the documents of another source (`data@data.prompts=arc`)."""

    path: str | None = key(REQUIRED, "`data.path` of the prompts' source; its other keys are `data.prompts.*`")
    prompts: Any = key(
        REQUIRED, "the prompts' source, e.g. `data@data.prompts=fineweb`"
    )  # ParquetData | ArcData | HfData
    template: Template = key(Template.plain, "`plain`, or `chat`: each document is a user message in the chat template")
    prompt_length: int = key(512, "token slots per prompt")
    long_prompts: LongPrompts = key(
        LongPrompts.refuse, "longer prompts: `refuse` (see `data.on_error`), or `cut`: keep BOS and the last tokens"
    )
    max_new_tokens: int = key(256, "maximum number of tokens in a completion")
    temperature: float = key(0.0, "0: greedy, the likeliest token")
    top_k: int | None = key(None, "sample only from the k likeliest tokens", "temperature!=0")
    top_p: float | None = key(
        None, "sample only from the smallest set of likeliest tokens with this total probability", "temperature!=0"
    )
    seed: int = key(0, "seed for sampling", "temperature!=0")
    end_tokens: list[str] | None = key(
        None, "texts of single tokens that end a completion; null: the model's; `[]`: none"
    )
    rows: int = key(8, "documents generated at the same time, over all processes")
    cache_dtype: Int8OrSame = key(
        Int8OrSame.same,
        "the KV cache: `same` as `model.dtype`, or `int8` with a scale per head and token: half or a quarter of the "
        "memory",
    )
    group: int = key(64, "generated documents written to the store together, and lost together if the job is killed")

    @property
    def has_int8_cache(self) -> bool:
        return self.cache_dtype is Int8OrSame.int8


@dataclass(frozen=True)
class BatchConfig:
    """Rows of tokens."""

    rows: int = key(8, "rows per step, over all processes")
    length: int = key(256, "token slots per row")
    packing: Packing = key(Packing.pack, "`pack`: several documents in a row, isolated from each other; `pad`: one")
    long_documents: LongDocuments = key(
        LongDocuments.split, "`split` into windows of `batch.length` tokens, or `cut`: keep the first window"
    )


@dataclass(frozen=True)
class CaptureConfig:
    """Which activations are stored, and in which form."""

    layers: Any = key(
        REQUIRED, "list of layer numbers from 0 (-1: the last), or `all`; `resid_post` of layer L: block L's output"
    )
    sites: list[str] = list_key(
        ("resid_post",),
        "list of `embed resid_pre attn_in q k v attn_entropy attn_pattern attn_z head_out attn_out resid_mid mlp_in "
        "mlp_pre mlp_pre_linear mlp_post mlp_out resid_post final_norm`, and for experts `router_logits "
        "router_weights router_indices expert_out`",
    )
    when: When = key(
        When.document,
        "compute activations from the finished `document`, or keep those computed during `decode`",
        "data=generate",
    )
    positions: Positions = key(
        Positions.all,
        "which tokens: `all`, `last` of each document, `every` k-th, one `token`, a `regex`, or a random `sample`",
    )
    every: int | None = key(None, "the k-th, 2k-th, ... token of each window of a document", "positions=every")
    token: str | None = key(
        None, "its text, e.g. `'\"<|im_end|>\"'` (quotes for Hydra and for the shell)", "positions=token"
    )
    regex: str | None = key(
        None, "searched for in each token's text, e.g. `'capture.regex=\"^ ?[A-Z]\"'`", "positions=regex"
    )
    rate: float | None = key(None, "the fraction of tokens", "positions=sample")
    seed: int | None = key(None, "the seed; null: 0", "positions=sample")
    per_row: int | None = key(
        None,
        "slots per row for selected tokens. Unused slots are stored as padding; a row ends early if its slots are "
        "full; null: length / 16",
        "positions=last|token|regex",
    )
    dtype: StorageDtype = key(
        StorageDtype.bfloat16,
        "store as `bfloat16`, `float16`, `float32`, or with a scale per token as `int8` or `float8_e4m3fn`",
    )
    scale_group: int | None = key(
        None, "neighbouring features that share a scale; null: all features of a token", "dtype=int8|float8_e4m3fn"
    )
    outputs: list[str] = list_key(
        (),
        "list of `loss entropy top_logprobs`: what the model's head predicts after each stored token; needs all layers",
    )
    top_logprobs: int = key(8, "the number of likeliest next tokens", "outputs=top_logprobs")
    encode: Any = key(  # str, list of str or dict of str, by str
        None,
        "SAEs by captured array, e.g. `'{blocks.12.resid_post: \"hf://owner/name/folder\"}'`; `blocks.*.resid_post` "
        "with `{layer}` in the address; several SAEs for one array: a list; null: none",
        has_text=True,
    )
    encode_top: int = key(64, "features stored per token: those with the largest values", "encode")
    encode_threshold: float = key(0.0, "a feature fires if its value is larger than this", "encode")
    encode_dtype: FeatureDtype = key(FeatureDtype.bfloat16, "store values as `bfloat16` or `float32`", "encode")
    encode_index: bool = key(True, "also store an index by feature, to read one feature without the others", "encode")
    encode_error: bool = key(
        False, "also store how well SAEs reconstruct each token (a second matrix product)", "encode"
    )
    keep: Keep = key(Keep.features, "of encoded arrays `features` only, or `both`: also the activations", "encode")
    statistics: bool = key(True, "mean, variance and norms of every array, computed on the devices")
    on_not_finite: OnNotFinite = key(
        OnNotFinite.fail, "`fail`, or `warn` and keep values that are NaN or too large for `capture.dtype`"
    )


@dataclass(frozen=True)
class StoreConfig:
    """The store."""

    path: str = key(REQUIRED, "local path, `gs://` or `s3://`; a new store needs an empty or new folder")
    shard_mib: float = key(
        16.0,
        "target size of a store shard, the unit of writing and resuming; 64-512 on object storage",
        "rows_per_block=null",
    )
    rows_per_block: int | None = key(
        None,
        "rows per store shard; equal values align stores of models with different widths; a multiple of each "
        "process's rows per step; null: as many as fit in `store.shard_mib`, fewer for a small `run.max_tokens`",
    )
    compression: Compression = key(Compression.none, "`none` or `zstd`")
    retries: int = key(60, "retries of a failed request, after 1, 2, 4, 8, 8, 8, ... times the delay", "path=*://*")
    retry_delay_s: float = key(
        1.0, "delay before the first retry, times a random number from 0.75 to 1.25", "path=*://*"
    )
    concurrency: int | None = key(
        None, "concurrent requests; null: 32, for local files the number of cores, at least 4"
    )
    ramp_up: int | None = key(
        None,
        "initial writes per second, over all processes; the rate doubles every 20 minutes; 1000 for a new bucket; "
        "null: no limit",
        "path=gs://*",
    )
    copy_threads: int | None = key(
        None,
        "threads that encode and decode chunks; null: the number of cores",
        "path=*://* or compression=zstd",
    )


@dataclass(frozen=True)
class MeshConfig:
    """The device mesh."""

    data: int | None = key(None, "number of devices among which rows are divided; null: all")
    tensor: int = key(
        1, "number of neighbouring devices that divide heads and neurons; must divide the devices per process"
    )


@dataclass(frozen=True)
class DistributedConfig:
    """The processes that compute every step together. A TPU pod, GKE, Slurm and MPI provide the first three values."""

    coordinator: str | None = key(None, "host:port of process 0")
    num_processes: int | None = key(None, "number of processes; 1 alone: join no others, e.g. of a Slurm step")
    process_id: int | None = key(None, "number of this process, from 0")
    join_timeout_s: int = key(300, "how long the first process waits for the others")
    heartbeat_timeout_s: int = key(100, "how long a process may be silent before the others exit")


@dataclass(frozen=True)
class RunOptions:
    """The run."""

    max_tokens: int | None = key(
        None,
        "valid tokens to store, and at most a block more per stream; raise it to extend a store; null: all of the data",
    )
    lease_s: float = key(60.0, "how long a process may be silent before others take over its stream")
    exclusive: bool = key(
        False, "nobody else writes this store: storage that ignores write conditions is accepted", "store.path=*://*"
    )
    max_inflight_mib: float = key(
        2048.0, "activations in flight between device and host; at most 4 steps, or 1 on a CPU with two cores"
    )
    reserved_mib: float = key(0.0, "memory kept free on each device for other uses, e.g. training on a `Stream`")
    stall_timeout_s: float = key(
        600.0, "if no step finishes for this long, report what each thread is doing; after twice this, exit"
    )
    compilation_cache: str | None = key(
        None,
        "directory, `gs://` or `s3://` URL that keeps compiled programs between runs (on CPUs only small steps'); "
        "null: none",
    )
    compiler_options: Any = key(  # bool, int, float or str by str
        None,
        "XLA options for the step by name, e.g. `{xla_tpu_scoped_vmem_limit_kib: 32768}`; they may change the last "
        "bits of values; null: none",
    )
    profile: str | None = key(None, "local directory for a `jax.profiler` trace; null: none")
    profile_after: int = key(10, "steps before the trace", "profile")
    profile_steps: int = key(20, "steps in the trace", "profile")
    progress: bool = key(True, "show a progress bar")
    metrics_interval_s: float = key(
        10.0, "minimum seconds between lines of the run's log in `_metrics`; at least 1 % of the run's time"
    )


@dataclass(frozen=True)
class PlanConfig:
    """Assumptions and output of `pipeline.plan` for a TPU slice."""

    search: bool = key(False, "find the largest `batch.rows` that fits, by compiling", "topology")
    json: bool = key(False, "print JSON", "topology")
    mfu: float | None = key(
        None,
        "model FLOPs utilisation of the forward pass; null: from published figures of chip and kind of model",
        "topology",
    )
    fill: float = key(0.95, "fraction of token slots with a valid token", "topology")
    store_gb_per_s: float | None = key(
        None, "write rate of the store; null: as for a new bucket, 1000 objects per second", "topology"
    )
    usd_per_chip_hour: float | None = key(None, "price of a chip; null: the list price", "topology")
    usd_per_tb_month: float = key(20.0, "price of storage", "topology")


@dataclass(frozen=True)
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: Any = key(REQUIRED, "`demo`, `fineweb`, `fineweb_edu`, `arc`, `ai2_arc`, `hf` or `generate`")
    batch: BatchConfig = field(default_factory=BatchConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    run: RunOptions = field(default_factory=RunOptions)
    topology: str | None = key(
        None, "for `pipeline.plan`: a TPU slice, e.g. `v5e-64` or `v5p:4x4x8`; null: this machine"
    )
    plan: PlanConfig = field(default_factory=PlanConfig)
