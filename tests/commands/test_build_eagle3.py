"""eagle3/draft_vocab and eagle3/targets from the command line: built, checked, repaired, or left out."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from support.commands import niels_gpt
from support.data_files import lines, write
from support.pipeline_seams import building

from niels_gpt.eagle3.target import write_small_target
from niels_gpt.tokenizer import load_tokenizer

KEYS = VOCAB, TARGETS = ("eagle3/draft_vocab", "eagle3/targets")
CHATS = [{"role": "user", "content": "who is there"}, {"role": "assistant", "content": "the sea and the old house"}]


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    """Run the target in one thread: two that share a busy core wait for each other most of the time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})


@pytest.fixture(scope="module")
def target(tmp_path_factory, tiny_model_path):
    """A small Llama in a folder of its own, as a user's model is."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    return str(write_small_target(folder, load_tokenizer(tiny_model_path)))


@pytest.fixture
def flags(tmp_path, mirror, tiny_model_path):
    """Flags that build from the mirror in ./c; of eagle3 six chats in two shards."""
    chats = lines(*({"messages": [*CHATS[:1], {**CHATS[1], "content": f"the sea {number}"}]} for number in range(6)))
    write(tmp_path / "chats.jsonl", chats)
    of_eagle3 = {"source": "chats.jsonl", "seq-length": 64, "shard-size": 3, "device": "cpu"}
    given = ["--source-root", str(mirror), "--cache-dir", "c", "--tokenizer", str(tiny_model_path)]
    return [*given, *(str(word) for name, value in of_eagle3.items() for word in (f"--eagle3-{name}", value))]


def rows(done):
    return {row["key"]: row for row in done.json["caches"]}


def test_they_are_built_by_name_without_the_tokenizer_and_reused_and_listed(flags, target):
    build = ["build", TARGETS, VOCAB, *flags, "--eagle3-target", target]
    done = niels_gpt(*build, "--dry-run", "--json")
    assert done.status == 0
    assert [row["action"] for row in rows(done).values()] == ["build", "build"] and not Path("c").exists()
    done = niels_gpt(*build, "--json")
    assert done.status == 0
    assert {key: row["state"] for key, row in rows(done).items()} == {VOCAB: "built", TARGETS: "built"}
    assert not Path("c/tokenizer").exists()
    done = niels_gpt(*build)
    assert done.status == 0
    out = done.out
    assert out.count("up to date") == 2 and out.endswith("next: niels-gpt stats c/eagle3/targets\n")
    done = niels_gpt(*build, "--dry-run", "--json")
    assert done.status == 0
    assert [row["action"] for row in rows(done).values()] == ["up to date", "up to date"]
    Path("c/eagle3/.versions/targets/building-0123456789ab").mkdir()
    done = niels_gpt(*build, "--dry-run", "--eagle3-seq-length", "32")
    assert done.status == 0 and "unfinished" in done.out
    assert set(rows(niels_gpt("list", "c", "--json"))) == set(KEYS)
    assert niels_gpt("build", TARGETS, *build[3:], "--restart").status == 0
    assert len(Path("c/.runs/eagle3.targets.jsonl").read_text().splitlines()) == 2


def test_a_damaged_one_fails_its_checks_stops_no_other_and_its_error_ends_in_the_command_that_repairs_it(flags, target):
    build = ["build", "roam", *KEYS, *flags, "--eagle3-target", target, "--deep-checks"]
    assert niels_gpt(*build).status == 0
    shard = Path("c", TARGETS, "shard-000001.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    done = niels_gpt("verify", "c/eagle3/targets", "--deep")
    assert done.status == 3 and "niels-gpt build eagle3/targets --restart" in done.out.splitlines()[-1]
    done = niels_gpt(*build)
    assert done.status == 3
    out, err = done.out, done.err
    assert "eagle3/targets" in err and "fails its checks" in err and "shard-000001" in err
    states = {line.split()[0]: "FAILED" in line for line in out.splitlines()[2:] if ": " not in line}
    assert states == {"pretrain/roam": False, VOCAB: False, TARGETS: True}
    again = shlex.split(err.splitlines()[-1].partition("Build it again: ")[2])
    assert niels_gpt(*again[1:]).status == 0 and niels_gpt(*build).status == 0


def test_without_a_target_a_build_of_all_leaves_them_out_and_a_named_one_fails(flags):
    done = niels_gpt("build", TARGETS, *flags)
    assert done.status == 1
    error = done.err
    assert error.startswith(f"error[E705]: {TARGETS}: ") and "--eagle3-target" in error and "eagle3_target" in error
    assert not Path("c").exists(), "a tokenizer was made for nothing"
    done = niels_gpt("build", TARGETS, *flags, "--dry-run", "--json")
    assert done.status == 1
    assert rows(done)[TARGETS]["action"] == "left out"
    flags += ["--max-dropped-share", "1", "--fineweb-edu-train-tokens", "1", "--gutenberg-train-tokens", "1"]
    flags += ["--fineweb-edu-val-tokens", "1", "--gutenberg-val-tokens", "1"]
    done = niels_gpt("build", "--all", *flags, "--dry-run", "--json")
    assert done.status == 0
    assert [row["action"] for key, row in rows(done).items() if key in KEYS] == ["left out", "left out"]
    done = niels_gpt("build", "--all", *flags)
    assert done.status == 0
    err = done.err
    (line,) = [line for line in err.splitlines() if "W513" in line]
    assert VOCAB in line and TARGETS in line and "--eagle3-target" in line
    done = niels_gpt("build", "--all", *flags, "--strict")
    warned = re.findall(r"^warning\[(\w+)", done.err, re.MULTILINE)
    assert "W513" in warned and done.status == (1 if len(warned) > 1 else 0)


def test_without_transformers_they_are_left_out_and_strict_counts_it_where_a_target_is_named(
    flags, tmp_path, tiny_model_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = niels_gpt("build", VOCAB, *flags, "--eagle3-target", "someones/model")
    assert done.status == 4 and "pip install 'niels-gpt[eagle3]'" in done.err
    build = [
        "build",
        "--all",
        "--source-root",
        "sample",
        "--cache-dir",
        str(tmp_path / "all"),
        "--tokenizer",
        str(tiny_model_path),
    ]
    assert niels_gpt(*build).status == 0  # its warnings come once
    for target, status in ((), 0), (("--eagle3-target", "someones/model"), 1):
        done = niels_gpt(*build, *target, "--json", "--strict")
        assert done.status == status and "W513" in done.err and ("--strict: 1 warning" in done.err) == bool(status)
        states = {key: row["state"] for key, row in rows(done).items()}
        assert not set(KEYS) & set(states) and len(states) > 7 and "failed" not in states.values()


def test_partitions_by_hand_and_sealed_are_the_bytes_of_one_build(flags, target):
    build, of = ["build", TARGETS, *flags, "--eagle3-target", target], ["--partitions", "2"]
    assert niels_gpt("build", TARGETS, *flags, "--eagle3-target", target, "--cache-dir", "whole").status == 0
    done = niels_gpt(*build, *of, "--partition", "1", "--json")
    assert done.status == 0 and (done.json["unfinished"], done.json["sealed"]) == ([0], False)
    assert done.json["totals"]["samples"] == 3 and not Path("c", TARGETS).exists()
    done = niels_gpt(*build, *of, "--dry-run", "--json")
    assert "2 partitions" in rows(done)[TARGETS]["action"] and "unfinished" in rows(done)[TARGETS]["action"]
    done = niels_gpt("seal", *build[1:], *of)
    assert done.status == 1 and "error[E712]" in done.err and "missing: 0" in done.err
    again, last = done.err.splitlines()[-2:]
    assert niels_gpt(*shlex.split(last)[1:]).status == 1, "it is not finished yet"
    done = niels_gpt(*shlex.split(again)[1:])
    assert done.status == 0 and niels_gpt(*shlex.split(last)[1:]).status == 0
    assert contents("c") == contents("whole") and len(contents("c")) > 8
    done = niels_gpt(*build, *of, "--partition", "0", "--json")
    assert done.status == 0 and done.json["sealed"] and done.json["reused"]
    assert not list(Path("c").rglob("partitions-*"))


def contents(root):
    """Return the bytes of the committed cache below a folder of caches."""
    folder = Path(root, TARGETS).resolve()
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_partition_alone_is_begun_from_scratch_and_other_code_is_refused(flags, target):
    build = ["build", TARGETS, *flags, "--eagle3-target", target, "--partitions", "2", "--json"]
    for number in ("0", "1"):
        assert niels_gpt(*build, "--partition", number).status == 0
    shards = sorted(Path("c").rglob("shard-*.safetensors"))
    before = [shard.stat().st_ino for shard in shards]
    assert niels_gpt(*build, "--partition", "1", "--restart").json["reused"] is False
    after = [shard.stat().st_ino for shard in shards]
    assert after[0] == before[0] and after[1] != before[1]
    (settings,) = Path("c").rglob(".parts/settings.json")
    told = json.loads(settings.read_text())
    settings.write_text(json.dumps({**told, "code": {**told["code"], "version": "0.0.1"}}))
    shards[1].unlink()
    done = niels_gpt(*build, "--partition", "1")
    assert done.status == 1 and done.json["error"]["code"] == "E712" and "0.0.1" in done.json["error"]["message"]
    assert niels_gpt("build", *build[1:], "--restart").status == 0 and Path("c", TARGETS).exists()


def test_what_is_being_built_is_neither_begun_again_nor_sealed_nor_removed(flags, target):
    build = ["build", TARGETS, *flags, "--eagle3-target", target, "--partitions", "2"]
    assert niels_gpt(*build, "--partition", "0").status == 0
    (plan,) = Path("c/eagle3/.versions/targets").glob("partitions-*")
    with building(plan / "1-of-2"):  # as its builder does
        for words in ([*build, "--restart"], [*build, "--partition", "1"], ["seal", *build[1:]]):
            done = niels_gpt(*words)
            assert done.status == 1 and "error[E503]" in done.err, words
        done = niels_gpt("gc", "c", "--unsealed")
        assert "left alone" in done.out and len(list(plan.rglob("shard-*.safetensors"))) == 1
    assert "kept" in niels_gpt("gc", "c").out and plan.is_dir()
    assert niels_gpt("gc", "c", "--unsealed").status == 0 and not plan.exists()
    assert niels_gpt(*build).status == 0


def test_an_unfinished_version_of_an_earlier_release_is_taken_over(flags, target):
    build = ["build", TARGETS, *flags, "--eagle3-target", target]
    assert niels_gpt(*build, "--partitions", "2", "--partition", "0").status == 0
    (plan,) = Path("c/eagle3/.versions/targets").glob("partitions-*")
    earlier = plan.with_name(plan.name.replace("partitions", "building"))
    (plan / "cache").rename(earlier)
    earlier.with_name(f"{earlier.name}.journal").mkdir()
    (earlier.with_name(f"{earlier.name}.journal") / "journal.jsonl").touch()
    shard = (earlier / "shard-000000.safetensors").stat().st_ino
    assert niels_gpt("gc", "c", "--dry-run").status == 0
    assert niels_gpt(*build, "--dry-run").status == 0
    assert niels_gpt(*build).status == 0
    assert Path("c", TARGETS, "shard-000000.safetensors").stat().st_ino == shard
    assert not list(plan.parent.glob("building-*")) and not plan.exists()
