"""A job made ready: model, data and tokenizer opened, the plan made, the store described. Nothing is computed yet."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
from jaxtyping import Int32

from pipeline.cluster.devices import topology
from pipeline.cluster.processes import said_by_first
from pipeline.config.choices import WeightsDtype
from pipeline.config.sampling import Sampling
from pipeline.config.schema import ArcData, DataConfig, GenerateData, RunConfig
from pipeline.core.errors import ConfigError
from pipeline.core.hub import dataset_commit
from pipeline.data.arc.grading import GRADES
from pipeline.data.demand import shortfall
from pipeline.data.documents import Cursor, Source
from pipeline.data.feed import StreamWork
from pipeline.data.selection import Selection, open_selection, selection_identity
from pipeline.data.sources import hub_repository, open_source
from pipeline.data.stream import TokenStream
from pipeline.data.text.tokenizer import TextTokenizer, load_tokenizer
from pipeline.data.tokenised import StreamDocuments, TokenisedDocuments
from pipeline.job.end_tokens import end_tokens
from pipeline.models.checkpoints.checkpoint_files import is_on_hub, open_files
from pipeline.models.registry import Model, open_model
from pipeline.planning.plan import Plan, StoredGeometry, make_plan
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.layout import SELECTED, TOKENS, ArraySpec, StoreLayout, scale_spec
from pipeline.store.format.metadata import StoreMetadata, read_metadata
from pipeline.store.format.target import Target, has_share, larger, stream_share
from pipeline.store.generated.documents import COMPLETION_SCHEMA, RESERVED_COLUMNS, GeneratedDocuments, GeneratedGroups
from pipeline.store.io.kvstore import open_kvstore


@dataclass(frozen=True)
class Job:
    """What a run works with. `metadata` and `layout` describe the store that it fills; `stored` is the metadata of the
    store as it was found, if there is one."""

    config: RunConfig
    model: Model
    source: Source
    tokenizer: TextTokenizer
    selection: Selection | None
    plan: Plan
    data_identity: Mapping[str, object]
    layout: StoreLayout
    stored: StoreMetadata | None

    @cached_property
    def metadata(self) -> StoreMetadata:
        """For a model of the Hub, this fetches its weights. Raises CheckpointError for damaged ones."""
        config, plan = self.config, self.plan
        return StoreMetadata(
            model=_model_identity(self.model, config, self.stored),
            tokenizer=self.tokenizer.identity(),
            data=self.data_identity,
            batch={
                "length": plan.step.length,
                "packing": str(config.batch.packing),
                "long_documents": str(config.batch.long_documents),
            },
            capture={"arrays": [key.name for key in plan.step.keys], "dtype": plan.step.dtype}
            | ({} if plan.step.int8_group is None else {"int8_group": plan.step.int8_group})
            | ({} if plan.step.statistics else {"statistics": False})
            | ({"when": "decode"} if plan.keeps_activations else {})
            | selection_identity(config.capture, plan.step.length),
            store={"compression": str(config.store.compression)},
            num_streams=plan.streams.count,
            rows_per_block=plan.rows_per_block,
            config=_config_for_information(config, self.model),
        )

    def work(self, records: Mapping[int, Sequence[CommitRecord]], target: Target | None = None) -> list[StreamWork]:
        """What is left of this process's streams, given the blocks that the store has. Empty: nothing to do."""
        work = (self.stream_work(stream, records.get(stream, ()), target) for stream in self.plan.streams.local)
        return [item for item in work if item is not None]

    def stream_work(
        self, stream: int, records: Sequence[CommitRecord], target: Target | None = None
    ) -> StreamWork | None:
        """What is left of one stream, whose committed blocks are `records`.

        `target` is the store's. Where another run has raised it beyond what this one wants, this run cuts no block: it
        ends with the block that reaches what it wants, which is then the same as the other run's.
        """
        left = work_left(records, self.plan.streams.budget(stream))
        if left is None:
            return None
        cursor, index, wanted = left
        share = stream_share(larger(target, self.plan.streams.target), self.plan.streams.count, stream)
        budget = None if share is None else share - sum(record.tokens for record in records[:index])
        return StreamWork(self.stream(stream), cursor, index, budget, wanted)

    def is_done(self, records: Mapping[int, Sequence[CommitRecord]]) -> bool:
        """Whether every stream, of whatever process, holds what is asked for."""
        plan = self.plan
        return all(
            work_left(records.get(stream, ()), plan.streams.budget(stream)) is None
            for stream in range(plan.streams.count)
        )

    def shortfall(self, records: Mapping[int, Sequence[CommitRecord]]) -> str | None:
        """By how much the streams of a store that is done fall short of `run.max_tokens`, since their data ended."""
        if self.plan.streams.max_tokens is None:
            return None
        streams = range(self.plan.streams.count)
        stored = [sum(record.tokens for record in records.get(stream, ())) for stream in streams]
        return shortfall(stored, [self.plan.streams.budget(stream) for stream in streams])

    def first_rows(self, num_tokens: int) -> dict[str, Int32[np.ndarray, "B T"]] | None:
        """Tokens, segments and positions of the first rows of the first stream that has any: as many rows as have
        `num_tokens` slots, or the beginning of one; None where there are no documents at all."""
        wanted = (stream for stream in range(self.plan.streams.count) if self.plan.streams.budget(stream) != 0)
        for stream in wanted:
            block = next(self.stream(stream).blocks())
            if block.num_rows:
                part = np.s_[: max(1, num_tokens // self.plan.step.length), :num_tokens]
                return {name: getattr(block, name)[part] for name in ("tokens", "segments", "positions")}
        return None

    def texts(self, stream: int) -> TokenisedDocuments:
        """The source's documents of one stream; with data=generate, the prompts."""
        data = self.config.data
        return TokenisedDocuments(
            self.source,
            self.tokenizer,
            range(stream, len(self.source.shards), self.plan.streams.count),
            on_error=data.on_error,
            vocab_size=self.model.vocab_size,
            **({"max_prompt": data.prompt_length, "long_prompts": data.long_prompts} if self.plan.generation else {}),
        )

    def generated(self, stream: int) -> GeneratedGroups:
        """What data=generate has stored of one stream."""
        parts = [self.source.info_schema, COMPLETION_SCHEMA]
        if isinstance(self.config.data.prompts, ArcData):
            parts.append(GRADES)
        return GeneratedGroups(
            open_kvstore(self.config.store.path),
            stream=stream,
            num_streams=self.plan.streams.count,
            size=self.config.data.group,
            info_schema=pa.unify_schemas(parts),
        )

    def stream(self, stream: int) -> TokenStream:
        """One stream's documents in rows. With data=generate it can be read as far as it is generated."""
        batch = self.config.batch
        documents: StreamDocuments = self.texts(stream)
        if self.plan.generation:
            documents = GeneratedDocuments(self.generated(stream), documents.num_shards)
        return TokenStream(
            documents,
            stream=stream,
            num_streams=self.plan.streams.count,
            rows_per_block=self.plan.rows_per_block,
            length=batch.length,
            packing=batch.packing,
            long_documents=batch.long_documents,
            selection=self.selection,
        )


def work_left(records: Sequence[CommitRecord], budget: int | None) -> tuple[Cursor, int, int | None] | None:
    """Where a stream goes on: cursor, block index and tokens still wanted. None when it is done.

    A truncated block is computed again, whole: it starts at the same cursor and has the same first rows.
    """
    if has_share(records, budget):
        return None
    if records and records[-1].truncated:
        records = records[:-1]
    tokens = sum(record.tokens for record in records)
    cursor = Cursor(**records[-1].next) if records else Cursor()
    return cursor, len(records), None if budget is None else budget - tokens


def open_job(config: RunConfig) -> Job:
    """Opens everything that a run reads, checks it against each other, and plans. No weights are read.

    JAX is asked for the number of devices after what can be wrong without them.

    Raises ConfigError, InputError, CheckpointError, or StoreMismatch.
    """
    stored = read_metadata(config.store.path)
    revision = _agreed_revision(config, stored)
    model = open_model(config.model.path, revision=revision, init=str(config.model.init), seed=config.model.seed)
    tokenizer = load_tokenizer(
        config.model.tokenizer or config.model.path,
        revision=None if config.model.tokenizer else revision,
        special_tokens=config.data.special_tokens,
        prefix=config.data.prefix,
        suffix=config.data.suffix,
    )
    config = replace(config, data=_agreed_data(config.data, stored.config.get("data") if stored else None))
    source = open_source(config.data, tokenizer, stored.data if stored else None)
    geometry = StoredGeometry(stored.num_streams, stored.rows_per_block) if stored else None
    plan = make_plan(config, model, len(source.shards), topology(config.run), geometry)
    if plan.generation:
        model.check_head()
        if taken := sorted({*source.info_schema.names} & RESERVED_COLUMNS):
            raise ConfigError(f"the prompts have a column {taken[0]}, which data=generate has itself. Leave it out.")
    data_identity = _data_identity(config.data, source, model, tokenizer)
    selection = open_selection(config.capture, plan.step.length, tokenizer)
    layout = store_layout(plan, model, str(config.store.compression))
    return Job(config, model, source, tokenizer, selection, plan, data_identity, layout, stored)


def _agreed_revision(config: RunConfig, stored: StoreMetadata | None) -> str | None:
    """The commit of a Hub model that the first process finds, so that all files come from one commit in all processes,
    whatever is pushed meanwhile; `model.revision` for other models.

    A store that names a commit as its model is resumed at that commit, unless another revision is asked for.
    """
    path, revision = config.model.path, config.model.revision
    if not is_on_hub(path):
        return revision
    if revision is None and stored is not None:
        made_with = stored.config.get("model")
        if isinstance(made_with, dict) and made_with.get("path") == path:
            revision = stored.model.get("commit")
    return said_by_first(lambda: open_files(path, revision).commit)


def _agreed_data(data: DataConfig, made_with: object) -> DataConfig:
    """The data with a commit as revision where it is a data set of the Hub: the one that the first process finds.

    `made_with` is the `data` of the configuration that made the store, whose data set is read again at that store's
    revision, unless another one is asked for. A store of an earlier program may have none, and goes on without.
    """
    before = made_with if isinstance(made_with, dict) else {}
    if isinstance(data, GenerateData):
        return replace(data, prompts=_agreed_data(data.prompts, before.get("prompts")))
    repo = hub_repository(data)
    if repo is None:
        return data
    revision = data.revision
    if revision is None and all(before.get(name) == getattr(data, name, None) for name in ("source", "path", "repo")):
        revision = before.get("revision")
        if not isinstance(revision, str):
            return data
    return replace(data, revision=said_by_first(lambda: dataset_commit(repo, revision)))


def sampling(data: GenerateData) -> Sampling:
    """How completions are drawn. Raises ConfigError."""
    return Sampling(data.temperature, data.top_k, data.top_p, data.seed)


def _data_identity(data: DataConfig, source: Source, model: Model, tokenizer: TextTokenizer) -> dict[str, object]:
    """What determines the documents: the source, and what the model is to add to them."""
    if not isinstance(data, GenerateData):
        return source.fingerprint()
    return {
        "source": "generate",
        "head": asdict(model.head),
        "prompts": source.fingerprint(),
        "prompt_length": data.prompt_length,
        "long_prompts": str(data.long_prompts),
        "max_new_tokens": data.max_new_tokens,
        "sampling": asdict(sampling(data)),
        "group": data.group,
        "end_tokens": list(end_tokens(model, tokenizer, data.end_tokens)),
    }


def _model_identity(model: Model, config: RunConfig, stored: StoreMetadata | None) -> dict[str, object]:
    by_commit = stored is not None and "commit" in stored.model  # a store from before weights of the Hub were sampled
    identity = model.identity(by_commit) | {"dtype": str(config.model.dtype), "vocab_size": model.vocab_size}
    if config.model.weights_dtype is not WeightsDtype.same:  # stores from before there was a choice can be resumed
        identity["weights_dtype"] = str(config.model.weights_dtype)
    return identity


def _config_for_information(config: RunConfig, model: Model) -> dict[str, object]:
    values = {name: value for name, value in asdict(config).items() if name != "distributed"}
    if model.checkpoint.commit is not None:
        values["model"]["commit"] = model.checkpoint.commit
    return values


def print_plan(config: RunConfig) -> None:
    """What a run would do, on the devices at hand: nothing is read but headers, and nothing is written."""
    job = open_job(config)
    sites = ", ".join(f"{site} {job.model.width(site)}" for site in job.model.sites)
    num_params = job.model.num_params(job.plan.step.keys)
    flops = job.model.flops_per_token(job.plan.step.keys, job.plan.step.length)
    print(f"model     {job.model.family}, {job.model.num_layers} layers; the capture needs {num_params:,} parameters")
    print(f"sites     {sites}")
    print(f"compute   {flops:,} FLOPs per token")
    print(f"data      {len(job.source.shards)} source shards")
    print(job.plan.describe())


def store_layout(plan: Plan, model: Model, compression: str) -> StoreLayout:
    """The arrays of the store: one per captured key, and its scales if it has any."""
    activations = tuple(
        ArraySpec(
            name=key.name,
            dtype=plan.step.dtype,
            width=width,
            attributes={"layer": key.layer, "site": str(key.site), "hook_name": model.hook_name(key), "d": width},
            slots=TOKENS.slots if plan.step.selected is None else SELECTED.slots,
        )
        for key, width in zip(plan.step.keys, plan.step.widths, strict=True)
    )
    scales = tuple(map(scale_spec, activations, plan.step.scale_counts)) if plan.step.scale_counts else ()
    return StoreLayout(
        plan.streams.count, plan.rows_per_block, plan.step.length, activations, compression, plan.step.selected, scales
    )
