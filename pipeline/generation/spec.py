"""What a generator samples and captures, and its shapes."""

from dataclasses import dataclass

from pipeline.config.sampling import Sampling
from pipeline.core.sites import ActivationKey

_PREFILL_SHARE = 4  # a prefill has room for a quarter of the rows


@dataclass(frozen=True)
class GenerationSpec:
    """The shapes of generation, over all devices, and how tokens are sampled, for `compile_generator`."""

    rows: int  # completions generated at the same time; a multiple of the devices along `data`
    max_prompt: int  # tokens
    max_new_tokens: int
    end_tokens: tuple[int, ...]
    sampling: Sampling
    keys: tuple[ActivationKey, ...] = ()  # activations captured during decoding
    dtype: str = "float32"  # of the captured activations
    cache_is_int8: bool = False  # int8 keys and values; else they have the weights' dtype
    attention: str = "auto"  # the requested implementation, for the prefill
    segment_steps: int = 16  # decoding steps between the host's checks; an ended row idles for half of them on average

    @property
    def length(self) -> int:
        """The slots of a row, for prompt and completion."""
        return self.max_prompt + self.max_new_tokens

    def prefill_rows(self, data: int) -> int:
        """The number of prompts in a prefill, with `data` devices along the mesh's data axis."""
        return data * max(1, self.rows // data // _PREFILL_SHARE)
