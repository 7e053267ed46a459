"""Chat templates with tools in the style of the published ones, and what each writes, turn by turn, in plain Python.

A template of FAMILIES has an oracle beside it: from messages and tools to Parts, the texts in order, each with the
number of the assistant's turn that it is of, if it is the assistant's own. An oracle raises Refused where the template
is to raise an error or leaves something out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

Message = dict[str, Any]
Parts = list[tuple[str, int | None]]

SPECIAL = (
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "</s>"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
)
"""Special tokens beside those of chat_tokenizers.SPECIAL."""


class Refused(Exception):
    """The template refuses the chat, under this counter; a ValueError ends the run instead."""


class Family(NamedTuple):
    """A template, and what it writes."""

    template: str
    oracle: Callable[[list[Message], list[Any] | None], Parts]


def dumped(value):
    """Return the JSON that templates write."""
    return json.dumps(value, ensure_ascii=False)


def encoded(tokenizer, parts, turns):
    """Return ids and mask, each part tokenized alone; the first token of a text is a part of it, also in the middle.

    turns: those that carry loss.
    """
    ids = []
    mask = []
    backend = tokenizer._backend  # the library's own ids of one text
    for text, turn in parts:
        own = backend.encoded([text])[0][0]
        ids += own
        mask += [int(turn in turns)] * len(own)
    return ids, mask


def with_loss(messages, loss_on):
    """Return the turns that carry loss."""
    words = [n for n, each in enumerate(messages) if each["role"] == "assistant" and not each.get("tool_calls")]
    calls = [n for n, each in enumerate(messages) if each["role"] == "assistant" and each.get("tool_calls")]
    return {
        "assistant": words,
        "tool_calls": calls,
        "assistant,tool_calls": words + calls,
        "last": [max(words + calls)] if words + calls else [],
    }[loss_on]


# --- Qwen 2.5: headers, several calls in a turn, results of one step together in a user's turn ---

QWEN = """
{%- set marked = namespace(first=messages[0].role == 'system') %}
{{- '<|im_start|>system\\n' }}
{%- if marked.first %}{{ messages[0].content }}{% else %}{{ 'You are helpful.' }}{% endif %}
{%- if tools %}{{ '\\n\\n# Tools\\n' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant\\n' }}OPEN
        {%- if message.content %}{{ message.content + '\\n' }}{% endif %}
        {%- for call in message.tool_calls %}
            {%- set function = call.function if call.function is defined else call %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments | tojson }}{{ '}\\n</tool_call>' + ('' if loop.last else '\\n') }}
        {%- endfor %}
        {{- '<|im_end|>' }}CLOSE
        {{- '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}OPEN
        {{- message.content + '<|im_end|>' }}CLOSE
        {{- '\\n' }}
    {%- elif message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def qwen(messages, tools):
    """What QWEN writes."""
    system = messages[0]["content"] if messages[0]["role"] == "system" else "You are helpful."
    about = "".join(f"\n{dumped(tool)}" for tool in tools or ())
    parts = [(f"<|im_start|>system\n{system}" + f"\n\n# Tools\n{about}" * bool(tools) + "<|im_end|>\n", None)]
    for number, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        following = messages[number + 1]["role"] if number + 1 < len(messages) else None
        if not isinstance(content, str) and not message.get("tool_calls"):
            raise Refused("refused_by_template")
        if role == "tool":
            opened = number > 0 and messages[number - 1]["role"] == "tool"
            text = "" if opened else "<|im_start|>user"
            text += f"\n<tool_response>\n{content}\n</tool_response>" + ("" if following == "tool" else "<|im_end|>\n")
            if opened:  # in one turn with the one before
                text = parts.pop()[0] + text
            parts.append((text, None))
        elif role == "assistant":
            calls = "\n".join(
                f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": '
                f"{dumped(call['function']['arguments'])}}}\n</tool_call>"
                for call in message.get("tool_calls", ())
            )
            said = "\n".join(each for each in (content, calls) if each)
            parts += [("<|im_start|>assistant\n", None), (f"{said}<|im_end|>", number), ("\n", None)]
        elif role == "user" or (role == "system" and number):
            parts.append((f"<|im_start|>{role}\n{content}<|im_end|>\n", None))
        elif role != "system":
            raise Refused("refused_by_template")
    return parts


# --- Llama 3.1: one call in a turn, tools in front of the first user's words, results of the role ipython ---

LLAMA = """
{%- macro header(role) %}{{ '<|start_header|>' + role + '<|end_header|>\\n\\n' }}{% endmacro %}
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{%- if tools is not none and (not messages or messages[0].role != 'user') %}
    {{- raise_exception('no user in front of the tools') }}
{%- endif %}
{{- header('system') }}{% if tools is not none %}{{ 'Environment: ipython\\n' }}{% endif %}
{{- system + '<|eot|>' }}
{%- for message in messages %}
    {%- if message.role in ('tool', 'ipython') %}
        {{- header('ipython') }}
        {%- if message.content is mapping %}{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}
        {{- '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- header('assistant') + '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
        {{- '<|eot|>' }}
    {%- else %}
        {{- header(message.role) }}
        {%- if loop.first and tools is not none %}
            {%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}
        {%- endif %}
        {{- (message.content | trim) + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}"""


def llama(messages, tools):
    """What LLAMA writes. Where a turn has words and calls, it leaves out the words."""

    def header(role):
        return f"<|start_header|>{role}<|end_header|>\n\n"

    system = messages[0]["content"].strip() if messages[0]["role"] == "system" else ""
    about = "Environment: ipython\n" * (tools is not None)
    parts = [("<|begin|>" + header("system") + about + system + "<|eot|>", None)]
    first = int(messages[0]["role"] == "system")
    if tools is not None and [each["role"] for each in messages[first : first + 1]] != ["user"]:
        raise Refused("refused_by_template")
    for number, message in enumerate(messages[first:], first):
        role, calls, content = message["role"], message.get("tool_calls"), message.get("content", "")
        if role in ("tool", "ipython"):
            text = content if isinstance(content, str) else dumped(content)
            parts.append((f"{header('ipython')}{text}<|eot|>", None))
        elif calls is not None:
            if len(calls) != 1:
                raise Refused("refused_by_template")
            call = calls[0]["function"]
            text = f'{{"name": "{call["name"]}", "parameters": {dumped(call["arguments"])}}}<|eot|>'
            parts += [(header("assistant"), None), (text, number)]
        else:
            about = "".join(f"{dumped(tool)}\n" for tool in tools or ()) if number == first else ""
            own = number if role == "assistant" and number else None
            if isinstance(content, list):
                raise Refused("content_not_as_text")
            parts += [(header(role) + about, None), (f"{content.strip()}<|eot|>", own)]
    return parts


# --- Mistral: no headers and no generation prompt, user and assistant in turn, tools before the last user's words ---

MISTRAL = """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set turns = namespace(user=true) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != turns.user %}{{ raise_exception('user and assistant in turn') }}{% endif %}
        {%- set turns.user = not turns.user %}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson) + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- '</s>' }}
    {%- elif message.role == 'assistant' %}{{ ' ' + message.content + '</s>' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + '}[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception('no role ' + message.role) }}
    {%- endif %}
{%- endfor %}"""


def mistral(messages, tools):
    """What MISTRAL writes. Where a turn has words and calls, it leaves out the words."""
    parts = [("<|begin|>", None)]
    last_user = max((number for number, each in enumerate(messages) if each["role"] == "user"), default=-1)
    is_users = True
    for number, message in enumerate(messages):
        role, calls = message["role"], message.get("tool_calls")
        if role == "user" or (role == "assistant" and not calls):
            if (role == "user") != is_users:
                raise Refused("refused_by_template")
            is_users = not is_users
        if not isinstance(message.get("content"), str) and role == "user":
            raise Refused("refused_by_template")
        if role == "user":
            if tools is not None and message == messages[last_user]:
                parts.append((f"[AVAILABLE_TOOLS] {dumped(tools)}[/AVAILABLE_TOOLS]", None))
            parts.append((f"[INST] {message['content']}[/INST]", None))
        elif role == "assistant" and calls:
            said = ", ".join(dumped(call["function"]) for call in calls)
            parts.append((f"[TOOL_CALLS] [{said}]</s>", number))
        elif role == "assistant":
            parts.append((f" {message['content']}</s>", number))
        elif role == "tool":
            parts.append((f'[TOOL_RESULTS] {{"content": {dumped(message["content"])}}}[/TOOL_RESULTS]', None))
        else:
            raise Refused("refused_by_template")
    return parts


# --- Gemma: the assistant is the model, no system, user and model in turn, and no tools at all ---

GEMMA = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turn') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- (message.content | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""


def gemma(messages, tools):
    """What GEMMA writes."""
    parts = [("<|begin|>", None)]
    for number, message in enumerate(messages):
        if (message["role"] == "user") != (number % 2 == 0):
            raise Refused("refused_by_template")
        is_own = message["role"] == "assistant"
        if isinstance(message.get("content"), list | dict):
            raise Refused("content_not_as_text")
        words = f"{(message.get('content') or '').strip()}<end_of_turn>"
        header = f"<start_of_turn>{'model' if is_own else message['role']}\n"
        parts += [(header, None), (words, number if is_own else None), ("\n", None)]
    if any(message.get("tool_calls") for message in messages):
        raise Refused("unused_tool_calls")
    return parts


# --- ChatML: any role, words alone ---

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}OPEN{{ message.content + '<|im_end|>' }}CLOSE
    {%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def chatml(messages, tools):
    """What CHATML writes."""
    parts = []
    for number, message in enumerate(messages):
        if not isinstance(message.get("content"), str):
            raise Refused("refused_by_template")
        own = number if message["role"] == "assistant" else None
        parts += [(f"<|im_start|>{message['role']}\n", None), (f"{message['content']}<|im_end|>", own), ("\n", None)]
    if any(message.get("tool_calls") for message in messages):
        raise Refused("unused_tool_calls")
    return parts


def plain(template):
    """Return a template without marks."""
    return template.replace("OPEN", "").replace("CLOSE", "")


def with_marks(template):
    """Return a template with marks around what the assistant says."""
    return template.replace("OPEN", "{% generation %}").replace("CLOSE", "{% endgeneration %}")


FAMILIES = {
    "qwen": Family(plain(QWEN), qwen),
    "qwen_marked": Family(with_marks(QWEN), qwen),
    "llama": Family(LLAMA, llama),
    "mistral": Family(MISTRAL, mistral),
    "gemma": Family(GEMMA, gemma),
    "chatml": Family(plain(CHATML), chatml),
    "chatml_marked": Family(with_marks(CHATML), chatml),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "river",
            "description": "The length of a river",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        },
    },
    {"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}},
]


def call(name="river", **arguments):
    """Return a call of a tool, as the assistant makes it."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
