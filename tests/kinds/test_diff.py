"""What differs between two caches: settings, and documents that are new, gone or moved."""

from support.byte_tokenizer import ByteTokenizer
from support.commands import niels_gpt
from support.disk import read_meta, write_meta
from support.errors import refused

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.kinds.diff import diff


class Shifted(ByteTokenizer):
    """Other ids for the same bytes: caches of both have no token in common."""

    vocab_size = 400

    def encode(self, text):
        return [byte + 110 for byte in text.encode()]


def of(path, documents, tokenizer=None, **arguments):
    """Build a cache of documents that name their split."""
    fixed = {"max_train_tokens": None, "max_val_tokens": None, "shard_bytes": 8, "shuffle_buffer": None}
    build_pretrain(documents, path, tokenizer=tokenizer or ByteTokenizer(), **{**fixed, "seed": 0, **arguments})
    return path


def cache(path, train, val=(), tokenizer=None, **arguments):
    """Build a cache of texts; the id of a text is `id of TEXT`."""
    documents = [(split, text, f"id of {text}") for split, texts in (("train", train), ("val", val)) for text in texts]
    return of(path, documents, tokenizer, **arguments)


def edit(cache, change):
    """Change a meta.json as its author would."""
    meta = read_meta(cache)
    change(meta)
    write_meta(cache, meta)


def compared(a, b, limit=10, tokenizers=(None, None)):
    return diff(a, b, tokenizers=tokenizers, limit=limit)


def told(a, b, *flags):
    """The exit status of `niels-gpt diff`, 0 for equal caches, and what it prints."""
    done = niels_gpt("diff", a, b, *flags)
    return done.status, done.out


def counts(found):
    return {part: found[part]["count"] for part in ("only_a", "only_b", "moved") if found[part]["count"]}


def test_a_cache_is_equal_to_itself_and_to_its_like(tmp_path):
    a, b = (cache(tmp_path / name, ["one", "two", "three", "one"], ["four"]) for name in "ab")
    for pair in ((a, a), (a, b), (a.resolve(), b)):
        found = compared(*pair)
        assert found["settings"] == {} and counts(found) == {}
        assert told(*pair) == (0, "equal\n")
    assert found["documents"] == {"a": {"train": 4, "val": 1}, "b": {"train": 4, "val": 1}}


def test_documents_of_one_cache_only_are_named(tmp_path):
    a = cache(tmp_path / "a", ["one", "two", "three"], ["four"])
    b = cache(tmp_path / "b", ["one", "three"], ["four", "five is longer than a shard"])
    found = compared(a, b)
    assert counts(found) == {"only_a": 1, "only_b": 1}
    assert found["compared"] == "tokens"
    assert found["only_a"]["first"] == [{"split": "train", "document": 1, "source_id": "id of two", "words": None}]
    (new,) = found["only_b"]["first"]
    assert (new["split"], new["document"], new["source_id"]) == ("val", 1, "id of five is longer than a shard")
    status, text = told(a, b)
    assert status == 1 and "only in A: 1 document\n  train 1, source id id of two" in text and "moved" not in text


def test_documents_that_moved_to_the_other_split_are_not_new(tmp_path):
    a, b = cache(tmp_path / "a", ["one", "two"], ["four"]), cache(tmp_path / "b", ["one", "four"], ["two"])
    found = compared(a, b)
    assert counts(found) == {"moved": 2}
    assert [(each["split"], each["document"], each["in_b"]) for each in found["moved"]["first"]] == [
        ("train", 1, {"split": "val", "document": 0, "source_id": "id of two"}),
        ("val", 0, {"split": "train", "document": 1, "source_id": "id of four"}),
    ]
    assert "moved to the other split: 2 documents\n  train 1, source id id of two, in B val 0" in told(a, b)[1]


def test_documents_in_another_order_or_of_other_ids_differ_by_their_content_alone(tmp_path):
    a, b = cache(tmp_path / "a", ["one", "two", "three"]), cache(tmp_path / "b", ["one", "three", "two"])
    assert counts(compared(a, cache(tmp_path / "c", ["two", "three"]))) == {"only_a": 1}
    of(tmp_path / "d", [("train", text, f"new id of {text}") for text in ("one", "two", "three")])
    for other in (b, tmp_path / "d"):
        found = compared(a, other)
        assert counts(found) == {} == found["settings"]
        status, text = told(a, other)
        assert status == 1 and text.startswith("content_sha256: A ")


def test_a_document_that_is_there_twice_needs_two_of_its_like(tmp_path):
    a, b = cache(tmp_path / "a", ["one", "one", "one"]), cache(tmp_path / "b", ["one"], ["one"])
    found = compared(a, b)
    assert counts(found) == {"only_a": 1, "moved": 1}
    assert [each["document"] for each in found["only_a"]["first"]] == [2]


def test_settings_that_differ_are_dotted_and_the_lists_of_files_are_left_out(tmp_path):
    a, b = cache(tmp_path / "a", ["one"]), cache(tmp_path / "b", ["one"], seed=7, shard_bytes=10)
    found = compared(a, b)
    assert found["settings"] == {"seed": {"a": 0, "b": 7}, "shard_bytes": {"a": 8, "b": 10}}
    status, text = told(a, b)
    assert status == 1 and "seed: A 0, B 7" in text
    edit(b, lambda meta: (meta["source"].update(counters={"blank": True}), meta.pop("noticed")))
    settings = compared(a, b)["settings"]
    assert settings["source.counters.blank"] == {"b": True} and settings["noticed"] == {"a": {}}
    assert "source.counters.blank: A absent, B true" in told(a, b)[1]


def test_caches_of_two_tokenizers_are_compared_by_source_ids_and_it_is_said(tmp_path):
    a = cache(tmp_path / "a", ["one", "two"], ["four"])
    b = cache(tmp_path / "b", ["one", "three"], ["four"], tokenizer=Shifted())
    found = compared(a, b)
    assert found["compared"] == "source ids" and found["why_not_tokens"] == "their tokenizers differ"
    assert counts(found) == {"only_a": 1, "only_b": 1} and found["settings"]["vocab_size"] == {"a": 300, "b": 400}
    assert "compared by source ids, for their tokenizers differ" in told(a, b)[1]
    edit(b, lambda meta: meta.pop("ids"))
    found = compared(a, b)
    assert found["compared"] is None and "source ids of B were not recorded" in told(a, b)[1]


def test_examples_of_sft_caches_are_compared_as_documents(tmp_path):
    chats = [
        (f"chat {n}", [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a"}]) for n in range(9)
    ]
    for name, given, seed in (("a", chats, 0), ("b", chats[1:], 0), ("c", chats, 1)):
        build_sft(given, tmp_path / name, tokenizer=ByteTokenizer(), val_frac=0.4, seed=seed)
    assert counts(compared(tmp_path / "a", tmp_path / "b"))["only_a"] == 1
    found = counts(compared(tmp_path / "a", tmp_path / "c"))
    assert found["moved"] > 0 and "only_a" not in found


def test_the_first_words_are_decoded_by_the_tokenizer_of_the_ids(tmp_path, tiny_tokenizer):
    a, b = (cache(tmp_path / name, [f"The heron\n walks {name}" * 9], tokenizer=tiny_tokenizer) for name in "ab")
    (gone,) = compared(a, b, tokenizers=(tiny_tokenizer, tiny_tokenizer))["only_a"]["first"]
    assert gone["words"].startswith("The heron walks a") and len(gone["words"]) <= 60


def test_as_many_documents_are_named_as_asked_for_and_all_are_counted(tmp_path):
    a, b = cache(tmp_path / "a", list("abcdefgh"), list("ij")), cache(tmp_path / "b", ["x"])
    found = compared(a, b, limit=3)
    assert found["only_a"]["count"] == 10 and len(found["only_a"]["first"]) == 3
    assert "and 7 more" in told(a, b, "--limit", "3")[1]
    assert len(compared(a, b, limit=9)["only_a"]["first"]) == 9 and compared(a, b, limit=0)["only_a"]["first"] == []
    with refused("E102", "limit=-1", "0 or more"):
        compared(a, b, limit=-1)


def test_of_equal_documents_the_first_goes_with_the_first(tmp_path):
    a = cache(tmp_path / "a", ["x", "one", "x", "two", "x"], ["y", "z"])
    assert counts(compared(a, cache(tmp_path / "b", ["x", "one", "x", "two", "x"], ["y", "z"]))) == {}
    found = compared(a, cache(tmp_path / "c", ["x", "one", "two"], ["x", "y", "x", "z"]))
    assert counts(found) == {"moved": 2}
    assert [(each["document"], each["in_b"]["document"]) for each in found["moved"]["first"]] == [(2, 0), (4, 2)]


def test_of_equal_documents_those_of_one_source_id_go_together(tmp_path):
    """A file is left out that others are equal to: it is gone, and none of the others is."""
    files = [("train", "one", "a.md"), ("train", "one", "b.md"), ("val", "one", "c.md"), ("train", "two", "d.md")]
    for name, documents in (("a", files), ("b", files[1:]), ("c", [files[0], ("train", "one", "e.md"), files[3]])):
        of(tmp_path / name, documents)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert counts(found) == {"only_a": 1} and found["only_a"]["first"][0]["source_id"] == "a.md"
    assert counts(compared(tmp_path / "b", tmp_path / "a")) == {"only_b": 1}
    found = compared(tmp_path / "a", tmp_path / "c")
    assert counts(found) == {"only_a": 1} and found["only_a"]["first"][0]["source_id"] == "c.md"


def test_a_list_of_source_ids_that_is_cut_is_an_error(tmp_path):
    a, b = (cache(tmp_path / name, ["one", "two", "three"]) for name in "ab")
    path = b / "index" / "train_ids.txt"
    for content, said in (
        (b"id of one\n", "10 bytes, expected 32"),
        (path.read_bytes() + b"x\n", "34 bytes, expected 32"),
    ):
        path.write_bytes(content)
        with refused("E203", "index/train_ids.txt", said):
            compared(a, b)


def test_caches_of_another_content_are_never_called_equal(tmp_path):
    a, b = (cache(tmp_path / name, ["one"]) for name in "ab")
    real = read_meta(b)["content_sha256"]
    edit(b, lambda meta: meta.update(content_sha256="f" * 64))
    found = compared(a, b)
    assert found["settings"] == {} and counts(found) == {}
    status, text = told(a, b)
    assert status == 1 and f"content_sha256: A {real[:12]}, B {'f' * 12}\n" in text


def test_shards_that_hold_less_than_the_totals_say_are_an_error(tmp_path):
    a, b = (cache(tmp_path / name, ["one", "two", "three"]) for name in "ab")
    edit(b, lambda meta: meta["shards"]["train"].pop())
    with refused("E202", "meta.json", "8 tokens", "11"):
        compared(a, b)


def test_empty_objects_and_totals_are_told_once(tmp_path):
    a, b = cache(tmp_path / "a", ["one"]), cache(tmp_path / "b", ["one", ""])
    settings = compared(a, b)["settings"]
    assert settings == {"documents_read": {"a": 1, "b": 2}, "dropped.empty": {"b": 1}}
    c = cache(tmp_path / "c", ["one", "two"])
    assert [key for key in compared(a, c)["settings"] if "tokens" in key] == ["totals.train_tokens"]


def test_a_tokenizer_has_settings_but_no_documents(tmp_path):
    for name, size in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        write_meta(tmp_path / name, {"kind": "tokenizer", "vocab_size": size, "meta_crc32": ""})
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found["compared"] is None and found["settings"] == {"vocab_size": {"a": 1, "b": 2}}
    assert "documents were not compared" in told(tmp_path / "a", tmp_path / "a")[1]
    with refused("E105", "/c: ", kind=FileNotFoundError):
        compared(tmp_path / "a", tmp_path / "c")
