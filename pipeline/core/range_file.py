"""A file object over bytes that are read by ranges, for libraries that read from one."""

import io
from collections.abc import Callable


class RangeFile(io.RawIOBase):
    """`read(start, size)` returns up to `size` bytes from `start` on, or all of them if `size` is negative; `end()`
    returns the file's size in bytes. What they raise reaches the library's caller."""

    def __init__(self, read: Callable[[int, int], bytes], end: Callable[[], int]) -> None:
        super().__init__()
        self._read_range, self._end, self._position = read, end, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self._position)[whence] if whence != io.SEEK_END else self._end()
        self._position = max(0, start + offset)
        return self._position

    def read(self, size: int = -1) -> bytes:
        content = self._read_range(self._position, size)
        self._position += len(content)
        return content

    def readinto(self, buffer: memoryview) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)
