"""Counts in messages: "1 block", "2 blocks"."""


def counted(number: int, noun: str) -> str:
    """A number, with commas between thousands, and its noun, in the plural (formed with -s) unless the number is 1."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
