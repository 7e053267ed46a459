"""python -m niels_gpt.eagle3: what is printed, and the exit statuses."""

import ast
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from PIL import Image
from support.commands import niels_gpt
from support.eagle3_damage import copy_of, flip_bit
from support.eagle3_runs import EAGLE3

from niels_gpt.eagle3.cache import shard_path
from niels_gpt.eagle3.target import write_small_target

eagle3 = partial(niels_gpt, module=EAGLE3)
WORDS = "The heron walks to the river and finds pebbles, for the mill is windy today."


@pytest.fixture(scope="module")
def made(tmp_path_factory, model):
    """A cache of nine chats in three shards, made by the command of the producer."""
    folder = tmp_path_factory.mktemp("made")
    with open(folder / "chats.jsonl", "w", encoding="utf-8") as file:
        for number in range(9):
            said = {"user": WORDS[: 9 + 7 * number], "assistant": WORDS[number:]}
            turns = [{"role": role, "content": text} for role, text in said.items()]
            file.write(json.dumps({"id": f"chat {number}", "messages": turns}) + "\n")
    produce(model, folder, folder / "cache")
    return folder / "cache"


def produce(model, folder, cache, *flags):
    """Make a cache of the chats in a folder, or what is missing of it."""
    form = ["--seq-length", "128", "--shard-size", "4", "--draft-vocab-size", "60", "--device", "cpu", "--threads", "1"]
    paths = ["--target-model", str(model), "--input-data", str(folder / "chats.jsonl"), "--output-dir", str(cache)]
    assert niels_gpt("eagle3", "precompute", *paths, *form, *flags).status == 0


@pytest.fixture
def cache(made, tmp_path):
    return copy_of(made, tmp_path)


def test_verify_says_what_was_checked_and_what_not(made, model):
    done = eagle3("verify", made, "--target", model, "-k", "3", "--seed", "5", "--json")
    made_of = {"sentence": "3 samples of 9, drawn by seed 5, went through the target again.", "values": {"samples": 3}}
    assert done.status == 0
    assert done.json["recomputed"] == {"problems": [], "note": None, "remarks": [], "figures": "", **made_of}
    done = eagle3("verify", made)
    assert done.status == 0
    lines = re.sub(r"\n {16}", " ", done.out).splitlines()[1:]
    said = dict(line.split(maxsplit=1) for line in lines)
    assert list(said) == ["complete", "checksums", "finite", "ids_match", "distribution", "positions", "recomputed"]
    assert "of the tokens supervised" in said["positions"] and "draft vocabulary" in said.pop("positions")
    assert set(said.values()) == {"ok", "not made: name the target with --target"}


def test_verify_names_the_damage_and_exits_with_1_and_what_to_do_helps(made, cache, model):
    (cache / "sidecar" / "plan.json").unlink()
    done = eagle3("verify", cache)
    assert done.status == 1 and "Run the same precompute command with --resume, which writes it again" in done.out
    produce(model, made.parent, cache, "--resume")
    (cache / "sidecar" / "notes").touch()  # does not belong there and is no damage
    done = eagle3("verify", cache)
    assert done.status == 0
    assert f"  complete      ok\n    note: {cache}/sidecar/notes: no file of a cache" in done.out
    flip_bit(Path(shard_path(cache, 1)), -1 - 3 * 128)
    done = eagle3("verify", cache)
    assert done.status == 1 and "  checksums     1 problem\n    " in done.out and "  finite        ok\n" in done.out
    assert f"{shard_path(cache, 1)}: sample 0 of the shard" in done.out
    assert "It is sample 4 (" in done.out and "chat 4" in done.out
    done = eagle3("verify", cache, "--json")
    assert done.status == 1 and len(done.json["checksums"]["problems"]) == 1


def test_verify_refuses_another_target(made, tmp_path, tiny_tokenizer):
    other = write_small_target(tmp_path / "other", tiny_tokenizer, seed=1)
    done = eagle3("verify", made, "--target", other)
    assert done.status == 1 and "made from another target: weights_sha256 of " in done.out and str(other) in done.out
    done = eagle3("verify", made, "--target", tmp_path / "none")
    assert done.status == 1 and str(tmp_path / "none") in done.err


def test_inspect_prints_the_form_and_where_it_came_from(made):
    done = eagle3("inspect", made)
    assert done.status == 0 and f"{made} (complete)" in " ".join(done.out.split())
    for said in ("version 1, bf16, all probabilities", "60 of ", "blocks 1, 3, 4", "loss mask by sentinels"):
        assert said in done.out
    assert done.out.count("\n") < 40, "the ids of the draft's vocabulary are not all printed"
    table = [line.split() for line in done.out.split("\n\n")[1].splitlines()]
    assert table[0] == ["shard", "samples", "size", "tokens", "supervised", "positions"]
    assert [row[1] for row in table[1:]] == ["4", "4", "1"]
    done = eagle3("inspect", made, "--json")
    assert done.status == 0
    assert done.json["manifest"]["selected_token_ids"]["count"] == 60
    assert len(done.json["plan"]["samples"]["sha256"]) == 64
    assert done.json["layout"]["target_probs"] == ["bfloat16", [128, 60]]


def test_inspect_prints_the_slots_of_a_sample(made, model, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")  # so that no heading is folded
    done = eagle3("inspect", made, "--sample", "5", "--tokenizer", model, "--slots", "100")
    assert done.status == 0
    heading, _, _, columns, *rows = re.sub(r"\n {20,}", " ", done.out).splitlines()
    assert heading.startswith("sample 5 (") and "chat 5" in heading
    assert columns.split("  ")[0] == "slot" and columns.endswith("norm 4  likeliest draft tokens")
    assert sum(" yes " in row for row in rows) == int(heading.split(" tokens, ")[1].split()[0])
    texts = "".join(ast.literal_eval(re.split(r"  +", row)[2]) for row in rows)
    assert "finds pebbles, for the mill is windy today.<|eot|>" in texts
    done = eagle3("inspect", made, "--sample", "5", "--slots", "2", "--slot", "4")
    assert done.status == 0
    assert [row.split()[:3:2] for row in done.out.splitlines()[4:]] == [["4", "-"], ["5", "-"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sample", "9"], "sample 9: there are 9, expected 0 to 8"),
        (["--sample", "-1"], "sample -1: there are 9"),
        (["--sample", "0", "--slot", "128"], "slot 128: sample 0 has "),
        (["--sample", "0", "--tokenizer", "/nowhere"], "/nowhere"),
    ],
)
def test_inspect_refuses_what_is_not_there(made, arguments, said):
    done = eagle3("inspect", made, *arguments)
    assert done.status == 1 and said in done.err


def test_convert_changes_the_manifest_and_back(cache, model):
    before = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    done = eagle3("convert", cache, "--format-version", "2")
    assert done.status == 0 and "now version 2: manifest.json was rewritten" in done.out
    changed = {path.name for path, content in before.items() if path.read_bytes() != content}
    assert changed == {"manifest.json", "meta.json"}
    assert eagle3("verify", cache, "--target", model, "-k", "1").status == 0
    done = eagle3("convert", cache, "--format-version", "2")
    assert done.status == 0 and "is version 2 already; nothing was written" in done.out
    done = eagle3("convert", cache, "--format-version", "1", "--json")
    assert done.status == 0 and done.json["changed"] is True
    assert {path: path.read_bytes() for path in before} == before


def kib(size):
    return f"{size / 1024:,.1f}".removesuffix(".0") + " KiB"


def test_stats_counts_and_draws(made, tmp_path):
    done = eagle3("stats", made, "--json")
    found, meta = done.json, json.loads((made / "meta.json").read_text())
    assert done.status == 0 and (found["samples"], found["shards"]) == (9, 3)
    for name, total in meta["totals"].items():
        if name in found:
            assert found[name] == total, name
    for name in ("bytes_per_token", "supervised_share", "draft_mass", "kept_mass"):
        assert found[name] == pytest.approx(meta[name]) if meta[name] is not None else found[name] is None
    assert found["padding_share"] == pytest.approx(1 - found["tokens"] / (9 * 128))
    assert found["entropy_nats"]["slots"] == meta["totals"]["positions"]
    assert 0 < found["entropy_nats"]["p0"] <= found["entropy_nats"]["p100"] < 4.1, "below the logarithm of 60"
    assert list(found["aux_norms"]) == ["1", "3", "4"]
    done = eagle3("stats", made)
    assert done.status == 0
    lines = re.sub(r"\n {20,}", " ", done.out).splitlines()
    said = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines)
    sizes = [path.stat() for path in made.glob("shard-*.safetensors")]
    assert found["shard_bytes"] == sum(size.st_size for size in sizes)
    assert said["size of the shards"].startswith(f"{kib(found['shard_bytes'])}, ")
    assert said["on disk"].startswith(f"{kib(sum(size.st_blocks * 512 for size in sizes))}: ")
    picture = tmp_path / "stats.png"
    done = eagle3("stats", made, "--plot", picture)
    assert done.status == 0 and "mass in the draft vocabulary" in done.out
    with Image.open(picture) as drawn:
        assert drawn.size == (720, 280) and picture.stat().st_size < 20_000
    first = picture.read_bytes()
    assert eagle3("stats", made, "--plot", picture).status == 0
    assert picture.read_bytes() == first
    assert eagle3("stats", made, "--plot", tmp_path / "stats.pdf").status == 1


def test_a_picture_that_cannot_be_written_is_told_before_the_cache_is_read(cache, tmp_path):
    for shard in cache.glob("shard-*"):
        shard.write_bytes(b"")  # whose error comes first if they are read
    picture = tmp_path / "none" / "x.png"
    done = eagle3("stats", cache, "--plot", picture)
    assert done.status == 1 and done.err.startswith(f"error[E105]: {picture}: no folder {picture.parent}")


def test_what_is_no_cache_is_an_error_and_a_wrong_flag_of_usage(tmp_path):
    for command in (["verify"], ["inspect"], ["stats"], ["convert", "--format-version", "2"]):
        done = eagle3(command[0], tmp_path, *command[1:])
        assert done.status == 1 and "manifest" in done.err
    for wrong in ([], ["train"], ["verify"], ["convert", tmp_path], ["inspect", tmp_path, "--no-such"]):
        assert eagle3(*wrong).status == 2


def test_help_loads_no_heavy_library_and_tells_every_default():
    program = (
        "import sys\nfrom niels_gpt.eagle3.__main__ import main\nmain([sys.argv[1], '--help'])\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, "verify"], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert "[8]" in done.stdout
