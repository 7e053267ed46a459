"""Import, redraft, verify and the reader of a cache whose target has lost its decoder blocks."""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import niels_gpt
from support.exchange_files import HIDDEN, VOCAB, in_bf16, write_row, write_speculators

from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.native import NativeEagle3Dataset, native_batch
from niels_gpt.eagle3.vocab import save_token_mapping

pytestmark = pytest.mark.usefixtures("one_thread")
eagle3 = partial(niels_gpt, "eagle3")
ENDS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
WEIGHTS = "target_weights.safetensors"


@pytest.fixture(scope="module")
def rows(given, tmp_path_factory):
    """A folder of speculators with two auxiliary layers: blocks 1 and 4."""
    stored = [in_bf16(chat) for chat in given]
    folder = write_speculators(tmp_path_factory.mktemp("rows") / "r", stored)
    for index, chat in enumerate(stored):
        states = torch.stack([chat.aux[:, 0], chat.aux[:, 2], chat.pre], dim=1)
        write_row(folder, index, chat, hidden_states=states)
    return folder


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    from transformers.utils import logging

    folder = tmp_path_factory.mktemp("target")
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder / "one")
        model.save_pretrained(folder / "many", max_shard_size="4KB")
    finally:
        logging.enable_progress_bar()
    return folder


@pytest.fixture(params=["one", "many"])
def bodiless(request, whole, tmp_path):
    """A target whose file lacks the blocks, or whose files with blocks alone are gone."""
    folder = tmp_path / "target"
    shutil.copytree(whole / request.param, folder)
    if request.param == "one":
        path = folder / "model.safetensors"
        weights = load_file(path)
        save_file({name: weights[name] for name in ENDS}, path, metadata={"format": "pt"})
    else:
        placed = json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"]
        for name in {*placed.values()} - {placed[name] for name in ENDS}:
            (folder / name).unlink()
    return folder


def shards(cache):
    return {path.name: path.read_bytes() for path in cache.glob("shard-*")}


def test_a_trusted_import_needs_the_head_alone_and_says_what_is_not_proved(rows, whole, bodiless, tmp_path):
    command = partial(eagle3, "import", rows, "--from", "speculators", "--draft-vocab-size", "300")
    proved, alone = tmp_path / "proved", tmp_path / "alone"
    assert command(proved, "--target", whole / "one").status == 0
    assert command(tmp_path / "not", "--target", bodiless).status == 1  # without --trust the target must run
    trusted = partial(command, "--target", bodiless, "--trust", "--layers")
    done = trusted("1,4", alone)
    assert done.status == 0 and "not proved        states, layers, last_hidden\n" in done.out
    assert (alone / WEIGHTS).read_bytes() == (proved / WEIGHTS).read_bytes()
    assert shards(alone) == shards(proved) != {}
    manifest = json.loads((alone / "manifest.json").read_bytes())
    assert manifest["imported"]["not_proved"] == ["states", "layers", "last_hidden"]
    assert "not_proved" not in json.loads((proved / "manifest.json").read_bytes())["imported"]
    assert manifest["head"] == json.loads((proved / "manifest.json").read_bytes())["head"]
    target = json.loads((alone / "meta.json").read_bytes())["target"]
    assert target["weights_sha256"] is None and {*target["head_files"]} <= {path.name for path in bodiless.iterdir()}
    done = eagle3("inspect", alone)
    assert "as stated, not compared; not proved: states, layers, last_hidden" in " ".join(done.out.split())


def test_redraft_verify_and_the_reader_need_nothing_of_a_target(rows, bodiless, given, tmp_path):
    cache, drafted = tmp_path / "c", tmp_path / "d"
    command = partial(eagle3, "import", rows, cache, "--from", "speculators", "--target", bodiless)
    assert command("--trust", "--layers", "1,4", "--draft-vocab-size", "300").status == 0
    by_head = partial(eagle3, "verify", cache, "--target", bodiless, "--head-only", "-k", "3")
    done = by_head()
    assert (
        done.status == 0 and "drawn by seed 0 (" in done.out and "the target did not run" in " ".join(done.out.split())
    )
    done = eagle3("verify", cache, "--target", bodiless)
    assert done.status == 1 and "not made, as the target cannot be loaded" in " ".join(done.out.split())
    shutil.rmtree(bodiless)
    ids = tmp_path / "ids"
    save_token_mapping(ids, range(200), VOCAB)
    done = eagle3("redraft", cache, drafted, "--draft-vocab-from", ids)
    assert done.status == 0, done.err
    assert eagle3("verify", drafted).status == 0
    head, dataset = TargetHead.of_cache(drafted), NativeEagle3Dataset(drafted)
    batch = native_batch([dataset[0]], selected_token_ids=dataset.manifest["selected_token_ids"])
    assert head.target_probs(batch).shape[-1] == 200 and head.vocab_size == VOCAB
    done = by_head()
    assert done.status == 1 and "config.json" in done.err


def test_the_head_of_the_checkpoint_shows_weights_and_target_rows_that_are_not_its(rows, bodiless, tmp_path):
    cache = tmp_path / "c"
    command = partial(eagle3, "import", rows, cache, "--from", "speculators", "--target", bodiless)
    assert command("--trust", "--layers", "1,4").status == 0
    by_head = partial(eagle3, "verify", cache, "--target", bodiless, "--head-only", "-k", "100", "--json")
    [path] = [path for path in bodiless.glob("*.safetensors") if "lm_head.weight" in load_file(path)]
    weights = load_file(path)
    weights["lm_head.weight"][7] += 1
    save_file(weights, path, metadata={"format": "pt"})
    done = by_head()
    problems = done.json["recomputed"]["problems"]
    assert done.status == 3 and "lm_head of token 7 is not the target's" in problems[0]
    assert len(problems) > 1 and all("log_normalizers" in each or "argmax_ids" in each for each in problems[1:])


def test_a_target_of_the_hub_is_compared_at_the_commit_of_the_import(rows, whole, tmp_path, monkeypatch):
    import huggingface_hub.constants

    from niels_gpt.eagle3.exchange.move import Target, import_cache
    from niels_gpt.eagle3.exchange.proof import Convention
    from niels_gpt.eagle3.inspect.by_head import recomputed_by_head
    from niels_gpt.recipes.eagle3.prepare import target_of

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository, first, later = tmp_path / "models--somebody--small", "1" * 40, "2" * 40
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for commit in (first, later):
        shutil.copytree(whole / "one", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(later)
    path = repository / "snapshots" / later / "model.safetensors"
    save_file({**load_file(path), "lm_head.weight": torch.zeros(VOCAB, HIDDEN)}, path, metadata={"format": "pt"})
    head = TargetHead.of_checkpoint("somebody/small", revision=first, dtype=torch.float32)
    target = Target("somebody/small", head, HIDDEN, VOCAB, facts={"revision": first})
    import_cache("speculators", rows, tmp_path / "c", target, stated=Convention((1, 4), "pre_norm"))
    assert target_of(tmp_path / "c", "somebody/small").facts["revision"] == first
    assert recomputed_by_head(tmp_path / "c", "somebody/small").problems == []
    assert recomputed_by_head(tmp_path / "c", "somebody/small", revision="main").problems


def test_head_only_needs_a_target(rows, tmp_path):
    done = eagle3("verify", tmp_path, "--head-only")
    assert done.status == 2 and "--head-only: needs --target" in done.err
