"""How a process uses storage: TensorStore's spec of an address, and its context with retries and limits."""

import os
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import tensorstore as ts

from pipeline.core.addresses import unusable_store_path
from pipeline.core.errors import StoreInvalid

NUM_REQUESTS = 32  # TensorStore's default number of concurrent requests

# TensorStore reads these at its first request. Without them it waits forever for a server that does not answer, and 4
# threads, too few for a host with a hundred cores, encrypt and copy all data. On two cores, 4 and 32 are equally fast.
_ENVIRONMENT = {
    "TENSORSTORE_HTTP_THREADS": str(NUM_REQUESTS),
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "30",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "60",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}

_RETRIES = ("gcs_request_retries", "s3_request_retries", "http_request_retries")
_MAX_DELAY = 8  # times the first delay: a process writes again about 10 s after an outage
_DELAY_FACTORS = (0.75, 1.25)  # the fifth attempts of many processes are spread over 8 s, the seventh ones over 16 s
CONCURRENCY = ("gcs_request_concurrency", "s3_request_concurrency", "file_io_concurrency", "http_request_concurrency")


@dataclass(frozen=True)
class StorageOptions:
    """How a process uses storage.

    retries: how often a failed request is sent again.
    retry_delay_s: seconds before the first retry. The delay doubles with each retry, up to 8 times the first. Each
    context multiplies its delays by a random factor: TensorStore adds no jitter to the maximum delay, so processes
    refused at the same time would keep retrying at the same time.
    concurrency: the maximum number of concurrent requests, or files at local paths. None: 32 requests, or as many files
    as cores, at least 4.
    """

    retries: int = 60
    retry_delay_s: float = 1.0
    concurrency: int | None = None

    def context(self) -> ts.Context:
        """TensorStore's context with these options."""
        delay_s = self.retry_delay_s * random.uniform(*_DELAY_FACTORS)
        delays = {"initial_delay": f"{delay_s:.9f}s", "max_delay": f"{_MAX_DELAY * delay_s:.9f}s"}
        spec: dict[str, Any] = {name: {"max_retries": self.retries, **delays} for name in _RETRIES}
        if self.concurrency is not None:
            spec |= {name: {"limit": self.concurrency} for name in CONCURRENCY}
        return ts.Context(spec, parent=_process_context())


DEFAULT_OPTIONS = StorageOptions()


def set_request_defaults() -> None:
    """Sets TensorStore's timeouts for servers that do not answer and its number of threads, if the environment does
    not."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@cache
def _process_context() -> ts.Context:
    """The context of all stores in the process: they share limits on concurrent requests, and `memory://`."""
    return ts.Context()


def kvstore_spec(path: str) -> dict[str, Any]:
    """TensorStore's spec of the storage at `path`. Raises StoreInvalid for an unusable path."""
    if reason := unusable_store_path(path):
        raise StoreInvalid(reason)
    if "://" not in path:
        return {"driver": "file", "path": os.path.abspath(os.path.expanduser(path)).rstrip("/") + "/"}
    try:
        spec = ts.KvStore.Spec(path.rstrip("/") + "/").to_json()
    except ValueError as error:
        raise StoreInvalid(f"the store's path is {path!r}, which is not a store address: {error}.") from error
    return spec | (_s3_service() if path.startswith("s3://") else {})


def _s3_service() -> dict[str, str]:
    """The part of a key-value store's spec for an S3 service other than Amazon's; {} for Amazon's."""
    variables = {
        "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "aws_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    }
    values = {key: next(filter(None, map(os.environ.get, names)), None) for key, names in variables.items()}
    return {key: value for key, value in values.items() if value} if values["endpoint"] else {}
