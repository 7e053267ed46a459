"""Caches of other splits, tokenizers, sentinels and places are refused by their readers; so are ids that are none."""

import shutil

import pytest
import torch
from support.bits_caches import sealed
from support.commands import niels_gpt
from support.disk import META_NAME, canonical_json, read_meta
from support.errors import refused
from support.harms import npy
from support.power_loss import put as restore
from support.small_caches import CHAT, build_chats, built_caches, change_meta, put_token

from niels_gpt.cache import CacheError, PretrainTokenStreamDataset, SFTExampleDataset
from niels_gpt.cache.meta import find_meta
from niels_gpt.cache.mmap import load_idx
from niels_gpt.kinds.verify import find_damage
from niels_gpt.storage.fileio import sha256_file

NOTES, CHATS = "pretrain/notes", "sft/chats"


@pytest.fixture
def cache_dir(tmp_path):
    """Caches: tokenizer/, pretrain/notes (train: 3 shards of 10 tokens, no val) and sft/chats (3 x 6 tokens)."""
    restore(built_caches(), tmp_path / "cache")
    return tmp_path / "cache"


def open_pretrain(cache_dir, split="train", **arguments):
    return PretrainTokenStreamDataset(str(cache_dir / NOTES / split), **{"T": 4, "device": "cpu", **arguments})


def open_sft(cache_dir, split="train", **arguments):
    files = [str(cache_dir / CHATS / f"{split}_{name}") for name in ("tokens.bin", "idx.npy")]
    return SFTExampleDataset(*files, **{"T": 5, "device": "cpu", "eot_id": 4, **arguments})


OPENERS = {NOTES: open_pretrain, CHATS: open_sft}


def refusal(cache_dir, key, error=CacheError):
    """Return the message with which the reader refuses a cache."""
    with pytest.raises(error) as caught:
        OPENERS[key](cache_dir)
    return str(caught.value)


def test_a_split_that_is_empty_absent_or_too_short_is_refused(cache_dir):
    for described in (True, False):
        with refused("E204", "val", "no shard"):
            open_pretrain(cache_dir, "val")
        with refused("E203", "val_tokens.bin", "empty"):
            open_sft(cache_dir, "val")
        with refused("E107", "train", "10 tokens", "T + 1 = 11"):
            open_pretrain(cache_dir, T=10)
        with refused("E204", "notes/test", kind=FileNotFoundError):
            open_pretrain(cache_dir, "test")
        if described:
            (cache_dir / NOTES / META_NAME).unlink()


@pytest.mark.parametrize("key", OPENERS)
def test_other_tools_keys_are_ignored(cache_dir, key):
    change_meta(cache_dir / key, author=["x"], files_seen=-1, itos={"0": "a"})
    OPENERS[key](cache_dir)
    (cache_dir / key / META_NAME).write_bytes(b'{"vocab_size": null, "stoi": {"a": 0}}')
    OPENERS[key](cache_dir)
    (cache_dir / key / META_NAME).unlink()
    OPENERS[key](cache_dir)


@pytest.mark.parametrize("opener", OPENERS.values())
def test_ids_of_another_tokenizer_than_that_beside_the_cache_or_given_are_refused(cache_dir, opener):
    opener(cache_dir, tokenizer_sha256=sha256_file(cache_dir / "tokenizer" / "spm.model"))
    with refused("E402", f"tokenizer {'e' * 12}"):
        opener(cache_dir, tokenizer_sha256="e" * 64)
    change_meta(cache_dir / "tokenizer", tokenizer_sha256="f" * 64)
    with refused("E402", f"tokenizer {'f' * 12}"):
        opener(cache_dir)
    for value in (3, []):
        change_meta(cache_dir / "tokenizer", tokenizer_sha256=value)
        with refused("E202", "meta.json", "tokenizer_sha256"):
            opener(cache_dir)


def test_ids_of_sentinels_other_than_the_caches_are_refused(cache_dir):
    with refused("E404", "meta.json", "id 4", "eot_id=5"):
        open_sft(cache_dir, eot_id=5)
    with refused("E404", "meta.json", "id 3", "asst_id=2"):
        open_sft(cache_dir, asst_id=2)
    for arguments in ({"eot_id": 300}, {"eot_id": -1}, {"eot_id": 4, "asst_id": 70000}):
        with refused("E102", "_id=", "0 to 299", kind=ValueError) as caught:
            open_sft(cache_dir, **arguments)
        assert not isinstance(caught.value, CacheError)


def test_the_asst_id_comes_from_the_meta_json_beside_it_else_of_the_tokenizer_else_is_given(cache_dir):
    beside, above = cache_dir / CHATS / META_NAME, cache_dir / "tokenizer" / META_NAME
    of_tokenizer = above.read_bytes()
    above.unlink()
    assert open_sft(cache_dir).asst_id == 3
    above.write_bytes(of_tokenizer)
    change_meta(beside.parent, special_token_ids=None)
    assert open_sft(cache_dir).asst_id == 3
    beside.unlink()
    assert open_sft(cache_dir).asst_id == 3
    above.unlink()
    assert open_sft(cache_dir, asst_id=3).asst_id == 3


def test_an_asst_id_known_nowhere_is_an_error_that_names_the_three_places(cache_dir):
    (cache_dir / "tokenizer" / META_NAME).unlink()
    change_meta(cache_dir / CHATS, special_token_ids={})
    message = refusal(cache_dir, CHATS)
    assert "asst_id=" in message and str((cache_dir / CHATS).resolve() / META_NAME) in message
    assert "tokenizer/meta.json" in message


def pair_of(tokens, idx, **arguments):
    return SFTExampleDataset(tokens, idx, **{"T": 30, "device": "cpu", "eot_id": 4, **arguments})


def chats_of(cache_dir, name, lengths):
    """Build sft/NAME: half of the chats in each split, whose messages have these lengths."""
    chats = [[{"role": "user", "content": "q" * n}, CHAT[1]] for n in lengths]
    return build_chats(cache_dir, chats, 0.5, name).resolve()


@pytest.mark.parametrize("described", [True, False])
def test_tokens_and_offsets_of_two_splits_are_refused(cache_dir, described):
    folder = chats_of(cache_dir, "both", [3, 3, 3, 3])
    if not described:
        (folder / META_NAME).unlink()
    for one, other in (("train", "val"), ("val", "train")):
        with refused("E209", f"{other}_idx.npy", f"of {other}, not"):
            pair_of(folder / f"{one}_tokens.bin", folder / f"{other}_idx.npy")


def test_tokens_of_one_cache_and_offsets_of_another_are_refused(cache_dir):
    one, other = chats_of(cache_dir, "one", [3, 4]), chats_of(cache_dir, "other", [3, 4])
    for folder in (one, other):
        with refused("E209", "train_idx.npy", "another cache"):
            pair_of(one / "train_tokens.bin", other / "train_idx.npy", asst_id=3)
        (folder / META_NAME).unlink()
    assert len(pair_of(one / "train_tokens.bin", other / "train_idx.npy", asst_id=3)) == 1  # files of other tools


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("known_by", ["meta.json", "tokenizer/meta.json"])
def test_offsets_of_another_version_of_equal_size_are_refused_at_once(cache_dir, io, known_by):
    folder = chats_of(cache_dir, "one", [9, 2, 5, 4, 7, 3])
    other = chats_of(cache_dir, "other", [3, 4, 5, 9, 2, 7])
    (folder / "train_idx.npy").write_bytes((other / "train_idx.npy").read_bytes())
    if known_by != "meta.json":
        (folder / META_NAME).unlink()
    expected = ("E201", "train_idx.npy", "bytes 0 to")  # by its checksum
    if known_by != "meta.json":
        expected = ("E203", "train_tokens.bin", "example 1", "train_idx.npy")
    with refused(*expected):
        pair_of(folder / "train_tokens.bin", folder / "train_idx.npy", io=io)
    if known_by == "meta.json":
        (damage,) = find_damage(folder, deep=False)
        assert damage.file == "train_idx.npy" and "bytes 0 to" in damage.problem
        return
    (cache_dir / "tokenizer" / META_NAME).unlink()  # nobody knows the ids of the roles: the targets show what is wrong
    with pytest.warns(UserWarning, match="2 of 5 rows have no target"):
        pair_of(folder / "train_tokens.bin", folder / "train_idx.npy", io=io, asst_id=3)


@pytest.mark.parametrize("key", OPENERS)
def test_a_public_name_that_leads_out_of_the_folder_or_in_a_circle_is_refused(cache_dir, key):
    shutil.copytree((cache_dir / key).resolve(), cache_dir.parent / "outside")
    (cache_dir / key).unlink()
    (cache_dir / key).symlink_to(cache_dir.parent / "outside")
    with refused("E205", "a symbolic link"):
        find_meta(cache_dir / key)
    assert niels_gpt("list", cache_dir, module="niels_gpt.cache.cli").status == 1
    (cache_dir / key).unlink()
    (cache_dir / key).symlink_to((cache_dir / key).name)
    with pytest.raises((CacheError, FileNotFoundError)):
        OPENERS[key](cache_dir)


@pytest.mark.parametrize("key", OPENERS)
def test_a_tokenizer_that_is_a_link_out_of_the_folder_is_not_read(cache_dir, key):
    (cache_dir / "tokenizer").rename(cache_dir.parent / "outside")
    (cache_dir / "tokenizer").symlink_to(cache_dir.parent / "outside")
    assert "a symbolic link" in refusal(cache_dir, key)


def test_links_above_a_version_are_followed(cache_dir, tmp_path, monkeypatch):
    """To a version of the tokenizer, of the user's, and in a relative path: only links inside a version are refused."""
    (cache_dir / ".versions" / "tokenizer").mkdir(parents=True)
    (cache_dir / "tokenizer").rename(cache_dir / ".versions" / "tokenizer" / "0123456789ab")
    (cache_dir / "tokenizer").symlink_to(".versions/tokenizer/0123456789ab")
    assert find_meta(cache_dir / "tokenizer") is not None and len(open_sft(cache_dir)) == 3
    (tmp_path / "mine").symlink_to(cache_dir / NOTES / "train")
    assert PretrainTokenStreamDataset(str(tmp_path / "mine"), T=4, device="cpu").meta is not None
    monkeypatch.chdir(cache_dir / NOTES / "train")
    assert PretrainTokenStreamDataset(".", T=4, device="cpu").meta is not None


@pytest.mark.parametrize("id", [300, 65535])
@pytest.mark.parametrize(("key", "name"), [(NOTES, "train/shard_00001.bin"), (CHATS, "train_tokens.bin")])
def test_an_id_outside_the_vocabulary_is_never_served(cache_dir, key, name, id):
    path = (cache_dir / key).resolve() / name
    put_token(path, 7, id)  # of the sft cache: the second token of example 1
    sealed((cache_dir / key).resolve(), read_meta(cache_dir / key))  # as a builder with a fault would write it
    dataset, generator = OPENERS[key](cache_dir), torch.Generator().manual_seed(0)
    message = f"{path}: token 7 at byte 14 is id {id}, expected ids below vocab_size 300"
    served = denied = 0
    for _ in range(50):
        try:
            parts = dataset.get_batch(B=1, generator=generator)
        except CacheError as error:
            denied += 1
            assert message in str(error)
        else:
            served += 1
            assert max(int(part.max()) for part in parts) < 300
    assert served and denied
    if isinstance(dataset, SFTExampleDataset):
        assert dataset.example(0).tolist()[0] == 2
        with refused("E409", message):
            dataset.example(1)
        for row in (-1, 3, 10**20):
            with refused("E106", "3", kind=IndexError):
                dataset.example(row)


def test_without_a_vocabulary_all_ids_are_served(cache_dir):
    (cache_dir / NOTES / "train" / "shard_00001.bin").write_bytes(b"\xff" * 20)
    (cache_dir / NOTES / META_NAME).write_bytes(canonical_json({}))
    x, y = open_pretrain(cache_dir).get_batch(B=8, generator=torch.Generator().manual_seed(0))
    assert int(x.max()) == int(y.max()) == 65535


@pytest.mark.parametrize("content", [npy("(3,)"), npy("(3,)", version=b"\x02\x00"), npy("(3,)", fortran="True")])
def test_other_headers_that_fit_their_file_are_read(tmp_path, content):
    (tmp_path / "train_idx.npy").write_bytes(content)
    assert load_idx(tmp_path / "train_idx.npy", num_tokens=18).tolist() == [0, 6, 12]
