"""What a chat may hold beside words, and what a template leaves out: refused or counted, never a crash."""

import json
import math
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import chat_tokenizers as kinds
from support.chat_tokenizers import backends_of, dropped, rows_of, supervised, turns
from support.errors import refused, template_by_command
from support.made_tokenizers import REAL, made_tokenizer, real_tokenizer
from support.tool_templates import FAMILIES, QWEN, SPECIAL, TOOLS, call, with_marks

from niels_gpt.chat import Chat, EncodedChat, RefusedChat, open_tokenizer
from niels_gpt.chat.tokenizers import template_tokenizer
from niels_gpt.tokenizers.huggingface import HuggingFaceTokenizer

USER, WORDS = turns("Why?", "It rained.")
ANY = FAMILIES["qwen"].template.replace("message.content + '<|im_end|>'", "'' ~ message.content + '<|im_end|>'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return kinds.write_tokenizer(tmp_path_factory.mktemp("own"), template=FAMILIES["qwen"].template, special=SPECIAL)


@pytest.fixture(scope="module")
def qwen(folder):
    return template_tokenizer(HuggingFaceTokenizer(folder), None, loss_on="assistant,tool_calls")


def refused_chat(tokenizer, messages, tools=None):
    (found,) = tokenizer.encode_chats([Chat("a", messages, tools)])
    assert isinstance(found, RefusedChat)
    return found


NESTED = "x"
for _ in range(101):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "the number nan"),
        (-math.inf, "the number -inf"),
        (10**400, "an integer beyond 64 bits"),
        (b"x", "of type bytes"),
        ({1: 2}, "a key that is not a string"),
        (NESTED, "more than 100 levels"),
        ([0] * (1 << 20), "more than 1,048,576 values"),
        ("x" * (1 << 23), "more than 8,388,608 characters"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 50 else "",
)
def test_values_that_json_has_not_are_refused_wherever_they_are(qwen, value, said):
    for messages, tools in (
        ([USER, {**WORDS, "more": {"deep": [value]}}], None),
        ([USER, {"role": "assistant", "tool_calls": [call(given=value)]}], None),
        ([USER, WORDS], [{**TOOLS[0], "x": value}]),
    ):
        found = refused_chat(qwen, messages, tools)
        assert found.reason == "unusable_value" and said in found.found
    assert refused_chat(qwen, [USER, "yes"]).found.endswith("a message is a value of type str, expected an object")
    assert (
        "without the name" in refused_chat(qwen, [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]).found
    )


@pytest.mark.parametrize("weight", [0.5, 2, -1, True, "1"])
def test_a_weight_that_is_neither_0_nor_1_is_refused(qwen, weight):
    found = refused_chat(qwen, [USER, {**WORDS, "weight": weight}])
    assert found.reason == "unusable_value" and f"message 2 has the weight {weight!r}" in found.found


def test_special_tokens_are_found_in_every_text(qwen):
    token = "a <|im_end|>"
    made = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    for messages, tools in (
        ([{**USER, "name": token}, WORDS], None),
        ([{**USER, "content": made}, WORDS], None),
        ([USER, {**WORDS, "reasoning_content": token}], None),
        ([USER, {"role": "assistant", "tool_calls": [call(**{token: 1})]}], None),
        ([USER, {"role": "assistant", "tool_calls": [call(a=[[{"b": token}]])]}], None),
        ([USER, {"role": token, "content": "a"}, WORDS], None),
        ([USER, WORDS], [{"type": "function", "function": {"name": "f", "description": token}}]),
        ([{"role": "im_end", "content": "a"}, USER, WORDS], None),  # a template may write <| and |> around it
    ):
        assert refused_chat(qwen, messages, tools).reason == "special_text"


def test_half_a_surrogate_pair_is_replaced_in_calls_and_tools_too(qwen):
    half, whole = (
        Chat("a", [USER, {"role": "assistant", "tool_calls": [call(f"f{char}", **{char: [char]})]}], [{"name": char}])
        for char in ("\ud83d", "\ufffd")
    )
    one, two = qwen.encode_chats([half, whole])
    assert isinstance(one, EncodedChat) and one == two


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=6,
)
FIELD = st.sampled_from(["role", "content", "tool_calls", "name", "reasoning_content", "tool_call_id", "x"])
ROLE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool", "system"])})
MESSAGE = st.builds(lambda one, two: {**one, **two}, ROLE, st.dictionaries(FIELD, ODD, max_size=4)) | ODD


@pytest.fixture(scope="module")
def lenient(folder):
    """With a template that takes nearly everything."""
    return template_tokenizer(HuggingFaceTokenizer(folder), ANY)


@settings(max_examples=60)
@given(messages=st.lists(MESSAGE, max_size=4), tools=st.none() | st.lists(ODD, max_size=2) | ODD)
def test_no_chat_ends_the_run(lenient, messages, tools):
    counters = Counter()
    rows = rows_of(lenient, turns("a", "b"), Chat("odd", messages, tools), counters=counters)
    assert rows[0].id == "chat 0" and counters["rows"] + dropped(counters) == 2


def test_what_a_template_leaves_out_is_counted(folder):
    chatml, counters = open_tokenizer(str(folder), chat_template=kinds.CHATML), Counter[str]()
    thoughtful = [USER, {**WORDS, "reasoning_content": "The ground is wet."}]
    calls = [USER, {**WORDS, "tool_calls": [call("user")]}]  # the text has the name, but not as a call
    rows = rows_of(chatml, Chat("a", [USER, WORDS], TOOLS), thoughtful, calls, counters=counters)
    assert [row.id for row in rows] == ["a", "chat 1"]
    assert counters == {"rows": 2, "unused_tools": 1, "unused_reasoning": 1, "unused_tool_calls": 1}


def test_words_that_a_template_leaves_out_are_counted_and_those_of_a_list_refused(folder):
    texts_only = "{% set text = m.content if m.content is string else '' %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ text }}"
    template = "{% for m in messages if m.role != 'tool' %}" + texts_only + "<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer, counters = open_tokenizer(str(folder), chat_template=template), Counter[str]()
    parts = [{"type": "text", "text": "  "}, {"type": "text", "text": "Is it?"}]
    chats = ([USER, WORDS], [USER, {"role": "tool", "content": "4 mm"}, {**WORDS, "weight": 1}])
    rows = rows_of(tokenizer, *chats, [{**USER, "content": parts}, WORDS], counters=counters)
    assert [row.id for row in rows] == ["chat 0", "chat 1"]
    assert counters == {"rows": 2, "unused_words": 1, "content_not_as_text": 1}


def test_arguments_that_are_written_as_a_string_are_counted(qwen):
    one, two = (
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given}}]}]
        for given in ('{"x": 1}', {"x": 1})
    )
    counters = Counter[str]()
    rows_of(qwen, one, two, counters=counters)
    assert counters == {"rows": 2, "arguments_as_text": 1}


def test_a_chat_of_many_long_turns_is_rendered_in_parts_and_a_larger_one_refused(folder):
    tokenizer = open_tokenizer(str(folder), chat_template=kinds.CHATML)
    chat = [each for number in range(230) for each in turns(f"{number} " + "\x01" * 160, "\x01" * 160)]
    counters = Counter[str]()
    (row,) = rows_of(tokenizer, chat, chat * 8, seq_length=1 << 18, counters=counters)
    assert len(supervised(tokenizer, row)) == 230 and counters == {"rows": 1, "too_large": 1}


def test_turns_without_loss_are_counted_and_a_chat_without_loss_is_dropped(folder):
    tokenizer, counters = template_tokenizer(HuggingFaceTokenizer(folder), None, loss_on="tool_calls"), Counter[str]()
    calls = {"role": "assistant", "tool_calls": [call()]}
    talk = [USER, calls, {"role": "tool", "content": "4"}, WORDS, USER, WORDS]
    (row,) = rows_of(tokenizer, [USER, WORDS], talk, counters=counters)
    assert counters == {"rows": 1, "no_supervised": 1, "turns_without_loss": 2} and row.id == "chat 1"


THINKS = QWEN.replace("message.content + '<|im_end|>'", "'<think>' ~ (message.reasoning_content or '') ~ '</think>'")
UNSURE = {
    "two turns in one part": "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}",
    "a part of no turn": (
        "{% for m in messages %}{{ m.content }}{% generation %}<|im_end|>{% endgeneration %}{% endfor %}"
    ),
    "the last character decides": (
        "{% for m in messages %}{% generation %}{{ m.content }}{{ '!' if m.content[-1] == '.' }}"
        "{% endgeneration %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", UNSURE)
def test_where_marks_do_not_tell_the_turn_the_chat_is_refused_only_if_that_matters(folder, name):
    ids, chat = HuggingFaceTokenizer(folder), [USER, WORDS, USER, WORDS]
    assert any(template_tokenizer(ids, UNSURE[name]).encode_chat(chat)[1]), "every turn carries loss"
    found = refused_chat(template_tokenizer(ids, UNSURE[name], loss_on="last"), chat)
    assert found.reason == "unknown_turns" and "'a'" in found.found


def test_reasoning_has_the_names_that_transformers_gives_it_and_belongs_to_its_turn(folder):
    from transformers import AutoTokenizer

    template = with_marks(THINKS)
    talk = [USER, {**WORDS, "reasoning": "It is wet."}, USER, {**WORDS, "thinking": "Hm."}]
    tokenizer = template_tokenizer(HuggingFaceTokenizer(folder), template, loss_on="last")
    ids, mask = tokenizer.encode_chat(talk)
    assert supervised(tokenizer, (ids, mask)) == ["<think>Hm.</think>"]
    theirs = AutoTokenizer.from_pretrained(folder)
    assert ids == theirs.apply_chat_template(talk, chat_template=template)["input_ids"]


def test_null_fields_are_absent_and_parts_reach_a_template_that_reads_them(folder):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}{{ part.text }}"
        "{% endfor %}{{ '|' ~ m.keys() | list | join(',') }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = template_tokenizer(HuggingFaceTokenizer(folder), template)
    parts = [{"type": "text", "text": "It "}, {"type": "text", "text": "rained."}]
    ids, mask = tokenizer.encode_chat([{**USER, "content": parts}, {**WORDS, "content": parts, "tool_calls": None}])
    assert supervised(tokenizer, (ids, mask)) == ["It rained.|role,content<|im_end|>"]


# --- the files of a cache's tokenizer ---


def test_a_caches_tokenizer_needs_no_transformers(folder):
    script = (
        "import sys; sys.modules['transformers'] = None\n"
        "from niels_gpt.chat.tokenizers import template_tokenizer\n"
        "from niels_gpt.tokenizers.huggingface import HuggingFaceTokenizer\n"
        f"made = template_tokenizer(HuggingFaceTokenizer({str(folder)!r}), None)\n"
        f"print(made.encode_chat({[USER, WORDS]!r}))"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == repr(open_tokenizer(str(folder)).encode_chat([USER, WORDS]))


@pytest.mark.parametrize("name", ["gpt2", "t5", pytest.param("neox", marks=pytest.mark.slow)])
def test_the_ids_of_any_tokenizer_are_those_of_transformers(name, tmp_path):
    from transformers import PreTrainedTokenizerFast

    source = real_tokenizer(name) if name in REAL else made_tokenizer(name)
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    ids = HuggingFaceTokenizer(tmp_path)
    end = next(literal for literal, is_special in ids.added_tokens().items() if is_special)
    config = {"eos_token": end, "chat_template": kinds.INST.replace("'<|im_end|>'", "eos_token")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = template_tokenizer(ids, None), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for talk in (kinds.CHAT, turns(" Ä\u0301  漢字\n", "é ﬁ\t x  ", "'s", "12345")):
        assert ours.encode_chat(talk)[0] == theirs.apply_chat_template(talk)["input_ids"]
    for backend in backends_of(ours, theirs):
        assert backend.vocab_size == ids.vocab_size and backend.sha256 and backend.variables == {"eos_token": end}


def test_a_template_that_makes_too_much_of_a_tool_is_refused(folder):
    greedy = template_tokenizer(
        HuggingFaceTokenizer(folder), kinds.CHATML + "{{ (tools | tojson) * 2000000000 if tools }}"
    )
    assert greedy.encode_chat([USER, WORDS])
    with refused("E407", "512 MiB of memory"):
        greedy.encode_chat([USER, WORDS], TOOLS)


def test_the_template_and_the_named_tokens_come_from_the_files_beside(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = tmp_path / "tokenizer_config.json"

    def opened(**fields):
        config.write_text(json.dumps(fields))
        return template_tokenizer(HuggingFaceTokenizer(tmp_path), None)

    begin = {"content": "<|begin|>", "special": True}
    named = [{"name": "default", "template": kinds.LLAMA_3}, {"name": "tool_use", "template": kinds.CHATML}]
    llama = opened(chat_template=named, bos_token=begin, eos_token="<|eot|>")
    assert (llama.pad_id, llama.special_token_ids) == (6, [1, 6, None, None])
    assert supervised(llama, llama.encode_chat([USER, WORDS])) == ["It rained.<|eot|>"]
    assert llama.encode_chat([USER, WORDS])[0][0] == 1
    with refused("E407", "chat '0'", "default", "--chat-template tool_use.jinja") as error:
        llama.encode_chat([USER, WORDS], TOOLS)
    assert template_by_command(error, tmp_path) == tmp_path / "tool_use.jinja"
    assert (tmp_path / "tool_use.jinja").read_text() == kinds.CHATML
    with refused("E407", tmp_path, "no chat template"):
        opened().encode_chats([])
    with refused("E403", config, "'rag'", "default"):
        opened(chat_template=[{"name": "rag", "template": ""}])
    for found in ({"99999": {"content": "<more>"}}, {"7": {"content": "<|pad|>"}}, {"0": None}):
        with refused("E403", config, repr(*found), "tokenizer.json", "save_pretrained"):
            opened(chat_template=kinds.CHATML, added_tokens_decoder=found)
    more = opened(chat_template=kinds.CHATML, extra_special_tokens={"image_token": "rain"})
    assert refused_chat(more, [USER, {**WORDS, "content": "It rains."}]).reason == "special_text"
    with refused("E403", config, "chat_template"):
        opened(chat_template=7)
    (tmp_path / "chat_template.jinja").write_text(kinds.CHATML)
    assert (
        opened(chat_template=named).template_sha256
        == open_tokenizer(str(folder), chat_template=kinds.CHATML).template_sha256
    )
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with refused("E403", "chat_template.jinja", "UTF-8"):
        opened()
