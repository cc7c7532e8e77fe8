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
from fsspec.implementations.memory import MemoryFileSystem
from material import damage_column, text_stream, word_tokenizer, write_parquet

from pipeline.config.choices import OnError
from pipeline.config.hydra_schemas import register
from pipeline.config.schema import HfData
from pipeline.core.errors import ConfigError, InputError, PipelineError
from pipeline.data.documents import Document, SkippedDocument
from pipeline.data.hf import HfSource
from pipeline.data.selection import EveryKth

ROWS = [
    {"name": "a", "text": "one", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "n": 1},
    {"name": "b", "text": "two", "choices": {"text": ["z"], "label": ["1"]}, "n": 2},
    {"name": "c", "text": "three", "choices": {"text": [], "label": []}, "n": 3},
]


def write_json_lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source(**settings) -> HfSource:
    return HfSource(HfData(**({"source": "hf", "path": "json"} | settings)))


@pytest.fixture
def rows(tmp_path) -> str:
    return write_json_lines(tmp_path / "rows.jsonl", ROWS)


def test_local_files_need_no_network(rows, monkeypatch):
    hosts = []
    monkeypatch.setattr("socket.getaddrinfo", lambda host, *_: hosts.append(host) or [])
    assert len(list(source(data_files=rows).read(0, 0))) == len(ROWS)
    assert hosts == []


@pytest.mark.parametrize(
    ("template", "texts"),
    [
        ("{{ text }}", ["one", "two", "three"]),
        ("{{ name }}: {{ choices.text[0] | default('-') }}", ["a: x", "b: z", "c: -"]),
        ("{{ name | upper }}{{ n + 1 }}", ["A2", "B3", "C4"]),
        ("{{ choices | tojson }}", [json.dumps(row["choices"]) for row in ROWS]),
    ],
)
def test_templates_render_rows(rows, template, texts):
    assert [document.text for document in source(data_files=rows, text=template).read(0, 0)] == texts


def test_ai2_arc_is_rendered_with_lettered_choices(tmp_path):
    register()
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


def test_formats_give_the_same_documents(tmp_path):
    columns = {"text": ["one", "two", "three"], "name": ["a", "b", "c"]}
    write_parquet(str(tmp_path / "rows.parquet"), columns)
    (tmp_path / "rows.csv").write_text("text,name\none,a\ntwo,b\nthree,c\n")
    write_json_lines(tmp_path / "rows.jsonl", ROWS)
    for loader, name in (("parquet", "rows.parquet"), ("csv", "rows.csv"), ("json", "rows.jsonl")):
        opened = source(path=loader, data_files=str(tmp_path / name), id_column="name")
        assert [(document.id, document.text) for document in opened.read(0, 0)] == [
            ("a", "one"),
            ("b", "two"),
            ("c", "three"),
        ]
        assert [document.index for document in opened.read(0, 2)] == [2]


def test_files_are_shards_and_their_location_does_not_matter(tmp_path):
    opened = []
    for place in ("here", "there"):
        folder = tmp_path / place / "sub"
        folder.mkdir(parents=True)
        write_json_lines(folder / "b.jsonl", ROWS[1:])
        write_json_lines(folder / "a.jsonl", ROWS[:1])
        opened.append(source(data_files=str(folder / "*.jsonl")))
    assert opened[0].shards == opened[1].shards == ("a.jsonl", "b.jsonl")
    assert opened[0].fingerprint() == opened[1].fingerprint()
    assert [document.id for document in opened[0].read(1, 0)] == ["b.jsonl#0", "b.jsonl#1"]
    assert source(path=str(tmp_path / "here" / "sub")).shards == ("a.jsonl", "b.jsonl")
    write_json_lines(tmp_path / "there" / "sub" / "b.jsonl", ROWS[2:])
    assert source(data_files=str(tmp_path / "there" / "sub" / "*.jsonl")).fingerprint() != opened[0].fingerprint()


def test_info_columns_are_text(rows):
    opened = source(data_files=rows, info_columns=["n", "name", "choices"])
    assert next(opened.read(0, 1)).info == {"n": "2", "name": "b", "choices": '{"text": ["z"], "label": ["1"]}'}
    assert set(opened.info_schema.types) == {opened.info_schema.field("n").type}


def test_info_columns_may_be_dates_but_not_binary(tmp_path):
    day, time = datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 12, 30)
    pq.write_table(pa.table({"text": ["a"], "day": [day], "time": [time], "raw": [b"x"]}), tmp_path / "a.parquet")
    settings = {"path": "parquet", "data_files": str(tmp_path / "a.parquet")}
    (document,) = source(**settings, info_columns=["day", "time"]).read(0, 0)
    assert document.info == {"day": "2024-02-29", "time": "2024-02-29 12:30:00"}
    with pytest.raises(InputError, match="a.parquet row 0: 'raw' cannot be stored as text: .*bytes"):
        list(source(**settings, info_columns=["raw"]).read(0, 0))


BAD_ROWS = {
    "null": ({"text": None}, "{{ text }}", "data.text does not render: a value of the template is null"),
    "empty": ({"text": ""}, "{{ text }}", "the text is empty"),
    "absent element": ({"text": ""}, "{{ list[3] }}", "data.text does not render: .*has no element 3"),
    "arithmetic": ({"text": "", "list": [0]}, "{{ 1 // list[0] }}", "data.text does not render: integer division"),
    "too large": ({"text": "", "list": [10**17]}, "{{ range(list[0]) }}", "data.text does not render: Range too big"),
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
    with pytest.raises(InputError, match=r"rows.jsonl has no column body, only name, text, choices, n"):
        next(source(data_files=rows, **setting, on_error=on_error).read(0, 0))


@pytest.mark.parametrize("on_error", OnError)
@pytest.mark.parametrize(
    ("loader", "content"),
    [("json", b'{"text": "a"}\n{"text": \n'), ("json", b'{"text": "\xff"}\n'), ("csv", b"text\n\xff\n")],
)
def test_a_damaged_file_always_fails(tmp_path, loader, content, on_error):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(InputError, match=r"bad.txt is not readable from row 0 on"):
        list(source(path=loader, data_files=str(tmp_path / "bad.txt"), on_error=on_error).read(0, 0))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"text": "{% if %}"}, ConfigError, "data.text is not a jinja template"),
        ({"text": "{{ range(9)|random }}"}, ConfigError, "data.text is not a jinja template: No filter named 'random'"),
        ({"path": ""}, ConfigError, "data.path is '', which is not a directory, a loader or a Hub id"),
        (
            {"path": "/" + "a" * 5000},
            ConfigError,
            "data.path is '/aaa.*not a directory, a loader",
        ),
        ({"split": "test"}, ConfigError, "data.split=test, but json has the splits train. Set data.split to one"),
        ({"split": "train+train"}, ConfigError, r"data.split=train\+train, but json has the splits train"),
        ({"split": "all"}, ConfigError, "data.split=all, but json has the splits train"),
        ({"info_columns": ["index"]}, ConfigError, "data.info_columns has index, which every store has"),
        ({"info_columns": ["name", "name"]}, ConfigError, "data.info_columns has name twice. Remove one"),
        ({"data_files": "nothing.jsonl"}, InputError, "Unable to find"),
        ({"data_files": None}, ConfigError, "data.path=json is a loader. Set data.data_files"),
        ({"path": "folder/rows.jsonl.gz"}, ConfigError, "data.path=json data.data_files=folder/rows.jsonl.gz"),
        ({"path": "folder/rows"}, ConfigError, "data.path is 'folder/rows', which is not a directory, a"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(rows, settings, error, message, monkeypatch):
    folder = Path(rows).parent / "folder"
    folder.mkdir()
    (folder / "rows.jsonl.gz").touch()
    monkeypatch.chdir(folder.parent)
    with pytest.raises(error, match=message):
        source(**({"data_files": rows} | settings))


def test_a_column_of_a_selection_is_reserved(tmp_path):
    path = write_json_lines(tmp_path / "rows.jsonl", [{"text": "w1 w2 w3", "n_selected": "x"}])
    settings = {"rows_per_block": 1, "length": 8}
    opened = source(data_files=path, info_columns=["n_selected"])
    (block,) = text_stream(opened, word_tokenizer(), **settings).blocks()
    assert block.table["n_selected"].to_pylist() == ["x"]
    with pytest.raises(ConfigError, match="the data has a column n_selected, which capture.positions adds"):
        text_stream(opened, word_tokenizer(), **settings, selection=EveryKth(2, 4))


def test_local_files_and_urls_are_not_mixed(rows):
    fsspec.filesystem("memory").pipe("/mixed/b.jsonl", Path(rows).read_bytes())
    with pytest.raises(ConfigError, match="data.data_files has both local files and URLs"):
        source(data_files=[rows, "memory://mixed/b.jsonl"])


def test_damage_in_a_parquet_file_is_reported(tmp_path):
    path = tmp_path / "rows.parquet"
    write_parquet(str(path), {"text": [f"text number {number}" for number in range(6)]})
    damage_column(path, group=0)
    with pytest.raises(InputError, match=r"rows.parquet is not readable from row 0 on"):
        list(source(path="parquet", data_files=str(path)).read(0, 0))


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_json_lines(tmp_path / "rows.jsonl", ROWS)
    assert source(data_files="~/rows.jsonl").shards == source(data_files=["~/rows.jsonl"]).shards == ("rows.jsonl",)
    (tmp_path / "folder").mkdir()
    write_json_lines(tmp_path / "folder" / "rows.jsonl", ROWS)
    assert source(path="~/folder").shards == ("rows.jsonl",)


def test_a_hub_that_cannot_be_reached_may_be_tried_again(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(PipelineError, match="nobody/nothing cannot be read: .*try again") as caught:
        source(path="nobody/nothing")
    assert caught.value.exit_code == 1


def test_a_file_that_cannot_be_reached_may_be_tried_again(monkeypatch):
    def fail(self, path, **kwargs):
        raise PermissionError(13, "not today")

    with fsspec.open("memory:///hf_reach/rows.jsonl", "w") as file:
        file.write('{"text": "a"}\n')
    opened = source(data_files="memory://hf_reach/rows.jsonl")
    monkeypatch.setattr(MemoryFileSystem, "_open", fail)
    with pytest.raises(PipelineError, match=r"rows.jsonl row 0 cannot be read: .*not today.*try again") as caught:
        list(opened.read(0, 0))
    assert caught.value.exit_code == 1


def test_templates_cannot_reach_python(rows):
    opened = source(data_files=rows, text="{{ text.__class__.__mro__ }}")
    with pytest.raises(InputError, match="access to attribute '__class__' of 'str' object is unsafe"):
        next(opened.read(0, 0))


def test_a_lone_surrogate_skips_only_its_document(rows):
    opened = source(data_files=rows, text="w{{ n }}{{ '\\ud800' if n == 2 else '' }}")
    stream = text_stream(opened, word_tokenizer(), rows_per_block=3, length=4, on_error=OnError.skip)
    (block,) = stream.blocks()
    assert block.tokens[block.segments > 0].tolist() == [1, 3]
    assert [(skip.index, skip.reason) for skip in block.skipped] == [
        (1, "the text has a lone surrogate, so is not UTF-8")
    ]


COMPRESSED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("on_error", OnError)
@pytest.mark.parametrize("kind", COMPRESSED)
def test_a_truncated_or_damaged_compressed_file_is_reported(tmp_path, kind, on_error):
    whole = COMPRESSED[kind](b"".join(json.dumps({"text": f"{n} {n * n}"}).encode() + b"\n" for n in range(5000)))
    for number, content in enumerate([whole[:-9], whole[: len(whole) // 2], whole[:10], whole[:-4] + b"\xff" * 4]):
        path = tmp_path / f"{number}.json.{kind}"
        path.write_bytes(content)
        with pytest.raises(PipelineError, match=rf"{number}.json|data.path=json") as caught:
            list(source(data_files=str(path), on_error=on_error).read(0, 0))
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("loader", "content"),
    [
        ("json", b""),
        ("json", b'{"text": ' * 3000),
        ("json", b"[" * 100_000),
        ("json", b"null"),
        ("json", b" \nnull\nnull"),
        ("json", b"5\n6\n"),
        ("json", b'[{"text": "a"}, 5]'),
        ("json", b'{"text": NaN, "a": 1e999, "b": 99999999999999999999999999}'),
        ("json", b'{"text": "\xed\xa0\x80"}'),
        ("parquet", b"PAR1"),
        ("parquet", b"PAR1" + bytes(20) + b"PAR1"),
        ("csv", b""),
    ],
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


@pytest.mark.parametrize("column", ["id", "note"])
def test_a_lone_surrogate_in_another_column_skips_only_its_document(column):
    rows = [{"text": f"w{n}", "id": f"d{n}", "note": "x"} for n in range(3)]
    rows[1][column] = "a\ud800"
    lenient = [Document(r["id"], r["text"], "a", i, {"note": r["note"]}) for i, r in enumerate(rows)]
    settings = {"rows_per_block": 3, "length": 4}
    (block,) = text_stream(Listed(lenient), word_tokenizer(), on_error=OnError.skip, **settings).blocks()
    assert block.table["id"].to_pylist() == ["d0", "d2"]
    (skip,) = block.skipped
    assert (skip.index, skip.reason) == (1, f"its {column} has a lone surrogate, so is not UTF-8")
    with pytest.raises(InputError, match=rf"a row 1 .*its {column} has a lone surrogate") as caught:
        list(text_stream(Listed(lenient), word_tokenizer(), **settings).blocks())
    str(caught.value).encode()


class Listed:
    """A source with one shard of the given documents."""

    shards = ("a",)
    info_schema = pa.schema([("note", pa.string())])

    def __init__(self, documents):
        self._documents = documents

    def read(self, shard, start):
        return iter(self._documents[start:])

    def fingerprint(self):
        return {}
