"""Finished EAGLE-3 caches that may not be changed, and copies; the peers' processes; the command precompute."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.peer_automodel import Peer

from niels_gpt.commands.eagle3 import precompute
from niels_gpt.eagle3 import target
from niels_gpt.eagle3.target import write_small_target
from niels_gpt.recipes.eagle3 import prepare

Run = Callable[..., tuple[int, str, str]]
ANSWERS = ["The heron walks to the mill.", "It was windy that day, so the otter stayed.", "Why? Pebbles!"]


@pytest.fixture(scope="session")
def eagle3_caches(tmp_path_factory):
    """A finished cache of ten samples in three shards of each form. `support.eagle3_damage.copy_of` copies one."""
    from support import eagle3_runs
    from support.eagle3_damage import ALL_FORMS

    samples, folder = eagle3_runs.samples_of(), tmp_path_factory.mktemp("caches")
    for form, changed in ALL_FORMS.items():
        eagle3_runs.run(folder / form, samples=samples, given=eagle3_runs.plan(samples, **changed))
    return {form: folder / form for form in ALL_FORMS}


@pytest.fixture(scope="session")
def finished(eagle3_caches):
    """The cache that `support.eagle3_runs.run` makes. Nothing may change it: `cache` is a copy."""
    return eagle3_caches["dense"]


@pytest.fixture(scope="session")
def whole(finished):
    from support.eagle3_runs import whole_tree

    return whole_tree(finished)


@pytest.fixture
def cache(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "c")


def running(version):
    folder = Path(os.environ["NIELS_GPT_PEERS"]) / version
    assert (folder / "nemo_automodel").is_dir(), f"{folder} has no package nemo_automodel, and NIELS_GPT_PEERS is set"
    peer = Peer(folder)
    yield peer
    peer.close()


@pytest.fixture(scope="session")
def old():
    """The version that writes and reads version 1."""
    yield from running("0.5.0")


@pytest.fixture(scope="session")
def new():
    """The version that writes and reads version 2."""
    yield from running("0.7.0")


@pytest.fixture(scope="session")
def model(tmp_path_factory, tiny_tokenizer):
    """The folder of the small target."""
    return write_small_target(tmp_path_factory.mktemp("small") / "target", tiny_tokenizer)


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """Ten chats, and one that nothing is learnt from."""
    answers = [[("user", f"Page {page}?"), ("assistant", ANSWERS[page % 3] * (1 + page % 2))] for page in range(10)]
    turns = [[{"role": role, "content": text} for role, text in chat] for chat in [*answers, [("user", "?")]]]
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in turns))
    return path


def arguments_of(model, chats, folder):
    what = ["--target-model", str(model), "--input-data", str(chats), "--output-dir", str(folder)]
    return [*what, "--seq-length", "40", "--shard-size", "4", "--threads", "1", "--device", "cpu"]


@pytest.fixture(scope="session")
def made(tmp_path_factory, model, chats):
    """A finished cache of the ten chats."""
    folder = tmp_path_factory.mktemp("made") / "c"
    assert precompute.main(arguments_of(model, chats, folder)) == 0
    return folder


@pytest.fixture(scope="session")
def made_2(tmp_path_factory, model, chats):
    """The same of version 2, whose manifest names the input."""
    folder = tmp_path_factory.mktemp("made") / "c"
    assert precompute.main([*arguments_of(model, chats, folder), "--format-version", "2"]) == 0
    return folder


@pytest.fixture
def arguments(model, chats, tmp_path):
    """Makes the arguments of a run into tmp_path / "c"; later ones count."""
    return lambda *more: [*arguments_of(model, chats, tmp_path / "c"), *more]


@pytest.fixture
def run(arguments, capsys):
    """Runs the command in this process; returns status, output and errors."""

    def done(*more):
        capsys.readouterr()
        status = precompute.main(arguments(*more))
        return (status, *capsys.readouterr())

    return done


@pytest.fixture
def not_tokenized(monkeypatch):
    """Fail where the input is tokenized."""
    monkeypatch.setattr(prepare, "prepare", lambda *_, **__: pytest.fail("the input was tokenized"))


@pytest.fixture
def no_weights(monkeypatch):
    """Fail where the target's weights are loaded."""
    monkeypatch.setattr(target, "load_target", lambda *_, **__: pytest.fail("the target was loaded"))
