"""Sft caches of another chat template: their bytes on paper, what is dropped, and what makes another build of one."""

import json

import numpy as np
import pytest
from support.byte_tokenizer import ByteChats, encoded_chat, refused_chat
from support.disk import versions_dir
from support.errors import refused
from support.fault_builds import interrupt, unfinished, uninterrupted
from support.small_builds import templated


def chat(*texts):
    """Return messages of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def tokens_and_bits(cache, split):
    return list((cache / f"{split}_tokens.bin").read_bytes()), list((cache / f"{split}_loss.bits").read_bytes())


def test_the_bytes_of_two_chats_on_paper(tmp_path):
    meta = templated(tmp_path / "c", items=[("a", chat("A", "B")), ("b", chat("Hi", "Yes", "A", ""))], val_frac=0)
    ids = [2, 75, 4, 3, 76, 4, 2, 82, 115, 4, 3, 99, 111, 125, 4, 2, 75, 4, 3, 4]
    bits = [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1]
    as_bytes = [sum(bit << place for place, bit in enumerate(bits[at : at + 8])) for at in range(0, 20, 8)]
    assert as_bytes == [0b00110000, 0b01111000, 0b1000]
    assert tokens_and_bits(tmp_path / "c", "train") == ([half for id in ids for half in (id, 0)], as_bytes)
    assert tokens_and_bits(tmp_path / "c", "val") == ([], [])
    assert np.load(tmp_path / "c" / "train_idx.npy").tolist() == [0, 6]
    assert meta["chat_template"] == {"sha256": "1" * 64, "mask_by": "prefix", "loss_on": "assistant"}
    assert (meta["pad_id"], meta["supervised_tokens"]) == (0, {"train": 7, "val": 0})
    assert meta["loss_bits"]["train"]["name"] == "train_loss.bits" and meta["loss_bits"]["train"]["bytes"] == 3
    assert meta["utf8_bytes"] == {"train": 8, "val": 0}


class Odd(ByteChats):
    """Refuses, marks the first token, and counts what is odd, as the words of a chat say."""

    def encoded(self, chat):
        words = chat.messages[0]["content"]
        if words == "refuse":
            return refused_chat("refused_by_template", f"chat {chat.name!r}: roles must alternate")
        if words == "first":
            return encoded_chat([5, 6], [1, 0])
        if words == "both":
            return encoded_chat([5, 6], [1, 1])
        return encoded_chat(
            [7, 8], [0, 1], words == "merged", ("empty_reply",) * (words == "empty"), int(words == "two")
        )


def test_every_chat_is_kept_or_counted(tmp_path, caplog):
    kept = [(word, chat(word)) for word in ("both", "merged", "empty", "two")]
    dropped = [
        ("no message", []),
        ("no list", "text"),
        ("no role", [{"content": "x"}]),
        ("no JSON", [{"role": "user", "content": {1, 2}}]),
        ("NaN", [{"role": "user", "content": float("nan")}]),
        ("the first alone", chat("first")),
        ("refused", chat("refuse")),
        ("refused again", chat("refuse")),
    ]
    meta = templated(tmp_path / "c", items=[*dropped, *kept], val_frac=0, chat_tokenizer=Odd())
    assert meta["dropped"] == {"empty": 1, "malformed": 4, "no_supervised": 1, "refused_by_template": 2}
    assert meta["noticed"] == {
        "merged_at_reply_edge": 1,
        "empty_reply": 1,
        "turns_without_loss": 1,
        "ends_with_user": 4,
    }
    assert meta["examples_read"] == 12 and meta["supervised_tokens"]["train"] == 4  # of "both" the second token
    assert caplog.text.count("roles must alternate") == 1 and "Counted as refused_by_template" in caplog.text
    assert (tmp_path / "c" / "index" / "train_ids.txt").read_text() == "both\nmerged\nempty\ntwo\n"


NOTHING_LEFT = [
    ("no_supervised", "assistant", "E303", "name other turns with --loss-on, or with --chat-template a file"),
    ("refused_by_template", "assistant", "E303", "a template that takes these chats: --chat-template FILE"),
    ("special_text", "assistant", "E303", "The first: chat 'b': why."),
    ("not_prefix_stable", "assistant", "E407", "--loss-on last. Name a file with a template that puts"),
    ("not_prefix_stable", "last", "E407", "chat 'b': why. Name a file with a template that puts"),
]


@pytest.mark.parametrize(("reason", "loss_on", "code", "said"), NOTHING_LEFT)
def test_no_target_at_all_is_an_error_that_counts_and_says_what_helps(tmp_path, reason, loss_on, code, said):
    class Never(ByteChats):
        def encoded(self, chat):
            return refused_chat(reason, f"chat {chat.name!r}: why")

    never = type("", (Never,), {"loss_on": loss_on})()
    with refused(code, "no chat with a target is left", f"'{reason}': 1", "'malformed': 1", said) as error:
        templated(tmp_path / "c", items=[("a", "text"), ("b", chat("x"))], chat_tokenizer=never)
    assert ("--loss-on" in str(error.value)) == ("--loss-on" in said) and not (tmp_path / "c").exists()


@pytest.mark.usefixtures("small_batches")
def test_a_template_that_is_stable_for_none_of_the_first_hundred_chats_ends_the_build(tmp_path):
    class Unstable(ByteChats):
        def encoded(self, chat):
            unstable = refused_chat("not_prefix_stable", f"chat {chat.name!r}: why")
            return unstable if chat.name.isdecimal() else super().encoded(chat)

    items = [(str(number), chat("A", "B")) for number in range(200)]
    meta = templated(tmp_path / "c", items=[("first", items[0][1]), *items], chat_tokenizer=Unstable())
    assert meta["dropped"] == {"not_prefix_stable": 200}
    with refused("E407", "'not_prefix_stable': 100,", "--loss-on last"):
        templated(tmp_path / "d", items=[*items, ("last", items[0][1])], chat_tokenizer=Unstable())


def test_an_id_outside_the_vocabulary_is_named(tmp_path):
    class Larger(ByteChats):
        def encoded(self, chat):
            return encoded_chat([1, 300], [0, 1])

    with refused("E409", "chat 'a'", "id 300", "vocab_size=300"):
        templated(tmp_path / "c", items=[("a", chat("A", "B"))], chat_tokenizer=Larger())


def test_a_special_token_in_a_message_drops_the_chat_or_stops_the_build(tmp_path):
    items = [("a", chat("<|eot|>", "B")), ("b", chat("A", "B"))]
    assert templated(tmp_path / "c", items=items)["dropped"] == {"special_text": 1}
    with refused("E305", "chat 'a'", "--on-special drop"):
        templated(tmp_path / "c", items=items, on_special="raise")


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("other", [{"template_sha256": "2" * 64}, {"loss_on": "last"}, {"names_sha256": "3" * 64}])
def test_another_template_is_another_build_and_leaves_the_first_one(folder, other):
    interrupt("templated", folder / "c", 30)
    first = unfinished(folder / "c", ".journal")
    templated(folder / "c", chat_tokenizer=type("", (ByteChats,), other)())
    assert first.is_dir() and len(list(versions_dir(folder / "c").glob("building-*.journal"))) == 1
    templated(folder / "c")
    assert not first.exists()


def test_what_a_template_gets_is_what_is_compared(tmp_path):
    """A template may write keys in their order, so a resumed build compares it; equal chats are equal in any order."""

    class AsJson(ByteChats):
        def encoded(self, chat):
            text = json.dumps([chat.messages, chat.tools])
            return encoded_chat([2, *self.tokenizer.encode(text)], [0] + [1] * len(text))

    one = [{"role": "assistant", "content": "x", "tool_calls": [{"name": "f"}]}]
    turned = [dict(reversed(list(one[0].items())))]
    items = [("a", one), ("b", turned), ("c", one, [{"name": "f"}]), ("d", chat("A", "B"))]
    meta = templated(tmp_path / "c", items=items, val_frac=0, chat_tokenizer=AsJson())
    assert meta["duplicates"] == {"train": 1, "val": 0}  # b
    ids = np.fromfile(tmp_path / "c" / "train_tokens.bin", dtype="<u2")
    begins = np.load(tmp_path / "c" / "train_idx.npy")
    second = bytes((ids[begins[1] + 1 : begins[2]] - 10).astype(np.uint8)).decode()
    assert second == json.dumps([turned, None])


@pytest.mark.usefixtures("small_batches")
def test_threads_change_no_byte(folder):
    assert uninterrupted("templated", folder / "a") == uninterrupted("templated", folder / "b", num_threads=3)


def test_a_chat_that_waits_for_val_is_rendered_before_only_if_its_key_is_the_least_or_greatest_one(tmp_path):
    rendered = []

    class Noting(ByteChats):
        def encoded(self, chat):
            rendered.append(chat.name)
            return super().encoded(chat)

    items = [(str(number), chat(f"question {number}", "answer")) for number in range(300)]
    meta = templated(tmp_path / "c", items=items, chat_tokenizer=Noting(), val_frac=1e-9)
    assert meta["totals"]["val_examples"] == 1, "all waited until the stream had ended"
    assert set(rendered) == {name for name, _ in items} and len(items) + 2 < len(rendered) < len(items) + 30
