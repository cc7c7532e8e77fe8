"""A job, opened but not run: its inputs, plan and streams, and the identity that its store records."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from jaxtyping import Int32

from pipeline.config.schema import ArcData, GenerateData, RunConfig
from pipeline.core.errors import CheckpointError
from pipeline.data.arc.prompts import GRADES
from pipeline.data.documents import STREAM_START, Cursor, Source
from pipeline.data.feed import StreamWork, shortfall
from pipeline.data.selection import Selection, selection_identity
from pipeline.data.stream import TokenStream
from pipeline.data.text.contexts import Added, open_added
from pipeline.data.text.tokenizer import TextTokenizer
from pipeline.data.tokenised import StreamDocuments, TokenisedDocuments
from pipeline.job.inputs import JobManifest
from pipeline.models.registry import Model
from pipeline.planning.encoders import Encoder
from pipeline.planning.plan import Plan
from pipeline.store.format.block_table import NO_BLOCKS, BlockTable, StreamBlocks
from pipeline.store.format.layout import OUTPUTS, StoreLayout
from pipeline.store.format.metadata import StoreMetadata
from pipeline.store.format.target import has_share
from pipeline.store.generated.documents import (
    COMPLETION_SCHEMA,
    SAMPLE_SCHEMA,
    SCORE_SCHEMA,
    GeneratedDocuments,
    GeneratedGroups,
)
from pipeline.store.io.storage import Storage


@dataclass(frozen=True)
class Job:
    """Everything that a run needs. storage: holds the store that the run fills. stored: the metadata of an existing
    store that the run resumes."""

    model: Model
    source: Source
    tokenizer: TextTokenizer | None  # None for token ids of a model without one
    selection: Selection | None
    plan: Plan
    stored: StoreMetadata | None
    storage: Storage
    manifest: JobManifest
    encoders: tuple[Encoder, ...]

    @property
    def config(self) -> RunConfig:
        return self.plan.config

    @property
    def layout(self) -> StoreLayout:
        """The geometry and the arrays of the store."""
        return self.plan.layout

    @cached_property
    def added(self) -> Added:
        """The tokens that `batch` adds to documents. Raises ConfigError."""
        return open_added(self.config.batch, self.tokenizer)

    @cached_property
    def metadata(self) -> StoreMetadata:
        """What the store records, and what must match for a run to resume it. Reads the model's weights; downloads
        those of a Hub model first. Raises CheckpointError for damaged weights."""
        config, plan = self.config, self.plan
        return StoreMetadata(
            model=self._model_identity(),
            tokenizer={} if self.tokenizer is None else self.tokenizer.identity(),
            data=self.data_identity,
            batch=self._batch_identity(),
            capture=self._capture_identity(),
            store={
                "compression": str(config.store.compression),
                **({} if plan.shard_bytes is None else {"shard_bytes": plan.shard_bytes}),
            },
            num_streams=plan.streams.count,
            rows_per_block=plan.rows_per_block,
            config=self._recorded_config(),
        )

    @cached_property
    def data_identity(self) -> dict[str, object]:
        """Identifies the documents: by the source and, with data=generate, by how the model completes its prompts.

        Raises ConfigError or CheckpointError for end tokens that the tokenizer or the model does not have.
        """
        data, prompts = self.config.data, self.source.fingerprint()
        if not isinstance(data, GenerateData):
            return prompts
        return {
            "source": "generate",
            "head": asdict(self.model.head),
            "prompts": prompts,
            "prompt_length": data.prompt_length,
            "long_prompts": str(data.long_prompts),
            "max_new_tokens": data.max_new_tokens,
            "sampling": asdict(self.plan.generation.spec.sampling),
            "group": data.group_size,
            "end_tokens": list(end_tokens(self.model, self.tokenizer, data.end_tokens)),
            "cache_dtype": str(data.cache_dtype),
            **({"samples": data.samples} if data.samples > 1 else {}),
            **({"beams": data.beams} if data.beams > 1 else {}),
            **({"stop": list(data.stop)} if data.stop else {}),
        }

    def _batch_identity(self) -> dict[str, object]:
        batch = self.config.batch
        return {
            "length": batch.length,
            "packing": str(batch.packing),
            "long_documents": str(batch.long_documents),
            "windows": str(batch.windows),
            "overlap": batch.overlap,
            "separator": batch.separator,
        }

    def _model_identity(self) -> dict[str, object]:
        dtypes = {name: str(getattr(self.config.model, name)) for name in ("dtype", "weights_dtype")}
        return {**self.model.identity(), **dtypes, "vocab_size": self.model.vocab_size}

    def _capture_identity(self) -> dict[str, object]:
        step, capture = self.plan.step, self.config.capture
        identity: dict[str, object] = {
            "arrays": [key.name for key in step.keys],
            "dtype": step.dtype,
            "statistics": capture.statistics,
            "when": str(capture.when),
        }
        if step.scale_group is not None:
            identity["scale_group"] = step.scale_group
        if step.head_outputs:
            identity["outputs"] = [name for name in OUTPUTS if name in capture.outputs]
            identity["head"] = asdict(self.model.head)
        if step.num_top:
            identity["top_logprobs"] = step.num_top
        if self.encoders:
            saes = [encoder.identity() for encoder in self.encoders]
            identity |= {"encode": saes, "encode_index": capture.encode_index}
        return identity | selection_identity(capture, self.config.batch)

    def _recorded_config(self) -> dict[str, object]:
        """The configuration, with the commits of a Hub model and adapter. For information, not compared on resume."""
        values = {name: value for name, value in asdict(self.config).items() if name != "distributed"}
        values["model"] |= self.model.checkpoint.commits
        return values

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
            added=self.added,
            **({"max_prompt": data.prompt_length, "long_prompts": data.long_prompts} if self.plan.generation else {}),
        )

    def generated(self, stream: int) -> GeneratedGroups:
        """The completed prompts of one stream, as stored by data=generate."""
        parts = [self.source.info_schema, COMPLETION_SCHEMA]
        if isinstance(self.config.data.prompts, ArcData):
            parts.append(GRADES)
        if self.config.data.completions > 1:
            parts.append(SAMPLE_SCHEMA)
        if self.config.data.beams > 1:
            parts.append(SCORE_SCHEMA)
        return GeneratedGroups(
            self.storage,
            stream=stream,
            num_streams=self.plan.streams.count,
            size=self.config.data.group_size,
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


def weights_identity(model: Model, encoders: Sequence[Encoder]) -> list[dict[str, object]]:
    """The identities of the model's weights and of its SAEs'. Reads them."""
    return [model.identity(), *(encoder.identity() for encoder in encoders)]


def end_tokens(model: Model, tokenizer: TextTokenizer, texts: Sequence[str] | None) -> tuple[int, ...]:
    """The sorted ids of `texts`; if None, those of generation_config.json or else config.json, as in transformers. In
    multimodal checkpoints they may be in its `text_config`.

    Raises ConfigError for a text that is not a single token, and CheckpointError for an id outside the vocabulary.
    """
    if texts is not None:
        return tuple(sorted({tokenizer.token_id("data.end_tokens", text) for text in texts}))
    checkpoint = model.checkpoint
    configs = checkpoint.generation_config, checkpoint.config, checkpoint.config.get("text_config", {})
    eos_token_id = next((config["eos_token_id"] for config in configs if "eos_token_id" in config), None)
    ids = eos_token_id if isinstance(eos_token_id, list) else [] if eos_token_id is None else [eos_token_id]
    if not all(type(number) is int and 0 <= number < model.vocab_size for number in ids):
        raise CheckpointError(
            f"{checkpoint.where}: eos_token_id is {eos_token_id}, expected token ids below {model.vocab_size}. Set "
            "data.end_tokens."
        )
    return tuple(sorted(set(ids)))
