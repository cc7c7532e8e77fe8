"""The configuration's types: every key, its default, its meaning, and the values that it allows.

A run composes the command line and the YAML files, which contain only differences from these defaults, into these
frozen dataclasses (`composing.compose`); the rest of the program sees no dict. `typed.py` checks that a value has an
effect. `pipeline.planning` checks values against each other and against the model; sources, models and tokenizers
check what depends on their files. `make config-table` writes docs/configuration.md from this file.
"""

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any

from pipeline.config import choices, limits
from pipeline.config.limits import Limit, between

_TOKENS = (
    "column of token ids (e.g. `input_ids`) to take as they are, in place of text; columns `attention_mask`, "
    "and for packed rows `position_ids` or `seq_lengths`, are followed; null: none"
)
_REVISION = "a branch, tag or commit; null: `main`"
REQUIRED = "???"  # a key without a default: omegaconf.MISSING, which is not imported here


def key(default: Any, doc: str, needs: str = "", *, allowed: Limit | None = None) -> Any:
    """A key's default (a tuple: of a list), and its row in docs/configuration.md. `doc` names every choice of an enum.

    needs: when the key has an effect, if not always: another key of the group, or a dotted one, alone or followed by
    `=` or `!=` and patterns, e.g. `positions=last|token`. `HUB` is any name on the Hub. Commas join several.
    allowed: the values; by default whole numbers from 1 and other numbers above 0, at most 1e9, and any string.
    """
    metadata = {"doc": doc, "needs": needs, "allowed": allowed}
    if isinstance(default, tuple):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    """The model."""

    path: str = key(
        REQUIRED,
        "HF directory, remote path (`gs://...`) or Hub id; `${assets:tiny-qwen2}` is the bundled model",
        allowed=limits.LOCATION,
    )
    revision: str | None = key(None, _REVISION, "path=HUB", allowed=limits.NAME)
    adapter: str | None = key(
        None,
        "PEFT's LoRA adapter, merged while loading: directory, remote path, Hub id, or `hf://owner/name@revision/folder`",
        "init=checkpoint",
        allowed=limits.LOCATION,
    )
    dtype: choices.ComputeDtype = key(choices.ComputeDtype.bfloat16, "compute in `bfloat16` or `float32`")
    weights_dtype: choices.WeightsDtype = key(
        choices.WeightsDtype.same,
        "the layers' matrices: `same` as `model.dtype`; `int8` with a scale per output, 8 bits per weight; or `int4` "
        "with a scale per 128 inputs, 4.25 bits",
    )
    attention: choices.Attention = key(
        choices.Attention.auto, "`splash` (TPU), `flash` (GPU), `xla`, or `auto`: see Limits"
    )
    weights: choices.Weights = key(
        choices.Weights.auto, "`replicated`, `tensor`, `fsdp`, or `auto`: chosen to fit the devices"
    )
    init: choices.Init = key(
        choices.Init.checkpoint, "`checkpoint`, or `random`: reads only config.json and the tokenizer"
    )
    seed: int = key(0, "seed of the weights", "init=random", allowed=limits.SEED)
    tokenizer: str | None = key(
        None, "directory or Hub id of the tokenizer; null: the model's", allowed=limits.LOCATION
    )

    @property
    def quantised(self) -> str | None:
        """The dtype of quantised matrices; None if they are not."""
        return None if self.weights_dtype is choices.WeightsDtype.same else str(self.weights_dtype)


@dataclass(frozen=True)
class DataConfig:
    """The documents, from any source."""

    source: str = ""  # set by the choice of `data`, not by the user: names the class in SOURCES
    path: str = key(REQUIRED, "where the documents are: see below", allowed=limits.LOCATION)
    revision: str | None = key(None, "a branch, tag or commit; null: `main`", "path=HUB", allowed=limits.NAME)
    num_streams: int | None = key(
        None,
        "number of independent sequences of rows, fixed when a store is created; null: chosen then, from the data and "
        "the number of processes",
    )
    on_error: choices.OnError = key(
        choices.OnError.fail, "`fail`, or `skip` and record bad documents and the damaged parts of files"
    )
    special_tokens: choices.SpecialTokens = key(
        choices.SpecialTokens.tokenizer,
        "`tokenizer`: those it adds (BOS, CLS ... SEP) where a text lacks them, or `none`",
    )
    prefix: str | None = key(None, "text of a single token to put before every document, e.g. `<|endoftext|>`")
    suffix: str | None = key(None, "text of a single token to put after every document", "data!=generate,tokens=null")
    template_kwargs: Any = key(  # any JSON value by str
        None,
        "for `template=chat` and `messages`: variables of the chat template, e.g. `{enable_thinking: false}`; null: "
        "none",
        "tokens=null",
    )
    date: str | None = key(
        None,
        "the date that a chat template with `strftime_now` writes, e.g. `2026-07-01`; null: when the store is created",
        allowed=limits.DATE,
    )


@dataclass(frozen=True)
class ParquetData(DataConfig):
    """Parquet files with FineWeb's columns: `data.path` is a file, directory or glob, local or remote (`gs://`; `s3://`
    with s3fs), or a folder of a Hub data set (`hf://datasets/owner/name/folder`)."""

    source: str = "parquet"
    revision: str | None = key(None, _REVISION, "path=hf://*", allowed=limits.NAME)
    row_groups_per_shard: int | None = key(
        None, "row groups per source shard, the unit divided among streams; null: a file is one source shard"
    )
    text_column: str = key("text", "column of the text", "tokens=null", allowed=limits.NAME)
    tokens: str | None = key(None, _TOKENS, allowed=limits.NAME)
    id_column: str | None = key("id", "column of the document ids; null: file name and row number", allowed=limits.NAME)


@dataclass(frozen=True)
class ArcData(DataConfig):
    """ARC-AGI grid tasks as prompts, a document per test input and augmentation: `data.path` is a directory of task
    files, a `*_challenges.json` (with its `*_solutions.json` next to it), a `.jsonl`, or `hf://datasets/owner/name`."""

    source: str = "arc"
    revision: str | None = key(None, _REVISION, "path=hf://*", allowed=limits.NAME)
    split: str = key("train", "split of the data set", "path=hf://*", allowed=limits.NAME)
    encoder: str = key(
        "digits",
        "`digits`, `separated` (by blanks), `repeated` (each twice), `symbols`, `row_numbers`, `shape_header`, "
        "`code_block`, or several joined by `+`",
        allowed=limits.NAME,
    )
    symbols: str = key("0123456789", "ten characters for the colours 0 to 9", "encoder=*symbols*")
    template: choices.Template = key(
        choices.Template.plain,
        "`plain`, or `chat`: the tokenizer's chat template (with `special_tokens=none` if it adds them)",
    )
    include_solution: bool = key(False, "end the prompt with the test's output, if it is known")
    augmentations: int = key(1, "versions of each task; the first is the original task", allowed=limits.FEW)
    augment: str = key(
        "dihedral+colors+examples",
        "what other versions change: `rotations`, or `dihedral` for rotations and mirror images, `colors`, and the "
        "order of `examples`, joined by `+`",
        "augmentations!=1",
        allowed=limits.NAME,
    )
    seed: int = key(0, "seed of the augmented versions", "augmentations!=1", allowed=limits.SEED)


@dataclass(frozen=True)
class HfData(DataConfig):
    """Any data set that `datasets` can stream: `data.path` is a Hub id, a local directory, or a loader's name (arrow,
    json, csv, parquet, text). A Jinja template turns a row into text."""

    source: str = "hf"
    subset: str | None = key(
        None, "the data set's configuration", "path!=json|csv|text|arrow|parquet", allowed=limits.NAME
    )
    split: str = key("train", "the data set's split", allowed=limits.NAME)
    data_files: Any = key(  # str or list of str
        None, "for a loader: a file, a glob, or a list of these", allowed=limits.NAMES
    )
    text: str = key(
        "{{ text }}",
        "template over the row's columns; `{{ choices.text[0] }}` selects from a nested column",
        "messages=null,tokens=null",
    )
    messages: Any = key(  # str or list of str
        None,
        "a column with a conversation: a list of messages, also as JSON (`messages`, `conversations`, `trajectory`); "
        "or a list of columns, each a text or messages, e.g. `[prompt, response]`. A document is a conversation, "
        "rendered by the tokenizer's chat template, with labels of its tokens; null: `data.text`",
        allowed=limits.NAMES,
    )
    tools: str | None = key(
        None, "column with the definitions of a conversation's tools", "messages", allowed=limits.NAME
    )
    roles: Any = key(  # dict of str, by str
        None,
        "roles by the names that the data gives them, if these are not usual, e.g. `{narrator: system}`; null: none",
        "messages",
    )
    tokens: str | None = key(None, _TOKENS, "messages=null", allowed=limits.NAME)
    id_column: str | None = key(None, "column of the document ids; null: file name and row number", allowed=limits.NAME)
    info_columns: list[str] = key((), "columns stored with each document as text, e.g. labels")


@dataclass(frozen=True)
class GenerateData(DataConfig):
    """Text that the model generates. The prompts are the documents of another source (`data@data.prompts=arc`):
    `data.path` is that source's path, and its other keys are `data.prompts.*`."""

    source: str = "generate"
    prompts: Any = key(  # ParquetData | ArcData | HfData
        REQUIRED, "the prompts' source, e.g. `data@data.prompts=fineweb`"
    )
    template: choices.Template = key(
        choices.Template.plain, "`plain`, or `chat`: each document is a user message in the chat template"
    )
    prompt_length: int = key(512, "token slots per prompt")
    long_prompts: choices.LongPrompts = key(
        choices.LongPrompts.refuse,
        "longer prompts: `refuse` (see `data.on_error`), or `cut`: keep BOS and the last tokens",
    )
    max_new_tokens: int = key(256, "maximum number of tokens in a completion")
    temperature: float = key(0.0, "0: greedy, the likeliest token", allowed=limits.TEMPERATURE)
    top_k: int | None = key(None, "sample only from the k likeliest tokens", "temperature!=0")
    top_p: float | None = key(
        None,
        "sample only from the smallest set of likeliest tokens with this total probability",
        "temperature!=0",
        allowed=limits.SHARE,
    )
    seed: int = key(  # JAX drops further bits
        0, "seed for sampling", "temperature!=0", allowed=between(0, (1 << 32) - 1)
    )
    samples: int = key(1, "completions of each prompt, each a document with its number in `sample`", "temperature!=0")
    beams: int = key(
        1,
        "beam search: keeps this many sequences at each step, and stores that many of each prompt, best first, each a "
        "document with its rank in `sample` and its mean log-probability in `score`",
        "temperature=0",
        allowed=limits.FEW,
    )
    end_tokens: list[str] | None = key(
        None, "texts of single tokens that end a completion; null: the model's; `[]`: none"
    )
    stop: list[str] = key(
        (), """texts that end a completion, e.g. in a shell `$'data.stop=["\\n\\n"]'`""", allowed=limits.TEXTS
    )
    rows: int = key(8, "documents generated at the same time, over all processes")
    speculate: int = key(
        0,
        "tokens that each decoding step tries to add beyond the next one: those that followed when the last tokens "
        "occurred before in the document. The completions are those without, except for rounding",
        allowed=between(0, 64),
    )
    cache_dtype: choices.Int8OrSame = key(
        choices.Int8OrSame.same,
        "the KV cache: `same` as `model.dtype`, or `int8` with a scale per head and token: half or a quarter of the "
        "memory",
    )
    group: int = key(
        64,
        "generated documents written to the store together, and lost together if the job is killed; with "
        "`capture.when=decode`, at most 1 GiB of activations; rounded up to a multiple of `data.samples` or "
        "`data.beams`",
    )

    @property
    def completions(self) -> int:
        """Of each prompt."""
        return max(self.samples, self.beams)

    @property
    def group_size(self) -> int:
        """`group`, rounded up so that it holds all completions of its prompts."""
        return -(-self.group // self.completions) * self.completions

    @property
    def has_int8_cache(self) -> bool:
        return self.cache_dtype is choices.Int8OrSame.int8


SOURCES: dict[str, type[DataConfig]] = {
    cls.__dataclass_fields__["source"].default: cls for cls in (ParquetData, ArcData, HfData, GenerateData)
}


@dataclass(frozen=True)
class BatchConfig:
    """Rows of tokens."""

    rows: int = key(8, "rows per step, over all processes")
    length: int = key(256, "token slots per row")
    packing: choices.Packing = key(
        choices.Packing.pack,
        "`pack`: several documents in a row, isolated from each other; `pad`: one; `concat`: documents joined in one "
        "stream that rows divide, with attention across documents",
    )
    long_documents: choices.LongDocuments = key(
        choices.LongDocuments.split, "`split` into windows of `batch.length` tokens, or `cut`: keep the first window"
    )
    overlap: int = key(
        0,
        "tokens that each later window of a long document repeats from the window before it, as context: they are "
        "computed, but neither stored nor counted",
        "long_documents=split",
        allowed=limits.NOT_NEGATIVE,
    )
    windows: choices.Windows = key(
        choices.Windows.continued,
        "`continued`: later windows of a document go on in mid-text; `restart`: each window repeats the tokens that "
        "begin and end every document (BOS, CLS, `data.prefix`, ...). With `packing=concat`, `restart` begins every "
        "row with BOS",
    )
    contexts: choices.Contexts = key(
        choices.Contexts.given,
        "`sae`: replaces length, packing, windows and separator by those with which the SAEs were trained, as far as "
        "their files tell; `given`: as set",
        "capture.encode",
    )
    separator: str | None = key(
        None,
        "text of a single token between the documents of a row, in place of what the tokenizer, `data.prefix` and "
        "`data.suffix` add to each; `''`: none; null: each document keeps these",
        "packing=concat",
    )

    @property
    def adding(self) -> str | None:
        """The setting with which windows or rows begin with tokens that they add; None if they do not."""
        if self.packing is choices.Packing.concat:
            return "batch.packing=concat"
        return "batch.windows=restart" if self.windows is choices.Windows.restart else None


@dataclass(frozen=True)
class CaptureConfig:
    """Which activations are stored, and in which form."""

    layers: Any = key(
        REQUIRED, "list of layer numbers from 0 (-1: the last), or `all`; `resid_post` of layer L: block L's output"
    )
    sites: list[str] = key(
        ("resid_post",),
        "list of `embed resid_pre attn_in q k v attn_entropy attn_pattern attn_z head_out attn_out resid_mid mlp_in "
        "mlp_pre mlp_pre_linear mlp_post mlp_out resid_post final_norm`, and for experts `router_logits "
        "router_weights router_indices expert_out`",
    )
    when: choices.When = key(
        choices.When.document,
        "compute activations from the finished `document`, or keep those computed during `decode`",
        "data=generate",
    )
    positions: choices.Positions = key(
        choices.Positions.all,
        "which tokens: `all`, `last` of each document, `every` k-th, one `token`, a `regex`, by their `labels` "
        "(`data.messages`), or a random `sample`",
    )
    every: int | None = key(
        None,
        "the k-th, 2k-th, ... token of each window of a document",
        "positions=every",
        allowed=between(2, 1_000_000_000),
    )
    token: str | None = key(
        None, "its text, e.g. `'\"<|im_end|>\"'` (quotes for Hydra and for the shell)", "positions=token"
    )
    regex: str | None = key(
        None, "searched for in each token's text, e.g. `'capture.regex=\"^ ?[A-Z]\"'`", "positions=regex"
    )
    labels: list[str] = key(
        (),
        "list of `written` (by the assistant), roles (`system developer user assistant tool`) and parts (`markup text "
        "thinking tool_call tool_result tool_definition`): tokens with one of the roles and one of the parts, if "
        "given. With `last_of_exchange` or `last_of_message`, the last such token of each",
        "positions=labels",
    )
    rate: float | None = key(
        None, "the fraction of tokens", "positions=sample", allowed=between(0, 1, above_first=True, below_last=True)
    )
    seed: int | None = key(None, "the seed; null: 0", "positions=sample", allowed=between(0, (1 << 63) - 1))
    per_row: int | None = key(
        None,
        "slots per row for selected tokens. Unused slots are stored as padding; a row ends early if its slots are "
        "full; null: length / 16; with `labels`, length (no token is left out), unless `capture.labels` has a "
        "`last_of_...`",
        "positions=last|token|regex|labels",
    )
    dtype: choices.StorageDtype = key(
        choices.StorageDtype.bfloat16,
        "store as `bfloat16`, `float16`, `float32`, or with a scale per token as `int8` or `float8_e4m3fn`",
    )
    scale_group: int | None = key(
        None, "neighbouring features that share a scale; null: all features of a token", "dtype=int8|float8_e4m3fn"
    )
    outputs: list[str] = key(
        (),
        "list of `loss entropy top_logprobs`: what the model's head predicts after each stored token; needs all layers",
    )
    top_logprobs: int = key(8, "the number of likeliest next tokens", "outputs=top_logprobs", allowed=between(1, 1000))
    encode: Any = key(  # str, list of str or dict of str, by str
        None,
        "SAEs by captured array, e.g. `'{blocks.12.resid_post: \"hf://owner/name/folder\"}'`; `blocks.*.resid_post` "
        "with `{layer}` in the address; several SAEs for one array: a list; null: none",
    )
    encode_top: int = key(
        64, "features stored per token: those with the largest values", "encode", allowed=between(1, 4096)
    )
    encode_threshold: float = key(
        0.0, "a feature fires if its value is larger than this", "encode", allowed=limits.NOT_NEGATIVE
    )
    encode_index: bool = key(True, "also store an index by feature, to read one feature without the others", "encode")
    encode_error: bool = key(
        False, "also store how well SAEs reconstruct each token (a second matrix product)", "encode"
    )
    keep: choices.Keep = key(
        choices.Keep.features, "of encoded arrays `features` only, or `both`: also the activations", "encode"
    )
    statistics: bool = key(True, "mean, variance and norms of every array, computed on the devices")
    on_not_finite: choices.OnNotFinite = key(
        choices.OnNotFinite.fail, "`fail`, or `warn` and keep values that are NaN or too large for `capture.dtype`"
    )

    @property
    def features_dtype(self) -> str:
        """The dtype of the values of SAEs' features."""
        return "float32" if self.dtype is choices.StorageDtype.float32 else "bfloat16"


@dataclass(frozen=True)
class StoreConfig:
    """The store."""

    path: str = key(
        REQUIRED, "local path, `gs://` or `s3://`; a new store needs an empty or new folder", allowed=limits.FOLDER
    )
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
    compression: choices.Compression = key(choices.Compression.none, "`none` or `zstd`")
    retry_delay_s: float = key(
        1.0,
        "a failed request is sent again 60 times, after 1, 2, 4, 8, 8, 8, ... times this delay (8 minutes in all), "
        "times a random number from 0.75 to 1.25",
        "path=*://*",
        allowed=between(0, 86_400),
    )


@dataclass(frozen=True)
class MeshConfig:
    """The device mesh."""

    data: int | None = key(None, "number of devices among which rows are divided; null: all", allowed=limits.FEW)
    tensor: int = key(
        1,
        "number of neighbouring devices that divide heads and neurons; must divide the devices per process",
        allowed=limits.FEW,
    )
    context: int = key(
        1,
        "number of neighbouring devices that divide the positions of each row, for long rows; mesh.context * "
        "mesh.tensor must divide the devices per process",
        allowed=limits.FEW,
    )


@dataclass(frozen=True)
class DistributedConfig:
    """The processes that compute every step together. A TPU pod, GKE, Slurm and MPI provide the first three values."""

    coordinator: str | None = key(None, "host:port of process 0", allowed=limits.ADDRESS)
    num_processes: int | None = key(
        None, "number of processes; 1 alone: join no others, e.g. of a Slurm step", allowed=limits.FEW
    )
    process_id: int | None = key(None, "number of this process, from 0", allowed=between(0, 999_999))
    join_timeout_s: int = key(300, "how long the first process waits for the others", allowed=limits.FEW)
    heartbeat_timeout_s: int = key(100, "how long a process may be silent before the others exit", allowed=limits.FEW)


@dataclass(frozen=True)
class RunOptions:
    """The run."""

    max_tokens: int | None = key(
        None,
        "valid tokens to store, and at most a block more per stream; raise it to extend a store; null: all of the data",
        allowed=between(1, 10**18),
    )
    lease_s: float = key(
        60.0, "how long a process may be silent before others take over its stream", allowed=between(1, 1_000_000)
    )
    exclusive: bool = key(
        False, "nobody else writes this store: storage that ignores write conditions is accepted", "store.path=*://*"
    )
    max_inflight_mib: float = key(
        2048.0, "activations in flight between device and host; at most 4 steps, or 1 on a CPU with two cores"
    )
    reserved_mib: float = key(
        0.0, "memory kept free on each device for other uses, e.g. training on a `Stream`", allowed=limits.NOT_NEGATIVE
    )
    stall_timeout_s: float = key(
        600.0,
        "if no step finishes for this long, report what each thread is doing; after twice this, exit",
        allowed=between(1, 1_000_000_000),
    )
    compilation_cache: str | None = key(
        None,
        "directory, `gs://` or `s3://` URL that keeps compiled programs between runs; null: none",
        allowed=limits.FOLDER,
    )
    profile: str | None = key(
        None,
        "local directory for a `jax.profiler` trace of 20 steps, after the first three; null: none",
        allowed=limits.LOCAL_FOLDER,
    )
    progress: bool = key(True, "show a progress bar")


@dataclass(frozen=True)
class PlanConfig:
    """Assumptions and output of `pipeline.plan` for a topology."""

    json: bool = key(False, "print JSON", "topology")
    mfu: float | None = key(
        None,
        "model FLOPs utilisation of the forward pass; null: from published figures of chip and kind of model",
        "topology",
        allowed=limits.SHARE,
    )
    usd_per_chip_hour: float | None = key(
        None, "price of a chip; null: the list price", "topology", allowed=limits.NOT_NEGATIVE
    )


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
        None,
        "for `pipeline.plan`: a TPU slice, e.g. `v5e-64` or `v5p:4x4x8`, or GPUs, e.g. `h100-8`; null: this machine",
        allowed=limits.NAME,
    )
    plan: PlanConfig = field(default_factory=PlanConfig)


def default_of(key: Field) -> Any:
    """The default of a key."""
    return key.default if key.default_factory is MISSING else key.default_factory()


def all_fields(cls: type = RunConfig, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Each dotted key with its field. Keys that several data sources have come several times."""
    for f in fields(cls):
        if prefix + f.name == "data":
            for source in SOURCES.values():
                yield from all_fields(source, "data.")
        elif is_dataclass(f.type):
            yield from all_fields(f.type, f"{prefix}{f.name}.")
        elif "doc" in f.metadata:
            yield prefix + f.name, f
