"""Kinds x files x harms x operations: a harmed file is refused by name and code, told, or makes no difference."""

import random
import re

import pytest
from support import LONG
from support.harms import FILE_HARMS, flip, kept, outside_of, watched
from support.kinds import KINDS, above, calls, files_of, fresh, judged, writers

PARTS = 9
"""Of the table. No divisor of the number of harms: each of them meets other files in another part."""
CODES = {
    "missing": {"E105", "E203", "E204", "E207", "E208", "E401", "E702"},
    "holes": {"E202", "E203", "E206", "E707"},
    "size": {"E201", "E202", "E203", "E403"},
    "no file": {"E205", "E209"},
}
"""What refuses a file after a harm; of EAGLE-3 also E701, of a draft vocabulary E707."""
SIZES = ("empty", "one byte", "cut", "a byte less", "a byte more")
WITHOUT = {
    "list": ("meta.json",),
    "gc --dry-run": ("meta.json",),
    "locate train 20": ("index/train_ids.txt",),
    "inspect": ("shard-", "meta.json", "sidecar/"),
    "inspect --sample 5": ("sidecar/ids.txt", "sidecar/samples.safetensors"),
    "stats": ("sidecar/shard-",),
}
"""What an operation does without, by the beginnings of names: it prints less then, or which file is damaged."""
UNNAMED = {("sft with bits", "meta.json", "read"), ("draft vocabulary", "draft_vocab.json", "read")}
"""Readers that take what is left, without a file, for a cache of another template or kind."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_cache_is_good_for_everything_that_meets_it(tmp_path, kind):
    cache = fresh(kind, tmp_path / "caches")
    assert judged(cache) == judged(cache, deep=True) == []
    with watched(tmp_path):
        assert {name: done.err for name, call in calls(kind).items() if (done := call(cache)).status} == {}
    for name, call in writers(kind).items():
        done = call(cache)
        assert done.status == 0, (name, done)
    assert judged(cache, deep=True) == []


@pytest.mark.parametrize(
    "part", [None, *(pytest.param(part, marks=pytest.mark.slow) for part in range(0, PARTS, 1 if LONG else 4))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_harmed_file_is_told_and_refused_by_who_reads_it(tmp_path, kind, part):
    """A part: of all files with all harms, which everything meets. None: a file has some of the harms in turn, and of
    what looks at a cache, reading it and one more in turn meet it."""
    cache, looks = fresh(kind, tmp_path / "caches"), calls(kind)
    good = {name: call(cache) for name, call in looks.items()}
    others = [name for name in looks if name != "read"]
    first = [*KINDS].index(kind)
    cells = [(name, harm) for name in files_of(cache) for harm in FILE_HARMS]
    for number, (name, harm) in enumerate(cells[(first if part is None else part) % PARTS :: PARTS]):
        path = cache.resolve() / name
        with kept(path):
            FILE_HARMS[harm](path)
            with watched(above(cache, kind), outside_of(path)):
                assert_blamed(cache, kind, name, deep=KINDS[kind].is_eagle3)
                for operation in looks if part is not None else ("read", others[number % len(others)]):
                    assert_cell(kind, name, harm, operation, looks[operation](cache), good[operation])


def assert_cell(kind, name, harm, operation, done, good):
    """Fail unless an operation refused a harmed file by name and code, told of it, or did as before."""
    cell, text = f"{kind}: {name}: {harm}: {operation}: {done}", done.out + done.err
    if done.status == 0:
        is_read = operation == "read" and not name.startswith(("meta.json", *KINDS[kind].not_read))
        is_told = operation.startswith("verify") and not KINDS[kind].is_eagle3
        assert not is_read and not is_told, f"it was not seen: {cell}"
        assert done.out == good.out or name.startswith(WITHOUT.get(operation, ())), cell
        return
    codes = set(re.findall(r"error\[(\w+)\]", text))
    what = harm if harm in CODES else "size" if harm in SIZES else "no file"  # a link, a pipe, a folder
    expected = CODES[what] | ({"E701"} if KINDS[kind].is_eagle3 else {"E707"})
    assert codes <= expected and (codes or operation.startswith(("verify", "list", "stats"))), cell
    assert is_named(name, text) or (harm == "missing" and (kind, name, operation) in UNNAMED), cell


def is_named(name, text):
    """Whether a text names a file, says that a folder without a meta.json is no cache, or quotes the manifest."""
    said = {"meta.json": "no cache", "manifest.json": "the manifest's"}.get(name)
    return name.rpartition("/")[2] in text or (said is not None and said in text)


def assert_blamed(cache, kind, name, *, deep=False):
    """Fail unless this file is said to be damaged, and no other one."""
    found = [problem for problem in judged(cache, deep=deep) if problem != "... and more"]
    assert found and all(is_named(name, problem) for problem in found), (kind, name, found)


@pytest.mark.parametrize("count", [1, pytest.param(24 if LONG else 8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_told_by_a_deep_look_and_blames_no_good_file(tmp_path, kind, count):
    cache, chance = fresh(kind, tmp_path / "caches"), random.Random(kind)
    for name in files_of(cache):
        path = cache.resolve() / name
        for _ in range(count):
            byte, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
            flip(path, byte, bit)
            assert_blamed(cache, kind, name, deep=True)
            flip(path, byte, bit)
    assert judged(cache, deep=True) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].is_eagle3])
def test_a_number_of_a_changed_plan_blames_no_shard(tmp_path, kind):
    """The plan's pad_id is one that a plan may have: meta.json alone shows the change."""
    cache = fresh(kind, tmp_path / "caches")
    path = cache.resolve() / "sidecar" / "plan.json"
    changed = path.read_bytes().replace(b'"pad_id": 5', b'"pad_id": 1')
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    assert_blamed(cache, kind, "sidecar/plan.json", deep=True)


@pytest.mark.parametrize("kind", KINDS)
def test_what_writes_refuses_a_harmed_file_or_leaves_the_rest_alone(tmp_path, kind):
    """Harms and operations in turn. What is outside stays, and no harmed file is pushed."""
    harms = [*FILE_HARMS]
    for number, name in enumerate(files_of(fresh(kind, tmp_path / "caches"))):
        for turn, (operation, call) in [*enumerate(writers(kind).items())][number % 2 :: 2]:
            harm = harms[(number + 5 * turn) % len(harms)]
            cache = fresh(kind, tmp_path / f"{number} {turn}" / "caches")
            path = cache.resolve() / name
            FILE_HARMS[harm](path)
            with watched(outside_of(path)):
                done = call(cache)
            cell = f"{kind}: {name}: {harm}: {operation}: {done}"
            assert is_named(name, done.out + done.err) if done.status else operation != "push", cell
