"""Activations in memory, for notebooks and scripts: `from pipeline import Extractor`."""

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from tqdm import tqdm

from pipeline.cluster import preemption, processes
from pipeline.cluster.devices import open_devices, topology
from pipeline.config.choices import Attention, LongDocuments, Packing, Positions
from pipeline.core import arguments
from pipeline.core.arguments import require_not_forked
from pipeline.core.errors import ConfigError, StoreMismatch
from pipeline.data.documents import STREAM_START, SkippedDocument, TokenBlock
from pipeline.data.packing import windows
from pipeline.data.selection import open_selection
from pipeline.data.stream import TokenStream
from pipeline.data.text.contexts import open_added, restarted
from pipeline.data.tokenised import TokenisedDocument, TokenisedDocuments
from pipeline.job.inputs import pinned
from pipeline.job.job import weights_identity
from pipeline.job.loaded_step import LoadedStep, load_weights
from pipeline.job.opening import open_job, open_model_and_tokenizer
from pipeline.job.running import run_job
from pipeline.job.writing.transfer import check_finite, in_flight, warn_of_unselected
from pipeline.library.inputs import DocumentInput, GivenDocuments, MemorySource, write_documents
from pipeline.library.results import Collector, ExtractedDocument
from pipeline.library.settings import configuration, settings
from pipeline.library.shapes import Shape, ladder, smallest
from pipeline.planning.encoders import open_encoders
from pipeline.planning.plan import make_plan
from pipeline.planning.sae_contexts import compare_contexts, with_sae_contexts
from pipeline.step.compiled_step import CompiledStep, StepOutputs, compile_step
from pipeline.store.read.frameworks import Dtype, converter, parsed_dtype, parsed_framework
from pipeline.store.read.reader import ActivationStore

log = logging.getLogger("pipeline")

_DEFAULT_LENGTH = 512  # tokens of a row, unless the model has fewer positions
_RENDERED = {"data.template_kwargs": None, "data.date": None}  # chats are rendered before they are read as texts
_NEVER_S = 1e9  # disables the watchdog: a library must not end its process


class Extractor:
    """Loads a model once, and computes the activations of documents.

        extractor = Extractor("Qwen/Qwen2.5-0.5B", layers=[6, 12], sites=["resid_post"])
        [result] = extractor(["The capital of France is Paris."])
        result.tokens, result.activations["blocks.6.resid_post"]     # [n], [n, d]
        extractor.save("store", texts)                               # a store, as the command writes it

    It runs the same step as the command, on all devices that JAX finds, in one process, and packs documents into rows
    as the command does. Steps have one of a few shapes: `shapes`. The step is compiled for a shape when a call first
    needs it; `compiled_shapes` lists these shapes, and the log (`pipeline`) reports each.

    config: the command's configuration for the same extraction. model, tokenizer, plan: the opened model and tokenizer
    (None if the model has none: it takes token ids), and the plan. hook_names: the TransformerLens name of each array
    of activations, by our name.
    """

    def __init__(
        self,
        model: str,
        layers: Sequence[int] | int | str,
        sites: Sequence[str] | str = ("resid_post",),
        *,
        dtype: Dtype = "bfloat16",
        model_dtype: Dtype = "bfloat16",
        length: int | None = None,
        progress: bool = True,
        **options: object,
    ) -> None:
        """Opens the model and its tokenizer, and loads the weights that the captured layers need.

        model: a Hub name, a local folder or a gs:// address. layers: a number from 0, a negative one from the last, a
        list of these, or "all". sites: as in `capture.sites`, or TransformerLens' names; one or several. dtype: dtype
        of the activations. model_dtype: dtype that the model computes in. length: tokens per row; by default 512, or
        the model's number of positions if that is smaller. Longer documents are split. progress: show progress bars
        while loading, and for calls of several steps.

        Every other option is the last part of a key of the command's configuration, with its default and its values:
        revision, adapter, tokenizer, weights_dtype, attention, weights, init and seed of `model`; on_error,
        special_tokens, prefix, suffix, template_kwargs and date of `data`; rows, packing, long_documents,
        windows and separator of `batch`; scale_group, outputs, top_logprobs, on_not_finite, positions, every, token,
        regex, rate, per_row, keep, encode and encode_* of `capture`, whose seed is sample_seed; shard_mib,
        rows_per_block and compression of `store`; tensor of `mesh`; reserved_mib of `run`.

        Raises ConfigError, InputError or CheckpointError, as the command does.
        """
        given = dict(model=model, layers=layers, sites=sites, dtype=dtype, model_dtype=model_dtype, **options)
        self._settings = settings(given | ({} if length is None else {"length": length}))
        config = configuration(self._settings)
        require_not_forked("JAX")
        open_devices()
        if processes.count() > 1:
            raise ConfigError(
                f"this process is one of {processes.count()} that have joined, but an Extractor runs in a single "
                "process. On several hosts, use python -m pipeline.run."
            )
        _, revision = pinned(configuration(self._settings, _RENDERED), None)
        self.model, self.tokenizer = open_model_and_tokenizer(config, revision, is_optional=True)
        self._settings["model.revision"] = revision  # `save` uses the same commit of a Hub model
        self._settings["batch.length"] = length or min(_DEFAULT_LENGTH, self.model.max_positions)
        self._settings["run.progress"] = progress
        self.config = configuration(self._settings)
        self._encoders = open_encoders(self.config.capture, self.model)
        self.config = with_sae_contexts(self.config, self._encoders, self.tokenizer)
        compare_contexts(self.config, self._encoders, self.tokenizer, in_rows=False)
        specs = tuple(encoder.spec for encoder in self._encoders)
        plan = self.plan = make_plan(self.config, self.model, 1, topology(self.config.run), encoders=specs)
        self.hook_names = {key.name: self.model.hook_name(key) for key in self.plan.step.keys}
        step, data = self.plan.step, self.plan.mesh.data
        self.shapes: tuple[Shape, ...] = ladder(step.rows, step.length, data, self._takes_any_length())
        self._selection = open_selection(self.config.capture, self.config.batch, self.tokenizer)
        self._added = open_added(self.config.batch, self.tokenizer)
        self._partition = plan.weights.partition()
        self._identity = weights_identity(self.model, self._encoders)
        self._params = load_weights(self.config, self.model, self.plan, self._partition, self._encoders)
        self._compiled: dict[Shape, CompiledStep] = {}

    def __repr__(self) -> str:
        arrays = ", ".join(key.name for key in self.plan.step.keys)
        return f"Extractor({self.config.model.path!r}: {arrays} as {self.plan.step.dtype})"

    @property
    def compiled_shapes(self) -> tuple[Shape, ...]:
        """The shapes that the step was compiled for, in the order of compilation."""
        return tuple(self._compiled)

    def __call__(
        self,
        documents: Iterable[DocumentInput],
        *,
        framework: str = "numpy",
        dtype: Dtype = None,
        add_generation_prompt: bool = False,
    ) -> list[ExtractedDocument]:
        """Computes the activations of each document, in order, in memory.

        A document is a text, a list of token ids (without padding, used unchanged), or a chat,
        [{"role": ..., "content": ...}, ...], which the tokenizer's chat template renders. add_generation_prompt: append
        the beginning of an answer to chats.
        framework, dtype: of the returned activations, as in `ActivationStore.batches`: numpy's are float32 unless dtype
        is "stored", for the Extractor's.

        A document longer than `length` is split into windows, and their activations are concatenated; a window does not
        attend to earlier windows. With `long_documents="cut"` only the first window is computed. `windows="restart"`
        repeats the tokens that begin and end the document in each window.

        Raises ConfigError with `packing="concat"`, where results would depend on the other documents; InputError for a
        document without tokens, or with tokens outside the model's vocabulary (with `on_error="skip"` its result is
        empty instead); NotFiniteError for activations that are not finite as `dtype`; and ArgumentError for an unknown
        framework or dtype.
        """
        require_not_forked("JAX")
        if self.config.batch.packing is Packing.concat:
            raise ConfigError(
                "packing='concat' joins documents in rows, so a call's results would depend on its other documents. "
                "Use save(), or packing='pack'."
            )
        convert = converter(parsed_framework(framework), parsed_dtype(dtype))
        source = self._source(documents, add_generation_prompt)
        settings = {"on_error": self.config.data.on_error, "vocab_size": self.model.vocab_size, "added": self._added}
        items = list(TokenisedDocuments(source, self.tokenizer, range(1), **settings).read(STREAM_START))
        tokenised = [item for item in items if not isinstance(item, SkippedDocument)]
        if len(tokenised) < len(items):
            log.warning("skipped %d of %d documents; result.skipped says why", len(items) - len(tokenised), len(items))
        collector = Collector(self.plan.step)
        for block, first_row, outputs in self._steps(tokenised):
            check_finite(self.plan, block, np.asarray(outputs.counts)[1:].tolist())
            collector.add(block, first_row, outputs)
        return collector.documents(items, convert, parsed_framework(framework))

    def save(
        self,
        path: str | os.PathLike[str],
        documents: Iterable[DocumentInput],
        *,
        ids: Iterable[str] | None = None,
        max_tokens: int | None = None,
        add_generation_prompt: bool = False,
    ) -> ActivationStore:
        """Writes the activations of texts and chats, or of lists of token ids, into a store, and opens it.

        path: local, gs:// or s3://. ids: the documents' ids; by default their numbers. max_tokens: the least number of
        tokens to store, in whole blocks; None for all.

        The store equals the one that `python -m pipeline.run` creates from a parquet file of these texts, or token
        ids (`data.tokens`). Therefore the same call resumes an interrupted store (Ctrl-C raises Interrupted after
        complete blocks are committed) and does nothing to a complete one; a larger `max_tokens` extends it. Raises
        StoreMismatch if the path has a store of different documents or options, and any other PipelineError that the
        command raises.
        """
        if self.config.capture.positions is Positions.labels:
            raise ConfigError(
                "positions='labels', but save() stores texts without labels. Call the Extractor, or use the command "
                "with data=hf and data.messages."
            )
        contents = self._source(documents, add_generation_prompt, are_alike=True).contents()
        with tempfile.TemporaryDirectory() as folder:
            settings = _RENDERED | write_documents(contents, folder, ids)
            settings |= {"store.path": arguments.path("path", path), "run.max_tokens": max_tokens}
            config = configuration(self._settings, settings | {"run.stall_timeout_s": _NEVER_S})
            with preemption.stop_on_signals() as stop:
                job = open_job(config)
                if weights_identity(job.model, job.encoders) != self._identity:
                    raise StoreMismatch(
                        f"the model {config.model.path}, or an SAE, changed after this Extractor loaded it. Create a "
                        "new Extractor."
                    )
                run_job(job, stop, lambda _: self._loaded(self.shapes[-1]))
        return ActivationStore.open(config.store.path)

    def _takes_any_length(self) -> bool:
        """Whether rows may be shorter. Kernels restrict the length; slots of selected tokens are per whole row."""
        return self.config.model.attention in (Attention.auto, Attention.xla) and self.plan.step.selected is None

    def _source(
        self, documents: Iterable[DocumentInput], add_generation_prompt: bool, are_alike: bool = False
    ) -> MemorySource:
        on_error = self.config.data.on_error
        return MemorySource(documents, self.tokenizer, on_error, add_generation_prompt, are_alike=are_alike)

    def _loaded(self, shape: Shape) -> LoadedStep:
        """The step for one shape, compiled on first use."""
        if shape not in self._compiled:
            spec = replace(self.plan.step, rows=shape.rows, length=shape.length)
            self._compiled[shape] = compile_step(self.model, spec, self._params, self._partition)
            self.plan = self.plan.fitted(self._compiled[shape].memory, topology(self.config.run).device_bytes)
        return LoadedStep(self._compiled[shape], lambda _block, _rows: self._params, shape.rows)

    def _steps(self, documents: Sequence[TokenisedDocument]) -> Iterator[tuple[TokenBlock, int, StepOutputs]]:
        """The steps of a call, in order, each with the block and the first of its rows that it computes. Later steps
        are in flight when one is yielded."""
        if not documents:
            return iter(())
        batch, length = self.config.batch, self.plan.step.length
        if long := [len(document.tokens) for document in documents if len(document.tokens) > length]:
            log.warning(
                "%d of %d documents are longer than length=%d (the longest has %d tokens): long_documents=%s applies",
                *(len(long), len(documents), length, max(long), batch.long_documents),
            )
        totals = (len(restarted(document.tokens, length, self._added)) for document in documents)
        num_windows = 1 if batch.long_documents is LongDocuments.cut else None
        ranges = (windows(total, length, overlap=batch.overlap)[:num_windows] for total in totals)
        sizes = np.array([last - first + min(first, batch.overlap) for pieces in ranges for first, last in pieces])
        shape = smallest(self.shapes, sizes, batch.packing)
        step = self._loaded(shape)
        stream = TokenStream(
            GivenDocuments(documents, self._added),
            stream=0,
            num_streams=1,
            rows_per_block=self.plan.rows_per_block if shape == self.shapes[-1] else shape.rows,
            length=shape.length,
            packing=batch.packing,
            long_documents=batch.long_documents,
            selection=self._selection,
        )
        return in_flight(self._dispatched(stream, step, int(sizes.sum())), self.plan.memory.inflight_steps)

    def _dispatched(
        self, stream: TokenStream, step: LoadedStep, num_tokens: int
    ) -> Iterator[tuple[TokenBlock, int, StepOutputs]]:
        spec = step.compiled.spec
        is_shown = self.config.run.progress and num_tokens > spec.rows * spec.length
        with tqdm(desc="extract", total=num_tokens, unit="tok", unit_scale=True, disable=not is_shown) as bar:
            for block in stream.blocks():
                warn_of_unselected(self.plan, block)
                for first_row in range(0, block.num_rows, spec.rows):
                    outputs = step(block, first_row)
                    for values in (*outputs.arrays, outputs.counts):
                        values.copy_to_host_async()
                    yield block, first_row, outputs
                    bar.update(int(np.count_nonzero(block.segments[first_row : first_row + spec.rows])))
