"""Counts of this process's failed requests to storage, from TensorStore's metrics."""

from collections.abc import Iterator

import tensorstore as ts

_REFUSED = ("429", "503")  # "Too Many Requests", and "Slow Down" from S3


def num_retries() -> int:
    """How often a request to `gs://` or `s3://` failed and was sent again."""
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    return sum(metric["values"][0]["value"] for metric in metrics if metric["name"].endswith("/retries"))


def num_refused() -> int:
    """The number of HTTP responses 429 and 503: the service wants fewer requests, or is unavailable."""
    return sum(count for code, count in _response_codes() if code in _REFUSED)


def _response_codes() -> Iterator[tuple[str, int]]:
    for metric in ts.experimental_collect_matching_metrics("/tensorstore/http/response_codes"):
        yield from ((value["code"], value["value"]) for value in metric["values"])
