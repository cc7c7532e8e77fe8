"""What a decoder is made of: the numbers that a family's reader of config.json hands to the layers.

Shape letters, here and in every file of this package:

    B rows, T positions, S positions as keys, D model dim, N heads, K key-value heads, G = N / K, H head dim,
    F MLP dim, V vocabulary, L layers of a stack
"""

from dataclasses import dataclass
from enum import StrEnum


class RopeKind(StrEnum):
    """How rotary frequencies are stretched for longer contexts; the names are those of config.json."""

    default = "default"
    linear = "linear"
    llama3 = "llama3"


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings (Su et al., arXiv 2104.09864), rotating the two halves of a head."""

    theta: float
    kind: RopeKind = RopeKind.default
    factor: float = 1.0  # of linear and llama3
    low_freq_factor: float = 1.0  # of llama3
    high_freq_factor: float = 1.0  # of llama3
    original_max_positions: int = 0  # of llama3


@dataclass(frozen=True)
class Architecture:
    """A pre-norm decoder with RMSNorm, grouped-query causal attention and a gated SiLU MLP."""

    num_layers: int
    vocab_size: int
    max_positions: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_mlp: int
    norm_eps: float
    rope: Rope

    def axis(self, letter: str) -> int:
        """The size of a weight's axis, by its shape letter."""
        sizes = {
            "V": self.vocab_size,
            "D": self.d_model,
            "N": self.num_heads,
            "K": self.num_kv_heads,
            "H": self.head_dim,
            "F": self.d_mlp,
        }
        return sizes[letter]


KeyTable = dict[str, tuple[str, str]]
"""HF key without its `model.` prefix -> (our key, axes). `*` stands for the layer's number.

The axes are shape letters, grouped as the HF tensor's axes are: `("attention.q", "NH D")` means that HF's tensor has
the shape [N * H, D] and ours, `weights["attention"]["q"]`, has [N, H, D]. HF's order of axes is kept: measured, a
matrix product with [out, in] is as fast as with [in, out], so nothing is transposed on the way in.
"""
