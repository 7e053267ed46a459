"""The command line: exit status, table, dry run, show, and a failing source that stops no other."""

import contextlib
import dataclasses
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from functools import partial

import pytest
from support.byte_tokenizer import ByteTokenizer
from support.commands import niels_gpt, settings_by, stats_does
from support.small_builds import another_version

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.recipes.gc import collect
from niels_gpt.recipes.plan import every_key
from niels_gpt.settings import Settings

cli = partial(niels_gpt, module="niels_gpt.cache.cli")


def test_build_all_builds_every_cache_and_prints_a_table(flags):
    done = cli("build-all", "--seed", "42", *flags)
    assert done.status == 0
    table = done.out.splitlines()
    assert [line.split()[0] for line in table[1:11]] == every_key(Settings())
    (after,) = table[11:]
    assert after.startswith("next: niels-gpt show ") and after.endswith("/sample/trees/oasst1")
    done = cli("build-all", "--seed", "42", *flags)
    assert done.status == 0 and done.out.count("up to date") == 10


def test_one_failing_source_does_not_stop_the_others(flags, tmp_path):
    blocked = tmp_path / "c" / "sample" / "pretrain" / "roam"
    blocked.mkdir(parents=True)
    (blocked / "holiday.jpg").write_bytes(b"mine")
    done = cli("build", "roam", "wikitext", *flags)
    assert done.status == 1
    out, err = done.out, done.err
    assert "pretrain/roam" in err and "holiday.jpg" in err
    rows = [line.split()[:2] for line in out.splitlines()[2:]]
    assert rows == [["pretrain/wikitext", "built"], ["pretrain/roam", "FAILED"]]
    assert (blocked / "holiday.jpg").read_bytes() == b"mine"


def test_json_names_what_failed_and_what_was_built(flags, tmp_path):
    blocked = tmp_path / "c" / "sample" / "pretrain" / "roam"
    blocked.mkdir(parents=True)
    (blocked / "holiday.jpg").write_bytes(b"mine")
    done = cli("build", "roam", "wikitext", *flags, "--json")
    assert done.status == 1
    rows = {row["key"]: row for row in done.json["caches"]}
    assert rows["pretrain/wikitext"]["state"] == "built" and rows["pretrain/roam"]["state"] == "failed"
    assert "holiday.jpg" in rows["pretrain/roam"]["error"]["message"]


def test_list_prints_each_cache_with_the_time_of_its_build(root, tmp_path):
    (root / ".runs" / "sft.oasst1.jsonl").unlink()  # as where a cache was copied
    done = cli("list", root)
    assert done.status == 0
    rows = {line.split()[0]: line.split() for line in done.out.splitlines()[1:]}
    assert list(rows) == ["tokenizer", "pretrain/roam", "sft/oasst1"]
    assert rows["sft/oasst1"][1:4] == ["built", "54", "examples"]
    done = cli("list", "--json", root)
    assert done.status == 0
    seconds = {row["key"]: row["seconds"] for row in done.json["caches"]}
    assert seconds["pretrain/roam"] > 0 and seconds["sft/oasst1"] is None
    with open(root / ".runs" / "pretrain.roam.jsonl", "a") as runs:
        runs.write('{"seconds": 1')  # its writer was killed
    (root / "sft" / "oasst1" / "meta.json").write_text("half a js")
    done = cli("list", root)
    assert done.status == 1
    out, err = done.out, done.err
    rows = {line.split()[0]: line.split() for line in out.splitlines()[2:4]}
    assert out.splitlines()[-1] == f"next: niels-gpt verify {root}"
    assert {key: row[1] for key, row in rows.items()} == {"pretrain/roam": "built", "sft/oasst1": "refused"}
    assert "sft/oasst1/meta.json: not JSON" in err
    done = cli("list", tmp_path)
    assert done.status == 1 and "no cache there" in done.err


def test_a_build_prints_the_warnings_of_its_checks_and_fails_where_one_blocks(flags, sample):
    done = cli("build", "dolly15k", "--max-dropped-share", "0", *flags)
    assert done.status == 0 and "warning[W201]: sft/dolly15k: " in done.err
    tokens = sample / "sft" / "dolly15k" / "train_tokens.bin"
    content = bytearray(tokens.read_bytes())
    content[2] ^= 1  # of a word, not of a sentinel: only the checksums tell
    tokens.write_bytes(bytes(content))
    done = cli("build", "dolly15k", *flags)
    assert done.status == 1 and f"{tokens}: bytes 0 to " in done.err
    done = cli("build", "dolly15k", "--deep-checks", *flags)
    assert done.status == 1 and f"{tokens}: sha256 " in done.err


CHOSEN = {"on_special": "text", "engine": "reference", "tokenizer_kind": "bpe", "loss_on": "last", "lock": "lease"}
CHOSEN |= {"eagle3_format": "native", "eagle3_aux_dtype": "fp8", "eagle3_dtype": "fp16", "eagle3_device": "cpu"}
CHOSEN |= {"eagle3_quantization": "torchao:int8wo", "eagle3_load_dtype": "bf16"}
CHOSEN |= {"eagle3_made_for": "dspark", "eagle3_target_rows": "all"}


def test_every_setting_of_a_build_has_a_flag_that_reaches_it():
    for field in dataclasses.fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            given, value = [flag if not field.default else "--no-" + flag[2:]], not field.default
        elif field.name in CHOSEN:
            given, value = [flag, CHOSEN[field.name]], CHOSEN[field.name]
        else:
            kind = type(field.default) if isinstance(field.default, int | float) else str
            text = "0.75" if kind is float else "7"
            given, value = [flag, text], kind(text)
        more = {"chat_template": "tokenizer"} if field.name == "loss_on" else {}
        given += [word for name, text in more.items() for word in ("--" + name.replace("_", "-"), text)]
        settings = settings_by(*given)
        assert settings == dataclasses.replace(Settings(), **{field.name: value}, **more)


def test_the_earlier_name_of_a_flag_is_still_accepted():
    assert settings_by("--tokenizer-model", "spm.model") == Settings(tokenizer="spm.model")


@pytest.mark.parametrize(("flag", "now"), [("--no-append-eot", "none"), ("--append-eot", "auto")])
def test_an_earlier_flag_names_the_one_of_now(tmp_path, flag, now):
    done = cli("build", "roam", "--cache-dir", tmp_path, flag)
    assert done.status != 0
    assert f"error[E101]: {flag}: there is no such option any more. Pass --document-end {now}" in done.err


WRONG = "threads -1, shard-bytes 1, shuffle-buffer -1, gutenberg-shuffle-buffer -2, vocab-size 0, sft-val-frac 1.5, "
WRONG += "fineweb-edu-train-tokens -1, character-coverage nan, max-dropped-share -0.1"


@pytest.mark.parametrize(("flag", "value"), [f"--{wrong}".split() for wrong in WRONG.split(", ")])
@pytest.mark.parametrize("command", [["build-all"], ["build", "roam", "--dry-run"]])
def test_a_number_that_nothing_can_be_built_with_is_refused_before_anything_is_done(
    flags, tmp_path, command, flag, value
):
    done = cli(*command, *flags, flag, value)
    assert done.status == 1
    out, err = done.out, done.err
    said = rf"error\[E102\]: \w+ \({flag}\) is {float(value):g}, expected .*\n"
    assert not out and re.fullmatch(said, err.replace(".0,", ","))
    assert not (tmp_path / "c").exists()


def test_a_dry_run_shows_an_unfinished_build_and_how_far_it_came(flags, root, tmp_path):
    (tmp_path / "c").mkdir()
    root.rename(tmp_path / "c" / "sample")
    path = tmp_path / "c" / "sample" / "pretrain" / "wikitext"

    def broken():
        yield from ((None, "some text " * 1_000) for _ in range(999))
        raise ConnectionError("the hub is away")

    fixed = {"max_train_tokens": 10**8, "max_val_tokens": 0, "shard_bytes": 10**8, "seed": 0}
    with pytest.raises(ConnectionError):
        build_pretrain(
            broken(), path, tokenizer=ByteTokenizer(), shuffle_buffer=None, checkpoint_seconds=0, num_threads=0, **fixed
        )
    for journal in (path.parent / ".versions" / "wikitext").glob("building-*.journal/journal.jsonl"):
        with journal.open("ab") as file:
            file.write(b'00000000 {"documents": 77}\n01234567 {"docu')  # of a write that was cut
    done = cli("build", "roam", "wikitext", "dolly15k", "--dry-run", *flags)
    assert done.status == 0
    shown = done.out
    rows = {line.split()[0]: line for line in shown.splitlines()}
    assert "disk free" in shown
    (count,) = re.findall(r"\npretrain/wikitext: an unfinished one is there: ([0-9]+) documents done\n", shown)
    assert 0 < int(count) <= 999
    assert "unfinished" not in rows["pretrain/roam"] + rows["sft/dolly15k"]


def test_an_unfinished_build_of_another_version_is_shown_as_not_used(flags, root, tmp_path, caplog):
    (tmp_path / "c").mkdir()
    root.rename(tmp_path / "c" / "sample")
    path = tmp_path / "c" / "sample" / "pretrain" / "wikitext"

    def build(*, broken):
        def texts():
            yield from ((None, "some text " * 1_000) for _ in range(999))
            if broken:
                raise ConnectionError("the hub is away")

        fixed = {"max_train_tokens": 10**8, "max_val_tokens": 0, "shard_bytes": 10**8, "seed": 0}
        more = {"shuffle_buffer": None, "checkpoint_seconds": 0, "num_threads": 0}
        build_pretrain(texts(), path, tokenizer=ByteTokenizer(), **fixed, **more)

    with another_version(), pytest.raises(ConnectionError):
        build(broken=True)
    done = cli("build", "wikitext", "--dry-run", *flags)
    assert done.status == 0
    shown = " ".join(done.out.split())
    assert "is there of another version of this program or of a library, which is not used" in shown
    assert "documents done" not in shown
    for dry_run in (True, False):
        with caplog.at_level("INFO"):
            build(broken=False) if dry_run else None
        lines = [line for line in collect(path.parent.parent, dry_run=dry_run) if "unfinished" in line]
        assert sorted(line.rpartition(": ")[2] for line in lines) == [
            "an unfinished build of another version of this program or of a library, which is not used",
            "its journal",
        ]
    assert "which is not used; `niels-gpt gc` would remove it" in caplog.text


def test_show_prints_a_window_and_an_example_with_its_mask(sample):
    done = cli("show", sample / "pretrain/wikitext", "--at", "10", "--tokens", "5")
    assert done.status == 0 and "tokens 10 to 15" in done.out
    done = cli("show", sample / "sft/dolly15k", "--split", "val", "--at", "4", "--tokens", "5000")
    assert done.status == 0
    plain = done.out
    heading, legend, *turns = plain.splitlines()
    assert heading.startswith(f"{sample}/sft/dolly15k/val: example 4 of ") and legend.count("[[") == 1
    assert [turn[:7] for turn in turns] == ["<|usr|>", "<|asst|"] and turns[1].startswith("<|asst|>[[")
    assert turns[1].endswith("<|eot|>]]") and plain.count("[[") == 2
    done = cli("show", sample / "sft/dolly15k", "--tokens", "5000", "--color", "always")
    assert done.status == 0
    _, legend, *turns = done.out.splitlines()
    green, dim, cyan = "\x1b[32m", "\x1b[2m", "\x1b[36m"
    assert [legend.count(style) for style in (green, dim, cyan)] == [1, 1, 1]
    (user, *_), (*_, reply) = turns, turns
    assert user.startswith(f"{cyan}<|usr|>") and dim in user and green not in user and green in reply


def test_show_refuses_what_it_cannot_show(sample, tiny_model_path):
    chats, model = str(sample / "sft/dolly15k"), str(tiny_model_path)
    for arguments, message in (
        ([chats, "--tokens", "0"], "expected at least 1"),
        ([str(sample / "pretrain/roam"), "--at", "999999999"], "expected 0 to"),
        (["/nope", "--tokenizer", model], "no such folder"),
        (["/nope"], "no such folder"),
    ):
        done = cli("show", *arguments)
        assert done.status == 1 and message in done.err


@pytest.mark.parametrize("name", ["stats", pytest.param("build", marks=pytest.mark.slow)])
def test_a_pipe_that_nobody_reads_ends_a_command_in_silence(flags, sample, name):
    chats = str(sample / "sft/dolly15k")
    arguments = ["build", "dolly15k", *flags] if name == "build" else [name, chats]
    for unbuffered in ("", "1"):  # the first write fails, or the last
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-m", "niels_gpt.cache.cli", *arguments]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment, check=False)
        os.close(write)
        assert (done.returncode, b"error" in done.stderr, b"Broken" in done.stderr) == (0, False, False), done.stderr


def test_ctrl_c_in_a_command_that_builds_nothing_speaks_of_no_build(tmp_path):
    def stop():
        raise KeyboardInterrupt

    with stats_does(stop):
        done = cli("stats", tmp_path)
    assert (done.status, done.err) == (1, "\ninterrupted\n")


def test_a_source_named_twice_is_built_once(flags):
    done = cli("build", "roam", "pretrain/roam", *flags)
    assert done.status == 0 and done.out.count("pretrain/roam: 42 documents") == 1
    assert cli("build", "sft/roam", *flags).status == 2


@pytest.mark.slow
def test_a_terminal_gets_a_progress_bar_with_a_rate_and_a_pipe_gets_none(flags):
    command = [sys.executable, "-m", "niels_gpt.cache.cli", "build", "dolly15k", *flags]
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=terminal, check=True)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # how a closed terminal ends
        while part := os.read(screen, 4096):
            shown += part
    os.close(screen)
    assert b"sft/dolly15k" in shown and b"tok/s" in shown
    again = subprocess.run([*command, "--sft-val-frac", "0.2"], capture_output=True, check=True)
    assert b"tok/s" not in again.stderr
