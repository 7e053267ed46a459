"""A pretrain cache in partitions: its bytes depend on their number, never on who built which, when, or how often."""

import json
import shlex
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support import ROOT
from support.disk import meta_bytes, versions_dir
from support.errors import refused
from support.partition_builds import (
    RULE,
    SHA256,
    TOTAL,
    UNITS,
    HashedBytes,
    build_part,
    held,
    items_of,
    planned,
    plans,
    seal_small,
    whole,
)
from support.power_loss import tree_of
from support.small_builds import BUILDERS, ITEMS, locked, quick_folder, whole_version

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.documents import bounds, mask_of, tokens_of
from niels_gpt.cache.meta import tokenizer_above
from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from niels_gpt.commands.main import main
from niels_gpt.documents import Partition
from niels_gpt.engine.meta import Source
from niels_gpt.kinds.diff import diff
from niels_gpt.kinds.kind import Cache
from niels_gpt.kinds.look import locate, stats
from niels_gpt.kinds.rows import FILE_KEYS
from niels_gpt.kinds.verify import find_damage
from niels_gpt.storage.errors import CacheError

SPLITS = ("train", "val")


@pytest.fixture(scope="module", params=UNITS)
def sealed(request):
    """A cache of four partitions of each kind: its kind, its path, its meta, and what its folder holds."""
    with quick_folder() as folder:
        meta = whole(folder / "c", of=request.param)
        yield request.param, folder / "c", meta, tree_of(folder)


def items_by_split(path):
    """Return the source id and the content of every item of a cache, its loss too, by split."""
    cache = Cache.open(path)
    return {
        split: Counter(zip(cache.kind.source_ids(cache, split), losses(cache, split), strict=True)) for split in SPLITS
    }


def losses(cache, split):
    """Yield the digest of every item, which for chats is of the tokens alone, with which of them carry loss."""
    digests = list(cache.kind.digests(cache, split))
    if cache.kind.name != "sft":
        yield from digests
        return
    edges = bounds(cache.folder, cache.meta, split)
    for digest, (start, end) in zip(digests, pairwise(edges.tolist()), strict=True):
        ids = tokens_of(cache.folder, cache.meta, split)[start:end]
        yield digest, mask_of(cache.folder, cache.meta, split, start, ids).tobytes()


@pytest.mark.parametrize("order", [(3, 1, 0, 2), (2, 2, 0, 3, 1, 0)])
def test_any_order_and_any_repetition_gives_the_same_bytes(sealed, tmp_path, order):
    whole(tmp_path / "c", order, of=sealed[0])
    assert tree_of(tmp_path) == sealed[3]


OF_PARTITIONS = {
    "split_rule",
    "first_noticed",
    "partitions",
    "format_version",
    "content_sha256",
    "meta_crc32",
    *FILE_KEYS,
}
"""Keys of meta.json that differ between a cache in partitions and the same one built whole."""


def test_partitions_have_the_documents_of_the_whole_in_the_same_splits(sealed, tmp_path):
    kind, path, meta, _ = sealed
    common = {"max_train_tokens": None, "max_val_tokens": None} if kind == "pretrain" else {}
    common |= {} if kind == "rollouts" else {"tokenizer": HashedBytes()}
    alone = BUILDERS[kind](tmp_path / "c", items=iter(ITEMS[kind](0)), val_frac=0.2, **common)
    assert items_by_split(path) == items_by_split(tmp_path / "c")
    own, other = ({key: each[key] for key in each if key not in OF_PARTITIONS} for each in (meta, alone))
    ranges = [each.pop("ranges", {}) for each in (own, other)]
    assert own == other and own["source"]["counters"] == {"rows": len(ITEMS[kind](0))}
    assert [ranges[0][field] for field in ranges[1]] == [pytest.approx(of) for of in ranges[1].values()]
    assert whole_version(path) == meta["content_sha256"]
    assert diff(path, tmp_path / "c", tokenizers=[None, None], limit=0)["moved"]["count"] == 0


def test_checks_and_tables_take_a_cache_of_partitions(sealed):
    kind, path, meta, _ = sealed
    assert meta["format_version"] == (2 if kind == "pretrain" else 1)
    assert meta["partitions"]["total"] == TOTAL and meta["partitions"]["rule"] == RULE
    assert find_damage(path, deep=True) == [] and dict(stats(path))["partitions"].startswith("4")
    assert "partition" not in meta and "plan" not in meta and not list(path.rglob("*digests*"))


def test_readers_take_a_pretrain_cache_of_partitions(tmp_path):
    path, meta = tmp_path / "c", whole(tmp_path / "c")
    assert meta["format_version"] == 2 and meta["partitions"]["total"] == TOTAL and meta["partitions"]["rule"] == RULE
    assert find_damage(path, deep=True) == []
    data = PretrainTokenStreamDataset(str(path / "train"), T=1, device="cpu")
    x, y = data.get_batch(B=3, generator=torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (3, 1) and data.skipped_shards == 0
    assert dict(stats(path))["partitions"].startswith("4")
    position = meta["partitions"]["of_each"][0]["train_tokens"]
    assert "shard_00002" in locate(path, None, split="train", position=position, num_tokens=4)


def test_sums_of_partitions_that_do_not_agree_are_damage(tmp_path):
    whole(tmp_path / "c")
    folder = (tmp_path / "c").resolve()
    raw = json.loads((folder / "meta.json").read_bytes())

    def problems(**keys):
        (folder / "meta.json").write_bytes(meta_bytes({**raw, **keys}))
        return " ".join(damage.problem for damage in find_damage(tmp_path / "c", deep=False))

    assert problems() == ""
    each = raw["partitions"]["of_each"]
    for key in ("train_tokens", "train_docs", "val_shards"):
        wrong = [{**each[0], key: each[0][key] + 1}, *each[1:]]
        assert "of_each" in problems(partitions={**raw["partitions"], "of_each": wrong}), key
    moved = [{**each[0], "val_docs": each[0]["val_docs"] + 1}, {**each[1], "val_docs": each[1]["val_docs"] - 1}]
    assert problems(partitions={**raw["partitions"], "of_each": [*moved, *each[2:]]}) == ""
    assert [damage.file for damage in find_damage(tmp_path / "c", deep=True)] == ["meta.json"]
    for form in (None, [1], {**raw["partitions"], "rule": 7}, {**raw["partitions"], "host": "a"}, {"total": 4}):
        assert "partitions" in problems(partitions=form)
        for read in (stats, lambda path: PretrainTokenStreamDataset(str(path / "train"), T=1, device="cpu")):
            with refused("E202", "meta.json", "partitions") as error:
                read(tmp_path / "c")
            assert error.value.code == "E202"
    assert "total" in problems(partitions={**raw["partitions"], "total": 3})
    assert problems(format_version=1) != "" and problems(format_version=3) != ""
    del raw["partitions"]
    assert "shards.train[" in problems(format_version=1)  # short shards within a cache that is not partitioned


@pytest.mark.parametrize("kind", [kind for kind in UNITS if kind != "pretrain"])
def test_sums_of_partitions_of_chats_and_groups_that_do_not_agree_are_damage(kind, tmp_path):
    raw, folder = whole(tmp_path / "c", of=kind), (tmp_path / "c").resolve()

    def problems(deep=False, **keys):
        (folder / "meta.json").write_bytes(meta_bytes({**raw, "partitions": {**raw["partitions"], **keys}}))
        return " ".join(damage.problem for damage in find_damage(tmp_path / "c", deep=deep))

    each, assert_none = raw["partitions"]["of_each"], problems()
    assert assert_none == "" and "partitions.total" in problems(total=3) and "rule" in problems(rule=7)
    assert "partitions" in problems(of_each=[{**part, "train_docs": 1} for part in each])
    for key in each[0]:
        assert f"the sum of {key}" in problems(of_each=[{**each[0], key: each[0][key] + 1}, *each[1:]])
        moved = [{**each[0], key: each[0][key] + 1}, {**each[1], key: each[1][key] - 1}, *each[2:]]
        assert "of_each[0] ends" in problems(deep=True, of_each=moved), key


@pytest.mark.parametrize("kind", UNITS)
def test_a_partition_of_any_kind_is_a_cache_that_verifies(kind, tmp_path):
    plan = planned(tmp_path / "c", of=kind)
    meta = build_part(plan, 2)
    assert meta["partition"] == {"number": 2, "total": TOTAL, "plan": plan.sha256} and meta["format_version"] == 1
    assert find_damage(plan.unit_path(2), deep=True) == []
    for record in meta["files"]:
        path = plan.unit_path(2) / record["name"]
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        assert record["name"] in [damage.file for damage in find_damage(plan.unit_path(2), deep=True)]
        path.write_bytes(content)


@pytest.mark.parametrize("kind", UNITS)
def test_partitions_of_any_kind_may_be_empty_and_the_train_split_may_not(kind, tmp_path, caplog):
    plan = planned(tmp_path / "c", 3, kind)
    for number in range(3):
        build_part(plan, number, items=[])
    with refused("E303", "train", kind=ValueError):
        seal_small(plan)
    plan = planned(tmp_path / "d", 3, kind)
    for number in range(3):
        build_part(plan, number, items=ITEMS[kind](0)[:1] if number == 1 else [], val_frac=1e-9)
    caplog.clear()
    meta = seal_small(plan)
    assert held(plan, meta) == 1 and find_damage(tmp_path / "d", deep=True) == []
    assert [record.code for record in caplog.records if getattr(record, "code", "") != "W314"] == ["W308"]


def test_partitions_of_rollouts_with_other_fields_are_an_error_of_the_source(tmp_path):
    plan, (group, *_) = planned(tmp_path / "c", 2, "rollouts"), ITEMS["rollouts"](0)
    build_part(plan, 0, items=[group])
    build_part(plan, 1, items=[replace(group, id="b", samples=[replace(each, reward=None) for each in group.samples])])
    with refused("E304", "partition 1", "(logprobs, advantage)", kind=ValueError):
        seal_small(plan)


def test_names_that_partitions_have_counted_are_no_more_than_those_of_a_whole_cache(tmp_path):
    plan = planned(tmp_path / "c", 2, "sft")
    for number in range(2):
        counters = {f"unknown_role:{number}{name}": 1 + (name == "a") for name in "abcdefghijklmno"}
        build_part(plan, number, source=Source(name="small", counters=counters))
    counted = seal_small(plan)["source"]["counters"]
    assert len(counted) == 21 and counted["unknown_role:others"] == 10 and sum(counted.values()) == 32
    assert counted["unknown_role:0a"] == counted["unknown_role:1a"] == 2


def test_a_partition_is_a_cache_that_verifies(tmp_path):
    plan = planned(tmp_path / "c")
    meta = build_part(plan, 2)
    assert meta["partition"] == {"number": 2, "total": TOTAL, "plan": plan.sha256} and meta["format_version"] == 1
    assert [record["name"] for record in meta["files"]] == ["index/train_texts.bin", "index/val_texts.bin"]
    assert [record["bytes"] for record in meta["files"]] == [8 * meta["docs"][split] for split in SPLITS]
    assert find_damage(plan.unit_path(2), deep=True) == []
    texts = plan.unit_path(2) / "index/train_texts.bin"
    texts.write_bytes(b"x" + texts.read_bytes()[1:])
    assert [damage.file for damage in find_damage(plan.unit_path(2), deep=True)] == ["index/train_texts.bin"]


def test_a_partition_finds_its_tokenizer_before_that_is_installed(tmp_path):
    plan = planned(tmp_path / "pretrain" / "c")
    build_part(plan, 0)
    for name, sha256 in (("tokenizer", "0" * 64), (".versions/tokenizer/000000000001", SHA256)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "meta.json").write_bytes(meta_bytes({"kind": "tokenizer", "tokenizer_sha256": sha256}))
    assert tokenizer_above(plan.unit_path(0).resolve()) == tmp_path / ".versions/tokenizer/000000000001"
    assert find_damage(plan.unit_path(0), deep=False) == []


def test_budgets_are_divided_to_the_token_and_documents_are_cut_in_each_partition(tmp_path):
    limits = {"max_train_tokens": 203, "max_val_tokens": 41, "val_frac": None}
    meta = whole(tmp_path / "c", **limits)
    assert (meta["max_train_tokens"], meta["max_val_tokens"]) == (203, 41)
    of_each = meta["partitions"]["of_each"]
    assert [each["train_tokens"] for each in of_each] == [51, 51, 51, 50]
    assert meta["budget_reached"]["train"] is True and meta["cut"]["documents"] > 1
    assert find_damage(tmp_path / "c", deep=True) == []


def test_duplicates_are_counted_over_all_partitions(tmp_path):
    plan, items = planned(tmp_path / "c", 2), [(None, "same", None), (None, "other", None)]
    for number in range(2):
        build_part(plan, number, items=items, val_frac=0)
    assert seal_small(plan)["duplicates"] == {"train": 2, "val": 0}


def test_a_partition_may_be_empty_but_not_the_train_split(tmp_path, caplog):
    plan = planned(tmp_path / "c", 2)
    for number in range(2):
        build_part(plan, number, items=[])
    with pytest.raises(ValueError, match="train") as error:
        seal_small(plan)
    assert error.value.code == "E303"
    plan = planned(tmp_path / "d", 2)
    build_part(plan, 0, items=[])
    build_part(plan, 1, items=[("train", "text", None)])
    caplog.clear()
    meta = seal_small(plan)
    assert meta["docs"] == {"train": 1, "val": 0} and find_damage(tmp_path / "d", deep=True) == []
    told = [(each.code, each.getMessage()) for each in caplog.records if each.levelname == "WARNING"]
    assert [code for code, _ in told] == ["W308"]
    assert "(1)" in told[0][1] and "--partitions" not in told[0][1], "a single text is in train without partitions too"


def test_a_partition_warns_of_nothing_that_is_a_matter_of_all(tmp_path, caplog):
    plan = planned(tmp_path / "c", 2)
    for number in range(2):
        items = [("train", f"text {number} {row}", None) for row in range(10)]
        build_part(plan, number, items=items, max_train_tokens=1000, max_val_tokens=500)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    seal_small(plan)
    told = {record.code: record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert {"W306", "W307", "W308"} <= told.keys() and "--partitions 1" in told["W308"]
    unmet = [record.getMessage() for record in caplog.records if record.code == "W306"]
    assert [": train has " in text for text in unmet] == [True], "no budget is blamed for the empty val"


def test_a_seal_warns_of_no_empty_val_where_some_texts_fell_to_it(tmp_path, caplog):
    plan = planned(tmp_path / "c", 2)
    for number in range(2):
        build_part(
            plan, number, items=[(None, f"text {number} {row}", f"{number}-{row}") for row in range(20)], val_frac=0.4
        )
    meta = seal_small(plan)
    assert min(meta["docs"].values()) > 0
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_partition_that_is_replaced_while_it_is_sealed_is_refused(tmp_path):
    plan = planned(tmp_path / "c", 2)
    for number in range(2):
        build_part(plan, number)

    def replace(*_):
        plan.unit_path(0).unlink(missing_ok=True)
        build_part(plan, 0, items=items_of(1))

    with refused("E510", "00000") as caught:
        seal_small(plan, progress=replace)
    assert caught.value.code == "E510" and not (tmp_path / "c").exists()


def test_a_plan_that_stays_after_the_seal_is_said(tmp_path, caplog):
    plan = planned(tmp_path / "c", 2)
    for number in range(2):
        build_part(plan, number)
    with ExitStack() as stack:
        seal_small(plan, committed=lambda _: stack.enter_context(locked(plan.unit_path(1))) and None)
    (warned,) = [record for record in caplog.records if getattr(record, "code", "") == "W509"]
    command = warned.getMessage().rpartition("niels-gpt ")[2]
    assert main(shlex.split(command)) == 0 and not plan.folder.exists()


def test_a_plan_is_fixed_once(tmp_path):
    plan = planned(tmp_path / "c")
    again = planned(tmp_path / "c")
    assert again == plan and again.sha256 == plan.sha256 and plans(tmp_path / "c") == [plan]
    with refused("E511", "plan.json", "code, source") as error:
        planned(tmp_path / "c", code={"version": "2"}, source={"revision": "x"})
    assert error.value.code == "E511"
    other = planned(tmp_path / "c", fingerprint="e" * 64, partitions=7)
    assert {each.folder for each in plans(tmp_path / "c")} == {plan.folder, other.folder}


@pytest.mark.parametrize(
    "wrong",
    [
        {"partitions": 1},
        {"partitions": 1 << 62},
        {"partitions": True},
        {"fingerprint": "../../etc"},
        {"kind": "plan"},
        {"plan_version": 2},
        {"recipe": 3},
        {"tokenizer_sha256": None},
    ],
)
def test_what_is_no_plan_is_not_taken_for_one(tmp_path, wrong):
    plan = planned(tmp_path / "c")
    with refused("E202"):
        planned(tmp_path / "c", **wrong)
    (plan.folder / "plan.json").write_text(json.dumps({**plan.content, **wrong}))
    assert plans(tmp_path / "c") == []


def test_a_plan_is_not_read_through_a_link(tmp_path):
    plan = planned(tmp_path / "other" / "c")
    folder = versions_dir(tmp_path / "c")
    folder.mkdir(parents=True)
    (folder / plan.folder.name).symlink_to(plan.folder)
    assert plans(tmp_path / "c") == []
    with pytest.raises(CacheError, match="link"):
        planned(tmp_path / "c")


def test_partition_and_plan_are_given_together(tmp_path):
    arguments = {"max_train_tokens": 9, "max_val_tokens": 0, "shard_bytes": 20, "seed": 0}
    for wrong in ({"partition": Partition(0, 2)}, {"plan": SHA256}, {"partition": Partition(2, 2), "plan": SHA256}):
        with refused("E102"):
            build_pretrain([], tmp_path / "c", tokenizer=HashedBytes(), shuffle_buffer=None, **arguments, **wrong)


def test_numbers_of_partitions_are_checked(tmp_path):
    plan = planned(tmp_path / "c")
    assert plan.unit_path(3).name == "00003" and plan.partition(3) == Partition(3, TOTAL)
    with refused("E102", "partition 4 of 4"):
        plan.unit_path(4)
    assert len(items_of(0)) == 23


def test_the_example_on_paper_is_these_bytes(tmp_path):
    page = (ROOT / "docs" / "formats.md").read_text().partition("\n## Partitions\n")[2].partition("\n## ")[0]
    lines = [
        line.split(maxsplit=1) for block in page.split("```text\n")[1:] for line in block.split("```")[0].splitlines()
    ]
    expected = dict(lines)
    plan = planned(tmp_path / "c", 2)
    for number, texts in enumerate((("A", "Hi", "B"), ("Yes", "No", "C"))):
        items = [(None, text, None) for text in texts]
        build_part(plan, number, items=items, shard_bytes=8, shuffle_buffer=None, val_frac=0.5)
        folder = plan.unit_path(number)
        for name in [name for name in expected if name.startswith(folder.name)]:
            assert (plan.folder / name).read_bytes().hex(" ") == expected.pop(name), name
    meta = seal_small(plan)
    assert meta["content_sha256"] == expected.pop("content_sha256")
    for name, bytes_of in expected.items():
        raw = (tmp_path / "c" / name).read_bytes()
        assert raw[128 if name.endswith(".npy") else 0 :].hex(" ") == bytes_of, name
    assert len(expected) == 11
