"""A tokenizer by its id on the hub: its files and no others, one recorded commit, and clear errors."""

import dataclasses
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from support.commands import niels_gpt
from support.disk import plan_folders
from support.errors import refused, template_by_command
from support.loopback_hub import LoopbackHub
from support.made_tokenizers import made_tokenizer

from niels_gpt.recipes.plan import plan
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.recipes.units import Units, build_token_cache
from niels_gpt.settings import Settings
from niels_gpt.tokenizers.files import COMPANIONS, TOOL_TEMPLATE_NAME

pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.fixture
def repository(tmp_path):
    """The files of a model: a tokenizer, and what is not fetched."""
    folder = shutil.copytree(made_tokenizer("t5"), tmp_path / "repository")
    for name in ("model.safetensors", "config.json", "tokenizer.model", "code.py"):
        (folder / name).write_bytes(b"not fetched")
    return folder


@pytest.fixture
def named(tmp_path, model_id):
    """Settings that name the tokenizer by its id, with a text."""
    (tmp_path / "a.txt").write_text("a text of a few words")
    return Settings(pretrain=f"own={tmp_path / 'a.txt'}", cache_dir=str(tmp_path / "cache"), tokenizer=model_id)


def fetched(hub):
    return {request.path.rpartition("/")[2] for request in hub.requests}


def test_only_the_files_of_a_tokenizer_are_fetched_and_the_hub_is_not_asked_again(
    loopback_hub, repository, named, model_id
):
    assert [item.action for item in plan(named, ["pretrain/own"])] == ["download", "build"]
    assert not loopback_hub.requests
    commit = loopback_hub.add_model(model_id, repository)
    meta = ensure_tokenizer(named).meta
    assert meta["hub"] == {"id": model_id, "revision": commit}
    assert [record["name"] for record in meta["files"]] == ["tokenizer.json", "tokenizer_config.json"]
    allowed = {"tokenizer.json", *(Path(name).name for name in (*COMPANIONS, TOOL_TEMPLATE_NAME))}
    assert "tokenizer.json" in fetched(loopback_hub) <= allowed
    loopback_hub.requests.clear()
    assert build_token_cache(named, "own").meta["vocab_size"] == 1_100
    assert [item.action for item in plan(named, ["pretrain/own"])] == ["up to date"] * 2
    assert not loopback_hub.requests


def test_a_newer_revision_is_taken_on_request_and_an_older_one_by_its_commit(loopback_hub, repository, named, model_id):
    old = loopback_hub.add_model(model_id, repository)
    build_token_cache(named, "own")
    config = json.loads((repository / "tokenizer_config.json").read_text())
    (repository / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<extra_id_0>"}))
    new = loopback_hub.add_model(model_id, repository)
    assert build_token_cache(named, "own").reused
    refreshed = build_token_cache(named, "own", refresh=True)
    assert not refreshed.reused and refreshed.meta["document_end"]["token"] == "<extra_id_0>"
    assert ensure_tokenizer(named).meta["hub"]["revision"] == new
    earlier = ensure_tokenizer(dataclasses.replace(named, revision=f"tokenizer={old}")).meta
    assert earlier["hub"] == {"id": model_id, "revision": old, "asked_revision": old}
    assert earlier["eos"]["token"] == "</s>"


def test_the_plan_of_partitions_keeps_its_tokenizer(loopback_hub, repository, named, model_id, caplog):
    settings = dataclasses.replace(named, partitions=2)
    old = loopback_hub.add_model(model_id, repository)
    Units(settings, "own").build(0)
    config = json.loads((repository / "tokenizer_config.json").read_text())
    (repository / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<extra_id_0>"}))
    loopback_hub.add_model(model_id, repository)
    loopback_hub.requests.clear()
    Units(settings, "own").build(1)
    assert Units(settings, "own").plan is not None and not loopback_hub.requests
    with caplog.at_level(logging.WARNING):
        refreshed = Units(settings, "own", refresh=True).plan
    assert "the tokenizer's files" in caplog.text and "the licence" not in caplog.text
    assert (
        refreshed == Units(settings, "own").plan and len(plan_folders(Path(settings.cache_dir) / "pretrain/own")) == 2
    )
    before = dataclasses.replace(settings, revision=f"tokenizer={old}")
    assert Units(before, "own", fixes=False).seal().meta["document_end"]["token"] == "</s>"
    assert ensure_tokenizer(before).meta["hub"]["revision"] == old


def test_a_sentencepiece_model_of_the_hub_is_one_file(loopback_hub, named, model_id, tiny_model_path, tmp_path):
    (tmp_path / "r").mkdir()
    shutil.copy(tiny_model_path, tmp_path / "r" / "tokenizer.model")
    loopback_hub.add_model(model_id, tmp_path / "r")
    meta = ensure_tokenizer(named).meta
    assert (meta["tokenizer_kind"], [record["name"] for record in meta["files"]]) == ("sentencepiece", ["spm.model"])


def test_a_chat_with_tools_and_two_templates_on_the_hub_ends_with_the_command_that_writes_the_second(
    loopback_hub, repository, model_id, tmp_path
):
    for name in ("chat_template.jinja", TOOL_TEMPLATE_NAME):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("{% for each in messages %}{{ each.content }}{{ eos_token }}{% endfor %}")
    loopback_hub.add_model(model_id, repository)
    turns = [{"role": "user", "content": "rain?"}, {"role": "assistant", "content": "no"}]
    row = {"messages": turns, "tools": [{"type": "function", "function": {"name": "rain"}}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(row))
    named = Settings(sft=f"own={tmp_path}/chats.jsonl", cache_dir=str(tmp_path / "cache"), tokenizer=model_id)
    with refused("E407", "has tools") as error:
        build_token_cache(dataclasses.replace(named, chat_template="tokenizer"), "own")
    file = str(template_by_command(error, tmp_path))
    assert build_token_cache(dataclasses.replace(named, chat_template=file, loss_on="last"), "own").meta["built"]


def test_what_the_hub_does_not_have_is_named_and_nothing_is_installed(loopback_hub, named, model_id, tmp_path):
    flags = ["--pretrain", str(named.pretrain), "--cache-dir", named.cache_dir, "--tokenizer", model_id]
    done = niels_gpt("build", *flags)
    assert done.status == 1 and model_id in done.err and "error[E602]" in done.err
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.json").write_text("{}")
    loopback_hub.add_model(model_id, tmp_path / "r")
    done = niels_gpt("build", *flags)
    assert done.status == 3 and "error[E403]" in done.err and model_id in done.err
    assert not (tmp_path / "cache" / "tokenizer").exists()


def test_without_the_hub_an_installed_tokenizer_is_enough(repository, named, model_id):
    with LoopbackHub(port=int(os.environ["HF_ENDPOINT"].rpartition(":")[2])) as hub:
        hub.add_model(model_id, repository)
        ensure_tokenizer(named)
    assert not build_token_cache(named, "own").reused
    elsewhere = dataclasses.replace(named, tokenizer=f"{model_id}-2", cache_dir=f"{named.cache_dir}2")
    with refused("E601", f"{model_id}-2: ", "tokenizer.json", kind=ConnectionError):
        ensure_tokenizer(elsewhere)
