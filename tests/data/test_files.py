import ctypes
import os
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.implementations.local import LocalFileSystem

from pipeline.core.errors import InputError, PipelineError
from pipeline.data.files import find_files


def names(path) -> list[str]:
    return [file.name for file in find_files(str(path), ".txt")]


def write(path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(path.name)


@pytest.fixture
def links(tmp_path):
    """A folder with links to files, as in the Hub's cache, and to a folder."""
    write(tmp_path / "blobs" / "0123")
    for name in ("b.txt", "a.txt"):
        (tmp_path / "folder" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "folder" / name).symlink_to(tmp_path / "blobs" / "0123")
    (tmp_path / "folder" / "c.txt").symlink_to(tmp_path / "blobs", target_is_directory=True)
    return tmp_path / "folder"


@pytest.mark.parametrize("path", ["", "*.txt", "[ab].txt", "**"])
def test_links_to_files_are_files_and_links_to_folders_are_not(links, path):
    files = find_files(str(links / path), ".txt")
    assert [(file.name, file.size, file.read_bytes()) for file in files] == [
        ("a.txt", 4, b"0123"),
        ("b.txt", 4, b"0123"),
    ]


@pytest.mark.parametrize("folder", ["a[1]", "what?", "all*", "[2]/b"])
def test_an_existing_path_is_no_glob(tmp_path, folder):
    write(tmp_path / folder / "a.txt")
    write(tmp_path / "a1" / "b.txt")
    assert names(tmp_path / folder) == ["a.txt"]
    [file] = find_files(str(tmp_path / folder / "a.txt"), ".txt")
    assert (file.name, file.read_bytes()) == ("a.txt", b"a.txt")


def test_a_broken_link_is_reported_when_it_is_read(links):
    (links / "a.txt").unlink()
    (links / "a.txt").symlink_to(links / "gone")
    first, _ = find_files(str(links / "*.txt"), ".txt")
    with pytest.raises(InputError, match=r"a.txt does not exist: .*Check data.path"):
        first.read_bytes()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", ["a.txt"]),
        ("*", ["a.txt"]),
        ("**/*.txt", ["a.txt"]),
        ("_b.txt", ["_b.txt"]),
        (".c.txt", [".c.txt"]),
        ("_d", ["e.txt"]),
        ("_d/*.txt", ["e.txt"]),
        ("_d/e.txt", ["e.txt"]),
    ],
)
def test_hidden_names_are_left_out_unless_written_in_full(tmp_path, path, expected):
    for name in ("a.txt", "_b.txt", ".c.txt", "_d/e.txt"):
        write(tmp_path / name)
    assert names(tmp_path / path) == expected


@pytest.mark.parametrize("path", ["~/folder", "~/folder/a.txt", "~/folder/*.txt"])
def test_a_home_directory_is_expanded(tmp_path, monkeypatch, path):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "folder" / "a.txt")
    assert names(path) == ["a.txt"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.txt", r"none\.txt has no .txt file. Set data.path"),
        ("*.csv", r"has no .txt file. Set data.path"),
        ("{a,b}.txt", r"has no .txt file.*Braces are not supported"),
        ("bad", r"the name of .*udcff.txt' is not UTF-8. Rename the file"),
        ("nope://bucket", "data.path is 'nope://bucket', which cannot be opened: .*Check the path"),
        *((path, None) for path in ("/" + "a" * 5000, "/" + "a/" * 5000, "/etc/passwd/a.txt", "/a\0b")),
    ],
)
def test_a_path_without_files_is_refused(tmp_path, path, message):
    write(tmp_path / "a.txt")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / os.fsdecode(b"\xff.txt")).touch()
    with pytest.raises(InputError, match=message):
        names(path if not message or "://" in path else tmp_path / path)


@pytest.mark.parametrize(("path", "call"), [("", "ls"), ("*.txt", "ls"), ("**/*.txt", "ls"), ("a.txt", "cat_file")])
def test_files_that_cannot_be_reached_may_be_tried_again(tmp_path, monkeypatch, path, call):
    """A folder is not taken for an empty one."""

    def fail(self, path, **kwargs):
        raise ConnectionError("no route to host")

    write(tmp_path / "a.txt")
    monkeypatch.setattr("pipeline.core.requests.time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(LocalFileSystem, call, fail)
    with pytest.raises(PipelineError, match="cannot be read: no route to host.*try again") as caught:
        find_files(str(tmp_path / path), ".txt")[0].read_bytes()
    assert caught.value.exit_code == 1


@pytest.fixture
def special(tmp_path):
    """A folder with a FIFO, a socket and a device; reading them would not end."""
    os.mkfifo(tmp_path / "fifo.txt")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket.txt"))
        (tmp_path / "device.txt").symlink_to("/dev/zero")
        yield tmp_path


@pytest.mark.parametrize("path", ["fifo.txt", "socket.txt", "device.txt", "", "*.txt"])
def test_special_files_are_refused_before_they_are_opened(special, path):
    with pytest.raises(InputError, match=r".txt is a FIFO, a device or a socket, expected a file. Check data.path"):
        names(special / path)


@pytest.fixture
def unreadable():
    """A folder with a file that this thread may not read, even if it is root's."""
    libc = ctypes.CDLL(None)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "a.txt")
        (Path(folder) / "a.txt").chmod(0)
        Path(folder).chmod(0o755)
        user = libc.setfsuid(os.geteuid() or 65534)
        yield Path(folder)
        libc.setfsuid(user)


@pytest.mark.parametrize("path", ["a.txt", "*.txt"])
def test_a_file_that_this_user_may_not_read_is_refused(unreadable, path):
    with pytest.raises(InputError, match=r"a.txt cannot be read: permission denied. Grant this user") as caught:
        names(unreadable / path)
    assert caught.value.exit_code == 2
