"""What begins the chats of an EAGLE-3 cache where their template does not write it: --document-start."""

import json
import shutil
from itertools import pairwise

import pytest
from support import chat_tokenizers as kinds
from support.commands import niels_gpt
from support.disk import canonical_json
from support.eagle3_runs import samples_on_disk, whole_tree
from support.errors import refused
from support.pipeline_seams import build_draft_vocab, build_targets
from support.start_tokenizers import FORMS, start_tokenizer
from support.tiny_hub_models import begin_texts_with, write_model
from tokenizers import Tokenizer

from niels_gpt.chat import Chat, open_tokenizer
from niels_gpt.eagle3.cache import CachedEagle3Dataset, read_manifest
from niels_gpt.settings import Settings

BEGIN = 1
"""Id of <|begin|>, BOS of the tokenizers here."""
PROMPT, WHOLE = ("<|im_start|>user\nHello there.<|im_end|>\n<|im_start|>assistant\n", "I am well.<|im_end|>\n")
CHAT = kinds.turns("Hello there.", "I am well.")
CHATS = [kinds.turns(f"Name river {number}.", "The river is long. " * (1 + 3 * (number == 2))) for number in range(6)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny Llama whose template writes no BOS, and whose post-processor does."""
    return begin_texts_with(write_model(tmp_path_factory.mktemp("target") / "t", seed=0))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The same with a template that writes BOS."""
    return begin_texts_with(write_model(tmp_path_factory.mktemp("written") / "t", seed=0, template=kinds.LLAMA_3))


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    return path


@pytest.fixture
def run(target, chats, tmp_path):
    """Runs precompute; returns how it ended and the cache. start: of --document-start; None: not given."""

    def done(name, *more, start=None, model=target, source=chats):
        what = ["--target-model", model, "--input-data", source, "--output-dir", tmp_path / name]
        how = ["--seq-length", 40, "--threads", 1, "--device", "cpu", "--draft-vocab-size", 30]
        how += [] if start is None else ["--document-start", start]
        return niels_gpt("eagle3", "precompute", *what, *how, *more), tmp_path / name

    return done


def plan_of(cache):
    return json.loads((cache / "sidecar" / "plan.json").read_bytes())


def ids_of(cache):
    """The ids and the masks of each sample."""
    samples = samples_on_disk(cache / "sidecar")
    spans = list(pairwise(samples.starts.tolist()))
    return [[tensor[begin:end].tolist() for begin, end in spans] for tensor in (samples.ids, samples.loss_mask)]


# --- ids --------------------------------------------------------------------------------------------------------------


def test_a_chat_has_the_ids_that_the_tokenizers_own_library_gives_its_text(target):
    library = Tokenizer.from_file(str(target / "tokenizer.json"))
    plain = open_tokenizer(str(target))
    for choice, is_started in ((None, False), ("none", False), ("auto", True), ("<|begin|>", True)):
        opened = open_tokenizer(str(target), start=choice)
        ids, mask = opened.encode_chat(CHAT)
        assert ids == library.encode(PROMPT + WHOLE, add_special_tokens=is_started).ids
        assert (ids[0] == BEGIN) is is_started and mask == [0] * is_started + plain.encode_chat(CHAT)[1]
        assert kinds.supervised(opened, (ids, mask)) == ["I am well.<|im_end|>"]
        for messages, prompt, text in ((CHAT[:1], True, PROMPT), (CHAT, False, PROMPT + WHOLE)):
            found = opened.plain_ids([Chat("a", messages)], prompt=prompt)
            assert found == [library.encode(text, add_special_tokens=is_started).ids]


def test_a_chat_that_begins_with_the_token_stays_as_it_is(written):
    opened = [open_tokenizer(str(written), start=choice) for choice in (None, "auto", "<|begin|>")]
    for each in opened:
        assert each.encode_chat(CHAT) == opened[0].encode_chat(CHAT)
        ids = each.plain_ids([Chat("a", CHAT[:1])], prompt=True)[0]
        assert ids[0] == BEGIN and ids.count(BEGIN) == 1
    ids, mask = open_tokenizer(str(written), start="<|im_start|>").encode_chat(CHAT)
    assert ids[:2] == [2, BEGIN] and mask[0] == 0, "another token comes before it"


@pytest.mark.parametrize("name", FORMS)
def test_auto_is_what_the_post_processor_of_known_models_writes(tmp_path, name):
    folder = start_tokenizer(tmp_path / "t", name)
    opened = open_tokenizer(str(folder), chat_template=kinds.PLAIN, start="auto")
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "User: the heron\nAssistant: a note\n"
    ids = opened.plain_ids([Chat("a", kinds.turns("the heron", "a note"))], prompt=False)[0]
    assert ids == library.encode(text, add_special_tokens=True).ids
    assert [each.token for each in opened.usual_starts] == [FORMS[name]] * (FORMS[name] is not None)


def test_the_projects_own_chat_format_takes_a_token_by_its_name(model):
    plain = open_tokenizer(str(model))
    ids, mask = plain.encode_chat(CHAT)
    assert open_tokenizer(str(model), start="auto").encode_chat(CHAT) == (ids, mask) and not plain.usual_starts
    opened = open_tokenizer(str(model), start="<s>")
    assert opened.start.token == "<s>" and opened.encode_chat(CHAT) == ([opened.start.id, *ids], [0, *mask])
    assert opened.plain_ids([Chat("a", CHAT[:1])], prompt=True)[0][0] == opened.start.id


def test_a_token_that_is_none_and_several_tokens_are_refused_with_names(tmp_path, target, run):
    with refused("E102", "<|begun|>", "--document-start", "<|begin|>"):
        open_tokenizer(str(target), start="<|begun|>")
    folder = begin_texts_with(shutil.copytree(target, tmp_path / "t"), "<|begin|> <|eot|> $A")
    with refused("E102", "<|begin|>", "<|eot|>"):
        open_tokenizer(str(folder), start="auto")
    assert open_tokenizer(str(folder), start="<|begin|>").encode_chat(CHAT)[0][0] == BEGIN
    done, _ = run("c", model=folder)
    assert done.status == 0 and "W414" in done.err and "--document-start '<" in done.err
    done, cache = run("d", start="<|begun|>")
    assert done.status == 1 and "E102" in done.err and not cache.exists()


# --- a cache ----------------------------------------------------------------------------------------------------------


def test_a_cache_has_the_token_in_its_samples_and_nothing_new_without_it(run):
    (without, plain), (none, stated) = run("plain"), run("none", start="none")
    assert without.status == none.status == 0 and whole_tree(plain) == whole_tree(stated)
    assert "document_start" not in plan_of(plain)["tokenizer"]
    done, started = run("started", "--limit", 6, start="auto")
    assert done.status == 0 and "W414" not in done.err
    assert plan_of(started)["tokenizer"]["document_start"] == {"id": BEGIN, "token": "<|begin|>"}
    (ids, masks), (before, masks_before) = ids_of(started), ids_of(plain)
    assert ids == [[BEGIN, *each][:40] for each in before]
    assert masks == [[0, *each][:40] for each in masks_before]
    assert max(map(len, before)) == 40, "one is cut, and the token takes a slot of it"
    for row, item in enumerate(CachedEagle3Dataset(started)):
        width = len(ids[row]) - 1
        assert item["input_ids"][:width].tolist() == ids[row][1:]
        assert item["loss_mask"][:width].tolist() == masks[row][1:]
        assert item["position_mask"].sum() and not item["position_mask"][width:].any()
    shown = niels_gpt("eagle3", "inspect", started)
    assert shown.status == 0 and f"<|begin|> (id {BEGIN})" in shown.out
    checked = niels_gpt("eagle3", "verify", started, "--target", plan_of(started)["target"]["name"])
    assert checked.status == 0, checked.out + checked.err


def test_the_counts_of_the_draft_vocabulary_stay_where_nothing_is_cut(run):
    done, plain = run("plain", "--seq-length", 60)
    started = run("started", "--seq-length", 60, start="auto")[1]
    assert done.status == 0 and read_manifest(started) == read_manifest(plain)
    assert plan_of(started)["samples"]["supervised_tokens"] == plan_of(plain)["samples"]["supervised_tokens"]
    assert plan_of(started)["samples"]["tokens"] == plan_of(plain)["samples"]["tokens"] + len(CHATS)


def test_a_cache_is_continued_with_the_same_token_alone(run):
    started = run("c", "--shard-size", 2, start="auto")[1]
    before = whole_tree(started)
    for start in (None, "none", "<|eot|>"):
        done, _ = run("c", "--shard-size", 2, "--resume", start=start)
        assert done.status == 1 and "E703" in done.err and "tokenizer.document_start" in done.err
    assert whole_tree(started) == before
    for name in ("shard-000001.safetensors", "meta.json"):
        (started / name).unlink()
    done, _ = run("c", "--shard-size", 2, "--resume", start="<|begin|>")
    assert done.status == 0 and "made 1 shards" in done.out and whole_tree(started) == before
    record = plan_of(started)
    for wrong in ({"id": -1, "token": "a"}, {"id": 1}, "<|begin|>"):
        record["tokenizer"]["document_start"] = wrong
        (started / "sidecar" / "plan.json").write_bytes(canonical_json(record))
        done = niels_gpt("eagle3", "inspect", started)
        assert done.status == 3 and "E701" in done.err and "tokenizer.document_start" in done.err


def test_rows_of_ids_have_no_token_put_before_them(tmp_path, run):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}) + "\n")
    done, cache = run("c", start="auto", source=rows)
    assert done.status == 1 and "E709" in done.err and "--document-start" in done.err and not cache.exists()
    done, cache = run("c", source=rows)
    assert done.status == 0 and "W414" not in done.err and ids_of(cache)[0] == [[5, 6, 7]]


# --- the warning ------------------------------------------------------------------------------------------------------


def test_a_warning_counts_chats_without_what_the_tokenizer_would_write(tmp_path, run, written):
    for more in ([], ["--dry-run"]):
        done, _ = run(f"c{len(more)}", *more)
        assert done.status == 0 and done.err.count("W414") == 1
        assert [word for word in ("6 chats", "<|begin|>", "--document-start auto") if word not in done.err] == []
    for start in ("none", "auto"):
        assert "W414" not in run(start, start=start)[0].err
    assert "W414" not in run("written", model=written)[0].err
    silent = write_model(tmp_path / "t", seed=0)
    assert "W414" not in run("silent", model=silent)[0].err
    strict, _ = run("strict", "--strict")
    assert strict.status == 1 and "W414" in strict.err


# --- the target's own replies, and the assets -------------------------------------------------------------------------


def test_replies_are_asked_for_with_the_token_before_each_prompt(tmp_path, target, chats, run):
    def respond(name, *more):
        what = ["--target-model", target, "--input-data", chats, "--output", tmp_path / name, "--threads", 1]
        return niels_gpt("eagle3", "respond", *what, "--device", "cpu", "--max-new-tokens", 4, *more)

    def ids(name):
        return [json.loads(line)["input_ids"] for line in (tmp_path / name).read_text().splitlines()]

    prompts = [kinds.turns(chat[0]["content"]) for chat in CHATS]
    expected = open_tokenizer(str(target)).plain_ids([Chat("a", each) for each in prompts], prompt=True)
    assert respond("plain.jsonl", "--form", "ids").status == 0
    assert respond("started.jsonl", "--form", "ids", "--document-start", "auto").status == 0
    for found, start in ((ids("plain.jsonl"), []), (ids("started.jsonl"), [BEGIN])):
        pairs = zip(found, expected, strict=True)
        assert all(one[: len(other) + len(start)] == [*start, *other] for one, other in pairs)
    assert respond("started.jsonl", "--form", "ids", "--document-start", "<|begin|>").status == 0
    other = respond("started.jsonl", "--form", "ids")
    assert other.status == 1 and "document_start" in other.err
    done = respond("chats.jsonl", "--document-start", "auto")
    assert done.status == 0 and "--document-start auto" in done.out
    tokenizer = open_tokenizer(str(target), start="auto")
    said = [json.loads(line)["messages"] for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    asked = tokenizer.plain_ids([Chat("a", messages[:1]) for messages in said], prompt=True)
    assert asked[0][0] == BEGIN and len(asked) > 1
    for messages, prompt in zip(said, asked, strict=True):
        assert tokenizer.encode_chat(messages)[0][: len(prompt)] == prompt, "the ids of prompt and chat begin alike"
    assert run("c", source=tmp_path / "chats.jsonl", start="auto")[0].status == 0


def test_the_assets_have_the_token_by_a_setting_of_their_own(tmp_path, target, chats, caplog):
    def settings(start=None):
        small = {"target": str(target), "source": str(chats), "seq_length": 40, "draft_vocab_size": 30, "device": "cpu"}
        named = {f"eagle3_{name}": value for name, value in small.items()}
        return Settings(cache_dir=str(tmp_path / "cache"), **named, eagle3_document_start=start)

    plain, vocab = build_targets(settings()), build_draft_vocab(settings())
    warned = [record for record in caplog.records if getattr(record, "code", "") == "W414"]
    assert len(warned) == 1 and "--eagle3-document-start auto" in warned[0].getMessage()
    caplog.clear()
    assert build_targets(settings("none")).reused and build_draft_vocab(settings("none")).reused
    started = build_targets(settings("auto"))
    assert not started.reused and started.fingerprint != plain.fingerprint and "W414" not in caplog.text
    assert build_targets(settings("<|begin|>")).reused and build_draft_vocab(settings("<|begin|>")).reused
    assert build_draft_vocab(settings("auto")).meta["totals"]["tokens"] > vocab.meta["totals"]["tokens"]
    assert ids_of(started.path)[0][0][0] == BEGIN
    with refused("E102", "eagle3_document_start", "<|begun|>"):
        build_targets(settings("<|begun|>"))
