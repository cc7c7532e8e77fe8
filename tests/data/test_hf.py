import bz2
import datetime
import gzip
import json
import lzma
import os
from pathlib import Path

import datasets
import fsspec
import hydra
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from material import damage_column, text_stream, word_tokenizer, write_parquet

from pipeline.config.choices import OnError, Positions
from pipeline.config.composing import prepare
from pipeline.config.schema import HfData
from pipeline.core.errors import ConfigError, InputError, PipelineError
from pipeline.data.documents import Document, SkippedDocument
from pipeline.data.hf import HfSource
from pipeline.data.selection import Selection

ROWS = [
    {"name": "a", "text": "one", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "n": 1},
    {"name": "b", "text": "two", "choices": {"text": ["z"], "label": ["1"]}, "n": 2},
    {"name": "c", "text": "three", "choices": {"text": [], "label": []}, "n": 3},
]


def write_json_lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source(**settings) -> HfSource:
    return HfSource(HfData(**({"source": "hf", "path": "json"} | settings)), word_tokenizer())


@pytest.fixture
def rows(tmp_path) -> str:
    return write_json_lines(tmp_path / "rows.jsonl", ROWS)


@pytest.mark.parametrize(
    ("template", "texts"),
    [
        ("{{ text }}", ["one", "two", "three"]),
        ("{{ name }}: {{ choices.text[0] | default('-') }}", ["a: x", "b: z", "c: -"]),
        ("{{ name | upper }}{{ n + 1 }}", ["A2", "B3", "C4"]),
        ("{{ text }}\n{{ '\\\\n' }}", ["one\n\\n", "two\n\\n", "three\n\\n"]),
        ("{{ choices | tojson }}", [json.dumps(row["choices"]) for row in ROWS]),
    ],
)
def test_templates_render_rows(rows, template, texts):
    assert [document.text for document in source(data_files=rows, text=template).read(0, 0)] == texts


def test_ai2_arc_is_rendered_with_lettered_choices(tmp_path):
    prepare()
    with hydra.initialize_config_dir(str(Path(__file__).parents[2] / "configs"), version_base=None):
        config = hydra.compose("config", overrides=["data=ai2_arc"]).data
    row = {
        "id": "MCAS_1",
        "question": "What is ice?",
        "choices": {"text": ["a gas", "water"], "label": ["A", "B"]},
        "answerKey": "B",
    }
    path = write_json_lines(tmp_path / "rows.jsonl", [row])
    opened = source(
        data_files=path, text=config.text, id_column=config.id_column, info_columns=list(config.info_columns)
    )
    assert list(opened.read(0, 0)) == [
        Document("MCAS_1", "Question: What is ice?\nA. a gas\nB. water\nAnswer:", "rows.jsonl", 0, {"answerKey": "B"})
    ]


def test_files_are_shards(tmp_path):
    """Also where they differ in columns that are not used."""
    write_json_lines(tmp_path / "b.jsonl", [row | {"other": {"c": []}} for row in ROWS[1:]])
    write_json_lines(tmp_path / "a.jsonl", ROWS[:1])
    for settings in ({"data_files": str(tmp_path / "*.jsonl")}, {"path": str(tmp_path)}):
        opened = source(**settings)
        assert opened.shards == ("a.jsonl", "b.jsonl")
        assert [document.id for document in opened.read(1, 0)] == ["b.jsonl#0", "b.jsonl#1"]


def test_info_columns_are_text(rows):
    opened = source(data_files=rows, info_columns=["n", "name", "choices", "n"])
    assert next(opened.read(0, 1)).info == {"n": "2", "name": "b", "choices": '{"text": ["z"], "label": ["1"]}'}
    assert set(opened.info_schema.types) == {opened.info_schema.field("n").type}


def test_info_columns_may_be_dates_and_binary_text(tmp_path):
    day, time = datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 12, 30)
    pq.write_table(pa.table({"text": ["a"], "day": [day], "time": [time], "raw": [b"x"]}), tmp_path / "a.parquet")
    settings = {"path": "parquet", "data_files": str(tmp_path / "a.parquet")}
    (document,) = source(**settings, info_columns=["day", "time"]).read(0, 0)
    assert document.info == {"day": "2024-02-29", "time": "2024-02-29 12:30:00"}
    (document,) = source(**settings, text="{{ raw }}", info_columns=["raw"]).read(0, 0)
    assert (document.text, document.info) == ("x", {"raw": "x"})


BAD_ROWS = {
    "null": ({"text": None}, "{{ text }}", "data.text does not render: a value of the template is null"),
    "empty": ({"text": ""}, "{{ text }}", "the text is empty"),
    "absent element": ({"text": ""}, "{{ list[3] }}", "data.text does not render: .*has no element 3"),
    "not text": (
        {"text": "a"},
        "{% if list | length > 1 %}{{ text }}{% else %}{{ text + 1 }}{% endif %}",
        "data.text does not render: can only concatenate str",
    ),
    "null id": ({"text": "a", "key": None}, "{{ text }}", "'key' is null"),
}


@pytest.mark.parametrize(("row", "template", "reason"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_reported_or_skipped(tmp_path, row, template, reason):
    good = {"text": "fine", "key": "k", "list": [1, 2, 3, 4]}
    path = write_json_lines(tmp_path / "rows.jsonl", [good, {"text": "b", "key": "k", "list": [1]} | row])
    settings = {"data_files": path, "text": template, "id_column": "key"}
    documents = source(**settings).read(0, 0)
    assert next(documents).index == 0
    with pytest.raises(InputError, match=rf"rows.jsonl row 1: {reason}.*data.on_error=skip"):
        next(documents)
    _, skipped = source(**settings, on_error=OnError.skip).read(0, 0)
    assert isinstance(skipped, SkippedDocument)
    assert (skipped.source, skipped.index) == ("rows.jsonl", 1)


@pytest.mark.parametrize("on_error", OnError)
@pytest.mark.parametrize("setting", [{"text": "{{ body }}"}, {"id_column": "body"}, {"info_columns": ["body"]}])
def test_a_missing_column_always_fails(rows, setting, on_error):
    with pytest.raises(InputError, match=r"rows.jsonl has no column 'body', only 'name', 'text', 'choices', 'n'"):
        next(source(data_files=rows, **setting, on_error=on_error).read(0, 0))


TYPES = ["007", "1.50", "NA", "null", "True", "2020-01-01", "1e5", "nan", "N/A", "-0", "2020-01-01T00:00:00Z", " x "]
WRITTEN = {  # by name of the file: its content, a template, and the documents
    "types.csv": ("id,text,n\n" + "".join(f"{n:03d},{text},\n" for n, text in enumerate(TYPES)), "{{ id }}={{ text }}",
                  [f"{n:03d}={text}" for n, text in enumerate(TYPES)]),
    "types.tsv": ("text\tid\n1.50\t007\n", "{{ text }}/{{ id }}", ["1.50/007"]),
    "types.jsonl": ("".join(json.dumps({"text": text}) + "\n" for text in TYPES), "{{ text }}", TYPES),
    "dates.jsonl": ('{"text": "2020-01-01"}\n{"text": "2021-01-01T10:00:00"}\n', "{{ text }}",
                    ["2020-01-01", "2021-01-01T10:00:00"]),
    "list.json": (json.dumps([{"text": text} for text in TYPES], indent=1), "{{ text }}", TYPES),
    "one.json": ('[\n{"text": "a"}\n]\n', "{{ text }}", ["a"]),
    "commas.json": ('[\n{"text": "a"}\n,\n{"text": "b"}\n]', "{{ text }}", ["a", "b"]),
    "texts.json": (json.dumps(TYPES), "{{ text }}", TYPES),
    "object.json": (json.dumps({"text": "a", "x": []}, indent=2), "{{ text }}", ["a"]),
    "columns.jsonl": (
        '{"text": "a", "x": 1}\n{"y": {"z": []}, "text": "b"}\n{"x": [NaN], "text": "c"}',
        "{{ text }}", ["a", "b", "c"]),
    "mixed.jsonl": ('{"text": 1}\n{"text": "b"}\n{"text": 2.5}\n', "{{ text }}", ["1", "b", "2.5"]),
    "optional.jsonl": ('{"text": "a"}\n{"text": "b", "title": "B"}\n', "{{ title | default('-') }}{{ text }}",
                       ["-a", "Bb"]),
    "short.csv": ("text,more\na\nb,c\n\n\nd,\n", "{{ text }}", ["a", "b", "d"]),
    "quoted.csv": ('text,n\r\n"a\r\nb, ""c""",1\r\nd,2\r\n', "{{ text }}", ['a\r\nb, "c"', "d"]),
    "long.csv": ("text\n" + "x" * 200_000 + "\n", "{{ text }}", ["x" * 200_000]),
    "blank.txt": ("a\n\n  \nb\r\n\n\nc", "{{ text }}", ["a", "b", "c"]),
    "blank.jsonl": ('\n{"text": "a"}\n\n{"text": "b"}\n\n', "{{ text }}", ["a", "b"]),
}  # fmt: skip


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", WRITTEN)
def test_texts_are_read_as_they_are_written(tmp_path, name, mark):
    content, template, texts = WRITTEN[name]
    (tmp_path / name).write_bytes((mark + content).encode())
    loader = {"csv": "csv", "tsv": "csv", "txt": "text"}.get(name.rpartition(".")[2], "json")
    opened = source(path=loader, data_files=str(tmp_path / name), text=template)
    documents = list(opened.read(0, 0))
    assert [document.text for document in documents] == texts
    assert list(opened.read(0, 2)) == [document for document in documents if document.index >= 2]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-be"])
@pytest.mark.parametrize("loader", ["json", "csv", "text"])
def test_a_file_in_utf_16_is_refused_by_name(tmp_path, loader, encoding):
    content = f"{chr(0xFEFF) * (encoding == 'utf-16-be')}{{}}\ntext\n"
    (tmp_path / "bad.txt").write_bytes(content.encode(encoding))
    with pytest.raises(InputError, match="bad.txt is UTF-16 or UTF-32, expected UTF-8"):
        list(source(path=loader, data_files=str(tmp_path / "bad.txt"), on_error=OnError.skip).read(0, 0))


NUM_GOOD = 5000
GOOD = b"".join(json.dumps({"text": f"w{n}", "other": 90 * "x"}).encode() + b"\n" for n in range(NUM_GOOD))


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


COMPRESSED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}
BAD = {  # by name: the loader, the content, the good rows of the first ones, and the skips: index and rows
    "a line": ("json", b'{"text": "w0"}\n{"text": \n\n{"text": "w3"}\n', [0, 3], [(1, 1)]),
    "the first line": ("json", b'{"text": \n{"text": "w1"}\n{"text": "w2"}\n', [1, 2], [(0, 1)]),
    "the first two": ("json", b'{"te\n{"te\n{"text": "w2"}\n', [2], [(0, 1), (1, 1)]),
    "no objects": ("json", b'{"text": "w0"}\n5\nnull\n[1]\n{"text": "w4"}', [0, 4], [(1, 1), (2, 1), (3, 1)]),
    "not UTF-8": ("json", b'{"text": "w0"}\n{"text": "\xff"}\n{"text": "w2", "x": "\xff"}', [0, 2], [(1, 1)]),
    "a text": ("text", b"w0\n\xff\nw2", [0, 2], [(1, 1)]),
    "a record": ("csv", b'text,n\nw0,1\nw1,2,3\n"w2"x,3\n\xff,4\nw4,\xff\n', [0, 4], [(1, 1), (2, 1), (3, 1)]),
    **{
        f"truncated {kind}": ("json", compress(GOOD)[:-9], range(100), [(NUM_GOOD, None)])
        for kind, compress in COMPRESSED.items()
    },
}


@pytest.mark.parametrize(("loader", "content", "good", "skips"), BAD.values(), ids=BAD)
def test_only_what_is_bad_is_skipped(tmp_path, loader, content, good, skips):
    path = tmp_path / "rows.txt"
    path.write_bytes(content)
    settings = {"rows_per_block": NUM_GOOD, "length": 1}
    opened = source(path=loader, data_files=str(path), on_error=OnError.skip)
    (block,) = text_stream(opened, word_tokenizer(), on_error=OnError.skip, **settings).blocks()
    assert block.table["index"].to_pylist()[: len(good)] == [*good]
    found = [(skip.index, skip.rows) for skip in block.skipped]
    assert found == skips or (skips[0][1] is None and 100 < found[0][0] <= NUM_GOOD and found[0][1] is None)
    strict = text_stream(source(path=loader, data_files=str(path)), word_tokenizer(), **settings)
    with pytest.raises(InputError, match=rf"rows.txt row {found[0][0]}.* or set data.on_error=skip"):
        list(strict.blocks())


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_files_are_read(tmp_path, kind):
    (tmp_path / f"a.jsonl.{kind}").write_bytes(COMPRESSED[kind](GOOD[:999]) + COMPRESSED[kind](GOOD[999:]))
    documents = list(source(data_files=str(tmp_path / f"a.jsonl.{kind}")).read(0, 7))
    assert [document.text for document in documents] == [f"w{n}" for n in range(7, NUM_GOOD)]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"text": "{% if %}"}, ConfigError, "is no jinja template"),
        ({"text": r"{{ text }}\n{{ name }}"}, ConfigError, r"is no jinja template: its \\n is no line break"),
        ({"path": "/" + "a" * 5000}, ConfigError, "data.path is '/aaa.*not a directory, a loader"),
        ({"split": "test"}, ConfigError, "data.split=test, but json has the splits train. Set data.split to one"),
        ({"split": "train+train"}, ConfigError, r"data.split=train\+train, but json has the splits train"),
        ({"info_columns": ["index"]}, ConfigError, "data.info_columns has index, which every store has"),
        ({"data_files": "nothing.jsonl"}, InputError, "Unable to find"),
        ({"data_files": ["rows.jsonl", "nothing*.jsonl"]}, InputError, r"Unable to find '.*nothing\*.jsonl'"),
        ({"path": ".", "data_files": ["rows.jsonl", "nothing*"]}, InputError, r"Unable to find '.*nothing\*'"),
        ({"data_files": None}, ConfigError, "data.path=json is a loader. Set data.data_files"),
        ({"data_files": []}, ConfigError, "data.path=json is a loader. Set data.data_files"),
        ({"path": "card"}, InputError, "card: the header of its card, README.md, cannot be used: while parsing"),
        ({"path": "folder/rows.jsonl.gz"}, ConfigError, "a file is read with data.data_files=FILE and data.path=json"),
        ({"path": "[1]"}, ConfigError, r"data.path is \[1\], .* and data.data_files=\[\[\]1\]/\*"),
        ({"path": "folder/rows"}, ConfigError, "data.path is 'folder/rows', which is not a directory, a"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(rows, settings, error, message, monkeypatch):
    folder = Path(rows).parent / "folder"
    folder.mkdir()
    (folder / "rows.jsonl.gz").touch()
    monkeypatch.chdir(folder.parent)
    Path("card").mkdir()
    Path("[1]").mkdir()
    Path("card", "README.md").write_text("---\nlicense: [\n---\n")
    with pytest.raises(error, match=message):
        source(**({"data_files": rows} | settings))


def test_a_column_of_a_selection_is_reserved(tmp_path):
    path = write_json_lines(tmp_path / "rows.jsonl", [{"text": "w1 w2 w3", "n_selected": "x"}])
    settings = {"rows_per_block": 1, "length": 8}
    opened = source(data_files=path, info_columns=["n_selected"])
    (block,) = text_stream(opened, word_tokenizer(), **settings).blocks()
    assert block.table["n_selected"].to_pylist() == ["x"]
    with pytest.raises(ConfigError, match="the data has a column n_selected, which capture.positions adds"):
        text_stream(opened, word_tokenizer(), **settings, selection=Selection(Positions.every, 4, every=2))


def test_local_files_and_urls_are_not_mixed(rows):
    fsspec.filesystem("memory").pipe("/mixed/b.jsonl", Path(rows).read_bytes())
    with pytest.raises(ConfigError, match="data.data_files has both local files and URLs"):
        source(data_files=[rows, "memory://mixed/b.jsonl"])


def test_damage_in_a_parquet_file_is_reported_or_skipped(tmp_path):
    path = tmp_path / "rows.parquet"
    write_parquet(str(path), {"text": [f"text number {number}" for number in range(6)]})
    damage_column(path, group=0)
    with pytest.raises(InputError, match=r"rows.parquet row 0: not readable as parquet"):
        list(source(path="parquet", data_files=str(path)).read(0, 0))
    skip, *documents = source(path="parquet", data_files=str(path), on_error=OnError.skip).read(0, 0)
    assert (skip.index, skip.rows, [document.index for document in documents]) == (0, 3, [3, 4, 5])


def test_local_files_need_no_network(rows, monkeypatch):
    hosts = []
    monkeypatch.setattr("socket.getaddrinfo", lambda host, *_: hosts.append(host) or [])
    assert len(list(source(data_files=rows).read(0, 0))) == len(ROWS)
    assert hosts == []


def test_other_formats_are_read_by_datasets(rows, tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    found = list(source(path="arrow", data_files=str(tmp_path / "saved" / "*.arrow"), id_column="name").read(0, 1))
    assert [(document.id, document.text, document.index) for document in found] == [("b", "two", 1), ("c", "three", 2)]


def test_a_home_directory_is_expanded_and_brackets_are_part_of_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert source(data_files=write_json_lines(tmp_path / "rows[1].jsonl", ROWS)).shards == ("rows[1].jsonl",)
    write_json_lines(tmp_path / "rows.jsonl", ROWS)
    assert source(data_files="~/rows.jsonl").shards == source(data_files=["~/rows.jsonl"]).shards == ("rows.jsonl",)
    (tmp_path / "folder").mkdir()
    write_json_lines(tmp_path / "folder" / "rows.jsonl", ROWS)
    assert source(path="~/folder").shards == ("rows.jsonl",)
    write_json_lines(tmp_path / "folder" / "rows[1].jsonl", ROWS)
    assert source(path="~/folder", data_files="rows[1].jsonl").shards == ("rows[1].jsonl",)


MEANINGLESS = [
    *(b"", b'{"text": ' * 3000, b"[" * 100_000, b"null", b" \nnull\nnull", b"5\n6\n", b'[{"text": "a"}, 5]'),
    b'{"text": NaN, "a": 1e999, "b": 99999999999999999999999999}',
]


@pytest.mark.parametrize(
    ("loader", "content"), [*(("json", content) for content in MEANINGLESS), ("parquet", b"PAR1"), ("csv", b"")]
)
def test_meaningless_files_are_refused(tmp_path, loader, content):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(PipelineError) as caught:
        list(source(path=loader, data_files=str(tmp_path / "bad.txt")).read(0, 0))
    assert caught.value.exit_code == 2


def test_a_fifo_is_refused_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo.json")
    for settings in ({"data_files": str(tmp_path / "fifo.json")}, {"path": str(tmp_path)}):
        with pytest.raises(PipelineError, match="is a FIFO|Unable to find|doesn.t contain any data files") as caught:
            source(**settings)
        assert caught.value.exit_code == 2
