"""The first part of a job with data=generate: the model completes the prompts, and the completions are stored."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing

from pipeline.cluster import preemption, processes
from pipeline.config.schema import ArcData
from pipeline.core.errors import Interrupted
from pipeline.data.arc.encoders import grid_encoder
from pipeline.data.arc.grading import grade
from pipeline.data.documents import Cursor
from pipeline.data.tokenised import TokenisedDocument
from pipeline.generation.generator import Completion, Generator, Prompt, compile_generator
from pipeline.generation.progress import GenerationProgress
from pipeline.generation.spec import GenerationSpec
from pipeline.generation.stream_groups import StreamGroups
from pipeline.job.end_tokens import end_tokens
from pipeline.job.identity import sampling
from pipeline.job.opening import Job
from pipeline.job.watchdog import Watchdog
from pipeline.models.int8_weights import with_int8_inputs
from pipeline.step.compiled_step import make_partition
from pipeline.store.format.block_table import StreamBlocks
from pipeline.store.write.store_writer import StoreWriter

log = logging.getLogger("pipeline")


def generate(job: Job, store: StoreWriter, stop: preemption.StopRequest) -> None:
    """Generates the missing completions of this process's streams. Every process of the worker calls it, and it returns
    when all of them have finished.

    Raises Interrupted after a stop request. Complete groups are stored.
    """
    opened = (
        _open_stream(job, store, stream, blocks)
        for stream, blocks in store.streams.some(job.plan.streams.local).items()
    )
    streams = [stream for stream in opened if stream is not None]
    if processes.any_process(any(not stream.is_done for stream in streams)):
        generator = _compile(job)
        stop.check()
        _run(job, store, generator, {stream.stream: stream for stream in streams}, stop)
    processes.wait_for_all()
    if stop.noticed:
        raise Interrupted(
            f"stopped by {stop.signal_name} while generating. Complete groups are stored. Run the same command again "
            f"to resume."
        )


def _run(
    job: Job,
    store: StoreWriter,
    generator: Generator,
    streams: Mapping[int, StreamGroups],
    stop: preemption.StopRequest,
) -> None:
    options = job.config.run
    progress = GenerationProgress(generator.counts, progress=options.progress and processes.is_first())

    def before_segment() -> bool:
        progress.step()
        return stop.before_step()

    with closing(progress), Watchdog(progress, options.stall_timeout_s):
        for completion in generator.run(_alternate_streams(streams.values()), before_segment):
            progress.completed(completion)
            streams[_stream_of(completion.number, job.plan.streams.count)].complete(completion)
    log.info("%s", progress.summary())
    store.write_metrics(progress.name, progress.to_json())


def _compile(job: Job) -> Generator:
    """Loads all layers and the head onto the devices, and compiles prefill and decoding."""
    config, plan, generation = job.config, job.plan, job.plan.generation
    options, keys = config.data, plan.step.keys if plan.keeps_activations else ()
    partition = make_partition(generation.tensor, generation.weights.sharding)
    params = job.model.load_leaves(
        job.model.generation.leaves(keys),
        str(config.model.dtype),
        partition.leaf_sharding,
        progress=config.run.progress and processes.is_first(),
        with_int8=config.model.has_int8_weights,
    )
    if config.model.has_int8_inputs:
        params = with_int8_inputs(params)
    spec = GenerationSpec(
        rows=generation.rows,
        max_prompt=generation.prompt_length,
        max_new_tokens=generation.max_new_tokens,
        end_tokens=end_tokens(job.model, job.tokenizer, options.end_tokens),
        sampling=sampling(options),
        keys=keys,
        dtype=str(config.model.dtype),
        cache_is_int8=options.has_int8_cache,
        attention=plan.step.attention,
    )
    return compile_generator(job.model, params, partition, spec)


def _open_stream(job: Job, store: StoreWriter, stream: int, blocks: StreamBlocks) -> StreamGroups | None:
    """A stream's missing groups; None if all its blocks are committed."""
    work = job.stream_work(stream, blocks)
    if work is None:
        return None
    return StreamGroups(
        job.generated(stream),
        job.texts(stream),
        work.stream.demand(work.start, work.wanted),
        work.start,
        number=lambda cursor: _number(cursor, stream, job.plan.streams.count),
        describe=_describer(job),
        kept=job.plan.step.keys if job.plan.keeps_activations else (),
        before_write=store.create,
    )


def _alternate_streams(streams: Sequence[StreamGroups]) -> Iterator[Prompt]:
    """The prompts of one group of each stream, then of the next group of each, and so on."""
    turns = deque(streams)
    while turns:
        stream = turns.popleft()
        if not stream.is_done:
            turns.append(stream)
            yield from filter(stream.wants, stream.next_prompts())


def _number(cursor: Cursor, stream: int, num_streams: int) -> int:
    """A prompt's number. It consists of the source shard and the row in it, so that it does not depend on the number of
    streams."""
    return (cursor.shard * num_streams + stream << 32) + cursor.document


def _stream_of(number: int, num_streams: int) -> int:
    return (number >> 32) % num_streams


def _describer(job: Job) -> Callable[[TokenisedDocument, Completion], dict[str, object]]:
    """Returns a function that makes the columns of a completed document."""
    data, tokenizer = job.config.data, job.tokenizer
    encoder = grid_encoder(data.prompts) if isinstance(data.prompts, ArcData) else None

    def describe(prompt: TokenisedDocument, completion: Completion) -> dict[str, object]:
        columns = {
            "n_prompt": len(prompt.tokens),
            "n_prompt_cut": prompt.num_cut,
            "n_completion": len(completion.tokens),
            "finish_reason": completion.finish_reason,
            "sampling_seed": data.seed,
        }
        if encoder is None:
            return columns
        text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
        return columns | grade(prompt.document, text, encoder)

    return describe
