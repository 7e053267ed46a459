"""rollouts/NAME from the user's files and trees/oasst1 from the sample: recipes, commands and Dagster's assets."""

import dataclasses
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import dagster as dg
import numpy as np
import pytest
from support.bits_caches import sealed
from support.dagster_runs import built, metadata, run, stale, verdicts
from support.data_files import lines, write
from support.disk import read_meta
from support.errors import refused
from support.small_caches import change_meta

from niels_gpt.cache.documents import bounds, tokens_of
from niels_gpt.cache.formats import target_mask
from niels_gpt.commands.main import main
from niels_gpt.commands.report import checked
from niels_gpt.data import open_files
from niels_gpt.engine.meta import Source
from niels_gpt.kinds.folders import open_cache
from niels_gpt.kinds.kind import Limits
from niels_gpt.kinds.look import plot, stats, tokenizer_of
from niels_gpt.kinds.verify import find_damage, verify
from niels_gpt.prefix_tree.rollouts.build import build_rollouts
from niels_gpt.prefix_tree.rollouts.kind import ROLLOUTS
from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
from niels_gpt.recipes.plan import plan, recipes
from niels_gpt.recipes.rollouts import recorded_groups
from niels_gpt.settings import Settings
from niels_gpt.storage.codes import code_of

TREES, MATHS = "trees/oasst1", "rollouts/maths"
ROWS = [
    {
        "group": f"q{number}",
        "prompt_ids": [*range(5, 15), 20 + number],
        "completions": [
            {"ids": [40 + number, 60 + at, 7], "logprobs": [-0.5, -1.0, -2.0], "advantage": at - 1.5} for at in range(4)
        ],
    }
    for number in range(12)
]


@pytest.fixture
def both(settings, tmp_path):
    """Settings with a file of twelve groups and a bad row."""
    write(tmp_path / "maths.jsonl", lines(*ROWS, {"ids": "none"}))
    return dataclasses.replace(settings, rollouts="maths=maths.jsonl", rollouts_val_frac=0.3)


def flags(settings):
    names = ("source_root", "cache_dir", "tokenizer", "rollouts", "rollouts_val_frac")
    return [f"--{name.replace('_', '-')}={getattr(settings, name)}" for name in names]


def groups_of(path, meta):
    for split in ("train", "val"):
        if meta["totals"][f"{split}_groups"]:
            yield from ((split, group) for group in RolloutDataset(path, split))


def test_the_threads_of_trees_are_the_chats_of_the_sft_cache_with_its_loss(settings):
    trees, chats = recipes(settings)[TREES](settings), recipes(settings)["sft/oasst1"](settings)
    cache = open_cache(chats.path)
    folder, meta = cache.folder, cache.meta
    examples = []
    for split in ("train", "val"):
        starts, ids = bounds(folder, meta, split), tokens_of(folder, meta, split)
        examples += [ids[begin:end].tolist() for begin, end in pairwise(starts)]
    special, found = meta["special_token_ids"], []
    for _, group in groups_of(trees.path, trees.meta):
        for sample in group.samples:
            found.append(sample.ids.tolist())
            mask = target_mask(
                sample.ids[None], np.array([len(sample.ids)]), asst_id=special["asst"], eot_id=special["eot"]
            )
            assert np.array_equal(sample.loss_mask, mask[0]) and sample.loss_mask[-1]

    def cut(example):
        """Leave out the user's messages after the last reply."""
        last = len(example) - 1 - example[::-1].index(special["asst"])
        return example[: example.index(special["eot"], last) + 1]

    assert Counter(map(tuple, found)) == Counter({tuple(cut(example)) for example in examples})
    assert trees.meta["tokens_after"]["train"] < trees.meta["totals"]["train_tokens"]
    assert trees.meta["tokenizer_sha256"] == meta["tokenizer_sha256"]
    counted = trees.meta["source"]["counters"]
    assert counted.pop("sentinel_in_text") == meta["dropped"]["sentinel_in_text"]
    assert {**counted, "cut_messages": 0} == {**meta["source"]["counters"], "cut_messages": 0}


def test_recorded_ids_are_stored_as_they_are_and_need_no_tokenizer(both):
    outcome = recipes(both)[MATHS](both)
    assert not (Path(both.cache_dir) / "tokenizer").exists()
    stored = {group.id: group for _, group in groups_of(outcome.path, outcome.meta)}
    assert stored.keys() == {row["group"] for row in ROWS}
    for row in ROWS:
        for sample, completion in zip(stored[row["group"]].samples, row["completions"], strict=True):
            assert sample.ids.tolist() == [*row["prompt_ids"], *completion["ids"]]
            assert sample.logprobs.tolist() == completion["logprobs"]
            assert (sample.prompt_length, sample.advantage) == (11, completion["advantage"])
    assert outcome.meta["source"]["counters"] == {"malformed": 1}
    assert 0 < outcome.meta["totals"]["val_groups"] < 12
    assert checked(outcome, both) == []


def test_only_what_a_rollout_cache_reads_builds_it_again(both, tmp_path):
    def reused(**changed):
        chosen = dataclasses.replace(both, **changed)
        return {key: recipes(chosen)[key](chosen).reused for key in (MATHS, TREES)}

    assert reused() == {MATHS: False, TREES: False}
    assert reused(own_val_frac=0.5, dolly_include_system=True) == {MATHS: True, TREES: True}
    assert reused(rollouts_vocab_size=100) == {MATHS: False, TREES: True}
    assert reused(rollouts_vocab_size=100, oasst1_max_messages=3) == {MATHS: True, TREES: False}
    write(tmp_path / "maths.jsonl", lines(*ROWS[1:]))
    assert [item.action for item in plan(both, [MATHS])] == ["build"]
    assert reused() == {MATHS: False, TREES: False}
    assert [(item.key, item.action) for item in plan(both, [MATHS, TREES])][1:] == [
        (MATHS, "up to date"),
        (TREES, "up to date"),
    ]


def test_ids_above_the_vocabulary_and_listed_groups_are_left_out_and_counted(both, tmp_path):
    write(tmp_path / "listed.txt", "q3\nq4\n")
    chosen = dataclasses.replace(both, rollouts_vocab_size=63, exclude="listed.txt")
    meta = recipes(chosen)[MATHS](chosen).meta
    assert meta["dropped"] == {"ids_outside_vocabulary": 10}  # 63 is the first id outside: the fourth completion
    assert meta["source"]["counters"] == {"excluded": 2, "malformed": 1}
    assert (meta["token_dtype"], meta["vocab_size"], meta["samples_read"]) == ("uint16-le", 63, 40)


def test_an_interrupted_build_of_rollouts_resumes_to_the_same_bytes(both, tmp_path):
    whole = recipes(both)[MATHS](both).meta
    found = open_files("maths.jsonl", rows_only=True)

    def build(stop):
        counters, position = Counter[str](), dict[str, int]()
        source = Source("maths", None, False, whole["source"], {}, counters, "", position)
        groups = recorded_groups(found.rollouts(source="maths", counters=counters, position=position))

        def some():
            for number, group in enumerate(groups):
                if number == stop:
                    raise OSError("the disk is gone")
                yield group

        return build_rollouts(some(), tmp_path / "c", source=source, seed=42, val_frac=0.3, checkpoint_seconds=0)

    with pytest.raises(OSError, match="the disk is gone"):
        build(7)
    meta = build(None)
    assert meta["content_sha256"] == whole["content_sha256"]
    assert meta["source"]["counters"] == {"malformed": 1}


def test_every_command_takes_a_rollout_cache(both, capsys):
    def said(*words, code=0):
        assert main(words) == code, capsys.readouterr().err
        return capsys.readouterr().out

    def build(*words):
        return said("build", *words, *flags(both))

    assert "rollouts/maths: 12 groups, 48 samples, 672 tokens, in" in build()
    assert "trees/oasst1" in build("trees/oasst1")
    root = both.cache_dir
    assert "rollouts/maths  built  48 samples" in said("list", root)
    figures = json.loads(said("stats", f"{root}/{MATHS}", "--json"))
    assert figures["totals"]["train_groups"] + figures["totals"]["val_groups"] == 12
    assert figures["fields"] == {"advantage": "sample", "logprobs": "token"}
    assert figures["group_samples"]["train"] == {"min": 4, "median": 4, "p95": 4, "max": 4}
    shown = said("show", f"{root}/{MATHS}")
    assert "id q0, 4 samples, 56 tokens, 20 after folding" in shown and "[[40 60 7]]" in shown
    assert "<|asst|>[[" in said("show", f"{root}/{TREES}", "--at", "1")
    located = said("locate", f"{root}/{MATHS}", "train", "11")
    assert "source id:    q0" in located and "offset in it: 11 tokens, with loss" in located
    group = json.loads(said("show", f"{root}/{MATHS}", "--json"))
    assert group["source_id"] == "q0" and (group["tokens"], group["tokens_after_folding"]) == (56, 20)
    sample = group["samples"][0]
    assert len(group["samples"]) == 4 and sample["tokens"] == len(sample["ids"]) == 14
    assert len(sample["fields"]["logprobs"]) == sample["supervised_tokens"] and sample["parts"] is None
    found = json.loads(said("locate", f"{root}/{MATHS}", "train", "11", "--json"))
    assert found["sample"] == sample and found["token_id"] == sample["ids"][found["offset_tokens"]]
    parts = json.loads(said("show", f"{root}/{TREES}", "--at", "1", "--json"))["samples"][0]["parts"]
    assert [part["supervised"] for part in parts[:2]] == [False, True] and parts[0]["text"].startswith("<|usr|>")
    assert said("diff", f"{root}/{MATHS}", f"{root}/{MATHS}") == "equal\n"
    assert said("verify", root, "--deep").count(": ok") == 3
    assert "removed" not in said("gc", root, "--dry-run")
    assert "none in need of care" in said("doctor", root)
    said("show", f"{root}/{MATHS}", "--at", "99", code=1)
    said("locate", f"{root}/{MATHS}", "train", "99999", code=1)


def test_damage_of_a_rollout_cache_is_named_and_care_is_asked_for(both, capsys):
    outcome = recipes(both)[MATHS](both)
    file = outcome.path.resolve() / "train_tokens.bin"
    content = bytearray(file.read_bytes())
    file.chmod(0o644)
    file.write_bytes(content[:-4])
    assert main(["verify", str(outcome.path)]) == 3
    assert "train_tokens.bin, bytes" in capsys.readouterr().out
    assert main(["list", both.cache_dir]) == 3
    assert "train_tokens.bin:" in capsys.readouterr().out
    assert main(["doctor", both.cache_dir]) == 3
    assert "train_tokens.bin" not in {damage.file for damage in find_damage(outcome.path, deep=False)[1:]}
    content[-4] ^= 1
    file.write_bytes(content)
    (found,) = find_damage(outcome.path, deep=False)  # its last block
    assert found.file == "train_tokens.bin" and "bytes 0 to" in found.problem
    assert [damage.file for damage in find_damage(outcome.path, deep=True)] == ["train_tokens.bin"]


SUMS = {
    "pairs": {"train": 1, "val": 1},
    "scores": {"train": 1, "val": 1},
    "samples_without_target": {"train": 1, "val": 0},
    "groups_read": 3,
    "dropped": {"malformed": 7},
    "totals": {f"{split}_{unit}": 0 for split in ("train", "val") for unit in ("groups", "samples", "tokens")},
}


def test_sums_that_are_not_those_of_the_index_and_ids_of_two_lines_are_damage(both):
    path = recipes(both)[MATHS](both).path
    raw = (path / "meta.json").read_bytes()
    (path.resolve() / "meta.json").chmod(0o644)
    for key, value in SUMS.items():
        change_meta(path.resolve(), **{key: value})
        found = find_damage(path, deep=False)
        assert found and all(each.file == "meta.json" for each in found), key
        (path / "meta.json").write_bytes(raw)
    change_meta(path.resolve(), pairs_after={"train": 0, "val": 0}, tokens_after={"train": 0, "val": 0})
    assert "x fewer tokens" in dict(stats(path))["folding"]
    (path / "meta.json").write_bytes(raw)
    ids = path.resolve() / "index/train_ids.txt"
    ids.chmod(0o644)
    ids.write_bytes(b"\n" + ids.read_bytes()[1:])
    sealed(path.resolve(), read_meta(path))  # as a builder with a fault would write it
    with refused("E201", "group 0 ", "2 lines"):
        RolloutDataset(path).id(0)
    assert verify(path, Limits(deep=True), names=["groups_read"])["groups_read"].problems


@pytest.mark.parametrize("changed", [{"rollouts_val_frac": 1.0}, {"rollouts_vocab_size": 2**31 + 1}, {"seed": 2**64}])
def test_settings_that_no_rollouts_can_be_built_with_are_refused_before_a_build(settings, changed):
    with refused("E102", f"{next(iter(changed))}", "expected ") as error:
        dataclasses.replace(settings, **changed)
    assert code_of(error.value) == "E102"


def test_sources_toml_has_a_table_of_rollouts_and_they_train_no_tokenizer(both, tmp_path):
    write(tmp_path / "sources.toml", '[rollouts]\nlogic = "maths.jsonl"\n[rollouts.more]\nfiles = "maths.jsonl"')
    known = recipes(dataclasses.replace(both, rollouts=None))
    assert list(known)[-2:] == ["rollouts/logic", "rollouts/more"]
    with refused("E104", "':ids'"):
        recipes(dataclasses.replace(both, rollouts="x=*.jsonl.old:ids"))
    alone = dataclasses.replace(both, tokenizer=None, source_root="sample", vocab_size=400)
    meta = recipes(alone)["sft/dolly15k"](alone).meta
    trained = tokenizer_of(Path(alone.cache_dir, "sample/sft/dolly15k"))
    assert trained.sha256 == meta["tokenizer_sha256"]
    about = json.loads(Path(alone.cache_dir, "sample/tokenizer/meta.json").read_text())
    assert not {"maths", "logic", "more"} & about["trained_on_bytes"].keys()


@pytest.mark.slow
def test_both_are_assets_with_checks_and_a_picture(
    both: Settings, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    keys = (TREES, MATHS)
    run(instance, both, "raw/maths", "raw/oasst1")
    result = run(instance, both, "tokenizer", *keys)
    assert built(result) >= set(keys)
    assert verdicts(result).keys() >= {check.name for check in ROLLOUTS.checks}
    assert all(passed for passed, _ in verdicts(result).values())
    shown = metadata(result)
    for key in keys:
        assert shown[key]["picture"].startswith("![groups](<data:image/svg+xml,")
        assert shown[key]["content_sha256"] and "supervised tokens are in [[ ]]" in str(shown[key]["examples"])
    assert shown[MATHS]["folding/token_factor"] == pytest.approx(56 / 20, abs=1e-3)
    assert stale(instance, both) == {}
    write(tmp_path / "maths.jsonl", lines(*ROWS[2:]))
    run(instance, both, "raw/maths")
    assert stale(instance, both).keys() == {MATHS}
    assert built(run(instance, both, "tokenizer", *keys)) == {MATHS}
    assert plot(Path(both.cache_dir) / MATHS).startswith(b"\x89PNG")
