"""Caches of other chat templates, whose loss is in bits: what the commands that look into them print and count."""

import json

import pytest
from support.byte_tokenizer import ByteChats, ByteTokenizer
from support.looking import blocks_of
from support.small_builds import templated
from support.small_caches import change_meta

from niels_gpt.cache import SFTExampleDataset, read_meta
from niels_gpt.cache.documents import supervised_counts
from niels_gpt.display.decoded import Decoded
from niels_gpt.kinds.diff import diff
from niels_gpt.kinds.kind import Limits
from niels_gpt.kinds.look import locate, show, stats
from niels_gpt.kinds.verify import find_damage, verify

GREEN, DIM, CYAN, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[36m", "\x1b[0m"


class Marked(ByteTokenizer):
    """A tokenizer without the project's sentinels: ids 1 to 4 are special tokens of its own."""

    sha256, control_ids = "0" * 64, frozenset({1, 2, 3, 4})

    def special_token_ids(self):
        return {}

    def token(self, id):
        return {1: "<sys>", 2: "<user>", 3: "<reply>", 4: "<end>"}[id]


class EveryTurn(ByteChats):
    """The same template with loss on more."""

    loss_on = "assistant,tool_calls"


def chats(count):
    """Chats of 17 tokens, 2 + 4 of them supervised: a line end begins the first message, and is part of it."""
    turns = (("user", "\nabc"), ("assistant", "d"), ("user", "e"), ("assistant", "f\x1b?"))
    messages = [{"role": role, "content": text} for role, text in turns]
    return [
        (f"chat {number}", [*messages[:-1], {**messages[-1], "content": f"f\x1b{number}"}], None)
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of three examples of train and two of val."""
    path = tmp_path_factory.mktemp("templates") / "sft" / "other"
    templated(path, items=chats(5), tokenizer=Marked())
    return path


def test_an_example_is_shown_with_its_targets_and_special_tokens(cache):
    for split in ("train", "val"):
        plain = show(cache, Marked(), split=split, position=0, num_tokens=99, color=False).split("\n", 2)
        number = int(plain[2][-8])
        assert plain[0] == f"{cache}/{split}: example 0 of {3 if split == 'train' else 2}, 17 tokens, 6 supervised"
        assert plain[2] == f"<user>\nabc<end><reply>[[d<end>]]<user>e<end><reply>[[f\\x1b{number}<end>]]"
    colored = show(cache, Marked(), split="val", position=0, num_tokens=99, color=True).split("\n", 2)[2]
    assert colored == (
        f"{CYAN}<user>{PLAIN}{DIM}\nabc{PLAIN}{CYAN}<end><reply>{PLAIN}{GREEN}d<end>{PLAIN}{CYAN}<user>{PLAIN}"
        f"{DIM}e{PLAIN}{CYAN}<end><reply>{PLAIN}{GREEN}f\\x1b{number}<end>{PLAIN}"
    )
    assert show(cache, Marked(), split="val", position=0, num_tokens=8, color=False).endswith("<end><reply>[[d]]")


def test_a_located_token_is_of_its_example(cache):
    found = locate(cache, Marked(), split="train", position=17, num_tokens=99)
    assert "example:      1 of 3, 17 tokens" in found and found.endswith("<end>") and "[[<user>]]\nabc" in found


def test_stats_name_the_template_and_count_the_bits(cache):
    table, meta = dict(stats(cache)), read_meta(str(cache / "meta.json"))
    assert table["chat template"] == "111111111111, mask by prefix, loss on assistant"
    assert "51 tokens in 3 examples" in table["train"] and "35% supervised" in table["train"]
    assert [supervised_counts(cache.resolve(), meta, split).tolist() for split in ("train", "val")] == [
        [6] * 3,
        [6] * 2,
    ]
    assert find_damage(cache, deep=True) == []
    verdicts = verify(cache, Limits(deep=True), names=("files_match_meta", "readers_open", "examples_supervised"))
    assert not any(verdict.problems for verdict in verdicts.values())


@pytest.mark.parametrize("tokens", [1, 16, 17, 50, 1 << 22])
def test_supervised_tokens_are_counted_in_blocks_of_any_size(cache, tokens):
    meta = read_meta(str(cache / "meta.json"))
    with blocks_of(counted_tokens=tokens):
        assert supervised_counts(cache.resolve(), meta, "train").tolist() == [6] * 3


def test_a_wrong_sum_of_targets_is_a_failed_check(cache, tmp_path):
    templated(tmp_path / "other", items=chats(5), tokenizer=Marked())
    change_meta((tmp_path / "other").resolve(), supervised_tokens={"train": 17, "val": 12})
    verdict = verify(tmp_path / "other", Limits(), names=("examples_supervised",))["examples_supervised"]
    assert ["supervised_tokens.train is 17, but 18 tokens carry loss" in problem for problem in verdict.problems] == [
        True
    ]


def test_diff_names_the_template_the_turns_with_loss_and_other_bits(cache, tmp_path):
    tokenizer = Marked()
    templated(tmp_path / "b", items=chats(5), tokenizer=tokenizer, chat_tokenizer=EveryTurn(tokenizer))
    found = diff(cache, tmp_path / "b", tokenizers=(None, None), limit=3)
    assert found["settings"] == {"chat_template.loss_on": {"a": "assistant", "b": "assistant,tool_calls"}}
    assert found["compared"] == "tokens" and "content_sha256" not in found
    folder = (tmp_path / "b").resolve()
    meta = json.loads((folder / "meta.json").read_bytes())
    change_meta(folder, chat_template={**meta["chat_template"], "loss_on": "assistant"}, content_sha256="f" * 64)
    found = diff(cache, tmp_path / "b", tokenizers=(None, None), limit=3)
    assert not found["settings"] and "content_sha256" in found


def test_an_example_in_a_notebook_has_its_targets_in_green(cache):
    data = SFTExampleDataset.open(cache, "val", T=20)
    one = data[0]
    shown = Decoded(one.name, one.ids, one.mask, {}, Marked)._repr_html_().split("<span")
    assert next(part.split(">", 1)[1].split("</span>")[0] for part in shown[1:]) == "d&lt;end&gt;"
    assert str(Decoded(one.name, one.ids, one.mask, {}, Marked)).startswith("<user>\nabc<end><reply>[[d<end>]]<user>")
