"""Recipes mend what is broken, refuse what does not fit, and never make a passing trouble permanent."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from support.byte_tokenizer import ByteTokenizer
from support.power_loss import Disk, put, recorded_below

from niels_gpt.cache import read_meta, write_meta
from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.recipes.plan import plan, recipes
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import load_tokenizer


@pytest.fixture
def own(mirror, tmp_path):
    """A mirror that a test may break."""
    return shutil.copytree(mirror, tmp_path / "own")


def test_a_relative_mirror_is_the_same_mirror_and_its_notes_go_with_the_hub(settings, mirror, monkeypatch):
    first = {key: recipe(settings).fingerprint for key, recipe in recipes(settings).items()}
    monkeypatch.chdir(mirror.parent)
    relative = dataclasses.replace(settings, source_root=mirror.name)
    assert {key: recipe(relative).fingerprint for key, recipe in recipes(settings).items()} == first
    of_the_hub = dataclasses.replace(settings, source_root="hub", roam_dir=f"{mirror.name}/roam")
    assert recipes(of_the_hub)["pretrain/roam"](of_the_hub).meta["train_tokens"] > 0


@pytest.mark.parametrize("key", ["pretrain/roam", "sft/oasst1", "tokenizer"])
def test_a_damaged_meta_json_is_built_anew(settings, key):
    before = recipes(settings)["pretrain/roam"](settings), recipes(settings)["sft/oasst1"](settings)
    meta = Path(settings.cache_dir) / key / "meta.json"
    whole = meta.read_bytes()
    meta.write_bytes(whole[:40])
    assert "up to date" not in {item.action for item in plan(settings, list(recipes(settings))) if item.key == key}
    assert [recipes(settings)[outcome.key](settings).meta for outcome in before] == [outcome.meta for outcome in before]
    assert meta.read_bytes() == whole


def test_a_description_that_another_builder_wrote_is_not_taken_for_the_recipes(settings):
    outcome = recipes(settings)["pretrain/roam"](settings)
    write_meta(str(outcome.path / "meta.json"), {**outcome.meta, "dataset_name": None, "source": {"counters": {}}})
    again = recipes(settings)["pretrain/roam"](settings)
    assert not again.reused
    assert again.meta == outcome.meta == read_meta(str(outcome.path / "meta.json"))


def test_a_recorded_revision_is_kept_for_its_own_dataset_only(settings):
    hub = dataclasses.replace(settings, source_root="hub")
    facts = {"revision": "abc", "licence": "apache-2.0", "fingerprint": f"{hub.oasst1_dataset}@abc"}
    assert resolve_source(hub, "oasst1").provenance(facts)["revision"] == "abc"
    other = dataclasses.replace(hub, oasst1_dataset="me/other")
    assert resolve_source(other, "oasst1").provenance(facts, ask_hub=False)["revision"] is None


def test_meta_names_the_model_that_made_the_ids_even_if_its_file_is_replaced_meanwhile(tiny_model_path, tmp_path):
    model = tmp_path / "spm.model"
    shutil.copyfile(tiny_model_path, model)
    tokenizer = load_tokenizer(model)

    def documents():
        yield None, "some words"
        model.write_bytes(b"another model")

    sizes = {"max_train_tokens": 9, "max_val_tokens": 0, "shard_bytes": 100, "seed": 0, "shuffle_buffer": None}
    meta = build_pretrain(documents(), tmp_path / "c", tokenizer=tokenizer, **sizes)
    assert meta["tokenizer_sha256"] == tokenizer.sha256
    fake = build_pretrain([(None, "abc")], tmp_path / "d", tokenizer=ByteTokenizer(), **sizes)
    assert fake["tokenizer_sha256"] is None


def test_a_source_that_cannot_be_read_does_not_stop_the_tokenizer_but_it_is_made_again_later(own):
    rows = next((own / "databricks").rglob("*.jsonl"))
    good = rows.read_text()
    rows.write_text('{"instruction": \n')
    settings = Settings(source_root=str(own), cache_dir=str(own / "c"), vocab_size=600)
    first = ensure_tokenizer(settings)
    assert first.meta["trained_on_bytes"]["dolly15k"] == "failed"
    assert ensure_tokenizer(settings).reused  # not once for each cache: only a change of that source is a reason
    rows.write_text(good)
    second = ensure_tokenizer(settings)
    assert (second.reused, second.meta["trained_on_bytes"]["dolly15k"] == "failed") == (False, False)
    assert ensure_tokenizer(settings).reused


def test_a_build_that_is_up_to_date_clears_what_a_late_kill_left(settings, tmp_path):
    """Killed anywhere behind the commit: the next run leaves the version, its recipe and an empty lock."""
    recorded = dataclasses.replace(settings, cache_dir=str(tmp_path / "recorded"))
    ensure_tokenizer(recorded)
    trace = recorded_below(tmp_path / "recorded", lambda: recipes(recorded)["pretrain/roam"](recorded))
    committed = next(n for n, done in enumerate(trace) if done[0] == "rename" and done[2] == "pretrain/roam")
    cuts = range(committed + 1, len(trace) + 1)
    for number in cuts:
        disk = Disk({})
        disk.apply(trace[:number])
        folder = tmp_path / str(number)
        put(disk.left("kill"), folder)
        shutil.copytree(tmp_path / "recorded" / ".versions", folder / ".versions")
        (folder / "tokenizer").symlink_to((tmp_path / "recorded" / "tokenizer").readlink())
        left = folder / "pretrain" / ".versions" / "roam"
        (left / "lock").write_text("user me, host here, pid 1")
        recipes(settings)["pretrain/roam"](dataclasses.replace(settings, cache_dir=str(folder)))
        version = (folder / "pretrain" / "roam").resolve()
        assert {path.name for path in left.iterdir()} == {"lock", "recipe.json", version.name}
        assert not (left / "lock").read_text() and not list(version.glob(".*"))
    assert len(cuts) > 5


def test_what_is_not_a_builders_is_not_cleared(settings):
    recipes(settings)["pretrain/roam"](settings)
    left = Path(settings.cache_dir) / "pretrain" / ".versions" / "roam"
    for name in ("building-0123456789ab", "building-0123456789ac.journal"):
        (left / name).mkdir()
        (left / name / "holiday.jpg").touch()
    for name in (".notes.tmp", ".recipe.json.tmp"):
        (left / name).touch()
    (left / ".meta.json.01234567.tmp").touch()
    before = {path.name for path in left.iterdir()}
    recipes(settings)["pretrain/roam"](settings)
    assert before - {path.name for path in left.iterdir()} == {".meta.json.01234567.tmp"}


def test_training_settings_that_change_make_the_tokenizer_anew(own):
    settings = Settings(source_root=str(own), cache_dir=str(own / "c"), vocab_size=600)
    ensure_tokenizer(settings)
    for change in ({"vocab_size": 500}, {"tokenizer_max_bytes": 60_000}, {"character_coverage": 0.99}):
        assert not ensure_tokenizer(dataclasses.replace(settings, **change)).reused


def test_a_new_tokenizer_says_which_caches_wait_for_their_rebuild(settings, caplog):
    recipes(settings)["pretrain/roam"](settings)
    recipes(settings)["sft/oasst1"](settings)
    recipes(settings)["pretrain/roam"](dataclasses.replace(settings, tokenizer=None))
    assert "readers" not in caplog.text.lower()  # the one that is there stays until another one is asked for
    other = Path(settings.cache_dir).parent / "other"
    trained = ensure_tokenizer(Settings(source_root="sample", cache_dir=str(other), vocab_size=600))
    meta = read_meta(str(trained.path / "meta.json"))
    write_meta(str(trained.path / "meta.json"), {**meta, "trained_on": "mirror"})
    recipes(settings)["pretrain/roam"](dataclasses.replace(settings, tokenizer=str(trained.path / "spm.model")))
    assert "Readers then refuse pretrain/roam, sft/oasst1 until" in caplog.text


def test_a_book_whose_name_begins_like_a_split_is_a_book(settings, own):
    (own / "gutenberg" / "testament.txt").write_text("In the beginning of this book there was a name.\n")
    outcome = recipes(settings)["pretrain/gutenberg"](dataclasses.replace(settings, source_root=str(own)))
    assert outcome.meta["documents_read"] == len(list((own / "gutenberg").iterdir()))
