#!/usr/bin/env python3
"""Make tests/fixtures/jinja2.json: small templates for every filter, test, method, global and syntax rule of Jinja2's documentation,
each with the text or the error that jinja2 gives in the environment in which transformers renders chat templates.

    pip install jinja2==3.1.6
    python3 tools/reference/make_jinja_table.py

`tests/text/jinja2.rs` renders the same templates. `tools/real_artefacts.py` uses the environment made here.
"""
import datetime
import json
import re
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

FIXTURE = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "jinja2.json"
# 2026-11-20 13:05:09 UTC, a Friday: what strftime_now says.
NOW = 1_795_179_909


class Generation(jinja2.ext.Extension):
    """The tag by which transformers finds the assistant's words; here it gives its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("body_of", [])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def body_of(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(form):
    return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).replace(tzinfo=None).strftime(form)


def environment():
    """The environment of transformers' `apply_chat_template`, at a fixed time."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


# What the templates of the table see, beside `messages` and the others that every chat template sees.
VARIABLES = {
    "word": "hello",
    "text": "The quick brown fox\njumps over the lazy dog",
    "html": "<b>bold & \"quoted\"</b>",
    "umlaut": "Straße ÄÖ",
    "n": 7,
    "big": 12345678901,
    "real": 3.75,
    "yes": True,
    "no": False,
    "null": None,
    "numbers": [3, 1, 2],
    "words": ["banana", "Apple", "cherry"],
    "empty": [],
    "nothing": "",
    "pairs": {"b": 2, "a": 1, "C": 3},
    "deep": {"list": [1, {"x": "y"}], "none": None, "text": "it's \"so\"\n<é>", "real": 1.0, "yes": True},
    "people": [
        {"name": "Ann", "age": 30, "tags": ["x"]},
        {"name": "bob", "age": 25, "tags": []},
        {"name": "Cid", "age": 30},
    ],
    "bos_token": "<s>",
    "eos_token": "</s>",
    "add_generation_prompt": True,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi! "},
        {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": ["é", None, True]}}}]},
        {"role": "user", "content": "Who are you? ☃"},
    ],
}

# Each line is a template. A real line break in one is written as ⏎.
FILTERS = r"""
{{ -5|abs }} {{ real|abs }} {{ -2.5|abs }}
{{ word|abs }}
{{ deep|attr('text') }}|{{ word|attr('upper') is defined }}
{% for row in numbers|batch(2) %}{{ row }};{% endfor %}
{% for row in numbers|batch(2, 'x') %}{{ row }};{% endfor %}
{{ numbers|batch(2)|list }}
{{ 'hELLO wORLD'|capitalize }}{{ umlaut|capitalize }}{{ ''|capitalize }}
[{{ word|center(11) }}][{{ word|center(12) }}][{{ word|center(3) }}]
{{ numbers|count }} {{ word|count }} {{ pairs|count }}
{{ missing|default('d') }} {{ nothing|default('d') }}| {{ nothing|default('d', true) }} {{ null|default('d') }} {{ null|d('d', true) }} {{ no|d('x', boolean=true) }}
{{ missing|default }}|{{ missing.x|default('d') }}
{{ deep.missing.x|default('d') }}
{{ deep.missing|default('d') }} {{ deep['missing']|d('e') }} {{ numbers[9]|d('f') }}
{{ pairs|dictsort }}
{{ pairs|dictsort(true) }} {{ pairs|dictsort(false, 'value') }} {{ pairs|dictsort(reverse=true) }} {{ pairs|dictsort(by='value', reverse=true) }}
{{ html|escape }} {{ html|e }} {{ html|forceescape }} {{ html|safe }}
{{ html|e|e }} {{ html|e|forceescape }} {{ (html|e) + '<' }} {{ (html|safe) ~ '<' }} {{ 'a<'|safe + 'b<' + 'c<' }} {{ '<' + 'a<'|safe }} {{ '<' ~ 'b<'|safe ~ 1 }} {{ ('<'|safe)|length }}
{{ 13|filesizeformat }} {{ 1000|filesizeformat }} {{ 1234567|filesizeformat }} {{ 1|filesizeformat }} {{ 1048576|filesizeformat(true) }}
{{ numbers|first }} {{ word|first }} {{ empty|first }}| {{ pairs|first }}
{{ empty|first is defined }} {{ empty|last is defined }}
{{ '3.5'|float }} {{ 'x'|float }} {{ 'x'|float(1.5) }} {{ 7|float }} {{ null|float }} {{ ' 2 '|float }} {{ '1e3'|float }} {{ 'inf'|float }}
{{ '%s has %d and %.2f'|format(word, n, real) }}
{{ '%(a)s %(b)05d'|format(a='x', b=42) }} {{ '%5s|%-5s|%x|%o|%e|%g|%%|%c|%r'|format('a', 'b', 255, 8, 12345.678, 0.0001, 'z', 'q') }}
{{ '%s'|format }}
{{ '%d'|format('x') }}
{{ '%s %s'|format([1, 'a'], {'k': none}) }} {{ '%+d % d %05.1f %i'|format(3, 4, 2.55, 9) }}
{% for g in people|groupby('age') %}{{ g.grouper }}:{{ g.list|length }} {% endfor %}
{% for age, list in people|groupby('age') %}{{ age }}={{ list|map(attribute='name')|join(',') }};{% endfor %}
{% for g, l in words|groupby('0') %}{{ g }}{{ l }}{% endfor %}
{% for t, l in people|groupby('city', default='NY') %}{{ t }}{{ l|length }}{% endfor %}
{{ text|indent }}|{{ text|indent(2) }}|{{ text|indent(2, true) }}|{{ text|indent('> ', first=true) }}
{{ 'a⏎⏎b⏎'|indent(2) }}|{{ 'a⏎⏎b⏎'|indent(2, blank=true) }}|{{ 'a⏎⏎b'|indent(width=3, first=true, blank=true) }}|
{{ '42'|int }} {{ 'x'|int }} {{ 'x'|int(9) }} {{ 3.99|int }} {{ '3.7'|int }} {{ '0x1f'|int(base=16) }} {{ '101'|int(0, 2) }} {{ true|int }} {{ null|int }} {{ -3.7|int }} {{ ' 8 '|int }}
{{ pairs|items|list }} {% for k, v in pairs|items %}{{ k }}{{ v }}{% endfor %} {{ missing|items|list }}
{{ numbers|items|list }}
{{ words|join }} {{ words|join(', ') }} {{ people|join('-', attribute='name') }} {{ [1, none, true, 'a']|join('|') }} {{ word|join('.') }} {{ pairs|join(',') }}
{{ numbers|join(d='+') }} {{ empty|join(', ') }}| {{ range(3)|join }} {{ people|join('-', 'age') }}
{{ numbers|last }} {{ word|last }} {{ empty|last }}| {{ pairs|last }} {{ range(4)|last }}
{{ numbers|length }} {{ word|length }} {{ pairs|length }} {{ umlaut|length }} {{ missing|length }} {{ range(5)|length }} {{ ''|length }}
{{ n|length }}
{{ null|length }}
{{ numbers|map('string')|length }}
{{ numbers|list }} {{ word|list }} {{ pairs|list }} {{ range(3)|list }} {{ (1, 2)|list }} {{ missing|list }}
{{ n|list }}
{{ null|list }}
{{ 'ÄbC'|lower }} {{ 5|lower }} {{ null|lower }} {{ true|lower }}
{{ people|map(attribute='name')|list }} {{ people|map(attribute='tags', default='-')|list }} {{ words|map('upper')|join(' ') }} {{ words|map('replace', 'a', 'o')|list }}
{{ people|map(attribute='tags.0')|list }} {{ numbers|map('string')|list }} {{ [[1, 2], [3]]|map('sum')|list }} {{ [[1, 2], [3]]|map('first')|list }} {{ [[1,2],[3,4]]|map(attribute=1)|list }}
{{ words|map('nothere')|list }}
{{ null|map('upper')|list }} {{ none|selectattr('a')|list }} {{ 0|reject('odd')|list }} {{ 5|map('upper')|list }}
{% for x in numbers|map('string') %}{{ x }}{{ loop.last }}{{ loop.length }} {% endfor %} {% for k, v in pairs|items %}{{ k }}{{ ',' if not loop.last }}{% endfor %}
{% set g = numbers|map('string') %}{{ g|list }} {{ g|list }} {% if empty|map('upper') %}true{% endif %} {{ numbers|select('odd')|first }}
{{ words|map('length')|sum }} {{ words|map('lower')|sort|join(',') }} {{ words|map('default', 'x')|list }}
{{ numbers|max }} {{ words|max }} {{ words|max(true) }} {{ people|max(attribute='age') }} {{ empty|max }}|
{{ numbers|min }} {{ words|min }} {{ words|min(case_sensitive=true) }} {{ people|min(attribute='age') }} {{ empty|min }}|
{{ deep|pprint }}
{{ numbers|pprint }} {{ word|pprint }} {{ real|pprint }} {{ null|pprint }}
{{ [5]|random }}
{{ numbers|reject('odd')|list }} {{ [0, 1, '', 'a', none]|reject|list }} {{ numbers|reject('greaterthan', 2)|list }} {{ numbers|reject('in', [1, 2])|list }}
{{ people|rejectattr('tags')|map(attribute='name')|list }} {{ people|rejectattr('age', 'equalto', 30)|list|length }} {{ people|rejectattr('tags', 'defined')|map(attribute='name')|join }}
{{ 'aaa'|replace('a', 'b') }} {{ 'aaa'|replace('a', 'b', 2) }} {{ word|replace('l', '') }} {{ 'abc'|replace('', '-') }} {{ 'aaa'|replace('a', 'b', count=1) }} {{ 121|replace('1', 'x') }}
{{ word|replace('l', 5) }}
{{ numbers|reverse|list }} {{ word|reverse }} {{ words|reverse|join(',') }} {% for x in numbers|reverse %}{{ x }}{% endfor %} {{ pairs|reverse|list }}
{{ 42.55|round }} {{ 42.55|round(1, 'floor') }} {{ 42.55|round(1) }} {{ 42.41|round(1, 'ceil') }} {{ 42|round }} {{ 2.5|round }} {{ 3.5|round }} {{ 1234|round(-2) }} {{ 42.55|round|int }} {{ 0.125|round(2) }}
{{ 1|round(1, 'up') }}
{{ numbers|select('odd')|list }} {{ [0, 1, '', 'a', none]|select|list }} {{ numbers|select('>', 1)|list }} {{ numbers|select('divisibleby', 2)|list }} {{ words|select('equalto', 'Apple')|first }} {{ [1, 'a', none]|select('string')|list }}
{{ people|selectattr('tags')|map(attribute='name')|list }} {{ people|selectattr('age', 'gt', 26)|map(attribute='name')|list }} {{ messages|selectattr('role', '==', 'user')|list|length }} {{ people|selectattr('tags', 'undefined')|map(attribute='name')|list }} {{ messages|selectattr('content', 'none')|list|length }}
{% for col in words|slice(2) %}{{ col }}{% endfor %} {{ range(7)|slice(3)|list }} {{ range(7)|slice(3, 'x')|list }}
{{ words|sort }} {{ words|sort(true) }} {{ words|sort(case_sensitive=true) }} {{ people|sort(attribute='age')|map(attribute='name')|join }} {{ people|sort(attribute='age,name', reverse=true)|map(attribute='name')|join }} {{ numbers|sort(reverse=true) }} {{ pairs|sort }} {{ 'cab'|sort }}
{{ [1, 'a']|sort }}
{{ 5|string }} {{ none|string }} {{ true|string }} {{ 1.0|string }} {{ [1, 'a']|string }} {{ {'a': none}|string }} {{ missing|string }}| {{ (1,)|string }}
{{ '<p>Some <b>bold</b>  &amp; text</p> <!-- no -->'|striptags }}
{{ numbers|sum }} {{ people|sum(attribute='age') }} {{ numbers|sum(start=10) }} {{ empty|sum }} {{ [1.5, 2]|sum }} {{ [[1], [2]]|sum(start=[]) }}
{{ words|sum }}
{{ "hello wORLD it's foo-bar (baz)"|title }} {{ 'ÉCOLE'|title }} {{ 'a1b c_d'|title }}
{{ deep|tojson }}
{{ deep|tojson(indent=2) }} {{ deep|tojson(2) }}
{{ deep|tojson(ensure_ascii=true) }} {{ '☃😀'|tojson(true) }} {{ umlaut|tojson }}
{{ pairs|tojson(separators=(',', ':')) }} {{ pairs|tojson(sort_keys=true) }} {{ numbers|tojson(indent=4, separators=(',', ': ')) }} {{ pairs|tojson(false, none, (',', ':'), true) }}
{{ [1.0, 1e20, 1e-7, 0.1, -0.0, 123456789.123, 1e16]|tojson }} {{ []|tojson }} {{ {}|tojson(indent=2) }} {{ [[], {}]|tojson(indent=1) }} {{ (1, 'a')|tojson }} {{ none|tojson }} {{ true|tojson }} {{ {1: 2, none: 3, true: 4}|tojson }}
{{ 'a"b\\c/d<é>&\'\u2028\x7f\x01\t'|tojson }} {{ deep|tojson(indent='--') }} {{ deep|tojson(indent=0) }}
{{ missing|tojson }}
{{ range(3)|tojson }}
{{ numbers|map('string')|tojson }}
{{ pairs.items()|tojson }}
{{ (pairs.items()|list)|tojson }} {{ (pairs.keys()|list)|tojson }}
[{{ '  x  '|trim }}][{{ 'xxaxx'|trim('x') }}][{{ '⏎ a⏎'|trim }}][{{ 5|trim }}] [{{ 'abcba'|trim('ab') }}]
{{ 'foo bar baz qux'|truncate(9) }}|{{ 'foo bar baz qux'|truncate(9, true) }}|{{ 'foo bar baz qux'|truncate(11) }}|{{ 'foo bar baz qux'|truncate(11, false, '...', 0) }}|{{ 'foo bar baz'|truncate(5, end='!', leeway=0) }}|
{{ ['foo', 'bar', 'foobar', 'FooBar']|unique|list }} {{ ['a', 'A']|unique(true)|list }} {{ people|unique(attribute='age')|map(attribute='name')|list }} {{ [1, 1, 2]|unique|list }}
{{ 'ß straße é'|upper }} {{ 5|upper }} {{ null|upper }}
{{ 'a b/c?d=é&'|urlencode }} {{ {'a': 1, 'b c': 'ä'}|urlencode }} {{ [['k', 'v w']]|urlencode }}
{{ 'see https://example.com/x?y=1 now'|urlize }}
{{ 'foo bar  baz'|wordcount }} {{ ''|wordcount }} {{ "it's a-b c_d"|wordcount }}
{{ text|wordwrap(10) }}|{{ 'abcdefghijkl mn'|wordwrap(5) }}|{{ 'abcdefghijkl'|wordwrap(5, false) }}|{{ 'a b c d e f'|wordwrap(3, wrapstring='/') }}
<ul{{ {'class': 'my list', 'missing': none, 'id': 'a"b'}|xmlattr }}>
{{ word|nothere }}
{{ word|upper|lower|capitalize }} {{ -3|abs }} {{ 3 + -3|abs }} {{ word|upper ~ 'x'|upper }} {{ (1 + 2)|string + '4' }} {{ 1 + 2|string|int }}
{% filter upper %}a{{ word }}{% endfilter %} {% filter replace('a', 'b')|title %}banana{% endfilter %}
"""

TESTS = r"""
{{ yes is boolean }} {{ 1 is boolean }} {{ none is boolean }}
{{ range is callable }} {{ word is callable }} {{ word.upper is callable }}
{{ word is defined }} {{ missing is defined }} {{ null is defined }} {{ deep.missing is defined }} {{ deep['list'][7] is defined }} {{ missing.x is defined }}
{{ deep.list[0].x is defined }} {{ word.x is defined }} {{ none.x is defined }} {{ n.x is not defined }}
{{ 21 is divisibleby 7 }} {{ 21 is divisibleby(2) }}
{{ 1 is eq 1 }} {{ 1 is equalto(1.0) }} {{ 'a' is == 'a' }} {{ 1 is eq '1' }} {{ none is eq none }} {{ [1] is eq [1] }}
{{ word is escaped }} {{ word|e is escaped }} {{ word|safe is escaped }}
{{ 2 is even }} {{ 2 is odd }} {{ -1 is odd }}
{{ no is false }} {{ 0 is false }} {{ yes is true }} {{ 1 is true }} {{ none is false }}
{{ 'upper' is filter }} {{ 'nothere' is filter }} {{ 'even' is test }} {{ 'nothere' is test }}
{{ 1.0 is float }} {{ 1 is float }} {{ real is float }} {{ yes is float }}
{{ 2 is ge 2 }} {{ 2 is gt 1 }} {{ 2 is greaterthan 3 }} {{ 2 is le 1 }} {{ 2 is lt 3 }} {{ 2 is lessthan 2 }} {{ 2 is ne 3 }} {{ 2 is != 3 }}
{{ 'a' is gt 1 }}
{{ 1 is in numbers }} {{ 'x' is in 'xyz' }} {{ 9 is in numbers }} {{ 'a' is in pairs }}
{{ 1 is integer }} {{ yes is integer }} {{ 1.0 is integer }} {{ '1' is integer }} {{ big is integer }}
{{ numbers is iterable }} {{ word is iterable }} {{ pairs is iterable }} {{ none is iterable }} {{ 5 is iterable }} {{ missing is iterable }} {{ range(2) is iterable }} {{ numbers|map('string') is iterable }}
{{ 'abc' is lower }} {{ 'aBc' is lower }} {{ 'ABC' is upper }} {{ '12' is lower }} {{ 'ABc' is upper }} {{ 'Ä1' is upper }}
{{ pairs is mapping }} {{ numbers is mapping }} {{ word is mapping }} {{ none is mapping }} {{ missing is mapping }} {{ namespace(a=1) is mapping }}
{{ none is none }} {{ missing is none }} {{ 0 is none }} {{ null is none }} {{ '' is not none }}
{{ 1 is number }} {{ 1.5 is number }} {{ yes is number }} {{ '1' is number }} {{ none is number }}
{{ none is sameas none }} {{ yes is sameas true }} {{ 1 is sameas true }} {{ 0 is sameas false }} {{ 'a' is sameas 'b' }}
{{ numbers is sequence }} {{ word is sequence }} {{ pairs is sequence }} {{ 5 is sequence }} {{ none is sequence }} {{ range(2) is sequence }} {{ (1, 2) is sequence }} {{ missing is sequence }}
{{ numbers[1:] is sequence }} {{ pairs.items() is sequence }} {{ numbers|map('string') is sequence }} {{ numbers|map('string')|list is sequence }} {{ numbers[::-1] is sequence }}
{{ numbers[1:] is iterable }} {{ numbers[1:] is string }} {{ (numbers + numbers) is sequence }} {{ (numbers + numbers) is mapping }}
{{ word is string }} {{ 1 is string }} {{ none is string }} {{ word|e is string }} {{ missing is string }}
{{ missing is undefined }} {{ word is undefined }} {{ none is undefined }} {{ word is not undefined }}
{{ word is nothere }}
{{ not word is defined }} {{ word is not defined or yes }} {{ 4 is divisibleby 2 and true }} {{ not 1 is odd }} {{ 2 + 2 is even }} {{ (2 + 2) is even }} {{ 1 + 3 is divisibleby 2 }}
{% if messages[1].content is string and messages[2].content is not string %}ok{% endif %} {% if 'tools' is defined %}t{% endif %}
{{ messages is sequence and messages is not string }} {{ messages[0] is mapping }} {{ messages[2].content is none }} {{ messages[2]['content'] is defined }} {{ messages[2].tool_calls is defined and messages[2].tool_calls is not none }} {{ messages[0].tool_calls is defined }}
{{ false is none }} {{ pairs.nothere is none }} {{ pairs.get('nothere') is none }} {{ tools is none }} {{ documents is none }} {{ tools is defined }}
"""

GLOBALS = r"""
{{ range(5)|list }} {{ range(2, 5)|list }} {{ range(10, 0, -3)|list }} {{ range(0)|list }} {{ range(3)[1] }} {{ range(3)[-1] }} {{ range(4) }} {{ range(2) == [0, 1] }} {{ 2 in range(3) }}
{{ range(1, 2, 3, 4) }}
{{ range('a') }}
{{ dict([('a', 1), ['b', 2]]) }} {{ dict([('a', 1)], b=3) }} {{ dict.from_keys([('k', 5)]) }} {{ dict.fromkeys(['k'], 5) }} {{ dict is callable }} {{ dict([1]) }} {{ dict(a=1, b='x') }} {{ dict() }} {{ dict({'a': 1}, b=2) }} {{ dict(a=1).a }}
{% set c = cycler('odd', 'even') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.reset() }}{{ c.next() }}
{% set j = joiner('|') %}{% for x in numbers %}{{ j() }}{{ x }}{% endfor %} {% set k = joiner() %}{{ k() }}a{{ k() }}b
{% set ns = namespace(found=false, n=0) %}{% for x in numbers %}{% set ns.n = ns.n + x %}{% if x == 1 %}{% set ns.found = true %}{% endif %}{% endfor %}{{ ns.n }}{{ ns.found }}{{ ns.missing }}|
{% set ns = namespace() %}{% set ns.list = [] %}{% set ns.list = ns.list + [1] %}{{ ns.list }} {{ ns['list'] }} {{ namespace({'a': 1}, b=2).a }}
{% set ns = namespace(a=1) %}{{ ns.a is defined }} {{ ns.b is defined }} {{ ns.b is undefined }}
{{ lipsum is defined }} {{ raise_exception is defined }} {{ nothere() }}
{{ raise_exception('no: ' ~ word) }}
{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%d %b %Y') }} {{ strftime_now('%A, %B %d, %H:%M:%S') }} {{ strftime_now('%a %y %I %p %j %U %w %W %%') }}
{{ strftime_now('%-d %-m %-H %-I %-M %-S %-j %e %k|%l') }} {{ strftime_now('%F %T %D %R %h %C %n%t %u %V %G %g %s') }}
{{ strftime_now('%c|%x|%X') }} {{ strftime_now('%Z|%z|%f') }} {{ strftime_now('%r %P %_d %_m %03d %^a %^B %#b') }}
{{ strftime_now('é %d ☃') }} {{ strftime_now('') }} {{ strftime_now('%') }} {{ strftime_now('%Q') }}
"""

STRINGS = r"""
{{ word.upper() }} {{ 'ABC'.lower() }} {{ 'aB'.swapcase() }} {{ 'hello wORLD'.capitalize() }} {{ "they're bill's x1y".title() }} {{ 'ß'.casefold() }}
{{ '  x '.strip() }}| {{ '  x '.lstrip() }}| {{ '  x '.rstrip() }}| {{ 'xxaxx'.strip('x') }} {{ 'abcab'.lstrip('ba') }} {{ 'abcab'.rstrip('ab') }} {{ ' x '.strip(none) }}
{{ 'a,b,c'.split(',') }} {{ 'a,b,c'.split(',', 1) }} {{ ' a  b '.split() }} {{ ' a b  c '.split(none, 1) }} {{ 'a,b,c'.split(',', maxsplit=1) }} {{ ''.split() }} {{ ''.split(',') }} {{ 'a b'.split(' ')[0] }} {{ 'ab'.split(sep='b') }}
{{ 'a,b,c'.rsplit(',', 1) }} {{ 'a,b,c'.rsplit(',') }} {{ ' a b  c '.rsplit(none, 1) }} {{ 'a b c'.rsplit() }} {{ 'a,b'.rsplit(',', maxsplit=1)[-1] }}
{{ 'abc'.split('') }}
{{ 'a⏎b⏎'.splitlines() }} {{ 'a\r\nb\rc\n\nd'.splitlines() }} {{ 'a\nb'.splitlines(true) }} {{ 'a\nb'.splitlines(keepends=true) }} {{ ''.splitlines() }}
{{ 'a-b-c'.partition('-') }} {{ 'a-b-c'.rpartition('-') }} {{ 'abc'.partition('-') }} {{ 'abc'.rpartition('-') }} {{ 'a-b'.partition('-')[2] }}
{{ 'hello'.startswith('he') }} {{ 'hello'.endswith('lo') }} {{ 'hello'.startswith(('x', 'h')) }} {{ 'hello'.startswith('l', 2) }} {{ 'hello'.endswith('l', 0, 4) }} {{ 'hello'.startswith('') }} {{ 'hello'.endswith(('a', 'o')) }}
{{ 'hello'.startswith(['h']) }}
{{ 'hello'.startswith(none) }}
{{ 'hello'.find('l') }} {{ 'hello'.rfind('l') }} {{ 'hello'.find('z') }} {{ 'hello'.find('l', 3) }} {{ 'hello'.find('h', 1, 4) }} {{ 'héllo'.find('l') }} {{ 'hello'.find('') }} {{ 'hello'.index('l') }} {{ 'hello'.rindex('l') }}
{{ 'hello'.index('z') }}
{{ 'banana'.count('an') }} {{ 'banana'.count('a', 2) }} {{ 'aaa'.count('aa') }} {{ 'abc'.count('') }}
{{ 'aXbX'.replace('X', '-') }} {{ 'aaa'.replace('a', 'b', 2) }} {{ 'abc'.replace('', '.') }} {{ 'aaa'.replace('a', 'b', -1) }}
{{ 'a'.replace('a', none) }}
{{ 'TestHook'.removeprefix('Test') }} {{ 'TestHook'.removesuffix('Hook') }} {{ 'x'.removeprefix('y') }} {{ 'x'.removesuffix('') }}
{{ '42'.zfill(5) }} {{ '-42'.zfill(5) }} {{ '+7'.zfill(3) }} {{ 'abc'.zfill(2) }}
[{{ 'a'.center(4) }}][{{ 'ab'.center(5, '*') }}][{{ 'a'.ljust(3) }}][{{ 'a'.rjust(3, '.') }}][{{ 'abc'.ljust(2) }}]
{{ 'a\tb'.expandtabs(4) }} {{ 'x\ty'.expandtabs() }}
{{ ', '.join(words) }} {{ ''.join(['a', 'b']) }} {{ '-'.join('abc') }} {{ ','.join(pairs) }} {{ ','.join(words|map('upper')) }} {{ ','.join(words[1:]) }}
{{ ','.join([1, 2]) }}
{{ 'abc'.isalpha() }} {{ 'ab1'.isalpha() }} {{ 'ab1'.isalnum() }} {{ '12'.isdigit() }} {{ '²'.isdigit() }} {{ '½'.isnumeric() }} {{ '½'.isdigit() }} {{ '12'.isdecimal() }} {{ '²'.isdecimal() }} {{ ''.isdigit() }} {{ '1.5'.isdigit() }}
{{ ' \n'.isspace() }} {{ ''.isspace() }} {{ 'abc'.islower() }} {{ 'ABC1'.isupper() }} {{ 'Abc Def'.istitle() }} {{ 'a_1'.isidentifier() }} {{ '1a'.isidentifier() }} {{ 'a\n'.isprintable() }} {{ 'aé'.isascii() }} {{ '1'.islower() }}
{{ 'a{}b{}'.format(1, 'x') }} {{ '{0} {1} {0}'.format('a', 'b') }} {{ '{name}!'.format(name='Bob') }} {{ '{:>5}|{:<5}|{:^5}|{:05d}|{:.2f}|{:,}|{:x}|{:%}'.format('a', 'b', 'c', 42, 3.14159, 1234567, 255, 0.25) }} {{ '{{}}{}'.format(1) }}
{{ '{0[a]} {1.x}'.format({'a': 1}, 2) }}
{{ '{} {}'.format(1) }}
{{ '{!r:>6} {:*^7} {:+d} {:e} {:g} {:b} {:o} {:#x} {:s}'.format('a', 'mid', 5, 12345.678, 0.00001, 5, 8, 255, 's') }} {{ '{}{}{}'.format(none, true, [1, 'a']) }}
{{ '{a}'.format_map({'a': 1}) }}
{{ 'abc'.encode() }}
{{ 'abc'.translate({97: 'x'}) }} {{ 'abc'.maketrans('a', 'b') }}
{{ 'abc'.nothere() }}
{{ word[0] }} {{ word[-1] }} {{ word[1:3] }} {{ word[:-1] }} {{ word[::-1] }} {{ word[::2] }} {{ word[-3:] }} {{ word[10:] }}| {{ word[3:1] }}| {{ word[4:0:-2] }} {{ umlaut[4] }} {{ word[:100] }} {{ word[-100:2] }}
{{ word[9] }}|
{{ word['upper']() }} {{ word['x'] }}| {{ word.x }}|
{{ 'a' 'b' }} {{ '''a 'b' c''' }} {{ '' 'x' '' }} {{ '''a⏎⏎b''' }} {{ 'a' ~ 'b' ~ 1 ~ none ~ true ~ 1.0 ~ [1, 'x'] ~ {'a': 1} ~ missing }} {{ 'a' + 'b' }} {{ 'ab' * 3 }} {{ 3 * 'ab' }} {{ 'a' * 0 }}| {{ 'a' * -1 }}|
{{ 'a' + 1 }}
{{ 'a' + none }}
{{ 'a' + missing }}
{{ missing + 'a' }}
{{ '%s and %s' % ('a', 1) }} {{ '%d%%' % 5 }} {{ '%.3f' % real }} {{ '%s' % word }} {{ '%(a)s' % {'a': 'x'} }} {{ '%5.1f|%-6s|%06d' % (3.14159, 'ab', 42) }} {{ '%s' % none }} {{ '%s' % [1] }}
{{ '%d' % 'x' }}
{{ '%s %s' % 'x' }}
{{ 'a' in 'abc' }} {{ 'z' in 'abc' }} {{ 'z' not in 'abc' }} {{ '' in 'abc' }} {{ 'a' < 'b' }} {{ 'B' < 'a' }} {{ 'a' == 'a' }} {{ 'abc' < 'abd' }} {{ 'a' != 1 }}
{{ 1 in 'abc1' }}
{{ none in 'abc' }}
{{ 'a' < 1 }}
{{ '\n\t\\\'"\x41\u00e9\U0001F600\101\q' }} {{ "it's \"x\"" }} {{ 'line\
end' }}
{{ 'x' if word else 'y' }} {{ 'x' if nothing }}| {{ 'x' if nothing else 'y' if no else 'z' }}
"""

LISTS = r"""
{{ numbers }} {{ words }} {{ [1, 2.0, 'a', none, true, [], {}, ()] }} {{ ["it's", 'say "hi"', 'both \' and "', 'back\\slash', 'new\nline', 'é☃', '\x00\x7f\u200b'] }}
{{ numbers[0] }} {{ numbers[-1] }} {{ numbers[1:] }} {{ numbers[:-1] }} {{ numbers[::-1] }} {{ numbers[::2] }} {{ numbers[5:] }} {{ numbers[-2:] }} {{ numbers[2:0:-1] }} {{ numbers[:] }} {{ numbers[1:][::-1] }} {{ numbers[::-1][1:] }} {{ numbers[1:][0] }} {{ numbers[1:][-1] }}
{{ numbers[:none] }} {{ numbers[none:1] }} {{ numbers[-10:10] }} {{ numbers[10:-10:-1] }} {{ numbers[1:-1] }} {{ empty[::-1] }} {{ numbers[1::-1] }} {{ numbers[-1:-3:-1] }}
{{ numbers[9] }}| {{ numbers['a'] }}| {{ numbers.x }}| {{ numbers.0 }} {{ numbers[1.0] }}|
{{ numbers[::0] }}
{{ messages[1:][::-1]|map(attribute='role')|list }} {{ messages[1:]|length }} {{ (messages[1:] + messages[:1])|length }} {{ messages[-1]['role'] }} {{ messages[::-1][0].role }} {{ messages[1:-1]|last is mapping }} {{ messages[1:]|first is mapping }}
{% for m in messages[1:] %}{{ loop.index0 }}{{ m.role }}{{ loop.last }} {% endfor %} {% for m in messages[::-1] %}{{ m.role }}{% if loop.first %}!{% endif %}{% endfor %} {% set rest = messages[1:] %}{{ rest[0].role }} {{ rest|length }} {% for m in rest[::-1] %}{{ m.role }}{% endfor %}
{{ numbers.index(2) }} {{ words.index('cherry') }} {{ numbers.count(1) }} {{ [1, 1].count(1) }} {{ numbers.copy() }} {{ (1, 2).index(2) }} {{ (1, 1).count(1) }} {{ numbers[1:].index(2) }}
{{ numbers.index(9) }}
{{ numbers.append(4) }}
{{ numbers.extend([4]) }}
{{ numbers.pop() }}
{{ numbers.insert(0, 1) }}
{{ numbers.remove(1) }}
{{ numbers.reverse() }}
{{ numbers.sort() }}
{{ numbers.clear() }}
{{ numbers.nothere() }}
{{ numbers + [4] }} {{ numbers * 2 }} {{ [0] * 3 }} {{ numbers + words }} {{ [] + [] }} {{ numbers[1:] + [9] }} {{ [1] * -1 }} {{ (1,) + (2,) }} {{ (1, 2) * 2 }}
{{ numbers + 1 }}
{{ numbers + 'a' }}
{{ numbers + none }}
{{ numbers + (1, 2) }}
{{ numbers - [1] }}
{{ 1 in numbers }} {{ 9 in numbers }} {{ 9 not in numbers }} {{ 'a' in [] }} {{ none in [none] }} {{ 1.0 in [1] }} {{ true in [1] }} {{ {'a': 1} in [{'a': 1}] }} {{ missing in numbers }} {{ 2 in numbers[1:] }} {{ '1' in numbers }}
{{ 1 in none }}
{{ 1 in 5 }}
{{ 1 in missing }} {{ 'x' not in missing }}
{{ 1 in missing.x }}
{{ [1, 2] == [1, 2] }} {{ [1] == (1,) }} {{ [1, 2] < [1, 3] }} {{ [] == false }} {{ [1] != [1.0] }} {{ numbers[1:] == [1, 2] }} {{ numbers == numbers[:] }} {{ (1, 2) == (1, 2) }}
{{ [1] < 1 }}
{{ (1, 'a', none) }} {{ (1,) }} {{ () }} {{ 1, 2 }} {{ (1, 2)[0] }} {{ (1, 2, 3)[1:] }} {{ (1, 2)|length }} {{ (1, 2) is sequence }}
{% set a, b = 1, 2 %}{{ a }}{{ b }} {% set (c, d) = [3, 4] %}{{ c }}{{ d }} {% set e = 5, 6 %}{{ e }} {% for x, y in [(1, 2), [3, 4]] %}{{ x }}-{{ y }} {% endfor %}
{% set a, b = [1, 2, 3] %}
{% set x, y = 'ab' %}{{ x }}{{ y }}
{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}
{{ [] is defined and not [] }} {{ 'x' if [] else 'y' }} {{ 'x' if [0] else 'y' }} {{ [1, 2,] }} {{ not numbers }} {{ [x for x in numbers] }}
{{ [[1, 2], [3, 4]][1][0] }} {{ [{'a': [5]}][0].a[0] }} {{ [1, 2]|length > 1 }} {{ [numbers, words]|sum(start=[])|length }} {{ numbers[n - 7] }} {{ numbers[-(1)] }}
"""

DICTS = r"""
{{ pairs }} {{ {'a': 1, 'b': [1, 'x'], 3: none, 1.5: true, none: 0} }} {{ {} }} {{ deep }}
{{ pairs.a }} {{ pairs['a'] }} {{ pairs.missing }}| {{ pairs['missing'] }}| {{ pairs.items is defined }} {{ {'items': 5}.items is callable }} {{ {'items': 5}['items'] }} {{ {'get': 1}['get'] }} {{ deep.list[1].x }} {{ pairs[word] }}|
{{ pairs.get('a') }} {{ pairs.get('z') }} {{ pairs.get('z', 5) }} {{ pairs.get('z', default) }}| {{ {'x': none}.get('x', 1) }}
{{ pairs.keys() }} {{ pairs.values() }} {{ pairs.items() }} {{ pairs.keys()|list }} {{ pairs.values()|list }} {{ pairs.items()|list }} {{ pairs.keys()|length }} {{ pairs.items()|length }}
{% for k, v in pairs.items() %}{{ k }}={{ v }}{% if not loop.last %},{% endif %}{% endfor %} {% for k in pairs %}{{ k }}{% endfor %} {% for v in pairs.values() %}{{ v }}{% endfor %} {% for k in pairs.keys()|sort %}{{ k }}{% endfor %} {% for p in pairs.items() %}{{ p }}{{ p[0] }}{% endfor %}
{{ pairs.copy() }} {{ pairs.copy() == pairs }} {{ pairs.fromkeys(['a'], 1) }}
{{ pairs.pop('a') }}
{{ pairs.update({'z': 1}) }}
{{ pairs.setdefault('a', 1) }}
{{ pairs.clear() }}
{{ pairs.popitem() }}
{{ pairs.nothere() }}
{{ pairs.missing.x }}
{{ pairs['missing']['x'] }}
{{ pairs.missing() }}
{{ 'a' in pairs }} {{ 'z' in pairs }} {{ 'z' not in pairs }} {{ 1 in pairs.values() }} {{ 'a' in pairs.keys() }} {{ none in pairs }} {{ ('a', 1) in pairs.items() }} {{ 1 in {1: 2} }} {{ 1.0 in {1: 2} }} {{ true in {1: 2} }}
{{ [] in pairs }}
{{ pairs == {'C': 3, 'a': 1, 'b': 2} }} {{ pairs != {} }} {{ {} == [] }} {{ not {} }} {{ 'x' if {} else 'y' }} {{ {'a': 1,} }} {{ {'a': 1, 'a': 2} }} {{ {1: 'a', 1.0: 'b', true: 'c'} }}
{{ pairs + {} }}
{{ pairs < {} }}
{{ pairs[0] }}| {{ {0: 'z'}[0] }} {{ {'1': 'a'}[1] }}| {{ {1: 'a'}[true] }} {{ {none: 'n'}[none] }} {{ {(1, 2): 't'}[(1, 2)] }}
{{ pairs[[]] }}|
{{ pairs[1:] }}
{{ dict(pairs, z=1) }}
{{ pairs.__class__ }}| {{ pairs._x }}| {{ ''.__class__.__mro__ }}
{{ ''.__class__ }}|
{{ pairs.items()|first }} {{ pairs.values()|sum }} {{ pairs.keys()|join(',') }} {{ pairs.items()|list|last }} {{ pairs.values()|list|sort }} {{ pairs.values()|max }} {{ (pairs.keys()|list)[0] }} {{ (pairs.items()|list)[0][1] }}
{{ pairs.items()[0] }}|
{{ messages[2].tool_calls[0].function.arguments }} {{ messages[2].tool_calls[0].function.arguments.items()|list }} {{ messages[2].tool_calls[0]['function']['name'] }} {{ messages[0].get('tool_calls', [])|length }} {{ messages[2].get('content') }} {{ messages[0] }}
{{ messages[0].content.split() }} {{ messages[0].content|length }} {{ messages[2].content|default('x') }} {{ messages[2].content or 'y' }} {{ messages[2].reasoning_content is defined }}
{{ messages[2].content + 'x' }}
{{ messages[2].content.strip() }}
{{ messages[2].content|trim }} {{ messages[2].content ~ 'x' }} {{ (messages[2].content or '')|length }}
{{ messages[2].content|length }}
{{ 'x' in messages[2].content }}
"""

NUMBERS = r"""
{{ 1 + 2 }} {{ 5 - 7 }} {{ 2 * 3 }} {{ 7 / 2 }} {{ 6 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 2 ** 0.5 }} {{ 7.5 // 2 }} {{ 7.5 % 2 }} {{ 1 + 2.0 }}
{{ -2 ** 2 }} {{ 2 ** 3 ** 2 }} {{ 1 + 2 * 3 }} {{ (1 + 2) * 3 }} {{ 10 - 3 - 2 }} {{ 2 * -3 }} {{ - - 3 }} {{ +3 }} {{ 1 - -1 }} {{ not 1 == 2 }} {{ -n }} {{ -n + 1 }} {{ n - 1 }} {{ n-1 }} {{ 8 / 2 / 2 }} {{ 2 + 3 ~ 4 }}
{{ 10 - 2 * 3 // 4 % 3 + 1 }} {{ 7 - 1.5 }} {{ -7.5 // 2 }} {{ true - 1 }} {{ 5 / 2 // 1 }} {{ 2 * 3 % 4 }} {{ 8 % 3 * 2 }} {{ 1 - -1 - 1 }} {{ 'a' ~ 1 + 2 ~ 'b' }} {{ 'a' ~ 1 * 2 }} {{ '-' * 3 ~ '>' }} {{ [1] * 2 + [3] }} {{ (1, 2) + (3,) }}
{{ 'a' - 'b' }}
{{ none - 1 }}
{{ 'a' / 2 }}
{{ 'a' // 2 }}
{{ missing - 1 }}
{{ 1.0 // 0 }}
{{ 1 / 0 }}
{{ 1 // 0 }}
{{ 1 % 0 }}
{{ 1e16 ~ '' }} {{ 0.00001 ~ '|' ~ 1.0 }} {{ 1 + 2 ~ 'a' }} {{ 1 ~ 2 * 3 }} {{ 1 - 2 + 3 }} {{ 1 + 2 - 3 ~ 4|string|int }} {{ 'a' ~ -1 }} {{ 5 - -2 + +1 }} {{ 1.5 }} {{ 1e3 }} {{ 1.5e-7 }} {{ 1e100 }} {{ 1e16 }} {{ 1e15 }} {{ 123456789012345680.0 }} {{ 0.1 + 0.2 }} {{ 1.0 }} {{ 100.0 }} {{ 1_000 }} {{ 0x1f }} {{ 0b101 }} {{ 0o17 }} {{ 0.00001 }} {{ 1/3 }} {{ -0.0 }} {{ 1E5 }} {{ 3.0e0 }}
{{ 9223372036854775807 + 1 }} {{ 2 ** 64 }} {{ big * big }} {{ -big }} {{ 10 ** 20 }}
{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 1 == 1.0 }} {{ 1 == true }} {{ 0 == false }} {{ 1 == '1' }} {{ none == false }} {{ 2 > 1 >= 1 }} {{ 1 != 1 }} {{ 3 <= 3 }} {{ 1 < 2 and 2 < 3 }} {{ 1 < 2 == true }} {{ 5 is divisibleby 5 == true }}
{{ 1 < none }}
{{ none < 1 }}
{{ missing < 1 }}
{{ 1 > missing }}
{{ missing == missing }} {{ missing == none }} {{ missing == '' }} {{ missing != 1 }} {{ missing == other }} {{ not missing }} {{ missing or 1 }} {{ missing and 1 }}| {{ 'x' if missing else 'y' }}
{{ true + 1 }} {{ true + true }} {{ yes * 3 }} {{ -true }} {{ true < 2 }} {{ true / 2 }} {{ false ~ '' }} {{ True }} {{ False }} {{ None }} {{ true and false }} {{ true or false }} {{ 1 and 2 }} {{ 0 or 'a' }} {{ '' and 1 }}| {{ not '' }} {{ none or none }}
{{ -none }}
{{ -'a' }}
{{ none + 1 }}
{{ n.bit_length() }} {{ (5).real }} {{ real.is_integer() }} {{ (4.0).is_integer() }} {{ n.numerator }}
{{ n.nothere() }}
{{ n[0] }}|
{{ none.x }}|
{{ none.x.y }}
{{ none() }}
{{ none[0] }}|
{{ none[1:] }}
{{ 5[1:] }}
{{ n() }}
{% for x in 5 %}{% endfor %}
{% for x in none %}{% endfor %}
{% for x in missing %}a{% else %}none{% endfor %}
{% for x in missing.x %}{% endfor %}
{{ missing.x }}
{{ missing['x'] }}
{{ missing() }}
{{ missing[1:] }}
{{ missing|upper }}| {{ missing|join }}| {{ missing|sort }} {{ missing|first }}| {{ missing|map('upper')|list }} {{ missing|trim }}| {{ missing|string }}| {{ missing|replace('a', 'b') }}| {{ missing|reverse|list }} {{ missing|int }} {{ missing|sum }} {{ missing|unique|list }}
{{ missing|float }}
{{ missing|abs }}
{{ missing|dictsort }}
{{ missing|round }}
{{ missing * 2 }}
{{ missing ~ 'x' }} {{ missing }}| {{ [missing] }} {{ {'a': missing} }}
"""

SYNTAX = r"""
{# comment #}a{#- b -#} c {# {{ x }} {% if %} #}d
a {%- if yes %} b {%- endif %} c {{- ' d ' -}} e {#- f -#} g
a⏎  {% if yes %}⏎b⏎  {% endif %}⏎c⏎
a⏎  {%+ if yes %}⏎b⏎  {%+ endif %}⏎c
{% if yes +%}⏎b⏎{% endif +%}⏎c
a⏎⏎{%- if yes -%}⏎⏎b⏎⏎{%- endif -%}⏎⏎c
⏎  {{ word }}⏎  {{- word -}}  ⏎ x
x {# c #}⏎y⏎  {# c #}⏎z⏎  {#- c -#}⏎w {#+ c +#}⏎v
a⏎
a⏎⏎
⏎
{{ 'a⏎' }}
  {% if yes %}x{% endif %}  {% if no %}y{% endif %}  ⏎  z
	{% if yes %}tab{% endif %}⏎	{% set x = 1 %}⏎x
text {% if yes %}⏎b{% endif %}⏎⏎c
{% raw %}{{ x }} {% if %} {# #}{% endraw %}
{% raw %}⏎a {{ x }}⏎{% endraw %}⏎b
{%- raw -%}⏎ a {{ x }} ⏎{%- endraw -%}⏎ b
  {% raw %} a  {% endraw %}  b⏎  {% endraw_ %}
 x⏎  {% raw %}⏎  a⏎  {% endraw %}⏎b
{%raw%}a{%endraw%}{%- raw %}  b{% endraw -%}  c
{%if yes%}a{%endif%}{{word}}{{-word-}}{{ word}}
{% if no %}a{% elif yes %}b{% else %}c{% endif %}{% if not yes %}a{% else %}d{% endif %}
{% if no %}a{% elif no %}b{% elif nothing %}c{% endif %}|
{% if yes and not no or no %}a{% endif %}{% if (yes) %}b{% endif %}{% if not (no or nothing) %}c{% endif %}
{% if yes %}a
{% endif %}
{% if yes %}{% endfor %}
{% nothere %}
{{ }}
{{ a b }}
{{ 'a }}
{% if yes %}a{% else if no %}b{% endif %}
{% for x in numbers %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{{ loop.changed(x) }} {% endfor %}
{% for x in numbers if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }} {% else %}none{% endfor %}
{% for x in numbers if x > 9 %}{{ x }}{% else %}none{% endfor %} {% for x in empty %}{% else %}empty{% endfor %}
{% for x in [[1, [2]], [3, []]] recursive %}{{ x[0] if x is iterable else x }}{% if x is iterable and x[1] %}({{ loop(x[1]) }}){% endif %}{% endfor %}
{% for x in [{'n': 1, 'c': [{'n': 2, 'c': []}]}] recursive %}{{ loop.depth }}{{ x.n }}{{ loop(x.c) }}{% endfor %}
{% for x in numbers %}{% for y in words %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %} {% for x in words %}{% set outer = loop %}{% for y in numbers %}{{ outer.index }}{% endfor %}{% endfor %}
{% for x in numbers %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %} {% for x in numbers %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% else %}e{% endfor %}
{% for c in word %}{{ c }}.{% endfor %} {% for i in range(3) %}{{ i }}{% endfor %} {% for x in 1, 2 %}{{ x }}{% endfor %} {% for x in (3, 4) %}{{ x }}{% endfor %} {% for a in [1, 2] + [3] %}{{ a }}{% endfor %}
{{ loop }}|
{{ loop.index }}
{% for x in numbers %}{{ loop.nothere }}|{% endfor %}
{% for x in numbers %}{% set y = x %}{% endfor %}{{ y }}| {% set y = 0 %}{% for x in numbers %}{% set y = x %}{% endfor %}{{ y }} {% if yes %}{% set z = 1 %}{% endif %}{{ z }}
{% set x = 1 %}{% for i in [1, 2] %}{{ x }}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}
{% set word = 'changed' %}{{ word }} {% for word in words %}{{ word }}{% endfor %}{{ word }}
{% set x %}a{{ word }}b{% endset %}{{ x }} {{ x is string }} {{ x|length }} {% set y | upper %}abc{% endset %}{{ y }} {% set z %}⏎  q⏎{% endset %}[{{ z }}]
{% set x = [] %}{% set x = x + ['a'] %}{{ x }} {% set d = {'a': 1} %}{{ d.a }} {% set d.a = 2 %}
{% with %}{% set x = 1 %}{{ x }}{% endwith %}{{ x }}| {% with a = 1, b = 2 %}{{ a + b }}{% endwith %} {% with a = n %}{{ a }}{% endwith %}
{% macro m(a, b=2, c='x') %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(1, c='z') }}{{ m(a=5) }}{{ m() }} {{ m is callable }} {{ m.name }} {{ m.arguments }}
{% macro m(a) %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, x=4) }}
{% macro m(a) %}x{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}x{% endmacro %}{{ m(b=2) }}
{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }} {% macro r(n) %}{{ n }}{% if n > 0 %}{{ r(n - 1) }}{% endif %}{% endmacro %}{{ r(3) }}
{% macro m() %}⏎  x⏎{% endmacro %}[{{ m() }}] {{ m()|length }} {{ m()|trim }} {{ m() + 'a' }} {{ m() is string }} {{ m().upper() }}
{% macro m(x) -%}{{ x }}{%- endmacro %}{% set y = m('q') %}{{ y }} {% if m('') == '' %}empty{% endif %} {% if m('') %}t{% else %}f{% endif %} {{ m('a') ~ m('b') }} {{ 'a' in m('xay') }} {{ m(1) == '1' }}
{% macro m() %}{{ word }}{{ caller() }}{% endmacro %}{% call m() %}inner{% endcall %} {% macro l(items) %}{% for i in items %}{{ caller(i) }}{% endfor %}{% endmacro %}{% call(x) l(numbers) %}<{{ x }}>{% endcall %}
{% macro m() %}{% if caller %}c{% else %}n{% endif %}{{ caller is defined }}{% endmacro %}{{ m() }} {% call m() %}{% endcall %}
{% set g = 1 %}{% macro m() %}{{ g }}{{ h }}{% endmacro %}{% set h = 2 %}{{ m() }} {% for i in [1] %}{{ m() }}{% endfor %}
{{ early() }}{% macro early() %}x{% endmacro %}
{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}B{% endmacro %}{{ a() }}
{% for x in [1, 2] %}{% macro inner() %}{{ x }}{% endmacro %}{{ inner() }}{% endfor %}
{% macro m(items) %}{% for i in items %}{{ loop.index }}{% if i is iterable %}{{ m(i) }}{% endif %}{% endfor %}{% endmacro %}{{ m([1, [2, 3]]) }}
{% macro m(*a) %}{% endmacro %}
{{ [m(1) for m in x] }}
{% block b %}in {{ word }}{% endblock %} {{ self.b() }}
{% block a %}x{% endblock a %}{% block c scoped %}{{ n }}{% endblock %}
{% include 'x' %}
{% include 'x' ignore missing %}ok
{% import 'x' as y %}
{% extends 'x' %}
{% autoescape true %}{{ html }}{% endautoescape %} {% autoescape false %}{{ html }}{% endautoescape %}
{% do numbers.append(1) %}
{% trans %}x{% endtrans %}
{% generation %}a{% endgeneration %}{%- generation -%} b {%- endgeneration -%} c
{%- for m in messages %}⏎    {%- if m.role == 'user' %}⏎        {{- '<u>' + m.content|trim + '</u>\n' }}⏎    {%- else %}⏎{{ m.role }}⏎    {%- endif %}⏎{%- endfor %}⏎{%- if add_generation_prompt %}⏎    {{- '<a>' }}⏎{%- endif %}⏎
{{ word if word is defined and word else 'x' }} {{ (word if no else 'y') ~ 'z' }} {{ word|upper if yes }} {{ 'a' if no else ('b' if no else 'c') }} {{ ('x' if no) is defined }}
{{ pairs.a if pairs.a is defined else 'x' }} {{ 1 if 2 > 1 and 'a' in pairs else 0 }} {{ not yes if yes else no }} {{ yes and 'a' or 'b' }}
{{ word.upper().lower()[0] }} {{ {'a': {'b': [1, 2]}}.a.b[-1] }} {{ (1, 2)[0] }} {{ 'abc'[1].upper() }} {{ [1, 2][0] + 1 }} {{ messages[0]['content'][:2] }} {{ messages[-1].content.split('?')[0].strip() }}
{{ 'a' ~ ('b' if yes else 'c') ~ 'd' }} {{ 'x' + ('y' if no else 'z') }} {{ 'a' if yes and not (no) else 'b' }} {{ 1 if no else 2 + 3 }} {{ 'a'|upper ~ 'b'|upper + 'c' }}
{{ range(3)|map('string')|join(',') }} {{ pairs|dictsort|map('first')|join }} {{ (words|sort)[0] }} {{ words|map('upper')|list|first }} {{ numbers|sort|reverse|list }} {{ word|list|length }}
{{ foo(*[1, 2]) if foo is defined }}{% macro m(a, b) %}{{ a }}{{ b }}{% endmacro %}{{ m(*[1, 2]) }} {{ m(**{'a': 3, 'b': 4}) }} {{ m(5, **{'b': 6}) }} {{ dict(**{'q': 1}) }}
{{ ''|default('x', true) }} {{ (none)|default('y', true) }} {{ tools|default([], true) }} {{ enable_thinking|default(true) }} {{ enable_thinking is defined and enable_thinking is false }} {{ tools is not none and tools|length > 0 }} {{ tools }} {{ not tools }}
{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }} {{ messages|length }} {{ messages|selectattr('role', 'equalto', 'system')|map(attribute='content')|first }} {{ messages|map(attribute='role')|list }} {{ messages|map(attribute='role')|unique|join('/') }} {{ (messages|last).role }} {{ (messages|first)['role'] }}
{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ ns.last }} {% for m in messages[::-1] %}{% set i = (messages|length - 1) - loop.index0 %}{{ i }}{% endfor %}
{% set role_map = {'user': 'U', 'system': 'S'} %}{% for m in messages %}{{ role_map[m.role] }}{{ role_map.get(m.role, '?') }}{% endfor %} {% for m in messages if m.role != 'system' %}{{ loop.index0 % 2 == 0 }}{% endfor %}
{{ a.b.c|default('x') if a is defined else 'y' }} {{ (missing or {}).x }}| {{ (missing or {}).get('x', 'd') }} {{ missing is defined and missing.x }} {{ missing.x if missing else 'n' }}
{{ 1if yes else 2 }} {{ [1,2,3]|select('odd')|list|length==2 }} {{ 'a'if yes else'b' }} {{-1}} {{- 1 }} {{ 5 -1 }} {{ {'a':1}['a'] }}{{{'a':2}.a}}
{{ "a{{b}}" }} {{ '%}' }} {{ "}}" }} {% if '%}' == '%}' %}x{% endif %} { { } } {% set x = '{%' %}{{ x }} {{ '{#' }} {{ {'a': {'b': 1}} }}
{%- set x = 1 -%}{{ x }}{% set y=2 %}{{ y }}{% set _z = 3 %}{{ _z }}{% set x1 = x == 1 %}{{ x1 }} {% set f = word.upper %}{{ f() }} {% set r = range %}{{ r(2)|list }}
{{ true is true }} {{ True is true }} {{ not true }} {{ none is none }} {{ None is none }} {{ TRUE }}| {{ null }} {{ nil }}|
"""


def parts(line):
    """The constructs of a line: each expression by itself where there is nothing but expressions, so that one's error hides no other's."""
    if "{%" in line or "{#" in line or "{{-" in line or "-}}" in line or "}}\"" in line:
        return [line]
    found = re.findall(r"\{\{.*?\}\}(?!\})", line, re.S)
    between = re.sub(r"\{\{.*?\}\}(?!\})", "", line, flags=re.S)
    return found if found and not between.strip(" |[]\n") else [line]


def table():
    sections = [("filters", FILTERS), ("tests", TESTS), ("globals", GLOBALS), ("strings", STRINGS), ("lists", LISTS),
                ("dicts", DICTS), ("numbers", NUMBERS), ("syntax", SYNTAX)]
    for name, lines in sections:
        joined = lines.strip("\n").replace("\\\nend'", "\\⏎end'")
        for line in joined.split("\n"):
            for part in parts(line.replace("⏎", "\n")):
                yield name, part


def rendered(env, template, variables):
    """The text, or the error, of one template."""
    try:
        text = env.from_string(template).render(**{"tools": None, "documents": None, **variables})
        text.encode()
        return {"text": text}
    except Exception as error:  # whatever jinja2 raises is what is asked for
        return {"error": type(error).__name__, "says": str(error)[:100]}


def main():
    env = environment()
    rows = []
    for section, template in table():
        rows.append({"section": section, "template": template, **rendered(env, template, VARIABLES)})
    document = {"made_by": f"tools/reference/make_jinja_table.py, jinja2 {jinja2.__version__}", "now": NOW,
                "variables": VARIABLES, "rows": rows}
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in document.pop("rows"))
    head = json.dumps(document, ensure_ascii=False).removesuffix("}")
    FIXTURE.write_text(f'{head}, "rows": [\n{lines}\n]}}\n')
    errors = sum("error" in row for row in rows)
    print(f"{len(rows)} templates, {errors} of them with an error; {FIXTURE}")


if __name__ == "__main__":
    main()
