# SPDX-License-Identifier: Apache-2.0
"""Chat templates of one construct each, combinations, and conversations for all of them."""

# ruff: noqa: E501
from __future__ import annotations

LOOP = "{%% for m in messages %%}[{{ m.role }}]%s\n{%% endfor %%}"
TEXT_ONLY = {
    "plain": LOOP % "{{ m.content }}",
    "subscript": LOOP % "{{ m['content'] }}",
    "trim": LOOP % "{{ m.content | trim }}",
    "upper": LOOP % "{{ m.content | upper }}",
    "concatenation": LOOP % "{{ '<' + m.content + '>' }}",
    "tilde": LOOP % "{{ '<' ~ m.content ~ '>' }}",
    "strip_method": LOOP % "{{ m.content.strip() }}",
    "split_method": LOOP % "{{ m.content.split('e')[-1] }}",
    "in_test": LOOP % "{% if 'hello' in m.content %}greets {% endif %}{{ m.content }}",
    "escaped": LOOP % "{{ m.content | e }}",
    "join_filter": LOOP % "{{ m.content | join('') }}",
    "format_filter": LOOP % "{{ '%s!' | format(m.content) }}",
    "string_filter": LOOP % "{{ m.content | string }}",
    "replace": LOOP % "{{ m.content | replace('e', '3') }}",
    "default_filter": LOOP % "{{ m.content | default('nothing', true) }}",
    "whitespace_control": "{%- for m in messages -%}\n  [{{- m.role -}}]  {{- m.content -}}\n{%- endfor -%}\n",
    "lstrip_blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\n    U: {{ m.content }}\n    {% endif %}\n"
    "    {# a comment #}\n{% endfor %}\n",
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "generation_block": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "generation_trimmed": "{%- for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration -%}{% endfor %}",
    "alternating": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}",
    "no_system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    + LOOP % "{{ m.content }}",
    "system_first": "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set s = 'You help.' %}{% set rest = messages %}{% endif %}<<{{ s }}>>{% for m in rest %}"
    "{{ m.role }}: {{ m.content }}{% if not loop.last %}|{% endif %}{% endfor %}",
    "macro": "{% macro turn(m, mark='#') %}{{ mark }}{{ m.role }}={{ m.content }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{{ turn(m, mark='+') }}{% endfor %}",
    "call_block": "{% macro box() %}[{{ caller() }}]{% endmacro %}{% for m in messages %}"
    "{% call box() %}{{ m.content }}{% endcall %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.last = m.content %}{% endfor %}{{ ns.n }} {{ ns.last }}",
    "break": "{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "continue": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "reverse": "{% for m in messages[::-1] %}{{ m.content }};{% endfor %}",
    "loop_filter": "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }} {{ m.content }}"
    "{% else %}no user{% endfor %}",
    "loop_neighbours": "{% for m in messages %}{{ loop.previtem.role }}>{{ m.content }}>{{ loop.nextitem.role }} {% endfor %}",
    "cycle": "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ m.content }}{% endfor %}",
    "set_block": "{% set all %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ all | length }}{{ all }}",
    "filter_block": "{% filter upper %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfilter %}",
    "truncated": LOOP % "{{ m.content[:4] }}",
    "thinking_cut": LOOP % "{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}",
    "special_tokens": "{{ bos_token }}"
    + LOOP % "{{ m.content }}{{ eos_token }}{{ pad_token }}{{ sep_token }}",
    "kwargs": LOOP
    % "{{ m.content }}"
    + "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% endif %}{{ custom.a | default('-') }}",
    "legacy_dict_filter": "{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ m.content }}{% endfor %}",
    "map_contents": "{{ messages | map(attribute='content') | join(' / ') }}",
}
PARTS_ONLY = {
    "parts": LOOP % "{% for p in m.content %}{{ p.text }}{% endfor %}",
    "parts_by_type": LOOP
    % "{% for p in m.content %}{% if p['type'] == 'text' %}{{ p['text'] }}{% elif p['type'] == 'image' %}"
    "<image>{% endif %}{% endfor %}",
    "first_part": LOOP % "{{ m.content[0].text }}",
    "first_part_subscript": LOOP % "{{ m['content'][0]['text'] | trim }}",
    "mapped_parts": LOOP % "{{ m.content | map(attribute='text') | join('') }}",
    "selected_parts": LOOP
    % "{% for p in m.content | selectattr('type', 'equalto', 'text') %}({{ p.text }}){% endfor %}",
    "strict_parts": LOOP % "{% for p in m.content %}{{ p['text'] + '~' }}{% endfor %}",
    "parts_in_a_macro": "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
    + LOOP % "{{ show(m.content) }}",
    "numbered_parts": LOOP % "{% for p in m.content %}{{ loop.index }}:{{ p.text }} {% endfor %}",
}
ANY = {
    "string_or_parts": LOOP
    % "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}"
    "{% endfor %}{% endif %}",
    "iterable_or_string": LOOP
    % "{% if m.content is iterable and m.content is not string %}{% for p in m.content %}"
    "<{{ p.text }}>{% endfor %}{% else %}{{ m.content }}{% endif %}",
    "mapping_parts": LOOP
    % "{% for p in m.content %}{% if p is mapping %}{{ p.text }}{% else %}{{ p }}{% endif %}{% endfor %}",
    "tojson": "{{ messages | tojson }}",
    "tojson_content": LOOP % "{{ m.content | tojson }}",
    "tojson_indent": "{{ messages | tojson(indent=2) }}",
    "tojson_sorted": "{{ messages | tojson(sort_keys=true) }}",
    "tojson_separators": "{{ messages | tojson(separators=(',', ':')) }}",
    "tojson_ascii": "{{ messages | tojson(ensure_ascii=true) }}",
    "tojson_positional": "{{ messages | tojson(true, 1) }}",
    "roles_only": "{% for m in messages %}{{ m.role }},{% endfor %}{{ add_generation_prompt }}",
    "constant": "{{ bos_token }}Hello",
    "empty": "",
    "tools_and_documents": "{{ tools is none }}{{ documents is none }}{{ tools is defined }}{% if not tools %}-{% endif %}"
    "{% for d in documents or [] %}{{ d }}{% endfor %}{{ undefined_name is defined }}",
    "tool_calls": "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</call>{% endfor %}{% elif m.role == 'tool' %}<r id={{ m.tool_call_id }}>"
    "{{ m.content | tojson }}</r>{% else %}{{ m.content | tojson }}{% endif %}{% endfor %}",
    "content_defined": LOOP
    % "{{ m.content is defined }}{{ m.content is none }}{{ 'content' in m }}{{ m.get('content') is none }}",
    "keys": LOOP % "{% for k, v in m.items() %}{{ k }}={{ v | tojson }} {% endfor %}",
    "sorted_keys": LOOP % "{% for k in m | dictsort %}{{ k[0] }} {% endfor %}",
    "extra_fields": LOOP
    % "{{ m.name | default('') }}{{ m.weather.sky | default('?') }}{{ m.reasoning_content | default('') }}"
    "{{ m.thinking | default('') }}",
    "numbers": "{{ 1 / 3 }} {{ 7 // 2 }} {{ 2 ** 0.5 }} {{ 1e20 }} {{ 3.0 }} {{ true }} {{ none }} {{ 10 | round(2) }}"
    "{{ '%05.2f' | format(3.14159) }} {{ 1000000 | filesizeformat }}",
    "date": "{{ strftime_now('%Y') }}{% if strftime_now is defined %} known{% endif %}",
    "range": "{% for i in range(5) %}{{ i }}{% endfor %}",
    "range_too_long": "{{ range(1000000) | length }}",
    "dict_global": "{% set d = dict(a=1, b=2) %}{{ d | tojson }}{{ dict.fromkeys(['x', 'y'], 0) | tojson }}",
    "joiner_and_cycler": "{% set j = joiner(', ') %}{% set c = cycler('x', 'y') %}{% for m in messages %}{{ j() }}{{ c.next() }}"
    "{% endfor %}",
    "division_by_zero": "{{ 1 / 0 }}",
    "index_missing": "{{ messages[99].role }}",
    "attribute_of_undefined": "{{ messages[99].role.name }}",
    "append": "{% set l = [] %}{{ l.append(1) }}{{ l }}",
    "update": "{% for m in messages %}{{ m.update({'role': 'x'}) }}{% endfor %}",
    "dunder": "{{ ''.__class__.__mro__ }}",
    "namespace_dunder": "{% set ns = namespace() %}{% set ns.__init__ = 1 %}{{ ns }}",
    "include": "{% include 'other' %}",
    "import": "{% import 'other' as o %}",
    "do": "{% do messages.append(1) %}",
    "raise": "{{ raise_exception('never') }}",
    "raise_number": "{{ raise_exception(7) }}",
    "unknown_filter": "{{ messages | no_such_filter }}",
    "unknown_test": "{{ messages is no_such_test }}",
    "syntax_error": "{% for m in messages %}{{ m.content }",
    "unclosed_generation": "{% generation %}{{ messages[0].role }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "unicode": "日本語 ✓ {{ '\\u00e9' }}{{ messages[0].role }}",
    "line_ends": "a\r\nb\r{{ messages[0].role }}\r\n",
    "last_newline": "{{ messages[0].role }}\n\n",
    "raw": "{% raw %}{{ messages }}{% endraw %}{{ messages | length }}",
    "groupby": "{% for role, group in messages | groupby('role') %}{{ role }}:{{ group | length }} {% endfor %}",
    "batch_and_slice": "{% for b in messages | batch(2) %}{{ b | length }},{% endfor %}",
    "inline_if": "{{ 'gen' if add_generation_prompt }}{{ 'not' if not add_generation_prompt else '' }}",
    "tests": "{{ messages is sequence }}{{ messages is iterable }}{{ 1 is odd }}{{ 'a' is lower }}{{ messages is sameas(none) }}",
    "self_and_blocks": "{% block head %}<{{ messages | length }}>{% endblock %}{{ self.head() }}",
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": {"b": 1, "a": "é", "c": [1.5, None]}},
}
USER = {"role": "user", "content": "hello there"}
CONVERSATIONS = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be kind."}, USER],
    "turns": [USER, {"role": "assistant", "content": "hi"}, {"role": "user", "content": " bye \n"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "several_parts": [
        {"role": "system", "content": [{"type": "text", "text": "S"}]},
        {"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]},
    ],
    "mixed": [USER, {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}, USER],
    "tool_calls": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": '{"x": 1}'},
    ],
    "extra": [
        {"role": "user", "content": "hello", "name": "Eva", "weather": {"sky": "blue", "a": [1, True]}}
    ],
    "unicode": [{"role": "user", "content": "日本 <b>&'\"</b> 🙂\t\\ \u2028"}],
    "no_content": [USER, {"role": "assistant", "reasoning": "hm"}, {"role": "assistant", "content": ""}],
    "other_roles": [{"role": "developer", "content": "Do."}, {"role": "critic", "content": "hello"}, USER],
    "thinking": [
        USER,
        {"role": "assistant", "content": "<think>a</think>\n\nb", "reasoning_content": "r"},
        USER,
    ],
}
