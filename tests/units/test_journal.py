"""The journal of a build on paper: its lines, what a checkpoint says, and what damage to it means."""

import hashlib
import json
import re
import subprocess

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.errors import refused
from support.fault_builds import KINDS, line, place_of, unfinished_tree, values_of
from support.json_values import JSON, SOME_SHA256
from support.small_builds import quick_folder

from niels_gpt.cache import CacheError
from niels_gpt.engine.journal import Checkpoint, Journal, identity_of, sealed_builds

pytestmark = pytest.mark.usefixtures("small_batches")


def test_a_journal_is_a_header_and_a_line_for_each_checkpoint(tmp_path):
    journal = Journal(tmp_path, {"seed": 3})
    assert journal.last is None and list(tmp_path.iterdir()) == []
    record = {"name": "train/x", "bytes": 1, "sha256": SOME_SHA256}
    second = Checkpoint(3, SOME_SHA256, {}, [record], {}, True, SOME_SHA256)
    journal.append(Checkpoint(documents=2, files={"a.bin": (4, SOME_SHA256)}, state={"kept": 1}))
    journal.append(second)
    journal.close()
    of_first = {"documents": 2, "ended": False, "files": {"a.bin": [4, SOME_SHA256]}, "finished": []}
    of_first |= {"generator": None, "sealed": None, "seek": None, "state": {"kept": 1}}
    of_second = {**of_first, "documents": 3, "ended": True, "files": {}, "finished": [record], "state": {}}
    of_second |= {"generator": SOME_SHA256, "sealed": SOME_SHA256}
    values = [{"identity": {"seed": 3}, "journal_version": 1}, of_first, of_second]
    assert (tmp_path / "journal.jsonl").read_bytes() == b"".join(map(line, values))
    again = Journal(tmp_path, {"seed": 3})
    assert again.last == second and again.finished == second.finished
    again.close()
    assert identity_of(tmp_path) == {"seed": 3}


@KINDS
def test_a_checkpoint_says_what_lies_on_disk(kind: str) -> None:
    tree, name, _ = unfinished_tree(kind)
    raw = tree[name]
    assert isinstance(raw, bytes) and raw == b"".join(map(line, values_of(raw)))
    header, *checkpoints = values_of(raw)
    assert header["journal_version"] == 1 and header["identity"]["kind"] == {"templated": "sft"}.get(kind, kind)
    journal, work = name.rsplit("/", 1)[0], name.rsplit("/", 1)[0].removesuffix(".journal")
    assert re.fullmatch(r"\.versions/c/building-[0-9a-f]{12}", work)
    identity = json.dumps(header["identity"], indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert work.endswith(hashlib.sha256(identity.encode()).hexdigest()[:12])
    for file, (size, sha256) in checkpoints[-1]["files"].items():
        content = tree.get(place_of(file, journal, checkpoints, tree.__contains__), b"")
        assert isinstance(content, bytes) and hashlib.sha256(content[:size]).hexdigest() == sha256
    for record in (record for checkpoint in checkpoints for record in checkpoint["finished"]):
        content = tree[f"{work}/{record['name']}"]
        assert isinstance(content, bytes) and len(content) == record["bytes"]
        assert hashlib.sha256(content).hexdigest() == record["sha256"]
    assert [found["documents"] for found in checkpoints] == sorted(found["documents"] for found in checkpoints)
    assert checkpoints[-1]["files"]["texts.bin"][0] == 8 * checkpoints[-1]["documents"] > 0


def test_the_generators_state_is_that_of_torch_after_the_draws_so_far():
    tree, name, _ = unfinished_tree("pretrain")
    checkpoints = values_of(tree[name])[1:]
    generator = torch.Generator().manual_seed(0)
    torch.randint(8, (1024,), generator=generator)
    assert checkpoints[-1]["generator"] == hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()
    assert values_of(unfinished_tree("sft")[0][unfinished_tree("sft")[1]])[-1]["generator"] is None


def test_a_journal_cut_at_any_byte_is_the_checkpoints_before(tmp_path):
    lines = [line({"identity": {}, "journal_version": 1})]
    lines += [line(json.loads(json.dumps(vars(Checkpoint(documents=number))))) for number in (1, 2, 3)]
    third = lines.pop()
    raw, path = b"".join(lines), tmp_path / "journal.jsonl"
    for size in range(len(raw) + 1):
        path.write_bytes(raw[:size])
        if size < len(lines[0]):
            with refused("E505", "journal.jsonl"):
                Journal(tmp_path, {})
            continue
        journal = Journal(tmp_path, {})
        assert path.read_bytes() == raw[:size]  # it may be another builder's by now
        journal.append(Checkpoint(documents=3))
        journal.close()
        whole = (size >= len(lines[0] + lines[1])) + (size == len(raw))
        assert (journal.last.documents if journal.last else 0) == whole
        assert path.read_bytes() == b"".join([*lines[: whole + 1], third])  # what is no line is cut off


def test_damage_before_good_lines_is_refused_and_the_message_says_how_to_go_on_from_before_it(tmp_path):
    lines = [line({"identity": {}, "journal_version": 1})]
    lines += [line(vars(Checkpoint(documents=number))) for number in (1, 2, 3)]
    lines[2] = lines[2].replace(b'"documents": 2', b'"documents": 9')
    (tmp_path / "journal.jsonl").write_bytes(b"".join(lines))
    with refused("E505", "journal.jsonl", "byte 181") as caught:
        Journal(tmp_path, {})
    assert (tmp_path / "journal.jsonl").read_bytes() == b"".join(lines)
    subprocess.run(str(caught.value).rpartition("damage: ")[2], shell=True, check=True)
    journal = Journal(tmp_path, {})
    journal.close()
    assert journal.last is not None and journal.last.documents == 1


@pytest.mark.parametrize("header", [{"identity": {"seed": 4}, "journal_version": 1}, {}, [], 3, None, "x"], ids=str)
def test_the_journal_of_another_build_is_refused(tmp_path, header):
    (tmp_path / "journal.jsonl").write_bytes(line(header))
    with refused("E505", "journal.jsonl"):
        Journal(tmp_path, {"seed": 3})
    assert identity_of(tmp_path) in ({}, {"seed": 4})


@settings(suppress_health_check=list(HealthCheck), max_examples=60, derandomize=True)
@given(value=st.one_of(JSON, st.fixed_dictionaries({key: JSON for key in vars(Checkpoint())})))
@example({**vars(Checkpoint()), "documents": True})
@example({**vars(Checkpoint()), "files": [["a", [1, SOME_SHA256]]]})
@example({**vars(Checkpoint()), "files": {"a": [1]}})
@example({**vars(Checkpoint()), "state": {"counts": {"a": {"b": 1}}}})
@example({**vars(Checkpoint()), "finished": [{"name": "../x", "bytes": 1, "sha256": SOME_SHA256}]})
@example({**vars(Checkpoint()), "sealed": SOME_SHA256})
def test_any_object_is_a_checkpoint_or_a_cache_error(value):
    with quick_folder() as path:
        header = line({"identity": {}, "journal_version": 1})
        (path / "journal.jsonl").write_bytes(header + line(value))
        try:
            journal = Journal(path, {})
        except CacheError as error:
            assert f"journal.jsonl: byte {len(header)}" in str(error) and "build from scratch: " in str(error)
            return
        journal.close()
        assert (journal.last is None) == (value is None)  # null is no line
        assert journal.last is None or 0 <= journal.last.documents < 2**63


def test_the_journal_of_a_build_of_days_tells_that_it_was_committed(tmp_path):
    folder = tmp_path / ".versions" / "c" / "building-0123456789ab.journal"
    folder.mkdir(parents=True)
    journal = Journal(folder, {})
    journal.append(Checkpoint(1))
    journal.close()
    with open(journal.path, "ab") as file:
        file.write(line({"documents": 2, "padding": "x" * 1000}) * 35_000)  # 35 MB: more than is read of a JSON file
        file.write(line({"documents": 3, "sealed": SOME_SHA256}))
    assert sealed_builds(tmp_path / "c") == [folder]
    folder.with_suffix("").mkdir()  # the folder of the build
    assert sealed_builds(tmp_path / "c") == []
