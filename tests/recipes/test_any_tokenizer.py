"""Whole builds with tokenizers of Hugging Face: every command and reader takes their caches like any others."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from support.commands import niels_gpt
from support.errors import refused
from support.made_tokenizers import any_tokenizer, made_tokenizer

from niels_gpt.cache import CacheError, PretrainTokenStreamDataset, read_meta
from niels_gpt.engine.meta import Source, build_identity
from niels_gpt.kinds.kind import Limits
from niels_gpt.kinds.verify import find_damage, verify
from niels_gpt.recipes.plan import plan, recipes
from niels_gpt.recipes.tokenizer import ensure_tokenizer, no_sentinels
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import load_tokenizer

ENDS = {
    "gpt2": "<|endoftext|>",
    "llama3": "<|end_of_text|>",
    "t5": "</s>",
}
TEXTS = [
    "A heron stands in the shallow water.\n\nIt waits.",
    "def f(x):\n\treturn [1,  2]\n",
    "na\u00efve caf\u00e9 \u6f22\u5b57 \U0001f98a",
    "the last one, which is in train or in val",
] + [f"text number {number} of a few more" for number in range(12)]
SPECIAL = ["ends <|endoftext|> here", "<|im_start|>user\nhello<|im_end|>"]


def own(folder, tokenizer, texts=TEXTS, **changed):
    """Return settings of a user-defined source of texts, of the engine that opens at once: none changes the bytes."""
    rows = "".join(json.dumps({"text": text, "id": f"row {number}"}) + "\n" for number, text in enumerate(texts))
    (folder / "rows.jsonl").write_text(rows)
    given = {"engine": "reference", "cache_dir": str(folder / "cache"), "tokenizer": str(tokenizer)}
    return Settings(pretrain=f"own={folder / 'rows.jsonl'}", **{**given, **changed})


def decoded(settings):
    """Return the texts of a cache, sorted, without what ends a document."""
    folder = Path(settings.cache_dir) / "pretrain" / "own"
    end = (read_meta(str(folder / "meta.json")).get("document_end") or {}).get("token", "").replace("\u2581", " ")
    splits = [PretrainTokenStreamDataset(str(folder / split), T=4, device="cpu") for split in ("train", "val")]
    return sorted(document.text.removesuffix(end).removesuffix("<|eot|>") for split in splits for document in split)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "llama3"), id=name) for name in ENDS]
)
def test_a_cache_of_any_tokenizer_is_built_read_checked_and_shown(tmp_path, name):
    settings = own(tmp_path, any_tokenizer(name), engine="auto")
    assert build_token_cache(settings, "own").engine in ("tokenizers", "gigatoken")
    cache, tokenizer = Path(settings.cache_dir) / "pretrain" / "own", load_tokenizer(any_tokenizer(name))
    meta = read_meta(str(cache / "meta.json"))
    assert meta["document_end"] == {"id": tokenizer.eos_id, "token": ENDS[name]}
    assert (meta["special_token_ids"], meta["vocab_size"]) == ({}, tokenizer.vocab_size)
    assert meta["token_dtype"] == ("uint32-le" if tokenizer.vocab_size > 65_536 else "uint16-le")
    assert decoded(settings) == sorted(tokenizer.decode(tokenizer.encode(text)) for text in TEXTS)
    if name != "t5":  # its normalizer changes texts
        assert decoded(settings) == sorted(TEXTS)

    inputs, _ = PretrainTokenStreamDataset(str(cache / "train"), T=8, device="cpu").get_batch(
        B=4, generator=torch.Generator().manual_seed(0)
    )
    assert inputs.dtype == torch.int64 and int(inputs.max()) < tokenizer.vocab_size
    for path in (cache, cache.parent.parent / "tokenizer"):
        assert not find_damage(path, deep=True)
        assert not [each.problems for each in verify(path, Limits(deep=True)).values() if each.problems]
    shown = ""
    for command in (["list", settings.cache_dir], ["stats", str(cache)], ["show", str(cache), "--tokens", "500"]):
        done = niels_gpt(*command)
        assert done.status == 0
        shown += done.out
    assert ENDS[name] in shown and f"{ENDS[name]} (id {tokenizer.eos_id})" in shown
    length = meta["shards"]["train"][0]["tokens"]
    done = niels_gpt("locate", str(cache), "train", str(length - 1))
    assert done.status == 0
    assert f"[[{ENDS[name]}]]" in done.out


def test_back_and_forth_between_tokenizers_of_both_kinds(tmp_path, tiny_model_path):
    first, second = own(tmp_path, made_tokenizer("t5")), own(tmp_path, tiny_model_path)
    before = build_token_cache(first, "own").meta
    shutil.copytree(tmp_path / "cache", tmp_path / "before")
    assert not build_token_cache(second, "own").reused
    left, right = tmp_path / "before" / "pretrain" / "own", tmp_path / "cache" / "pretrain" / "own"
    done = niels_gpt("diff", str(left), str(right))
    assert done.status == 1
    assert "their tokenizers differ" in done.out
    again = build_token_cache(first, "own")
    assert not again.reused and again.meta == before
    assert build_token_cache(first, "own").reused
    assert [item.action for item in plan(first, ["pretrain/own"])] == ["up to date"] * 2
    assert [item.action for item in plan(second, ["pretrain/own"])] == ["copy", "build"]


@pytest.mark.parametrize("choice", ["none", "eos", "<extra_id_0>"])
def test_what_ends_a_document_is_a_setting_and_decides_what_is_built_again(tmp_path, choice):
    settings = own(tmp_path, made_tokenizer("t5"))
    before = build_token_cache(settings, "own").meta
    before_texts = decoded(settings)
    changed = dataclasses.replace(settings, document_end=choice)
    built = build_token_cache(changed, "own")
    assert built.reused is (choice == "eos") and decoded(changed) == before_texts
    cache = Path(settings.cache_dir) / "pretrain" / "own"
    assert not find_damage(cache, deep=True)
    lost = len(TEXTS) if choice == "none" else 0
    totals = [sum(meta["totals"].values()) for meta in (before, built.meta)]
    assert totals[0] - totals[1] == lost


def test_a_failed_first_build_says_that_no_tokenizer_is_there(
    tmp_path,
    caplog,
    monkeypatch,
):
    caplog.set_level("INFO")
    settings = own(tmp_path, made_tokenizer("t5"))
    flags = ["--pretrain", str(settings.pretrain), "--cache-dir", settings.cache_dir, "--document-end", "<nope>"]
    done = niels_gpt("build", *flags, "--tokenizer", str(settings.tokenizer))
    assert done.status == 1
    assert "tokenizer is not there yet: no cache was built" in done.err and "tokenizer" not in done.out
    monkeypatch.setattr("niels_gpt.hub.models.hub_file", lambda *_: None)  # it would wait for the network
    with refused("E403", "tokenizer.json", "tokenizer.model", "spiece.model"):
        ensure_tokenizer(dataclasses.replace(settings, tokenizer="nosuch"))
    assert "no file or folder nosuch; asking the hub" in caplog.text


@pytest.mark.parametrize(("choice", "said"), [("eot", "it has no sentinels"), ("<nope>", "it has no token '<nope>'")])
def test_an_end_that_the_tokenizer_does_not_have_is_refused_by_plan_and_build(tmp_path, choice, said):
    settings = own(tmp_path, made_tokenizer("t5"), document_end=choice)
    (_, planned) = plan(settings, ["pretrain/own"])
    assert planned.action.startswith("cannot be built") and said in planned.action
    with pytest.raises(ValueError, match=said) as caught:
        build_token_cache(settings, "own")
    named = str(settings.tokenizer)
    assert str(caught.value).startswith(f"{named}: no token") and planned.action.startswith(f"cannot be built: {named}")
    flags = ["--cache-dir", settings.cache_dir, "--pretrain", str(settings.pretrain), "--document-end", choice]
    done = niels_gpt("build", "own", *flags, "--tokenizer", named)
    assert done.status == 1
    assert f"error[E102]: pretrain/own: {named}: no token to end a document with: {said}" in done.err
    planned = niels_gpt("build", "own", *flags, "--tokenizer", named, "--dry-run").out
    assert "pretrain/own  cannot be built  0 B" in planned and "\npretrain/own cannot be built:" in planned


def test_a_config_of_another_eos_replaces_the_tokenizer_and_the_caches_that_it_changes(tmp_path):
    folder = shutil.copytree(made_tokenizer("t5"), tmp_path / "tokenizer")
    settings = own(tmp_path, folder)
    without = dataclasses.replace(settings, document_end="none")
    build_token_cache(settings, "own")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<extra_id_0>"}))
    built = build_token_cache(settings, "own")
    assert not built.reused and built.meta["document_end"]["token"] == "<extra_id_0>"
    build_token_cache(without, "own")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert build_token_cache(without, "own").reused
    assert ensure_tokenizer(settings).meta["eos"]["token"] == "</s>"


def test_the_caches_of_a_run_have_one_tokenizer_until_its_files_change(mirror, tmp_path, monkeypatch):
    folder = shutil.copytree(made_tokenizer("t5"), tmp_path / "tokenizer")
    settings = Settings(source_root=str(mirror), cache_dir=str(tmp_path / "c"), tokenizer=str(folder))
    ensure_tokenizer(settings)
    opened = []

    def counted(path, **how):
        opened.append(path)
        return load_tokenizer(path, **how)

    monkeypatch.setattr("niels_gpt.recipes.tokenizer.load_tokenizer", counted)
    for key in ("pretrain/roam", "pretrain/wikitext"):
        assert not recipes(settings)[key](settings).reused
    assert opened == [tmp_path / "c" / "tokenizer"]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<extra_id_0>"}))
    assert recipes(settings)["pretrain/roam"](settings).meta["document_end"]["token"] == "<extra_id_0>"


@pytest.mark.slow
def test_an_eos_that_was_text_decides_which_texts_are_dropped_and_so_what_is_built_again(tmp_path):
    folder = shutil.copytree(made_tokenizer("qwen2"), tmp_path / "tokenizer")
    settings = own(tmp_path, folder, [*TEXTS, "a <tool_call> is text"], document_end="none")
    cache = Path(settings.cache_dir) / "pretrain" / "own"
    assert not sum(build_token_cache(settings, "own").meta["dropped"].values())
    before = build_identity(Source(), load_tokenizer(folder), kind="pretrain")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<tool_call>"}))
    assert (
        build_identity(Source(), load_tokenizer(folder), kind="pretrain") != before
    )  # so no unfinished build is resumed either
    assert [item.action for item in plan(settings, ["pretrain/own"])] == ["copy", "build"]
    built = build_token_cache(settings, "own")
    assert not built.reused and built.meta["dropped"]["special_in_text"] == 1
    assert not find_damage(cache, deep=True)
    assert build_token_cache(settings, "own").reused
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|im_end|>"}))
    assert not sum(build_token_cache(settings, "own").meta["dropped"].values())


def test_the_literal_of_the_unknown_token_is_special_text_and_an_unknown_word_is_not(tmp_path):
    library = pytest.importorskip("tokenizers")
    model = library.models.WordLevel({"<unk>": 0, "the": 1, "in": 2, "text": 3, "<end>": 4}, unk_token="<unk>")
    made = library.Tokenizer(model)
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<unk>", "<end>"])
    (tmp_path / "tokenizer").mkdir()
    made.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    settings = own(tmp_path, tmp_path / "tokenizer", ["the text", "the <unk> in text", "the cat"], document_end="none")
    meta = build_token_cache(settings, "own").meta
    assert meta["dropped"]["special_in_text"] == 1 and meta["unknown_ids"] == 1 and sum(meta["docs"].values()) == 2
    as_text = build_token_cache(dataclasses.replace(settings, on_special="text"), "own").meta
    assert as_text["noticed"]["special_as_text"] == 1 and as_text["unknown_ids"] == 4  # <, unk and > have no piece
    with refused("E305", "<unk>"):
        build_token_cache(dataclasses.replace(settings, on_special="raise"), "own")


def test_a_dry_run_counts_the_files_of_a_tokenizer_that_is_copied(tmp_path):
    folder = any_tokenizer("gpt2")
    tokenizer, _ = plan(own(tmp_path, folder, TEXTS), ["pretrain/own"])
    assert (tokenizer.action, tokenizer.disk_bytes > 1_000_000) == ("copy", True)
    copied = build_token_cache(own(tmp_path, folder, TEXTS), "own").path.parents[1] / "tokenizer"
    assert tokenizer.disk_bytes == sum(file.stat().st_size for file in copied.iterdir() if file.name != "meta.json")


@pytest.mark.parametrize("name", ["gpt2", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_special_tokens_in_texts_are_dropped_refused_or_text_and_never_the_token(tmp_path, name):
    tokenizer = load_tokenizer(any_tokenizer(name))
    special = [text for text in SPECIAL if set(tokenizer.encode(text)) & tokenizer.control_ids]
    assert len(special) == (2 if name == "qwen2" else 1)
    settings = own(tmp_path, any_tokenizer(name), [*TEXTS, *SPECIAL], document_end="none")
    meta = build_token_cache(settings, "own").meta
    assert meta["dropped"]["special_in_text"] == len(special)
    assert decoded(settings) == sorted({*TEXTS, *SPECIAL} - set(special))

    as_text = dataclasses.replace(settings, on_special="text")
    built = build_token_cache(as_text, "own").meta
    assert built["noticed"]["special_as_text"] == len(special) and not sum(built["dropped"].values())
    assert decoded(as_text) == sorted([*TEXTS, *SPECIAL])
    cache = Path(settings.cache_dir) / "pretrain" / "own"
    ids = [
        token
        for split in ("train", "val")
        for document in PretrainTokenStreamDataset(str(cache / split), T=4, device="cpu")
        for token in document.ids.tolist()
    ]
    assert not tokenizer.control_ids & set(ids) and not find_damage(cache, deep=True)
    done = niels_gpt("stats", str(cache))
    assert done.status == 0
    assert f"special_as_text {len(special)}" in done.out

    with refused("E305", "holds the special token"):
        build_token_cache(dataclasses.replace(settings, on_special="raise"), "own")


@pytest.mark.slow
def test_an_ordinary_token_that_ends_documents_comes_from_no_text(tmp_path):
    special = ["x <tool_call> y", "<tool_call>"]
    settings = own(tmp_path, made_tokenizer("qwen2"), [*TEXTS, *special], document_end="<tool_call>")
    meta = build_token_cache(settings, "own").meta
    assert meta["dropped"]["special_in_text"] == len(special) and decoded(settings) == sorted(TEXTS)
    cache = Path(settings.cache_dir) / "pretrain" / "own"
    assert not find_damage(cache, deep=True)
    # As text too: the library always gives the id of an added token that is not special.
    for choice, document in (
        ("raise", "document 'row 16': "),
        ("text", r"source \('row 16' \(it begins 'x <tool_call>"),
    ):
        with pytest.raises(ValueError, match=rf"{document}.*holds the special token '<tool_call>'.*--on-special drop"):
            build_token_cache(dataclasses.replace(settings, on_special=choice), "own")


@pytest.mark.slow
def test_the_way_back_has_the_settings_that_each_cache_was_built_with(tmp_path, caplog):
    first = own(tmp_path, made_tokenizer("t5"), document_end="<extra_id_0>")
    other = dataclasses.replace(first, pretrain=f"more={tmp_path / 'rows.jsonl'}", document_end="auto")
    before = [build_token_cache(first, "own").meta, build_token_cache(other, "more").meta]
    new = dataclasses.replace(other, tokenizer=str(made_tokenizer("qwen2")), document_end="none", on_special="text")
    build_token_cache(new, "more")
    said = next(text for text in caplog.messages if text.startswith("for the old one: "))
    for command in said.removeprefix("for the old one: ").split(" && "):
        assert niels_gpt(*shlex.split(command)[1:]).status == 0
    caches = tmp_path / "cache" / "pretrain"
    assert [read_meta(str(caches / name / "meta.json")) for name in ("own", "more")] == before


def test_a_build_of_all_leaves_out_chats_without_sentinels_and_one_that_names_them_fails(mirror, tmp_path):
    settings = Settings(source_root=str(mirror), cache_dir=str(tmp_path / "c"), tokenizer=str(made_tokenizer("t5")))
    flags = ["--source-root", str(mirror), "--cache-dir", settings.cache_dir, "--tokenizer", str(settings.tokenizer)]
    done = niels_gpt("build", "--all", *flags, "--dry-run")
    assert done.status == 0
    assert "left out: the tokenizer has no sentinels" in done.out
    done = niels_gpt("build", "--all", *flags)
    assert done.status == 0
    out, err = done.out, done.err
    assert "warning[W411]: sft/dolly15k, sft/oasst1, trees/oasst1 left out" in err and "pretrain/wikitext" in out
    assert "sft/dolly15k, sft/oasst1, trees/oasst1 mark the turns of their chats by them" in err
    assert not (tmp_path / "c" / "sft").exists() and not (tmp_path / "c" / "trees").exists()
    assert niels_gpt("build", "dolly15k", *flags, "--dry-run").status == 1
    done = niels_gpt("build", "dolly15k", *flags)
    assert done.status == 1
    error = done.err
    assert "error[E404]" in error and "niels-gpt add-sentinels" in error and "niels-gpt build dolly15k" in error
    with refused("E404"):
        recipes(settings)["sft/oasst1"](settings)


def test_with_the_sentinels_added_as_printed_every_cache_is_built(mirror, tmp_path):
    (tmp_path / "t5").mkdir()
    for file in made_tokenizer("t5").iterdir():
        (tmp_path / "t5" / file.name).symlink_to(file)
    flags = ["--source-root", str(mirror), "--cache-dir", str(tmp_path / "c"), "--follow-links"]
    flags += ["--tokenizer", str(tmp_path / "t5")]
    done = niels_gpt("build", "dolly15k", *flags)
    assert done.status == 1
    commands = done.err.strip().rpartition("Add them: ")[2].split(" && ")
    for command in commands:
        assert niels_gpt(*shlex.split(command)[1:]).status == 0
    again = no_sentinels(Settings(tokenizer=str(tmp_path / "t5")), ["sft/oasst1"], tmp_path / "t5")
    assert again.remedy == "A copy has them: niels-gpt build oasst1 --tokenizer t5_with_sentinels"
    other = no_sentinels(Settings(tokenizer=str(tmp_path / "t5")), ["sft/oasst1"], made_tokenizer("qwen2"))
    assert "t5_with_sentinels_2 && " in other.remedy
    file = str(tmp_path / "t5" / "tokenizer.json")
    assert no_sentinels(Settings(tokenizer=file), ["sft/oasst1"], Path(file)).remedy == again.remedy
    flags[-1] = "t5_with_sentinels"
    done = niels_gpt("build", "--all", *flags)
    assert done.status == 0
    assert "W411" not in done.err and "sft/dolly15k" in done.out
    meta = read_meta(str(tmp_path / "c" / "sft" / "oasst1" / "meta.json"))
    assert meta["tokenizer_sha256"] == load_tokenizer("t5_with_sentinels").sha256
    roam = read_meta(str(tmp_path / "c" / "pretrain" / "roam" / "meta.json"))
    assert roam["document_end"]["id"] == meta["special_token_ids"]["eot"]
    for key in recipes(Settings()):
        assert not find_damage(tmp_path / "c" / key, deep=True)
    done = niels_gpt("show", str(tmp_path / "c" / "sft" / "oasst1"))
    assert done.status == 0
    assert "<|asst|>" in done.out


def test_a_recipe_trains_a_byte_level_tokenizer_and_keeps_it(tmp_path):
    settings = own(tmp_path, "", tokenizer_kind="bpe", vocab_size=300)
    settings = dataclasses.replace(settings, tokenizer=None)
    built = build_token_cache(settings, "own")
    tokenizer = load_tokenizer(tmp_path / "cache" / "tokenizer")
    assert (tokenizer.kind, built.meta["special_token_ids"]) == (
        "huggingface",
        {"sys": 0, "usr": 1, "asst": 2, "eot": 3},
    )
    assert ensure_tokenizer(settings).reused and build_token_cache(settings, "own").reused
    assert decoded(settings) == sorted(TEXTS)
    other = dataclasses.replace(settings, tokenizer_kind="sentencepiece", vocab_size=320)
    assert not build_token_cache(other, "own").reused
    assert ensure_tokenizer(other).meta["tokenizer_kind"] == "sentencepiece"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_changed_file_of_the_installed_tokenizer_is_damage_and_no_build_uses_it(tmp_path, name):
    settings = own(tmp_path, made_tokenizer("t5"))
    build_token_cache(settings, "own")
    installed = tmp_path / "cache" / "tokenizer"
    (installed / name).write_bytes((installed / name).read_bytes() + b" ")
    assert name in {damage.file for damage in find_damage(installed, deep=False)}
    with pytest.raises(CacheError, match=name):
        build_token_cache(dataclasses.replace(settings, tokenizer=None, own_val_frac=0.2), "own")


def test_a_file_that_the_meta_does_not_name_changes_nothing_unseen(tmp_path):
    settings = own(tmp_path, made_tokenizer("t5"))
    build_token_cache(settings, "own")
    (tmp_path / "cache" / "tokenizer" / "special_tokens_map.json").write_text('{"eos_token": "<pad>"}')
    with refused("E403", "special_tokens_map.json", "meta.json"):
        build_token_cache(dataclasses.replace(settings, tokenizer=None, own_val_frac=0.2), "own")
