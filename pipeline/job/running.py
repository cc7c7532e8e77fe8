"""Runs a job: opens it and its store, loads the step, fills the store and completes it."""

import logging
from collections.abc import Callable, Iterator

from pipeline.cluster import preemption, processes
from pipeline.config.schema import RunConfig
from pipeline.core.errors import InputError, Interrupted, StoreError, StoreMismatch
from pipeline.data.feed import StreamWork
from pipeline.job.generation.generate import generate
from pipeline.job.job import Job
from pipeline.job.loaded_step import LoadedStep, load_step
from pipeline.job.loop import fill
from pipeline.job.opening import open_job
from pipeline.job.rounding import measure_rounding
from pipeline.step.compiler import use_compilation_cache
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.target import larger
from pipeline.store.write.finishing import describe_skips
from pipeline.store.write.store_writer import StoreWriter

log = logging.getLogger("pipeline")

STREAMS_AT_ONCE = 64  # streams that are read before checking whether any has work left

LoadStep = Callable[[Job], LoadedStep]


def join_and_run(config: RunConfig) -> None:
    """Joins the other processes of this job, if any, then calls `run`."""
    processes.join(config.distributed)
    run(config)


def run(config: RunConfig) -> None:
    """Extracts until the store holds what the configuration asks for; does nothing if it already does.

    Raises a PipelineError. Committed blocks stay valid, and the same call resumes the run.
    """
    use_compilation_cache(config.run.compilation_cache)
    with preemption.stop_on_signals() as stop:
        processes.require_same_config(config)  # later checks use the first process's values
        run_job(open_job(config), stop, load_step)


def run_job(job: Job, stop: preemption.StopRequest, load: LoadStep) -> None:
    """As `run`, for an open job. `load` returns its step, and is called only if there is work."""
    log.info("%s", job.plan.describe())
    stop.check()
    processes.require_same_config(job.config, str(job.plan.weights.sharding), str(job.plan.generation))
    store = open_store(job)
    if job.plan.notes and not store.complete:  # a complete store stays as it is, and notes on new blocks would be wrong
        log.info("%s", job.plan.describe_notes())
    job.manifest.keep()
    if processes.any_process(has_work(job, store)):
        store.reopen(job.plan.streams.target)  # perhaps only another process has found work
        if job.plan.generation:
            generate(job, store, stop)
        if processes.is_first():
            measure_rounding(job, store)
        processes.wait_for_all()  # the watchdog starts later: measuring may take longer than a step
        step = load(job)
        stop.check()
        try:
            fill(job, store, stop, step)
        except Interrupted:
            processes.wait_for_all()  # others may still write blocks, and JAX would not wait for them
            raise
    else:
        log.info("%s already holds everything this job was asked for: nothing to do", store.path)
    processes.wait_for_all()  # so that either all processes exit with 0, or none does
    if processes.is_first():
        complete(job, store)
    processes.wait_for_all()


def open_store(job: Job) -> StoreWriter:
    """Opens the job's store, which is created with its first block. One that holds less than the job asks for is
    opened for more blocks; a larger target than it has is recorded.

    Raises StoreMismatch for a store of a different configuration, and InputError, naming files, if those of a store
    with blocks have changed. Raises StoreError if the store was created after the job was planned: planned again, with
    the store's geometry, the job may fit.
    """
    target = job.plan.streams.target
    try:
        store = StoreWriter.plan(job.storage, job.metadata, job.layout)
        if job.manifest.changes and any(len(blocks.table) for blocks in store.streams.all().values()):
            raise InputError(f"{job.storage.path}: {job.manifest.changes}.")
    except StoreMismatch as error:
        if job.stored is not None:
            raise StoreMismatch(f"{error}\n{job.manifest.changes}".rstrip()) from None
        raise StoreError(
            f"the store {job.storage.path} was created while this job was being planned. Run the same command again."
        ) from error
    if not store.complete or larger(store.root.target, target) != store.root.target or has_work(job, store):
        store.reopen(target)
    return store


def work_left(job: Job, store: StoreWriter) -> Iterator[StreamWork]:
    """The work that is left in this process's own streams, in order. Reads the commit records of a complete store, too,
    since some may have been deleted to have their blocks computed again."""
    streams = job.plan.streams.local
    for start in range(0, len(streams), STREAMS_AT_ONCE):
        read = store.streams.some(streams[start : start + STREAMS_AT_ONCE])
        left = (job.stream_work(stream, blocks) for stream, blocks in read.items())
        yield from (work for work in left if work is not None)


def has_work(job: Job, store: StoreWriter) -> bool:
    """Whether any of this process's own streams has work left."""
    return next(work_left(job, store), None) is not None


def complete(job: Job, store: StoreWriter) -> None:
    """Marks the store complete if it holds what was asked for. Call it on one process, after all have committed."""
    is_complete = store.finish()
    streams = [blocks.table for blocks in store.streams.all().values()]
    if skips := describe_skips(store.storage, BlockTable.join(streams)):
        log.warning("%s skipped %s", store.path, skips)
    if job.is_done(streams):
        if missing := job.shortfall(streams):
            log.warning("%s: %s", store.path, missing)
        if not is_complete:
            log.info("%s is not complete: another run asked for more tokens than it holds", store.path)
    log.info(
        "%s holds %s tokens%s. To read it: from pipeline.store import ActivationStore; "
        "store = ActivationStore.open(%r)",
        store.path,
        f"{sum(blocks.total('tokens') for blocks in streams):,}",
        "" if is_complete else " so far",
        store.path,
    )
