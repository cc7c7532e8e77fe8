"""The device memory that a compiled step needs."""

from dataclasses import dataclass
from typing import Self

import jax


@dataclass(frozen=True)
class DeviceMemory:
    """The compiler's report. Bytes per device, including the padding of its memory layout."""

    argument_bytes: int  # weights and one step's rows
    output_bytes: int  # one step's activations
    temporary_bytes: int
    peak_bytes: int  # while one step runs, without the outputs of other steps

    @classmethod
    def of(cls, executable: jax.stages.Compiled) -> Self:
        memory = executable.memory_analysis()
        return cls(
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            peak_bytes=memory.peak_memory_in_bytes,
        )

    def describe(self) -> str:
        """The parts, in GiB."""
        parts = {"arguments": self.argument_bytes, "outputs": self.output_bytes, "temporaries": self.temporary_bytes}
        return ", ".join(f"{name} {num_bytes / 2**30:.2f}" for name, num_bytes in parts.items())

    def resident_bytes(self, steps_in_flight: int) -> int:
        """Bytes per device while one step runs and the outputs of the other steps wait to be copied to the host."""
        return max(self.peak_bytes, self.argument_bytes + self.output_bytes + self.temporary_bytes) + (
            (steps_in_flight - 1) * self.output_bytes
        )
