"""What a tokenizer loses is measured, counted, warned of and shown; so are empty replies and foreign roles."""

import io
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import sentencepiece
from support import small_builds
from support.commands import niels_gpt
from support.fault_builds import interrupt
from support.small_builds import compare_less
from support.tiny_texts import TINY_TEXTS

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.engine.losses import loss_table
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.settings import Settings
from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.probes import PROBES, first_difference, roundtrip

USER = {"role": "user", "content": "Who walks to the mill?"}


@pytest.fixture(scope="module")
def lossy_path(tmp_path_factory):
    """A model as T5 has it: nmt_nfkc, no bytes to spell what is unknown; with the sentinels."""
    model, path = io.BytesIO(), tmp_path_factory.mktemp("lossy") / "spm.model"
    options = {"normalization_rule_name": "nmt_nfkc", "hard_vocab_limit": False, "minloglevel": 3, "vocab_size": 300}
    options |= {"sentence_iterator": iter(TINY_TEXTS), "user_defined_symbols": list(SPECIAL_TOKENS)}
    sentencepiece.SentencePieceTrainer.train(model_writer=model, **options)
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def lossy(lossy_path):
    """The tokenizer at `lossy_path`."""
    return load_tokenizer(lossy_path)


def pretrain(path, tokenizer, texts, **changed):
    arguments = {"max_train_tokens": None, "max_val_tokens": None, "shuffle_buffer": None}
    documents = (("train", text) for text in texts)
    return build_pretrain(documents, path, tokenizer=tokenizer, shard_bytes=1000, seed=0, **{**arguments, **changed})


def test_a_lossy_model_is_measured_warned_of_and_its_unknown_ids_are_those_in_the_cache(lossy, tmp_path, caplog):
    texts = ["The heron walks", "two  spaces", "apples \u6f22\u5b57 \u6f22", "a line\nand another", ""]
    meta = pretrain(tmp_path / "c", lossy, texts)
    assert (meta["lossless"], meta["roundtrip"]) == (False, {"texts": 4, "differ": 3})
    ids = np.fromfile(tmp_path / "c" / "train" / "shard_00000.bin", dtype="<u2")
    assert meta["unknown_ids"] == np.count_nonzero(ids == lossy.unk_id) > 0
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 2
    assert "lossy" in warned[0] and "3 of 4 texts" in warned[0] and r"two  spaces" in warned[0]
    assert "unknown" in warned[1] and r"\u6f22" in warned[1]
    meta = pretrain(tmp_path / "cut", lossy, ["\u6f22 a " * 20], max_train_tokens=10, max_val_tokens=0)
    ids = np.fromfile(tmp_path / "cut" / "train" / "shard_00000.bin", dtype="<u2")
    assert meta["unknown_ids"] == np.count_nonzero(ids == lossy.unk_id)  # none of those behind the cut


def test_a_lossless_model_is_measured(tiny_tokenizer, tmp_path, caplog):
    meta = pretrain(tmp_path / "c", tiny_tokenizer, [*PROBES, "a \u2581 mark", "half \ud800 a pair"])
    assert (meta["lossless"], meta["roundtrip"]) == (True, {"texts": len(PROBES), "differ": 0})
    assert (meta["unknown_ids"], meta["noticed"]["texts_with_u2581"]) == (0, 1)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


class Letters:
    vocab_size = 26

    def special_token_ids(self):
        return {}

    def encode(self, text):
        return [LETTERS[letter] for letter in text]

    def decode(self, ids):
        return "".join(chr(97 + token_id) for token_id in ids)


LETTERS = {chr(97 + token_id): token_id for token_id in range(26)}


def test_a_tokenizer_of_few_characters_builds_though_it_cannot_encode_u2581(tmp_path):
    meta = pretrain(tmp_path / "c", Letters(), ["heron", "otter"], document_end="none")
    assert meta["docs"]["train"] == 2 and not meta["noticed"]


def test_the_round_trip_is_bounded_and_of_a_long_text_the_beginning_is_compared(
    lossy, tiny_tokenizer, tmp_path, monkeypatch
):
    with monkeypatch.context() as patched:
        compare_less(patched, ids=4)
        texts = ["\u6f22\u5b57 and more", "The heron \ufffd walks to the mill."]
        assert pretrain(tmp_path / "a", tiny_tokenizer, texts)["lossless"] is True
        assert pretrain(tmp_path / "b", lossy, ["a\nb\nc d e f g h"])["lossless"] is False
    for name, most, expected in (("texts", 3, 3), ("num_bytes", 5, 2)):
        compare_less(monkeypatch, **{name: most})
        found = pretrain(tmp_path / name, lossy, ["a  b"] * 9)["roundtrip"]
        assert found == {"texts": expected, "differ": expected}


def test_a_loss_behind_the_first_texts_is_found(lossy, tmp_path, caplog):
    plain = [f"The heron walks to mill {number}" for number in range(1_500)]
    meta = pretrain(tmp_path / "c", lossy, [*plain, *(f"two  spaces {number}" for number in range(1_500))])
    trip = meta["roundtrip"]
    assert meta["lossless"] is False and 1_000 < trip["texts"] < 1_050 and 0 < trip["differ"] < 25
    assert f"{trip['differ']} of {trip['texts']:,} compared differ" in loss_table(meta)["round trip"]
    assert "two  spaces" in caplog.text


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_the_counts_depend_on_no_thread_and_no_kill(kind, lossy, folder):
    items = small_builds.ITEMS[kind](3, count=3_000)
    build = small_builds.BUILDERS[kind]
    changed = {"tokenizer": lossy, "items": items}
    if kind == "pretrain":
        changed |= {"max_train_tokens": 9_000, "max_val_tokens": 900}
    expected = build(folder / "a", **changed)
    assert 1_000 <= expected["roundtrip"]["texts"] < 1_050
    assert expected["unknown_ids"] > 0 or kind == "sft"
    with ThreadPoolExecutor(3) as pool:
        assert build(folder / "b", **changed, executor=pool) == expected
    interrupt(kind, folder / "c", len(items) // 2, **changed)
    build(folder / "c", **changed)
    raw = [(folder / name / "meta.json").read_bytes() for name in "abc"]
    assert raw[0] == raw[1] == raw[2]


def test_probes_tell_a_lossy_model_and_the_first_difference_is_short(lossy, tiny_tokenizer):
    shown = first_difference("a\tb" * 50, "a b" * 50)
    assert shown.startswith(r"at character 1, 'a\tb") and len(shown) < 100
    assert "at character 3" in first_difference("abcd", "abc")
    assert roundtrip(tiny_tokenizer) == {"texts": len(PROBES), "differ": 0}
    assert roundtrip(lossy)["differ"] > 10


def test_what_is_said_beside_a_copied_model_is_not_believed(lossy_path, mirror, tmp_path):
    model = tmp_path / "named" / "spm.model"
    model.parent.mkdir()
    model.write_bytes(lossy_path.read_bytes())
    said = {"model_sha256": load_tokenizer(model).sha256, "lossless": True, "trained_on": "books"}
    (model.parent / "tokenizer_meta.json").write_text(json.dumps(said))
    meta = ensure_tokenizer(Settings(source_root=str(mirror), cache_dir="c", tokenizer=str(model))).meta
    assert (meta["trained_on"], meta["lossless"]) == ("books", False)
    assert meta["roundtrip"]["texts"] == 19


def chats(*replies):
    return [[USER, {"role": "assistant", "content": reply}] for reply in replies]


def test_empty_replies_are_counted(tiny_tokenizer, tmp_path, caplog):
    several = [USER, {"role": "assistant", "content": ""}, USER, {"role": "assistant", "content": " \n"}]
    silent = [{"role": "system", "content": ""}, *chats("good")[0]]
    meta = build_sft(
        [*chats("good", "", " \t"), several, silent], tmp_path / "c", tokenizer=tiny_tokenizer, val_frac=0, seed=0
    )
    assert (meta["noticed"], meta["dropped"], meta["train_examples"]) == ({"empty_replies": 3}, {}, 5)
    assert "3 of 5 chats have an empty reply" in caplog.text
    caplog.clear()
    few = chats(*(f"good {number}" for number in range(99)), "")
    meta = build_sft(few, tmp_path / "few", tokenizer=tiny_tokenizer, val_frac=0, seed=0)
    assert meta["noticed"] == {"empty_replies": 1} and not caplog.text


def test_roles_that_drop_chats_are_named(tiny_tokenizer, tmp_path, caplog):
    tool, developer = ([{"role": role, "content": "x"}, *chats("good")[0]] for role in ("tool", "developer"))
    meta = build_sft(
        [tool, developer, tool, *chats("a", "b")], tmp_path / "c", tokenizer=tiny_tokenizer, val_frac=0, seed=0
    )
    assert meta["dropped"] == {"unknown_role": 3}
    assert meta["noticed"] == {"unknown_role:developer": 1, "unknown_role:tool": 2}
    assert "'tool' 2, 'developer' 1" in caplog.text


def test_what_was_noticed_is_shown(lossy_path, tmp_path):
    rows = [*chats("", "two  spaces \u6f22"), [{"role": "tool", "content": "4"}, *chats("x")[0]]]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    flags = ["--cache-dir", str(tmp_path / "c"), "--tokenizer", str(lossy_path)]
    built = niels_gpt("build", "--sft", f"support={tmp_path}/chats.jsonl", *flags)
    shown = niels_gpt("stats", tmp_path / "c" / "sft" / "support")
    assert (built.status, shown.status) == (0, 0), built.err + shown.err
    assert "empty_replies 1" in shown.out
    for text in (built.out, shown.out):
        assert "unknown_role:tool 1" in text
        assert "unknown ids" in text and "lossy" in text
