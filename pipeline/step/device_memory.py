"""What a compiled step takes of a device's memory."""

from dataclasses import dataclass
from typing import Self

import jax


@dataclass(frozen=True)
class DeviceMemory:
    """What the compiler reports. Bytes are of one device, with the padding of its memory layout."""

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

    def resident_bytes(self, steps_in_flight: int) -> int:
        """Bytes that a device holds while one step runs and the outputs of the others wait to be copied to the host."""
        return max(self.peak_bytes, self.argument_bytes + self.output_bytes + self.temporary_bytes) + (
            (steps_in_flight - 1) * self.output_bytes
        )
