"""verify, diff, locate, stats --plot and gc on the command line: what is printed, and the exit status."""

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from support.byte_tokenizer import ByteTokenizer, build
from support.commands import niels_gpt
from support.disk import change_meta, meta_bytes, write_meta

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.engine.meta import Source
from niels_gpt.kinds.folders import caches_below
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.tokenizer import load_tokenizer


def run(*argv):
    """The exit status of a command of `python -m niels_gpt.cache.cli`, its output and its errors."""
    done = niels_gpt(*argv, module="niels_gpt.cache.cli")
    return done.status, done.out, done.err


def test_verify_looks_at_every_cache_below_a_folder(root):
    lines = [f"{root}/{key}: ok" for key in ("pretrain/roam", "sft/oasst1", "tokenizer")]
    for arguments in ([root], [root, "--deep"], [root / "pretrain", root / "sft/oasst1", root / "tokenizer"]):
        assert run("verify", *arguments) == (0, "\n".join(lines) + "\n", "")
    assert run("verify", root.parent)[1].splitlines() == lines


def test_verify_names_each_damage_and_exits_with_1(root):
    tokens = root / "sft" / "oasst1" / "train_tokens.bin"
    content = bytearray(tokens.read_bytes())
    content[100] ^= 4
    tokens.write_bytes(content)
    status, out, _ = run("verify", root)  # the first block of the file, which readers compare
    assert status == 1 and "train_tokens.bin, bytes 0 to 0: the readers refuse it" in out
    status, out, _ = run("verify", root, "--deep")
    assert status == 1 and f"{root}/pretrain/roam: ok\n" in out
    assert f"{root}/sft/oasst1: 1 damage\n  train_tokens.bin, bytes 0 to {len(content):,}: sha256 " in out
    status, out, _ = run("verify", root, "--deep", "--json")
    found = json.loads(out)
    assert status == 1 and list(found) == [f"{root}/{key}" for key in ("pretrain/roam", "sft/oasst1", "tokenizer")]
    (damage,) = found[f"{root}/sft/oasst1"]
    assert {**damage, "problem": ""} == {"file": "train_tokens.bin", "offset": 0, "end": len(content), "problem": ""}
    assert found[f"{root}/tokenizer"] == []


def test_verify_does_not_pass_over_a_cache_that_lost_its_description_or_its_version(root):
    (root / "sft" / "oasst1" / "meta.json").unlink()
    shutil.rmtree((root / "pretrain" / "roam").resolve())
    status, out, _ = run("verify", root)
    assert status == 1 and out.count("1 damage\n  meta.json, bytes 0 to 0: no such file") == 2


def test_one_bad_meta_json_costs_its_own_line_and_nothing_of_it_commands_the_terminal(root):
    meta = json.loads((root / "tokenizer" / "meta.json").read_bytes())
    del meta["vocab_size"]
    write_meta(root / "tokenizer", meta)
    bad = {
        "pretrain/escapes": {"kind": "pretrain", "tokenizer_sha256": None, "shards": {"\x1b[31m\x9b2J": 3}},
        "pretrain/a\x1b[2Jb": {"kind": "pretrain", "\x9b": 1},
        "eagle3/targets": {"kind": "eagle3", "totals": {"samples": 1}},
    }
    for key, content in bad.items():
        (root / key).mkdir(parents=True)
        (root / key / "meta.json").write_bytes(meta_bytes(content))
    for command in (["list"], ["list", "--json"], ["verify"], ["verify", "--json"], ["gc", "--dry-run"]):
        status, out, err = run(*command, root)
        assert status == (0 if command[0] == "gc" else 1)
        assert not [char for char in out + err if unicodedata.category(char) == "Cc" and char != "\n"], command
        assert command[0] == "gc" or all(key in out for key in ("pretrain/roam", "sft/oasst1", "escapes", "eagle3"))
    lines = run("list", root)[1].splitlines()
    states = {line.split()[0]: line.split()[1] for line in lines}
    assert states["pretrain/roam"] == "built" and states["tokenizer"] == "refused"
    assert [line for line in lines if line.startswith("tokenizer: refused: ")]
    assert "shards.\\x1b[31m\\x9b2J" in run("list", root)[2]


def test_a_path_without_a_cache_is_an_error_and_does_not_keep_verify_from_the_others(root, tmp_path):
    (tmp_path / "empty").mkdir()
    assert run("verify", tmp_path / "empty")[0] == 1 and "no cache there" in run("verify", tmp_path / "empty")[2]
    assert run("verify")[0] == 2
    paths = [tmp_path / "none", root / "pretrain", tmp_path / "none", root / "sft/oasst1"]
    status, out, err = run("verify", *paths)
    assert status == 1 and out == f"{root}/pretrain/roam: ok\n{root}/sft/oasst1: ok\n"
    assert err.startswith(f"error[E105]: {tmp_path}/none: no such folder") and err.count("\n") == 1
    status, out, err = run("verify", *paths, "--json")
    found = json.loads(out)
    assert status == 1 and found[f"{root}/pretrain/roam"] == found[f"{root}/sft/oasst1"] == []
    (said,) = found[f"{tmp_path}/none"]
    assert (said["file"], said["offset"], said["end"]) == ("", 0, 0) and "no such folder" in said["problem"]


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("pretrain", None),
        ("pretrain", ["train/shard_00000.bin"]),
        ("pretrain", ["index/train_docs.npy"]),
        ("sft", None),
        ("sft", ["val_tokens.bin"]),
        ("sft", ["index/crc32.bin"]),
    ],
)
def test_a_folder_that_lost_its_meta_json_is_damaged_and_not_passed_over(root, tmp_path, kind, kept):
    """As a copy that was interrupted leaves it: no link, no meta.json."""
    cache = root / "pretrain" / "copy"
    shutil.copytree(root / {"pretrain": "pretrain/roam", "sft": "sft/oasst1"}[kind], cache)
    (cache / "meta.json").unlink()
    if kept is not None:
        for path in [path for path in cache.rglob("*") if path.is_file()]:
            if str(path.relative_to(cache)) not in kept:
                path.unlink()
    for path in (root, root / "pretrain", cache):
        status, out, _ = run("verify", path)
        assert status == 1 and f"{cache}: 1 damage\n  meta.json, bytes 0 to 0: no such file" in out


def test_what_builds_keep_beside_the_versions_is_no_cache(root):
    versions = root / "pretrain" / ".versions" / "roam"
    for name in ("building-0123456789ab", "building-0123456789ab.journal", "building"):
        (versions / name / "train").mkdir(parents=True)
        (versions / name / "train" / "shard_00000.bin").write_bytes(b"ab")
    (version,) = [path for path in versions.iterdir() if (path / "meta.json").is_file()]
    assert {"lock", "recipe.json"} < {path.name for path in versions.iterdir()}
    for path in (versions, version, versions.parent):
        assert run("verify", path) == (0, f"{version}: ok\n", "")
    for name in ("building-0123456789ab", "building-0123456789ab.journal", "building"):
        status, out, err = run("verify", versions / name)
        assert (status, out) == (1, "")
        assert f"{name}: a build in progress or unfinished, not a cache. Its cache is {root}/pretrain/roam\n" in err
    for name in ("lock", "recipe.json"):
        assert run("verify", versions / name)[0] == 1


def test_links_are_not_followed_to_look_for_caches(root, tmp_path):
    (root / "round").symlink_to(root)
    (root / "elsewhere").symlink_to(tmp_path)
    assert caches_below(root) == [root / key for key in ("pretrain/roam", "sft/oasst1", "tokenizer")]
    version = (root / "sft" / "oasst1").resolve()
    assert caches_below(version) == [version]


def test_diff_exits_as_diff_does_and_takes_versions(tmp_path):
    path = tmp_path / "pretrain" / "own"
    build(path, ["A", "BCD"])
    before = path.resolve()
    assert run("diff", path, before)[:2] == (0, "equal\n")
    build(path, ["A", "XYZ"])
    status, out, _ = run("diff", before, path)
    assert status == 1 and "only in A: 1 document\n  train 1, source id 1\n" in out
    status, out, _ = run("diff", before, path, "--json", "--limit", "0")
    assert status == 1 and json.loads(out)["only_b"] == {"count": 1, "first": []}
    status, out, err = run("diff", before, tmp_path / "none")
    assert (status, out) == (1, "") and err.startswith("error[E")


def test_diff_shows_the_first_words_where_a_tokenizer_is_beside(settings, root):
    other = root.parent / "other"
    shutil.copytree(root, other, symlinks=True)
    build_token_cache(dataclasses.replace(settings, cache_dir=str(other), oasst1_english_only=False), name="oasst1")
    status, out, _ = run("diff", root / "sft/oasst1", other / "sft/oasst1")
    assert status == 1 and "only in B" in out and "'<|usr|>" in out


def test_locate_prints_the_document_with_its_text(root):
    status, out, _ = run("locate", root / "pretrain/roam", "train", "1_000", "--tokens", "50")
    assert status == 0 and "token:        1,000 of " in out and "[[" in out and ".md" in out
    assert run("locate", root / "pretrain/roam", "train", "1,000", "--tokens", "50")[1] == out
    status, out, err = run("locate", root / "pretrain/roam", "val", "9999999")
    assert (status, out) == (1, "") and "expected 0 to " in err
    assert run("locate", root / "pretrain/roam", "val", "many")[0] == 2
    (root / "tokenizer" / "spm.model").unlink()
    status, out, _ = run("locate", root / "sft/oasst1", "train", "0")
    assert status == 0 and "ids:" in out


def as_json(*argv):
    return json.loads(run(*argv, "--json")[1])


def test_stats_gives_its_figures_as_json(root):
    found = as_json("stats", root / "sft/oasst1")
    meta = json.loads((root / "sft/oasst1/meta.json").read_text())
    assert found["refused"] is None and found["warned_of"] == [] and "shards" not in found
    assert all(found[key] == meta[key] for key in ("kind", "totals", "dropped", "source", "supervised_tokens"))
    sizes = found["document_tokens"]["train"]
    assert 0 < sizes["min"] <= sizes["median"] <= sizes["p95"] <= sizes["max"] < found["totals"]["train_tokens"]


def test_show_gives_the_whole_piece_as_json(root):
    found = as_json("show", root / "sft/oasst1", "--at", "1")
    assert (found["kind"], found["split"], found["example"]) == ("sft", "train", 1)
    assert found["examples"] > 1 and found["tokens"] > found["supervised_tokens"] > 0
    assert found["text"] == "".join(part["text"] for part in found["parts"]) and "[[" not in found["text"]
    assert [part["supervised"] for part in found["parts"][:2]] == [False, True]
    assert found["parts"][1]["text"].endswith("<|eot|>")
    assert len(as_json("show", root / "sft/oasst1", "--at", "1", "--tokens", "9")["text"]) < len(found["text"])
    assert " supervised, the first 9 below\n" in run("show", root / "sft/oasst1", "--at", "1", "--tokens", "9")[1]
    window = as_json("show", root / "pretrain/roam", "--at", "20")
    assert (window["position"], window["end_position"]) == (20, 220) and window["file"] == "train/shard_00000.bin"
    assert window["text"] in run("show", root / "pretrain/roam", "--at", "20")[1]


def test_locate_gives_the_whole_document_as_json(root):
    found = as_json("locate", root / "pretrain/roam", "train", "1_000")
    assert (found["kind"], found["split"], found["position"]) == ("pretrain", "train", 1_000)
    assert (found["first_token"], found["end_token"]) == (0, found["document_tokens"])
    assert found["position"] < found["split_tokens"] and found["document"] < found["documents"]
    assert found["end_byte"] - found["first_byte"] == 2 and found["file"] == "train/shard_00000.bin"
    tokenizer = load_tokenizer(root / "tokenizer" / "spm.model")
    assert tokenizer.decode([found["token_id"]]) == found["token_text"] == found["text_at"]
    assert found["source_id"].endswith(".md") and found["text_after"].endswith("<|eot|>")
    assert abs(len(tokenizer.encode(found["text_before"])) - found["offset_tokens"]) <= 1


def test_one_long_field_is_cut_on_a_terminal_and_whole_in_json(tmp_path):
    long = {name: name * 50_000 for name in "ilw"}
    source = Source(name="x", provenance={"licence": long["l"]})
    fixed = {"tokenizer": ByteTokenizer(), "seed": 0, "source": source, "shuffle_buffer": None}
    sizes = {"max_train_tokens": None, "max_val_tokens": None, "shard_bytes": 999}
    for name in ("a", "b"):
        build_pretrain([("train", name, long["i"] + name)], tmp_path / name, **sizes, **fixed)
    change_meta(tmp_path / "b", **{long["w"]: 1})
    shown = {"stats": ["l"], "locate": ["i"], "diff": ["w", "i", "i"]}
    for command, names in shown.items():
        argv = {"stats": [tmp_path / "a"], "diff": [tmp_path / "a", tmp_path / "b"]}
        words = [command, *argv.get(command, [tmp_path / "a", "train", "0"])]
        _, out, _ = run(*words)
        assert len(out) < 20_000 and out.count("more characters; --json has them all") == len(names)
        _, out, _ = run(*words, "--json")
        assert all(long[name] in out for name in names)
    _, out, err = run("locate", tmp_path / "a", long["w"], "0")
    assert "locate" in err and len(err) < 10_000


def test_stats_draws_a_picture_where_it_is_told_to(root, tmp_path):
    status, out, _ = run("stats", root / "sft/oasst1", "--plot", tmp_path / "out.png")
    assert status == 0 and (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    for said in ("median", "95% below", "bytes per token", "supervised", " read)"):
        assert said in " ".join(out.split())


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_printed(root, tmp_path):
    target = tmp_path / "none" / "out.png"
    status, out, err = run("stats", root / "sft/oasst1", "--plot", target)
    assert (status, out) == (1, "") and err.startswith(f"error[E105]: {target}: no folder {target.parent}")
    status, out, err = run("stats", root / "sft/oasst1", "--plot", tmp_path / "out.pdf")
    assert (status, out) == (1, "") and "out.pdf: expected the name of a .png" in err
    assert not (tmp_path / "out.pdf").exists()


def test_control_characters_of_a_text_do_not_reach_the_terminal(settings):
    """Neither the text of a document, shown or located, nor a licence or an id may command the terminal."""
    tokenizer = load_tokenizer(ensure_tokenizer(settings).path / "spm.model")
    text = "a\x1b[31mred\x07\r\x9b2J\x7f\tb\nc"
    chat = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    source = Source(name="x", provenance={"licence": "free\x1b[2J", "attribution": "who\x9b"})
    root = Path(settings.cache_dir)
    fixed = {"tokenizer": tokenizer, "seed": 0, "source": source}
    build_sft([("id\x1b", chat)], root / "sft/x", val_frac=0, **fixed)
    sizes = {"max_train_tokens": None, "max_val_tokens": None, "shard_bytes": 999}
    build_pretrain([("train", text, "id\x1b")], root / "pretrain/x", shuffle_buffer=None, **sizes, **fixed)
    for cache in (root / "sft/x", root / "pretrain/x"):
        for command in (["show", cache], ["locate", cache, "train", "3"], ["stats", cache]):
            status, out, _ = run(*command)
            commands_it = [char for char in out if unicodedata.category(char) == "Cc" and char not in "\n\t"]
            assert status == 0 and not commands_it
            if command[0] == "show":
                assert "a\\x1b[31mred\\x07\\r\\x9b2J\\x7f\tb\nc" in out


def test_gc_of_a_folder_without_caches_is_an_error(root, tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", root / "sft/oasst1", (root / "sft/oasst1").resolve()):
        status, out, err = run("gc", path)
        assert (status, out) == (1, "") and f"{path}: no caches below it" in err
    assert run("gc", tmp_path / "none")[0] == 1 and run("gc", root) == (0, "nothing to remove\n", "")
    shutil.copytree(root / "sft/oasst1", tmp_path / "copies" / "oasst1")
    assert run("gc", tmp_path / "copies", "--dry-run") == (0, "nothing to remove\n", "")  # a cache, without versions


@pytest.mark.parametrize("key", ["totals", "shards", "index", "special_token_ids", "kind", "ids", "dropped", "source"])
def test_no_command_fails_otherwise_than_with_a_message_on_a_malformed_meta_json(tmp_path, key):
    path = tmp_path / "pretrain" / "own"
    build(path, ["A", "BCD"])
    shutil.copytree(path.resolve(), tmp_path / "good")
    for value in (None, 7, {}, ["train"], {"train": 3, "val": 3}):
        change_meta(path, **{key: value})
        for command in (["stats", path], ["locate", path, "train", "1"], ["diff", path, tmp_path / "good"]):
            status, out, err = run(*command)
            assert status in (0, 1) and (bool(out) != err.startswith("error[E")), (value, command, err)
        may_be_so = (key in ("dropped", "source") and isinstance(value, dict)) or (
            key == "special_token_ids" and value == {}
        )
        assert run("verify", path, "--deep")[0] == 1 or may_be_so, value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("totals", {"train_tokens": "x", "val_tokens": 0}),
        ("totals", {"train_tokens": 4.5, "val_tokens": 0}),
        ("vocab_size", "big"),
        ("vocab_size", None),
        ("special_token_ids", {"sys": "x"}),
        ("special_token_ids", 3),
        ("built", "yes"),
        ("built", []),
        ("kind", []),
        ("tokenizer_sha256", 5),
        ("shards", {"train": [], "val": []}),
        ("totals", {}),
    ],
)
@pytest.mark.parametrize("kind", ["pretrain/roam", "sft/oasst1"])
def test_a_malformed_value_is_an_error_that_names_meta_json(root, tmp_path, kind, key, value):
    path = root / kind
    shutil.copytree(path, root / "good")
    change_meta(path, **{key: value})
    commands = {
        "stats": ["stats", path],
        "plot": ["stats", path, "--plot", tmp_path / "out.png"],
        "show": ["show", path],
        "locate": ["locate", path, "train", "1"],
        "diff": ["diff", path, root / "good"],
    }
    for name, command in commands.items():
        status, out, err = run(*command)
        if name == "diff" and (status, err) == (1, ""):  # what it does not need is a difference
            assert key in out
        elif name in ("stats", "plot") and (status, err) == (1, ""):  # nor what readers need: a line
            assert f"by the readers: meta.json: {key}" in out
        elif status == 0:
            assert key in ("shards", "special_token_ids", "tokenizer_sha256")
        else:
            assert status == 1 and out == "" and "meta.json" in err and "Traceback" not in err, (name, err)
            assert not re.match(r"error\[E\d+\]: (invalid literal|Unknown format|'|Cannot specify)", err), (name, err)


def test_a_wrong_path_is_no_damage(sample):
    cache, nowhere, part = sample / "sft/oasst1", sample / "nowhere", sample / "pretrain/wikitext/train"
    cases = [(path, "E105", "no ") for path in (nowhere, sample, sample / "sft")]
    cases += [(part, "E209", str(part.parent)), (part.parent / "meta.json", "E209", str(part.parent))]
    commands = [["stats"], ["show"], ["locate", "train", "0"]]
    cases = [(command, *case) for command in commands for case in cases]
    cases += [(commands[2], sample / "tokenizer", "E208", "kind is 'tokenizer'")]
    for (name, *where), path, code, said in cases:
        done = niels_gpt(name, path, *where)
        assert done.status == 1
        error = done.err
        assert error.startswith(f"error[{code}]: ") and said in error and "build" not in error
    for command in (["diff", cache, nowhere], ["diff", part, cache]):
        done = niels_gpt(*command)
        assert done.status == 1 and done.err.startswith(("error[E105]", "error[E209]"))
    for path, code in ((nowhere, "E105"), (sample, "E105"), (cache, "E208")):
        done = niels_gpt("eagle3", "verify", path)
        assert done.status == 1 and done.err.startswith(f"error[{code}]: EAGLE-3 cache manifest not found")
    (nowhere / "deep").mkdir(parents=True)
    (nowhere / "deep" / "shard-000000.safetensors").touch()
    assert niels_gpt("eagle3", "verify", nowhere / "deep").status == 3, "a cache was started there"
    (cache / "meta.json").unlink()
    done = niels_gpt("stats", cache)
    assert done.status == 3, "tokens without a meta.json are damage"
    assert "error[E204]" in done.err


@pytest.mark.slow
def test_the_command_printed_for_a_damaged_tokenizer_mends_it(sample):
    (sample / "tokenizer" / "spm.model").write_bytes(b"no model")
    for command in (["list", sample], ["doctor", sample], ["verify", sample], ["show", sample / "sft/oasst1"]):
        done = niels_gpt(*command)
        assert done.status == 3, command
    error = done.err
    assert error.startswith("error[E403]: ")
    done = niels_gpt("verify", sample)
    printed = done.out.splitlines()[-1].removeprefix("next: ")
    assert printed.startswith("rm ") and error.rstrip().endswith(printed)
    ours = f"{shlex.quote(sys.executable)} -c 'from niels_gpt.commands.main import main; raise SystemExit(main())' "
    subprocess.run(printed.replace("niels-gpt ", ours), shell=True, check=True, capture_output=True)
    assert niels_gpt("verify", sample).status == 0
    assert niels_gpt("show", sample / "sft/oasst1").status == 0


def test_a_description_without_a_kind_is_refused_by_list_and_doctor(sample):
    (sample / "sft/oasst1/meta.json").write_text("{}")
    assert niels_gpt("list", sample).status == niels_gpt("doctor", sample).status == 3
