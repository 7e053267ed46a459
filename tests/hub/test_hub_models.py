"""Targets and tokenizers by hub id: one commit throughout, the same bits as from a folder, and clear errors.

The hub is loopback_hub.py; huggingface_hub and transformers are the real ones. Each test has an id of its own, because
they keep what they have downloaded.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.errors import refused, template_by_command
from support.loopback_hub import LoopbackHub
from support.tiny_hub_models import CHAT, target_facts, write_model

from niels_gpt.chat import open_tokenizer
from niels_gpt.eagle3.target import load_target
from niels_gpt.storage.fileio import sha256_file
from niels_gpt.tokenizers.files import TOOL_TEMPLATE_NAME

pytest.importorskip("transformers", reason="running a target needs the extra eagle3")
pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.fixture
def own(first, tmp_path):
    """A copy of the first, that a test may change."""
    shutil.copytree(first, tmp_path / "own")
    return tmp_path / "own"


def opened(name, revision=None):
    return load_target(name, revision=revision, dtype=torch.float32, attention="sdpa", device="cpu")


def is_target(model, folder):
    """Tell whether each weight is, bit for bit, that of a folder."""
    weights, expected = model.state_dict(), load_file(folder / "model.safetensors")
    return weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)


def is_tokenizer(tokenizer, folder):
    """Tell whether a tokenizer and its template are those of a folder."""
    local = open_tokenizer(str(folder))
    names = ("sha256", "template_sha256", "mask_by", "vocab_size", "pad_id", "special_token_ids")
    same = all(getattr(tokenizer, name) == getattr(local, name) for name in names)
    return same and tokenizer.encode_chat(CHAT) == local.encode_chat(CHAT)


ASKS = {"facts": target_facts, "weights": opened, "tokenizer": open_tokenizer}


def ask(what, name, revision=None):
    return opened(name, revision) if what == "weights" else ASKS[what](name, revision=revision)


def test_facts_and_a_tokenizer_have_the_commit_and_no_weights_are_asked_for(loopback_hub, model_id, first):
    commit = loopback_hub.add_model(model_id, first)
    facts = target_facts(model_id)
    assert (facts.name, facts.revision, facts.weights_sha256) == (model_id, commit, None)
    assert facts.config_sha256 == sha256_file(first / "config.json")
    assert (facts.model_type, facts.num_layers, facts.hidden_size, facts.vocab_size) == ("llama", 8, 16, 400)
    assert {one.path.rpartition("/")[2] for one in loopback_hub.requests} == {"config.json"}
    loopback_hub.requests.clear()
    assert is_tokenizer(open_tokenizer(model_id, revision=commit), first)
    assert loopback_hub.requests and all(commit in one.path for one in loopback_hub.requests)


def test_a_target_in_shards_has_the_bits_of_the_folder(loopback_hub, model_id, first, tmp_path):
    commit = loopback_hub.add_model(model_id, write_model(tmp_path, seed=1, max_shard_size="30KB"))
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert is_target(opened(model_id), first)
    assert all(commit in one.path for one in loopback_hub.asked("/model-0"))


def test_a_target_in_the_old_format_is_not_reported_to_a_converting_service(loopback_hub, model_id, own, first):
    torch.save(load_file(own / "model.safetensors"), own / "pytorch_model.bin")
    (own / "model.safetensors").unlink()
    loopback_hub.add_model(model_id, own)
    assert is_target(opened(model_id), first)
    assert not loopback_hub.asked("/api/")


def test_a_tokenizer_of_a_branch_stays_at_its_commit_while_the_branch_moves(
    loopback_hub, model_id, first, second, monkeypatch
):
    loopback_hub.add_model(model_id, first)
    real = loopback_hub.spend

    def moving(method, path, *, body):
        if path.endswith("/tokenizer.json") and not body:
            loopback_hub.add_model(model_id, second)
        return real(method, path, body=body)

    monkeypatch.setattr(loopback_hub, "spend", moving)
    assert is_tokenizer(open_tokenizer(model_id), first)
    assert is_tokenizer(open_tokenizer(model_id), second)


def test_a_branch_a_tag_and_a_commit_are_honoured_and_recorded_as_the_commit(loopback_hub, model_id, first, second):
    old = loopback_hub.add_model(model_id, first, ref="v1.0")
    new = loopback_hub.add_model(model_id, second)
    asked = {None: new, "main": new, "v1.0": old, old: old, new: new}
    for revision, commit in asked.items():
        folder = first if commit == old else second
        assert target_facts(model_id, revision=revision).revision == commit
        assert is_target(opened(model_id, revision), folder)
        assert is_tokenizer(open_tokenizer(model_id, revision=revision), folder)


def test_what_was_downloaded_is_opened_again_where_nothing_listens(model_id, first):
    with LoopbackHub(port=int(os.environ["HF_ENDPOINT"].rpartition(":")[2])) as hub:
        commit = hub.add_model(model_id, first)
        for what in ASKS:
            ask(what, model_id)
    for revision in (commit, None):
        assert target_facts(model_id, revision=revision).revision == commit
        assert is_target(opened(model_id, revision), first)
    assert is_tokenizer(open_tokenizer(model_id, revision=commit), first)


@pytest.mark.parametrize("max_shard_size", ["30KB", "1GB"])
def test_a_snapshot_that_somebody_else_downloaded_is_enough_with_hf_hub_offline(
    loopback_hub, model_id, first, tmp_path, max_shard_size
):
    import huggingface_hub

    commit = loopback_hub.add_model(model_id, write_model(tmp_path, seed=1, max_shard_size=max_shard_size))
    huggingface_hub.snapshot_download(model_id)  # as `hf download` does; it notes nothing of files that are not there
    loopback_hub.requests.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert target_facts(model_id).revision == commit
        assert is_target(opened(model_id, commit), first)
        assert is_tokenizer(open_tokenizer(model_id, revision=commit), first)
    assert not loopback_hub.requests


Hubs = Callable[[LoopbackHub, str, Path], object]


def broken(fault, **how):
    """Add the model, and a fault in every answer about it."""
    return lambda hub, name, folder: (hub.add_model(name, folder), getattr(hub, fault)(name, times=math.inf, **how))


ABSENT = "0123456789" * 4
NO_REVISION = ["commit, branch or tag of http://127"]
UNKNOWN = ["config.json", "name at http://127", "private", "hf auth login"]
ERRORS = {
    "unknown": (lambda hub, name, folder: None, "E602", UNKNOWN),
    "a dataset": (lambda hub, name, folder: hub.add(name, {}), "E602", UNKNOWN),
    "private": (lambda hub, name, folder: hub.add_model(name, folder, private=True), "E602", UNKNOWN),
    "gated": (
        lambda hub, name, folder: hub.add_model(name, folder, gated=True),
        "E602",
        ["config.json", "terms at http://127", "hf auth login"],
    ),
    "forbidden": (broken("fail", status=403), "E602", ["config.json", "403", "hf auth login"]),
    "busy for good": (broken("fail", status=429), "E601", ["config.json", "429"]),
    "failing for good": (broken("fail", status=503), "E601", ["config.json", "503"]),
    "somebody else's page": (broken("foreign"), "E601", ["config.json", "X-Repo-Commit"]),
    "no such tag": (lambda hub, name, folder: hub.add_model(name, folder), "E602", ["v9", *NO_REVISION]),
    "no such commit": (lambda hub, name, folder: hub.add_model(name, folder), "E602", [ABSENT, *NO_REVISION]),
}


@pytest.mark.parametrize("what", ASKS)
@pytest.mark.parametrize("hub", ERRORS)
def test_what_the_hub_does_not_give_is_named(loopback_hub, model_id, first, what, hub):
    prepare, code, said = ERRORS[hub]
    prepare(loopback_hub, model_id, first)
    with refused(code, f"{model_id}: ", *said, kind=ConnectionError if code == "E601" else ValueError):
        ask(what, model_id, {"no such tag": "v9", "no such commit": ABSENT}.get(hub))


@pytest.mark.parametrize("what", ASKS)
@pytest.mark.parametrize("offline", [False, True])
def test_an_id_that_cannot_be_asked_for_is_an_error_of_the_network(model_id, what, offline, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    said = ["HF_HUB_OFFLINE", "hf download"] if offline else ["refused", "folder"]
    with refused("E601", f"{model_id}: ", *said, kind=ConnectionError):
        ask(what, model_id)


@pytest.mark.parametrize("what", ASKS)
@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_fails_for_a_while_is_asked_again(loopback_hub, model_id, first, what, status):
    commit = loopback_hub.add_model(model_id, first)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "special_tokens_map.json"):
        loopback_hub.fail(f"{model_id}/resolve/main/{name}", status=status, times=3)
        loopback_hub.fail(f"{commit}/{name}", status=status, times=3)
    found = ask(what, model_id)
    assert loopback_hub.asked("config.json", method="HEAD")[3].status != status
    assert what != "weights" or is_target(found, first)
    assert what != "tokenizer" or is_tokenizer(found, first)


FAULTS = {
    "failing": lambda hub, file: hub.fail(file, status=503, times=math.inf),
    "somebody else's page": lambda hub, file: hub.foreign(file, times=math.inf),
    "cut": lambda hub, file: hub.cut(file, after=5, times=math.inf),
}


@pytest.mark.parametrize("fault", ["failing", "somebody else's page"])
@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
)
def test_a_tokenizer_is_never_opened_without_a_file_that_the_hub_fails_to_give(
    loopback_hub, model_id, first, file, fault
):
    commit = loopback_hub.add_model(model_id, first)
    FAULTS[fault](loopback_hub, f"/{file}")
    with refused("E601", f"{model_id}: ", f"its {file}", kind=ConnectionError):
        open_tokenizer(model_id, revision=commit)
    loopback_hub.faults.clear()
    assert is_tokenizer(open_tokenizer(model_id, revision=commit), first)


def test_the_template_for_chats_with_tools_is_downloaded_and_written_by_the_command_of_the_error(
    loopback_hub, model_id, own, tmp_path
):
    (own / TOOL_TEMPLATE_NAME).parent.mkdir()
    (own / TOOL_TEMPLATE_NAME).write_text("{{ tools }}")
    loopback_hub.add_model(model_id, own)
    with refused("E407", "has tools") as error:
        open_tokenizer(model_id).encode_chat(CHAT, tools=[{"type": "function", "function": {"name": "rain"}}])
    assert template_by_command(error, tmp_path).read_text() == "{{ tools }}"


def test_a_tokenizer_in_the_parts_of_an_older_format_is_opened_whole_or_not_at_all(loopback_hub, model_id, own):
    parts = json.loads((own / "tokenizer.json").read_text())["model"]
    (own / "tokenizer.json").unlink()
    (own / "vocab.json").write_text(json.dumps(parts["vocab"]))
    (own / "merges.txt").write_text("".join(" ".join(pair) + "\n" for pair in parts["merges"]))
    config = json.loads((own / "tokenizer_config.json").read_text())
    (own / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "GPT2Tokenizer"}))
    commit = loopback_hub.add_model(model_id, own)
    for part in ("vocab.json", "merges.txt"):
        loopback_hub.fail(part, times=math.inf)
        with refused("E601", f"its {part}", kind=ConnectionError):
            open_tokenizer(model_id)
        loopback_hub.faults.clear()
    assert is_tokenizer(open_tokenizer(model_id, revision=commit), own)


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_do_not_come_are_an_error_of_the_network_and_no_others_are_taken(
    loopback_hub, model_id, own, second, fault
):
    torch.save(load_file(second / "model.safetensors"), own / "pytorch_model.bin")
    loopback_hub.add_model(model_id, own)
    FAULTS[fault](loopback_hub, "/model.safetensors")
    with refused("E601", f"{model_id}: ", "its model.safetensors", kind=ConnectionError):
        opened(model_id)
    loopback_hub.faults.clear()
    assert is_target(opened(model_id), own)


def test_weights_whose_download_is_cut_off_are_asked_for_again(loopback_hub, model_id, first):
    loopback_hub.add_model(model_id, first)
    loopback_hub.cut("/cdn/", after=1_000, times=3)
    assert is_target(opened(model_id), first)
    assert len(loopback_hub.asked("/cdn/")) == 4


INDEX, TOKENIZER = "model.safetensors.index.json", "tokenizer.json"


@pytest.mark.parametrize(
    ("file", "raw", "what", "code", "found"),
    [
        ("config.json", None, "facts", "E705", "config.json"),
        (INDEX, None, "weights", "E603", "model.safetensors, model.safetensors.index.json"),
        ("model-00002-of-*.safetensors", None, "weights", "E603", "model-00002-of-"),
        (TOKENIZER, None, "tokenizer", "E408", TOKENIZER),
        ("*", None, "tokenizer", "E408", TOKENIZER),
        *(
            (INDEX, raw, "weights", "E603", f"{INDEX} is no index")
            for raw in ("{}", "[]", "no json", '{"weight_map": {"a": 1}}', '{"weight_map": ["a"]}')
        ),
        *(
            (TOKENIZER, raw, "tokenizer", "E408", TOKENIZER)
            for raw in ("{}", "no json", '{"version": "1.0", "model": {"type": "of tomorrow"}}')
        ),
    ],
)
def test_a_model_that_is_not_whole_on_the_hub_is_named(
    loopback_hub,
    model_id,
    tmp_path,
    file,
    raw,
    what,
    code,
    found,
):
    for path in write_model(tmp_path, seed=1, max_shard_size="30KB").glob(file):
        path.unlink() if raw is None else path.write_text(raw)
    loopback_hub.add_model(model_id, tmp_path)
    for name in (model_id, str(tmp_path)) if file == TOKENIZER and raw else (model_id,):
        with refused(code, f"{name}: ", found):
            ask(what, name)


@pytest.mark.parametrize("what", ["facts", "weights"])
def test_code_of_a_repository_is_neither_run_nor_asked_for(loopback_hub, model_id, own, tmp_path, what, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    config = json.loads((own / "config.json").read_text())
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (own / "code.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    (own / "config.json").write_text(json.dumps({**config, "model_type": "of_its_own", "auto_map": classes}))
    loopback_hub.add_model(model_id, own)
    for name in (model_id, str(own)):
        with refused("E705", name.rpartition("/")[2], "config.json"):
            ask(what, name)
    assert not (tmp_path / "was_run").exists() and not loopback_hub.asked("code.py")


def test_a_tokenizer_is_found_from_home_as_its_target_is(first, monkeypatch):
    monkeypatch.setenv("HOME", str(first.parent))
    assert is_tokenizer(open_tokenizer(f"~/{first.name}"), first)
    with refused("E408", "~/nothing: ", "no such folder"):
        open_tokenizer("~/nothing")
