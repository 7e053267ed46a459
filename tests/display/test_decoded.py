"""What `dataset[i]` gives of documents and examples, and what a notebook shows of readers and batches."""

import pickle
import re
import shutil
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from support.disk import content_sha256, record_of, write_meta
from support.errors import refused
from torch.utils.data import DataLoader

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset, build_sft_cache
from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.meta import tokenizer_of
from niels_gpt.cache.mmap import public_file
from niels_gpt.display.decoded import Decoded
from niels_gpt.sampling import EpochStream, MixtureStream
from niels_gpt.storage.fileio import sha256_file
from niels_gpt.tokenizer import SentencePieceTokenizer

TEXTS = ["The first text.\n", "<script>alert('x')</script> & \x1b[31m", "Third, of more words than a shard holds " * 4]
CHATS = [
    [{"role": "user", "content": "Two <b>and</b> two?"}, {"role": "assistant", "content": "Four."}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
    ],
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory, tiny_tokenizer):
    """A folder of caches: tokenizer/, pretrain/texts (several shards, all of it train) and sft/chats."""
    root = tmp_path_factory.mktemp("decoded") / "cache"
    model = root / "tokenizer" / "spm.model"
    model.parent.mkdir(parents=True)
    shutil.copyfile(tiny_tokenizer.model_path, model)
    record = record_of(model.parent, model.name)
    about = {"kind": "tokenizer", "tokenizer_sha256": record["sha256"], "vocab_size": tiny_tokenizer.vocab_size}
    about |= {"special_token_ids": tiny_tokenizer.special_token_ids(), "files": [record]}
    write_meta(model.parent, about | {"content_sha256": content_sha256([record]), "meta_crc32": ""})
    how = {"tokenizer": SentencePieceTokenizer(model), "seed": 0}
    limits = {"max_train_tokens": 10_000, "max_val_tokens": 0, "shuffle_buffer": None}
    texts = [(None, text) for text in TEXTS]
    build_pretrain(texts, root / "pretrain" / "texts", shard_bytes=80, document_end="eot", **how, **limits)
    build_sft_cache(CHATS, str(root / "sft" / "chats"), val_frac=0, **how)
    return root


def documents(cache):
    """Open the documents."""
    return PretrainTokenStreamDataset(cache / "pretrain" / "texts" / "train", T=4, device="cpu")


def examples(cache):
    """Open the examples."""
    return SFTExampleDataset.open(cache / "sft" / "chats", "train", T=256)


def test_a_document_has_its_ids_and_its_text_across_shards(cache, tiny_tokenizer):
    data = documents(cache)
    assert len(data) == 3 and len(data._split.lengths) > 2
    for number, text in enumerate(TEXTS):
        expected = [*tiny_tokenizer.encode(text), tiny_tokenizer.special_token_ids()["eot"]]
        assert data[number].ids.tolist() == expected and len(data[number]) == len(expected)
        assert data[number].text == text + "<|eot|>" and data[number].mask is None
    assert str(data[1]) == "<script>alert('x')</script> & \\x1b[31m<|eot|>", "a terminal gets no control character"


def test_an_example_has_the_mask_of_its_batch(cache):
    data = examples(cache)
    assert {str(item) for item in data} == {
        "<|usr|>Two <b>and</b> two?<|eot|><|asst|>[[Four.<|eot|>]]",
        "<|sys|>Be short.<|eot|><|usr|>x<|eot|><|asst|>[[y<|eot|>]]",
    }
    x, _, masked = data.get_batch(B=8, generator=torch.Generator().manual_seed(0))
    for row, targets in zip(x.tolist(), masked.tolist(), strict=True):
        item = next(item for item in data if item.ids.tolist() == row[: len(item)])
        assert item.mask is not None
        assert [id for id in targets if id != -100] == item.ids[item.mask].tolist()


@pytest.mark.parametrize("opened", [documents, examples])
def test_items_are_those_of_a_list(cache, opened):
    data = opened(cache)
    texts = [item.text for item in data]
    assert len(texts) == len(data) > 1 and data
    assert data[-1].text == texts[-1] and data[np.int64(0)].text == texts[0]
    for chosen in (slice(1, None), slice(None, None, -1), slice(5, 9), slice(-2, -1)):
        assert [item.text for item in data[chosen]] == texts[chosen]
    for index in (len(data), -len(data) - 1):
        with refused("E102", f"index {index}", f"{-len(data)} <= index < {len(data)}", kind=IndexError):
            data[index]
    with pytest.raises(TypeError):
        data["0"]


@pytest.mark.parametrize("opened", [documents, examples])
def test_a_copy_and_a_loader_give_the_same_items(cache, opened):
    data = opened(cache)
    texts = [item.text for item in data]
    assert [item.text for item in pickle.loads(pickle.dumps(data))] == texts
    assert [pickle.loads(pickle.dumps(item)).text for item in data] == texts
    loader = DataLoader(data, batch_size=None, num_workers=1)
    assert [item.text for item in loader] == texts


class Tags(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags = set()
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        """Keep a tag."""
        self.tags.add(tag)

    def handle_data(self, data):
        """Keep a text."""
        self.words += data


def shown_objects(cache):
    """Yield everything that has a table in a notebook."""
    yield from (documents(cache), documents(cache)[1], examples(cache), examples(cache)[0])
    stream = EpochStream(cache / "pretrain" / "texts" / "train", T=4, global_batch_size=2, seed=0)
    mixture = MixtureStream([stream], weights=[1], seed=0)
    yield from (stream, mixture, next(iter(mixture)), next(iter(stream)))


def test_a_notebook_shows_text_as_text_and_a_repr_is_one_line(cache):
    for item in shown_objects(cache):
        page = Tags(item._repr_html_())
        assert page.tags <= {"table", "caption", "tr", "th", "td", "div", "b", "pre", "span"}
        assert "\n" not in repr(item) and "\x1b" not in repr(item) + item._repr_html_()
    assert "<script>alert('x')</script> & \\x1b[31m<|eot|>" in Tags(documents(cache)[1]._repr_html_()).words
    assert "document 1 of texts, train" in repr(documents(cache)[1])
    marked = re.findall(r"<span[^>]*>(.*?)</span>", examples(cache)[0]._repr_html_())
    assert marked and f"[[{marked[0]}]]".replace("&lt;", "<").replace("&gt;", ">") in str(examples(cache)[0])


def test_a_long_text_is_cut_where_it_is_only_a_glance(cache):
    item = documents(cache)[2]
    long = Decoded(item.name, np.tile(item.ids, 100), None, item._sentinels, item._tokenizer)
    assert len(repr(long)) < 150 and repr(long).endswith(" …>") and long._repr_html_().endswith(" …</pre></div>")
    assert long.text == item.text * 100


def test_ids_without_a_tokenizer_are_still_shown(cache, tmp_path):
    alone = shutil.copytree(cache / "pretrain" / "texts", tmp_path / "texts")
    item = PretrainTokenStreamDataset(alone / "train", T=4, device="cpu")[0]
    assert " ".join(map(str, item.ids[:12].tolist())) in repr(item) and "no tokenizer/" in item._repr_html_()
    with refused("E204", "tokenizer/", kind=FileNotFoundError):
        _ = item.text


def test_without_sentencepiece_a_text_says_what_to_install(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    other = shutil.copytree(cache, cache.with_name("copy"), symlinks=True)  # no open tokenizer of these folders
    with refused("E901", "pip install sentencepiece", kind=ImportError):
        _ = examples(other)[0].text
    assert examples(other)[0].ids.tolist() == examples(cache)[0].ids.tolist()


def test_another_tokenizer_gives_no_text(cache, tmp_path):
    copy = shutil.copytree(cache, tmp_path / "cache", symlinks=True)
    data = documents(copy)
    with open(copy / "tokenizer" / "spm.model", "ab") as model:
        model.write(b"\x12\x00")  # an empty field: it opens, and is another file
    with refused("E402", "spm.model"):
        _ = data[0].text


def test_documents_need_an_index_that_fits(cache, tmp_path):
    copy = shutil.copytree(cache / "pretrain" / "texts", tmp_path / "texts")
    data = PretrainTokenStreamDataset(copy / "train", T=4, device="cpu")
    index = copy / "index" / "train_docs.npy"
    np.save(index, np.load(index)[:-1])
    with refused("E203", "train_docs.npy", "by its meta.json"):
        len(data)
    index.unlink()
    with refused("E204", "train_docs.npy", kind=FileNotFoundError):
        _ = data[0]
    assert data, "its truth needs no index"


HOSTILE = "a\x1b[31m\nb\u202ec\u2028d"


def test_the_name_of_a_folder_changes_no_terminal_and_no_page(cache, tmp_path):
    copy = shutil.copytree(cache, tmp_path / HOSTILE, symlinks=True)
    for item in shown_objects(copy):
        assert not set("\x1b\n\u202e\u2028") & set(repr(item)), repr(item)
        assert not set("\x1b\u202e\u2028") & set(item._repr_html_())
    assert r"a\x1b[31m\nb\u202ec\u2028d" in repr(documents(copy)) and "\n" not in documents(copy)._repr_html_()
    assert repr(examples(copy)).isprintable()
    alone = shutil.copytree(cache / "pretrain", tmp_path / "x" / HOSTILE / "pretrain", symlinks=True).parent
    with refused("E204", "tokenizer/", kind=FileNotFoundError) as raised:
        _ = documents(alone)[0].text
    assert str(raised.value).isprintable() and ".versions" not in str(raised.value)


@pytest.mark.parametrize("error", [RuntimeError, IndexError])
def test_a_tokenizer_that_fails_does_not_fail_a_repr(error):
    class Broken:
        sha256 = "0" * 64

        def decode(self, _, /):
            raise error("no such id <b>")

    item = Decoded("a document", np.arange(3, dtype=np.uint16), None, {}, Broken)
    assert repr(item) == "<a document: 3 tokens: 0 1 2>" and "no such id &lt;b&gt;" in item._repr_html_()


def test_a_page_has_no_more_than_twenty_thousand_characters_of_text():
    class Wordy:
        sha256 = "0" * 64

        def decode(self, ids, /):
            return "\x00" * 15_000 * len(ids)

    item = Decoded("a document", np.arange(3, dtype=np.uint16), np.array([True, False, True]), {}, Wordy)
    assert item._repr_html_().count("\\x00") == 20_000 and item._repr_html_().endswith(" …</pre></div>")
    assert len(repr(item)) < 150


def test_ids_are_read_only_and_a_reader_of_an_earlier_release_opens(cache):
    for data in (
        documents(cache),
        examples(cache),
        SFTExampleDataset.open(cache / "sft/chats", "train", T=256, io="pread"),
    ):
        with pytest.raises(ValueError, match="read-only"):
            data[0].ids[0] = 1
    data = documents(cache)
    data._split.__dict__.pop("_documents", None)
    assert len(data) == 3


def test_without_a_known_sha256_a_replaced_model_gives_its_own_text(cache, tmp_path):
    copy = shutil.copytree(cache, tmp_path / "cache", symlinks=True)
    folder = (copy / "pretrain" / "texts").resolve()
    first, known = tokenizer_of(folder, None), tokenizer_of(folder, sha256_file(copy / "tokenizer" / "spm.model"))
    assert tokenizer_of(folder, None) is first
    with open(copy / "tokenizer" / "spm.model", "ab") as model:
        model.write(b"\x12\x00")
    assert tokenizer_of(folder, None).sha256 != first.sha256 and tokenizer_of(folder, known.sha256) is known


def test_messages_name_the_public_folder(cache, tmp_path):
    train, chats = cache / "pretrain" / "texts" / "train", cache / "sft" / "chats"
    with pytest.warns(UserWarning, match=rf"^{re.escape(str(train))}: .* are shorter than T \+ 1"):
        PretrainTokenStreamDataset(train, T=33, device="cpu")
    with pytest.warns(UserWarning, match=rf"^{re.escape(str(chats))}/train_tokens\.bin: .*T=8 loses"):
        SFTExampleDataset.open(chats, "train", T=8)
    for opened in (
        lambda: PretrainTokenStreamDataset(train, T=10**6, device="cpu"),
        lambda: EpochStream(train, T=10**6, global_batch_size=1, seed=0),
        lambda: SFTExampleDataset.open(chats, "train", T=1, over_length="error"),
    ):
        with refused("E107") as raised:
            opened()
        assert raised.value.path.startswith(str(cache)) and ".versions" not in str(raised.value)
    old = train.resolve().parent.with_name("0" * 12) / "train"
    assert public_file(old) == old, "not the version of that name"
