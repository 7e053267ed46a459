"""Releases of the library tokenizers: 1.0 gives 0.23's ids or refuses; another one is never called damage of a file.

1.0 lies in a folder tokenizers-1.0.0rc3 below the one that NIELS_GPT_PEERS names: .ci/run makes it.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.chat_tokenizers import CHATML
from support.library_release import RELEASE, engines, environment, in_release, refusal, seen
from support.made_tokenizers import REAL, SMALL, any_tokenizer, made_tokenizer, sample_texts
from test_huggingface import HOSTILE, MARKED, TEXTS

from niels_gpt.tokenizers.probes import PROBES, probe_texts

CLASSIC = "pip install 'tokenizers>=0.22,<0.24'"
NOT_INSTALLED = 4


@pytest.fixture(scope="module")
def release():
    """The folder of 1.0."""
    if (peers := os.environ.get("NIELS_GPT_PEERS")) is None:
        pytest.skip(f"set NIELS_GPT_PEERS to a folder with tokenizers-{RELEASE}, see .ci/run")
    folder = Path(peers) / f"tokenizers-{RELEASE}"
    assert (folder / "tokenizers").is_dir(), f"{folder} has no package tokenizers, and NIELS_GPT_PEERS is set"
    return folder


# --- the same ids -----------------------------------------------------------------------------------------------------


def _byte_level(**how):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True, **how}


def _metaspace(scheme):
    return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": True}


def _template(token, number):
    pieces = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _sequence(kind, *steps):
    return {"type": "Sequence", kind: list(steps)}


SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
DIGITS = {"type": "Digits", "individual_digits": True}
CHANGES = {
    "small llama3": {
        "regex of GPT-2": {"pre_tokenizer": _byte_level()},
        "digits": {"pre_tokenizer": _sequence("pretokenizers", DIGITS, _byte_level())},
        "bos": {"post_processor": _sequence("processors", _byte_level(), _template("<|begin_of_text|>", 2000))},
        "roberta": {"post_processor": {"type": "RobertaProcessing", "sep": ["b", 5], "cls": ["a", 7]}},
        "lower case": {"normalizer": {"type": "Lowercase"}},
        "strip": {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        "replaced": {"normalizer": {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}},
        "no decoder": {"decoder": None},
    },
    "small gemma": {
        "llama2": {"normalizer": _sequence("normalizers", {"type": "Prepend", "prepend": "\u2581"}, SPACES)},
        "metaspace first": {"normalizer": None, "pre_tokenizer": _metaspace("first")},
        "metaspace always": {"normalizer": None, "pre_tokenizer": _metaspace("always")},
        "metaspace never": {"normalizer": None, "pre_tokenizer": _metaspace("never")},
        "no normalizer": {"normalizer": None},
        "white space": {"normalizer": None, "pre_tokenizer": {"type": "Whitespace"}},
        "white space alone": {"normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}},
        "punctuation": {"pre_tokenizer": {"type": "Punctuation", "behavior": "Isolated"}},
        "delimiter": {"normalizer": None, "pre_tokenizer": {"type": "CharDelimiterSplit", "delimiter": " "}},
        "scripts": {"normalizer": None, "pre_tokenizer": {"type": "UnicodeScripts"}},
        "no pre-tokenizer": {"pre_tokenizer": None},
        "no decoder": {"decoder": None},
    },
    "t5": {
        "first": {"pre_tokenizer": _metaspace("first")},
        "always": {"pre_tokenizer": _metaspace("always")},
        "no pre-tokenizer": {"pre_tokenizer": None, "normalizer": SPACES},
        "end": {"post_processor": _template("</s>", 1)},
    },
}
OF_MODEL = {
    "small llama3": {"merges": {"ignore_merges": False}, "an id of unknown": {"unk_token": "a"}},
    "small gemma": {"no bytes": {"byte_fallback": False}, "no fuse": {"byte_fallback": False, "fuse_unk": False}},
    "t5": {"no bytes": {"byte_fallback": False}},
}
FLAGS = ("lstrip", "rstrip", "normalized")


def _write(folder, content):
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder / "tokenizer.json")


def _content(name):
    return json.loads((made_tokenizer(name) / "tokenizer.json").read_text())


def _tokenizers(folder):
    """Write the changed tokenizers; return the file of each, and of the unchanged ones, by name."""
    names = ("t5", *SMALL, *(REAL if os.environ.get("NIELS_GPT_TEST_MODELS") else ()))
    files = {name: str(any_tokenizer(name) / "tokenizer.json") for name in names}
    for name, changes in CHANGES.items():
        for what, change in changes.items():
            files[f"{name}, {what}"] = _write(folder / name / what, _content(name) | change)
    for name, changes in OF_MODEL.items():
        for what, change in changes.items():
            content = _content(name)
            files[f"{name}, {what}"] = _write(folder / name / what, content | {"model": content["model"] | change})
    for flag in FLAGS:
        content = _content("small llama3")
        content["added_tokens"][:9] = [{**token, flag: True} for token in content["added_tokens"][:9]]
        files[f"added, {flag}"] = _write(folder / flag, content)
    vocab = {token: at for at, token in enumerate(["[UNK]", *"abcdefghijklmnopqrstuvwxyz", "the", "##s", "##e"])}
    for kind, more in (
        ("WordPiece", {"max_input_chars_per_word": 100, "continuing_subword_prefix": "##"}),
        ("WordLevel", {}),
    ):
        model = {"type": kind, "unk_token": "[UNK]", "vocab": vocab, **more}
        content = _content("t5") | {"model": model, "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
        files[kind] = _write(folder / kind, content)
    return files


def _texts():
    """Return 3,000 texts: the tests' own, pieces of the sample, and letters of all scripts with white space."""
    generator = random.Random(0)
    texts = [*TEXTS, MARKED, *PROBES, *(text.decode() for text in probe_texts(["<eos>", "<|end_of_text|>"]))]
    literals = ["<|begin_of_text|>", "<|end_of_text|>", "</s>", "<eos>", "<unk>", " ", "  ", "\n", "a", "the", "\u00e9"]
    texts += ["".join(generator.choices(literals, k=9)) for _ in range(300)]
    sample = sample_texts()
    while len(texts) < 3_000:
        text = generator.choice(sample)
        start = generator.randrange(len(text) + 1)
        letters = (
            chr(generator.choice((generator.randrange(0x3000), generator.randrange(0x110000)))) for _ in "letters"
        )
        texts.append(text[start : start + generator.randrange(400)] + "".join(letters))
    return [text for text in texts if not any(0xD800 <= ord(letter) < 0xE000 for letter in text)]


NEWER = ("neox", "small qwen2")  # they compose characters, and 1.0 knows more that can be


def test_the_ids_are_0_23s_in_thousands_of_texts_of_many_tokenizers(release, tmp_path):
    files, texts = _tokenizers(tmp_path), _texts()
    assert len(files) >= 36 and len(texts) > 2_900
    found = in_release(release, seen, list(files.values()), texts)
    expected = seen(list(files.values()), texts)
    for name, one, two in zip(files, expected, found, strict=True):
        assert one.keys() == two.keys(), (name, one.get("text"), two.get("text"))
        for key in one:
            if name in NEWER and key in ("ids", "plain", "decoded"):
                continue
            differing = [at for at, (a, b) in enumerate(zip(one[key], two[key], strict=True)) if a != b]
            assert not differing, (name, key, differing[:5])
    for at, name in enumerate(files):
        if name in NEWER:
            plain = [number for number, text in enumerate(texts) if text.isascii() or number < len(TEXTS)]
            assert all(expected[at]["ids"][number] == found[at]["ids"][number] for number in plain), name


def test_1_0_encodes_where_it_is_installed_and_gigatoken_only_where_it_is_asked_for(release):
    pytest.importorskip("gigatoken")
    texts = [*TEXTS, MARKED]
    for name, has_note in (("small llama3", False), ("small qwen2", True)):
        file = str(made_tokenizer(name) / "tokenizer.json")
        names, are_equal, note, codes = in_release(release, engines, file, texts)
        assert (names, are_equal) == ([f"tokenizers {RELEASE}"] * 2 + ["gigatoken"], True)
        assert ("Unicode" in note and CLASSIC in note) == has_note
        assert codes == ["W413"] * has_note  # once, though three engines were opened
        assert engines(file, texts) == (["gigatoken", "tokenizers", "gigatoken"], True, "", [])


# --- whole builds -----------------------------------------------------------------------------------------------------


def _run(folder, *arguments, release=None):
    command = [sys.executable, "-c", "import sys; from niels_gpt.commands import start; sys.exit(start())", *arguments]
    environ = {**os.environ} if release is None else environment(release)
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


def _build(folder, *more, release=None):
    made = str(made_tokenizer("small llama3"))
    arguments = ("--pretrain", "notes=notes/*.txt", "--tokenizer", made, "--document-start", "none", *more)
    return _run(folder, "build", *arguments, release=release)


def _notes(folder):
    (folder / "notes").mkdir(parents=True)
    for number, text in enumerate(sample_texts()[:40]):
        (folder / "notes" / f"{number}.txt").write_text(text)
    return folder


def _files(folder):
    """Return the bytes of a cache's version, and the record of its recipe."""
    cache = folder / "cache" / "pretrain" / "notes"
    paths = sorted(path for path in cache.resolve().rglob("*") if path.is_file())
    record = json.loads((cache.parent / ".versions" / "notes" / "recipe.json").read_text())
    return {str(path.relative_to(cache.resolve())): path.read_bytes() for path in paths}, record


def test_a_build_with_1_0_gives_the_same_bytes_and_neither_release_builds_the_others_cache_again(release, tmp_path):
    folders = {each: _notes(tmp_path / each) for each in ("classic", "fast")}
    for each, folder in folders.items():
        done = _build(folder, release=release if each == "fast" else None)
        assert done.returncode == 0, done.stderr
    (classic, one), (fast, two) = map(_files, folders.values())
    assert classic == fast and len(classic) > 3
    assert two.pop("libraries") == {"tokenizers": RELEASE} != one.pop("libraries")
    assert one == two
    for each, folder in folders.items():
        done = _build(folder, release=None if each == "fast" else release)
        assert done.returncode == 0 and "up to date" in done.stdout, done.stdout + done.stderr
        assert _files(folder)[0] == classic


# --- what 1.0 lacks ---------------------------------------------------------------------------------------------------


def test_what_1_0_lacks_is_said_with_the_command_that_installs_a_release_that_has_it(release, tmp_path):
    folder = _notes(tmp_path / "f")
    trained = _run(
        folder,
        "train-tokenizer",
        "--kind",
        "bpe",
        "--vocab-size",
        "290",
        "--input-glob",
        "notes/*.txt",
        release=release,
    )
    chats = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(20)))
    made = str(made_tokenizer("small llama3"))
    template = tmp_path / "template.jinja"
    template.write_text(CHATML)
    arguments = ("--sft", f"mine={chats}", "--tokenizer", made, "--chat-template", str(template))
    built = _run(folder, "build", *arguments, release=release)
    for done, what in ((trained, "trainer"), (built, "offsets")):
        assert done.returncode == NOT_INSTALLED, done.stdout + done.stderr
        assert "E901" in done.stderr and what in done.stderr and CLASSIC in done.stderr and RELEASE in done.stderr
        assert "damaged" not in done.stderr and "Traceback" not in done.stderr
    code, text = in_release(release, refusal, made)
    assert code == "E901" and "transformers" in text and CLASSIC in text and RELEASE in text


def test_a_form_that_1_0_does_not_know_is_not_called_damaged(release, tmp_path):
    content = _content("small llama3")
    whole = [{**token, "single_word": True} for token in content["added_tokens"]]
    pattern = {"type": "Split", "pattern": {"Regex": r"(?<=a)b|\s"}, "behavior": "Isolated", "invert": False}
    changes = {
        "space": {"pre_tokenizer": _byte_level(add_prefix_space=True)},
        "whole words": {"added_tokens": whole},
        "pattern": {"pre_tokenizer": _sequence("pretokenizers", pattern, _byte_level(use_regex=False))},
    }
    files = [_write(tmp_path / name, content | change) for name, change in changes.items()]
    for file, found in zip(files, in_release(release, seen, files, ["a"]), strict=True):
        assert found.get("code") == "E901" and file in found["text"] and CLASSIC in found["text"], found
        assert "damaged" not in found["text"]
    assert all("ids" in each for each in seen(files, ["a"]))


def test_a_damaged_or_hostile_file_is_refused_by_1_0_too(release, tmp_path):
    files = []
    for number, change in enumerate(HOSTILE.values()):
        content = _content("t5")
        for token in content["added_tokens"]:
            token.update(dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False))
        if callable(change):
            change(content)
        files.append(_write(tmp_path / str(number), content))
        if isinstance(change, bytes):
            Path(files[-1]).write_bytes(change)
        elif change is None:
            Path(files[-1]).with_name("tokenizer_config.json").write_bytes(b"[" * 100_000)
    found = in_release(release, seen, files, [])
    codes = {name: each.get("code") for name, each in zip(HOSTILE, found, strict=True)}
    assert set(codes.values()) == {"E403"}, {k: v for k, v in codes.items() if v != "E403"}
    assert all(each["text"].isprintable() for each in found)


# --- without 1.0 ------------------------------------------------------------------------------------------------------


def test_a_release_of_another_interface_is_not_supported_and_no_file_is_called_damaged(tmp_path):
    other = tmp_path / "other"
    (other / "tokenizers").mkdir(parents=True)
    (other / "tokenizers" / "__init__.py").write_text("class Tokenizer: ...\nclass Encoding: ...\n")
    (other / "tokenizers-7.0.dist-info").mkdir()
    (other / "tokenizers-7.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tokenizers\nVersion: 7.0\n"
    )
    (found,) = in_release(other, seen, [str(made_tokenizer("t5") / "tokenizer.json")], [])
    assert found["code"] == "E901" and "7.0" in found["text"] and CLASSIC in found["text"]
    assert "damaged" not in found["text"]


def test_the_release_is_recorded_and_another_one_makes_nothing_stale(tmp_path):
    folder = _notes(tmp_path / "f")
    assert _build(folder).returncode == 0
    record = folder / "cache" / "pretrain" / ".versions" / "notes" / "recipe.json"
    content = json.loads(record.read_text())
    assert list(content["libraries"]) == ["tokenizers"]
    for libraries in ({"libraries": {"tokenizers": "0.22.0"}}, {}):  # {}: a record of before
        del content["libraries"]
        record.write_text(json.dumps(content | libraries))
        assert "up to date" in _build(folder, "--dry-run").stdout
        content["libraries"] = {}
