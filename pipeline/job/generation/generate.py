"""The first part of a job with data=generate: the model completes the prompts, and the completions are stored."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
from jaxtyping import Int32
from tqdm import tqdm

from pipeline.cluster import preemption, processes
from pipeline.config.schema import ArcData
from pipeline.core.errors import Interrupted
from pipeline.data.arc.prompts import grade, grid_encoder
from pipeline.data.documents import Cursor
from pipeline.data.feed import Demand
from pipeline.data.text.tokenizer import TextTokenizer
from pipeline.data.tokenised import TokenisedDocument
from pipeline.job.generation.decode import compile_programs
from pipeline.job.generation.generator import Completion, Generator, Prompt
from pipeline.job.generation.stream_groups import StreamGroups
from pipeline.job.job import Job, end_tokens
from pipeline.job.leasing import UnfinishedStreams
from pipeline.job.metrics import run_name
from pipeline.job.watchdog import Watchdog
from pipeline.store.format.block_table import StreamBlocks
from pipeline.store.write.leases import Leases
from pipeline.store.write.store_writer import StoreWriter, metrics_key

log = logging.getLogger("pipeline")

_EDGE_TOKENS = 8  # where tokens are cut from their text, decoders may lose a space or part of a character
_POLL_S = 2.0  # how often a job looks for streams that other jobs have left


def generate(job: Job, store: StoreWriter, stop: preemption.StopRequest) -> None:
    """Generates the missing completions of all streams that this process can lease. Every process of the job calls it,
    and it returns when no stream lacks completions, so that other jobs' streams can be extracted, too.

    Raises Interrupted after a stop request. Complete groups are stored.
    """
    own = store.streams.some(job.plan.streams.local)
    if processes.any_process(any(_open_stream(job, store, *stream) is not None for stream in own.items())):
        generator = _compile(job)
        stop.check()
        _run(job, store, generator, stop)
    processes.wait_for_all()
    if stop.noticed:
        raise Interrupted(
            f"stopped by {stop.signal_name} while generating. Complete groups are stored. Run the same command again "
            f"to resume."
        )


def _run(job: Job, store: StoreWriter, generator: Generator, stop: preemption.StopRequest) -> None:
    options, num_streams, counts = job.config.run, job.plan.streams.count, generator.counts
    leased: dict[int, StreamGroups] = {}
    is_shown = options.progress and processes.is_first()
    with (
        tqdm(unit="tok", unit_scale=True, desc="generate", disable=not is_shown, dynamic_ncols=True) as bar,
        closing(Leases(store.storage, options.lease_s, options.exclusive)) as leases,
        Watchdog(counts, options.stall_timeout_s, leases.close),
    ):
        streams = UnfinishedStreams(store, leases, job.plan.streams.local, partial(_open_stream, job, store))
        while processes.any_process(bool(streams)) and not stop.noticed:
            for completion in generator.run(_prompts(streams, leased), stop.before_step):
                bar.update(len(completion.tokens))
                leased[_stream_of(completion.number, num_streams)].complete(completion)
            if not processes.any_process(bool(leased)):  # other jobs hold all streams that lack completions
                time.sleep(min(_POLL_S, options.lease_s))
            for stream in leased:
                streams.release(stream)
            leased.clear()
    log.info("%s", counts)
    store.storage.write(metrics_key(f"{run_name()}.jsonl"), json.dumps(counts.to_json()).encode() + b"\n")


def _prompts(streams: UnfinishedStreams[StreamGroups], leased: dict[int, StreamGroups]) -> Iterator[Prompt]:
    """Leases one stream after the other, adds it to `leased`, and yields the prompts that it needs."""
    while (groups := streams.take_next()) is not None:
        leased[groups.stream] = groups
        while not groups.is_done:
            yield from filter(groups.wants, groups.next_prompts())


def _compile(job: Job) -> Generator:
    """Loads all layers and the head onto the devices, and compiles prefill and decoding."""
    config, generation = job.config, job.plan.generation
    spec = replace(generation.spec, end_tokens=end_tokens(job.model, job.tokenizer, config.data.end_tokens))
    partition = generation.weights.partition()
    params = job.model.load_leaves(
        job.model.generation.leaves(spec.keys),
        str(config.model.dtype),
        partition.leaf_sharding,
        progress=config.run.progress and processes.is_first(),
        quantised=config.model.quantised,
    )
    programs = compile_programs(job.model, params, partition, spec)
    return Generator(programs, params, partial(_stop_at, job.tokenizer, tuple(config.data.stop)))


def _stop_at(
    tokenizer: TextTokenizer, stop: tuple[str, ...], tokens: Int32[np.ndarray, " C"], checked: int
) -> int | None:
    """The number of tokens with which one of the texts first occurs; None if none does. It is above `checked`.

    A text lies within the last tokens, since each token has at least a byte of it.
    """
    reach = max((len(text.encode()) for text in stop), default=0) + _EDGE_TOKENS

    def occurs(start: int, size: int) -> bool:
        text = tokenizer.decode(tokens[max(0, start) : size])
        return any(each in text for each in stop)

    if not stop or not occurs(checked - reach, len(tokens)):
        return None
    sizes = range(checked + 1, len(tokens) + 1)
    return next((size for size in sizes if occurs(size - reach, size)), None)


def _open_stream(job: Job, store: StoreWriter, stream: int, blocks: StreamBlocks) -> StreamGroups | None:
    """A stream's groups; None if none is missing."""
    work = job.stream_work(stream, blocks)
    if work is None:
        return None
    groups = StreamGroups(
        job.generated(stream),
        job.texts(stream),
        Demand(work.stream, work.start, work.wanted),
        work.start,
        number=lambda cursor: _number(cursor, stream, job.plan.streams.count),
        describe=_describer(job),
        before_write=store.create,
        samples=job.config.data.completions,
    )
    return None if groups.is_done else groups


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
        if completion.score is not None:
            columns["score"] = completion.score
        if encoder is None:
            return columns
        text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
        return columns | grade(prompt.document, text, encoder)

    return describe
