"""eagle3/draft_vocab and eagle3/targets from the command line: built, checked, repaired, or left out."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from support.data_files import lines, write

from niels_gpt.commands.main import main
from niels_gpt.eagle3.target import write_small_target
from niels_gpt.recipes.eagle3.options import KEYS
from niels_gpt.tokenizer import load_tokenizer

VOCAB, TARGETS = KEYS
CHATS = [{"role": "user", "content": "who is there"}, {"role": "assistant", "content": "the sea and the old house"}]


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the target in one thread: two that share a busy core wait for each other most of the time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: Path) -> str:
    """A small Llama in a folder of its own, as a user's model is."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    return str(write_small_target(folder, load_tokenizer(tiny_model_path)))


@pytest.fixture
def flags(tmp_path: Path, mirror: Path, tiny_model_path: Path) -> list[str]:
    """Flags that build from the mirror in ./c; of eagle3 six chats in two shards."""
    chats = lines(*({"messages": [*CHATS[:1], {**CHATS[1], "content": f"the sea {number}"}]} for number in range(6)))
    write(tmp_path / "chats.jsonl", chats)
    of_eagle3 = {"source": "chats.jsonl", "seq-length": 64, "shard-size": 3, "device": "cpu"}
    given = ["--source-root", str(mirror), "--cache-dir", "c", "--tokenizer", str(tiny_model_path)]
    return [*given, *(str(word) for name, value in of_eagle3.items() for word in (f"--eagle3-{name}", value))]


def rows(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return {row["key"]: row for row in json.loads(capsys.readouterr().out)["caches"]}


def test_they_are_built_by_name_without_the_tokenizer_and_reused_and_listed(
    flags: list[str], target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    build = ["build", TARGETS, VOCAB, *flags, "--eagle3-target", target]
    assert main([*build, "--dry-run", "--json"]) == 0
    assert [row["action"] for row in rows(capsys).values()] == ["build", "build"] and not Path("c").exists()
    assert main([*build, "--json"]) == 0
    assert {key: row["state"] for key, row in rows(capsys).items()} == {VOCAB: "built", TARGETS: "built"}
    assert not Path("c/tokenizer").exists()
    assert main(build) == 0
    out = capsys.readouterr().out
    assert out.count("up to date") == 2 and out.endswith("next: niels-gpt eagle3 stats c/eagle3/targets\n")
    assert main([*build, "--dry-run", "--json"]) == 0
    assert [row["action"] for row in rows(capsys).values()] == ["up to date", "up to date"]
    Path("c/eagle3/.versions/targets/building-0123456789ab").mkdir()
    assert main([*build, "--dry-run", "--eagle3-seq-length", "32"]) == 0
    assert "unfinished" in capsys.readouterr().out
    assert main(["list", "c", "--json"]) == 0 and set(rows(capsys)) == set(KEYS)
    assert main(["build", TARGETS, *build[3:], "--restart"]) == 0
    assert len(Path("c/.runs/eagle3.targets.jsonl").read_text().splitlines()) == 2


def test_a_damaged_one_fails_its_checks_stops_no_other_and_its_error_ends_in_the_command_that_repairs_it(
    flags: list[str], target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    build = ["build", "roam", *KEYS, *flags, "--eagle3-target", target, "--deep-checks"]
    assert main(build) == 0
    shard = Path("c", TARGETS, "shard-000001.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert main(["verify", "c/eagle3/targets", "--deep"]) == 3
    assert "niels-gpt build eagle3/targets --restart" in capsys.readouterr().out.splitlines()[-1]
    assert main(build) == 3
    out, err = capsys.readouterr()
    assert "eagle3/targets" in err and "fails its checks" in err and "shard-000001" in err
    states = {line.split()[0]: "FAILED" in line for line in out.splitlines()[2:]}
    assert states == {"pretrain/roam": False, VOCAB: False, TARGETS: True}
    again = shlex.split(err.splitlines()[-1].partition("Build it again: ")[2])
    assert main(again[1:]) == 0 and main(build) == 0


def test_without_a_target_a_build_of_all_leaves_them_out_and_a_named_one_fails(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", TARGETS, *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error[E705]: {TARGETS}: ") and "--eagle3-target" in error and "eagle3_target" in error
    assert not Path("c").exists(), "a tokenizer was made for nothing"
    assert main(["build", TARGETS, *flags, "--dry-run", "--json"]) == 1
    assert rows(capsys)[TARGETS]["action"] == "left out"
    flags += ["--max-dropped-share", "1", "--fineweb-edu-train-tokens", "1", "--gutenberg-train-tokens", "1"]
    flags += ["--fineweb-edu-val-tokens", "1", "--gutenberg-val-tokens", "1"]
    assert main(["build", "--all", *flags, "--dry-run", "--json"]) == 0
    assert [row["action"] for key, row in rows(capsys).items() if key in KEYS] == ["left out", "left out"]
    assert main(["build", "--all", *flags]) == 0
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if "W513" in line]
    assert VOCAB in line and TARGETS in line and "--eagle3-target" in line
    others = sum(line.startswith("warning") for line in err.splitlines()) - 1
    assert main(["build", "--all", *flags, "--strict"]) == (1 if others else 0)


def test_without_transformers_they_are_left_out_and_strict_counts_it_where_a_target_is_named(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from niels_gpt.commands import build
    from niels_gpt.settings import Settings

    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["build", VOCAB, *flags, "--eagle3-target", "someones/model"]) == 4
    assert "pip install 'niels-gpt[eagle3]'" in capsys.readouterr().err
    for target, is_counted in ((None, False), ("someones/model", True)):
        found: list[dict[str, Any]] = []
        monkeypatch.setattr(build, "print_warning", lambda *_, found=found, **how: found.append(how))
        settings = Settings(source_root="sample", eagle3_target=target)
        failures: dict[str, Exception] = {}
        assert list(build._configured(settings, ["sft/oasst1", *KEYS], failures, of_all=True)) == ["sft/oasst1"]
        assert found == [{"is_counted": is_counted}] and not failures
