"""A cache of every kind is sent, fetched, staged, published and described by its meta.json alone."""

import dataclasses
import hashlib
import json
import os
import subprocess

import pytest
from support.buckets import bucket
from support.commands import niels_gpt
from support.disk import META_NAME, change_meta
from support.errors import refused
from support.kinds import KINDS, fresh, judged
from support.pipeline_seams import deliver

from niels_gpt.exchange.card import card_of
from niels_gpt.exchange.transfer.fetch import pull, stage
from niels_gpt.exchange.transfer.push import push
from niels_gpt.settings import Settings

pytestmark = pytest.mark.usefixtures("quick")
EAGLE3 = [kind for kind in KINDS if KINDS[kind].is_eagle3]


def named(cache):
    """The bytes of each file that meta.json names, and of meta.json."""
    meta = json.loads((cache / META_NAME).read_bytes())
    records = [each for key in ("shards", "index", "ids", "loss_bits") for each in _records(meta.get(key, {}))]
    records += [*meta.get("files", []), *([meta["checksums"]] if "checksums" in meta else [])]
    return {name: (cache / name).read_bytes() for name in (META_NAME, *(record["name"] for record in records))}


def _records(splits):
    return [record for value in splits.values() for record in (value if isinstance(value, list) else [value])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_every_kind_comes_back_and_is_read(kind, tmp_path, url):
    cache = fresh(kind, tmp_path / "caches")
    whole, dest = named(cache), tmp_path / "there" / KINDS[kind].place
    assert push(cache, url, check=True).files == len(whole) == len(bucket(url).sizes())
    assert push(cache, url).sent_bytes == 0
    fetched = pull(url, dest)
    assert {path.relative_to(fetched.version).as_posix() for path in fetched.version.rglob("*") if path.is_file()} == {
        *whole
    }
    assert named(dest) == whole and fetched.fetched_bytes == sum(map(len, whole.values())) - len(whole[META_NAME])
    assert pull(url, dest).fetched_bytes == 0
    if kind not in ("rollouts", "sft", "sft with bits", "pretrain"):  # their tokenizer lies beside them
        assert judged(dest, deep=True) == []
        assert list(KINDS[kind].read(dest))
    assert named(stage(str(cache), tmp_path / "near").path) == whole
    if kind != "pretrain":
        with refused("E102", "Leave out --split", kind=ValueError):
            stage(str(cache), tmp_path / "part", split="train")


@pytest.mark.parametrize("kind", EAGLE3)
def test_a_changed_bit_of_a_shard_is_not_sent_and_not_taken(kind, tmp_path, url):
    cache = fresh(kind, tmp_path / "caches")
    push(cache, url)
    name = "shard-000001.safetensors"
    content = bytearray((cache / name).read_bytes())
    content[-3] ^= 1
    with bucket_content(url, name, bytes(content)), refused("E611", name):
        pull(url, tmp_path / "there")
    assert not (tmp_path / "there").exists()
    (cache / name).write_bytes(content)
    with refused("E611", name):
        push(cache, str(tmp_path / "other"))


class bucket_content:
    """Let a bucket have other bytes of a file in the block."""

    def __init__(self, url, name, content):
        self.bucket, self.name, self.content = bucket(url), name, content

    def __enter__(self):
        self.before = self.bucket.read(self.name, 1 << 30)
        self.bucket.write(self.name, self.content)

    def __exit__(self, *_):
        self.bucket.write(self.name, self.before)


@pytest.mark.parametrize("kind", EAGLE3)
def test_a_cache_of_an_earlier_build_is_refused_with_the_command_that_lists_its_shards(kind, tmp_path, url):
    cache = fresh(kind, tmp_path / "caches")
    files = json.loads((cache / META_NAME).read_bytes())["files"]
    change_meta(cache, files=[each for each in files if not each["name"].startswith("shard-")])
    with refused("E208", "does not name all files", "niels-gpt build eagle3/targets", "--resume"):
        push(cache, url)
    assert KINDS[kind].again(cache).status == 0
    assert push(cache, url).files == len(files) + 1


def test_a_shard_with_holes_is_sent_but_not_one_of_holes_alone(tmp_path, url):
    cache = fresh("dense", tmp_path / "caches")
    meta, name = json.loads((cache / META_NAME).read_bytes()), "shard-000001.safetensors"
    for size, is_taken in ((1 << 24, True), (1 << 31, False)):
        os.truncate(cache / name, size)
        digest = hashlib.sha256((cache / name).read_bytes() if is_taken else b"").hexdigest()
        record = {"name": name, "bytes": size, "sha256": digest}
        change_meta(cache, files=[record if each["name"] == name else each for each in meta["files"]])
        if is_taken:
            assert push(cache, str(tmp_path / "mirror")).files == len(meta["files"]) + 1
        else:
            with refused("E203", "holes"):
                push(cache, str(tmp_path / "mirror"), replace=True, check=True)


@pytest.mark.parametrize("kind", [*EAGLE3, "draft vocabulary"])
def test_the_card_says_what_it_is_its_figures_and_how_to_read_and_check_it(kind, tmp_path):
    cache = fresh(kind, tmp_path / "caches")
    meta, text = json.loads((cache / META_NAME).read_bytes()), card_of(cache)
    assert "target model" in text and meta["content_sha256"] in text and "pull hf://" in text
    for number in meta["totals"].values():
        assert f"{number:,}" in text
    code = text.rpartition("```python\n")[2].partition("```")[0].replace("FOLDER", str(cache))
    exec(code, {})
    command = text.partition("cd FOLDER")[2].partition("\n```")[0]
    check = ["bash", "-c", f"set -o pipefail; cd {cache}{command}"]
    assert subprocess.run(check, capture_output=True, text=True, check=True).stdout == ""
    shard = next(cache.glob("*shard-000000.safetensors"), cache / "draft_vocab.json")
    shard.write_bytes(shard.read_bytes()[::-1])
    assert subprocess.run(check, capture_output=True, check=False).returncode != 0


def test_words_of_strangers_in_the_meta_json_of_a_cache_of_targets_stay_text(tmp_path):
    cache = fresh("native", tmp_path / "caches")
    meta = json.loads((cache / META_NAME).read_bytes())
    manifest = {**meta["manifest"], "target_model": "<b>[x](javascript:1)\n# head"}
    change_meta(cache, manifest=manifest, dropped={"<i>": 1}, totals={**meta["totals"], "</p>": 1})
    text = card_of(cache)
    assert "<b>" not in text and "<i>" not in text and "</p>" not in text and "\n# head" not in text
    for damaged in ([], {**meta["manifest"], "targets": "<b>"}):
        change_meta(cache, manifest=damaged)
        with refused("E202", META_NAME):
            card_of(cache)
    assert niels_gpt("card", cache).status == 3


@pytest.mark.parametrize("kind", ["native", "draft vocabulary", "rollouts", "tokenizer"])
def test_a_line_of_sources_toml_publishes_any_kind(kind, tmp_path):
    source = fresh(kind, tmp_path / "made")
    place = {"native": "eagle3/targets", "rollouts": "trees/oasst1"}.get(kind, KINDS[kind].place)
    stage(str(source), tmp_path / "cache" / place)
    lines = tmp_path / "sources.toml"
    lines.write_text(f'[published.team]\ncache = "{place}"\nurl = "bucket"\n')
    settings = dataclasses.replace(Settings(), cache_dir=str(tmp_path / "cache"), sources_file=str(lines))
    assert deliver(settings, "published/team").facts["files"] == len(named(source))
    assert deliver(settings, "published/team").reused
    assert named(tmp_path / "bucket") == named(source)
