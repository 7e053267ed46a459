"""Parts of a cache, each made by a run of its own, join to the bytes of one run; what does not fit is refused."""

import shutil
from collections.abc import Callable

import pytest
from support import eagle3_runs as small
from support.commands import niels_gpt
from support.eagle3_damage import flip_bit
from support.eagle3_runs import ALL, EAGLE3, FP8, NATIVE, REPLY, TOPK, disk, join, never, run, samples_of, whole_tree
from support.errors import refused

Run = Callable[..., tuple[int, str, str]]
FORMS = {"dense": {}, "topk": TOPK, "native": NATIVE, "fp8": FP8, "reply": REPLY, "all": ALL}


def parts_of(folder, count, **form):
    """Make the parts of a cache of ten samples."""
    plan = small.plan(samples_of(), **form)
    for number in range(1, count + 1):
        run(folder / f"{number}", given=plan, part=(number, count))
    return [folder / f"{number}" for number in range(1, count + 1)]


@pytest.fixture
def parts(tmp_path):
    """Two parts of a native cache of three shards: 0 and 2, and 1."""
    return parts_of(tmp_path, 2, **NATIVE)


@pytest.mark.parametrize("form", FORMS)
def test_parts_join_to_the_bytes_of_one_run(tmp_path, form):
    count = {"dense": 2, "fp8": 5}.get(form, 3)  # of three shards: more parts than shards are allowed
    parts = parts_of(tmp_path, count, **FORMS[form])
    found = [sorted(int(path.stem[6:]) for path in part.glob("shard-*")) for part in parts]
    assert found == [[shard for shard in range(3) if shard % count == number] for number in range(count)]
    assert not any((part / "meta.json").exists() for part in parts)
    before = [whole_tree(part) for part in parts]
    joined = join(tmp_path / "c", parts[::-1])
    run(tmp_path / "whole", given=small.plan(samples_of(), **FORMS[form]))
    assert whole_tree(tmp_path / "c") == whole_tree(tmp_path / "whole") and joined.copied_bytes == 0
    assert [whole_tree(part) for part in parts] == before
    shard = "shard-000000.safetensors"
    assert (tmp_path / "c" / shard).samefile(parts[0] / shard)
    assert run(tmp_path / "c", given=small.plan(samples_of(), **FORMS[form]), resume=True, load=never).shards == 0


def test_a_part_is_resumed_and_may_become_the_whole(parts):
    plan, (first, second) = small.plan(samples_of(), **NATIVE), parts
    before = whole_tree(first)
    (first / "shard-000002.safetensors").unlink()
    made = run(first, given=plan, part=(1, 2), resume=True)
    assert made == ({}, 1, False) and whole_tree(first) == before
    assert run(first, given=plan, part=(1, 2), resume=True).shards == 0 and whole_tree(first) == before
    whole = run(first, given=plan, resume=True)  # without part: what is missing
    assert whole.shards == 1 and (first / "meta.json").exists()
    assert run(first, given=plan, part=(2, 2), resume=True, load=never).meta == whole.meta, "a finished one stays so"
    joined = join(second.parent / "c", [second, first, second])  # shard 1 is there twice, with the same bytes
    assert whole_tree(second.parent / "c") == whole_tree(first) and joined.meta == whole.meta


def not_joined(out, parts, code, *found):
    with refused(code, *found) as caught:
        join(out, parts)
    assert not out.exists() and not list(out.parent.glob(".*.tmp"))
    return caught.value


def test_what_is_missing_or_does_not_fit_is_refused(tmp_path, parts):
    out, (first, second) = tmp_path / "c", parts
    assert "--partitions N --partition I" in not_joined(out, [first], "E702", "2 of 3 shards", "missing: 1").remedy
    receipt = second / "sidecar" / "shard-000001.json"
    held = receipt.read_bytes()
    receipt.unlink()
    not_joined(out, parts, "E702", "2 of 3 shards", "missing: 1")
    receipt.write_bytes(held)
    double = shutil.copytree(second, tmp_path / "double")
    flip_bit(double / "shard-000001.safetensors", -1)
    not_joined(out, [first, double], "E702", "damaged: 1")  # a bit of a state, in a file of the right size
    not_joined(out, [*parts, double], "E701", "double/shard-000001.safetensors", "2/shard-000001.safetensors")
    other = parts_of(tmp_path / "other", 2, **{**NATIVE, "dtype": "fp32"})
    not_joined(out, [first, other[1]], "E703", first, "'manifest.dtype'")
    draft = parts_of(tmp_path / "draft", 2, **NATIVE, draft_vocab_size=3, selected_token_ids=[1, 2, 3])
    not_joined(out, [first, draft[1]], "E703", first, "'manifest.draft_vocab_size', 'manifest.selected_token_ids'")
    for part in parts:
        flip_bit(part / "target_weights.safetensors", -1)
    not_joined(out, parts, "E702", "target_weights.safetensors", "sidecar/weights.json")
    out.mkdir()
    (out / "mine").touch()
    with refused("E704", out):
        join(out, [*parts, double])
    not_joined(first / "c", [first, double], "E704", first / "c")
    with refused("E105", "nowhere/sidecar/plan.json", "--partition", kind=FileNotFoundError):
        join(tmp_path / "d", [first, tmp_path / "nowhere"])


def test_a_damaged_file_of_a_part_is_taken_from_another_and_copied_to_another_disk(tmp_path, parts):
    flip_bit(parts[0] / "target_weights.safetensors", -1)
    flip_bit(parts[0] / "sidecar" / "ids.txt", -2)
    run(tmp_path / "whole", given=small.plan(samples_of(), **NATIVE))
    with disk(tmp_path / "disk", "20m") as place:
        joined = join(place / "c", parts)
        assert whole_tree(place / "c") == whole_tree(tmp_path / "whole")
    assert joined.linked_bytes == 0 < joined.copied_bytes


def test_the_commands_make_parts_and_join_them(tmp_path, native_run):
    for number in (1, 2):
        what = ["--shard-bytes", "20000", "--partitions", "2", "--partition", f"{number - 1}"]
        what += ["--output-dir", str(tmp_path / f"{number}")]
        status, out, errors = native_run(*what)
        assert status == 0 and "The cache is not finished: make the other partitions" in out, errors
        assert f"to make in partition {number - 1} of 2" in out and "niels-gpt seal " in out
    done = niels_gpt("eagle3", "join", tmp_path / "c", tmp_path / "1", tmp_path / "2")
    assert done.status == 0 and "bytes are shared with the partitions" in done.out
    assert native_run("--shard-bytes", "20000", "--output-dir", str(tmp_path / "d"))[0] == 0
    assert whole_tree(tmp_path / "c") == whole_tree(tmp_path / "d")
    assert niels_gpt("eagle3", "verify", tmp_path / "c").status == 0
    done = niels_gpt("join", "--json", tmp_path / "e", tmp_path / "1", module=EAGLE3)
    assert done.status == 1 and done.json["error"]["code"] == "E702"
