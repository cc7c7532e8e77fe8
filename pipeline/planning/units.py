"""Sizes in readable units."""

_UNITS = ("kB", "MB", "GB", "TB")


def shown_bytes(num_bytes: float) -> str:
    """Formats a number of bytes in the largest decimal unit in which it is at least 1, e.g. 5.30 MB; below 1 kB in
    bytes."""
    size, shown = num_bytes, f"{num_bytes:.0f} bytes"
    for unit in _UNITS:
        size /= 1000
        if size < 1:
            break
        shown = f"{size:,.2f} {unit}"
    return shown
