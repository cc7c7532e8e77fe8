"""The configuration's types. Every key of `configs/` is declared here; Hydra refuses any other.

A run composes YAML into these frozen dataclasses once (`run_config`); no dict travels further. What each value
may be is in `limits.py`; what one says about another (a layer that the model lacks, rows that do not divide) is checked
in `plan.py`.
"""

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.choices import (
    Attention,
    Compression,
    ComputeDtype,
    Geometry,
    Init,
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
    WeightsDtype,
    When,
)

REQUIRED = "???"  # a key without a default: omegaconf.MISSING, which is not imported here


@dataclass(frozen=True)
class ModelConfig:
    path: str = REQUIRED  # a directory, a remote path (gs://...), or a Hub id
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

    source: str = REQUIRED
    num_streams: int | None = None  # null: chosen by Plan for a new store, kept for an old one
    on_error: OnError = OnError.fail
    special_tokens: SpecialTokens = SpecialTokens.tokenizer  # what the tokenizer adds by itself (BOS, CLS ... SEP)
    prefix: str | None = None  # one token's text, put before every document (e.g. <|endoftext|>)
    suffix: str | None = None  # one token's text, put after every document


@dataclass(frozen=True)
class ParquetData(DataConfig):
    """FineWeb's schema in parquet files: local, remote, or of a Hub data set."""

    path: str | None = None  # file, directory or glob, local or remote (gs://, hf://, s3:// with s3fs); null: the Hub's
    repo: str = REQUIRED  # Hub data set, used when path is null
    subset: str = REQUIRED  # of the Hub data set, e.g. sample/10BT
    revision: str | None = None
    row_groups_per_shard: int | None = None  # null: a file is one source shard
    text_column: str = "text"
    id_column: str | None = "id"  # null: ids are made of file name and row


@dataclass(frozen=True)
class ArcData(DataConfig):
    """ARC-AGI grid tasks as prompts."""

    path: str = REQUIRED  # a directory of task files, a *_challenges.json, a .jsonl, or hf://datasets/owner/name
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

    path: str = REQUIRED  # a Hub id, a local directory, or a loader's name (json, csv, parquet, text)
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

    path: str | None = REQUIRED  # of the prompts
    prompts: Any = REQUIRED  # ParquetData | ArcData | HfData
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
    layers: Any = REQUIRED  # list of layer numbers, or "all"
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
    path: str = REQUIRED
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
    data: Any = REQUIRED  # ParquetData | ArcData | HfData | GenerateData
    batch: BatchConfig = field(default_factory=BatchConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    run: RunOptions = field(default_factory=RunOptions)
    topology: str | None = None  # a TPU slice to plan for, e.g. v5e-64; null: the devices at hand
    plan: PlanConfig = field(default_factory=PlanConfig)
