"""niels-gpt: its help, exit codes, --json and --strict of every command, completion."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from support import ROOT as CHECKOUT
from support.made_tokenizers import made_tokenizer

from niels_gpt.commands import cache as cli
from niels_gpt.commands import prefix_tree
from niels_gpt.commands.console import ExitCode, _Once, is_color_wanted
from niels_gpt.commands.main import ROOT, main
from niels_gpt.data.sources import SOURCES
from niels_gpt.inspection.stats import Stats
from niels_gpt.recipes.eagle3.options import KEYS as EAGLE3_KEYS
from niels_gpt.recipes.rollouts.trees import TREES
from niels_gpt.storage.codes import CODES, CodedWarning

PROGRAM = [sys.executable, "-c", "import sys; from niels_gpt.commands.main import main; sys.exit(main())"]


def leaves(group: click.Group, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command below a group, with its name in words."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, *names, name)
        else:
            yield (*names, name), command


COMMANDS = dict(leaves(ROOT))
ROLLOUTS = '{"prompt_ids": [1, 2, 3], "completions": [[4, 5], [4, 6]]}\n'


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    """A file of one group of rollouts."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text(ROLLOUTS)
    return path


# --- help -------------------------------------------------------------------------------------------------------------


def test_the_help_fits_a_screen_and_names_every_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 52
    for name in ROOT.commands:
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1, name
    assert main([]) == 2 and "Care:" in capsys.readouterr().out


@pytest.mark.parametrize("words", [(), ("eagle3",), ("tree",), *COMMANDS], ids=" ".join)
def test_every_help_is_short_and_narrow_and_explains_every_flag(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "-h"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 75 and max(map(len, lines)) <= 100
    if command := COMMANDS.get(words):
        assert all(getattr(param, "help", None) for param in command.params)
        assert {"--json", "--strict"} <= {flag for param in command.params for flag in param.opts}
        assert any(line.startswith("  niels-gpt ") for line in lines), "no example"


def test_few_settings_are_in_the_help_of_build_and_all_in_help_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--help"]) == 0
    common = capsys.readouterr().out
    assert len(common.splitlines()) <= 70 and "--cache-dir" in common and "--shard-bytes" not in common
    assert main(["build", "--help-all"]) == 0
    full = capsys.readouterr().out
    assert {"--cache-dir", "--shard-bytes", "--oasst1-max-messages"} <= set(re.findall(r"--[a-z0-9-]+", full))


def test_help_and_completion_load_no_heavy_library() -> None:
    program = (
        "import sys\nfrom niels_gpt.commands.main import main\n"
        "for words in ([], ['build'], ['export'], ['tree', 'demo'], ['eagle3', 'precompute']):\n"
        "    main([*words, '--help'])\n"
        "print({'torch', 'transformers', 'datasets', 'matplotlib', 'numpy', 'dagster'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize(
    "words", [["nope"], ["list", "--nope"], ["show"], ["build", "--all", "roam"], ["explain", "E1"]]
)
def test_wrong_usage_is_2_and_names_the_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert not out and err.startswith("error[E101]: ")


# --- exit codes -------------------------------------------------------------------------------------------------------


def test_damage_is_3_and_1_for_python_m(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = sample / "sft" / "oasst1"
    assert main(["verify", str(chats)]) == main(["list", str(sample)]) == main(["stats", str(chats)]) == 0
    with open(chats / "train_tokens.bin", "ab") as file:
        file.write(b"more")
    for words in (["verify", str(chats)], ["list", str(sample)], ["stats", str(chats)], ["doctor", str(sample)]):
        assert main(words) == ExitCode.DAMAGED, words
        assert words[0] == "doctor" or cli.main(words) == 1
    capsys.readouterr()
    assert main(["verify", str(sample)]) == ExitCode.DAMAGED
    assert capsys.readouterr().out.splitlines()[-1].startswith("next: niels-gpt build oasst1 --restart ")
    (chats / "meta.json").write_text("{")
    assert main(["show", str(chats)]) == ExitCode.DAMAGED and cli.main(["show", str(chats)]) == 1
    assert "error[E202]" in capsys.readouterr().err
    assert main(["verify", str(sample / "nothing")]) == ExitCode.FAILED


def test_what_is_not_installed_is_4_with_the_command_that_installs_it(
    rollouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ["stats", str(rollouts), "--plot", str(tmp_path / "x.png")]
    assert main(["tree", *words]) == ExitCode.NOT_INSTALLED and prefix_tree.main(words) == 1
    assert capsys.readouterr().err.count("pip install 'niels-gpt[") == 2


def test_interrupted_is_130(
    rollouts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("niels_gpt.inspection.stats.stats", stop)
    assert main(["stats", str(rollouts)]) == 130 and cli.main(["stats", str(rollouts)]) == 1
    assert capsys.readouterr().err == "\ninterrupted\n" * 2


# --- --strict and --json ----------------------------------------------------------------------------------------------


def _log() -> None:
    logging.getLogger("niels_gpt.some.module").warning("odd")


def _warn() -> None:
    warnings.warn(CodedWarning("W101", "odd"), stacklevel=1)


@pytest.mark.parametrize("odd", [_log, _warn])
def test_a_warning_fails_with_strict_alone(
    sample: Path, odd: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stats(*_: object) -> Stats:
        odd()
        return Stats([("key", "value")])

    monkeypatch.setattr("niels_gpt.inspection.stats.stats", stats)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["stats", str(sample)]) == 0
        assert "--strict" not in capsys.readouterr().err
        assert main(["stats", str(sample), "--strict"]) == 1
    out, err = capsys.readouterr()
    assert out == "key  value\n" and err.splitlines()[-1] == "--strict: 1 warning, so the exit code is 1"


def test_a_printed_warning_fails_with_strict_alone(
    flags: list[str], sample: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["build", "dolly15k", *flags, "--strict"]
    assert main(words) == 0 and "--strict" not in capsys.readouterr().err
    assert main([*words, "--max-dropped-share", "0"]) == 1
    assert "warning[W201]: sft/dolly15k" in (err := capsys.readouterr().err) and err.rstrip().endswith("is 1")


def test_json_of_every_command_is_one_object(
    sample: Path, flags: list[str], rollouts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats, pages = str(sample / "sft" / "oasst1"), str(sample / "pretrain" / "roam")
    texts = [str(CHECKOUT / "niels_gpt/data/sample/roam/*.md"), "--vocab-size", "400"]
    words: dict[tuple[str, ...], list[str]] = {
        ("build",): ["oasst1", *flags],
        ("train-tokenizer",): ["--input-glob", *texts, "--out-dir", str(tmp_path / "t")],
        ("add-sentinels",): [str(made_tokenizer("t5")), str(tmp_path / "with_sentinels")],
        ("list",): [str(sample)],
        ("show",): [chats],
        ("stats",): [chats],
        ("locate",): [pages, "train", "100"],
        ("diff",): [chats, chats],
        ("verify",): [str(sample)],
        ("gc",): [str(sample), "--dry-run"],
        ("export",): [pages, str(tmp_path / "nano"), "--to", "nanogpt"],
        ("card",): [pages],
        ("import",): [str(tmp_path / "nano"), "again", "--from", "nanogpt", "--cache-dir", str(sample)],
        ("push",): [pages, str(tmp_path / "bucket")],
        ("pull",): [str(tmp_path / "bucket"), str(tmp_path / "pulled")],
        ("stage",): [pages, str(tmp_path / "staged")],
        ("doctor",): [str(sample)],
        ("explain",): ["e203"],
        ("tree", "stats"): [str(rollouts)],
        ("tree", "show"): [str(rollouts)],
    }
    for name, arguments in words.items():
        capsys.readouterr()
        assert main([*name, *arguments, "--json"]) == 0, name
        assert isinstance(json.loads(capsys.readouterr().out), dict), name
    elsewhere = {
        ("demo",),
        ("seal",),
        ("snapshot",),
        ("tree", "demo"),
        *(name for name in COMMANDS if name[0] == "eagle3"),
    }
    assert words.keys() | elsewhere == COMMANDS.keys()


def test_an_error_is_an_object_too_and_its_code_is_that_of_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", str(tmp_path), "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)["error"]
    assert err == f"error[{found['code']}]: {found['message']}\n" and "no cache there" in err


def test_list_finds_the_sample_where_nothing_else_is_built(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(sample.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(sample)


def test_results_are_coloured_on_a_terminal_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert not is_color_wanted()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert is_color_wanted()
    monkeypatch.setenv("TERM", "dumb")
    assert not is_color_wanted()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not is_color_wanted()


# --- completion -------------------------------------------------------------------------------------------------------


def completed(line: str, folder: Path) -> list[str]:
    """Return what a shell offers for the last word of a line, by click's protocol."""
    words = line.split(" ")
    protocol = {"_NIELS_GPT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    program = "import sys; from niels_gpt.commands.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env={**os.environ, **protocol}, capture_output=True, text=True
    )
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_a_shell_completes_commands_sources_and_codes(tmp_path: Path) -> None:
    (tmp_path / "sources.toml").write_text('[pretrain.notes]\nfiles = "notes"\n')
    assert completed("niels-gpt ver", tmp_path) == ["verify"]
    assert completed("niels-gpt build ", tmp_path) == [*SOURCES, *TREES, "notes", *EAGLE3_KEYS]
    assert completed("niels-gpt explain E20", tmp_path) == [code for code in CODES if code.startswith("E20")]
    assert "--cache-dir" in completed("niels-gpt build --c", tmp_path)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_line_that_doctor_names_turns_completion_on(tmp_path: Path) -> None:
    script = tmp_path / "niels-gpt"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{PROGRAM[-1]}' \"$@\"\n")
    script.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SHELL": "/bin/bash"}
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), **path}
    told = subprocess.run(["niels-gpt", "doctor"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    lines = f"{told.stdout.splitlines()[-1].strip()}\ncomplete -p niels-gpt"
    done = subprocess.run(["bash", "-c", lines], env=environment, capture_output=True, text=True, check=True)
    assert "niels-gpt" in done.stdout, done.stderr


def test_names_of_folders_reach_no_terminal_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a\x1b]0;title\x07"
    cache = folder / "sft" / "b\x1b[2J"
    cache.mkdir(parents=True)
    (cache / "meta.json").write_text("{")
    commands = [[name, str(where)] for name in ("list", "doctor", "verify", "gc") for where in (folder, cache)]
    commands += [[*name, str(cache)] for name in (["stats"], ["show"], ["eagle3", "stats"], ["tree", "stats"])]
    for command in commands:
        main(command)
        printed = capsys.readouterr()
        assert "\x1b" not in printed.out + printed.err, command


@pytest.mark.parametrize("arguments", [["verify"], ["build", "--all", "roam"], ["show", "c", "--split", "x"]])
def test_a_wrong_command_line_is_an_object_too(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "E101"


def test_help_all_does_not_change_the_help_of_the_next_call(capsys: pytest.CaptureFixture[str]) -> None:
    helps = []
    for flag in ("--help", "--help-all", "--help"):
        assert main(["build", flag]) == 0
        helps.append(capsys.readouterr().out)
    assert helps[0] == helps[2] != helps[1]


def test_a_warning_of_two_passes_counts_once(caplog: pytest.LogCaptureFixture) -> None:
    once, kept = _Once(), []
    for code, text in (("W302", "a"), ("W302", "a"), ("W302", "b"), (None, "a"), (None, "a")):
        record = logging.LogRecord("niels_gpt", logging.WARNING, "", 0, text, None, None)
        record.code = code
        kept.append(once.filter(record))
    assert kept == [True, False, True, True, True]
