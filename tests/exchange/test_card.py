"""The card of a cache: the hub's own parser reads it, and its numbers are those of meta.json."""

import json
import re
import shutil
import subprocess

import pytest
import yaml
from huggingface_hub import DatasetCard
from markdown_it import MarkdownIt
from support.commands import niels_gpt
from support.errors import refused
from support.small_caches import build_caches, change_meta

from niels_gpt.cache import read_meta
from niels_gpt.exchange.card import card_of

NASTY = "CC [x](javascript:1) <b>\n---\n# head `code` \x1b]0;title\x07 \u202e"


def card(cache, **how):
    """Return the YAML of a cache's card as the hub parses it, and its Markdown."""
    content = card_of(cache, **how)
    parsed = DatasetCard(content)
    assert yaml.safe_load(content.split("---\n")[1]) == parsed.data.to_dict()
    return parsed.data.to_dict(), parsed.text


def table(text):
    """Return the numbers of the table of splits."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {
        row[0]: {name: int(cell.replace(",", "")) for name, cell in zip(rows[0][1:], row[1:], strict=True)}
        for row in rows[2:]
    }


@pytest.fixture(params=["pretrain/notes", "sft/chats"])
def cache(request, tmp_path):
    """A pretrain cache, and an sft cache."""
    return build_caches(tmp_path) / str(request.param)


def test_every_number_is_that_of_meta_json(cache):
    meta = read_meta(str(cache / "meta.json"))
    data, text = card(cache)
    assert data["size_categories"] == ["n<1K"] and meta["kind"] in data["tags"]
    for split, row in table(text).items():
        files = meta["shards"][split]
        rows = meta["docs"][split] if meta["kind"] == "pretrain" else meta["totals"][f"{split}_examples"]
        assert row["tokens"] == meta["totals"][f"{split}_tokens"] and rows in row.values()
        assert row["bytes of text"] == meta["utf8_bytes"][split] and row["token files"] == len(files)
        assert row["their bytes"] == sum(file["bytes"] for file in files)
        if meta["kind"] == "sft":
            assert row["tokens with loss"] == meta["supervised_tokens"][split]
    assert meta["content_sha256"] in text and f"{meta['vocab_size']:,}" in text and meta["split_rule"][:20] in text


def test_the_command_of_the_card_prints_content_sha256(cache, tmp_path):
    text = card(cache)[1]
    command = next(line for line in text.splitlines() if line.startswith("cd FOLDER"))
    folder = shutil.copytree(cache, tmp_path / "pulled")
    (folder / "README.md").write_text(text)  # as in a clone of a hub repository
    (folder / ".gitattributes").write_text("")
    done = subprocess.run(
        ["bash", "-c", command.replace("FOLDER", str(folder))], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[0] == read_meta(str(cache / "meta.json"))["content_sha256"]


def test_the_text_of_strangers_stays_text(cache):
    meta = read_meta(str(cache / "meta.json"))
    about = {**meta["source"], "licence": NASTY, "attribution": NASTY, "counters": {NASTY: 1}}
    change_meta(cache, source=about, dataset_name=NASTY)
    data, text = card(cache, command=f"build '{NASTY}'\n```\n# out")
    assert data["license"] == "other" and re.fullmatch("[a-z0-9.-]+", data["license_name"])
    assert all(char.isprintable() or char == "\n" for char in text)
    blocks = MarkdownIt("commonmark").parse(text)
    inline = [each for block in blocks for each in block.children or ()]
    assert [block.tag for block in blocks if block.type == "heading_open"].count("h1") == 1
    assert not {"html_block", "html_inline", "link_open", "hr"} & {each.type for each in (*blocks, *inline)}
    assert [block.info for block in blocks if block.type == "fence"] == ["console", "console", "console", "python"]


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("MIT", "mit"),
        ("CC BY-SA 4.0", "cc-by-sa-4.0"),
        ("ODC-BY 1.0", "odc-by"),
        ("not stated", "unknown"),
        ("CC BY-SA 4.0 and GFDL", "other"),
    ],
)
def test_licences_have_the_ids_of_the_hub(licence, expected, tmp_path):
    cache = build_caches(tmp_path) / "pretrain" / "notes"
    change_meta(cache, source={**read_meta(str(cache / "meta.json"))["source"], "licence": licence})
    data, text = card(cache)
    assert data["license"] == expected and ("license_name" in data) == (expected == "other") and licence in text


def test_what_is_not_known_is_said_to_be_unknown(tmp_path):
    cache = build_caches(tmp_path) / "pretrain" / "notes"
    assert "is not recorded" in card(cache)[1] and "is not recorded" in niels_gpt("card", cache).out
    change_meta(cache, docs="x")
    with refused("E202"):
        card_of(cache)


def test_the_command_is_that_of_the_record_without_folders_of_this_machine(tmp_path):
    root = build_caches(tmp_path)
    cache = root / "pretrain" / "notes"
    run = {"content_sha256": read_meta(str(cache / "meta.json"))["content_sha256"], "seconds": 1}
    lines = "notes=/home/me/my notes/*.md:body;other=~/x"
    run |= {"fingerprint": "", "settings": {"pretrain": lines, "cache_dir": "/secret/c", "seed": 7}}
    (root / ".runs").mkdir()
    (root / ".runs" / "pretrain.notes.jsonl").write_text(json.dumps(run) + "\n")
    (command,) = re.findall("niels-gpt build notes .*", niels_gpt("card", cache).out)
    assert "--seed 7" in command and "notes=*.md:body" in command and "secret" not in command and "/" not in command
    assert command in card(cache, command=command)[1]
    (root / ".runs" / "pretrain.notes.jsonl").write_text(json.dumps({**run, "content_sha256": "0" * 64}) + "\n")
    assert "is not recorded" in niels_gpt("card", cache).out
