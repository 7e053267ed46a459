"""meta.json: the keys of the spec, canonical bytes, and counts that can be checked."""

import hashlib
import json
import os
import zlib

import numpy as np
import pytest
from support.byte_tokenizer import ByteTokenizer
from support.disk import canonical_json, meta_bytes
from support.errors import refused

from niels_gpt.cache import CacheError, read_meta, sha256_file, write_meta
from niels_gpt.cache.build_pretrain import build_pretrain, build_stub
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.cache.meta import checked_meta
from niels_gpt.engine.meta import Source
from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.tokenizers.document_tokens import end_of_documents
from niels_gpt.tokenizers.protocol import token_dtype_of

COUNTERS = {"orphans": 2, "cycles": 0}
SOURCE = Source("someone/notes", config="v1", streaming=True, provenance={"revision": "abc"}, counters=COUNTERS)
SPEC_KEYS = {
    "dataset_name": "someone/notes",
    "dataset_config": "v1",
    "seed": 7,
    "token_dtype": "uint16-le",
    "tokenizer_sha256": hashlib.sha256(b"a model").hexdigest(),
    "vocab_size": 300,
    "special_token_ids": {"sys": 1, "usr": 2, "asst": 3, "eot": 4},
}


def build_texts(folder, texts, tokenizer=None, **extras):
    arguments = {"max_train_tokens": 100, "max_val_tokens": 0, "shard_bytes": 64, "shuffle_buffer": None, **extras}
    pairs = ((None, text) for text in texts)
    return build_pretrain(pairs, folder, tokenizer=tokenizer or ByteTokenizer(), seed=7, source=SOURCE, **arguments)


def chat(question, reply):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """A cache of each kind, of a tokenizer with a model file."""
    tokenizer, tmp_path = ByteTokenizer(), tmp_path_factory.mktemp("caches")
    tokenizer.model_path = str(tmp_path / "spm.model")
    (tmp_path / "spm.model").write_bytes(b"a model")
    build_texts(tmp_path / "pretrain", ["a" * 50], tokenizer)
    chats = [chat("q", "a"), chat("r", "b"), chat("s", "c")]
    build_sft(chats, tmp_path / "sft", tokenizer=tokenizer, val_frac=0.4, seed=7, source=SOURCE)
    build_stub(tmp_path / "stub", tokenizer=tokenizer, source=SOURCE, seed=7, shard_bytes=64)
    return {kind: tmp_path / kind for kind in ("pretrain", "sft", "stub")}


@pytest.mark.parametrize("kind", ["pretrain", "sft", "stub"])
def test_every_key_of_the_spec_is_there(caches, kind):
    meta = read_meta(str(caches[kind] / "meta.json"))
    assert {key: meta[key] for key in SPEC_KEYS} == SPEC_KEYS
    assert isinstance(meta["split_rule"], str) and meta["streaming"] is True
    totals = {
        "pretrain": {"train_tokens": 50, "val_tokens": 0},
        "sft": {"train_examples": 2, "val_examples": 1, "train_tokens": 12, "val_tokens": 6},
        "stub": {"train_tokens": 0, "val_tokens": 0},
    }[kind]
    assert meta["totals"] == totals and totals.items() <= meta.items()
    assert ("shard_bytes" in meta) == (kind != "sft")
    assert meta["source"] == {"revision": "abc", "counters": {"cycles": 0, "orphans": 2}}


def test_a_stub_says_that_it_is_not_built_and_has_both_folders(caches):
    meta = read_meta(str(caches["stub"] / "meta.json"))
    assert (meta["built"], meta["stub"]) == (False, True)
    assert sorted(path.name for path in caches["stub"].iterdir()) == ["meta.json", "train", "val"]
    assert list((caches["stub"] / "train").iterdir()) == list((caches["stub"] / "val").iterdir()) == []


@pytest.mark.parametrize("kind", ["pretrain", "sft", "stub"])
def test_the_file_is_canonical_json(caches, kind):
    content = (caches[kind] / "meta.json").read_bytes()
    spelled = json.dumps(json.loads(content), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert content == spelled.encode()


def test_canonical_json_is_these_bytes_and_what_write_meta_writes_read_meta_reads(tmp_path):
    write_meta(str(tmp_path / "meta.json"), {"b": [1, None], "a": "é"})
    spelled = '{\n  "a": "é",\n  "b": [\n    1,\n    null\n  ]\n}\n'
    assert (tmp_path / "meta.json").read_bytes() == spelled.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_meta(str(tmp_path / "meta.json"), {"share": float("nan")})
    meta = {"name": "naïve 漢字", "share": 0.1, "none": None, "list": [1, {"deep": True}]}
    write_meta(str(tmp_path / "meta.json"), meta)
    write_meta(str(tmp_path / "again.json"), dict(reversed(meta.items())))
    assert read_meta(str(tmp_path / "meta.json")) == meta
    assert (tmp_path / "meta.json").read_bytes() == (tmp_path / "again.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.json", "meta.json"]


@pytest.mark.parametrize("meta", [{}, {"z": 1}, {"a": "é", "z": [{"meta_crc32": "01234567"}]}, {"meta_crc32": "old"}])
def test_meta_crc32_is_the_crc_32_of_the_bytes_with_its_digits_zeroed(tmp_path, meta):
    write_meta(str(tmp_path / "meta.json"), {**meta, "meta_crc32": ""})
    raw = (tmp_path / "meta.json").read_bytes()
    digits = json.loads(raw)["meta_crc32"]
    line = f'\n  "meta_crc32": "{digits}"'.encode()
    assert raw.count(line) == 1 and raw == canonical_json({**meta, "meta_crc32": digits})
    assert int(digits, 16) == zlib.crc32(raw.replace(line, b'\n  "meta_crc32": "00000000"'))
    assert read_meta(str(tmp_path / "meta.json")) == {**meta, "meta_crc32": digits}


@pytest.mark.parametrize("digits", ["0123456G", "ABCDEF01", "12345 78", "ééé12"])
def test_a_crc_32_of_no_hex_digits_is_refused_and_an_absent_one_is_not_looked_for(tmp_path, digits):
    path = tmp_path / "meta.json"
    path.write_bytes(canonical_json({"meta_crc32": digits}))
    with pytest.raises(CacheError, match="damaged"):
        read_meta(str(path))
    without = {"a": 1, "b": {"meta_crc32": "01234567"}, "c": f'  "meta_crc32": "{digits}",'}
    path.write_bytes(canonical_json(without))
    assert read_meta(str(path)) == without


def test_each_flipped_bit_of_a_meta_json_is_refused_but_those_of_its_crc_32s_own_key(tmp_path):
    raw = meta_bytes({"vocab_size": 300, "dataset_name": "é", "share": 0.5})
    path, unseen = tmp_path / "meta.json", []
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            found = read_meta(str(path))
        except CacheError as error:
            assert str(path) in str(error)
        else:
            assert "meta_crc32" not in found
            unseen.append(bit // 8)
    key = raw.index(b"meta_crc32")
    assert unseen and set(unseen) <= set(range(key, key + len(b"meta_crc32")))


@pytest.mark.parametrize("value", [None, 7, "7", "0123456789"])
def test_a_crc_32_that_is_not_on_a_line_of_its_own_is_refused(tmp_path, value):
    (tmp_path / "meta.json").write_bytes(canonical_json({"meta_crc32": value}))
    with refused("E202", "meta.json"):
        read_meta(str(tmp_path / "meta.json"))
    (tmp_path / "meta.json").write_text(json.dumps(json.loads(meta_bytes({}))))
    with refused("E202", "meta.json"):
        read_meta(str(tmp_path / "meta.json"))


def test_write_meta_never_writes_a_wrong_crc_32_and_adds_none(tmp_path):
    path = tmp_path / "meta.json"
    write_meta(str(path), {"a": 1, "meta_crc32": "00000000"})
    assert path.read_bytes() == meta_bytes({"a": 1})
    write_meta(str(path), {**read_meta(str(path)), "a": 2})
    assert path.read_bytes() == meta_bytes({"a": 2}) and read_meta(str(path))["a"] == 2
    write_meta(str(path), {"a": 1})
    assert path.read_bytes() == canonical_json({"a": 1}) and read_meta(str(path)) == {"a": 1}


NO_META = [
    (b"", "not JSON (Expecting value"),
    (b"{}{}", "not JSON (Extra data"),
    (b"null", "a JSON NoneType, expected an object"),
    (b'{"a": NaN}', "not JSON (the number 'NaN', expected a finite one)"),
    (b'{"a": 1e999}', "not JSON (the number '1e999'"),
    (b'{"a": ' + b"1" * 1_000_000 + b"}", "not JSON (an integer of 1,000,000 digits, expected 100 at most)"),
    (b'{"a": 1, "b": 2, "a": 3}', "not JSON (the key 'a' is there twice)"),
    (b'{"a": [{"b": 1, "b": 1}]}', "not JSON (the key 'b' is there twice)"),
    (b'{"a": ' * 100_000, "not JSON (nested too deeply)"),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not JSON (nested too deeply)"),
    ('{"a": "é"}'.encode("latin-1"), "not JSON ('utf-8' codec"),
    ('{"a": 1}'.encode("utf-16"), "not JSON ('utf-8' codec"),
    (b'\xef\xbb\xbf{"a": 1}', "not JSON (Unexpected UTF-8 BOM"),
    (rb'{"a": ["\ud800"]}', "not JSON ('utf-8' codec can't encode character '\\ud800'"),
    (rb'{"\udfff": 1}', "not JSON ('utf-8' codec"),
    (b'{"a": "\0"}', "not JSON (Invalid control character"),
]


@pytest.mark.parametrize(("content", "message"), NO_META)
def test_what_is_no_meta_json_is_refused_with_its_reason(tmp_path, content, message):
    (tmp_path / "meta.json").write_bytes(content)
    with refused("E202", f"meta.json: {message}") as caught:
        read_meta(str(tmp_path / "meta.json"))
    assert len(str(caught.value)) < len(str(tmp_path)) + 400


def test_a_meta_json_of_more_than_32_mib_is_refused_before_it_is_read(tmp_path):
    (tmp_path / "meta.json").write_bytes(b"{}" + b" " * (1 << 25))
    with refused("E206", "meta.json", "33,554,434 bytes", "33,554,432"):
        read_meta(str(tmp_path / "meta.json"))


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "good.json").write_bytes(b"{}")
    (tmp_path / "link").symlink_to("good.json")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("fifo", "folder"):
        with pytest.raises(CacheError, match=f"{name}: (not a regular file|a folder, expected)"):
            read_meta(str(tmp_path / name))
    for name in ("link", "loop", "null"):
        with refused("E205", name):
            read_meta(str(tmp_path / name))
    with refused("E204", "good.json/meta.json", kind=FileNotFoundError):
        read_meta(str(tmp_path / "good.json" / "meta.json"))
    assert read_meta(str(tmp_path / "good.json")) == {}


def test_sha256_file_is_that_of_the_bytes(tmp_path):
    (tmp_path / "f").write_bytes(b"abc" * 1_000_000)
    assert sha256_file(str(tmp_path / "f")) == hashlib.sha256(b"abc" * 1_000_000).hexdigest()


@pytest.mark.parametrize("kind", ["pretrain", "sft", "stub"])
def test_content_sha256_is_the_hash_of_what_sha256sum_prints(caches, kind):
    root = caches[kind].resolve()
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    names.remove("meta.json")
    lines = "".join(f"{hashlib.sha256((root / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    meta = read_meta(str(root / "meta.json"))
    assert meta["content_sha256"] == hashlib.sha256(lines.encode()).hexdigest()
    assert root.name == meta["content_sha256"][:12]


def test_utf8_bytes_are_those_of_the_texts_and_turns_without_what_is_cut_and_the_end_of_texts(tmp_path):
    meta = build_texts(tmp_path / "c", ["aé", "漢", "", "b"], document_end="eot")  # 3, 3, 0 and 1 bytes
    assert meta["utf8_bytes"] == {"train": 7, "val": 0} and meta["totals"]["train_tokens"] == 7 + 3
    meta = build_texts(tmp_path / "d", ["ab", "aébc"], max_train_tokens=5)  # ab, then 3 of 5 bytes: aé
    assert meta["utf8_bytes"]["train"] == 5 and meta["cut"] == {"documents": 1, "tokens": 2}
    meta = build_sft([chat("é", "漢a")], tmp_path / "s", tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    assert meta["utf8_bytes"] == {"train": 6, "val": 0}


class WithSpaces(ByteTokenizer):
    """Gives U+2581 back as a space, as SentencePiece does."""

    def decode(self, ids):
        return str(super().decode(ids)).replace("\u2581", " ")


def test_texts_with_u2581_are_kept_and_counted_where_the_tokenizer_loses_it(tmp_path):
    texts = ["a\u2581b", "\u2581\u2581", "plain", "é"]
    assert build_texts(tmp_path / "d", texts)["noticed"] == {}
    meta = build_texts(tmp_path / "c", texts, WithSpaces())
    assert meta["noticed"] == {"texts_with_u2581": 2} and meta["docs"]["train"] == 4
    chats = [chat("\u2581", "\udfff\u2581")]  # of chats each turn counts
    meta = build_sft(chats, tmp_path / "s", tokenizer=WithSpaces(), val_frac=0, seed=0)
    assert meta["noticed"] == {"texts_with_lone_surrogates_replaced": 1, "texts_with_u2581": 2}


def test_a_lone_surrogate_is_replaced_and_counted_and_two_halves_are_their_character(tmp_path):
    meta = build_texts(tmp_path / "c", ["a\ud800", "b"])
    assert meta["noticed"] == {"texts_with_lone_surrogates_replaced": 1} and meta["utf8_bytes"]["train"] == 5
    build_texts(tmp_path / "d", ["\ud83d\ude42"])
    for name, text in (("c", "a\ufffdb"), ("d", "🙂")):
        assert ByteTokenizer().decode(np.fromfile(tmp_path / name / "train" / "shard_00000.bin", dtype="<u2")) == text


def test_an_id_outside_the_vocabulary_is_refused_and_one_above_65535_has_32_bits(tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.encode = lambda text: [300]
    with refused("E409", "id 300", "vocab_size=300"):
        build_texts(tmp_path / "c", ["a"], tokenizer)
    tokenizer.vocab_size, tokenizer.encode = 65537, lambda text: [65536, 3 + 10]
    meta = build_texts(tmp_path / "d", ["a"], tokenizer)
    assert (meta["token_dtype"], meta["totals"]["train_tokens"]) == ("uint32-le", 2)
    assert (tmp_path / "d" / "train" / "shard_00000.bin").read_bytes() == b"\0\0\1\0" + b"\x0d\0\0\0"


def test_a_sentinel_that_only_the_ids_show_is_found_too(tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.encode = lambda text: [4] if text == "＜|eot|＞" else [75]  # a normalization may do this
    meta = build_texts(tmp_path / "c", ["＜|eot|＞", "A"], tokenizer)
    assert meta["dropped"] == {"sentinel_in_text": 1} and meta["docs"]["train"] == 1


def test_a_text_beyond_the_budget_is_neither_noticed_nor_refused(tmp_path):
    """Texts are encoded ahead in batches; only the first of these three is ever used."""
    texts = ["ab", "\u2581", "<|eot|>"]
    meta = build_texts(tmp_path / "c", texts, max_train_tokens=2, on_special="raise")
    assert (meta["documents_read"], meta["noticed"], meta["dropped"]) == (1, {}, {})


EOT = {"special_token_ids": {"sys": 1, "usr": 2, "asst": 3, "eot": 4}}


@pytest.mark.parametrize(
    ("keys", "end"),
    [
        ({}, None),
        ({"document_end": None, **EOT}, None),
        ({"document_end": {"id": 7, "token": "</s>"}, **EOT}, (7, "</s>")),
        ({"append_eot": True, **EOT}, (4, SPECIAL_TOKENS[3])),
        ({"append_eot": False, **EOT}, None),
        ({"append_eot": True, "special_token_ids": {}}, None),
    ],
)
def test_what_ends_a_document_is_read_from_caches_of_before_too(keys, end):
    assert end_of_documents(keys, "meta.json") == end


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"document_end": 4}, "document_end is 4, expected null, or the id and the token"),
        ({"document_end": {"id": 4}}, "document_end is {'id': 4}"),
        ({"document_end": {"id": 300, "token": "x"}, "vocab_size": 300}, "document_end.id is 300, .* from 0 to 299"),
        ({"document_end": {"id": True, "token": "x"}}, "document_end.id is True"),
        ({"vocab_size": 65_537}, "vocab_size is 65537, expected an integer from 1 to 65536"),
        ({"vocab_size": 65_537, "token_dtype": "uint16-le"}, "vocab_size is 65537"),
        ({"vocab_size": 2**31 + 1, "token_dtype": "uint32-le"}, "vocab_size is 2147483649"),
        ({"token_dtype": "uint8"}, "token_dtype is 'uint8', expected 'uint16-le' or 'uint32-le'"),
    ],
)
def test_keys_about_ids_that_no_reader_can_use_are_refused(keys, problem):
    with pytest.raises(CacheError, match=problem):
        checked_meta(keys, "meta.json")


def test_ids_of_32_bits_may_be_of_a_large_vocabulary():
    meta = {
        "vocab_size": 151_936,
        "token_dtype": "uint32-le",
        "document_end": {"id": 151_643, "token": "<|endoftext|>"},
    }
    checked_meta(meta, "meta.json")
    assert token_dtype_of(meta, "meta.json") == np.uint32
