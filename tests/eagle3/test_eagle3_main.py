"""python -m niels_gpt.eagle3: what is printed, and the exit statuses."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from support.eagle3_damage import copy_of, flip_bit

from niels_gpt.commands.eagle3 import precompute
from niels_gpt.commands.eagle3.group import main
from niels_gpt.display.numbers import size_text
from niels_gpt.eagle3.format.layout import shard_path
from niels_gpt.eagle3.target import write_small_target
from niels_gpt.tokenizer import SentencePieceTokenizer

WORDS = "The heron walks to the river and finds pebbles, for the mill is windy today."


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A cache of nine chats in three shards, made by the command of the producer."""
    folder = tmp_path_factory.mktemp("made")
    with open(folder / "chats.jsonl", "w", encoding="utf-8") as file:
        for number in range(9):
            said = {"user": WORDS[: 9 + 7 * number], "assistant": WORDS[number:]}
            turns = [{"role": role, "content": text} for role, text in said.items()]
            file.write(json.dumps({"id": f"chat {number}", "messages": turns}) + "\n")
    produce(model, folder, folder / "cache")
    return folder / "cache"


def produce(model: Path, folder: Path, cache: Path, *flags: str) -> None:
    """Make a cache of the chats in a folder, or what is missing of it."""
    form = ["--seq-length", "128", "--shard-size", "4", "--draft-vocab-size", "60", "--device", "cpu", "--threads", "1"]
    paths = ["--target-model", str(model), "--input-data", str(folder / "chats.jsonl"), "--output-dir", str(cache)]
    assert precompute.main([*paths, *form, *flags]) == 0


@pytest.fixture
def cache(made: Path, tmp_path: Path) -> Path:
    return copy_of(made, tmp_path)


def test_verify_says_what_was_checked_and_what_not(made: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(made), "--target", str(model), "-k", "3", "--seed", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    made_of = {"sentence": "3 samples of 9, drawn by seed 5, went through the target again.", "values": {"samples": 3}}
    assert found["recomputed"] == {"problems": [], "note": None, "remarks": [], "figures": "", **made_of}
    assert main(["verify", str(made)]) == 0
    lines = re.sub(r"\n {16}", " ", capsys.readouterr().out).splitlines()[1:]
    said = dict(line.split(maxsplit=1) for line in lines)
    assert list(said) == ["complete", "checksums", "finite", "ids_match", "distribution", "positions", "recomputed"]
    assert "of the tokens supervised" in said["positions"] and "draft vocabulary" in said.pop("positions")
    assert set(said.values()) == {"ok", "not made: name the target with --target"}


def test_verify_names_the_damage_and_exits_with_1_and_what_to_do_helps(
    made: Path, cache: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cache / "sidecar" / "plan.json").unlink()
    assert main(["verify", str(cache)]) == 1
    assert "Run the same precompute command with --resume, which writes it again" in capsys.readouterr().out
    produce(model, made.parent, cache, "--resume")
    (cache / "sidecar" / "notes").touch()  # does not belong there and is no damage
    assert main(["verify", str(cache)]) == 0
    assert f"  complete      ok\n    note: {cache}/sidecar/notes: no file of a cache" in capsys.readouterr().out
    flip_bit(Path(shard_path(cache, 1)), -1 - 3 * 128)
    assert main(["verify", str(cache)]) == 1
    out = capsys.readouterr().out
    assert "  checksums     1 problem\n    " in out and "  finite        ok\n" in out
    assert f"{shard_path(cache, 1)}: sample 0 of the shard" in out and "It is sample 4 (" in out and "chat 4" in out
    assert main(["verify", str(cache), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["checksums"]["problems"]) == 1


def test_verify_refuses_another_target(
    made: Path, tmp_path: Path, tiny_tokenizer: SentencePieceTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_small_target(tmp_path / "other", tiny_tokenizer, seed=1)
    assert main(["verify", str(made), "--target", str(other)]) == 1
    out = capsys.readouterr().out
    assert "made from another target: weights_sha256 of " in out and str(other) in out
    assert main(["verify", str(made), "--target", str(tmp_path / "none")]) == 1
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_inspect_prints_the_form_and_where_it_came_from(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(made)]) == 0
    out = capsys.readouterr().out
    assert f"{made} (complete)" in " ".join(out.split())
    for said in ("version 1, bf16, all probabilities", "60 of ", "blocks 1, 3, 4", "loss mask by sentinels"):
        assert said in out
    assert out.count("\n") < 40, "the ids of the draft's vocabulary are not all printed"
    table = [line.split() for line in out.split("\n\n")[1].splitlines()]
    assert table[0] == ["shard", "samples", "size", "tokens", "supervised", "positions"]
    assert [row[1] for row in table[1:]] == ["4", "4", "1"]
    assert main(["inspect", str(made), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["manifest"]["selected_token_ids"]["count"] == 60 and len(found["plan"]["samples"]["sha256"]) == 64
    assert found["layout"]["target_probs"] == ["bfloat16", [128, 60]]


def test_inspect_prints_the_slots_of_a_sample(made: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(made), "--sample", "5", "--tokenizer", str(model), "--slots", "100"]) == 0
    heading, _, _, columns, *rows = re.sub(r"\n {20,}", " ", capsys.readouterr().out).splitlines()
    assert heading.startswith("sample 5 (") and "chat 5" in heading
    assert columns.split("  ")[0] == "slot" and columns.endswith("norm 4  likeliest draft tokens")
    assert sum(" yes " in row for row in rows) == int(heading.split(" tokens, ")[1].split()[0])
    texts = "".join(ast.literal_eval(re.split(r"  +", row)[2]) for row in rows)
    assert "finds pebbles, for the mill is windy today.<|eot|>" in texts
    assert main(["inspect", str(made), "--sample", "5", "--slots", "2", "--slot", "4"]) == 0
    assert [row.split()[:3:2] for row in capsys.readouterr().out.splitlines()[4:]] == [["4", "-"], ["5", "-"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sample", "9"], "sample 9: there are 9, expected 0 to 8"),
        (["--sample", "-1"], "sample -1: there are 9"),
        (["--sample", "0", "--slot", "128"], "slot 128: sample 0 has "),
        (["--sample", "0", "--tokenizer", "/nowhere"], "/nowhere"),
    ],
)
def test_inspect_refuses_what_is_not_there(
    made: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(made), *arguments]) == 1
    assert said in capsys.readouterr().err


def test_convert_changes_the_manifest_and_back(cache: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    assert main(["convert", str(cache), "--format-version", "2"]) == 0
    assert "now version 2: manifest.json was rewritten" in capsys.readouterr().out
    changed = {path.name for path, content in before.items() if path.read_bytes() != content}
    assert changed == {"manifest.json", "meta.json"}
    assert main(["verify", str(cache), "--target", str(model), "-k", "1"]) == 0
    capsys.readouterr()
    assert main(["convert", str(cache), "--format-version", "2"]) == 0
    assert "is version 2 already; nothing was written" in capsys.readouterr().out
    capsys.readouterr()
    assert main(["convert", str(cache), "--format-version", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] is True
    assert {path: path.read_bytes() for path in before} == before


def test_stats_counts_and_draws(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stats", str(made), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    meta = json.loads((made / "meta.json").read_text())
    assert (found["samples"], found["shards"]) == (9, 3)
    for name, total in meta["totals"].items():
        if name in found:
            assert found[name] == total, name
    for name in ("bytes_per_token", "supervised_share", "draft_mass", "kept_mass"):
        assert found[name] == pytest.approx(meta[name]) if meta[name] is not None else found[name] is None
    assert found["padding_share"] == pytest.approx(1 - found["tokens"] / (9 * 128))
    assert found["entropy_nats"]["slots"] == meta["totals"]["positions"]
    assert 0 < found["entropy_nats"]["p0"] <= found["entropy_nats"]["p100"] < 4.1, "below the logarithm of 60"
    assert list(found["aux_norms"]) == ["1", "3", "4"]
    assert main(["stats", str(made)]) == 0
    lines = re.sub(r"\n {20,}", " ", capsys.readouterr().out).splitlines()
    said = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines)
    sizes = [path.stat() for path in made.glob("shard-*.safetensors")]
    assert found["shard_bytes"] == sum(size.st_size for size in sizes)
    assert said["size of the shards"].startswith(f"{size_text(found['shard_bytes'])}, ")
    assert said["on disk"].startswith(f"{size_text(sum(size.st_blocks * 512 for size in sizes))}: ")
    picture = tmp_path / "stats.png"
    assert main(["stats", str(made), "--plot", str(picture)]) == 0
    assert "mass in the draft vocabulary" in capsys.readouterr().out
    with Image.open(picture) as drawn:
        assert drawn.size == (720, 280) and picture.stat().st_size < 20_000
    first = picture.read_bytes()
    assert main(["stats", str(made), "--plot", str(picture)]) == 0
    assert picture.read_bytes() == first
    assert main(["stats", str(made), "--plot", str(tmp_path / "stats.pdf")]) == 1
    monkeypatch.setattr("niels_gpt.eagle3.inspect.stats.stats", lambda *_, **__: pytest.fail("the cache was read"))
    capsys.readouterr()
    picture = tmp_path / "none" / "x.png"
    assert main(["stats", str(made), "--plot", str(picture)]) == 1
    assert capsys.readouterr().err.startswith(f"error[E105]: {picture}: no folder {picture.parent}")


def test_what_is_no_cache_is_an_error_and_a_wrong_flag_of_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["verify"], ["inspect"], ["stats"], ["convert", "--format-version", "2"]):
        assert main([command[0], str(tmp_path), *command[1:]]) == 1
        assert "manifest" in capsys.readouterr().err
    for wrong in ([], ["train"], ["verify"], ["convert", str(tmp_path)], ["inspect", str(tmp_path), "--no-such"]):
        assert main(wrong) == 2
        capsys.readouterr()


def test_help_loads_no_heavy_library_and_tells_every_default() -> None:
    program = (
        "import sys\nfrom niels_gpt.eagle3.__main__ import main\nmain([sys.argv[1], '--help'])\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, "verify"], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert "[8]" in done.stdout
