"""The identity of a job: what a store records about it, and what must match for a run to resume the store."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from pipeline.config.sampling import Sampling
from pipeline.config.schema import DataConfig, GenerateData, RunConfig
from pipeline.data.documents import Source
from pipeline.data.selection import selection_identity
from pipeline.data.text.tokenizer import TextTokenizer
from pipeline.job.end_tokens import end_tokens
from pipeline.models.registry import Model
from pipeline.planning.encoders import Encoder
from pipeline.planning.plan import Plan
from pipeline.store.format.layout import OUTPUTS
from pipeline.store.format.metadata import Json, StoreMetadata


def store_metadata(
    config: RunConfig,
    plan: Plan,
    model: Model,
    tokenizer: TextTokenizer,
    data: Mapping[str, object],
    stored: StoreMetadata | None,
    encoders: Sequence[Encoder],
    reads_weights: bool = True,
) -> StoreMetadata:
    """The metadata of the job's store. data: the identity of the data. stored: the metadata of the existing store.
    reads_weights: if not, the weights of the model and of SAEs are taken to be those of `stored`, which is required.

    With `reads_weights`, downloads the weights of a Hub model first. Raises CheckpointError for damaged weights.
    """
    digests = {} if reads_weights else {sae["features"]: sae.get("sha256", "") for sae in stored.encoders}
    saes = [encoder.identity(None if reads_weights else digests.get(encoder.spec.name, "")) for encoder in encoders]
    return StoreMetadata(
        model=_model_identity(config, model, stored, reads_weights),
        tokenizer=tokenizer.identity(),
        data=data,
        batch={
            "length": plan.step.length,
            "packing": str(config.batch.packing),
            "long_documents": str(config.batch.long_documents),
        },
        capture=_capture_identity(config, plan, model, saes),
        store={"compression": str(config.store.compression)},
        num_streams=plan.streams.count,
        rows_per_block=plan.rows_per_block,
        config=_recorded_config(config, model),
    )


def weights_identity(model: Model, encoders: Sequence[Encoder]) -> list[dict[str, object]]:
    """The identities of the model's weights and of its SAEs'."""
    return [model.identity(), *(encoder.identity() for encoder in encoders)]


def data_identity(data: DataConfig, source: Source, model: Model, tokenizer: TextTokenizer) -> dict[str, object]:
    """Identifies the documents: by the source and, with data=generate, by how the model completes its prompts.

    Raises ConfigError or CheckpointError for end tokens that the tokenizer or the model does not have.
    """
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
        "cache_dtype": str(data.cache_dtype),
    }


def sampling(data: GenerateData) -> Sampling:
    """How completions are sampled. Raises ConfigError."""
    return Sampling(data.temperature, data.top_k, data.top_p, data.seed)


def _model_identity(
    config: RunConfig, model: Model, stored: StoreMetadata | None, reads_weights: bool
) -> dict[str, object]:
    identity = model.identity(reads_weights)
    if not reads_weights and "weights" in stored.model:
        identity["weights"] = stored.model["weights"]
    dtypes = {name: str(getattr(config.model, name)) for name in ("dtype", "weights_dtype", "activations_dtype")}
    return {**identity, **dtypes, "vocab_size": model.vocab_size}


def _capture_identity(config: RunConfig, plan: Plan, model: Model, saes: Sequence[Json]) -> dict[str, object]:
    step = plan.step
    identity: dict[str, object] = {
        "arrays": [key.name for key in step.keys],
        "dtype": step.dtype,
        "statistics": config.capture.statistics,
        "when": str(config.capture.when),
    }
    if step.scale_group is not None:
        identity["scale_group"] = step.scale_group
    if step.head_outputs:
        identity["outputs"] = [name for name in OUTPUTS if name in config.capture.outputs]
        identity["head"] = asdict(model.head)
    if step.num_top:
        identity["top_logprobs"] = step.num_top
    if saes:
        identity |= {"encode": saes, "encode_index": config.capture.encode_index}
    return identity | selection_identity(config.capture, step.length)


def _recorded_config(config: RunConfig, model: Model) -> dict[str, object]:
    """The configuration, with the commit of a Hub model. Recorded for information, not compared on resume."""
    values = {name: value for name, value in asdict(config).items() if name != "distributed"}
    if model.checkpoint.commit is not None:
        values["model"]["commit"] = model.checkpoint.commit
    return values
