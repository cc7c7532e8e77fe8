"""How this process's requests to storage have gone so far, as TensorStore counts them."""

from collections.abc import Iterator

import tensorstore as ts

_REFUSED = ("429", "503")  # too many requests; slow down, as S3 says it


def num_retries() -> int:
    """How many requests to `gs://` and `s3://` have failed, and were sent again."""
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    return sum(metric["values"][0]["value"] for metric in metrics if metric["name"].endswith("/retries"))


def num_refused() -> int:
    """How many HTTP answers were 429 or 503: the service wants fewer requests, or is not available."""
    return sum(count for code, count in _response_codes() if code in _REFUSED)


def _response_codes() -> Iterator[tuple[str, int]]:
    for metric in ts.experimental_collect_matching_metrics("/tensorstore/http/response_codes"):
        yield from ((value["code"], value["value"]) for value in metric["values"])
