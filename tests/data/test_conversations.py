"""Conversations of data sets become messages, and their documents have labels."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from material import text_stream

from pipeline.config import composing
from pipeline.config.choices import OnError, Positions
from pipeline.config.schema import BatchConfig, CaptureConfig, HfData
from pipeline.core.errors import ConfigError, InputError
from pipeline.data.hf import HfSource
from pipeline.data.selection import open_selection
from pipeline.data.text.conversations import Conversations, TemplateForms
from pipeline.data.text.labels import LABELS
from pipeline.data.text.templates import ChatTemplate
from pipeline.data.text.tokenizer import TextTokenizer, load_tokenizer

ASSETS = str(composing.PACKAGE / "assets" / "tiny-qwen2")
HI, YO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": None}}}
CHAT = """\
{%- for m in messages %}<{{ m.role }}>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endif %}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<end>
{% endfor %}{% if tools %}<tools>{{ tools | tojson }}{% endif %}"""
STRINGS = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content + '' }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name + c.function.arguments }}{% endfor %}<end>
{% endfor %}"""


def read(row: dict, messages="messages", roles=None) -> list[dict]:
    return Conversations(messages, None, roles, TemplateForms()).messages(row)


def chat_tokenizer(template: str = CHAT, **settings) -> TextTokenizer:
    library = load_tokenizer(ASSETS)._tokenizer
    return TextTokenizer(library, name="tiny", digest="0", chat=ChatTemplate(template, "tiny"), **settings)


def ai(content: object = None, **more: object) -> dict:
    return {"role": "assistant", "content": content, **more}


def calls(arguments: object, **more: object) -> dict:
    """A message that only calls a tool."""
    return {"role": "assistant", "tool_calls": [{**more, "function": {"name": "f", "arguments": arguments}}]}


T, R = {"type": "thinking", "thinking": "t"}, {"reasoning_content": "t"}
SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}
KEPT = {"content": "", "id": "a", "weight": 1, "images": []}
READ = {
    "messages": ([HI, YO], [HI, YO]),
    "JSON": (json.dumps([HI, YO]), [HI, YO]),
    "ShareGPT": ([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo", "weight": None}], [HI, YO]),
    "trajectory": (
        [{"role": "system", "system_prompt": "s", "text": None}, {"role": "ai", "text": "yo", "system_prompt": None}],
        [{"role": "system", "content": "s"}, YO],
    ),
    "spelling": ([{**HI, "role": " User"}, {**HI, "role": "Narrator"}], [HI, {**HI, "role": "Narrator"}]),
    "nulls": ([{**HI, "name": None, "meta": {"a": None, "b": [{"c": None}]}}], [{**HI, "meta": {"b": [{}]}}]),
    "parts": ([{**HI, "content": [{"type": "text", "text": "h", "image": None}, "i"]}], [HI]),
    "thinking part": ([ai([T, {"type": "text", "text": "yo"}])], [YO | R]),
    "reasoning part": ([ai([SUMMARY, {"type": "text", "text": "yo"}])], [YO | R]),
    "reasoning beside a thinking part": ([ai([T, "yo"], reasoning="r")], [{**YO, "reasoning_content": "r\n\nt"}]),
    "two reasonings": ([{**YO, "thinking": "t", "reasoning_content": "r"}], [{**YO, "reasoning_content": "r\n\nt"}]),
    "one reasoning twice": ([ai("yo", thinking="t", reasoning="t\n")], [ai("yo", thinking="t", reasoning="t\n")]),
    "content under a second key": ([{**HI, "content": "", "value": "hi", "text": "x"}], [{**HI, "text": "x"}]),
    "empty, with details": ([HI | KEPT], [HI | KEPT]),
    "arguments": ([{**calls('{"x": null}'), "content": None}], [calls({"x": None})]),
    "arguments that are no JSON": ([{**calls("{x"), "content": "c"}], [{**calls("{x"), "content": "c"}]),
    "nulls in arguments": ([ai("", tool_calls=[CALL])], [ai("", tool_calls=[CALL])]),
    "no calls": ([ai(tool_calls=[])], [ai("")]),
    "earlier function call": (
        [ai(function_call={"name": "f", "arguments": '{"x": 1}'})],
        [calls({"x": 1}, type="function")],
    ),
    "call as a message": (
        [{"from": "tool_call", "value": '{"name": "f", "arguments": {}}'}, {"from": "observation", "value": "o"}],
        [calls({}, type="function"), {"role": "tool", "content": "o"}],
    ),
    "result as an object": ([{"role": "tool", "content": {"a": 1}}], [{"role": "tool", "content": '{"a": 1}'}]),
}


@pytest.mark.parametrize(("given", "expected"), READ.values(), ids=READ)
def test_messages_of_a_column(given, expected):
    assert read({"messages": given}) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"system": None, "prompt": "hi", "response": "yo"}, [HI, YO]),
        ({"system": "", "prompt": "hi", "response": "[]"}, [HI, {"role": "assistant", "content": "[]"}]),
        ({"system": "s", "prompt": "", "response": ""}, [{"role": "system", "content": "s"}, {**YO, "content": ""}]),
        ({"system": "s", "prompt": "hi", "response": [HI, YO]}, [{"role": "system", "content": "s"}, HI, YO]),
        ({"prompt": [HI, YO, HI], "response": [HI, YO, HI, YO]}, [HI, YO, HI, YO]),
        ({"system": "s", "prompt": [HI], "response": json.dumps([YO])}, [{"role": "system", "content": "s"}, HI, YO]),
    ],
)
def test_messages_of_several_columns(row, expected):
    assert read(row, ["system", "prompt", "response"]) == expected


def test_names_of_roles_may_be_given():
    given = {"a": "hi", "b": [{"from": "Bob", "value": "yo"}]}
    assert read(given, ["a", "b"], {"bob": "assistant", "a": "user", "b": "assistant"}) == [HI, YO]
    with pytest.raises(ConfigError, match="contains a, whose role is not known. Set it, e.g. data.roles={a: user}"):
        read(given, ["a", "b"])
    with pytest.raises(ConfigError, match="data.roles is 'a', expected roles by name"):
        read(given, roles="a")
    with pytest.raises(ConfigError, match="data.roles has asistant, expected system, .*, assistant, tool"):
        read(given, roles={"a": "asistant"})


BAD = {
    "empty": ([], "the conversation is empty"),
    "null": (None, "'messages' is None, expected a list of messages"),
    "text": ("hi", "'messages' is 'hi', expected a list of messages, also as JSON"),
    "cut JSON": ('[{"role": "user"', "expected a list of messages"),
    "no object": (["hi"], "message 0 is 'hi', expected an object"),
    "no role": ([HI, {"content": "x"}], "message 1 has no role .*only content"),
    "image": ([{**HI, "content": [{"type": "image", "url": "u"}]}], "message 0 has the part .*only parts of text"),
    "another key": ([HI, {"role": "user", "message": "hello"}], "message 1 has no content, but message. Its text"),
    "refusal": ([ai(refusal="no")], "no content, but refusal"),
    "only images": ([{**HI, "content": "", "images": ["a.png"]}], "no content, but images"),
    "thinking as a number": ([ai([{"type": "thinking", "thinking": 5}])], "has the part 5"),
    "hidden thinking": ([ai([{"type": "reasoning", "data": "e"}])], "has the part"),
    "empty call": ([{"role": "tool_call", "content": ""}], "has the tool calls"),
    "number": ([{**HI, "content": 3}], "message 0 has the content 3, expected a text"),
    "call": ([{"role": "assistant", "tool_calls": ["f"]}], "message 0 has the tool calls .*expected a list of objects"),
}


@pytest.mark.parametrize(("given", "reason"), BAD.values(), ids=BAD)
def test_what_is_no_conversation_is_refused(given, reason):
    with pytest.raises(ValueError, match=reason):
        read({"messages": given})


FORMS = {
    "parts and JSON": (CHAT, TemplateForms("object", "absent", ("system", "user", "assistant", "tool"))),
    "strings": (STRINGS, TemplateForms("text", "empty")),
    "content that may lack": (STRINGS.replace("m.content + ''", "m.content"), TemplateForms("text", "absent")),
    "Python's objects": (STRINGS.replace(" + c.function", " ~ c.function"), TemplateForms("text", "empty")),
    "None in its text": ("None {'a'}" + STRINGS, TemplateForms("text", "empty")),
    "no calls": ("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", TemplateForms("object", "empty")),
    "no templates": ("{{ raise_exception('no') }}", TemplateForms()),
}


@pytest.mark.parametrize(("template", "forms"), FORMS.values(), ids=FORMS)
def test_a_template_decides_the_forms(template, forms):
    chat = ChatTemplate(template, "x")
    assert TemplateForms.of(chat) == forms
    needs_tools = ChatTemplate(f"{{% if tools %}}{{{{ tools | tojson }}}}{template}{{% endif %}}", "x")
    assert TemplateForms.of(needs_tools, has_tools=True) == forms


CONVERSATIONS = [
    [HI, {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]}, YO],
    [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}, YO, HI, YO],
    [{"role": "user", "content": "été ☃"}],
]


@pytest.fixture(params=["jsonl", "parquet"])
def files(request, tmp_path) -> dict[str, str]:
    """The conversations; in parquet, Arrow pads objects with nulls."""
    tools = ['[{"name": "f"}]', None, None]
    rows = [{"messages": m, "tools": t} for m, t in zip(CONVERSATIONS, tools, strict=True)]
    path = tmp_path / f"a.{request.param}"
    if request.param == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:  # a column has one type of content
        text = pa.string()
        part = pa.struct([("type", text), ("text", text), ("image", text)])
        arguments = pa.struct([("x", pa.int64()), ("y", pa.int64()), ("z", text)])
        call = pa.struct([("type", text), ("function", pa.struct([("name", text), ("arguments", arguments)]))])
        fields = [(name, text) for name in ("role", "reasoning_content", "name")]
        message = pa.struct([*fields, ("content", pa.list_(part)), ("tool_calls", pa.list_(call))])
        for row in rows:
            contents = [m["content"] for m in row["messages"]]
            parts = [given if isinstance(given, list) else [{"type": "text", "text": given}] for given in contents]
            row["messages"] = [{**m, "content": p} for m, p in zip(row["messages"], parts, strict=True)]
        schema = pa.schema([("messages", pa.list_(message)), ("tools", text)])
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return {"path": "json" if request.param == "jsonl" else "parquet", "data_files": str(path)}


def source(tokenizer: TextTokenizer, **settings) -> HfSource:
    return HfSource(HfData(**({"source": "hf", "messages": "messages"} | settings)), tokenizer)


TEXTS = [
    '<user>hi<end>\n<assistant><think>hm</think><call>f{"x": 1}<end>\n<assistant>yo<end>\n<tools>[{"name": "f"}]',
    "<user>onetwo<end>\n<assistant>yo<end>\n<user>hi<end>\n<assistant>yo<end>\n",
    "<user>été ☃<end>\n",
]
JOINING = CHAT.replace("{% for p in m.content %}{{ p.text }};{% endfor %}", "")


def test_rows_of_files_are_rendered(files):
    read = source(chat_tokenizer(JOINING), tools="tools", **files).read(0, 0)
    null = ', "y": null' if files["path"] == "json" else ""
    assert [document.text for document in read] == [TEXTS[0].replace(": 1", ": 1" + null), *TEXTS[1:]]
    kept = source(chat_tokenizer(), **files).read(0, 1)
    ends = ";" if files["path"] == "parquet" else ""
    assert next(kept).text == TEXTS[1].replace("onetwo", "one;two;").replace("yo", "yo" + ends).replace(
        "hi", "hi" + ends
    )


def test_tokens_have_the_labels_of_their_characters(files):
    tokenizer = chat_tokenizer(JOINING, prefix="<|endoftext|>")
    opened = source(tokenizer, tools="tools", **files)
    documents = list(opened.read(0, 0))
    streamed = text_stream(opened, tokenizer, rows_per_block=4, length=32)
    found: dict[int, list] = {}
    for block in streamed.blocks():
        assert (block.labels[block.segments == 0] == 0).all()
        for row, position in np.argwhere(block.segments):
            entry = (int(block.tokens[row, position]), block.labels[row, position].tolist())
            found.setdefault(int(block.documents[row, position]), []).append(entry)
    for number, document in enumerate(documents):
        (first, labels), *rest = found[number]
        assert (tokenizer.decode([first]), labels) == ("<|endoftext|>", [-1, 0, 0, 1, 0])
        tokens = [token for token, _ in rest]
        assert tokenizer.decode(tokens) == document.text
        end = 0
        for count, (_, labels) in enumerate(rest):
            assert labels == document.labels.at(np.array([end]))[0].tolist()
            text = tokenizer.decode(tokens[: count + 1])
            end = len(text) if "�" not in text else end  # a token may be a part of a character
    assert [document.info["n_dropped"] for document in documents] == [0, 0, 0]


SELECTED = {
    "written": "yo<end>yo<end>",
    "user text": "onetwohi",
    "assistant text last_of_message": "oo",
    "last_of_exchange": "\n\n",
    "written last_of_exchange": ">>",
    "user last_of_exchange": "\n\n",
    "thinking": "",
}


@pytest.mark.parametrize("words", SELECTED)
def test_words_select_tokens(words, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CONVERSATIONS[1]}))
    tokenizer = chat_tokenizer(JOINING)
    opened = source(tokenizer, path="json", data_files=str(tmp_path / "a.jsonl"))
    for length in (64, 4):  # in one window, and in many
        capture = CaptureConfig(positions=Positions.labels, labels=words.split(), per_row=length)
        selection = open_selection(capture, BatchConfig(length=length), tokenizer)
        [block] = text_stream(opened, tokenizer, rows_per_block=64, length=length, selection=selection).blocks()
        tokens = [
            block.tokens[row, place] for row, places in enumerate(block.selected) for place in places[places >= 0]
        ]
        assert tokenizer.decode(tokens) == SELECTED[words]
        assert block.table["n_selected"].to_pylist() == [len(tokens)]


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [({"labels": []}, "needs capture.labels"), ({"labels": ["assistent"]}, "contains 'assistent'.*written")],
)
def test_wrong_words_are_refused(settings, remedy):
    with pytest.raises(ConfigError, match=remedy):
        open_selection(CaptureConfig(positions=Positions.labels, **settings), BatchConfig(length=8), chat_tokenizer())


@pytest.mark.parametrize("more", [{"thinking": "a b c"}, {"text": "abc"}, {"thinking": "a", "reasoning": "bc"}])
def test_what_the_template_drops_is_counted_and_said_once(more, tmp_path, caplog):
    rows = [{"messages": [HI, {**YO, **more}]}] * 3
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    opened = source(chat_tokenizer(STRINGS), path="json", data_files=str(tmp_path / "a.jsonl"))
    assert [document.info["n_dropped"] for document in opened.read(0, 0)] == [3, 3, 3]
    assert sum("leaves out 3 characters" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(ConfigError, match="info_columns has n_dropped"):
        source(chat_tokenizer(), path="json", data_files=str(tmp_path / "a.jsonl"), info_columns=["n_dropped"])


def test_a_bad_conversation_is_named_or_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"messages": [HI]}, {"messages": []}, {"messages": [YO]}])))
    settings = {"path": "json", "data_files": str(path)}
    with pytest.raises(
        InputError, match=r"a.jsonl row 1: the conversation is empty. Repair or replace the file, or set"
    ):
        list(source(chat_tokenizer(), **settings).read(0, 0))
    unfollowed = chat_tokenizer("{{ '%s' % messages[0].content }}")
    remedy = r"Use another template \(model.tokenizer\), or render the text with data.text. Repair or replace"
    with pytest.raises(InputError, match=remedy):
        list(source(unfollowed, **settings).read(0, 0))
    prompts = HfSource(HfData(source="hf", messages="messages", **settings), unfollowed, are_prompts=True)
    document = next(prompts.read(0, 0))  # prompts need no labels
    assert (document.text, document.labels, document.info) == ("hi", None, {})
    found = list(source(chat_tokenizer(), **settings, on_error=OnError.skip).read(0, 0))
    assert [getattr(item, "reason", None) for item in found] == [None, "the conversation is empty", None]
    with pytest.raises(InputError, match="has no column 'talk'.*Use only these in data.messages, data.tools"):
        list(source(chat_tokenizer(), **settings | {"messages": "talk"}).read(0, 0))


def test_special_tokens_of_the_template_are_enough():
    """A tokenizer's own BOS is accepted where the template writes it, and put once."""
    from tokenizers.processors import TemplateProcessing

    library = load_tokenizer(ASSETS)._tokenizer
    library.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", library.token_to_id("<|im_start|>"))]
    )
    written = TextTokenizer(library, name="tiny", digest="0", chat=ChatTemplate("<|im_start|>" + CHAT, "tiny"))
    written.require_chat()
    [tokens] = written.encode_with_starts([written.chat().render([HI], add_generation_prompt=False)])
    assert tokens[:, 0].tolist().count(written.token_id("", "<|im_start|>")) == 1
    assert tokens[0, 1] == 0


def test_labels_are_named_in_the_identity(files):
    identity = source(chat_tokenizer(), **files).fingerprint()
    assert identity["labels"] == list(LABELS)
    assert identity["forms"]["arguments"] == "object"
    assert "text" not in identity
    assert "chat_template_sha256" in identity
