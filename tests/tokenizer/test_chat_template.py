"""Chats become sentinels, contents and end-of-turn marks.

The fake tokenizer writes each letter as its code, so every expectation can be worked out on paper.
"""

from typing import Any, cast

import pytest

from niels_gpt.chat_template import Message, extract_assistant_reply, format_chat, format_prompt
from niels_gpt.tokenizer import SentencePieceTokenizer

SYS, USR, ASST, EOT = 1, 2, 3, 4


class Letters:
    """ "AB" -> [65, 66]."""

    def encode(self, text: str, /) -> list[int]:
        return [ord(letter) for letter in text]

    def special_token_ids(self) -> dict[str, int]:
        return {"sys": SYS, "usr": USR, "asst": ASST, "eot": EOT}


CHAT: list[Message] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "AB"},
    {"role": "assistant", "content": "C"},
]


def test_each_message_is_role_content_end_of_turn() -> None:
    assert format_chat(Letters(), CHAT) == [SYS, 83, EOT, USR, 65, 66, EOT, ASST, 67, EOT]


def test_an_empty_message_keeps_its_two_marks_and_an_empty_chat_is_empty() -> None:
    assert format_chat(Letters(), [{"role": "user", "content": ""}]) == [USR, EOT]
    assert format_chat(Letters(), []) == []


def test_a_prompt_ends_where_the_assistant_begins() -> None:
    assert format_prompt(Letters(), CHAT[:2]) == [SYS, 83, EOT, USR, 65, 66, EOT, ASST]


def test_an_unknown_role_is_refused_with_its_place() -> None:
    odd = cast(Any, [CHAT[0], {"role": "tool", "content": "x"}])
    with pytest.raises(ValueError, match=r"message 1: role 'tool', expected one of system, user, assistant"):
        format_chat(Letters(), odd)


@pytest.mark.parametrize(
    ("ids", "reply"),
    [
        ([USR, 65, EOT, ASST, 66, 67, EOT], [66, 67]),
        ([ASST, 66, EOT, USR, 65, EOT, ASST, 67, EOT], [67]),  # the last reply, not the first
        ([ASST, 66, EOT, 67, EOT], [66]),  # up to the first end of turn
        ([USR, 65, EOT, ASST, 66, 67], [66, 67]),  # generation was cut: to the end
        ([USR, 65, EOT, ASST], []),
        ([ASST, EOT], []),
        ([USR, 65, EOT], []),
        ([], []),
    ],
)
def test_the_reply_is_what_follows_the_last_assistant_mark(ids: list[int], reply: list[int]) -> None:
    assert extract_assistant_reply(Letters(), ids) == reply


def test_a_real_tokenizer_gives_the_reply_back(tiny_tokenizer: SentencePieceTokenizer) -> None:
    ids = format_chat(tiny_tokenizer, CHAT)
    assert tiny_tokenizer.decode(extract_assistant_reply(tiny_tokenizer, ids)) == "C"
    tensor = tiny_tokenizer.encode_torch("x").new_tensor(ids)
    assert extract_assistant_reply(tiny_tokenizer, cast(Any, tensor)) == extract_assistant_reply(tiny_tokenizer, ids)
