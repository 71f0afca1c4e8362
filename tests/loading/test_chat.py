"""Chat templates: Transformers' own rendering as the oracle, and templates that try to get out of the sandbox."""

from __future__ import annotations

import re
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.loading.chat import ChatTemplate

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi & <b>bye</b> 'quoted'"}],
    [
        {"role": "user", "content": "Name a colour.\n"},
        {"role": "assistant", "content": "Blue"},
        {"role": "user", "content": "  🙂 another?  "},
    ],
]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "é <x>", "parameters": {"b": 1, "a": [2]}}}
]
LLAMA3 = (
    "{{- bos_token }}\n{%- if tools is not none %}\n    {{- 'Tools: ' + (tools | tojson(indent=2)) }}\n{%- endif %}\n"
    "{%- for message in messages %}\n    {%- if message.role == 'skip' %}{% continue %}{% endif %}\n"
    "    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start|>assistant<|end|>\\n\\n' }}\n{%- endif %}\n"
)
GENERATION = (
    "{% for message in messages %}\n  {% if message.role == 'assistant' %}\n    {% generation %}{{ message.content }}"
    "{{ eos_token }}{% endgeneration %}\n  {% else %}\n[{{ message.role }}] {{ message.content }}\n  {% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}{% if shout is defined %}{{ shout }}{% endif %}"
)


@pytest.fixture(scope="module")
def theirs():
    """Transformers' fast tokenizer around a vocabulary of two; only its template counts."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="</s>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("template", [LLAMA3, GENERATION, None], ids=["llama3", "generation", "smollm2"])
def test_renders_as_transformers(template, messages, add_generation_prompt, theirs, smollm2_tokenizer):
    template = template or smollm2_tokenizer.chat_template
    for extra in ({}, {"tools": TOOLS}, {"shout": "!"}):
        expected = theirs.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt, **extra
        )
        variables = {"bos_token": "<s>", "eos_token": "</s>", **extra}
        rendered = ChatTemplate(template).render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )
        assert rendered == expected


def render(template: str, messages: Any = ({"role": "user", "content": "Hi"},), **variables: Any) -> str:
    return ChatTemplate(template).render(messages, add_generation_prompt=True, variables=variables)


def test_dates_and_refusals():
    assert re.fullmatch(r"\d\d \w+ \d{4}", render("{{ strftime_now('%d %b %Y') }}"))
    with pytest.raises(RequestError, match=r"refuses these messages: Roles must alternate\."):
        render("{{ raise_exception('Roles must alternate') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ (messages | attr('append')).__self__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ raise_exception.__globals__ }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ 1 / 0 }}",
        "{{ undefined_thing.inner }}",
        "{{ 'a' + 1 }}",
    ],
)
def test_what_the_sandbox_refuses_is_a_sentence(template):
    messages = [{"role": "user", "content": "Hi"}]
    try:
        rendered = render(template, messages)
    except RequestError as error:
        assert "chat template" in str(error)  # noqa: PT017 (some of these render to nothing instead)
    else:
        assert rendered == ""
    assert messages == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("template", ["{% if %}", "{{ x", "{% for %}{% endfor %}", "{% nonsense %}"])
def test_a_broken_template_is_named(template):
    with pytest.raises(RequestError, match="is no valid Jinja template"):
        render(template)


@pytest.mark.parametrize("messages", ["Hi", [], [{"content": "x"}], ["Hi"], None, {"role": "user"}, [{"role": 1}]])
def test_messages_of_a_wrong_form_are_named(messages):
    with pytest.raises(RequestError, match="must be a"):
        render("{{ messages }}", messages)


@pytest.mark.parametrize(
    "expression",
    [
        "9**(9**6)",
        "9**(9**9)",
        "n**(n**n)",
        "10**5000 // 1",
        "'a' * 300000000",
        "300000000 * ('a' * n)",
        "[0] * 10**12",
        "(10**400) * 1.0",
        "'%c' % -1",
        "1 // 0",
        "cycler()",
    ],
)
@pytest.mark.parametrize("form", ["{{ %s }}", "{%% if messages %%}{{ %s }}{%% endif %%}"])
def test_whatever_fails_is_one_short_sentence(expression, form):
    with pytest.raises(RequestError, match=r"The model's chat template .*\.") as caught:
        render(form % expression, n=9)
    assert "\n" not in str(caught.value)


def test_a_prompt_without_end_is_refused():
    with pytest.raises(RequestError, match="its prompt is longer than 16777216 characters"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endfor %}")


def test_ordinary_products_are_no_trouble():
    assert render("{{ '-' * 3 }}{{ 2 ** 10 }}{{ 2 ** 0.5 > 1 }}{{ 3 * 2.5 }}{{ [0] * 2 }}") == "---1024True7.5[0, 0]"
