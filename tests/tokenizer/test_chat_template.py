"""Chats become sentinels, contents and end-of-turn marks. On paper: the id of a letter is its byte + 10."""

from typing import Any, cast

import pytest
from support.byte_tokenizer import ByteTokenizer
from support.errors import refused

from niels_gpt.chat_template import extract_assistant_reply, format_chat, format_prompt

SYS, USR, ASST, EOT = 1, 2, 3, 4


CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "AB"},
    {"role": "assistant", "content": "C"},
]


def test_each_message_is_role_content_end_of_turn_and_a_prompt_ends_where_the_assistant_begins():
    tokenizer = ByteTokenizer()
    assert format_chat(tokenizer, CHAT) == [SYS, 93, EOT, USR, 75, 76, EOT, ASST, 77, EOT]
    assert format_prompt(tokenizer, CHAT[:2]) == [SYS, 93, EOT, USR, 75, 76, EOT, ASST]
    assert format_chat(tokenizer, [{"role": "user", "content": ""}]) == [USR, EOT]
    assert format_chat(tokenizer, []) == []
    with refused("E102", "message 1: role 'tool'", "system, user, assistant"):
        format_chat(tokenizer, cast(Any, [CHAT[0], {"role": "tool", "content": "x"}]))


@pytest.mark.parametrize(
    ("ids", "reply"),
    [
        ([USR, 75, EOT, ASST, 76, 77, EOT], [76, 77]),
        ([ASST, 76, EOT, USR, 75, EOT, ASST, 77, EOT], [77]),  # the last reply, not the first
        ([ASST, 76, EOT, 77, EOT], [76]),  # up to the first end of turn
        ([USR, 75, EOT, ASST, 76, 77], [76, 77]),  # generation was cut: to the end
        ([USR, 75, EOT, ASST], []),
        ([ASST, EOT], []),
        ([USR, 75, EOT], []),
        ([], []),
    ],
)
def test_the_reply_is_what_follows_the_last_assistant_mark(ids, reply):
    assert extract_assistant_reply(ByteTokenizer(), ids) == reply


def test_a_real_tokenizer_gives_the_reply_back(tiny_tokenizer):
    ids = format_chat(tiny_tokenizer, CHAT)
    assert tiny_tokenizer.decode(extract_assistant_reply(tiny_tokenizer, ids)) == "C"
    tensor = tiny_tokenizer.encode_torch("x").new_tensor(ids)
    assert extract_assistant_reply(tiny_tokenizer, cast(Any, tensor)) == extract_assistant_reply(tiny_tokenizer, ids)
