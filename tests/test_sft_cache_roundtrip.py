"""What goes into an sft cache comes out of it: uint16 tokens, valid offsets, and the ids of `format_chat`."""

import numpy as np
import pytest
from support.byte_tokenizer import ByteTokenizer
from support.errors import refused
from support.splits import chat_key

from niels_gpt.cache import SFTExampleDataset, build_sft_cache, read_meta
from niels_gpt.chat_template import format_chat
from niels_gpt.special_tokens import SPECIAL_TOKENS


def chat(*contents, system=None):
    """Return a chat of user and assistant in turns, after a system message if there is one."""
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns


CHATS = [
    chat("What is a tide?", "The sea rises and falls."),
    chat("Why?", "The moon.", "Only?", "And the sun."),
    chat("Hello", "", system="Be brief."),
    chat("naïve — 漢字 🙂", "  two spaces,\n\na line"),
    *(chat(word, str(number)) for number, word in enumerate(("One", "Two", "Three", "Four"), 1)),
]
NUM_VAL = 1


def read_split(cache, split):
    """Read a split with numpy alone, as docs/formats.md tells it."""
    tokens = np.fromfile(cache / f"{split}_tokens.bin", dtype="<u2")
    starts = np.load(cache / f"{split}_idx.npy")
    assert starts.dtype == np.dtype("<i8") and starts.ndim == 1
    return [part.tolist() for part in np.split(tokens, starts[1:])] if len(starts) else []


def build(folder, chats=CHATS, **arguments):
    build_sft_cache(chats, str(folder), **{"tokenizer": ByteTokenizer(), "val_frac": 0.25, "seed": 42, **arguments})
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory, tiny_tokenizer):
    return build(tmp_path_factory.mktemp("sft") / "chats", tokenizer=tiny_tokenizer)


def test_offsets_begin_at_0_ascend_strictly_and_stay_inside_the_tokens(cache):
    for split, count in (("train", 8 - NUM_VAL), ("val", NUM_VAL)):
        starts = np.load(cache / f"{split}_idx.npy")
        size = (cache / f"{split}_tokens.bin").stat().st_size
        assert starts.shape == (count,) and starts[0] == 0 and (np.diff(starts) > 0).all()
        assert size % 2 == 0 and starts[-1] < size // 2


def test_both_splits_are_format_chat_in_the_order_of_the_stream(cache, tiny_tokenizer):
    in_val = {row for row, messages in enumerate(CHATS) if chat_key(messages, 42) < 0.25 * 2**64}
    assert len(in_val) == NUM_VAL
    expected = [format_chat(tiny_tokenizer, messages) for messages in CHATS]
    assert read_split(cache, "val") == [ids for row, ids in enumerate(expected) if row in in_val]
    assert read_split(cache, "train") == [ids for row, ids in enumerate(expected) if row not in in_val]


def test_the_text_of_every_turn_comes_back(cache, tiny_tokenizer):
    found = {tiny_tokenizer.decode(ids) for split in ("train", "val") for ids in read_split(cache, split)}
    sentinel = {"system": SPECIAL_TOKENS[0], "user": SPECIAL_TOKENS[1], "assistant": SPECIAL_TOKENS[2]}
    assert found == {
        "".join(sentinel[message["role"]] + message["content"] + SPECIAL_TOKENS[3] for message in messages)
        for messages in CHATS
    }


def test_the_reader_gives_the_same_examples(cache, tiny_tokenizer):
    eot = tiny_tokenizer.special_token_ids()["eot"]
    for split in ("train", "val"):
        files = (str(cache / f"{split}_tokens.bin"), str(cache / f"{split}_idx.npy"))
        dataset = SFTExampleDataset(*files, T=64, device="cpu", eot_id=eot)
        assert [dataset.example(row).tolist() for row in range(len(dataset))] == read_split(cache, split)


def test_the_totals_are_those_of_the_files_and_supervised_tokens_the_targets(cache):
    meta = read_meta(str(cache / "meta.json"))
    special = meta["special_token_ids"]
    for split in ("train", "val"):
        examples = read_split(cache, split)
        assert meta["totals"][f"{split}_examples"] == meta[f"{split}_examples"] == len(examples)
        assert meta["totals"][f"{split}_tokens"] == meta[f"{split}_tokens"] == sum(map(len, examples))
        targets = 0
        for ids in examples:
            inside = False
            for token in ids:
                targets += inside
                inside = token == special["asst"] or (inside and token != special["eot"])
        assert meta["supervised_tokens"][split] == targets


@pytest.mark.parametrize(
    ("count", "val_frac", "num_val"),
    [(1, 0.5, 0), (2, 0.1, 1), (2, 0.99, 1), (5, 0.0, 0)],
)
def test_val_gets_none_of_one_chat_and_at_least_one_of_two(tmp_path, count, val_frac, num_val):
    cache = build(tmp_path / "c", [chat(str(number), "ok") for number in range(count)], val_frac=val_frac)
    assert (len(read_split(cache, "train")), len(read_split(cache, "val"))) == (count - num_val, num_val)


@pytest.mark.parametrize("val_frac", [-0.1, 1, 1.5, float("nan")])
def test_a_val_frac_outside_0_to_1_is_refused(tmp_path, val_frac):
    with refused("E102", "val_frac"):
        build(tmp_path / "c", val_frac=val_frac)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_chat_is_dropped_and_counted_by_reason(tmp_path):
    user, reply = {"role": "user", "content": "u"}, {"role": "assistant", "content": "r"}
    examples = [
        [user, reply],
        [user],
        [],
        [user, {"role": "tool", "content": "t"}, reply],
        [user, {"role": "assistant", "content": None}],
        [user, {"role": ["assistant"], "content": "r"}],
        [{"content": "r"}],
        "user: u",
        None,
        [{"role": "user", "content": f"a {SPECIAL_TOKENS[2]} b"}, reply],
        [user, {"role": "assistant", "content": "<|eot|>"}],
    ]
    meta = read_meta(str(build(tmp_path / "c", examples, val_frac=0) / "meta.json"))
    assert meta["dropped"] == {"malformed": 5, "no_assistant_turn": 2, "sentinel_in_text": 2, "unknown_role": 1}
    assert (meta["examples_read"], meta["totals"]["train_examples"]) == (11, 1)


def test_on_special_raise_names_the_literal(tmp_path):
    with pytest.raises(ValueError, match=r"<\|usr\|>"):
        build(tmp_path / "c", [chat("<|usr|>", "r")], on_special="raise")


@pytest.mark.parametrize("examples", [[], [chat("a question")]])
def test_a_cache_without_any_example_is_refused_and_not_written(tmp_path, examples):
    with pytest.raises(ValueError, match="no example is left"):
        build(tmp_path / "c", examples)
    assert not (tmp_path / "c").exists()
