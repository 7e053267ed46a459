"""A chat template either tells exactly which characters are the assistant's, or is refused, before hours are spent."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import chat_tokenizers as kinds
from support.chat_tokenizers import CHAT, Messages, rows_of, supervised, turns

from niels_gpt.chat import tokenizers
from niels_gpt.chat.rows import NOT_DROPPED, ROWS, chat_rows
from niels_gpt.chat.tokenizers import ChatTokenizer, open_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer without a template."""
    return str(kinds.write_tokenizer(tmp_path_factory.mktemp("none"), template=None))


IN_A_MACRO = "{% macro chat(messages) %}" + kinds.CHATML_MARKED + "{% endmacro %}{{ chat(messages) }}"
IN_A_SET = "{% set all %}" + kinds.CHATML_MARKED + "{% endset %}{{ all }}"
IN_A_BLOCK = "{% block chat %}" + kinds.CHATML_MARKED + "{% endblock %}"
IN_A_FILTER = "{% filter trim %}  " + kinds.CHATML_MARKED + "{% endfilter %}{{ '\n' }}"
TRIMMED_MARKS = kinds.CHATML_MARKED.replace("{% generation %}", "{%- generation -%}\n  ").replace(
    "{% endg", "\n {%- endg"
)


@pytest.mark.parametrize("template", [IN_A_MACRO, IN_A_SET, IN_A_BLOCK, IN_A_FILTER, TRIMMED_MARKS])
def test_marks_are_where_they_are_written_within_any_block(folder: str, template: str) -> None:
    plain, other = (open_tokenizer(folder, chat_template=text) for text in (kinds.CHATML_MARKED, template))
    for one, two in zip(rows_of(plain, CHAT, turns("a", "")), rows_of(other, CHAT, turns("a", "")), strict=True):
        np.testing.assert_array_equal(one.input_ids, two.input_ids)
        np.testing.assert_array_equal(one.loss_mask, two.loss_mask)


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}{% filter trim %}{% generation %} {{ message.content }} {% endgeneration %}"
        "{% endfilter %}{% endfor %}",
        "{% set all %}" + kinds.CHATML_MARKED + "{% endset %}{{ all | length }}{{ all }}",
        "{% set all %}" + kinds.CHATML_MARKED + "{% endset %}{{ all | reverse }}",
        "{% generation %}" + kinds.CHATML_MARKED + "{% endgeneration %}",
        "{% set all %}{% generation %}{{ messages[1].content }}{% endgeneration %}{% endset %}"
        "{{ raise_exception('no reply') if all[0] != messages[1].content[0] else all }}",
    ],
)
def test_a_template_that_works_on_its_own_marks_is_refused_before_a_chat_is_read(folder: str, template: str) -> None:
    tokenizer = open_tokenizer(folder, chat_template=template)
    with pytest.raises(ValueError, match=r"own marks.*probe chat.*--chat-template FILE"):
        rows_of_none(tokenizer)


def rows_of_none(tokenizer: ChatTokenizer) -> None:
    """Ask for the rows of a source that must not be read."""

    def never() -> Iterator[tuple[str, Messages]]:
        raise AssertionError("a chat was read")
        yield "", []

    list(chat_rows(never(), tokenizer, seq_length=64, counters=Counter()))


def test_a_filter_that_changes_marked_text_is_refused_with_the_chat_that_shows_it(folder: str) -> None:
    template = kinds.CHATML_MARKED.replace("{% generation %}", "{% filter trim %}{% generation %}")
    tokenizer = open_tokenizer(
        folder, chat_template=template.replace("{% endgeneration %}", "{% endgeneration %}{% endfilter %}")
    )
    assert supervised(tokenizer, rows_of(tokenizer, CHAT)[0]) == ["I am well.<|im_end|>", "It rained. 🦊<|im_end|>"]
    with pytest.raises(ValueError, match=r"own marks.*In chat 'chat 1' the text with marks"):
        rows_of(tokenizer, CHAT, turns("a", "  yes"))


def test_private_characters_in_a_chat_are_text(folder: str) -> None:
    private = "".join(map(chr, range(0xE000, 0xE010)))
    plain, marked = (open_tokenizer(folder, chat_template=text) for text in (kinds.CHATML, kinds.CHATML_MARKED))
    for tokenizer in (plain, marked):
        row = rows_of(tokenizer, turns(private, f"a{private}b"))[0]
        assert supervised(tokenizer, row) == [f"a{private}b<|im_end|>"]


def test_marks_around_nothing_supervise_nothing(folder: str) -> None:
    template = "He{% generation %}{% endgeneration %}llo" + kinds.CHATML_MARKED
    tokenizer = open_tokenizer(folder, chat_template=template)
    assert supervised(tokenizer, rows_of(tokenizer, CHAT)[0]) == ["I am well.<|im_end|>", "It rained. 🦊<|im_end|>"]


def test_marks_in_a_comment_are_none(folder: str) -> None:
    commented = "{# put {% generation %} here #}" + kinds.CHATML
    assert open_tokenizer(folder, chat_template=commented).mask_by == "prefix"
    assert open_tokenizer(folder, chat_template=kinds.CHATML_MARKED).mask_by == "generation"


def test_a_template_that_always_prompts_is_refused_before_a_chat_is_read(folder: str) -> None:
    tokenizer = open_tokenizer(folder, chat_template=kinds.ALWAYS_PROMPTS)
    found = r"writes '<\|eot\|><\|start_header\|>assistant.*after a reply that ends a chat.*--chat-template FILE"
    with pytest.raises(ValueError, match=found):
        rows_of_none(tokenizer)


def test_a_header_is_never_taken_for_the_beginning_of_a_reply(folder: str) -> None:
    unprompted = kinds.PLAIN.replace("{% if add_generation_prompt %}", "{% if false %}")
    with pytest.raises(ValueError, match=r"does not tell where a reply begins.*'Assistant: "):
        rows_of(open_tokenizer(folder, chat_template=unprompted), turns("Which one?", "A"))


def test_a_reply_with_no_message_before_it_carries_no_loss(folder: str) -> None:
    tokenizer, counters = open_tokenizer(folder, chat_template=kinds.LLAMA_3), Counter[str]()
    led, alone = turns("I am well.", "Why?", "It rained.", first="assistant"), turns("I am well.", first="assistant")
    rows = rows_of(tokenizer, led, alone, CHAT, counters=counters)
    assert [row.id for row in rows] == ["chat 0", "chat 2"]
    assert supervised(tokenizer, rows[0]) == ["It rained.<|eot|>"]
    assert counters == {"rows": 2, "leading_reply": 1, "no_supervised": 1}
    marked = open_tokenizer(folder, chat_template=kinds.CHATML_MARKED)
    assert supervised(marked, rows_of(marked, alone)[0]) == ["I am well.<|im_end|>"], "marks tell where it begins"


def test_a_template_that_needs_a_message_is_not_asked_for_none(folder: str) -> None:
    template = "{% if messages[0].role == 'system' %}{{ '' }}{% endif %}" + kinds.CHATML
    tokenizer, counters = open_tokenizer(folder, chat_template=template), Counter[str]()
    rows = rows_of(tokenizer, turns("I am well.", "Why?", "It rained.", first="assistant"), counters=counters)
    assert supervised(tokenizer, rows[0]) == ["It rained.<|im_end|>"]
    assert counters == {"rows": 1, "leading_reply": 1}


def test_an_empty_reply_without_a_generation_prompt_carries_no_loss(folder: str) -> None:
    tokenizer, counters = open_tokenizer(folder, chat_template=kinds.INST), Counter[str]()
    rows = rows_of(tokenizer, turns("a", "", "b", "Yes"), turns("a", " \n"), counters=counters)
    assert [supervised(tokenizer, row) for row in rows] == [[" Yes<|im_end|>"]]
    assert counters == {"rows": 1, "empty_reply": 1, "no_supervised": 1}
    prompted = open_tokenizer(folder, chat_template=kinds.CHATML)
    assert supervised(prompted, rows_of(prompted, turns("a", ""))[0]) == ["<|im_end|>"]


@pytest.mark.parametrize(
    "harmless",
    [
        "{# strftime_now('%d') #}",
        "{{ '' if 'strftime_now' else '' }}",
        "{% if strftime_now is defined %}{% endif %}",
        "{% if strftime_now is not defined %}{% endif %}",
    ],
)
def test_only_the_use_of_the_date_is_refused(folder: str, harmless: str) -> None:
    tokenizer = open_tokenizer(folder, chat_template=harmless + kinds.CHATML)
    plain = open_tokenizer(folder, chat_template=kinds.CHATML)
    np.testing.assert_array_equal(rows_of(tokenizer, CHAT)[0].input_ids, rows_of(plain, CHAT)[0].input_ids)


@pytest.mark.parametrize(
    "dated",
    [
        "{% if strftime_now is defined %}{% set day = strftime_now('%d') %}{% else %}{% set day = '26' %}{% endif %}",
        "{% set now = strftime_now %}{{ now('%d') }}",
        "{{ '%d' | map(strftime_now) }}",
    ],
)
def test_the_date_is_refused_even_with_a_fixed_one_beside_it(folder: str, dated: str) -> None:
    tokenizer = open_tokenizer(folder, chat_template=dated + kinds.CHATML)
    with pytest.raises(ValueError, match=r"asks for the date.*a date written out in it: --chat-template FILE"):
        rows_of_none(tokenizer)


def test_an_unstable_template_is_warned_of_and_refused_with_the_first_chat_that_shows_it(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = open_tokenizer(folder, chat_template=kinds.LAST_REPLY_THINKS)
    with caplog.at_level(logging.WARNING, logger="niels_gpt"):
        rows = rows_of(tokenizer, *[turns("Why?", "It rained.")] * 300)
    assert supervised(tokenizer, rows[299]) == ["<think></think>It rained.<|im_end|>"]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, "once for each probe, and not for each batch of chats"
    for message, probe in zip(messages, ("two turns the", "two turns with a system message the"), strict=True):
        assert f"not prefix-stable, so the assistant's tokens are not known. In a probe chat of {probe}" in message
        assert "--chat-template FILE. The first chat that shows it ends the run" in message
    with pytest.raises(ValueError, match=r"not prefix-stable.*In chat 'chat 1' the rendering of messages 1 to 2"):
        rows_of(tokenizer, turns("Why?", "It rained."), CHAT)


def test_a_stable_template_is_not_warned_of(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    for template in kinds.TEMPLATES.values():
        with caplog.at_level(logging.WARNING, logger="niels_gpt"):
            assert rows_of(open_tokenizer(folder, chat_template=template), CHAT)
    assert not caplog.records, "INST raises an error for a system message, which matters only to chats with one"


def test_a_template_that_could_not_be_tried_is_warned_of(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    picky = "{% if messages[0].content != 'Hello there.' %}{{ raise_exception('say hello') }}{% endif %}" + kinds.CHATML
    with caplog.at_level(logging.WARNING, logger="niels_gpt"):
        assert len(rows_of(open_tokenizer(folder, chat_template=picky), CHAT)) == 1
    assert "could not be tried. It raises an error for a probe chat of two turns: say hello" in caplog.text


def test_an_error_in_what_a_template_computes_drops_the_chat(folder: str) -> None:
    template = "{% if messages[0].content == 'a' %}{{ 1 + 'a' }}{% endif %}" + kinds.CHATML
    counters: Counter[str] = Counter()
    rows = rows_of(open_tokenizer(folder, chat_template=template), turns("a", "b"), CHAT, counters=counters)
    assert ([row.id for row in rows], counters) == (["chat 1"], {"rows": 1, "refused_by_template": 1})


LATER = ("Hello(?=[\\s\\S]*It rained)", "Assistant")
"""What depends on a later word: no tokenizer should, and none that does may go unnoticed."""


def test_beginnings_with_other_tokens_than_the_chat_are_refused_by_name(tmp_path: Path) -> None:
    folder = str(kinds.write_tokenizer(tmp_path / "prefix", template=kinds.PLAIN, replaced=LATER))
    tokenizer = open_tokenizer(folder)
    assert len(rows_of(tokenizer, turns("Hello there.", "Yes."))) == 1
    found = r"prefix: its tokenizer gives the beginning of a chat other tokens.*'chat 1', token \d+: 'Hello.*'Assistant"
    with pytest.raises(ValueError, match=found):
        rows_of(tokenizer, turns("Hello there.", "Yes."), CHAT)
    words = "{% generation %}{{ message.content }}{% endgeneration %}"
    marked = open_tokenizer(folder, chat_template="{% for message in messages %}" + words + "{% endfor %}")
    assert len(rows_of(marked, CHAT)) == 1, "marks need no beginnings"


def test_beginnings_are_checked_for_the_first_chats_and_then_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "_ALL_CHECKED", 3)
    monkeypatch.setattr(tokenizers, "_CHECKED_EVERY", 4)
    folder = str(kinds.write_tokenizer(tmp_path, template=kinds.PLAIN, replaced=LATER))
    for place, refused in enumerate([True, True, True, False, True, False, False, False, True]):
        chats = [turns("Why?", "Yes.")] * place + [CHAT]
        if refused:
            with pytest.raises(ValueError, match=f"Chat 'chat {place}', token"):
                rows_of(open_tokenizer(folder), *chats)
        else:
            assert len(rows_of(open_tokenizer(folder), *chats)) == place + 1


def test_white_space_in_front_of_a_reply_may_be_divided_in_another_way(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(kinds.write_tokenizer(tmp_path, template=kinds.LLAMA_3, more=("a\n\n", "b\n\n"))))
    row = rows_of(tokenizer, CHAT)[0]
    lines = [tokenizer.decode([number]) for number in row.input_ids.tolist()]
    assert "\n\n" not in lines and lines.count("\n") == 8, "in front of a word it is two tokens"
    prompt = tokenizer.encode_chat(turns("a", ""))[0]
    assert "\n\n" in [tokenizer.decode([number]) for number in prompt], "alone it is one"
    assert supervised(tokenizer, row) == ["I am well.<|eot|>", "It rained. 🦊<|eot|>"]


def test_every_chat_is_a_row_or_counted_as_dropped(folder: str) -> None:
    tokenizer, counters = open_tokenizer(folder, chat_template=kinds.PLAIN), Counter[str]()
    chats = [CHAT, turns("a", "b" * 600), turns("a", "am"), turns("a", "b", "c", first="assistant"), [], CHAT[:1]]
    chats += [turns("<|pad|>", "a"), [SYSTEM, *CHAT]]
    rows_of(tokenizer, *chats, counters=counters)
    assert set(counters) >= {"truncated", "tokens_cut", "merged_at_reply_edge", "leading_reply"}
    dropped = sum(number for reason, number in counters.items() if reason not in (ROWS, *NOT_DROPPED))
    assert counters[ROWS] + dropped == len(chats)
