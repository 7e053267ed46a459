"""Chats with tools by templates of the usual kinds: which tokens carry loss, and which template refuses which chat."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import chat_tokenizers as kinds
from support.chat_tokenizers import supervised
from support.errors import refused
from support.tool_templates import FAMILIES, SPECIAL, TOOLS, Refused, call, encoded, with_loss

from niels_gpt.chat import LOSS_ON, Chat, EncodedChat, RefusedChat, open_tokenizer
from niels_gpt.chat.tokenizers import template_tokenizer
from niels_gpt.tokenizers.huggingface import HuggingFaceTokenizer

USER = {"role": "user", "content": "How long is the river?"}
WORDS = {"role": "assistant", "content": "It is long."}
RESULT = {"role": "tool", "name": "river", "content": '{"km": 12}', "tool_call_id": "a1"}
CALLS = {"role": "assistant", "tool_calls": [call(name="river", of="Spree")]}
BOTH = {**CALLS, "content": "I am to look."}
PARALLEL = {"role": "assistant", "content": None, "tool_calls": [call(of="Spree"), call("rain")]}
SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [USER, WORDS, {"role": "user", "content": "And why?"}, {"role": "assistant", "content": "It rained."}]

CHATS = {
    "words": (TALK, None),
    "a call": ([USER, CALLS, RESULT, WORDS], TOOLS),
    "a call without tools": ([USER, CALLS, RESULT, WORDS], None),
    "both": ([USER, BOTH, RESULT, WORDS, USER, WORDS], None),
    "parallel calls": ([USER, PARALLEL, RESULT, {**RESULT, "content": "rain"}, WORDS], TOOLS),
    "steps": ([USER, CALLS, RESULT, CALLS, RESULT, CALLS], TOOLS),
    "system": ([SYSTEM, *TALK], None),
    "developer": ([{"role": "developer", "content": "Be brief."}, *TALK], None),
    "an object as result": ([USER, CALLS, {"role": "tool", "content": {"km": 12}}, WORDS], TOOLS),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, WORDS], None),
    "the assistant begins": ([WORDS, *TALK], None),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return kinds.write_tokenizer(tmp_path_factory.mktemp("none"), template=None, special=SPECIAL)


@pytest.fixture(scope="module")
def ids(folder):
    return HuggingFaceTokenizer(folder)


@pytest.fixture(scope="module")
def opened(ids):
    return {
        (name, loss_on): template_tokenizer(ids, family.template, loss_on=loss_on)
        for name, family in FAMILIES.items()
        for loss_on in LOSS_ON
    }


def expected(tokenizer, name, messages, tools):
    """Return ids and mask by the oracle, or the counter of a refusal."""
    try:
        parts = FAMILIES[name].oracle(messages, tools)
    except Refused as refused:
        return str(refused)
    turns = with_loss(messages, tokenizer.loss_on)
    # Without marks nothing tells where a reply begins that no message stands before.
    return encoded(tokenizer, parts, [turn for turn in turns if turn or tokenizer.mask_by == "generation"])


def check(tokenizer, name, messages, tools):
    (found,) = tokenizer.encode_chats([Chat("a chat", messages, tools)])
    wanted = expected(tokenizer, name, messages, tools)
    if isinstance(found, RefusedChat):
        assert found.reason == wanted, found
        return
    assert (found.ids, found.mask) == wanted
    turns = sum(each["role"] == "assistant" for each in messages)
    assert found.turns_without_loss == turns - len(with_loss(messages, tokenizer.loss_on))


@pytest.mark.parametrize("loss_on", LOSS_ON)
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_loss_are_those_of_each_turn_alone(opened, name, loss_on):
    for messages, tools in CHATS.values():
        check(opened[name, loss_on], name, messages, tools)


REFUSES = {
    "qwen": {"developer": "refused_by_template", "an object as result": "refused_by_template"},
    "llama": {"parallel calls": "refused_by_template", "parts": "content_not_as_text"},
    "mistral": {name: "refused_by_template" for name in ("system", "developer", "the assistant begins", "parts")},
    "gemma": {
        **{name: "refused_by_template" for name in CHATS if name not in ("words", "parts")},
        "parts": "content_not_as_text",
    },
    "chatml": {
        **{name: "unused_tool_calls" for name in ("both",)},
        **{name: "refused_by_template" for name in CHATS if "call" in name or name in ("steps", "parts")},
        "an object as result": "refused_by_template",
    },
}
"""What each template refuses, written out: the counter by the chat."""


@pytest.mark.parametrize("name", REFUSES)
def test_which_template_refuses_which_chat(opened, name):
    chats = [Chat(chat, *given) for chat, given in CHATS.items()]
    found = zip(CHATS, opened[name, "assistant,tool_calls"].encode_chats(chats), strict=True)
    refused = {chat: each.reason for chat, each in found if isinstance(each, RefusedChat)}
    assert refused == {"parts": "refused_by_template", **REFUSES[name]}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ids_are_those_of_transformers_with_tools(folder, opened, name):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    ours = opened[name, "assistant,tool_calls"], open_tokenizer(str(folder), chat_template=FAMILIES[name].template)
    for chat, (messages, tools) in CHATS.items():
        for tokenizer in ours:
            (found,) = tokenizer.encode_chats([Chat(chat, messages, tools)])
            if isinstance(found, EncodedChat):
                given = theirs.apply_chat_template(messages, tools=tools, chat_template=FAMILIES[name].template)
                assert found.ids == given["input_ids"]
                assert tokenizer.decode(found.ids) == theirs.decode(found.ids)
    facts = [
        (each.pad_id, each.special_token_ids, each.vocab_size, each.template_sha256, each.mask_by) for each in ours
    ]
    assert facts[0] == facts[1]


def test_another_token_of_the_user_changes_no_target(opened):
    steps = [SYSTEM, USER, PARALLEL, RESULT, {**RESULT, "content": "rain"}, WORDS, USER, BOTH]
    for name, loss_on in opened:
        messages = TALK if name in ("gemma", "mistral") else [SYSTEM, *TALK] if "chatml" in name else steps
        messages = [SYSTEM, USER, CALLS, RESULT, *TALK] if name == "llama" else messages
        tokenizer = opened[name, loss_on]
        seven, eight = (
            [{**each, "content": f"{each['content']} {digit}"} if each["role"] == "user" else each for each in messages]
            for digit in (7, 8)
        )
        (one, two) = tokenizer.encode_chats([Chat("one", seven), Chat("two", eight)])
        assert isinstance(one, EncodedChat) and isinstance(two, EncodedChat)
        changed = np.array(one.ids) != np.array(two.ids)
        assert changed.any() and one.mask == two.mask and not (changed & (np.array(one.mask) == 1)).any()


def without_weights(messages):
    return [{name: value for name, value in message.items() if name != "weight"} for message in messages]


def test_loss_in_each_choice_written_out(opened, ids):
    talk = [USER, BOTH, RESULT, WORDS]
    called = 'I am to look.\n<tool_call>\n{"name": "river", "arguments": {"name": "river", "of": "Spree"}}'
    called = called.replace('"name": "river", "of"', '"of"') + "\n</tool_call><|im_end|>"
    wanted = {
        "assistant": ["It is long.<|im_end|>"],
        "tool_calls": [called],
        "assistant,tool_calls": [called, "It is long.<|im_end|>"],
        "last": ["It is long.<|im_end|>"],
    }
    for loss_on, texts in wanted.items():
        for name in ("qwen", "qwen_marked"):
            tokenizer = opened[name, loss_on]
            assert supervised(tokenizer, tokenizer.encode_chat(talk, TOOLS)) == texts
    first, last = [USER, {**WORDS, "weight": 0}], [USER, {**WORDS, "content": "Why?", "weight": 1}]
    for name, loss_on in itertools.product(("qwen", "qwen_marked"), ("assistant", "last")):
        tokenizer = opened[name, loss_on]
        plain, weighed, none = tokenizer.encode_chats(
            [Chat("plain", without_weights(first + last)), Chat("weighed", first + last), Chat("none", last + first)]
        )
        assert supervised(tokenizer, weighed[:2]) == ["Why?<|im_end|>"] and weighed.ids == plain.ids
        assert weighed.turns_without_loss == 1
        assert supervised(tokenizer, none[:2]) == (["Why?<|im_end|>"] if loss_on == "assistant" else [])
    with refused("E407", "loss_on='user'", "'assistant', 'assistant,tool_calls'"):
        template_tokenizer(ids, None, loss_on="user")


# --- any chat ---

WORD = st.text("abc éß漢🦊.:{\"'", min_size=1, max_size=12).map(str.strip).filter(bool)
VALUE = st.recursive(
    WORD | st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1, width=16),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORD, inner, max_size=2),
    max_leaves=3,
)
CALL = st.builds(
    lambda name, given: {"function": {"name": name, "arguments": given}}, WORD, st.dictionaries(WORD, VALUE)
)
TURN = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, WORD),
    st.builds(lambda text: {"role": "assistant", "content": text}, WORD),
    st.builds(
        lambda text, calls: {"role": "assistant", "content": text, "tool_calls": calls},
        WORD | st.none(),
        st.lists(CALL, min_size=1, max_size=2),
    ),
    st.builds(lambda text, name: {"role": "tool", "content": text, "name": name}, WORD, WORD),
    st.builds(
        lambda role, text: {"role": role, "content": text}, st.sampled_from(["system", "developer", "ipython"]), WORD
    ),
)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(messages=st.lists(TURN, min_size=1, max_size=6), tools=st.sampled_from([None, TOOLS]), data=st.data())
def test_any_chat_has_the_oracles_ids_and_loss_or_is_refused_as_it_says(opened, messages, tools, data):
    loss_on = data.draw(st.sampled_from(LOSS_ON))
    for name in FAMILIES:
        if name == "mistral" and (tools or not _words_may_replace_calls(messages)):
            continue  # tools: see the next test. Where no words may stand, it cannot be seen that they have no header
        check(opened[name, loss_on], name, messages, tools)


def _words_may_replace_calls(messages):
    last = "assistant"
    for message in messages:
        if message.get("tool_calls") and last == "assistant":
            return False
        last = message["role"] if message["role"] in ("user", "assistant") and "tool_calls" not in message else last
    return True


def test_a_template_with_tools_before_the_last_user_is_refused_unless_only_the_last_turn_counts(opened):
    chat = Chat("long", [USER, WORDS, {**USER, "content": "And why?"}, CALLS, RESULT, WORDS], TOOLS)
    (found,) = opened["mistral", "assistant"].encode_chats([chat])
    assert found.reason == "not_prefix_stable"
    assert re.match("chat 'long': the chat template of .* is not prefix-stable.* messages 1 to 2 ", found.found)
    tokenizer = opened["mistral", "last"]
    (found,) = tokenizer.encode_chats([chat])
    assert supervised(tokenizer, (found.ids, found.mask)) == [" It is long.</s>"] and found.turns_without_loss == 2
