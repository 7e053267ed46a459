"""The packaged corpus: small, with upstream's fields and the awkward cases that tests and pages rely on."""

import json
from collections import Counter

import pytest
from support import ROOT
from support.data_files import rows_of

from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.data.gutenberg import iter_gutenberg
from niels_gpt.data.oasst1 import iter_oasst1_sft
from niels_gpt.data.roam import list_roam_paths, load_texts, roam_dir_of

pytestmark = pytest.mark.filterwarnings("error")
SAMPLE = ROOT / "niels_gpt" / "data" / "sample"
LONG_SENTINEL = "<|ngpt_eot_84a5023f67d74cf29cc4001becde983c|>"
SHORT_SENTINEL = "<|asst|>"


def test_it_is_small_enough_to_travel_with_the_package():
    files = [path for path in SAMPLE.rglob("*") if path.suffix in (".jsonl", ".md", ".txt")]
    assert 100_000 < sum(path.stat().st_size for path in files) < 320_000


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("HuggingFaceFW/fineweb-edu", {"text", "id", "dump", "url", "date", "token_count", "score", "int_score"}),
        ("databricks/databricks-dolly-15k", {"instruction", "context", "response", "category"}),
        ("OpenAssistant/oasst1", {"message_id", "parent_id", "text", "role", "lang", "deleted", "message_tree_id"}),
    ],
)
def test_rows_have_upstreams_fields(name, keys):
    rows = rows_of(*sorted((SAMPLE / name).glob("*.jsonl")))
    assert rows and all(keys <= row.keys() == rows[0].keys() for row in rows)


def test_web_pages_include_every_awkward_document():
    texts = [page.text for page in iter_fineweb_edu(source_root="sample")]
    assert len(texts) == 120 and texts.count("") == 1
    for mark in (LONG_SENTINEL, "\u2581", "\r\n", ".\t", "潮汐", "🦉"):
        assert sum(mark in text for text in texts) == 1, mark


def test_dolly_has_contexts_one_blank_response_and_both_sentinels(counters):
    chats = list(iter_dolly_sft(source_root="sample", shuffle=False, counters=counters))
    assert len(chats) == 199 and counters == {"blank_field": 1}
    assert 50 < sum("\n\ncontext:\n" in chat.messages[0].content for chat in chats) < 100
    assert sum(SHORT_SENTINEL in c.messages[1].content and LONG_SENTINEL in c.messages[1].content for c in chats) == 1


def test_the_trees_lose_messages_for_every_reason(counters):
    chats = list(iter_oasst1_sft(source_root="sample", counters=counters))
    lost = {"orphan": 2, "cycle": 2, "not_english": 2, "deleted": 1, "blank": 1}
    assert counters == lost | {"no_assistant_turn": 1, "same_role_twice": 2}
    trees = Counter(chat.meta["message_tree_id"] for chat in chats)
    assert max(trees.values()) >= 2, "no prompt with several replies"


def test_the_notes_hold_links_tags_nesting_and_undecodable_bytes(counters):
    texts = list(load_texts(list_roam_paths(roam_dir_of("sample", roam_dir="")), counters=counters))
    assert len(texts) == 43 and "" in texts and counters == {"repaired_utf8": 1}
    for mark in ("[[", "#daily", "\n        - ", "\n\t- ", "é", "珈琲"):
        assert any(mark in text for text in texts), mark


def test_one_book_has_windows_line_ends_and_a_byte_order_mark(counters):
    books = [book.text for book in iter_gutenberg(source_root="sample", counters=counters)]
    assert ["\r\n" in text for text in books] == [True, False]
    assert not any("\ufeff" in text for text in books) and counters == {"byte_order_mark": 1}


def test_web_pages_are_plain_json_without_escapes():
    (path,) = (SAMPLE / "HuggingFaceFW/fineweb-edu").iterdir()
    assert json.loads(path.read_bytes().splitlines()[0])["dump"] == "CC-MAIN-2024-10"
    assert b"\\u" not in path.read_bytes()
