"""niels-gpt: its help, exit codes, --json and --strict of every command, completion."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import warnings
from functools import partial

import pytest
from support import ROOT
from support.commands import every_command, niels_gpt, stats_does
from support.made_tokenizers import made_tokenizer

from niels_gpt.storage.codes import CodedWarning

PROGRAM = [sys.executable, "-c", "import sys; from niels_gpt.commands.main import main; sys.exit(main())"]


COMMANDS = every_command()
cli = partial(niels_gpt, module="niels_gpt.cache.cli")
SOURCES = "fineweb_edu wikitext roam gutenberg dolly15k oasst1 trees/oasst1"
ROLLOUTS = '{"prompt_ids": [1, 2, 3], "completions": [[4, 5], [4, 6]]}\n'


@pytest.fixture
def rollouts(tmp_path):
    """A file of one group of rollouts."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text(ROLLOUTS)
    return path


# --- help -------------------------------------------------------------------------------------------------------------


def test_the_help_fits_a_screen_and_names_every_command_once():
    done = niels_gpt("--help")
    assert done.status == 0
    lines = done.out.splitlines()
    assert len(lines) <= 52
    for name in {words[0] for words in COMMANDS}:
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1, name
    done = niels_gpt()
    assert done.status == 2 and "Care:" in done.out


@pytest.mark.parametrize("words", [(), ("eagle3",), ("tree",), *COMMANDS], ids=" ".join)
def test_every_help_is_short_and_explains_every_flag(words):
    done = niels_gpt(*words, "-h")
    assert done.status == 0
    lines = done.out.splitlines()
    assert len(lines) <= 90
    if command := COMMANDS.get(words):
        assert all(getattr(param, "help", None) for param in command.params)
        assert {"--json", "--strict"} <= {flag for param in command.params for flag in param.opts}
        assert any(line.startswith("  niels-gpt ") for line in lines), "no example"


def test_few_settings_are_in_the_help_of_build_and_all_in_help_all():
    done = niels_gpt("build", "--help")
    assert done.status == 0
    common = done.out
    assert len(common.splitlines()) <= 70 and "--cache-dir" in common and "--shard-bytes" not in common
    done = niels_gpt("build", "--help-all")
    assert done.status == 0
    full = done.out
    assert {"--cache-dir", "--shard-bytes", "--oasst1-max-messages"} <= set(re.findall(r"--[a-z0-9-]+", full))


LOOKS = {"click", "numpy", "zlib_ng"}
HELPS = {"click", "markdown_it", "orjson", "pygments", "rich", "rich_click", "zlib_ng"}
MAY_LOAD = {
    "list SAMPLE": LOOKS,
    "show SAMPLE/sft/oasst1": LOOKS | {"sentencepiece"},
    "show SAMPLE/pretrain/roam": LOOKS | {"sentencepiece"},
    "verify SAMPLE": LOOKS | {"sentencepiece"},
    "build roam wikitext dolly15k oasst1 FLAGS": LOOKS | {"orjson", "sentencepiece"},
    "--version": {"click"},
    "--help": HELPS,
    "build --help": HELPS,
    "export --help": HELPS,
    "tree stats --help": HELPS,
    "eagle3 precompute --help": HELPS,
}
"""Packages that a command may load, beside the standard library."""
PRINTS_MODULES = """
import sys
from niels_gpt.commands import start
code = start()
print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("words", MAY_LOAD)
def test_a_command_loads_no_package_that_it_does_not_need(words, built, tiny_model_path):
    flags = f"--source-root sample --cache-dir {built} --tokenizer {tiny_model_path}"
    argv = words.replace("SAMPLE", str(built / "sample")).replace("FLAGS", flags).split()
    done = subprocess.run([sys.executable, "-c", PRINTS_MODULES, *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = done.stderr.splitlines()[-1].split()
    packages = {name.partition(".")[0] for name in modules if name[0] != "_"}
    assert "click" in packages
    assert packages - sys.stdlib_module_names - {"niels_gpt", "sitecustomize"} <= MAY_LOAD[words]
    assert not {"asyncio", "multiprocessing"} & packages
    assert argv[0] == "build" or "niels_gpt.engine.build" not in modules


@pytest.mark.parametrize(
    "words", [["nope"], ["list", "--nope"], ["show"], ["build", "--all", "roam"], ["explain", "E1"]]
)
def test_wrong_usage_is_2_and_names_the_help(words):
    done = niels_gpt(*words)
    assert done.status == 2
    out, err = done.out, done.err
    assert not out and err.startswith("error[E101]: ")


# --- exit codes -------------------------------------------------------------------------------------------------------


def test_damage_is_3_and_1_for_python_m(sample):
    chats = sample / "sft" / "oasst1"
    for words in (["verify", chats], ["list", sample], ["stats", chats]):
        assert niels_gpt(*words).status == 0, words
    with open(chats / "train_tokens.bin", "ab") as file:
        file.write(b"more")
    for words in (["verify", chats], ["list", sample], ["stats", chats], ["doctor", sample]):
        assert niels_gpt(*words).status == 3, words
        assert words[0] == "doctor" or cli(*words).status == 1
    done = niels_gpt("verify", sample)
    assert done.status == 3 and done.out.splitlines()[-1].startswith("next: niels-gpt build oasst1 --restart ")
    (chats / "meta.json").write_text("{")
    done, same = niels_gpt("show", chats), cli("show", chats)
    assert (done.status, same.status) == (3, 1) and done.err.count("error[E202]") == same.err.count("error[E202]") == 1
    assert niels_gpt("verify", sample / "nothing").status == 1


def test_what_is_not_installed_is_4_with_the_command_that_installs_it(rollouts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ["stats", rollouts, "--plot", tmp_path / "x.png"]
    for done, status in (
        (niels_gpt("tree", *words), 4),
        (niels_gpt(*words, module="niels_gpt.prefix_tree.__main__"), 1),
    ):
        assert done.status == status and done.err.count("pip install 'niels-gpt[") == 1


def test_interrupted_is_130(rollouts):
    def stop():
        raise KeyboardInterrupt

    with stats_does(stop):
        for run, status in ((niels_gpt, 130), (cli, 1)):
            done = run("stats", rollouts)
            assert (done.status, done.err) == (status, "\ninterrupted\n")


# --- --strict and --json ----------------------------------------------------------------------------------------------


def _log():
    logging.getLogger("niels_gpt.some.module").warning("odd")


def _warn():
    warnings.warn(CodedWarning("W101", "odd"), stacklevel=1)


@pytest.mark.parametrize("odd", [_log, _warn])
def test_a_warning_fails_with_strict_alone(sample, odd):
    with stats_does(lambda: odd() or [("key", "value")]):
        done = niels_gpt("stats", sample)
        assert done.status == 0 and "--strict" not in done.err
        done = niels_gpt("stats", sample, "--strict")
    assert (done.status, done.out) == (1, "key  value\n")
    assert done.err.splitlines()[-1] == "--strict: 1 warning, so the exit code is 1"


def test_a_printed_warning_fails_with_strict_alone(flags, sample):
    words = ["build", "dolly15k", *flags, "--strict"]
    done = niels_gpt(*words)
    assert done.status == 0 and "--strict" not in done.err
    done = niels_gpt(*words, "--max-dropped-share", "0")
    assert done.status == 1 and "warning[W201]: sft/dolly15k" in (err := done.err) and err.rstrip().endswith("is 1")


def test_json_of_every_command_is_one_object(sample, flags, rollouts, tmp_path):
    chats, pages = str(sample / "sft" / "oasst1"), str(sample / "pretrain" / "roam")
    texts = [str(ROOT / "niels_gpt/data/sample/roam/*.md"), "--vocab-size", "400"]
    words = {
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
        done = niels_gpt(*name, *arguments, "--json")
        assert done.status == 0, name
        assert isinstance(done.json, dict), name
    elsewhere = {
        ("demo",),
        ("seal",),
        ("snapshot",),
        *(name for name in COMMANDS if name[0] == "eagle3"),
    }
    assert words.keys() | elsewhere == COMMANDS.keys()


def test_an_error_is_an_object_too_and_its_code_is_that_of_stderr(tmp_path):
    done = niels_gpt("list", tmp_path, "--json")
    assert done.status == 1
    out, err = done.out, done.err
    found = json.loads(out)["error"]
    assert err == f"error[{found['code']}]: {found['message']}\n" and "no cache there" in err


def test_list_finds_the_sample_where_nothing_else_is_built(sample):
    done = niels_gpt("list", sample.parent, "--json")
    assert done.status == 0 and done.json["folder"] == str(sample)


def test_results_are_coloured_on_a_terminal_unless_no_color_is_set(sample, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)

    def is_coloured(*flags, is_terminal=True, **env):
        shown = niels_gpt("show", sample / "sft/oasst1", *flags, env={"TERM": "xterm", **env}, is_terminal=is_terminal)
        return "\x1b[" in shown.out

    assert not is_coloured(is_terminal=False)
    assert is_coloured()
    assert not is_coloured(TERM="dumb")
    assert not is_coloured(NO_COLOR="1")
    assert not is_coloured("--json")


# --- completion -------------------------------------------------------------------------------------------------------


def completed(line):
    """Return what a shell offers for the last word of a line, by click's protocol."""
    words = line.split(" ")
    protocol = {"_NIELS_GPT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return [line.partition(",")[2] for line in niels_gpt(env=protocol).out.splitlines()]


def test_a_shell_completes_commands_sources_and_codes(tmp_path):
    (tmp_path / "sources.toml").write_text('[pretrain.notes]\nfiles = "notes"\n')
    assert completed("niels-gpt ver") == ["verify"]
    assert completed("niels-gpt build ") == f"{SOURCES} eagle3/draft_vocab eagle3/targets notes".split()
    listed = re.findall(r"^### (E20\d) ", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    assert len(listed) > 7 and completed("niels-gpt explain E20") == listed
    assert "--cache-dir" in completed("niels-gpt build --c")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_line_that_doctor_names_turns_completion_on(tmp_path):
    script = tmp_path / "niels-gpt"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{PROGRAM[-1]}' \"$@\"\n")
    script.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SHELL": "/bin/bash"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **path}
    told = subprocess.run(["niels-gpt", "doctor"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    lines = f"{told.stdout.splitlines()[-1].strip()}\ncomplete -p niels-gpt"
    done = subprocess.run(["bash", "-c", lines], env=environment, capture_output=True, text=True, check=True)
    assert "niels-gpt" in done.stdout, done.stderr


def test_names_of_folders_reach_no_terminal_as_they_are(tmp_path):
    folder = tmp_path / "a\x1b]0;title\x07"
    cache = folder / "sft" / "b\x1b[2J"
    cache.mkdir(parents=True)
    (cache / "meta.json").write_text("{")
    commands = [[name, str(where)] for name in ("list", "doctor", "verify", "gc") for where in (folder, cache)]
    commands += [[*name, str(cache)] for name in (["stats"], ["show"], ["eagle3", "stats"], ["tree", "stats"])]
    for command in commands:
        done = niels_gpt(*command)
        assert "\x1b" not in done.out + done.err, command


@pytest.mark.parametrize("arguments", [["verify"], ["build", "--all", "roam"], ["show", "c", "--split", "x"]])
def test_a_wrong_command_line_is_an_object_too(arguments):
    done = niels_gpt(*arguments, "--json")
    assert done.status == 2 and done.json["error"]["code"] == "E101"


def test_help_all_does_not_change_the_help_of_the_next_call():
    helps = [niels_gpt("build", flag).out for flag in ("--help", "--help-all", "--help")]
    assert helps[0] == helps[2] != helps[1]


def test_a_warning_of_two_passes_counts_once(sample):
    def odd():
        logger = logging.getLogger("niels_gpt.some.module")
        for code, text in (("W302", "a"), ("W302", "a"), ("W302", "b"), (None, "a"), (None, "a")):
            logger.warning(text, extra={} if code is None else {"code": code})
        return []

    with stats_does(odd):
        done = niels_gpt("stats", sample, "--strict")
    assert done.err.splitlines()[:-1] == ["warning[W302]: a", "warning[W302]: b", "a", "a"]
    assert done.err.splitlines()[-1].startswith("--strict: 4 warnings")
