"""Runs a job: opens it, loads the weights, compiles the step, fills the store and completes it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing

import jax

from pipeline.cluster import devices, joining, preemption, processes
from pipeline.config.schema import RunConfig
from pipeline.core.errors import Interrupted, StoreError, StoreMismatch
from pipeline.data.feed import Feed, StreamWork
from pipeline.extraction import int8_probe
from pipeline.extraction.block_writer import BlockWriter
from pipeline.extraction.leasing import LeasedStreams
from pipeline.extraction.loaded_step import LoadedStep, ModelWeights
from pipeline.extraction.loop import ExtractionLoop
from pipeline.extraction.profiling import ProfileWindow
from pipeline.generation.generate import generate
from pipeline.generation.kept_rows import KeptRows
from pipeline.job.metrics import Metrics
from pipeline.job.opening import Job, open_job
from pipeline.job.watchdog import Watchdog
from pipeline.models.attention.choosing import choose_attention
from pipeline.models.decoder import Params
from pipeline.models.int8_weights import with_int8_inputs
from pipeline.models.partition import Partition
from pipeline.models.registry import Model
from pipeline.planning.encoders import Encoder
from pipeline.planning.plan import Plan
from pipeline.step.compilation_cache import use_compilation_cache
from pipeline.step.compiled_step import compile_step, compile_storing, make_partition
from pipeline.store.check.skips import describe_skips
from pipeline.store.format.block_table import BlockTable
from pipeline.store.write.leases import Leases
from pipeline.store.write.store_writer import StoreWriter

log = logging.getLogger("pipeline")

STREAMS_AT_ONCE = 64  # streams that are read before checking whether any has work left

LoadStep = Callable[[Job], LoadedStep]


def join_and_run(config: RunConfig) -> None:
    """Joins the other processes of this job, if any, then calls `run`."""
    joining.initialise(config.distributed)
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
    config = job.config
    log.info("%s\ndevices   %s", job.plan.describe(), describe_devices(job))
    stop.check()
    processes.require_same_config(config, str(job.plan.weights.sharding), str(job.plan.generation))
    store = open_store(job)
    if job.plan.notes and not store.complete:  # a complete store stays as it is, and notes on new blocks would be wrong
        log.info("%s", job.plan.describe_notes())
    job.manifest.keep()
    if processes.any_process(has_work(job, store)):
        store.reopen(job.plan.streams.target)  # perhaps only another process has found work
        if job.plan.generation:
            generate(job, store, stop)
        extract(job, store, stop, load)
    else:
        log.info("%s already holds everything this job was asked for: nothing to do", config.store.path)
    processes.wait_for_all()  # so that either all processes exit with 0, or none does
    if processes.is_first():
        complete(job, store)
    processes.wait_for_all()


def describe_devices(job: Job) -> str:
    """What the job runs on, and its attention. Raises ConfigError for attention that these devices do not have."""
    model, mesh = job.config.model, make_partition(job.plan.mesh.tensor, job.plan.weights.sharding).mesh
    step, dtype = job.plan.step, str(model.dtype)
    attention = choose_attention(step.attention, job.model.arch, mesh, step.rows, step.length, dtype)
    return f"{devices.describe(mesh)}; {attention.describe()}"


def open_store(job: Job) -> StoreWriter:
    """Opens the job's store, which is created with its first block. One that holds less than the job asks for is
    opened for more blocks.

    Raises StoreMismatch for a store of a different configuration. Raises StoreError if the store was created after the
    job was planned: planned again, with the store's geometry, the job may fit.
    """
    path = job.config.store.path
    try:
        store = StoreWriter.open_or_plan(job.storage, job.metadata, job.layout, job.config.run.exclusive)
        if job.manifest.changes and any(len(blocks.table) for blocks in store.streams.all().values()):
            job.manifest.require_unchanged()
    except StoreMismatch as error:
        if job.stored is not None:
            raise StoreMismatch(f"{error}\n{job.manifest.changes}".rstrip()) from None
        raise StoreError(
            f"the store {path} was created while this job was being planned. Run the same command again."
        ) from error
    if not store.complete or has_work(job, store):
        store.reopen(job.plan.streams.target)
        if not job.plan.checks.fail_on_not_finite:
            store.record(may_be_not_finite=True)
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


def extract(job: Job, store: StoreWriter, stop: preemption.StopRequest, load: LoadStep) -> None:
    """Loads the step, and fills the store. Raises Interrupted after a signal."""
    if processes.is_first():
        measure_int8(job, store)
    processes.wait_for_all()  # the watchdog starts later: measuring may take longer than a step
    step = load(job)
    stop.check()
    try:
        fill(job, store, stop, step)
    except Interrupted:
        processes.wait_for_all()  # others may still write blocks, and JAX would not wait for them
        raise


def measure_int8(job: Job, store: StoreWriter) -> None:
    """Records the errors of int8 weights, and of an int8 cache of generation, unless the store has them."""
    config = job.config
    if config.model.has_int8_weights and store.root.weights_error is None:
        store.record(weights_error=int8_probe.weights_error(job))
    has_int8_cache = job.plan.generation is not None and config.data.has_int8_cache
    if has_int8_cache and store.root.cache_error is None:
        store.record(cache_error=int8_probe.cache_error(job))


def load_step(job: Job, devices: Sequence[jax.Device] | None = None) -> LoadedStep:
    """Loads the weights that the captured sites need onto the devices, and compiles the step.

    devices: the devices that the job is planned for; None for all devices of all processes.
    """
    config, plan = job.config, job.plan
    partition = make_partition(plan.mesh.tensor, plan.weights.sharding, devices)
    if plan.keeps_activations:
        compiled = compile_storing(plan.step, partition.mesh, str(config.model.dtype))
        return LoadedStep(compiled, KeptRows(job, partition.mesh), plan.mesh.process_rows)
    params = load_weights(config, job.model, plan, partition, job.encoders)
    compiled = compile_step(job.model, plan.step, params, partition)
    return LoadedStep(compiled, ModelWeights(params), plan.mesh.process_rows)


def load_weights(
    config: RunConfig, model: Model, plan: Plan, partition: Partition, encoders: Sequence[Encoder]
) -> Params:
    """Loads the weights of the SAEs, and those that the captured sites need, onto the devices of the partition."""
    params = model.load(
        plan.step.forward_keys,
        dtype=str(config.model.dtype),
        sharding=partition.leaf_sharding,
        progress=config.run.progress and processes.is_first(),
        with_int8=config.model.has_int8_weights,
        with_head=bool(plan.step.head_outputs),
    )
    if config.model.has_int8_inputs:
        params = with_int8_inputs(params)
    saes = {encoder.spec.name: encoder.load(str(config.model.dtype), partition.mesh) for encoder in encoders}
    return params | {"encoders": saes} if saes else params


def fill(job: Job, store: StoreWriter, stop: preemption.StopRequest, step: LoadedStep) -> Metrics:
    """Extracts the streams that this process can lease into the store, which must not be complete, until no stream has
    work left. Raises ConfigError if a device lacks the memory for a step."""
    options = job.config.run
    plan = job.plan.fitted(step.compiled.memory, devices.topology(options).device_bytes)
    if plan.memory.inflight_steps < job.plan.memory.inflight_steps:
        log.warning("%s", plan.memory.notes[-1])
    own = job.plan.streams.local if options.progress else ()  # not read for anything else before their turn
    stored_tokens = sum(blocks.tokens for blocks in store.streams.some(own).values())
    metrics = Metrics(
        total_tokens=job.plan.streams.max_tokens,
        stored_tokens=processes.total_of_all(stored_tokens),
        progress=options.progress and processes.is_first(),
        interval_s=options.metrics_interval_s,
    )
    with ExitStack() as stack:
        stack.enter_context(closing(metrics))
        leases = stack.enter_context(closing(Leases(store.storage, options.lease_s)))
        leased = LeasedStreams(job, store, leases, metrics)
        writer = BlockWriter(store, plan, metrics, leased)
        feed = stack.enter_context(closing(Feed(leased)))
        stack.enter_context(Watchdog(metrics, options.stall_timeout_s))
        profile = stack.enter_context(closing(ProfileWindow(options))) if options.profile else None
        ExtractionLoop(plan, step, feed, writer, metrics, stop, profile).run()
    log.info("%s", metrics.summary())
    return metrics


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
            log.info(
                "%s is not complete: another run asked for more tokens than it holds. Run that command again, or run "
                "pipeline.finalize with force=true to mark the store as complete as it is",
                store.path,
            )
    log.info(
        "%s holds %s tokens%s. To read it: from pipeline.store import ActivationStore; "
        "store = ActivationStore.open(%r)",
        store.path,
        f"{sum(blocks.total('tokens') for blocks in streams):,}",
        "" if is_complete else " so far",
        store.path,
    )
