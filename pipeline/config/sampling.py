"""How generated tokens are sampled."""

from dataclasses import dataclass

from pipeline.core.errors import ConfigError

_MIN_TEMPERATURE = 1e-6  # dividing logits by less can make them infinite


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled. `top_k` applies before `top_p`, as in transformers."""

    temperature: float = 0.0  # 0: greedy, the likeliest token
    top_k: int | None = None  # only the k likeliest tokens
    top_p: float | None = None  # only the smallest set of likeliest tokens with at least this total probability
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or self.temperature >= _MIN_TEMPERATURE):
            raise ConfigError(
                f"temperature is {self.temperature}. Set it to 0 (greedy), or to at least {_MIN_TEMPERATURE:g}."
            )

    @property
    def has_top_p(self) -> bool:
        return self.top_p is not None and self.top_p < 1

    @property
    def ranks_tokens(self) -> bool:
        """Whether sampling sorts the likeliest tokens."""
        return self.temperature > 0 and (self.top_k is not None or self.has_top_p)
