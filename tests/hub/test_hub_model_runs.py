"""A run of precompute with a target by hub id: it records and keeps one commit, and equals the run of the folder."""

import json

import pytest
from support import chat_tokenizers as kinds
from support.commands import niels_gpt
from support.disk import META_NAME
from support.eagle3_runs import whole_tree
from support.tiny_hub_models import CHAT

from niels_gpt.eagle3.cache import verify

pytest.importorskip("transformers", reason="running a target needs the extra eagle3")
pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.fixture
def run(tmp_path, model_id):
    """Run the command for the target of this test, into tmp_path / a name; returns its status and errors."""
    chats = [[CHAT[0], {**CHAT[1], "content": kinds.SENTENCES[number % 5]}] for number in range(10)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))

    def done(folder, *more, target=model_id):
        what = ["--target-model", target, "--input-data", str(tmp_path / "chats.jsonl")]
        how = ["--seq-length", "64", "--shard-size", "4", "--threads", "1", "--device", "cpu"]
        where = ["--output-dir", str(tmp_path / folder)]
        ended = niels_gpt(*what, *how, *where, *more, module="niels_gpt.eagle3.precompute")
        return ended.status, ended.err

    return done


def recorded(folder):
    """Return what the plan of a cache says of its target."""
    target = json.loads((folder / "sidecar" / "plan.json").read_bytes())["target"]
    return target


def test_a_run_keeps_its_commit_while_main_moves_and_a_new_one_takes_the_new(
    loopback_hub, model_id, first, second, tmp_path, run
):
    old = loopback_hub.add_model(model_id, first)
    assert run("c") == (0, "")
    cache, made = tmp_path / "c", whole_tree(tmp_path / "c")
    found = recorded(cache)
    assert (found["name"], found["revision"], found["weights_sha256"]) == (model_id, old, None)
    assert json.loads((cache / META_NAME).read_bytes())["target"] == found and verify(str(cache)) == []
    new = loopback_hub.add_model(model_id, second)
    for path in (cache / "shard-000001.safetensors", cache / "sidecar" / "shard-000001.json", cache / META_NAME):
        path.unlink()
    loopback_hub.requests.clear()
    assert run("c", "--resume") == (0, "")
    assert whole_tree(cache) == made
    assert not [one.path for one in loopback_hub.requests if old not in one.path]
    assert run("d") == (0, "") and recorded(tmp_path / "d")["revision"] == new
    assert run("e", "--revision", old) == (0, "") and whole_tree(tmp_path / "e") == made


def test_a_run_is_that_of_the_folder_but_for_what_it_says_of_its_target(loopback_hub, model_id, first, tmp_path, run):
    loopback_hub.add_model(model_id, first)
    assert run("by_id") == run("by_folder", target=str(first)) == (0, "")
    shards = [f"shard-{number:06d}.safetensors" for number in range(3)]
    for name in (*shards, "target_embeddings.safetensors", "sidecar/samples.safetensors", "sidecar/batches.jsonl"):
        assert (tmp_path / "by_id" / name).read_bytes() == (tmp_path / "by_folder" / name).read_bytes()


@pytest.mark.slow
def test_a_build_keeps_the_commit_of_its_target_until_refresh_asks_for_the_newest(
    loopback_hub, model_id, first, second, run, tmp_path
):
    old = loopback_hub.add_model(model_id, first)
    flags = {"target": model_id, "source": "chats.jsonl", "seq-length": "64", "device": "cpu", "check-samples": "0"}
    build = ["build", "eagle3/targets", "--cache-dir", "c"]
    build += [word for name, value in flags.items() for word in (f"--eagle3-{name}", value)]

    def revision():
        return recorded(tmp_path / "c" / "eagle3" / "targets")["revision"]

    assert niels_gpt(*build).status == 0 and revision() == old
    new = loopback_hub.add_model(model_id, second)
    loopback_hub.requests.clear()
    assert niels_gpt(*build, "--dry-run").status == 0
    assert niels_gpt(*build).status == 0 and revision() == old
    assert not [one.path for one in loopback_hub.requests if old not in one.path], "nobody asked for a newer one"
    assert niels_gpt(*build, "--refresh").status == 0 and revision() == new
    assert niels_gpt(*build).status == 0 and revision() == new
