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


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"there is no .*none\.txt. Set data.path"):
        find_files(str(tmp_path / "none.txt"), ".txt")


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


@pytest.mark.parametrize("path", ["{a,b}.txt", "{a,b}.*"])
def test_messages_say_that_braces_are_not_supported(tmp_path, path):
    write(tmp_path / "a.txt")
    with pytest.raises(InputError, match=r"(there is no|has no .txt file).*Braces are not supported"):
        names(tmp_path / path)
    write(tmp_path / "{a,b}.txt")
    assert names(tmp_path / path) == ["{a,b}.txt"]


def test_an_unknown_protocol_is_refused():
    with pytest.raises(InputError, match="data.path is 'nope://bucket', which cannot be opened: .*Check the path"):
        names("nope://bucket")


@pytest.fixture
def fail(monkeypatch):
    monkeypatch.setattr("pipeline.core.retries.time", SimpleNamespace(sleep=lambda seconds: None))

    def fail(self, path, **kwargs):
        raise ConnectionError("no route to host")

    return fail


def test_a_file_that_cannot_be_reached_may_be_tried_again(tmp_path, monkeypatch, fail):
    write(tmp_path / "a.txt")
    (file,) = find_files(str(tmp_path), ".txt")
    monkeypatch.setattr(LocalFileSystem, "cat_file", fail)
    with pytest.raises(PipelineError, match=r"a.txt cannot be read: no route to host.*try again") as caught:
        file.read_bytes()
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("path", ["", "*.txt", "**/*.txt"])
def test_a_folder_that_cannot_be_reached_is_not_taken_for_an_empty_one(tmp_path, monkeypatch, fail, path):
    write(tmp_path / "a.txt")
    monkeypatch.setattr(LocalFileSystem, "ls", fail)
    with pytest.raises(PipelineError, match="cannot be read: no route to host.*try again") as caught:
        names(tmp_path / path)
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


def test_hidden_special_files_are_ignored(special):
    for name in ("fifo", "socket", "device"):
        (special / f"{name}.txt").rename(special / f"_{name}.txt")
    write(special / "a.txt")
    assert names(special) == ["a.txt"]


@pytest.mark.parametrize("file", ["mem", "status", "environ", "pagemap"])
@pytest.mark.parametrize("path", ["/proc/self/{}", "/proc/self/{}*", "link", "link/{}"])
def test_files_of_proc_are_refused(tmp_path, file, path):
    (tmp_path / "link").symlink_to(f"/proc/self/{file}" if path == "link" else "/proc/self")
    with pytest.raises(InputError, match=f"{file if path != 'link' else 'link'} is in /proc, expected a file") as e:
        names(tmp_path / path.format(file))
    assert "Check data.path" in str(e.value)
    assert e.value.exit_code == 2


def test_an_empty_file_is_a_file(tmp_path):
    (tmp_path / "a.txt").touch()
    assert names(tmp_path) == ["a.txt"]


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


@pytest.mark.parametrize("path", ["a.txt", "", "*.txt"])
def test_a_file_that_this_user_may_not_read_is_refused(unreadable, path):
    with pytest.raises(InputError, match=r"a.txt cannot be read: Permission denied. Grant this user") as caught:
        names(unreadable / path)
    assert caught.value.exit_code == 2


def test_a_name_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / os.fsdecode(b"\xff.txt")).touch()
    with pytest.raises(InputError, match=r"the name of .*udcff.txt' is not UTF-8. Rename the file"):
        names(tmp_path)


@pytest.mark.parametrize("path", ["/" + "a" * 5000, "/" + "a/" * 5000, "/etc/passwd/a.txt", "/a\0b", "", " "])
def test_impossible_paths_are_refused(path):
    with pytest.raises(InputError):
        names(path)
