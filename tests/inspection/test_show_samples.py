"""The table of decoded examples: evenly taken, short, with what carries loss in [[ ]]."""

import pytest
from support.byte_tokenizer import ByteTokenizer
from support.errors import refused

from niels_gpt.builders.meta_keys import Source
from niels_gpt.builders.pretrain import build_pretrain, build_stub
from niels_gpt.cache import build_sft_cache
from niels_gpt.kinds.look import sample_texts

Row = dict[str, str | int]
HERON = "The heron walks to the river and finds 3 apples."
LONG = " ".join([HERON] * 20)


def of_chat(path, tokenizer, *texts, num_tokens=120):
    """Return the row of a cache of one chat, whose user speaks first."""
    turns = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
    build_sft_cache([turns], str(path), tokenizer=tokenizer, val_frac=0, seed=0)
    (row,) = sample_texts(path, tokenizer, num_tokens=num_tokens)
    return row


def of_documents(path, tokenizer, texts, **arguments):
    """Return the rows of a cache of some documents, all of them train."""
    fixed = {"max_train_tokens": None, "max_val_tokens": 0, "shard_bytes": 64, "shuffle_buffer": None}
    build_pretrain((("train", text) for text in texts), path, tokenizer=tokenizer, seed=0, document_end="eot", **fixed)
    return sample_texts(path, tokenizer, **arguments)


def test_a_short_example_is_whole_and_its_reply_is_marked(tmp_path, tiny_tokenizer):
    row = of_chat(tmp_path / "sft", tiny_tokenizer, "Why?", "It was windy.")
    reply = len(tiny_tokenizer.encode("It was windy.")) + 1
    assert row == {
        "split": "train",
        "number": 0,
        "tokens": len(tiny_tokenizer.encode("Why?")) + 3 + reply,
        "with_loss": reply,
        "text": "<|usr|>Why?<|eot|><|asst|>[[It was windy.<|eot|>]]",
    }


def test_each_message_of_a_long_example_is_cut_and_the_replies_stay_marked(tmp_path, tiny_tokenizer):
    row = of_chat(tmp_path / "sft", tiny_tokenizer, LONG, LONG, "Why?", LONG, num_tokens=60)
    assert int(row["tokens"]) > 1000
    user, *rest = str(row["text"]).split("<|eot|><|asst|>[[")
    first, second = rest
    begin, end = "<|usr|>The heron ", " …"
    assert user.startswith(begin) and user.endswith(end)
    assert first.startswith("The heron ") and first.endswith(" …<|eot|>]]<|usr|>Why?")
    assert second.startswith("The heron ") and second.endswith(" …<|eot|>]]")
    shown = str(row["text"]).replace(end, "").replace("[[", "").replace("]]", "")
    for name in ("usr", "asst", "eot"):
        shown = shown.replace(f"<|{name}|>", "")
    assert len(tiny_tokenizer.encode(shown)) + 8 <= 60


def test_a_long_question_does_not_push_the_reply_out_and_a_chat_may_end_there(tmp_path, tiny_tokenizer):
    row = of_chat(tmp_path / "sft", tiny_tokenizer, LONG, "Yes.", num_tokens=1)
    assert str(row["text"]).startswith("<|usr|>The heron")
    assert str(row["text"]).endswith(" …<|eot|><|asst|>[[Yes.<|eot|>]]")
    row = of_chat(tmp_path / "many", tiny_tokenizer, *["Why?", "Yes."] * 15, num_tokens=30)
    assert str(row["text"]).startswith("<|usr|>Why?<|eot|><|asst|>[[Yes.<|eot|>]]<|usr|>Why?<|eot|><|asst|>[[Yes.")
    assert str(row["text"]).endswith("<|asst|> …")


def test_documents_are_taken_evenly_and_begin_with_their_first_tokens(tmp_path, tiny_tokenizer):
    texts = [f"Page {number}. {LONG if number else ''}" for number in range(9)]
    rows = of_documents(tmp_path / "own", tiny_tokenizer, texts, num_tokens=40)
    assert [(row["split"], row["number"]) for row in rows] == [("train", 0), ("train", 4), ("train", 8)]
    assert [row["tokens"] for row in rows] == [len(tiny_tokenizer.encode(texts[n])) + 1 for n in (0, 4, 8)]
    assert rows[0]["text"] == texts[0] + "<|eot|>"
    for row in rows[1:]:  # forty tokens go over two shards of 32
        assert row["text"] == tiny_tokenizer.decode(tiny_tokenizer.encode(texts[int(row["number"])])[:40]) + " …"
        assert "with_loss" not in row


@pytest.mark.parametrize(("wanted", "numbers"), [(1, [0]), (2, [0, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3]), (9, 4)])
def test_no_more_rows_than_documents(tmp_path, tiny_tokenizer, wanted, numbers):
    rows = of_documents(tmp_path / "own", tiny_tokenizer, [HERON] * 4, per_split=wanted)
    assert [row["number"] for row in rows] == (list(range(numbers)) if isinstance(numbers, int) else numbers)


def test_equal_calls_give_equal_rows_of_both_splits(tmp_path, tiny_tokenizer):
    chats = [[{"role": "user", "content": f"Page {n}?"}, {"role": "assistant", "content": HERON}] for n in range(20)]
    build_sft_cache(chats, str(tmp_path / "sft"), tokenizer=tiny_tokenizer, val_frac=0.2, seed=0)
    rows = sample_texts(tmp_path / "sft", tiny_tokenizer)
    assert rows == sample_texts(tmp_path / "sft", tiny_tokenizer)
    assert [(row["split"], row["number"]) for row in rows] == [
        *(("train", 0), ("train", 8), ("train", 17)),
        *(("val", 0), ("val", 1)),
    ]


def test_another_tokenizer_and_senseless_numbers_are_refused(tmp_path, tiny_tokenizer):
    of_documents(tmp_path / "own", tiny_tokenizer, [HERON])
    build_stub(tmp_path / "s", tokenizer=tiny_tokenizer, source=Source(), seed=0, shard_bytes=20)
    assert sample_texts(tmp_path / "s", tiny_tokenizer) == []

    class Other(ByteTokenizer):
        sha256 = "0" * 64

    with refused("E402", "000000000000"):
        sample_texts(tmp_path / "own", Other())
    for name in ("per_split", "num_tokens"):
        with refused("E102", f"{name}=0"):
            sample_texts(tmp_path / "own", tiny_tokenizer, **{name: 0})
