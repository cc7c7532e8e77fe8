"""ARC tasks from all supported files and data sets as documents."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from material import word_library_tokenizer, word_tokenizer

from pipeline.config.choices import OnError, Template
from pipeline.config.schema import ArcData
from pipeline.core.errors import ConfigError, InputError
from pipeline.data.arc import source as arc_source
from pipeline.data.arc.loading import dataset_tasks, open_tasks
from pipeline.data.arc.prompts import grid_encoder
from pipeline.data.arc.source import ArcSource
from pipeline.data.arc.tasks import Augmentation, Task
from pipeline.data.documents import Document, SkippedDocument
from pipeline.data.text.templates import ChatTemplate
from pipeline.data.text.tokenizer import TextTokenizer
from tests.data.arc.undoing import decode_prompt, original_task
from tests.hub import hub_for_this_process

ONE = {"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[3]], "output": [[4]]}]}
TWO_TESTS = {"train": [{"input": [[5, 6]], "output": [[7]]}], "test": [{"input": [[8]]}, {"input": [[9]]}]}
BARC = {"examples": [[[[1]], [[2]]], [[[3]], [[4]]]]}
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}[assistant]{% endif %}"


def source(path, *, tokenizer: TextTokenizer | None = None, **settings) -> ArcSource:
    return ArcSource(ArcData(source="arc", path=str(path), **settings), tokenizer or word_tokenizer())


def documents(opened: ArcSource) -> list[Document | SkippedDocument]:
    return [document for shard in range(len(opened.shards)) for document in opened.read(shard, 0)]


def write(path: Path, content) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    write(tmp_path / "tasks" / "b.json", TWO_TESTS)
    write(tmp_path / "tasks" / "a.json", ONE)
    return tmp_path / "tasks"


def test_every_test_input_has_a_prompt(folder):
    assert [(document.id, document.text) for document in documents(source(folder))] == [
        ("a#0", "input:\n1\noutput:\n2\n\ninput:\n3\noutput:\n"),
        ("b#0", "input:\n56\noutput:\n7\n\ninput:\n8\noutput:\n"),
        ("b#1", "input:\n56\noutput:\n7\n\ninput:\n9\noutput:\n"),
    ]


def test_known_answers_are_augmented_like_the_prompts(folder):
    found = documents(source(folder, augmentations=3))
    colors = [document.info["colors"] for document in found]
    assert [document.answer for document in found] == [*(colors[k][4] for k in range(3)), *[None] * 6]  # of one cell


def test_augmented_versions_are_recorded(folder):
    found = documents(source(folder, augmentations=3))
    assert [document.id for document in found] == [
        *("a#0", "a#0@1", "a#0@2"),
        *("b#0", "b#1", "b#0@1", "b#1@1", "b#0@2", "b#1@2"),
    ]
    assert found[4].info == {
        "task": "b",
        "test": 1,
        "augmentation": 0,
        "geometry": "identity",
        "colors": "0123456789",
        "order": "0",
    }
    assert found[8].info | {"test": 0} == found[7].info
    assert [document.index for document in found] == list(range(9))
    pairs = [{"input": [[k, k + 1]], "output": [[k]]} for k in range(5)]
    write(folder / "c.json", {"train": pairs[:4], "test": pairs[4:]})
    for document in documents(source(folder, augmentations=5))[15:]:
        colors, order = map(int, document.info["colors"]), map(int, document.info["order"].split(","))
        change = Augmentation(document.info["geometry"], tuple(colors), tuple(order))
        shown = decode_prompt(document.text, grid_encoder(ArcData(path="")))
        task = original_task(change, Task("c", tuple(shown[:-1]), tuple(shown[-1:])))
        assert [pair.input.tolist() for pair in task.examples + task.tests] == [pair["input"] for pair in pairs]


def test_shards_are_groups_of_tasks(folder, monkeypatch):
    monkeypatch.setattr(arc_source, "_TASKS_PER_SHARD", 1)
    opened = source(folder, augmentations=2)
    assert opened.shards == ("tasks-000000", "tasks-000001")
    assert [document.id for document in opened.read(1, 0)] == ["b#0", "b#1", "b#0@1", "b#1@1"]
    assert [(document.id, document.index) for document in opened.read(1, 3)] == [("b#1@1", 3)]
    texts = [document.text for document in documents(opened)]
    monkeypatch.undo()  # how tasks are grouped changes no document
    assert texts == [document.text for document in documents(source(folder, augmentations=2))]


PLACES = {
    "challenges": ("x_challenges.json", {"a": ONE, "b": TWO_TESTS}, ["a", "b"]),
    "one task": ("a.json", ONE, ["a"]),
    "examples": ("a.json", BARC, ["a"]),
    "lines": (
        "x.jsonl",
        "\n".join(map(json.dumps, [ONE, {"id": "b"} | TWO_TESTS, {"task_id": 7} | BARC])) + "\n",
        None,
    ),
}


@pytest.mark.parametrize(("name", "content", "tasks"), PLACES.values(), ids=PLACES)
def test_files_of_every_format_are_read(tmp_path, name, content, tasks):
    path = tmp_path / name
    found = documents(source(write(path, content)))
    text = path.read_text()
    path.write_bytes(text.encode("utf-8-sig"))
    assert documents(source(path)) == found
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(InputError, match=f"{name} is UTF-16 or UTF-32, expected UTF-8"):
        documents(source(path))
    assert list(dict.fromkeys(document.info["task"] for document in found)) == (tasks or ["x-1", "b", "7"])
    assert found[0].text == "input:\n1\noutput:\n2\n\ninput:\n3\noutput:\n"


def test_solutions_are_read_from_the_file_next_to_the_challenges(tmp_path):
    challenges = write(tmp_path / "x_challenges.json", {"a": ONE, "b": TWO_TESTS})
    without = source(challenges, include_solution=True).fingerprint()
    write(tmp_path / "x_solutions.json", {"a": [[[0]]], "b": [[[1]], [[2]]]})
    opened = source(challenges, include_solution=True)
    assert [document.text[-1] for document in documents(opened)] == ["0", "1", "2"]
    assert opened.fingerprint() != without


@pytest.mark.parametrize("columns", ["examples", "train and test"])
def test_data_sets_are_read(columns):
    rows = [BARC | {"name": "p"}, BARC] if columns == "examples" else [ONE | {"id": "p"}, ONE]
    tasks = dataset_tasks(datasets.Dataset.from_list(rows), "hf://datasets/some/tasks", ())
    loaded = [tasks.load(number) for number in range(tasks.size)]
    assert [task.name for task in loaded] == ["p", "row-1"]
    for task in loaded:
        assert (task.examples[0].output.tolist(), task.tests[0].input.tolist()) == ([[2]], [[3]])
    with pytest.raises(InputError, match="has the columns text, expected examples, or train and test"):
        dataset_tasks(datasets.Dataset.from_list([{"text": "a"}]), "hf://datasets/some/texts", ())


GRIDS = {
    "ragged": [[1, 2], [3]],
    "empty grid": [],
    "empty row": [[]],
    "colour 10": [[10]],
    "negative": [[-1]],
    "boolean": [[True]],
    "fraction": [[1.0]],
    "text": "12",
    "large": [[10**30]],
    "deep": [[[1]]],
    "null": [[None]],
}
BAD_TASKS = {
    **{
        name: ({"train": [], "test": [{"input": grid}]}, "the input of test 0 is .*, expected rows of the same length")
        for name, grid in GRIDS.items()
    },
    "no test pair": ({"train": ONE["train"], "test": []}, "it has no test pair"),
    "no test": ({"train": ONE["train"]}, "test is missing, expected a list"),
    "no output": ({"train": [{"input": [[1]]}], "test": ONE["test"]}, "example 0 has no output"),
    "no input": ({"train": [], "test": [{"output": [[1]]}]}, "test 0 is .* expected an input and an output"),
    "a list": ([1, 2], r"the task is \[1, 2\], expected an object"),
    "broken JSON": ('{"train": [', "is not JSON"),
}
NO_TASKS = [  # a file's content, settings, and the message
    ("{", {}, "x.json is not JSON"),
    ({}, {}, "x.json has no tasks"),
    ([ONE], {}, "x.json has no tasks"),
    ({"b": ONE}, {"path": "texts"}, "has no .json file. Set data.path"),
]


@pytest.mark.parametrize("on_error", OnError)
@pytest.mark.parametrize(("content", "settings", "message"), NO_TASKS)
def test_files_without_tasks_are_refused(tmp_path, content, settings, message, on_error):
    write(tmp_path / "y.json", {})
    write(tmp_path / "texts" / "notes.txt", "")
    path = write(tmp_path / "x.json", content)
    settings = {"path": str(path)} | {name: str(tmp_path / value) for name, value in settings.items()}
    with pytest.raises(InputError, match=message):
        source(**settings, on_error=on_error)


def test_a_name_that_is_not_utf8_is_a_bad_task(tmp_path):
    path = write(tmp_path / "x_challenges.json", {"a": ONE, "\ud800": ONE})
    with pytest.raises(InputError, match=r"task \\ud800: its name has a lone surrogate"):
        documents(source(path))


@pytest.mark.parametrize(("content", "reason"), BAD_TASKS.values(), ids=BAD_TASKS)
def test_a_bad_task_is_reported_or_skipped(folder, content, reason):
    write(folder / "ab.json", content)
    opened = source(folder, augmentations=2)
    with pytest.raises(InputError, match=rf"tasks/ab.json.*{reason}"):
        documents(opened)
    found = documents(source(folder, augmentations=2, on_error=OnError.skip))
    assert [item.index for item in found] == list(range(7))
    (skipped,) = [item for item in found if isinstance(item, SkippedDocument)]
    assert (skipped.source, skipped.index) == ("tasks-000000", 2)
    resumed = source(folder, augmentations=2, on_error=OnError.skip).read(0, 3)
    assert [item.id for item in resumed] == ["b#0", "b#1", "b#0@1", "b#1@1"]


@pytest.mark.parametrize(
    ("include_solution", "expected"),
    [
        (False, "[user]input:\n1\noutput:\n2\n\ninput:\n3[end]\n[assistant]"),
        (True, "[user]input:\n1\noutput:\n2\n\ninput:\n3[end]\n[assistant]output:\n4[end]\n"),
    ],
)
def test_prompts_are_rendered_with_the_chat_template(folder, include_solution, expected):
    tokenizer = TextTokenizer(word_library_tokenizer(), name="words", digest="0", chat=ChatTemplate(CHAT, "words"))
    opened = source(folder, tokenizer=tokenizer, template=Template.chat, include_solution=include_solution)
    assert documents(opened)[0].text == expected
    other = TextTokenizer(word_library_tokenizer(), name="words", digest="0", chat=ChatTemplate(CHAT + "!", "words"))
    assert source(folder, tokenizer=other, template=Template.chat).fingerprint() != opened.fingerprint()


@pytest.mark.parametrize("template", Template)
@pytest.mark.parametrize("settings", [{}, {"encoder": "symbols+separated+row_numbers", "symbols": "inputoxyzw"}])
def test_grids_are_recovered_from_prompts(folder, template, settings):
    tokenizer = TextTokenizer(word_library_tokenizer(), name="words", digest="0", chat=ChatTemplate(CHAT, "words"))
    for include_solution in (False, True):
        opened = source(folder, tokenizer=tokenizer, template=template, include_solution=include_solution, **settings)
        example, test = decode_prompt(documents(opened)[1].text, grid_encoder(opened._config))
        assert (example.input.tolist(), example.output.tolist()) == ([[5, 6]], [[7]])
        assert (test.input.tolist(), test.output) == ([[8]], None)
        solved = decode_prompt(documents(opened)[0].text, grid_encoder(opened._config))[-1].output
        assert np.array_equal(solved, [[4]]) if include_solution else solved is None
    with pytest.raises(ConfigError, match="tokenizer words has no chat template"):
        documents(source(folder, template=Template.chat))


def test_a_data_set_of_the_hub_is_read(tmp_path, monkeypatch):
    rows = json.dumps(BARC | {"seeds": ["x"]}) + "\n" + json.dumps(BARC) + "\n"
    with hub_for_this_process(tmp_path, monkeypatch) as server:
        server.push("datasets/some/tasks", {"train.jsonl": rows.encode()})
        tasks = open_tasks(ArcData(source="arc", path="hf://datasets/some/tasks"))
        assert [tasks.load(number).name for number in range(tasks.size)] == ["row-0", "row-1"]
        with pytest.raises(
            ConfigError, match="data.split=test, but hf://datasets/some/tasks has the splits train. Set data.split"
        ):
            open_tasks(ArcData(source="arc", path="hf://datasets/some/tasks", split="test"))


def test_a_globs_challenges_have_only_their_own_solutions(tmp_path):
    write(tmp_path / "b_challenges.json", {"b": {"train": ONE["train"], "test": [{"input": [[5]]}]}})
    write(tmp_path / "a_solutions.json", {"b": [[[0]]]})
    opened = source(tmp_path / "*_challenges.json", include_solution=True)
    assert [document.text.rpartition("output:\n")[2] for document in documents(opened)] == [""]
    write(tmp_path / "b_solutions.json", {"b": [[[7]]]})
    opened = source(tmp_path / "*_challenges.json", include_solution=True)
    assert [document.text.rpartition("output:\n")[2] for document in documents(opened)] == ["7"]
    with pytest.raises(InputError, match=r"b_challenges.json has many tasks, .* Set data.path to this file"):
        source(tmp_path)
