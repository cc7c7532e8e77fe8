"""Labels of rendered conversations, with templates that are written for these tests."""

import json
import re
from itertools import groupby
from operator import itemgetter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.text.labels import Part, Role
from pipeline.data.text.tagged import Tagged, tag_all, tags_of, tojson
from pipeline.data.text.templates import ChatTemplate, RenderError

# A word is w, its message, and its part; 9 stands for none.
CALL = {
    "id": "w42",
    "type": "function",
    "function": {"name": "w42", "arguments": {"w42": "w42 w42", "n": [1, 2.5], "b": " " * 24}},
}
CHAT = [
    {"role": "system", "content": " w00 <b>w00 w00 w00 w00\n"},
    {"role": "user", "content": "w10\nw10  w10"},
    {"role": "assistant", "content": "<think>\nw21\n</think>\n\nw20", "reasoning_content": "w21 w21"},
    {"role": "user", "content": "w30 w30"},
    {"role": "assistant", "content": "w40", "tool_calls": [CALL]},
    {"role": "tool", "name": "f", "tool_call_id": "w54", "content": 'w53 "é" {w53}'},
    {"role": "assistant", "content": ""},
]
TOOLS = [{"type": "function", "function": {"name": "w95", "parameters": {"w95": ["w95", None, True]}}}]
ROLES = [*(Role[message["role"]] for message in CHAT), Role.none, Role.none, Role.none]
PARTS = [Part.text, Part.thinking, Part.tool_call, Part.tool_result, Part.markup, Part.tool_definition]
_LOOP = "{% for m in messages %}BODY{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
# Each is the body of a loop over messages `m`, or a template if it loops itself.
CONSTRUCTIONS = {
    "sum": "{{ '<' + m.role + '>' + m.content + '</>' }}",
    "tilde": "{{ '<' ~ m.role ~ '>' ~ m['content'] ~ loop.index ~ none ~ nothing }}",
    "index": "{% for i in range(messages|length) %}{% set m = messages[i] %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "index without a name": "{% for i in range(messages|length) %}<{{ messages[i].role }}>{{ messages[i].content }}"
    "{% endfor %}",
    "slice": "{% set first = messages[0].content %}{{ first }}{% for m in messages[1:] %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}",
    "list of messages": "{% for m in messages | selectattr('role', 'ne', 'tool') | list %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(system='', all='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = ns.system + m.content %}{% else %}{% set ns.all = ns.all + '<' + m.role + '>' + m.content %}"
    "{% endif %}{% endfor %}{{ ns.system }}{{ ns.all }}",
    "macro": "{% macro show(m, end='') %}<{{ m.role }}>{{ caller() if caller else m.content }}{{ end }}{% endmacro %}"
    "{% for m in messages %}{{ show(m, end='</>') }}{% call show(m) %}{{ m.content[1:] }}{% endcall %}{% endfor %}",
    "macro with the loop": "{% macro all(messages) %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% endmacro %}{{ all(messages) }}",
    "blocks": "{% set text %}<{{ m.role }}>{{ m.content }}{% endset %}{{ text | trim }}"
    "{% filter upper %}{{ m.role }}{% endfilter %}",
    "strip": "<{{ m.role }}>{{ m.content.strip().lstrip('x').rstrip() }}{{ m.content | trim }}",
    "split": "<{{ m.role }}>{% set c = m.content %}{% if '</think>' in c %}{{ c.split('</think>')[0] }}"
    "{{ c.split('</think>')[0].split('<think>')[-1] }}{% else %}{{ c.split()[-1] }}"
    "{{ c.partition('w')[2] }}{{ c.splitlines() | join('/') }}{% endif %}",
    "replace": "<{{ m.role }}>{{ m.content.replace('\n', '\n\n') }}{{ m.content | replace(' ', '__') }}",
    "case": "<{{ m.role | upper }}{{ m.role.title() }}{{ m.role | capitalize }}>{{ m.content | lower }}"
    "{{ m.role | title }}",
    "join": "{{ [m.role, m.content] | join('>') }}{{ ', '.join([m.content, m.content]) }}{{ ''.join(m.content) }}",
    "format": "{{ '<{}>'.format('turn') }}{{ m.role }}{{ m.content }}",
    "indent": "<{{ m.role }}>{{ m.content | indent(2) }}{{ m.content | indent(width=3, first=true) }}",
    "string": "<{{ m.role | string }}>{{ m.content | string | safe }}{{ (m.content | safe) + '<b>' }}"
    "{{ '&' + (m.content | safe) }}",
    "characters": "<{{ m.role }}>{% for c in m.content %}{{ c }}{% endfor %}{{ m.content | list | join }}",
    "choice": "<{{ 'tool' if m.role == 'tool' else m.role }}>{{ m.content or 'none' }}{{ m.name | default('w') }}",
    "parts": "<{{ m.role }}>{% if m.content is string %}{{ [{'type': 'text', 'text': m.content}][0].text }}{% endif %}",
    "json": "<{{ m.role }}>{{ m.content | tojson }}{{ {'role': m.role, 'x': [m.content, 1.5, none]} | tojson }}"
    "{{ {'b': m.content, 'a': m.role, 'c': []} | tojson(indent=2, sort_keys=true, separators=(',', ' : ')) }}"
    "{{ [m.content + 'é'] | tojson(ensure_ascii=true) }}",
    "calls": "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}{{ c.id }}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% for k, v in c.function.arguments | items %}<{{ k }}={{ v }}>{{ v | string }}"
    "{% endfor %}{{ c.function.arguments.n[0] }}{{ c.function.arguments.items() | map('first') | join(',') }}"
    "{{ c.function }}{{ {'name': c.function.name, 'n': c.function.arguments} | tojson }}{% endfor %}",
    "results in the turn of the call": "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}"
    "{% for k in range(loop.index, messages|length) %}{% set r = messages[k] %}{% if m.tool_calls %}"
    "<result {{ r.tool_call_id }}>{{ r.content }}{% endif %}{% endfor %}</>{% endif %}{% endfor %}",
    "reasoning": "<{{ m.role }}>{% if m.thinking %}<r>{{ m.reasoning_content.strip('\n') }}</r>{{ m.thinking }}"
    "{% endif %}",
    "tools": "{{ tools | tojson(indent=4) }}{% for t in tools %}{{ t.function.name }}{{ t.function | tojson }}"
    "{% for k, v in t.function.parameters.items() %}{{ k }}: {{ v[0] }}{{ v | tojson }}{% endfor %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.tool_call_id }}{% endfor %}",
    "loop controls": "{% if m.role == 'tool' %}{% continue %}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% for p in m.content.split() %}{% if loop.index == 2 %}{% break %}{% endif %}{{ p }}{% endfor %}",
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_each_text_has_the_label_of_its_field(name):
    source = CONSTRUCTIONS[name]
    template = ChatTemplate(
        source if "in messages" in source or "messages|" in source else _LOOP.replace("BODY", source), "words"
    )
    for prompt in (False, True):
        labelled = template.render_labelled(CHAT, tools=TOOLS, add_generation_prompt=prompt)
        assert labelled.text == template.render(CHAT, tools=TOOLS, add_generation_prompt=prompt)
        words = list(re.finditer(r"w(\d)(\d)", labelled.text, re.IGNORECASE))
        assert words
        for word in words:
            message, role, part = int(word[1]), ROLES[int(word[1])], PARTS[int(word[2])]
            expected = [message if message < len(CHAT) else -1, message > 2, role, part, role is Role.assistant]
            labels = labelled.labels.at(np.arange(word.start(), word.end()))
            labels[labels[:, 0] < 0, 1] = 9 > 2  # the exchange of a text of no message is another test's
            assert (labels == expected).all(), word


USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
SYSTEM, THINKING = {"role": "system", "content": "be"}, ASSISTANT | {"thinking": "hm"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "ok"}
TURN = "<{{ m.role }}>{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}</s>\n\n"
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
# Template, conversation, and a line for each message: its index, exchange and role, and its text, with [part text] for
# what is no markup, and * around what the assistant wrote.
RULES = {
    "turns": (
        "{{ bos_token }}{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT,
        [USER, ASSISTANT, USER, ASSISTANT | {"content": ""}],
        """
        -1 0 none: <s>
        0 0 user: <user>[text hi]</s>~~
        1 0 assistant: <assistant>*[text yo]</s>*~~
        2 1 user: <user>[text hi]</s>~~
        3 1 assistant: <assistant>*</s>*~~
        -1 1 assistant: <assistant>
        """,
    ),
    "reasoning": (
        "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT,
        [THINKING],
        """
        0 0 assistant: <assistant>*<think>[thinking hm]</think>[text yo]</s>*~~
        -1 0 assistant: <assistant>
        """,
    ),
    "reasoning that the prompt opens": (
        "{% for m in messages %}" + TURN + "{% if loop.last and add_generation_prompt %}<assistant><think>{% endif %}"
        "{% endfor %}",
        [USER, THINKING, ASSISTANT],
        """
        0 0 user: <user>[text hi]</s>~~
        1 0 assistant: <assistant><think>*[thinking hm]</think>[text yo]</s>*~~
        2 0 assistant: <assistant>*[text yo]</s>*~~
        -1 0 assistant: <assistant><think>
        """,
    ),
    "system text within the user's turn": (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.s = m.content + '; ' %}{% else %}<{{ m.role }}>{{ ns.s if loop.index0 == 1 }}{{ m.content }}"
        "{% endif %}{% endfor %}",
        [SYSTEM, USER],
        """
        1 0 user: <user>
        0 0 system: [text be]
        1 0 user: ; [text hi]
        """,
    ),
    "outside of the loop": (
        "{{ bos_token }}<system>{{ messages[0].content }}</s>\n\n{% for m in messages[1:] %}"
        + TURN
        + "{% endfor %}end",
        [SYSTEM, USER],
        """
        -1 0 none: <s>
        0 0 system: <system>[text be]</s>~~
        1 0 user: <user>[text hi]</s>~~
        -1 0 none: end
        """,
    ),
    "default text": (
        "{{ bos_token }}Be good.{% for m in messages %}{% if loop.first %}<system>Be kind.{% endif %}"
        + TURN
        + "{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt }}",
        [ASSISTANT],
        """
        -1 0 none: <s>Be good.
        0 0 assistant: <system>Be kind.<assistant>*[text yo]</s>*~~
        -1 0 assistant: <assistant>
        """,
    ),
    "a text that is printed after the loop": (
        "{% set ns = namespace(out='start') %}{% for m in messages %}{% set ns.out = ns.out + '<' + m.role + '>' %}"
        "{% set ns.out = ns.out ~ m.content ~ '</s>' %}{% endfor %}{{ ns.out }}" + PROMPT,
        [USER, ASSISTANT],
        """
        0 0 user: start<user>[text hi]</s>
        1 0 assistant: <assistant>*[text yo]</s>*
        -1 0 assistant: <assistant>
        """,
    ),
    "a header that begins as the whole text does": (
        "{% set ns = namespace(out='start') %}{% for m in messages %}{% set ns.out = ns.out + '<' + m.role + '>' "
        "+ m.content %}{% endfor %}{{ ns.out }}" + PROMPT,
        [ASSISTANT],
        """
        0 0 assistant: start<assistant>*[text yo]*
        -1 0 assistant: <assistant>
        """,
    ),
    "two texts outside of the loop": (
        "<system>{{ messages[0].content }}{{ '</s>' }}<user>{{ messages[1].content }}</s>{% for m in messages[2:] %}"
        + TURN
        + "{% endfor %}",
        [SYSTEM, USER],
        """
        0 0 system: <system>[text be]</s>
        1 0 user: <user>[text hi]</s>
        """,
    ),
    "no prompt, a header with the role": (
        "{% for m in messages %}## {{ m.role }}:\n{{ m.content }}\n{% endfor %}",
        [USER, ASSISTANT],
        """
        0 0 user: ## user:~[text hi]~
        1 0 assistant: ## assistant:~*[text yo]*~
        """,
    ),
    "no prompt, no role": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %} {{ m.content }}</s>"
        "{% endif %}{% endfor %}",
        [USER, ASSISTANT, USER, ASSISTANT],
        """
        0 0 user: [INST][text hi][/INST]
        1 0 assistant: * [text yo]</s>*
        2 1 user: [INST][text hi][/INST]
        3 1 assistant: * [text yo]</s>*
        """,
    ),
    "generation blocks decide": (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>\n\n"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}" + PROMPT,
        [USER, ASSISTANT],
        """
        0 0 user: <user>[text hi]
        1 0 assistant: <assistant>*[text yo]</s>~~*
        -1 0 assistant: <assistant>
        """,
    ),
    "calls and results": (
        "{% set ns = namespace(name='', results=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if not ns.results %}<results>{% endif %}{% set ns.results = true %}<{{ ns.name }}>{{ m.content }}{% else %}"
        "{% if ns.results %}</results>{% else %}<{{ m.role }}>{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
        "{% set ns.name = c.function.name %}{% endfor %}</s>{% endif %}{% endfor %}{% if ns.results %}</results>"
        "{% elif add_generation_prompt %}<assistant>{% endif %}",
        [USER, CALLING, RESULT, ASSISTANT],
        """
        0 0 user: <user>[text hi]</s>
        1 0 assistant: <assistant>*<call>[tool_call f] [tool_call {}]</call></s>*
        2 0 tool: <results><f>[tool_result ok]
        3 0 assistant: </results>*[text yo]</s>*
        -1 0 none: </results>
        """,
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_markup_and_what_the_assistant_wrote_follow_the_rules(name):
    source, chat, expected = RULES[name]
    template = ChatTemplate(source, "words", named_tokens={"bos_token": "<s>"})
    labelled = template.render_labelled(chat, add_generation_prompt=True)
    assert labelled.text == template.render(chat, add_generation_prompt=True)
    assert [*_lines(labelled)] == [line.strip() for line in expected.strip().splitlines()]


def _lines(labelled):
    starts, spans = labelled.labels.starts.tolist(), []
    for start, end, row in zip(starts, [*starts[1:], None], labelled.labels.values.tolist(), strict=True):
        message, exchange, role, part, written = row
        text = labelled.text[start:end].replace("\n", "~")
        text = text if part == Part.markup else f"[{Part(part).name} {text}]"
        spans.append((f"{message} {exchange} {Role(role).name}: ", written, text))
    for head, message in groupby(spans, itemgetter(0)):
        runs = (("*" * written, "".join(span[2] for span in run)) for written, run in groupby(message, itemgetter(1)))
        yield (head + "".join(f"{star}{text}{star}" for star, text in runs)).strip()


@pytest.mark.parametrize(
    ("body", "dropped"),
    [
        ("{{ m.content }}{{ m.thinking }}{{ m.tool_calls }}{{ tools }}", 0),
        ("{{ m.content | trim }}{{ m.thinking }}{{ m.tool_calls | d([]) | tojson }}{{ tools[0].function.name }}", 0),
        ("{{ m.content }}{{ m.thinking }}{{ m.tool_calls }}", 6),
        ("{{ m.content.split('</think>')[-1] }}{{ m.thinking }}{{ m.tool_calls }}{{ tools }}", 3),
        ("{{ m.content }}{{ m.tool_calls }}{{ tools }}", 6),
        ("{{ m.content }}{{ m.thinking }}{{ tools }}", 9),
        ("{{ m.role }}", 74),
    ],
)
def test_characters_that_the_template_did_not_write_are_counted(body, dropped):
    template = ChatTemplate("{% for m in messages %}" + body + "{% endfor %}", "words")
    assert template.render_labelled(CHAT, tools=TOOLS, add_generation_prompt=False).dropped == dropped


@pytest.mark.parametrize(("reasoning", "dropped"), [("hm", 0), ("other", 5)])
def test_a_copy_of_a_reasoning_is_counted_once(reasoning, dropped):
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{{ m.thinking }}{% endfor %}", "words")
    chat = [THINKING | {"reasoning_content": reasoning}]
    assert template.render_labelled(chat, add_generation_prompt=False).dropped == dropped


REFUSED = {
    "{{ '%s' % messages[0].content }}": "the operator %",
    "{{ messages[0].content | wordwrap(3) }}": "the filter wordwrap",
    "{{ messages[0].content.translate({}) }}": "the method translate",
    "{{ messages[0].content.replace('', '-') }}": "replace with an empty text",
    "{{ strftime_now(messages[0].content) }}": "'w00 <b>w00 w00 w00 w00', which the template writes as its own",
    "w00 <b>w00 w00 w00 w00": "'w00 <b>w00 w00 w00 w00', which the template writes as its own",
    "{{ messages }}": "a list with texts of the conversation",
    "{{ 'a%s' | format(messages[0].content) }}": "the filter format",
    "{{ messages[0].content.format() }}": "format with texts of the conversation",
    "{{ '{}'.format(messages[0].content) }}": "format with texts of the conversation",
    "{{ (messages[0].content ~ 'ß').upper() }}": "a change of case that changes a text's length",
    "{{ messages[0].content ~ ('a\x0bb' | indent) }}": "an indent that changes a text's lines",
}


@pytest.mark.parametrize("source", REFUSED)
def test_what_cannot_be_followed_is_refused(source):
    template = ChatTemplate(source, "words")
    template.render(CHAT, add_generation_prompt=False)
    with pytest.raises(RenderError, match="cannot be followed through " + re.escape(REFUSED[source])):
        template.render_labelled(CHAT, add_generation_prompt=False)


OPERATIONS = [
    *(lambda s, t=t: s[t] for t in (slice(1, None), slice(None, None, -1), slice(-3, 4), slice(0, 9, 2))),
    *(lambda s, t=t: [s + t, t + s, s + s] for t in ("", "ab")),
    *(lambda s, t=t: [s.strip(t), s.lstrip(t), s.rstrip(t), s.split(t), s.split(t, 1)] for t in (None, "a", "ab")),
    *(lambda s, t=t: [s.partition(t), s.rpartition(t)] for t in ("a", "ab")),
    *(lambda s, t=t: [s.replace(t, "ab\n"), s.replace(t, "", 1), s.replace(t, "b", 0)] for t in ("a", "ba")),
    lambda s: [s.splitlines(), s.splitlines(True), list(s), list(reversed(s))],
    lambda s: [s.upper(), s.lower(), s.title(), s.capitalize(), s.swapcase()],
]
LINES = st.text(st.sampled_from("ab \n\r\x0b<A"), max_size=12)


@given(LINES)
def test_operations_keep_each_characters_tag(text):
    tagged = Tagged(text, "".join(chr(256 + index) for index in range(len(text))))
    for operation in OPERATIONS:
        for result, expected in zip(_flat(operation(tagged)), _flat(operation(text)), strict=True):
            assert type(result) is Tagged
            assert result == expected
            origin = [text[ord(tag) - 256] for tag in tags_of(result) if tag >= "\u0100"]
            own = [character for character, tag in zip(result, tags_of(result), strict=True) if tag >= "\u0100"]
            assert "".join(origin).lower() == "".join(own).lower()
            assert len(tags_of(result)) == len(result)


def _flat(value):
    return [item for part in value for item in _flat(part)] if isinstance(value, list | tuple) else [value]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=2) | st.integers(), items, max_size=3),
)


@given(JSON, st.sampled_from([None, 0, 3, "\t"]), st.booleans(), st.sampled_from([None, (",", ":")]))
def test_json_of_texts_of_different_origin_is_that_of_python(value, indent, ensure_ascii, separators):
    mixed = [value, tag_all(value, "a"), {"x": tag_all(value, "b")}, Tagged("é\n\U0001f600", "cde")]
    text = tojson(mixed, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=False)
    assert text == json.dumps(mixed, indent=indent, ensure_ascii=ensure_ascii, separators=separators)
    assert len(tags_of(text)) == len(text)
    escaped = [json.dumps(character, ensure_ascii=ensure_ascii)[1:-1] for character in "é\n\U0001f600"]
    assert [tags_of(text).count(tag) for tag in "cde"] == [len(escaped[0]) + 1, len(escaped[1]), len(escaped[2]) + 1]
