"""Pickles and archives that attack a reader of torch's files: what each puts in place of one tensor, or of the file."""

import io
import pickle
import zipfile
from collections.abc import Callable, Mapping

CANARY = "canary"  # a file in the working directory that exists after an attack that succeeds
COMMAND = f"touch {CANARY}"
FUNCTIONS = (
    *("os system", "posix system", "builtins eval", "__builtin__ eval", "torch load", "torch._utils __builtins__"),
    *("torch._utils _rebuild_tensor_v2.__globals__", "torch _utils._rebuild_tensor_v2", "torch FloatStorage.from_file"),
    *("collections OrderedDict.fromkeys", "torch._utils _rebuild_tensor_v3", "numpy.core.multiarray _reconstruct"),
)


def push(value: object) -> bytes:
    """Instructions that push a plain value."""
    return pickle.dumps(value, 2)[2:-1]


def named(function: str) -> bytes:
    """The instruction that pushes a function or class, as GLOBAL."""
    module, _, name = function.partition(" ")
    return f"c{module}\n{name}\n".encode()


def storage(
    key: object = "9", size: object = 4, dtype: bytes = named("torch FloatStorage"), kind: object = "storage"
) -> bytes:
    return b"(" + push(kind) + dtype + push(key) + push("cpu") + push(size) + b"tQ"


def tensor(
    shape: object = (4,), strides: object = (1,), offset: object = 0, stored: bytes = storage(), rest: bytes = b"\x89}"
) -> bytes:
    parts = stored + push(offset) + push(shape) + push(strides) + rest
    return named("torch._utils _rebuild_tensor_v2") + b"(" + parts + b"tR"


def doubled(instructions: bytes, times: int = 60) -> bytes:
    """A value of 2**times parts, all the same."""
    return instructions + b"".join(b"q%ch%c\x86" % (n, n) for n in range(1, times + 1))


SYSTEM, DICT, OPEN_ARGUMENTS = named("os system"), named("collections OrderedDict"), push((COMMAND,))
# In place of a tensor.
VALUES: Mapping[str, bytes] = {
    **{name: named(name) + OPEN_ARGUMENTS + b"R" for name in FUNCTIONS},
    "STACK_GLOBAL": push("os") + push("system") + b"\x93" + OPEN_ARGUMENTS + b"R",
    "INST": b"(" + push(COMMAND) + b"ios\nsystem\n",
    "OBJ": b"(" + SYSTEM + push(COMMAND) + b"o",
    "NEWOBJ": DICT + b")\x81",
    "EXT1": b"\x82\1" + OPEN_ARGUMENTS + b"R",
    "PERSID": b"Pcos.system\n",
    "BUILD of a tensor": tensor() + push({"__setstate__": COMMAND}) + b"b",
    "BUILD of a function": named("torch FloatStorage") + push({"__reduce__": COMMAND}) + b"b",
    "protocol 5": b"\x80\5" + push(1),
    "text": b"I" + b"9" * 5000 + b"\n",
    "string of 2 GB": b"X\xff\xff\xff\x7fabc",
    "string of 2**60 bytes": b"\x8d" + (1 << 60).to_bytes(8, "little"),
    "no such memo": b"h\xff",
    "empty stack": b"00000",
    "APPEND to a dict": b"}" + push(1) + b"a",
    "odd items": b"}(" + push("a") + b"u",
    "dict with itself": b"}q\1" + push("a") + b"h\1s",
    "a hash of 2**60": b"}" + doubled(push(())) + push(1) + b"s",
    "a list as key": b"}]" + push(1) + b"s",
    "REDUCE of a dict": b"}" + b")R",
    "REDUCE with a list": DICT + b"]R",
    "REDUCE with a function": DICT + SYSTEM + b"\x85R",
    "a dict of pairs": DICT + push(([("a", 1)],)) + b"R",
    "a parameter of a dict": named("torch._utils _rebuild_parameter") + b"}\x85R",
    "five arguments": tensor(rest=b"\x89"),
    "a tensor of a tensor": tensor(stored=tensor()),
    "a persistent text": push("9") + b"Q",
    "a persistent module": tensor(stored=storage(kind="module")),
    "a storage of a dict": tensor(stored=storage(dtype=DICT)),
    "a storage of a text": tensor(stored=storage(dtype=push("torch FloatStorage"))),
    "a number as key": tensor(stored=storage(key=9)),
    "a key of 2**60 parts": tensor(
        stored=b"(" + push("storage") + named("torch FloatStorage") + doubled(push(())) + push("cpu") + push(4) + b"tQ"
    ),
    "a path": tensor(stored=storage(key="../../../../etc/passwd")),
    "no such storage": tensor(stored=storage(key="7")),
    "a storage of 2**40": tensor(stored=storage(size=1 << 40)),
    "a smaller storage": tensor((3,), stored=storage(size=3)),
    "a storage of -4": tensor(stored=storage(size=-4)),
    "a storage of True": tensor(stored=storage(size=True)),
    "a wider dtype": tensor(stored=storage(dtype=named("torch DoubleStorage"))),
    "offset -1": tensor((2,), offset=-1),
    "offset 1": tensor(offset=1),
    "stride -1": tensor(strides=(-1,)),
    "stride 0": tensor((1 << 40,), (0,)),
    "stride 2": tensor(strides=(2,)),
    "overlap": tensor((2, 3), (1, 1)),
    "overlap, transposed": tensor((3, 2), (1, 2)),
    "shape -4": tensor((-4,)),
    "shape 2**47, twice": tensor((1 << 47, 1 << 47), (1 << 46, 1)),
    "shape 4.0": tensor((4.0,)),
    "shape 4": tensor(4),
    "shape of a list": tensor([4]),
    "shape of 33 axes": tensor((1,) * 33, (1,) * 33),
    "more strides": tensor((4,), (1, 1)),
}


def archive(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", method) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return sink.getvalue()


def members_of(content: bytes) -> dict[str, bytes]:
    """The members of an archive, in a folder x."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        return {f"x/{name.partition('/')[2]}": file.read(name) for name in file.namelist()}


def with_value(members: Mapping[str, bytes], instructions: bytes) -> bytes:
    """The archive, with a further value in its state dict."""
    stream = members["x/data.pkl"]
    assert stream.endswith(b"u.")
    return archive({**members, "x/data.pkl": stream[:-2] + push("extra") + instructions + b"u."})


def patched(members: Mapping[str, bytes], name: str, offset: int, content: bytes, in_directory: bool = True) -> bytes:
    """The archive, with bytes replaced in the header of a member: in the directory, or before its content."""
    data = bytearray(archive(members))
    start = data.rindex(name.encode()) - 46 if in_directory else data.index(name.encode()) - 30
    data[start + offset : start + offset + len(content)] = content
    return bytes(data)


def repeated(members: Mapping[str, bytes], name: str) -> bytes:
    """The archive with a member twice."""
    return archive({**members, name.replace("x/", "y/"): b"other"}).replace(b"y/", b"x/")


Archive = Callable[[Mapping[str, bytes]], bytes]
LARGE = {f"x/{number:060000}": b"" for number in range(30)}
ARCHIVES: Mapping[str, Archive] = {
    "empty": lambda members: b"",
    "a pickle": lambda members: pickle.dumps({}, 2),
    "no directory": lambda members: archive(members)[:-400],
    "only a directory": lambda members: b"PK\3\4" + archive(members)[-400:],
    "deflated": lambda members: archive(members, zipfile.ZIP_DEFLATED),
    "deflated zeros": lambda members: archive(members | {"x/data/0": bytes(1 << 24)}, zipfile.ZIP_DEFLATED),
    "two storages of a name": lambda members: repeated(members, "x/data/0"),
    "two pickles": lambda members: repeated(members, "x/data.pkl"),
    "no pickle": lambda members: archive({name: members[name] for name in members if name != "x/data.pkl"}),
    "no folder": lambda members: archive({name.removeprefix("x/"): content for name, content in members.items()}),
    "big-endian": lambda members: archive(members | {"x/byteorder": b"big"}),
    "a pickle of 2 MB": lambda members: archive(members | {"x/data.pkl": b"N0" * (1 << 20) + b"."}),
    "11,000 members": lambda members: archive(members | {f"x/{number}": b"" for number in range(11_000)}),
    "a directory of 2 MB": lambda members: archive(members | LARGE),
    "a longer storage": lambda members: archive(members | {"x/data/0": members["x/data/0"] + bytes(4)}),
    "a size of 4 GB": lambda members: patched(members, "x/data.pkl", 20, b"\xfe\xff\xff\xff" * 2),
    "beyond the end": lambda members: patched(members, "x/data/0", 42, b"\xf0\xff\xff\x7f"),
    "the place of another": lambda members: patched(members, "x/data/0", 42, bytes(4)),
    "no header": lambda members: patched(members, "x/data/0", 0, b"PK\5\6", in_directory=False),
    "a long name": lambda members: patched(members, "x/data/0", 26, b"\xff\xff\xff\xff", in_directory=False),
    "another checksum": lambda members: patched(members, "x/data/0", 16, b"abcd"),
    "a changed pickle": lambda members: patched(members, "x/data.pkl", 60, b"\0", in_directory=False),
}
