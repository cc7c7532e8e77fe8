"""Batches of activations, computed during training without a store: `from pipeline import Stream`."""

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Self

import jax

from pipeline.cluster.devices import Topology, open_devices, topology
from pipeline.config import composing
from pipeline.config.schema import GenerateData, ParquetData, RunConfig
from pipeline.core.arguments import flag, integer, items, path, require_not_forked
from pipeline.core.errors import ArgumentError, ConfigError, StoreMismatch
from pipeline.core.messages import counted, shown
from pipeline.core.sites import ActivationKey
from pipeline.job.job import Job, weights_identity
from pipeline.job.loaded_step import load_step
from pipeline.job.opening import open_job, replanned
from pipeline.library.settings import plain, settings
from pipeline.library.stream_reader import StreamReader
from pipeline.step.compiler import use_compilation_cache
from pipeline.store.format.layout import MIB, SIDE_ARRAYS
from pipeline.store.format.statistics import Normalisation, Statistics
from pipeline.store.read.frameworks import STORED, Dtype
from pipeline.store.read.gathering import AHEAD, sample_statistics
from pipeline.store.read.options import ArrayNames, BatchArrays, BatchOptions, Key, TokenFilter, as_keys

BUFFER_TOKENS = 1 << 18
_NO_STORE = "memory://stream/"
_SAMPLE_BATCH = 4096


class Stream:
    """Computes batches of activations of a model on its data, during training.

        stream = Stream("Qwen/Qwen2.5-0.5B", layers=[12], data="hf://datasets/owner/name/*.parquet")
        batches = stream.batches(4096, seed=0, framework="torch")
        for batch in batches:
            batch.activations                        # [4096, d]
            checkpoint["stream"] = batches.state()   # small; `batches(..., state=...)` continues bit for bit

    Tokens and values equal those in a store of the same configuration. Nothing is written unless `batches` is given a
    store to fill. The data is read once, in order, shuffled within half a buffer.

    config: the command's configuration. keys: the activations that are captured.
    """

    def __init__(
        self,
        model: str,
        layers: Sequence[int] | int | str,
        sites: Sequence[str] | str = ("resid_post",),
        *,
        data: str | Mapping[str, object],
        max_tokens: int | None = None,
        progress: bool = True,
        **options: object,
    ) -> None:
        """Opens the model and the data, loads the weights that the captured layers need, and compiles the step.

        data: the path or glob of parquet files with a column `text`, local or remote (hf://, gs://), or a dict of keys
        of the configuration's `data`, e.g. {"path": ..., "text_column": "content", "row_groups_per_shard": 1}.
        max_tokens: tokens of the data to use, and at most a block more per stream of documents; None for all. The other
        arguments and options are those of `Extractor`, but the default of `length` is that of `batch.length`, 256. For
        other data, and for whole experiments, use `Stream.from_config`.

        Raises ConfigError, InputError or CheckpointError, as the command does.
        """
        named = dict(model=model, layers=layers, sites=sites, **options)
        given = dict(data) if isinstance(data, Mapping) else {"path": path("data", data)}
        if given.get("source", "parquet") != "parquet":
            raise ConfigError(
                f"data has the source {shown(given['source'])}, but Stream(...) reads only parquet files. For other "
                "sources, use Stream.from_config, e.g. Stream.from_config(['data=arc', ...])."
            )
        values = (
            {"store.path": "none"} | {f"data.{key}": value for key, value in given.items()} | settings(named, "Stream")
        )
        values |= {"run.max_tokens": max_tokens, "run.progress": progress}
        self._open(composing.from_values(ParquetData, {key: plain(value) for key, value in values.items()}))

    @classmethod
    def from_config(cls, overrides: Sequence[str]) -> Self:
        """The stream with the tokens and values that `python -m pipeline.run` with these overrides stores.

            Stream.from_config(["+experiment=demo_text", "run.max_tokens=100000"])

        `store.path` is not used: `batches(..., store=path)` fills a store. Raises as `Stream(...)`.
        """
        stream = cls.__new__(cls)
        given = items("overrides", overrides, expected := "a list of strings such as 'data=demo'")
        if not all(isinstance(override, str) for override in given):
            raise ArgumentError(f"overrides is {shown(overrides)}, expected {expected}.")
        stream._open(composing.compose([*given, "store.path=none"]))
        return stream

    def _open(self, config: RunConfig) -> None:
        require_not_forked("JAX")
        if isinstance(config.data, GenerateData):
            raise ConfigError("data=generate needs a store for its documents. Fill one, and read store.batches.")
        use_compilation_cache(config.run.compilation_cache)
        open_devices()
        self.config = replace(config, store=replace(config.store, path=_NO_STORE))
        self._job = open_job(self.config, _own_devices(topology(config.run)))
        self.keys: tuple[ActivationKey, ...] = self._job.plan.step.keys
        widths = {encoder.spec.name: encoder.spec.sae.width for encoder in self._job.encoders}
        hooks = {key.name: self._job.model.hook_name(key) for key in self.keys}
        self._names = ArrayNames("the stream", self._job.layout, widths, ConfigError, hooks)
        self._step = load_step(self._job, jax.local_devices())

    def batches(
        self,
        batch_size: int,
        keys: Key | Sequence[Key] | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
        token_filter: TokenFilter | None = None,
        normalisation: Mapping[str, Normalisation] | None = None,
        stack: bool = False,
        dtype: Dtype = None,
        framework: str = "numpy",
        outputs: Sequence[str] = (),
        features: bool = False,
        drop_last: bool = False,
        labels: bool = False,
        shuffle_buffer_tokens: int = BUFFER_TOKENS,
        state: Mapping[str, Any] | None = None,
        store: str | os.PathLike[str] | None = None,
    ) -> StreamReader:
        """Iterates over the activations of this process's share of the data, each exactly once, in batches of
        `batch_size` tokens without padding.

        keys: as in `ActivationStore.batches`; None for all captured arrays: a single array if there is one, else all by
        name.
        token_filter, normalisation, stack, dtype, framework, outputs, features, drop_last, labels: as in
        `ActivationStore.batches`.
        shuffle, seed, shuffle_buffer_tokens: slots for tokens in the buffer, rounded down to whole steps. One half is
        filled while the other is read in random order; the first batch comes when the first half is full.
        rank, world: divide the streams of documents among readers, whose numbers of batches may differ; by default they
        are the index and number of JAX's processes, each of which computes on its own devices.
        state: `StreamReader.state()` of a reader with the same arguments, to continue from there. Computes at most half
        a buffer again.
        store: local, gs:// or s3://. While the batches are read, this store is filled, as the command with the same
        configuration and this `store.path` fills it, and it is completed before the last batches. Blocks that it has
        are not written again; blocks before `state` that it lacks are computed first. Processes that have joined must
        call this together.

        Raises ArgumentError for arguments that are wrong or contradict each other and for the state of a different
        stream, ConfigError for keys that are not captured, a rank without documents, or a buffer that is too small or
        exceeds the memory, and StoreMismatch for a store of a different configuration.
        """
        require_not_forked("JAX")
        devices = topology(self.config.run)
        options = BatchOptions(
            batch_size=batch_size,
            **dict(rank=devices.index if rank is None else rank, world=devices.count if world is None else world),
            **dict(shuffle=shuffle, seed=seed, token_filter=token_filter, stack=stack),
            **dict(dtype=dtype, framework=framework, outputs=outputs, features=features, drop_last=drop_last),
            labels=labels,
        )
        if options.token_filter.part is not None:
            raise ArgumentError(
                "TokenFilter(part=...) applies only to stores of data=generate: a stream's documents have no parts."
            )
        arrays = self._names.batch_arrays(self._keys(keys), options, normalisation)
        job = self._share(options.rank, options.world, None if store is None else path("store", store))
        half_steps = _half_steps(job, integer("shuffle_buffer_tokens", shuffle_buffer_tokens, 1))
        _require_memory(_host_bytes(job, arrays, batch_size, half_steps, store is not None), devices)
        return StreamReader(job, self._step, arrays, options, half_steps, state, fills_store=store is not None)

    def sample(
        self,
        keys: Key | Sequence[Key] | None = None,
        num_tokens: int = 65536,
        token_filter: TokenFilter | None = None,
    ) -> dict[str, Statistics]:
        """Computes statistics of the activations of the data's first `num_tokens` tokens, by array name. The result is
        the same in every process and for every rank.

        Raises ArgumentError if the filter leaves no token, and the errors of `batches`.
        """
        step_slots = self._job.plan.mesh.process_rows * self._job.layout.slots
        num_tokens = integer("num_tokens", num_tokens, 1)
        batches = self.batches(
            _SAMPLE_BATCH,
            as_keys(self._keys(keys)),
            shuffle_buffer_tokens=max(2 * step_slots, min(num_tokens, BUFFER_TOKENS)),
            **{"shuffle": False, "rank": 0, "world": 1, "token_filter": token_filter, "dtype": STORED},
        )
        with closing(batches):
            return sample_statistics(batches, num_tokens)

    def normalisation(
        self, keys: Key | Sequence[Key] | None = None, per_feature: bool = False, num_tokens: int = 65536
    ) -> dict[str, Normalisation]:
        """The normalisation to zero mean and unit variance, by array name, from a `sample` of the data's beginning."""
        sample, per_feature = self.sample(keys, num_tokens), flag("per_feature", per_feature)
        return {name: statistics.normalisation(per_feature) for name, statistics in sample.items()}

    def _keys(self, keys: Key | Sequence[Key] | None) -> Key | Sequence[Key]:
        if keys is not None:
            return keys
        return self.keys[0] if len(self.keys) == 1 else self.keys

    def _share(self, rank: int, world: int, store: str | None) -> Job:
        """The job of reader `rank` of `world`: its streams of documents, and the store that it fills, if any."""
        devices = _own_devices(replace(topology(self.config.run), world=world, rank=rank))
        job = replanned(self._job, devices) if store is None else self._storing(store, devices)
        job = replace(job, plan=job.plan.fitted(self._step.compiled.memory, devices.device_bytes))
        if not job.plan.streams.local:
            shards, streams = counted(len(job.source.shards), "source shard"), counted(job.plan.streams.count, "stream")
            raise ConfigError(
                f"rank {rank} of {world} has no documents: the data has {shards}, divided among {streams}, and the "
                "streams are divided among the readers. Use fewer readers, or more streams (data.num_streams) and "
                "source shards (data.row_groups_per_shard)."
            )
        return job

    def _storing(self, path: str, devices: Topology) -> Job:
        """The job that fills a store, opened as the command does."""
        job = open_job(replace(self.config, store=replace(self.config.store, path=path)), devices)
        if weights_identity(job.model, job.encoders) != weights_identity(self._job.model, self._job.encoders):
            commit = job.model.checkpoint.commit
            raise StoreMismatch(
                f"{path} was filled with a different version of the model {self.config.model.path}, or of an SAE, than "
                f"this Stream has loaded. Create a new Stream{f', with revision={commit}' if commit else ''}."
            )
        return job


def _own_devices(devices: Topology) -> Topology:
    """This process alone, with its local devices, so that readers do not wait for each other."""
    return replace(devices, devices=jax.local_device_count(), processes=1, process=0)


def _half_steps(job: Job, tokens: int) -> int:
    """The number of steps that fit into half a buffer of `tokens` slots. Raises ConfigError if none fits."""
    rows, slots = job.plan.mesh.process_rows, job.layout.slots
    if tokens < 2 * rows * slots:
        raise ConfigError(
            f"shuffle_buffer_tokens is {tokens}, but each half of the buffer must hold at least one step of {rows} "
            f"rows with {slots} slots for tokens. Set it to at least {2 * rows * slots}, or lower batch.rows."
        )
    return tokens // (2 * rows * slots)


def _host_bytes(job: Job, arrays: BatchArrays, batch_size: int, half_steps: int, fills_store: bool) -> int:
    """The peak host memory of activations and side arrays: both halves of the buffer, steps in flight, batches gathered
    ahead and, if the stream fills a store, the memory for that."""
    names = {*arrays.by_piece, *arrays.by_block}
    specs = (*SIDE_ARRAYS, *(spec for spec in arrays.layout.all_arrays if spec.name in names))
    slots = 2 * half_steps * job.plan.mesh.process_rows * job.layout.slots + (AHEAD + 1) * batch_size
    memory = job.plan.memory
    in_flight = memory.inflight_steps * (memory.step_bytes + memory.step_statistics_bytes)
    return slots * sum(spec.position_bytes for spec in specs) + in_flight + fills_store * memory.host_bytes


def _require_memory(num_bytes: int, devices: Topology) -> None:
    if devices.host_memory is not None and num_bytes > devices.host_memory:
        raise ConfigError(
            f"the stream's activations would take {num_bytes / MIB:.0f} MiB on this host, which has "
            f"{devices.host_memory / MIB:.0f} MiB. Lower shuffle_buffer_tokens, or capture fewer layers and sites."
        )
