"""A cache in a dataset repository of the hub: one commit, private, read back at one commit."""

import pytest
from support import small_builds
from support.commands import niels_gpt
from support.disk import META_NAME
from support.errors import refused
from support.kinds import fresh
from support.small_builds import whole_version

from niels_gpt.exchange.transfer import fetch, push

# The library's own upload: httpx has another name for what it passes.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
URL = "hf://datasets/somebody/wiki-cache"


@pytest.fixture(autouse=True)
def plain_uploads(monkeypatch):
    """Let the library upload by LFS, which the loopback hub has, and know a token."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_geheim")


def test_a_cache_is_one_commit_and_comes_back(loopback_hub, tmp_path):
    small_builds.pretrain(tmp_path / "wiki")
    small_builds.pretrain(tmp_path / "other", 1)
    push.push(tmp_path / "wiki", URL, card=b"# A cache\n")
    repository = loopback_hub.repositories["somebody/wiki-cache"]
    assert len(loopback_hub.asked("/commit/main")) == 1 and len(repository.commits) == 2
    assert {META_NAME, "README.md", "train/shard_00000.bin"} <= repository.commits[repository.refs["main"]].keys()
    assert loopback_hub.created["somebody/wiki-cache"]["visibility"] == "private"
    first = repository.refs["main"]
    assert push.push(tmp_path / "wiki", URL).sent_bytes == 0
    with refused("E610", "another"):
        push.push(tmp_path / "other", URL)
    push.push(tmp_path / "other", URL, replace=True)
    fetch.pull(URL, tmp_path / "second")
    fetch.pull(f"{URL}@{first}", tmp_path / "first")
    assert whole_version(tmp_path / "first") == whole_version(tmp_path / "wiki")
    assert whole_version(tmp_path / "second") == whole_version(tmp_path / "other")


@pytest.mark.parametrize("kind", ["native", "draft vocabulary"])
def test_the_command_sends_a_cache_of_eagle3_with_its_card(kind, loopback_hub, tmp_path):
    cache = fresh(kind, tmp_path / "caches")
    assert niels_gpt("push", cache, URL).status == 0
    repository = loopback_hub.repositories["somebody/wiki-cache"]
    assert b"target model" in repository.commits[repository.refs["main"]]["README.md"]
    assert niels_gpt("pull", URL, tmp_path / "there").status == 0
    assert (tmp_path / "there" / META_NAME).read_bytes() == (cache / META_NAME).read_bytes()


def test_a_file_that_differs_at_the_hub_is_sent_again_on_request(loopback_hub, tmp_path):
    small_builds.pretrain(tmp_path / "wiki")
    push.push(tmp_path / "wiki", URL)
    repository = loopback_hub.repositories["somebody/wiki-cache"]
    files = repository.commits[repository.refs["main"]]
    shard = files["train/shard_00000.bin"]
    loopback_hub.add("somebody/wiki-cache", {**files, "train/shard_00000.bin": bytes(len(shard))})
    with refused("E611", f"niels-gpt push CACHE {URL} --check"):
        fetch.pull(URL, tmp_path / "damaged")
    push.push(tmp_path / "wiki", URL, check=True)
    fetch.pull(URL, tmp_path / "mended")
    assert whole_version(tmp_path / "mended") == whole_version(tmp_path / "wiki")


def test_foreign_files_and_refusals_are_said_without_a_token(loopback_hub, tmp_path):
    small_builds.pretrain(tmp_path / "wiki")
    loopback_hub.add("somebody/wiki-cache", {"notes.txt": b"mine"})
    with refused("E610", "notes.txt"):
        push.push(tmp_path / "wiki", URL, replace=True)
    loopback_hub.add("somebody/wiki-cache", {"README.md": b""})
    loopback_hub.fail("/lfs/", status=403)
    with refused("E612", "403") as caught:
        push.push(tmp_path / "wiki", URL)
    assert "geheim" not in str(caught.value)
    with refused("E612", "meta.json"):
        fetch.pull(URL, tmp_path / "none")


def test_a_cache_on_the_hub_is_looked_at_and_verified(loopback_hub, tmp_path):
    small_builds.pretrain(tmp_path / "wiki")
    push.push(tmp_path / "wiki", URL, card=b"# A cache\n")
    assert niels_gpt("stats", URL, "--json").json == niels_gpt("stats", tmp_path / "wiki", "--json").json | {
        "cache": URL
    }
    for deep in ((), ("--deep",)):
        assert niels_gpt("verify", URL, "--json", *deep).json[URL]["damages"] == []
    repository = loopback_hub.repositories["somebody/wiki-cache"]
    files = repository.commits[repository.refs["main"]]
    loopback_hub.add("somebody/wiki-cache", {**files, "train/shard_00000.bin": b"", "more.txt": b"x"})
    done = niels_gpt("verify", URL, "--json")
    assert done.status == 3
    assert {each["file"] for each in done.json[URL]["damages"]} == {"train/shard_00000.bin", "more.txt"}
