"""A chat template either tells exactly which characters are the assistant's, or is refused, before hours are spent.

It can neither hang the run nor fill the memory.
"""

import logging
import os
import resource
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
from support import chat_tokenizers as kinds
from support.chat_tokenizers import CHAT, dropped, rendered, rows_of, supervised, turns
from support.errors import refused

from niels_gpt.chat import Chat, chat_rows, open_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(kinds.write_tokenizer(tmp_path_factory.mktemp("none"), template=None))


HARMLESS = {
    kinds.CHATML_MARKED: [
        "{% macro chat(messages) %}" + kinds.CHATML_MARKED + "{% endmacro %}{{ chat(messages) }}",
        "{% set all %}" + kinds.CHATML_MARKED + "{% endset %}{{ all }}",
        "{{ '!' if add_generation_prompt is not defined or documents is not none }}" + kinds.CHATML_MARKED,
        "{% block chat %}" + kinds.CHATML_MARKED + "{% endblock %}",
        "{% filter trim %}  " + kinds.CHATML_MARKED + "{% endfilter %}{{ '\n' }}",
        kinds.CHATML_MARKED.replace("{% generation %}", "{%- generation -%}\n  ").replace("{% endg", "\n {%- endg"),
    ],
    kinds.CHATML: [
        "{# put {% generation %} here #}" + kinds.CHATML,
        "{# strftime_now('%d') #}" + kinds.CHATML,
        "{{ '' if 'strftime_now' else '' }}" + kinds.CHATML,
        "{% if strftime_now is defined %}{% endif %}" + kinds.CHATML,
        "{% if strftime_now is not defined %}{% endif %}" + kinds.CHATML,
    ],
}
"""Templates that say in other words what the key says: marks within any block or around nothing, no use of the date."""
PRIVATE = "".join(map(chr, range(0xE000, 0xE010)))


@pytest.mark.parametrize(("plain", "other"), [(key, each) for key, others in HARMLESS.items() for each in others])
def test_other_words_for_a_template_give_the_same_rows(folder, plain, other):
    one, two = (open_tokenizer(folder, chat_template=text) for text in (plain, other))
    assert one.mask_by == two.mask_by == ("prefix" if plain == kinds.CHATML else "generation")
    chats = CHAT, turns("a", ""), turns(PRIVATE, f"a{PRIVATE}b")
    for left, right in zip(rows_of(one, *chats), rows_of(two, *chats), strict=True):
        np.testing.assert_array_equal(left.input_ids, right.input_ids)
        np.testing.assert_array_equal(left.loss_mask, right.loss_mask)
    assert supervised(two, rows_of(two, chats[2])[0]) == [f"a{PRIVATE}b<|im_end|>"], "they are text"


def test_marks_around_nothing_supervise_nothing(folder):
    template = "He{% generation %}{% endgeneration %}llo" + kinds.CHATML_MARKED
    tokenizer = open_tokenizer(folder, chat_template=template)
    assert supervised(tokenizer, rows_of(tokenizer, CHAT)[0]) == ["I am well.<|im_end|>", "It rained. 🦊<|im_end|>"]


OWN_MARKS, DATED = ["own marks", "probe chat"], ["date", "strftime_now"]
UNREAD = {
    "{% for message in messages %}{% filter trim %}{% generation %} {{ message.content }} {% endgeneration %}"
    "{% endfilter %}{% endfor %}": OWN_MARKS,
    "{% set all %}" + kinds.CHATML_MARKED + "{% endset %}{{ all | length }}{{ all }}": OWN_MARKS,
    "{% set all %}" + kinds.CHATML_MARKED + "{% endset %}{{ all | reverse }}": OWN_MARKS,
    "{% generation %}" + kinds.CHATML_MARKED + "{% endgeneration %}": OWN_MARKS,
    "{% set all %}{% generation %}{{ messages[1].content }}{% endgeneration %}{% endset %}"
    "{{ raise_exception('no reply') if all[0] != messages[1].content[0] else all }}": OWN_MARKS,
    "{% if strftime_now is defined %}{% set day = strftime_now('%d') %}{% else %}{% set day = 6 %}{% endif %}": DATED,
    "{% set now = strftime_now %}{{ now('%d') }}": DATED,
    "{{ '%d' | map(strftime_now) }}": DATED,
    kinds.ALWAYS_PROMPTS: ["'<|eot|><|start_header|>assistant", "after a reply"],
}


@pytest.mark.parametrize("template", UNREAD)
def test_a_template_that_can_be_told_before_a_chat_is_read_is_refused_then(folder, template):
    def never():
        raise AssertionError("a chat was read")
        yield Chat("", [])

    dated = kinds.CHATML if UNREAD[template] == DATED else ""
    tokenizer = open_tokenizer(folder, chat_template=template + dated)
    with refused("E407", *UNREAD[template], "--chat-template FILE"):
        list(chat_rows(never(), tokenizer, seq_length=64, counters=Counter()))


def test_a_filter_that_changes_marked_text_is_refused_with_the_chat_that_shows_it(folder):
    template = kinds.CHATML_MARKED.replace("{% generation %}", "{% filter trim %}{% generation %}")
    tokenizer = open_tokenizer(
        folder, chat_template=template.replace("{% endgeneration %}", "{% endgeneration %}{% endfilter %}")
    )
    assert supervised(tokenizer, rows_of(tokenizer, CHAT)[0]) == ["I am well.<|im_end|>", "It rained. 🦊<|im_end|>"]
    with refused("E407", "own marks", "chat 'chat 1'"):
        rows_of(tokenizer, CHAT, turns("a", "  yes"))


def test_a_header_is_never_taken_for_the_beginning_of_a_reply(folder):
    unprompted = kinds.PLAIN.replace("{% if add_generation_prompt %}", "{% if false %}")
    with refused("E407", "where a reply begins", "'Assistant: "):
        rows_of(open_tokenizer(folder, chat_template=unprompted), turns("Which one?", "A"))


def test_a_reply_with_no_message_before_it_carries_no_loss(folder):
    tokenizer, counters = open_tokenizer(folder, chat_template=kinds.LLAMA_3), Counter[str]()
    led, alone = turns("I am well.", "Why?", "It rained.", first="assistant"), turns("I am well.", first="assistant")
    rows = rows_of(tokenizer, led, alone, CHAT, counters=counters)
    assert [row.id for row in rows] == ["chat 0", "chat 2"]
    assert supervised(tokenizer, rows[0]) == ["It rained.<|eot|>"]
    assert counters == {"rows": 2, "leading_reply": 1, "no_supervised": 1}
    needs_a_message = "{% if messages[0].role == 'system' %}{{ '' }}{% endif %}" + kinds.CHATML  # and is asked for none
    tokenizer, counters = open_tokenizer(folder, chat_template=needs_a_message), Counter[str]()
    assert supervised(tokenizer, rows_of(tokenizer, led, counters=counters)[0]) == ["It rained.<|im_end|>"]
    assert counters == {"rows": 1, "leading_reply": 1}
    marked = open_tokenizer(folder, chat_template=kinds.CHATML_MARKED)
    assert supervised(marked, rows_of(marked, alone)[0]) == ["I am well.<|im_end|>"], "marks tell where it begins"


def test_an_empty_reply_without_a_generation_prompt_carries_no_loss(folder):
    tokenizer, counters = open_tokenizer(folder, chat_template=kinds.INST), Counter[str]()
    rows = rows_of(tokenizer, turns("a", "", "b", "Yes"), turns("a", " \n"), counters=counters)
    assert [supervised(tokenizer, row) for row in rows] == [[" Yes<|im_end|>"]]
    assert counters == {"rows": 1, "empty_reply": 1, "no_supervised": 1}
    prompted = open_tokenizer(folder, chat_template=kinds.CHATML)
    assert supervised(prompted, rows_of(prompted, turns("a", ""))[0]) == ["<|im_end|>"]


def test_an_unstable_template_is_warned_of_and_refused_with_the_first_chat(folder, caplog):
    tokenizer = open_tokenizer(folder, chat_template=kinds.LAST_REPLY_THINKS)
    with caplog.at_level(logging.WARNING, logger="niels_gpt"):
        rows = rows_of(tokenizer, *[turns("Why?", "It rained.")] * 300)
    assert supervised(tokenizer, rows[299]) == ["<think></think>It rained.<|im_end|>"]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, "once for each probe, and not for each batch of chats"
    for message, probe in zip(messages, ("two turns the", "two turns with a system message the"), strict=True):
        assert message.startswith(f"a probe chat of {probe[:-4]}: the chat template of {folder} is not prefix-stable")
        assert "leaves out each chat that shows it" in message and "--chat-template FILE" in message
    with refused("E407", "prefix-stable", "chat 'chat 1'", "messages 1 to 2"):
        rows_of(tokenizer, turns("Why?", "It rained."), CHAT)


def test_only_a_template_that_could_not_be_tried_is_warned_of(folder, caplog):
    for template in kinds.TEMPLATES.values():
        with caplog.at_level(logging.WARNING, logger="niels_gpt"):
            assert rows_of(open_tokenizer(folder, chat_template=template), CHAT)
    assert not caplog.records, "INST raises an error for a system message, which matters only to chats with one"
    picky = "{% if messages[0].content != 'Hello there.' %}{{ raise_exception('say hello') }}{% endif %}" + kinds.CHATML
    with caplog.at_level(logging.WARNING, logger="niels_gpt"):
        assert len(rows_of(open_tokenizer(folder, chat_template=picky), CHAT)) == 1
    assert "could not be tried. It raises an error for a probe chat of two turns: say hello" in caplog.text


LATER = ("Hello(?=[\\s\\S]*It rained)", "Assistant")
"""What depends on a later word: no tokenizer should, and none that does may go unnoticed."""


def test_beginnings_with_other_tokens_than_the_chat_are_refused_by_name(tmp_path):
    folder = str(kinds.write_tokenizer(tmp_path / "prefix", template=kinds.PLAIN, replaced=LATER))
    tokenizer = open_tokenizer(folder)
    assert len(rows_of(tokenizer, turns("Hello there.", "Yes."))) == 1
    with refused("E407", folder, "other tokens", "Chat 'chat 1', token 4: 'Hello", "'Assistant"):
        rows_of(tokenizer, turns("Hello there.", "Yes."), CHAT)
    words = "{% generation %}{{ message.content }}{% endgeneration %}"
    marked = open_tokenizer(folder, chat_template="{% for message in messages %}" + words + "{% endfor %}")
    assert len(rows_of(marked, CHAT)) == 1, "marks need no beginnings"


def test_beginnings_are_checked_at_first_and_then_now_and_then(tmp_path):
    folder = str(kinds.write_tokenizer(tmp_path, template=kinds.PLAIN, replaced=LATER))
    with kinds.checked_beginnings(first=3, every=4):
        for place, is_checked in enumerate([True, True, True, False, True, False, False, False, True]):
            chats = [turns("Why?", "Yes.")] * place + [CHAT]
            if is_checked:
                with refused("E407", f"Chat 'chat {place}', token"):
                    rows_of(open_tokenizer(folder), *chats)
            else:
                assert len(rows_of(open_tokenizer(folder), *chats)) == place + 1


def test_white_space_in_front_of_a_reply_may_be_divided_in_another_way(tmp_path):
    tokenizer = open_tokenizer(str(kinds.write_tokenizer(tmp_path, template=kinds.LLAMA_3, more=("a\n\n", "b\n\n"))))
    row = rows_of(tokenizer, CHAT)[0]
    lines = [tokenizer.decode([number]) for number in row.input_ids.tolist()]
    assert "\n\n" not in lines and lines.count("\n") == 8, "in front of a word it is two tokens"
    prompt = tokenizer.encode_chat(turns("a", ""))[0]
    assert "\n\n" in [tokenizer.decode([number]) for number in prompt], "alone it is one"
    assert supervised(tokenizer, row) == ["I am well.<|eot|>", "It rained. 🦊<|eot|>"]


def test_every_chat_is_a_row_or_counted_as_dropped(folder):
    tokenizer, counters = open_tokenizer(folder, chat_template=kinds.PLAIN), Counter[str]()
    chats = [CHAT, turns("a", "b" * 600), turns("a", "am"), turns("a", "b", "c", first="assistant"), [], CHAT[:1]]
    chats += [turns("<|pad|>", "a"), [SYSTEM, *CHAT]]
    rows_of(tokenizer, *chats, counters=counters)
    assert set(counters) >= {"truncated", "tokens_cut", "merged_at_reply_edge", "leading_reply"}
    assert counters["rows"] + dropped(counters) == len(chats)


HI = turns("Hi", "Hello")
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='x') %}{% for _ in 'x' * 60 %}{% set n.x = n.x ~ n.x %}{% endfor %}"
ATTACKS = {
    "folded when it is compiled": ("{{ 'x' * 4000000000 }}", "512 MiB of memory"),
    "made when it is rendered": ("{{ messages[0].content * 2000000000 }}", "512 MiB of memory"),
    "doubled": (DOUBLED, "512 MiB of memory"),
    "loops": ("{% if messages[0].content == 'Hi' %}" + LOOPS + "{% endif %}" + kinds.CHATML, "did not end within"),
    "a long text": ("{{ 'x' * 5000000 }}", "5,000,000 characters"),
    "brackets": ("{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "RecursionError"),
    "too long": ("x" * (1 << 20) + "y", "1,048,577 characters"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_template_that_takes_too_much_is_refused(tmp_path, name):
    template, said = ATTACKS[name]
    # "loops" alone needs the limit of time: the others end by themselves, on a busy machine later
    limit = kinds.seconds_of_a_template(0.5) if name == "loops" else nullcontext()
    folder = kinds.write_tokenizer(tmp_path / "t", template=template)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with limit, refused("E102" if name == "brackets" else "E407", folder, said):
        open_tokenizer(str(folder)).encode_chat(HI)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB, of this process"


def test_a_template_that_was_stopped_and_a_forked_child_leave_the_next_one_alone(tmp_path):
    good = open_tokenizer(str(kinds.write_tokenizer(tmp_path, template=kinds.CHATML)))
    expected = good.encode_chat(HI)
    with refused("E407", "512 MiB of memory"):
        open_tokenizer(str(tmp_path), chat_template="{{ 'x' * 4000000000 }}").encode_chat(HI)
    assert good.encode_chat(HI) == expected
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(rendered("{{ messages[0].content }}", Chat("", HI)) != [("text", "Hi")])
        finally:
            kinds.stop_rendering()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert good.encode_chat(HI) == expected


WRITTEN = (
    "{% set n = namespace(a=1, self=2) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ n.self }}",
    "{% set n = namespace(_a=1) %}{{ n }}",
    "{% set n = namespace() %}{% set n._a = 1 %}",
    "{{ dict(a=1) }}{{ dict.fromkeys('ab') }}{{ dict.__class__ }}",
    "{% for i in 'abcd' %}{% if i == 'b' %}{% continue %}{% elif i == 'd' %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{{ messages | tojson(indent=2) }}\n  {% if true %}\n  a{% endif %}\n",
    "{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}",
    "{{ messages[0].missing is defined }}{{ tools }}{{ documents }}{{ add_generation_prompt }}",
    "{{ messages.append(1) }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ raise_exception('no') }}",
    "{{ ''.join(messages) }}",
    "a{% generation %}b\n{% endgeneration %}c",
)


@pytest.mark.parametrize("template", WRITTEN)
def test_a_template_writes_what_it_writes_in_transformers(template):
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [{"role": "user", "content": "é", "thinking": "Hm.", "name": None}]
    try:
        theirs = ("text", render_jinja_template([[{**chat[0]}]], chat_template=template)[0][0])
    except Exception as error:
        theirs = ("raised", str(error))
    kind, text = rendered(template, Chat("", chat))[0]
    if kind == "text":
        theirs = (theirs[0], theirs[1].replace(", 'name': None", "").replace(',\n    "name": null', ""))
    assert kind == theirs[0] and (kind == "raised" or text == theirs[1])


def test_threads_share_it_and_get_their_own_answers():
    def ask(number):
        chats = [Chat("", [{"role": "user", "content": f"{number} {each}"}]) for each in range(20)]
        return rendered("{{ '\U0001f98a' ~ messages[0].content }}", *chats)

    with ThreadPoolExecutor(4) as pool:
        for number, found in enumerate(pool.map(ask, range(4))):
            assert found == [("text", f"\U0001f98a{number} {each}") for each in range(20)]
