# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from moe_lora.engine.text.chat_template import MAX_PROBES
from moe_lora.engine.text.text import Tokenizer
from tests.small_tokenizers import characters

from .chat_templates import ANY, CALL, CONVERSATIONS, PARTS_ONLY, TEXT_ONLY, USER

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
ORACLE = PreTrainedTokenizerFast(tokenizer_object=characters(), **TOKENS)
VARIABLES = {"enable_thinking": False, "custom": {"a": 1}}
DOCUMENTS = [{"title": "T", "text": "x"}]


def ours(source):
    return Tokenizer(characters(), special_tokens=TOKENS, chat_template=source)


def same_as_transformers(tokenizer, source, messages, sent, variables=None, **options):
    """Whether `sent` gives what transformers makes of `messages`, or an error where transformers raises."""
    try:
        want = ORACLE.apply_chat_template(
            messages, chat_template=source, tokenize=False, **options, **(variables or {})
        )
    except Exception:
        want = None
    try:
        found = tokenizer.render_chat(sent, variables=variables, **options)
    except ValueError:
        found = None
    assert found == want
    return want is not None


def as_text(message):
    content = message.get("content")
    text = "\n".join(part["text"] for part in content) if isinstance(content, list) else content
    return {**message, "content": text}


def as_parts(message):
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )


KINDS = [(TEXT_ONLY, as_text), (PARTS_ONLY, as_parts), (ANY, dict)]
TEMPLATES = {name: (source, form) for group, form in KINDS for name, source in group.items()}
ENDLESS = "recursion"
"""Reads no message and fills the stack for each: the default run has one conversation."""
CELLS = [
    *(
        pytest.param(name, slice(number % 2, None, 2), id=name)
        for number, name in enumerate(TEMPLATES)
        if name != ENDLESS
    ),
    *(pytest.param(name, slice(None), id=f"{name}-all", marks=pytest.mark.slow) for name in TEMPLATES),
]
"""Half of the conversations; all in the slow run."""


def test_the_grid_is_large_enough():
    assert len(TEMPLATES) >= 60
    assert len(CONVERSATIONS) == 12


def test_an_endless_template_is_an_error_as_in_transformers():
    source, form = TEMPLATES[ENDLESS]
    [messages] = list(CONVERSATIONS.values())[:1]
    assert not same_as_transformers(ours(source), source, list(map(form, messages)), messages, VARIABLES)


@pytest.mark.parametrize(("name", "which"), CELLS)
def test_a_prompt_is_the_one_of_transformers(name, which):
    source, form = TEMPLATES[name]
    tokenizer = ours(source)
    for messages in list(CONVERSATIONS.values())[which]:
        converted = list(map(form, messages))
        for options in ({"add_generation_prompt": False}, {"add_generation_prompt": True}):
            same_as_transformers(tokenizer, source, converted, messages, VARIABLES, **options)


@pytest.mark.parametrize(("name", "which"), CELLS)
def test_variables_and_a_final_message_that_goes_on_are_those_of_transformers(name, which):
    source, form = TEMPLATES[name]
    variables = {"tools": [CALL], "documents": DOCUMENTS, "bos_token": "<other>"}
    tokenizer = ours(source)
    for messages in list(CONVERSATIONS.values())[which]:
        converted = list(map(form, messages))
        same_as_transformers(tokenizer, source, converted, messages, variables, add_generation_prompt=False)
        options = {"add_generation_prompt": False, "continue_final_message": True}
        same_as_transformers(tokenizer, source, converted, messages, **options)


COMBINED = {
    "loop and pieces": "{{ bos_token }}%s{{ eos_token }}",
    "trimmed": "  {%%- if true -%%}\n %s \n{%%- endif %%}\n",
    "in a macro": "{%% macro all() %%}%s{%% endmacro %%}{{ all() }}{{ all() | length }}",
    "in a generation": "{%% generation %%}%s{%% endgeneration %%}!",
    "in a filter": "{%% filter trim %%} %s {%% endfilter %%}",
    "twice": "%s--{{ messages | length }}",
}


FRAMES = [
    ("in a generation", slice(0, None, 4)),
    ("twice", slice(2, None, 4)),
    *(pytest.param(frame, slice(None), marks=pytest.mark.slow) for frame in COMBINED),
]
"""Each second construct in one of two frames; in the slow run each in each."""


@pytest.mark.parametrize(("frame", "which"), FRAMES)
def test_combinations_give_what_transformers_gives(frame, which):
    for source, form in list(TEMPLATES.values())[which]:
        combined = COMBINED[frame] % source
        tokenizer = ours(combined)
        for messages in (CONVERSATIONS["turns"], CONVERSATIONS["several_parts"]):
            same_as_transformers(
                tokenizer,
                combined,
                list(map(form, messages)),
                messages,
                VARIABLES,
                add_generation_prompt=True,
            )


def test_each_role_has_its_own_form():
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    part = [{"type": "text", "text": "s"}]
    messages = [{"role": "system", "content": part}, USER, {"role": "assistant", "content": "a"}]
    assert ours(source).render_chat(messages) == "shello therea"


def test_a_template_that_needs_a_call_before_a_tool_s_answer_is_probed_behind_one():
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% endif %}"
        "{% endfor %}"
    )
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assert ours(source).render_chat(messages) == "42"


def test_a_template_that_refuses_a_single_message_is_probed_with_more():
    source = (
        "{% if messages | length < 2 %}{{ raise_exception('two') }}{% endif %}"
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    messages = [USER, {"role": "assistant", "content": " a"}, {"role": "user", "content": " b"}]
    assert ours(source).render_chat(messages) == "hello there a b"


def test_a_chat_of_many_roles_takes_no_form_from_a_later_role_and_few_probes():
    tokenizer = ours(TEXT_ONLY["plain"])
    forms, content = tokenizer.chat_templates._get("default").forms, [{"type": "text", "text": "x"}]
    render, conversations = forms._render, []
    forms._render = lambda conversation, **more: conversations.append(1) or render(conversation, **more)
    for many in range(20):
        roles = [f"role {many} {number}" for number in range(MAX_PROBES)]
        tokenizer.render_chat([{"role": role, "content": content} for role in roles])
    assert len(conversations) < 20 * 200
    assert len(forms._fit) <= MAX_PROBES
    for role in ("developer", "critic", "user"):
        chat = [{"role": role, "content": content}]
        assert tokenizer.render_chat(chat) == tokenizer.render_chat([{"role": role, "content": "x"}])


@pytest.mark.parametrize("refusal", ["", "{{ raise_exception('role') }}"])
def test_a_chat_s_tools_are_in_few_probes_of_its_roles(refusal):
    shown = "{% if m.role == 'user' %}{{ m.content }}{% else %}REFUSAL{% endif %}"
    source = "{% for m in messages %}" + shown + "{% endfor %}"
    tokenizer = ours(source.replace("REFUSAL", refusal))
    tokenizer.chat_templates.compile()
    forms = tokenizer.chat_templates._get("default").forms
    render, with_tools = forms._render, []
    forms._render = lambda conversation, **more: (
        with_tools.append("tools" in more) or render(conversation, **more)
    )
    roles = [*(f"role {number}" for number in range(MAX_PROBES)), "developer"]
    messages = [{"role": role, "content": "x"} for role in roles]
    forms.fitted(messages, {"tools": [CALL]})
    assert with_tools.count(True) <= 10
    assert with_tools.count(False) <= 40


NO_DEVELOPER = {
    "dropped": "{% for m in messages %}{% if m.role in ('system', 'user') %}SHOWN{% endif %}{% endfor %}",
    "refused": (
        "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('role') }}{% endif %}"
        "SHOWN{% endfor %}"
    ),
}
SHOWN = {
    "text": "[{{ m.role }}]{{ m.content }}",
    "parts": "[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}",
}


@pytest.mark.parametrize("shown", SHOWN)
@pytest.mark.parametrize("kind", NO_DEVELOPER)
@pytest.mark.parametrize("content", ["Do.", [{"type": "text", "text": "Do."}]])
def test_a_template_without_developers_gets_their_messages_as_system_s(kind, shown, content):
    tokenizer = ours(NO_DEVELOPER[kind].replace("SHOWN", SHOWN[shown]))
    messages = [{"role": "developer", "content": content}, USER]
    assert tokenizer.render_chat(messages) == "[system]Do.[user]hello there"


def test_a_template_with_developers_or_without_system_messages_gets_the_role_as_it_is():
    reading = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    users = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}-{% endif %}{% endfor %}"
    )
    messages = [{"role": "developer", "content": "Do."}, USER]
    assert ours(reading).render_chat(messages) == "[developer]Do.[user]hello there"
    assert ours(users).render_chat(messages) == "-hello there"


LEADS = {
    "first_only": (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}"
        "{% endif %}{% if m.role != 'developer' %}SHOWN{% endif %}{% endfor %}"
    ),
    "drops_later": (
        "{% for m in messages %}{% if loop.first or m.role == 'user' %}{% if m.role in ('system', 'user') %}"
        "SHOWN{% endif %}{% endif %}{% endfor %}"
    ),
    "last_wins": (
        "{% set kept = namespace(text='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set kept.text = m.content %}{% endif %}{% endfor %}[system]{{ kept.text }}"
        "{% for m in messages %}{% if m.role == 'user' %}SHOWN{% endif %}{% endfor %}"
    ),
    "alternates": (
        "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
        "SHOWN{% endfor %}"
    ),
    "needs_tools": (
        "{{ raise_exception('tools') if tools is not defined }}{% for m in messages %}"
        "{% if m.role in ('system', 'user') %}SHOWN{% endif %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", LEADS)
def test_leading_messages_of_system_and_developers_are_one_system_message(name):
    tokenizer = ours(LEADS[name].replace("SHOWN", SHOWN["text"]))
    for roles in (["system", "developer"], ["developer", "developer"], ["developer", "system"]):
        lead = [{"role": role, "content": f"{number}."} for number, role in enumerate(roles)]
        found = tokenizer.render_chat([*lead, USER], variables={"tools": [CALL]})
        assert found == "[system]0.\n\n1.[user]hello there", roles
    lead = [{"role": "developer", "content": [{"type": "text", "text": "Do."}]}]
    found = tokenizer.render_chat([*lead, USER], variables={"tools": [CALL]})
    assert found == "[system]Do.[user]hello there"


def test_leading_messages_that_a_template_reads_keep_their_roles():
    lead = [{"role": role, "content": role[0]} for role in ("system", "developer")]
    found = ours("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}").render_chat(
        [*lead, USER]
    )
    assert found == "[system]s[developer]d[user]hello there"


def test_many_roles_are_not_probed_for_ever():
    tokenizer = ours(TEXT_ONLY["plain"])
    for number in range(MAX_PROBES + 10):
        content = [{"type": "text", "text": "x"}]
        tokenizer.render_chat([{"role": f"role {number}", "content": content}])
    assert len(tokenizer.chat_templates._get("default").forms._fit) == MAX_PROBES


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the request: roles must alternate"),
        ("{{ x.y.z }}", "fails: UndefinedError"),
        ("{{ 1 / 0 }}", "fails: ZeroDivisionError"),
        ("a\n{% for %}", "not valid Jinja and can't be used: line 2"),
        ("{{ ''.__class__.__mro__ }}", "fails: SecurityError"),
    ],
)
def test_errors_name_the_chat_template(source, named):
    with pytest.raises(ValueError, match=f"^the chat template (is )?{named}"):
        ours(source).render_chat([USER])


def test_a_broken_template_is_in_the_log_once_when_templates_are_compiled(caplog):
    templates = ours({"default": "a", "rag": "{% if %}"}).chat_templates
    templates.compile()
    with pytest.raises(ValueError, match="the chat template 'rag' is not valid Jinja"):
        templates.render([USER], name="rag")
    assert [record.getMessage().count("'rag' is not valid Jinja") for record in caplog.records] == [1]


def test_a_named_template_is_chosen_by_name_or_by_tools():
    both = ours({"default": "D", "tool_use": "T", "rag": "R"})
    assert both.render_chat([USER]) == "D"
    assert both.render_chat([USER], name="rag") == "R"
    assert both.render_chat([USER], variables={"tools": [CALL]}) == "T"
    with pytest.raises(ValueError, match=r"no default; choose chat_template from rag, tool_use"):
        ours({"tool_use": "T", "rag": "R"}).render_chat([USER])
    with pytest.raises(
        ValueError, match=r"must be a name of the model's chat templates \(default, rag, tool_use\)"
    ):
        both.render_chat([USER], name="other")


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tokenize", "chat_template", "self"])
def test_variables_that_transformers_keeps_for_itself_are_refused(name):
    with pytest.raises(ValueError, match=f"may not set {name}"):
        ours("x").render_chat([USER], variables={name: 1})


def test_a_final_message_does_not_go_on_beside_a_new_answer():
    with pytest.raises(ValueError, match="Leave add_generation_prompt out"):
        ours(TEXT_ONLY["plain"]).render_chat([USER], continue_final_message=True)
