"""eagle3 redraft and eagle3 convert of native caches, against what precompute writes for the same input."""

import json
import shlex
import shutil
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import eagle3_native, eagle3_runs
from support.commands import niels_gpt
from support.eagle3_runs import EAGLE3, disk, whole_tree

from niels_gpt.eagle3.cache import CACHE_KEYS, CachedEagle3Dataset, convert, read_manifest, read_target_embeddings
from niels_gpt.eagle3.format.drafters import TARGETS, manifest_keys
from niels_gpt.eagle3.native import NativeEagle3Dataset
from niels_gpt.eagle3.vocab import save_token_mapping
from niels_gpt.storage.errors import CacheError

Run = Callable[..., tuple[int, str, str]]

pytest.importorskip("transformers", reason="running a target needs the extra eagle3")


def eagle3(*words):
    """Run a command of the group; returns status, output and errors."""
    done = niels_gpt(*map(str, words), module=EAGLE3)
    return done.status, done.out, done.err


def plan_of(cache):
    return json.loads((cache / "sidecar" / "plan.json").read_bytes())


@pytest.fixture
def cache(native_run, tmp_path):
    """A native cache of ten chats, with the whole vocabulary."""
    assert native_run("--dtype", "fp32")[0] == 0
    return tmp_path / "c"


@pytest.mark.parametrize("form", [(), ("--for", "dflash"), ("--for", "mtp")], ids=["loss", "reply", "all"])
def test_redraft_writes_what_precompute_writes_for_that_vocabulary(native_run, tmp_path, form):
    form, cache, out = ("--dtype", "fp32", *form), tmp_path / "c", tmp_path / "out"
    assert native_run(*form)[0] == 0
    whole = whole_tree(cache)
    status, said, _ = eagle3("redraft", cache, out, "--draft-vocab-size", 60)
    assert status == 0 and "draft vocabulary 60; " in said and ", 0 copied" in said
    assert whole_tree(cache) == whole
    assert cache.rename(tmp_path / "first") and native_run(*form, "--draft-vocab-size", "60")[0] == 0
    assert whole_tree(out) == whole_tree(cache)
    manifest = read_manifest(out)
    special = [each for each in plan_of(out)["tokenizer"]["special_token_ids"] if each is not None]
    assert special and manifest["selected_token_ids"][: len({*special})] == [*dict.fromkeys(special)]
    links = {name: (tmp_path / "first" / name).samefile(out / name) for name in whole}
    assert {name for name, is_link in links.items() if not is_link} == {"manifest.json", "meta.json"}
    assert eagle3("verify", out)[0] == 0
    # The old folder can go: the other one keeps the files.
    shutil.rmtree(tmp_path / "first")
    assert NativeEagle3Dataset(out)[0].last_hidden_states.any() and len(manifest["selected_token_ids"]) == 60


def test_redraft_takes_the_tokens_of_a_file_and_of_a_cache(cache, tmp_path):
    ids = [9, 4, *range(20, 70)]
    save_token_mapping(tmp_path / "ids.pt", ids, read_manifest(cache)["target_vocab_size"])
    assert eagle3("redraft", cache, tmp_path / "a", "--draft-vocab-from", tmp_path / "ids.pt")[0] == 0
    assert eagle3("redraft", cache, tmp_path / "b", "--draft-vocab-from", tmp_path / "a", "--copy")[0] == 0
    assert read_manifest(tmp_path / "b")["selected_token_ids"] == ids
    assert whole_tree(tmp_path / "a") == whole_tree(tmp_path / "b")
    assert not (tmp_path / "a" / "shard-000000.safetensors").samefile(tmp_path / "b" / "shard-000000.safetensors")


def test_redraft_refuses_what_it_cannot_do_and_leaves_nothing(cache, made, tmp_path):
    asked = ("--draft-vocab-size", 60)
    status, _, errors = eagle3("redraft", made, tmp_path / "out", *asked)
    assert status == 1 and "error[E710]" in errors and "its distributions cover its own draft vocabulary only" in errors
    status, _, errors = eagle3("redraft", cache, made, *asked)
    assert status == 1 and "error[E704]" in errors
    status, _, errors = eagle3("redraft", cache, tmp_path / "out")
    assert status == 2 and "name --draft-vocab-size" in errors
    save_token_mapping(tmp_path / "ids.pt", [0], read_manifest(cache)["target_vocab_size"])
    status, _, errors = eagle3("redraft", cache, tmp_path / "out", "--draft-vocab-from", tmp_path / "ids.pt")
    assert status == 1 and "error[E709]" in errors  # no slot would teach
    with disk(tmp_path / "other", "8m") as other:
        status, _, errors = eagle3("redraft", cache, other / "out", *asked)
        assert status == 1 and "error[E710]" in errors and "--copy" in errors and not [*other.iterdir()]
        assert eagle3("redraft", cache, other / "out", *asked, "--copy")[0] == 0
        assert eagle3("verify", other / "out")[0] == 0
    (cache / "meta.json").unlink()
    assert eagle3("redraft", cache, tmp_path / "out", *asked)[0] == 1
    assert not (tmp_path / "out").exists() and not [*tmp_path.glob(".out*")]


def test_redraft_says_which_folder_and_what_it_does_with_a_size(cache, tmp_path):
    whole = whole_tree(cache)
    vocab_size = read_manifest(cache)["target_vocab_size"]
    status, said, _ = eagle3("redraft", cache, tmp_path / "all", "--draft-vocab-size", vocab_size + 1)
    assert status == 0 and f"the whole vocabulary of the target, not {vocab_size + 1:,}" in said
    save_token_mapping(tmp_path / "ids.pt", [0], vocab_size)
    _, _, errors = eagle3("redraft", cache, tmp_path / "out", "--draft-vocab-from", tmp_path / "ids.pt")
    assert f"{tmp_path / 'out'}: 0 positions" in errors and "--output-dir" not in errors
    for words in (
        ["redraft", cache, cache / "sub", "--draft-vocab-size", 60],
        ["export", cache, cache / "x", "--to", "specforge"],
    ):
        status, _, errors = eagle3(*words)
        assert status == 1 and "error[E704]" in errors and "which it is made from" in errors
    with disk(tmp_path / "other", "8m") as other:
        _, _, errors = eagle3("redraft", cache, other / "a" / "out", "--draft-vocab-size", 60)
        assert f"{other / 'a' / 'out'}: cannot link the files of {cache} there" in errors
    assert whole_tree(cache) == whole


@pytest.mark.parametrize("version", [1, 2])
def test_a_native_cache_becomes_one_of_version_1_or_2_that_verify_accepts(cache, tmp_path, version):
    out = tmp_path / "out"
    status, said, errors = eagle3("convert", cache, "--format", version, "--output-dir", out, "--shard-size", 4)
    assert status == 0 and "bytes of files with padding and embeddings; to write " in said, errors
    status, said, _ = eagle3("verify", out)
    assert status == 0 and "problem" not in said, said
    native, published = CachedEagle3Dataset(cache), CachedEagle3Dataset(out)
    assert published.manifest["format_version"] == version and published.num_shards == 3
    for index in range(len(native)):
        found, expected = published[index], native[index]
        loss, length = expected["loss_mask"].bool(), int(expected["attention_mask"].sum())
        for name in set(CACHE_KEYS) - {"target_probs"}:
            assert torch.equal(found[name], expected[name]), name
        torch.testing.assert_close(found["target_probs"][loss], expected["target_probs"][loss])
        torch.testing.assert_close(found["target_probs"][:length].sum(-1), torch.ones(length))
        assert not found["target_probs"][length:].any()
    assert torch.equal(read_target_embeddings(out), read_target_embeddings(cache))
    before, after = (json.loads((folder / "meta.json").read_bytes()) for folder in (cache, out))
    assert after["totals"] == {**{key: before["totals"][key] for key in after["totals"]}, "shards": 3}
    assert after["draft_mass"] == pytest.approx(1, rel=1e-6)  # the draft knows all tokens


def test_a_native_manifest_is_never_rewritten_as_one_of_version_2(cache, tmp_path):
    whole = whole_tree(cache)
    with pytest.raises(CacheError, match=r"eagle3 convert .* --format 2 --output-dir OUT") as refused:
        convert(cache, 2)
    assert refused.value.code == "E710" and whole_tree(cache) == whole


def test_a_converted_cache_has_the_counts_and_the_mass_of_version_1(native_run, tmp_path):
    form = ("--dtype", "fp32", "--draft-vocab-size", "60")
    assert native_run(*form)[0] == native_run(*form, "--format", "1", "--output-dir", str(tmp_path / "1"))[0] == 0
    assert eagle3("convert", tmp_path / "c", "--format", 1, "--output-dir", tmp_path / "out")[0] == 0
    found, expected = (json.loads((tmp_path / name / "meta.json").read_bytes()) for name in ("out", "1"))
    assert 0 < expected["draft_mass"] < 1 and found["totals"] == expected["totals"]
    assert found["draft_mass"] == pytest.approx(expected["draft_mass"], rel=1e-5)
    same = [json.loads((tmp_path / name / "manifest.json").read_bytes()) for name in ("out", "1")]
    assert same[0] == same[1]


@pytest.mark.parametrize("form", [("--dtype", "fp32"), ("--aux-dtype", "fp8")], ids=["fp32", "fp8"])
def test_the_target_is_run_over_a_converted_cache_again(native_run, model, chats, tmp_path, form):
    with_more = [json.loads(line) for line in chats.read_text().splitlines()]
    for number, chat in enumerate(with_more):  # a question without an answer: the last tokens have no loss
        chat["messages"] += [{"role": "user", "content": "And?"}] * (number % 2)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in with_more))
    assert native_run(*form, "--input-data", str(tmp_path / "chats.jsonl"), "--seq-length", "60")[0] == 0
    status, said, _ = eagle3("convert", tmp_path / "c", "--format", 1, "--output-dir", tmp_path / "out")
    assert status == 0 and ("the auxiliary states are converted from fp8 to bf16" in said) == ("fp8" in form)
    status, said, _ = eagle3("verify", tmp_path / "out", "--target", model)
    assert status == 0 and "recomputed    ok" in said, said
    # Of another sample's states it is refused.
    path = tmp_path / "out" / "shard-000000.safetensors"
    tensors = load_file(path)
    tensors["aux_hidden_states"] = tensors["aux_hidden_states"].roll(1, 0)
    save_file(tensors, path)
    status, said, _ = eagle3("verify", tmp_path / "out", "--target", model)
    assert status != 0 and "run again" in said


def test_the_command_of_a_refused_conversion_takes_the_same_samples_and_the_same_tokens(native_run, tmp_path):
    old, out = tmp_path / "old", tmp_path / "out"
    form = ("--format", "1", "--limit", "6", "--draft-vocab-size", "60", "--output-dir", str(old))
    assert native_run(*form)[0] == 0
    status, _, errors = eagle3("convert", old, "--format", "native")
    assert status == 1 and "error[E710]" in errors and "log-normalizers" in errors
    words = shlex.split(errors.rpartition("Run the target again: ")[2])
    assert words[:3] == ["niels-gpt", "eagle3", "precompute"] and words[-1] == "DIR"
    assert niels_gpt(*words[1:-1], out).status == 0
    assert plan_of(out)["samples"] == plan_of(old)["samples"]
    assert read_manifest(out)["selected_token_ids"] == read_manifest(old)["selected_token_ids"]


@pytest.mark.parametrize("version", [1, 2])
def test_a_conversion_does_not_depend_on_the_target_rows(tmp_path, version):
    for targets in TARGETS:
        keys = manifest_keys(targets, [1, 3, 4])
        eagle3_runs.run(
            tmp_path / targets, given=eagle3_runs.plan(eagle3_runs.samples_of(), **eagle3_runs.NATIVE, **keys)
        )
        out = tmp_path / f"{targets}-{version}"
        assert eagle3("convert", tmp_path / targets, "--format", version, "--output-dir", out)[0] == 0
        assert whole_tree(out) == whole_tree(tmp_path / f"loss-{version}")
        assert eagle3("verify", out)[0] == 0


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_a_cache_of_other_blocks_is_not_converted_and_the_command_that_is_printed_makes_the_version(
    native_run, model, chats, tmp_path, kind
):
    assert native_run("--for", kind, "--draft-vocab-size", "60")[0] == 0
    status, _, errors = eagle3("convert", tmp_path / "c", "--format", 2, "--output-dir", tmp_path / "out")
    assert status == 1 and "error[E710]" in errors and "auxiliary layers; versions 1 and 2 have 3" in errors
    _, _, printed = errors.strip().partition(": niels-gpt eagle3 ")
    asked = {"MODEL": model, "SOURCE": chats, "OUT": tmp_path / "out"}
    done = niels_gpt("eagle3", *(str(asked.get(word, word)) for word in shlex.split(printed)))
    assert done.status == 0 and eagle3("verify", tmp_path / "out")[0] == 0
    found, native = read_manifest(tmp_path / "out"), read_manifest(tmp_path / "c")
    same = ("seq_length", "dtype", "selected_token_ids")
    assert found["format_version"] == 2 and [found[key] for key in same] == [native[key] for key in same]


def test_conversions_that_would_lose_something_are_refused(cache, made, tmp_path):
    eagle3_native.write_native(tmp_path / "two", [[0, 1, 1]])
    status, _, errors = eagle3("convert", tmp_path / "two", "--format", 1, "--output-dir", tmp_path / "out")
    assert status == 1 and "2 auxiliary layers; versions 1 and 2 have 3" in errors
    status, _, errors = eagle3("convert", cache, "--format", 1)
    assert status == 2 and "pass --output-dir" in errors and not (tmp_path / "out").exists()
    for folder, form, flag in ((made, 2, "--shard-size"), (made, 2, "--output-dir"), (cache, "native", "--output-dir")):
        status, _, errors = eagle3("convert", folder, "--format", form, flag, 256)
        assert status == 2 and f"{flag}: only for a native cache that becomes version 1 or 2" in errors
