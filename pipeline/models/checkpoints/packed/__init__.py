"""Formats in which checkpoints pack numbers of 4 and 8 bits, unpacked to float32."""
