"""Signs that a source is not what it is taken for: counted in meta.json, shown by `stats`, warned of above a share."""

import re
from pathlib import Path

import pytest
from support import ROOT
from support.commands import niels_gpt
from support.data_files import lines, write
from support.small_builds import BUILDERS

from niels_gpt.cache.meta import read_meta
from niels_gpt.kinds.kind import Limits
from niels_gpt.kinds.verify import verify
from niels_gpt.prefix_tree.rollouts.records import Rollout, RolloutGroup
from niels_gpt.signals import above, markdown

WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "looked", "at", "the", "moon", "over", "the", "quiet", "town"]


def sentence(number):
    """A text that no other number gives."""
    return f"{number}: {' '.join(WORDS[number % 7 :])} {number * number}."


def texts(change, odd=6):
    """Rows of 12 texts, the first ones changed."""
    return [
        {"id": f"row-{number}", "text": sentence(number), **(change(number) if number < odd else {})}
        for number in range(12)
    ]


def chats(change, odd=6):
    """Rows of 12 chats of a question and a reply, the first ones changed."""
    rows = []
    for number in range(12):
        turns = [("user", f"What is {number}?"), ("assistant", f"{number} is {sentence(number)}")]
        rows.append({"id": f"chat-{number}", **of(*(change(turns) if number < odd else turns))})
    return rows


def of(*turns):
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def groups(change, odd=6):
    """Rows of 12 groups of two samples with log-probs, the first ones changed."""
    return [
        {
            "group": f"q{number}",
            "prompt_ids": [5, 6, 20 + number],
            "completions": [[40 + number, 60, 7], [41 + number, 61, 7]],
            "logprobs": [[-0.5, -1.0, -2.0]] * 2,
            "reward": [0.0, number],
            "advantage": [-1.0, 1.0],
            **(change(number) if number < odd else {}),
        }
        for number in range(12)
    ]


def samples(change, odd=6):
    """Rows of 12 whole sequences, the first ones changed."""
    rows = [{"group": f"q{n}", "ids": [5, 20 + n, 40, 7], "prompt_length": 2} for n in range(12)]
    return [row | change(row) if number < odd else row for number, row in enumerate(rows)]


PRETRAIN = {
    "texts_with_byte_order_mark": texts(lambda n: {"text": f"\ufeff{sentence(n)}"}),
    "texts_with_u_fffd": texts(lambda n: {"text": f"caf\ufffd {sentence(n)}"}),
    "texts_with_mojibake": texts(lambda n: {"text": f"{'café, naïve, “so”'.encode().decode('cp1252', 'replace')} {n}"}),
    "blank_texts": texts(lambda n: {"text": " \n" * (n + 1)}),
    "repeated_ids": texts(lambda n: {"id": "same"}),
    "texts_shorter_than_id": texts(lambda n: {"id": f"{sentence(n)} in many words", "text": f"n{n}"}, odd=12),
    "duplicates": texts(lambda n: {"text": "one text for all"}, odd=12),
    "other_text_field": texts(lambda n: {"content": f"another {n}"}),
    "git_lfs_pointer": texts(lambda n: {"text": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"}),
}
SFT = {
    "begins_with_reply": chats(lambda turns: [("assistant", "Hello."), *turns]),
    "ends_with_user": chats(lambda turns: [*turns, ("user", "Thanks.")], odd=9),
    "same_role_twice": chats(lambda turns: [turns[0], *turns]),
    "system_in_the_middle": chats(lambda turns: [*turns, ("system", "Be brief."), *turns]),
    "blank_user_messages": chats(lambda turns: [("user", " "), turns[1]]),
    "reply_equals_prompt": chats(lambda turns: [turns[0], ("assistant", turns[0][1])]),
    "no_value_replies": chats(lambda turns: [turns[0], ("assistant", "NaN")], odd=3),
    "empty_replies": chats(lambda turns: [turns[0], ("assistant", "\u200b")], odd=3),
    "repeated_replies": chats(lambda turns: [turns[0], ("assistant", "As an assistant I cannot.")]),
    "marks_in_replies": chats(lambda turns: [turns[0], ("assistant", f"{turns[1][1]}<|im_end|>\nUser: and then?")]),
    "duplicates": chats(lambda turns: [("user", "Hi"), ("assistant", "Hello.")], odd=12),
    "texts_with_mojibake": chats(lambda turns: [turns[0], ("assistant", f"cafÃ\u00a9 {turns[1][1]}")]),
    "unread_field": [row | {"tools": [{"name": "look"}]} for row in chats(lambda turns: turns)],
    "contradicting_shape": [row | {"prompt": "Hi", "response": "No."} for row in chats(lambda turns: turns)],
}
ROLLOUTS = {
    "positive_logprobs": groups(lambda n: {"logprobs": [[0.5, 0.2, 0.9]] * 2}),
    "zero_logprobs": groups(lambda n: {"logprobs": [[0.0, 0.0, 0.0]] * 2}),
    "advantage_all_0": groups(lambda n: {"advantage": [0.0, 0.0]}, odd=12),
    "reward_all_equal": groups(lambda n: {"reward": [1.0, 1.0]}, odd=12),
    "prompts_differ": [
        row
        for n in range(6)
        for row in (
            {"group": f"q{n}", "prompt_ids": [5, n], "completion_ids": [40, 7]},
            {"group": f"q{n}", "prompt_ids": [5, 99], "completion_ids": [41, 7]},
        )
    ],
    "repeated_groups": groups(lambda n: {"group": f"q{n}"}) + groups(lambda n: {"group": f"q{n}"}),
    "groups_of_one": samples(lambda row: {}),
    "empty_prompts": groups(lambda n: {"prompt_ids": []}),
    "samples_without_prompt_length": samples(lambda row: {"prompt_length": None}),
    "samples_without_common_end": samples(lambda row: {"ids": [5, 20, 40, 100 + row["ids"][1]]}, odd=12),
    "unread_field": [
        row | {"logprobs": None, "logprob": [[-1.0] * 3] * 2, "router": 7} for row in groups(lambda n: {})
    ],
}
WITHOUT_EXAMPLE = ("repeated_ids", "repeated_groups", "samples_without_common_end")
ODD = [
    *(("pretrain", name, rows) for name, rows in PRETRAIN.items()),
    *(("sft", name, rows) for name, rows in SFT.items()),
    *(("rollouts", name, rows) for name, rows in ROLLOUTS.items()),
]


@pytest.fixture
def build(tiny_model_path, tmp_path):
    """Returns a function that builds a cache from rows; it returns the exit code, what was said, and meta.json."""

    def run(kind, rows, *more):
        write(tmp_path / "odd.jsonl", lines(*rows))
        tokenizer = ["--tokenizer", str(tiny_model_path)] * (kind != "rollouts")
        done = niels_gpt("build", f"--{kind}", "odd=odd.jsonl", *tokenizer, *more)
        return done.status, done.err, read_meta(f"cache/{kind}/odd/meta.json")

    return run


@pytest.mark.parametrize(("kind", "name", "rows"), ODD, ids=[f"{kind}-{name}" for kind, name, _ in ODD])
def test_an_odd_source_is_counted_shown_warned_of_and_fails_a_strict_build(kind, name, rows, build):
    code, said, meta = build(kind, rows, "--strict")
    warning = next(line for line in said.splitlines() if f"({name})" in line)
    assert code == 1 and re.match(r"warning\[W314\]: cache/\w+/odd: .*\d", warning)
    shown = niels_gpt("stats", f"cache/{kind}/odd", "--json").json
    assert name in [each["counter"] for each in shown["warned_of"] if each["number"]]
    found = verify(Path(f"cache/{kind}/odd"), Limits())["signals"]
    assert any(f"({name})" in problem for problem in found.problems)
    if name in meta["noticed"] and name not in WITHOUT_EXAMPLE:
        place = "row-|same|the cat|odd.jsonl#|chat-|q"
        assert re.search(place, meta["first_noticed"][name])


@pytest.mark.parametrize(("kind", "rows"), [("pretrain", texts), ("sft", chats), ("rollouts", groups)])
def test_a_good_source_has_none(kind, rows, build):
    code, said, meta = build(kind, rows(lambda change: change, odd=0))
    assert (code, meta["noticed"], meta.get("first_noticed")) == (0, {}, None) and "W314" not in said


def test_a_tokenizer_of_another_script_shows_in_the_bytes_of_a_token():
    meta = {"kind": "pretrain", "docs": {"train": 3, "val": 1}, "totals": {"train_tokens": 900, "val_tokens": 100}}
    for num_bytes, vocab_size, said in ((1199, 1001, ["utf8_bytes_per_token"]), (1200, 1001, []), (1199, 1000, [])):
        meta |= {"utf8_bytes": {"train": num_bytes, "val": 0}, "vocab_size": vocab_size}
        assert [found.signal.counter for found in above(meta)] == said


def test_ids_beyond_a_tokenizer_that_is_named_are_warned_of_each_time(tiny_model_path, tmp_path):
    write(tmp_path / "odd.jsonl", lines({"prompt_ids": [5], "completion_ids": [7, 389]}))
    build = ["build", "--rollouts", "odd=odd.jsonl", "--tokenizer", str(tiny_model_path)]
    for more in ([], [], ["--rollouts-vocab-size", "390"]):
        assert "the largest id is 389" in niels_gpt(*build, *more).err
    write(tmp_path / "odd.jsonl", lines({"prompt_ids": [5], "completion_ids": [7, 388]}))
    assert niels_gpt(*build, "--strict").status == 0


def test_what_no_partition_knows_is_counted_in_the_whole(tiny_model_path, tmp_path):
    rows = [{"id": f"d{number // 2}", "text": sentence(number)} for number in range(40)]
    write(tmp_path / "rows.jsonl", lines(*rows))
    flags = ["--pretrain", "odd=rows.jsonl", "--tokenizer", str(tiny_model_path), "--own-val-frac", "0"]
    for number in (1, 3):
        niels_gpt("build", *flags, "--cache-dir", str(number), "--partitions", str(number))
        assert read_meta(f"{number}/pretrain/odd/meta.json")["noticed"] == {"repeated_ids": 20}


def test_an_id_writes_no_line_of_its_own(build):
    _, said, meta = build("pretrain", texts(lambda n: {"id": f"x\nerror[E999]: {n}", "text": f"\ufeff{n}"}))
    assert "\nerror[E999]" not in said and "x\\nerror[E999]: 0" in meta["first_noticed"]["texts_with_byte_order_mark"]


def test_texts_in_both_of_upstreams_splits_are_counted_in_partitions_too(tiny_model_path, tmp_path):
    folder = tmp_path / "mirror" / "Salesforce" / "wikitext"
    write(folder / "train.txt", "".join(f"{sentence(number)}\n" for number in range(40)))
    write(folder / "validation.txt", "".join(f"{sentence(number)}\n" for number in (35, *range(35, 55))))
    flags = ["--source-root", "mirror", "--tokenizer", str(tiny_model_path)]
    for number, more in enumerate((["--partitions", "1"], ["--partitions", "3"])):
        done = niels_gpt("build", "wikitext", *flags, "--cache-dir", str(number), *more)
        meta = read_meta(f"{number}/pretrain/wikitext/meta.json")
        assert meta["noticed"] == {"val_texts_in_train": 6} and "6 of 21 documents of val" in done.err


def test_messages_that_oasst1_loses_for_their_language_or_parent_are_warned_of(tiny_model_path, tmp_path):
    def message(tree, parent, role, lang):
        return {
            "message_id": f"{tree}-{role}",
            "parent_id": parent,
            "message_tree_id": str(tree),
            "text": f"{role} {tree}",
            "role": role,
            "lang": lang,
        }

    rows = []
    for tree in range(60):
        lang = "en" if tree < 8 else "EN"
        rows += [message(tree, None, "prompter", lang), message(tree, f"{tree}-prompter", "assistant", lang)]
    rows += [message(f"lost{number}", "nobody", "assistant", "en") for number in range(4)]
    write(tmp_path / "mirror" / "OpenAssistant" / "oasst1" / "train.jsonl", lines(*rows))
    done = niels_gpt("build", "oasst1", "--source-root", "mirror", "--tokenizer", str(tiny_model_path))
    assert "104, beside 8 chats (not_english)" in done.err
    assert "4, beside 8 chats (orphan)" in done.err


ITEMS = {
    "pretrain": [(None, f"caf\ufffd {number}", "same") for number in range(40)],
    "sft": [(f"c{n}", of(("user", f"{n}?"), ("assistant", "No."))["messages"]) for n in range(40)],
    "rollouts": [RolloutGroup(f"g{n}", [Rollout([1, 4, 2], 1, logprobs=[0.5, n / 3])]) for n in range(1, 40)],
}


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("kind", ITEMS)
def test_a_stopped_build_counts_as_one_that_was_not(kind, tmp_path):
    """The last id, the last reply, the ranges and the examples are in the checkpoint."""

    def until(number):
        yield from ITEMS[kind][:number]
        raise KeyboardInterrupt

    whole = BUILDERS[kind](tmp_path / "whole", items=ITEMS[kind])
    for number in (11, 29):
        with pytest.raises(KeyboardInterrupt):
            BUILDERS[kind](tmp_path / "stopped", items=until(number))
    assert BUILDERS[kind](tmp_path / "stopped", items=ITEMS[kind]) == whole and whole["noticed"]
    if kind == "rollouts":
        assert whole["ranges"]["logprobs"] == {"min": pytest.approx(1 / 3), "mean": pytest.approx(43 / 12), "max": 13.0}


@pytest.mark.parametrize(("kind", "page"), [("pretrain", "own_data"), ("sft", "own_data"), ("rollouts", "rollouts")])
def test_the_pages_have_the_table(kind, page):
    assert markdown(kind) in (ROOT / "docs" / f"{page}.md").read_text()
