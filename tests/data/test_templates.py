# ruff: noqa: E501
"""Templates: their text depends only on their input, and their work is bounded."""

import datetime
import json

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.data.text.templates import ChatTemplate, RenderError, TextTemplate

ROW = {
    "text": " hello World\tx\n",
    "n": 3,
    "huge": 10**18,
    "l": [3, 1, 2],
    "d": {"b": 1, "a": [1.5, None]},
    "rows": [{"k": "x", "v": 1}, {"k": "y", "v": 2}, {"k": "x", "v": 3}],
    "date": datetime.datetime(2024, 2, 3, 4, 5),
    "big": "ab" * 300_000,
}

# Renders as in jinja2's sandbox.
SOUND = [
    "{{ text }}|{{ text.strip().title() }}|{{ text|trim|upper }}|{{ n ** 2 // 2 % 5 }}|{{ -n }}|{{ 7 / 2 }}",
    "{% for i in l %}{{ loop.index }}/{{ loop.length }}/{{ loop.revindex }}{{ ',' if not loop.last }}{% else %}-{% endfor %}",
    "{% for i in l if i > 1 %}{{ i }}{{ loop.first }}{{ loop.nextitem is defined }}{% endfor %}{% for i in [] %}{% else %}none{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{{ d.keys()|list }}{{ d|dictsort }}{{ d['a'][0] }}{{ d.a[1:] }}",
    "{{ l|sort|join(', ') }} {{ l|sum }} {{ l|max }} {{ l|first }} {{ l|map('string')|list }} {{ l[::-1] }} {{ l|length }}",
    "{{ rows|map(attribute='k')|unique|join }} {{ rows|groupby('k')|list }} {{ rows|selectattr('v', 'gt', 1)|list }}",
    "{{ rows|rejectattr('k', 'eq', 'x')|map(attribute='v')|sum }} {{ l|select('odd')|list }} {{ l|batch(2, 0)|list }}",
    "{{ '%05.2f|%s|%-5d' % (3.14159, text, n) }} {{ '%(a)s' % {'a': 1} }} {{ '%s-%s'|format(n, 'x') }} {{ '100%%' % () }}",
    "{{ '{:>8.3f}{!r:5}{a[b]}'.format(2.5, 'x', a=d) }} {{ '{b}'.format_map(d) }} {{ '{:{w}d}'.format(n, w=6) }}",
    "{% set ns = namespace(x='') %}{% for i in range(50) %}{% set ns.x = ns.x ~ i %}{% endfor %}{{ ns.x|length }}{{ ns.x[:9] }}",
    "{% macro f(k, s='-') %}{{ s * k }}{% if k %}{{ f(k - 1) }}{% endif %}{% endmacro %}{{ f(4) }}{{ f(1, s='+') }}",
    "{% macro box() %}[{{ caller('x') }}]{% endmacro %}{% call(y) box() %}{{ y }}{{ n }}{% endcall %}",
    "{% for r in [{'k': 1, 'c': [{'k': 2, 'c': []}]}] recursive %}{{ r.k }}({{ loop(r.c) }}){{ loop.depth }}{% endfor %}",
    "{% set z %}a{{ n }}{% endset %}{{ z ~ z }}{% filter upper %}b{{ z }}{% endfilter %}{% with q = 1 %}{{ q }}{% endwith %}",
    "{{ text|replace('o', '00') }}{{ text.replace('l', '') }}{{ text|indent(3, true) }}{{ 'x'|center(9) }}{{ 'ab'.zfill(5) }}",
    "{{ 'a b c'.split() }}{{ '-'.join(['a', 'b']) }}{{ text|wordcount }}{{ 'a b c d'|wordwrap(3) }}{{ text|truncate(6, true) }}",
    "{{ 3 in l }}{{ 'ell' in text }}{{ n > 2 and n <= 3 }}{{ l == [3, 1, 2] }}{{ n is odd }}{{ d is mapping }}{{ n is in l }}",
    "{{ nothing is defined }}{{ nothing|default('d') }}{{ d.zzz|default('e') }}{{ 2.5|round|int }}{{ 1.25|round(1, 'ceil') }}",
    "{{ date.isoformat() }} {{ date.year }} {{ date.strftime('%Y') }} {{ date }} {{ range(3) }} {{ dict(a=1).a }} {{ text|e }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{% set j = joiner(',') %}{{ j() }}x{{ j() }}y",
    "{% block b %}in {{ n }}{% endblock %}{{ self.b() }}{{ text|urlencode }}{{ '<b>'|striptags }}{{ l|slice(2)|list }}{{ '7'|int + 1 }}",
]


@pytest.mark.parametrize("source", SOUND)
def test_sound_templates_render_as_in_jinja2(source):
    reference = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(source)
    template = TextTemplate(source)
    assert template(ROW) == reference.render(ROW)
    assert template(ROW) == template(ROW)


REFUSED = {
    "{{ range(9)|random }}": "the filter 'random' is not supported: a document would differ from run to run",
    "{{ l|map('random')|list }}": "the filter 'random' is not supported",
    "{% if n > 9 %}{{ l|random }}{% endif %}": "the filter 'random' is not supported",
    "{{ lipsum() }}": "the function 'lipsum' is not supported: a document would differ",
    "{{ strftime_now('%Y') }}": "'strftime_now' is not supported: .*depend on the date. Write the date into the template",
    "{{ now() }}": "the function 'now' is not supported; there are cycler, dict",
    "{{ 1e999 }}": "a number is too large for a float",
    "{% if l %}{{ [n, -1e999]|max }}{% endif %}": "a number is too large for a float",
    "{{ d|pprint }}": "the filter 'pprint' is not supported: its text depends on the version of Python",
    "{% include 'x' %}": "{% include %} is not supported",
    "{% import 'x' as y %}": "{% import %} is not supported",
    "{% from 'x' import y %}": "{% from %} is not supported",
    "{% extends 'x' %}": "{% extends %} is not supported",
    "{% autoescape 'x'|center(10**10) %}{% endautoescape %}": "{% autoescape %} is not supported",
    "{{ 'x' * 10**10 }}": "too much work",
    "{{ text }}{{ 10**10 * 'x' }}": "too much work",
    "{% if n > 9 %}{{ 'x'|center(10**10) }}{% endif %}": "too much work",
    "{{ '%10000000000d' % 1 }}": "too much work",
    "{{ '%.1000000000f'|format(1.5) }}": "too much work",
    "{{ '{:{}}'.format(1, 10**10) }}": "too much work",
    "{{ [1] * 10**10 }}": "too much work",
    "{{ 2 ** (2 ** 99) }}": "has more than 4096 bits",
    "{{ ('f' * 100000)|int(base=16) // 3 }}": "more than 4096 bits",
    "{% for i in range(10**9) %}x{% endfor %}": "range.* is too long",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "too much work",
    "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}": "too much work",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ n }}": "too much",
    "{% macro f(k) %}{% if k %}{{ f(k-1) }}{{ f(k-1) }}{% endif %}{% endmacro %}{{ f(40) }}": "too much work",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "more than 50 deep",
    "{% block b %}{{ self.b() }}{% endblock %}": "more than 50 deep",
    "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}": "more than 50 deep",
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}": "nested too deeply",
    "{% if n %}" * 30 + "{% for i in l %}" * 30 + "{% endfor %}" * 30 + "{% endif %}" * 30: "nested too deeply",
    "\ud800": "surrogates not allowed",
    "{{ " + "9" * 5000 + " }}": "Exceeds the limit",
    "x" * 300_000: "it has 300000 characters, expected at most",
}  # fmt: skip


@pytest.mark.parametrize("source", REFUSED)
def test_unsupported_templates_are_refused_before_rendering(source):
    with pytest.raises(jinja2.TemplateError, match=REFUSED[source]):
        TextTemplate(source)


NOT_RENDERED = {
    "{{ nothing }}": "'nothing' is undefined",
    "{{ d.a[1] }}": "a value of the template is null",
    "{{ 1 / (n - 3) }}": "division by zero",
    "{{ n % 0 }}": "modulo by zero",
    "{{ n + 2.0 ** 5000 }}": "Numerical result out of range",
    "{{ text + 1 }}": "can only concatenate str",
    "{{ '%d' % text }}": "a real number is required|a number is required",
    "{{ '%(z)s' % d }}": "z",
    "{{ '{z}'.format() }}": "z",
    "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{{ n }}{% endfor %}{% endfor %}": "too much work",
    "{{ n|items|list }}": "Can only get item pairs from a mapping",
    "{{ range(huge) }}": "is too long",
    "{{ text * huge }}": "too much work",
    "{{ text.center(huge) }}": "too much work",
    "{{ text|indent(huge) }}": "too much work",
    "{{ text.expandtabs(huge) }}": "too much work",
    "{{ big|wordwrap(1, wrapstring=big) }}": "too much work",
    "{{ text.replace('', big * 9) }}": "too much work",
    "{{ big.join(range(99999)|map('string')) }}": "too much work",
    "{{ range(99999)|map('string')|join(big) }}": "too much work",
    "{{ l|batch(huge, 0)|list }}": "too much work",
    "{{ l|slice(huge)|list }}": "too much work",
    "{{ 1.5|round(n * 10**9, 'ceil') }}": "too much work",
    "{{ n ** huge }}": "more than 4096 bits",
    "{{ d|tojson(indent=huge) }}": "is too large",
    "{% for i in range(99999) %}{{ big }}{% endfor %}": "too much work",
    "{% for i in range(99999) %}{% if 'z' in big %}{% endif %}{% endfor %}": "too much work",
    "{% for i in range(99999) %}{% set x = big[1:] %}{% endfor %}": "too much work",
    "{% set ns = namespace(x=l) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}": "too much",
    "{% set ns = namespace(x=l) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}": "too",
    "{% set ns = namespace(x=l) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}": "too much work",
    "{% set ns = namespace(x=text) %}{% for i in range(99) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}": "too much",
    "{% set ns = namespace(x=text) %}{% for i in range(99) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}": "too much",
    "{% set ns = namespace(x=text) %}{% for i in range(99) %}{% set z %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = z %}{% endfor %}": "too much",
    "{{ text.upper }}": "a builtin_function_or_method has no fixed text",
    "{{ [text.upper] }}": "has no fixed text",
    "{{ text ~ l|map('string') }}": "a generator has no fixed text",
    "{{ l|map('string')|upper }}": "a generator has no fixed text",
    "{{ '%s' % cycler('a') }}": "a Cycler has no fixed text",
    "{{ '{}'.format(range) }}": "a function has no fixed text",
    "{{ (d.keys() - [])|list }}": "a set has no fixed order",
    "{{ '{:n}'.format(n) }}": "depends on the machine's locale",
    "{{ date.now() }}": "access to attribute 'now' of 'datetime' object is unsafe",
    "{{ date.timestamp() }}": "access to attribute 'timestamp'",
    "{{ n.to_bytes(9) }}": "access to attribute 'to_bytes'",
    "{{ text.__class__ }}": "access to attribute '__class__' of 'str' object is unsafe",
    "{{ l.append(1) }}": "access to attribute 'append' of 'list' object is unsafe",
}  # fmt: skip


@pytest.mark.parametrize("source", NOT_RENDERED)
def test_rows_that_a_template_cannot_render_are_refused(source):
    with pytest.raises(RenderError, match=NOT_RENDERED[source]):
        TextTemplate(source)(ROW)


def test_reasons_contain_no_memory_address():
    with pytest.raises(RenderError) as caught:
        TextTemplate("{{ l[l|map('upper')] }}")(ROW)
    assert "generator" in str(caught.value)
    assert "0x" not in str(caught.value)


def test_a_column_may_have_the_name_of_a_function():
    assert TextTemplate("{{ range }}{{ text }}")({"range": "r", "text": "t"}) == "rt"


def test_work_may_grow_with_the_input():
    text = "a b " * 1_000_000
    rendered = TextTemplate("{{ text|trim|upper|replace('B', 'CC') }}{{ text[::-1] }}")({"text": text})
    assert len(rendered) == 5_000_000 - 1 + 4_000_000


MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}
LLAMA_3 = """{%- if strftime_now is defined %}{%- set date = strftime_now("%d %b %Y") %}{%- else %}{%- set date = "26 Jul 2024" %}
{%- endif %}{{- "Today Date: " + date + "\\n" }}{{ bos_token }}{{ messages[0]['content'] | trim }}"""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (LLAMA_3, "Today Date: 26 Jul 2024\nhi"),
        ("{% if tools %}x{% endif %}{% if enable_thinking is defined and not enable_thinking %}y{% endif %}z", "z"),
        ("{{ messages|tojson(separators=(',', ':')) }}", json.dumps(MESSAGES["messages"], separators=(",", ":"))),
        ("{{ {'b': 1, 'a': '<é>'}|tojson(indent=1, sort_keys=true) }}", '{\n "a": "<é>",\n "b": 1\n}'),
        ("{{ none }}{{ messages[-1].role }}{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{% endfor %}", "Noneuser"),
    ],
)  # fmt: skip
def test_published_chat_templates_render(source, text):
    assert ChatTemplate(source)(MESSAGES) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ strftime_now('%Y') }}", "'strftime_now' is not supported: documents would depend on the date"),
        ("{% if tools %}{{ strftime_now('%Y') }}{% endif %}", "'strftime_now' is not supported"),
        ("{{ range(9)|random }}", "'random' is not supported"),
        ("{{ lipsum(n=1) }}", "'lipsum' is not supported"),
        ("{{ 'x' * 10**10 }}", "too much work"),
        (5, "it is a int, expected text"),
    ],
)
def test_unsupported_chat_templates_are_refused(source, message):
    with pytest.raises(jinja2.TemplateError, match=message):
        ChatTemplate(source)


@pytest.mark.parametrize("source", ["{{ typo }}", "{{ messages[0].name }}", "{{ 'a' ~ typo }}", "{{ typo|upper }}"])
def test_undefined_values_in_a_chat_template_are_refused(source):
    with pytest.raises(RenderError, match="is undefined|has no attribute 'name'"):
        ChatTemplate(source)(MESSAGES)
