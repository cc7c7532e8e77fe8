"""Chat templates render as in transformers, and a template's text only depends on its input."""

import copy
import datetime
import re

import jinja2
import pytest

from pipeline.core.errors import ConfigError
from pipeline.data.text.templates import ChatTemplate, RenderError, TextTemplate

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CHATS = {
    "user": [{"role": "user", "content": " hi <b>é</b>\n"}],
    "system": [{"role": "system", "content": "s"}, USER],
    "turns": [USER, ASSISTANT, {"role": "user", "content": "c"}],
    "reasoning": [USER, ASSISTANT | {"reasoning_content": "r"}],
    "thinking": [ASSISTANT | {"thinking": "r"}],
    "null": [ASSISTANT | {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "part"}]}],
}
TOOL = {"type": "function", "function": {"name": "f", "description": "é & <x>", "parameters": {"b": [1, None]}}}
VARIABLES = {
    "none": {},
    "tools": {"tools": [TOOL]},
    "documents": {"documents": [{"title": "t", "text": "d"}]},
    "thinking": {"enable_thinking": False},
    "token": {"bos_token": "<other>"},
}
NAMED_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}
TEMPLATES = {
    "none is passed": "{% if tools is not none %}T{% endif %}{{ tools is defined }}{{ documents is none }}{{ tools }}",
    "undefined is empty": "[{{ nothing }}{{ messages[0].nothing }}{{ 'a' ~ nothing }}]{{ nothing is defined }}",
    "undefined has no attribute": "{{ nothing.attribute }}",
    "named tokens": "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ cls_token }}",
    "date": "{{ strftime_now('%d %B %Y') }}{{ strftime_now(format='%Y-%m-%d') }}",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ tools | tojson(separators=(',', ':')) }}",
    "json options": "{{ {'b': 'é<', 'a': none} | tojson(ensure_ascii=true, sort_keys=true, indent='-') }}",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if m.content == 'c' %}{% break %}{% endif %}{% endfor %}",
    "blocks": "{% for m in messages %}\n  {% if loop.first %}\n{{ m.content }}\n  {% endif %}\n{%- endfor %}\n x",
    "generation": "{% for m in messages %}{% generation %}{% set n = 1 %}{{ m.content }}\n{% endgeneration %}{{ n }}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.last = m.role %}{% endfor %}{{ ns.n }}{{ ns.last }}",
    "macro": "{% macro show(m, sep='|') %}{{ sep }}{{ m.role }}{{ caller() if caller }}{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% call show(m, sep='/') %}{{ m.content }}{% endcall %}{% endfor %}",
    "raise": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ 'reasoning' in m }}{% endfor %}",
    "null values": "{% for m in messages %}{{ m.content is defined }}{{ m.content }}{{ m.tool_calls }}{% endfor %}",
    "thinking": "{% set on = enable_thinking | default(true) %}{{ on }}{% if enable_thinking is defined %}D{% endif %}",
    "methods": "{{ messages[0].content.strip().split('h') }}{{ messages[-1].role.upper()[::-1] }}"
    "{{ messages[0].items() | list }}",
    "content parts": "{% for m in messages %}{% if m.content is string %}{{ m.content | trim }}{% elif m.content %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}",
    "filters": "{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'equalto', 'user') "
    "| list | length }}{{ messages | first | length }}{{ 'x' | indent(2) }}{{ [3, 1] | sort }}{{ none }}{{ true }}",
    "dictionaries": "{% set d = dict(a=1) %}{{ d.update is defined }}{{ dict(d, b=2) }}{{ dict.fromkeys(['k'], 0) }}",
    "changes a list": "{{ messages.append(1) }}",
    "private attribute": "{{ messages.__class__ }}",
    "prompt": "{{ bos_token }}{% if add_generation_prompt %}<assistant>{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_render_as_in_transformers(name):
    """Also those that fail. `strftime_now` is today's date, as without `data.date`."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **NAMED_TOKENS)
    source, num_rendered = TEMPLATES[name], 0
    for variables in VARIABLES.values():
        if not variables.keys() <= jinja2.meta.find_undeclared_variables(_environment().parse(source)):
            continue
        template = ChatTemplate(source, "words", named_tokens=NAMED_TOKENS, variables=variables)
        for chat in CHATS.values():
            for prompt in (False, True):
                given = copy.deepcopy(chat)
                try:
                    expected = reference.apply_chat_template(
                        given, chat_template=source, tokenize=False, add_generation_prompt=prompt, **variables
                    )
                except Exception:
                    with pytest.raises(RenderError, match="the chat template of tokenizer words fails"):
                        template.render(chat, add_generation_prompt=prompt)
                    continue
                assert template.render(chat, add_generation_prompt=prompt) == expected
                if name != "methods":  # prints lists
                    assert template.render_labelled(chat, add_generation_prompt=prompt).text == expected
                assert chat == given
                num_rendered += 1
    assert num_rendered or name in ("undefined has no attribute", "changes a list", "private attribute")


def _environment() -> jinja2.Environment:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template("").environment


def test_the_date_is_given_and_part_of_the_identity_where_it_is_used():
    def template(source: str, date: str) -> ChatTemplate:
        return ChatTemplate(source, "words", date=date)

    dated = "{{ strftime_now('%d %b %Y %H:%M') }}"
    assert template(dated, "2026-07-01").render([], add_generation_prompt=False) == "01 Jul 2026 00:00"
    assert template(dated, "2026-07-01").identity()["date"] == "2026-07-01"
    assert ChatTemplate(dated, "words").identity()["date"] == datetime.date.today().isoformat()
    assert template("x", "2026-07-01").identity() == template("x", "2026-07-02").identity()


@pytest.mark.parametrize("name", ["enable_thinkng", "add_generation_prompt", "messages"])
def test_variables_that_a_chat_template_does_not_read_are_refused(name):
    source = "{% if add_generation_prompt and enable_thinking %}{{ messages }}{% endif %}"
    with pytest.raises(ConfigError, match=f"data.template_kwargs has {name}, which .* It reads enable_thinking"):
        ChatTemplate(source, "words", variables={name: True}).render([], add_generation_prompt=True)


REFUSED = {
    "{{ range(9)|random }}": "No filter named 'random'",
    "{% if %}": "Expected an expression",
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}": "it cannot be compiled",
    "\ud800": "surrogates not allowed",
    "{{ " + "9" * 5000 + " }}": "Exceeds the limit",
}


@pytest.mark.parametrize("source", REFUSED)
def test_templates_that_cannot_be_compiled_are_refused(source):
    with pytest.raises(jinja2.TemplateError, match=REFUSED[source]):
        TextTemplate(source)
    with pytest.raises(ConfigError, match=f"the chat template of tokenizer words fails: .*{REFUSED[source]}"):
        ChatTemplate(source, "words").render([], add_generation_prompt=False)


ROW = {"text": "t", "n": 3, "l": [3, 1, 2], "d": {"b": 1, "a": [1.5, None]}}
NOT_RENDERED = {
    "{{ nothing }}": "'nothing' is undefined",
    "{{ d.a[1] }}": "a value of the template is null",
    "{{ 1 / (n - 3) }}": "division by zero",
    "{{ text + 1 }}": "can only concatenate str",
    "{{ lipsum() }}": "'lipsum' is undefined",
    "{{ range(10**9) }}": "Range too big",
    "{% include 'x' %}": "no loader",
    "{{ text.upper }}": "has no fixed text",
    "{{ [text.upper] }}": "has no fixed text",
    "{{ l|map('string') }}": "a generator has no fixed text",
    "{{ l[l|map('upper')] }}": "<generator object",
    "{{ (d.keys() - [])|list|length }}{{ d.keys() - [] }}": "a set has no fixed text",
    "{{ text.__class__ }}": "access to attribute '__class__' of 'str' object is unsafe",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
}


@pytest.mark.parametrize("source", NOT_RENDERED)
def test_rows_that_a_template_cannot_render_are_refused(source):
    with pytest.raises(RenderError, match=NOT_RENDERED[source]) as caught:
        TextTemplate(source)(ROW)
    assert not re.search("0x[0-9a-f]", str(caught.value))
