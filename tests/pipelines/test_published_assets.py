"""The assets published/NAME: a cache in a bucket, sent once, replaced when the cache changes, checked; nothing foreign
is touched."""

import json
import os
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
from support.dagster_runs import check_alone, metadata, run, settings_with, shell, stale, verdicts
from support.errors import refused
from support.pipeline_seams import cards_are, deliver

from niels_gpt.cache.meta import read_meta
from niels_gpt.exchange.transfer.push import push
from niels_gpt.recipes.records import cache_root
from pipelines.definitions import niels_definitions

LINE = '[published.roam-team]\ncache = "pretrain/roam"\nurl = "bucket/roam"\n'
NAME = "published/roam-team"


@pytest.fixture
def with_line(tmp_path, tiny_model_path):
    """Settings of the sample whose sources.toml has a line."""
    return settings_with(LINE, tmp_path, tiny_model_path)


def test_a_cache_is_sent_once_and_replaced_when_it_changes(with_line, tmp_path):
    bucket = tmp_path / "bucket" / "roam"
    with dg.DagsterInstance.ephemeral() as instance:
        first = run(instance, with_line, "tokenizer", "pretrain/roam", NAME)
        shown, meta = metadata(first)[NAME], read_meta(str(cache_root(with_line) / "pretrain/roam/meta.json"))
        sizes = [path.stat().st_size for path in bucket.rglob("*") if path.is_file()]
        assert shown["run/state"] == "built" and shown["content_sha256"] == meta["content_sha256"]
        assert shown["files"] == len(sizes) and shown["bytes"] == shown["sent_bytes"] == sum(sizes)
        assert shown["place"] == str(bucket)
        tags = first.asset_materializations_for_node("published__roam_team")[0].tags
        assert tags is not None and tags["dagster/data_version"] == meta["content_sha256"]
        assert verdicts(first)["is_there"][0] and NAME not in stale(instance, with_line)
        again = metadata(run(instance, with_line, NAME))[NAME]
        assert again["sent_bytes"] == 0 and again["run/state"].startswith("reused")

        other = replace(with_line, seed=with_line.seed + 1)
        run(instance, other, "pretrain/roam")
        assert NAME in stale(instance, other)
        assert not verdicts(check_alone(instance, other, NAME, "is_there"))["is_there"][0]
        changed = run(instance, other, NAME)
        found = json.loads((bucket / "meta.json").read_bytes())["content_sha256"]
        assert found == metadata(changed)[NAME]["content_sha256"] != meta["content_sha256"]
        assert verdicts(changed)["is_there"][0] and NAME not in stale(instance, other)

        os.truncate(bucket / "train" / "shard_00000.bin", 4)
        assert not verdicts(check_alone(instance, other, NAME, "is_there"))["is_there"][0]
        assert metadata(run(instance, other, NAME))[NAME]["sent_bytes"] > 0
        assert verdicts(check_alone(instance, other, NAME, "is_there"))["is_there"][0]


def test_what_the_line_did_not_push_stays(with_line, tmp_path):
    bucket = tmp_path / "bucket" / "roam"
    with dg.DagsterInstance.ephemeral() as instance:
        run(instance, with_line, "tokenizer", "pretrain/roam")
        cache = cache_root(with_line) / "pretrain" / "roam"
        push(cache, str(bucket))
        before = (bucket / "meta.json").read_bytes()
        run(instance, replace(with_line, seed=with_line.seed + 1), "pretrain/roam")
    with refused("E610", "niels-gpt push ", "bucket/roam --replace"):
        deliver(with_line, NAME)
    assert (bucket / "meta.json").read_bytes() == before
    with refused("E610", "another"):
        deliver(with_line, NAME)  # the attempt has not made it the line's
    push(cache, str(bucket), replace=True)
    assert deliver(with_line, NAME).reused  # as the command of the error leaves it

    Path(with_line.sources_file).write_text(LINE.replace("bucket/roam", "notes"))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with refused("E610", "mine.txt"):
        deliver(with_line, NAME)
    assert os.listdir(tmp_path / "notes") == ["mine.txt"]


@pytest.mark.slow
def test_a_push_that_was_killed_gives_way_to_the_next_version(with_line, tmp_path):
    bucket = tmp_path / "bucket" / "roam"
    with dg.DagsterInstance.ephemeral() as instance:
        run(instance, with_line, "tokenizer", "pretrain/roam")

        def killed(*_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            deliver(with_line, NAME, progress=killed)
        assert os.listdir(bucket) == ["niels_gpt-push.json"]
        run(instance, replace(with_line, seed=with_line.seed + 1), "pretrain/roam")
        done = deliver(with_line, NAME)
    assert json.loads((bucket / "meta.json").read_bytes())["content_sha256"] == done.content_sha256
    assert not (bucket / "niels_gpt-push.json").exists()


def test_a_url_that_is_no_path(with_line, tmp_path):
    lines = '[published.a]\ncache = "tokenizer"\nurl = "memory://published/tokenizer/"\n'
    Path(with_line.sources_file).write_text(lines + '[published.b]\ncache = "imported/x"\nurl = "s3://bucket/x"')
    with dg.DagsterInstance.ephemeral() as instance:
        first = run(instance, with_line, "tokenizer", "published/a")
        assert metadata(first)["published/a"]["place"] == "memory://published/tokenizer"
        assert verdicts(first)["is_there"][0] and "published/a" not in stale(instance, with_line)
        assert metadata(run(instance, with_line, "published/a"))["published/a"]["sent_bytes"] == 0
    graph = niels_definitions("team", with_line, group_prefix="team_").resolve_asset_graph()
    a, b = (graph.get(dg.AssetKey(["team", "published", name])) for name in "ab")
    assert a.group_name == "team_published" and a.parent_keys == {dg.AssetKey(["team", "tokenizer"])}
    assert b.parent_keys == set() and b.kinds == {"s3"}


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the library's own upload
def test_the_card_on_the_hub_is_sent_with_each_content_once(with_line, loopback_hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_geheim")
    url = "hf://datasets/somebody/published-roam"
    Path(with_line.sources_file).write_text(LINE.replace("bucket/roam", url))

    def card():
        repository = loopback_hub.repositories["somebody/published-roam"]
        return bytes(repository.commits[repository.refs["main"]]["README.md"])

    with dg.DagsterInstance.ephemeral() as instance:
        run(instance, with_line, "tokenizer", "pretrain/roam")
        first = deliver(with_line, NAME)
        assert not first.reused and first.content_sha256.encode() in card()
        with cards_are("another one"):
            assert deliver(with_line, NAME).reused and first.content_sha256.encode() in card()
            run(instance, replace(with_line, seed=with_line.seed + 1), "pretrain/roam")
            assert not deliver(with_line, NAME).reused and card() == b"another one"


@pytest.mark.parametrize(
    "url",
    [
        '"s3://user:hunter2@bucket/x"',
        '"s3://bucket/x?key=hunter2"',
        '"s3://user:hunter2@bucket/x"\nto = "olmo"',
        '"ftp://bucket/x"',
        '["s3://bucket/x"]',
    ],
)
def test_urls_with_credentials_and_malformed_lines_are_refused(url, with_line):
    Path(with_line.sources_file).write_text(f'[published.x]\ncache = "pretrain/roam"\nurl = {url}')
    with pytest.raises(ValueError, match=r"sources\.toml, published\.x") as found:
        niels_definitions(settings=with_line)
    assert "hunter2" not in str(found.value) and getattr(found.value, "code", None) == "E104"


def test_two_lines_for_one_place_are_refused(with_line):
    export = '[export.x]\ncache = "pretrain/roam"\nto = "olmo"\nfolder = "bucket/roam"'
    Path(with_line.sources_file).write_text(f"{LINE}{export}")
    with refused("E104", NAME, "export/x"):
        deliver(with_line, NAME)


@pytest.mark.slow
def test_the_command_line_selects_it_by_its_name(with_line, tmp_path):
    (tmp_path / "home").mkdir()
    named = {"DAGSTER_HOME": str(tmp_path / "home"), "DAGSTER_MODULE_NAME": "pipelines.definitions"}
    named |= {f"NIELS_GPT_{name}".upper(): str(getattr(with_line, name)) for name in ("cache_dir", "tokenizer")}
    done = shell(tmp_path, f"dagster asset materialize --select pretrain/roam,{NAME}", **named)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "bucket" / "roam" / "meta.json").is_file()
