"""Which versions of a cache stay, which leftovers can be removed, and what becomes of a folder in the way."""

import json
import os
import shutil
from pathlib import Path

import pytest
from support.byte_tokenizer import build, train_text
from support.disk import remove, versions_dir
from support.fault_builds import interrupt
from support.power_loss import tree_of
from support.small_builds import BUILDERS, pretrain, whole_version

from niels_gpt.cache.meta import write_meta
from niels_gpt.storage import versions


def removable(path):
    """Return what `removable` lists, by name."""
    entries = versions.removable(path)
    assert len({entry for entry, _ in entries}) == len(entries)
    return {str(entry.relative_to(versions_dir(path))): why for entry, why in entries}


def versions_of(cache, *texts):
    """Build a version of each text, each a nanosecond younger; returns their names."""
    names = []
    for number, text in enumerate(texts):
        names.append(build(cache, [text])["content_sha256"][:12])
        os.utime(versions_dir(cache) / names[-1], ns=(number, number))
    return names


@pytest.mark.usefixtures("small_batches")
def test_old_versions_dead_builds_and_leftovers_are_removable_each_with_its_reason(tmp_path):
    cache, folder = tmp_path / "c", versions_dir(tmp_path / "c")
    names = versions_of(cache, "one", "two", "three", "four")
    assert removable(cache) == dict.fromkeys(names[:2], "an old version")

    for kind in BUILDERS:
        interrupt(kind, cache, 30)
    dead = sorted(entry.name for entry in folder.glob("building-*") if entry.suffix != ".journal")
    assert len(dead) == len(BUILDERS)
    for name in ("building", "damaged"):
        (folder / name / "train").mkdir(parents=True)
    (folder / "link").symlink_to("nowhere")
    for leftover in (folder / ".recipe.json.0a1b2c3d.tmp", folder / names[-1] / ".meta.json.0a1b2c3d.tmp"):
        leftover.write_text("half")
    (folder / "recipe.json").write_text("{}")
    left = "left by a process that was killed"
    assert removable(cache) == {
        names[0]: "an old version",
        names[1]: "an old version",
        **{name: "an unfinished build: the same build would resume from it" for name in dead},
        **{f"{name}.journal": "an unfinished build: its journal" for name in dead},
        "building": left,
        "damaged": left,
        "link": left,
        ".recipe.json.0a1b2c3d.tmp": left,
        f"{names[-1]}/.meta.json.0a1b2c3d.tmp": left,
    }
    for entry, _ in versions.removable(cache):
        remove(entry)
    assert {entry.name for entry in folder.iterdir()} == {*names[2:], "lock", "recipe.json"}
    assert removable(cache) == {} and train_text(cache) == "four"


@pytest.mark.parametrize("committed", [0, 1, 2, 3, None])
def test_the_committed_version_stays_however_old_it_is_else_the_newest(tmp_path, committed):
    cache, texts = tmp_path / "c", ("one", "two", "three", "four")
    names = versions_of(cache, *texts)
    cache.unlink()
    if committed is None:
        assert names[3] not in removable(cache) and names[0] in removable(cache)
        return
    cache.symlink_to(Path(".versions", "c", names[committed]))
    newest = next(name for name in reversed(names) if name != names[committed])  # it and one more are kept
    assert set(removable(cache)) == set(names) - {names[committed], newest}
    for entry, _ in versions.removable(cache):
        remove(entry)
    assert train_text(cache) == texts[committed]


@pytest.mark.parametrize("damage", ["changed", "cut", "missing", "no meta.json", "meta.json cut"])
def test_a_good_folder_in_the_way_replaces_a_damaged_version_of_its_content(folder, damage):
    content = pretrain(folder / "c")["content_sha256"]
    version = (folder / "c").resolve()
    shutil.copytree(version, folder / "good")
    good = tree_of(folder / "good")
    shard = next(version.rglob("shard*"))
    if damage == "meta.json cut":
        (version / "meta.json").write_bytes((version / "meta.json").read_bytes()[:40])
    elif damage in ("changed", "cut"):
        shard.write_bytes(shard.read_bytes()[1:] + b"\0" * (damage == "changed"))
    else:
        (shard if damage == "missing" else version / "meta.json").unlink()
    (folder / "c").unlink()
    (folder / "good").rename(folder / "c")
    newest = pretrain(folder / "c", 5)["content_sha256"]
    assert whole_version(folder / "c") == newest != content
    assert tree_of(version) == good
    assert {entry.name for entry in versions_dir(folder / "c").iterdir()} == {"lock", content[:12], newest[:12]}


def test_adoption_takes_the_first_number_that_is_free(folder):
    def adopted(seed):
        """Put a folder without a content sha256 into the way, and build over it; returns what the folder held."""
        pretrain(folder / "elsewhere", seed)
        shutil.copytree((folder / "elsewhere").resolve(), folder / "foreign")
        meta = json.loads((folder / "foreign" / "meta.json").read_bytes())
        del meta["content_sha256"]
        write_meta(str(folder / "foreign" / "meta.json"), meta)
        (folder / "c").unlink(missing_ok=True)
        (folder / "foreign").rename(folder / "c")
        held = tree_of(folder / "c")
        pretrain(folder / "c", seed + 10)
        return held

    first, second = adopted(0), adopted(1)
    place = versions_dir(folder / "c")
    assert [tree_of(place / f"adopted{number}") for number in (0, 1)] == [first, second]
    shutil.rmtree(place / "adopted0")
    third = adopted(2)
    assert [tree_of(place / f"adopted{number}") for number in (0, 1)] == [third, second]
    adopted(3)
    assert {path.name for path in place.glob("adopted*")} == {"adopted0", "adopted1", "adopted2"}
