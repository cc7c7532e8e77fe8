"""Opens a job: its model, data and tokenizer, its plan, and the storage of its store. Computes nothing."""

from dataclasses import replace

from pipeline.cluster.devices import Topology, topology
from pipeline.config.choices import Positions, Windows
from pipeline.config.schema import RunConfig, StoreConfig
from pipeline.core.errors import ConfigError
from pipeline.core.messages import counted
from pipeline.core.sites import ActivationKey, Site
from pipeline.data.selection import NEEDS_LABELS, open_selection
from pipeline.data.sources import has_labels, open_source, renders_chat
from pipeline.data.text.tokenizer import TextTokenizer, load_tokenizer
from pipeline.data.text.tokenizer_files import NoTokenizer
from pipeline.job.inputs import JobManifest, pinned
from pipeline.job.job import Job
from pipeline.job.watchdog import time_limit
from pipeline.models.registry import Model, open_model
from pipeline.models.weight_specs import has_site
from pipeline.planning.encoders import open_encoders
from pipeline.planning.plan import StoredGeometry, make_plan
from pipeline.planning.sae_contexts import compare_contexts, with_sae_contexts
from pipeline.store.format.metadata import read_root
from pipeline.store.generated.documents import RESERVED_COLUMNS
from pipeline.store.io.options import StorageOptions
from pipeline.store.io.storage import Storage


def open_job(config: RunConfig, devices: Topology | None = None) -> Job:
    """Opens the inputs of a run, and plans the run. Reads no weights. devices: None for all of JAX's devices.

    Initialises JAX's devices only after the model, the tokenizer and the data are open, so that mistakes in these are
    reported without devices.

    Raises ConfigError, InputError, CheckpointError or StoreMismatch.
    """
    storage = open_storage(config.store)
    stored = None if (root := read_root(storage)) is None else root.metadata
    given_date = config.data.date
    config, revision = pinned(config, stored)
    tokens = getattr(config.data, "tokens", None)
    model, tokenizer = open_model_and_tokenizer(config, revision, is_optional=tokens is not None)
    if renders_chat(config.data):
        with time_limit(config.run.stall_timeout_s):
            tokenizer.require_chat()
        if given_date is not None and "date" not in tokenizer.chat_identity():
            raise ConfigError(
                f"data.date is {given_date}, but the chat template writes no date (strftime_now). Set data.date=null."
            )
    encoders = open_encoders(config.capture, model)
    config = with_sae_contexts(config, encoders, tokenizer)
    compare_contexts(config, encoders, tokenizer)
    manifest = JobManifest(storage)
    source = open_source(config.data, tokenizer, manifest.agree)
    geometry = stored and StoredGeometry(stored.num_streams, stored.rows_per_block, stored.store.get("shard_bytes"))
    specs = tuple(encoder.spec for encoder in encoders)
    plan = make_plan(config, model, len(source.shards), devices or topology(config.run), geometry, specs)
    if plan.generation or plan.step.head_outputs:
        model.generation.check_head()
    if plan.generation and (reserved := sorted({*source.info_schema.names} & RESERVED_COLUMNS)):
        raise ConfigError(f"the prompts have a column {reserved[0]}, which data=generate writes. Remove it.")
    if config.capture.positions is Positions.labels and not has_labels(config.data):
        raise ConfigError(NEEDS_LABELS)
    selection = open_selection(config.capture, config.batch, tokenizer)
    job = Job(model, source, tokenizer, selection, plan, stored, storage, manifest, encoders)
    _ = job.data_identity, job.added  # checks the end tokens, and those of contexts
    return job


def open_model_and_tokenizer(
    config: RunConfig, revision: str | None, is_optional: bool = False
) -> tuple[Model, TextTokenizer | None]:
    """The model at a revision, and `model.tokenizer` or the model's own tokenizer at the same revision. is_optional:
    None for a model without a tokenizer, unless a setting needs one.

    Raises ConfigError, InputError or CheckpointError.
    """
    path, data = config.model.path, config.data
    init, seed, adapter = str(config.model.init), config.model.seed, config.model.adapter
    model = open_model(path, revision=revision, init=init, seed=seed, adapter=adapter)
    try:
        tokenizer = load_tokenizer(
            config.model.tokenizer or path,
            revision=None if config.model.tokenizer else revision,
            special_tokens=data.special_tokens,
            prefix=data.prefix,
            suffix=data.suffix,
            date=data.date,
            template_kwargs=data.template_kwargs,
        )
    except NoTokenizer:
        batch, capture = config.batch, config.capture
        asked = (config.model.tokenizer, data.prefix, data.suffix, batch.separator, capture.token, capture.regex)
        if not is_optional or any(asked) or batch.windows is Windows.restart:
            raise
        return model, None
    return model, tokenizer


def replanned(job: Job, devices: Topology) -> Job:
    """The job planned for other devices or another reader, without an existing store. Raises ConfigError."""
    specs = tuple(encoder.spec for encoder in job.encoders)
    return replace(job, plan=make_plan(job.config, job.model, len(job.source.shards), devices, None, specs))


def open_storage(config: StoreConfig) -> Storage:
    """The storage of a run's store. Raises ConfigError, StoreInvalid and StoreError."""
    return Storage.open(config.path, StorageOptions(retry_delay_s=config.retry_delay_s))


def _widths(model: Model, site: Site, length: int) -> str:
    """A site's width as text, or the widths of its layers if they differ."""
    layers = (
        [layer for layer in range(model.num_layers) if has_site(model.arch, layer, site)] if site.per_layer else [-1]
    )
    return " or ".join(map(str, sorted({model.width(ActivationKey(layer, site), length) for layer in layers})))


def print_plan(config: RunConfig) -> None:
    """Prints what a run would do on this machine's devices. Reads only headers, and writes nothing."""
    job = open_job(config)
    sites = ", ".join(f"{site} {_widths(job.model, site, job.plan.step.length)}" for site in job.model.sites)
    print(job.plan.describe())
    print(f"sites     {sites}")
    streams = job.plan.streams
    print(
        f"data      {counted(len(job.source.shards), 'source shard')} in {counted(streams.count, 'stream')}, "
        f"{len(streams.local)} for this process"
    )
    if job.plan.notes:
        print(job.plan.describe_notes())
