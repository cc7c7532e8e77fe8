"""Opens a job: its model, data and tokenizer, its plan, and the layout of its store. Computes nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
from jaxtyping import Int32

from pipeline.cluster import processes
from pipeline.cluster.devices import topology
from pipeline.cluster.topology import Topology
from pipeline.config.schema import ArcData, RunConfig, StoreConfig
from pipeline.core.counts import counted
from pipeline.core.errors import ConfigError, InputError, StoreMismatch
from pipeline.core.sites import ActivationKey, Site
from pipeline.data.arc.grading import GRADES
from pipeline.data.demand import shortfall
from pipeline.data.documents import STREAM_START, Cursor, Source
from pipeline.data.feed import StreamWork
from pipeline.data.selection import Selection, open_selection
from pipeline.data.sources import open_source, renders_chat
from pipeline.data.stream import TokenStream
from pipeline.data.text.tokenizer import TextTokenizer, load_tokenizer
from pipeline.data.tokenised import StreamDocuments, TokenisedDocuments
from pipeline.job.identity import data_identity, store_metadata
from pipeline.job.manifests import JobManifest
from pipeline.job.revisions import model_revision, with_commit, with_date
from pipeline.job.watchdog import time_limit
from pipeline.models.leaves import num_params
from pipeline.models.registry import Model, open_model
from pipeline.models.weight_specs import has_site
from pipeline.planning.encoders import Encoder, open_encoders
from pipeline.planning.plan import Plan, StoredGeometry, make_plan
from pipeline.store.format.block_table import NO_BLOCKS, BlockTable, StreamBlocks
from pipeline.store.format.layout import StoreLayout
from pipeline.store.format.metadata import StoreMetadata, read_metadata
from pipeline.store.format.target import has_share
from pipeline.store.generated.documents import COMPLETION_SCHEMA, RESERVED_COLUMNS, GeneratedDocuments, GeneratedGroups
from pipeline.store.io.storage import Storage, StorageOptions


@dataclass(frozen=True)
class Job:
    """Everything that a run needs.

    metadata, layout: describe the store that the run fills. storage: holds that store. stored: the metadata of an
    existing store that the run resumes.
    """

    config: RunConfig
    model: Model
    source: Source
    tokenizer: TextTokenizer
    selection: Selection | None
    plan: Plan
    data_identity: Mapping[str, object]
    layout: StoreLayout
    stored: StoreMetadata | None
    storage: Storage
    manifest: JobManifest
    encoders: tuple[Encoder, ...]

    @cached_property
    def metadata(self) -> StoreMetadata:
        """Reads the model's weights, to record their identity. Raises CheckpointError for damaged weights."""
        return store_metadata(
            self.config, self.plan, self.model, self.tokenizer, self.data_identity, self.stored, self.encoders
        )

    def require_stored_settings(self) -> None:
        """Raises StoreMismatch if the existing store, which is required, was made with other settings, another
        architecture or other data. Reads no weights, so those of another checkpoint are not noticed."""
        asked = store_metadata(
            *(self.config, self.plan, self.model, self.tokenizer, self.data_identity, self.stored, self.encoders),
            reads_weights=False,
        )
        self.stored.require_same(asked, self.storage.path)
        self.manifest.require_unchanged()

    def work(self) -> list[StreamWork]:
        """The work in this process's streams where nothing is committed."""
        work = (self.stream_work(stream, NO_BLOCKS) for stream in self.plan.streams.local)
        return [item for item in work if item is not None]

    def stream_work(self, stream: int, blocks: StreamBlocks) -> StreamWork | None:
        """The work that is left in one stream, whose committed blocks are `blocks`; None if there is none."""
        if self.is_stream_done(stream, blocks.table):
            return None
        start = STREAM_START if blocks.last is None else Cursor(**blocks.last.next)
        share = self.plan.streams.budget(stream)
        wanted = None if share is None else share - blocks.tokens
        return StreamWork(self.stream(stream), start, len(blocks.table), wanted)

    def is_done(self, streams: Sequence[BlockTable]) -> bool:
        """Whether every stream of the store, of all processes, holds its share of `run.max_tokens`."""
        return all(self.is_stream_done(stream, blocks) for stream, blocks in enumerate(streams))

    def is_stream_done(self, stream: int, blocks: BlockTable) -> bool:
        """Whether a stream, whose committed blocks are `blocks`, holds its share of `run.max_tokens`."""
        return has_share(blocks, self.plan.streams.budget(stream))

    def shortfall(self, streams: Sequence[BlockTable]) -> str | None:
        """By how much a finished store falls short of `run.max_tokens` because the data ended; None if it does not."""
        if self.plan.streams.max_tokens is None:
            return None
        stored = [blocks.total("tokens") for blocks in streams]
        return shortfall(stored, [self.plan.streams.budget(stream) for stream in range(len(streams))])

    def first_rows(self, num_tokens: int) -> dict[str, Int32[np.ndarray, "B T"]] | None:
        """Tokens, segments and positions [B, T] of the first rows of the first stream that is not empty.

        As many rows as fit into `num_tokens` slots, or the beginning of a longer row. None if there are no documents.
        """
        streams = (stream for stream in range(self.plan.streams.count) if self.plan.streams.budget(stream) != 0)
        for stream in streams:
            block = next(self.stream(stream).blocks())
            if block.num_rows:
                part = np.s_[: max(1, num_tokens // self.plan.step.length), :num_tokens]
                return {name: getattr(block, name)[part] for name in ("tokens", "segments", "positions")}
        return None

    def texts(self, stream: int) -> TokenisedDocuments:
        """The tokenised documents of one stream; with data=generate, its prompts."""
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
        """The completed prompts of one stream, as stored by data=generate."""
        parts = [self.source.info_schema, COMPLETION_SCHEMA]
        if isinstance(self.config.data.prompts, ArcData):
            parts.append(GRADES)
        return GeneratedGroups(
            self.storage,
            stream=stream,
            num_streams=self.plan.streams.count,
            size=self.config.data.group,
            info_schema=pa.unify_schemas(parts),
        )

    def stream(self, stream: int) -> TokenStream:
        """One stream's documents, packed into rows. With data=generate, only completed prompts."""
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


def open_job(config: RunConfig, devices: Topology | None = None) -> Job:
    """Opens the inputs of a run, and plans the run. Reads no weights. devices: None for all of JAX's devices.

    Initialises JAX's devices only after the model, the tokenizer and the data are open, so that mistakes in these are
    reported without devices.

    Raises ConfigError, InputError, CheckpointError or StoreMismatch.
    """
    storage = open_storage(config.store, processes.count())
    stored = read_metadata(storage)
    revision = model_revision(config, stored)
    stored_data = stored.config.get("data") if stored else None
    given_date, config = config.data.date, replace(config, data=with_date(config.data, stored_data))
    model, tokenizer = open_model_and_tokenizer(config, revision)
    if renders_chat(config.data):
        with time_limit(config.run.stall_timeout_s):
            tokenizer.require_chat()
        if given_date is not None and "date" not in tokenizer.chat_identity():
            raise ConfigError(
                f"data.date is {given_date}, but the chat template writes no date (strftime_now). Set data.date=null."
            )
    config = replace(config, data=with_commit(config.data, stored_data))
    manifest = JobManifest(storage)
    source = open_source(config.data, tokenizer, manifest.agree)
    geometry = StoredGeometry(stored.num_streams, stored.rows_per_block) if stored else None
    encoders = open_encoders(config.capture, model)
    specs = tuple(encoder.spec for encoder in encoders)
    plan = make_plan(config, model, len(source.shards), devices or topology(config.run), geometry, specs)
    if plan.generation or plan.step.head_outputs:
        model.generation.check_head()
    if plan.generation and (reserved := sorted({*source.info_schema.names} & RESERVED_COLUMNS)):
        raise ConfigError(f"the prompts have a column {reserved[0]}, which data=generate writes. Remove it.")
    return Job(
        config=config,
        model=model,
        source=source,
        tokenizer=tokenizer,
        selection=open_selection(config.capture, plan.step.length, tokenizer),
        plan=plan,
        data_identity=data_identity(config.data, source, model, tokenizer),
        layout=store_layout(plan, str(config.store.compression)),
        stored=stored,
        storage=storage,
        manifest=manifest,
        encoders=encoders,
    )


def open_model_and_tokenizer(config: RunConfig, revision: str | None) -> tuple[Model, TextTokenizer]:
    """The model at a revision, and `model.tokenizer` or the model's own tokenizer at the same revision.

    Raises ConfigError, InputError or CheckpointError.
    """
    path, data = config.model.path, config.data
    model = open_model(path, revision=revision, init=str(config.model.init), seed=config.model.seed)
    tokenizer = load_tokenizer(
        config.model.tokenizer or path,
        revision=None if config.model.tokenizer else revision,
        special_tokens=data.special_tokens,
        prefix=data.prefix,
        suffix=data.suffix,
        date=data.date,
        template_kwargs=data.template_kwargs,
    )
    return model, tokenizer


def replanned(job: Job, devices: Topology) -> Job:
    """The job planned for other devices or another reader, without an existing store. Raises ConfigError."""
    specs = tuple(encoder.spec for encoder in job.encoders)
    plan = make_plan(job.config, job.model, len(job.source.shards), devices, None, specs)
    return replace(job, plan=plan, layout=store_layout(plan, str(job.config.store.compression)))


def open_storage(config: StoreConfig, num_processes: int) -> Storage:
    """The storage of a run's store, which `num_processes` processes write at the same time.

    Raises ConfigError, StoreInvalid and StoreError.
    """
    options = StorageOptions(
        config.retries,
        config.retry_delay_s,
        config.concurrency,
        config.copy_threads,
        None if config.ramp_up is None else config.ramp_up / num_processes,
    )
    return Storage.open(config.path, options)


def _widths(model: Model, site: Site, length: int) -> str:
    """A site's width as text, or the widths of its layers if they differ."""
    layers = (
        [layer for layer in range(model.num_layers) if has_site(model.arch, layer, site)] if site.per_layer else [-1]
    )
    return " or ".join(map(str, sorted({model.width(ActivationKey(layer, site), length) for layer in layers})))


def print_plan(config: RunConfig) -> None:
    """Prints what a run would do on this machine's devices. Reads only headers, and writes nothing."""
    job = open_job(config)
    sites = ", ".join(f"{site} {_widths(job.model, site, config.batch.length)}" for site in job.model.sites)
    step = job.plan.step
    parameters = num_params(job.model.leaves(step.forward_keys, with_head=bool(step.head_outputs)))
    flops = job.model.flops_per_token(step.forward_keys, step.length, head_share=step.head_share) + step.encoder_flops
    print(f"model     {job.model.family}, {job.model.num_layers} layers; the capture needs {parameters:,} parameters")
    print(f"sites     {sites}")
    print(f"compute   {flops:,} FLOPs per token")
    print(f"data      {counted(len(job.source.shards), 'source shard')}")
    print(job.plan.describe())
    if job.plan.notes:
        print(job.plan.describe_notes())
    if job.stored is not None:
        try:
            job.require_stored_settings()
        except (StoreMismatch, InputError) as error:
            print(f"note      a run would be refused: {error}")


def store_layout(plan: Plan, compression: str) -> StoreLayout:
    """The geometry and the arrays of the plan's store."""
    stored = plan.step.stored_arrays
    return StoreLayout(
        num_streams=plan.streams.count,
        rows_per_block=plan.rows_per_block,
        length=plan.step.length,
        arrays=stored.activations,
        compression=compression,
        selected=plan.step.selected,
        scales=stored.scales,
        outputs=stored.outputs,
    )
