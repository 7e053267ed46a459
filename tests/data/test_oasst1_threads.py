"""OpenAssistant trees become chats, root to leaf."""

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from support.data_files import lines, write
from support.errors import refused
from support.real_text import training_texts

from niels_gpt.data.oasst1 import iter_oasst1_sft, iter_oasst1_trees, tree_threads
from niels_gpt.settings import Settings

pytestmark = pytest.mark.filterwarnings("error")


def message(name, parent, **changes):
    """Make a message whose role follows its name: p... is a prompter's, a... an assistant's."""
    role = "prompter" if name.startswith("p") else "assistant"
    row = {"message_id": name, "parent_id": parent, "message_tree_id": "t", "text": f" {name}\n", "role": role}
    return row | {"lang": "en", "deleted": False} | changes


def mirror(root, **trees):
    for split, rows in trees.items():
        write(root / f"OpenAssistant/oasst1/{split}.messages.jsonl", lines(*rows))
    return str(root)


def threads(*records, **options):
    counters = Counter()
    with tempfile.TemporaryDirectory() as folder:
        root = mirror(Path(folder), train=list(records))
        chats = list(iter_oasst1_sft(source_root=root, counters=counters, **options))
    return [" ".join(chat.meta["message_ids"]) for chat in chats], dict(counters)


def test_roles_are_renamed_texts_stripped_and_ids_kept(tmp_path):
    (chat,) = iter_oasst1_sft(source_root=mirror(tmp_path, train=[message("p", None), message("a", "p")]))
    assert [(m.role, m.content) for m in chat.messages] == [("user", "p"), ("assistant", "a")]
    assert chat.source == "oasst1"
    assert chat.meta == {"message_tree_id": "t", "leaf_message_id": "a", "message_ids": ["p", "a"]}


P, A = message("p", None), message("a", "p")
THREADS = {
    "each leaf gives a thread, with siblings in file order": (
        [P, message("a2", "p"), message("a1", "p"), message("p3", "a2"), message("a4", "p3")],
        ["p a2 p3 a4", "p a1"],
        {},
    ),
    "a reply may come before its parent in the file": ([A, P], ["p a"], {}),
    "a thread that ends with the user stays whole": ([P, A, message("p2", "a")], ["p a p2"], {}),
    "a prompt that nobody answered": ([P], [], {"no_assistant_turn": 1}),
    "orphans with all below them": ([P, A, message("a9", "gone"), message("p9", "a9")], ["p a"], {"orphan": 2}),
    "a tree without its root is all orphans": ([A, message("p2", "a")], [], {"orphan": 2}),
    "cycles are never walked": (
        [P, A, message("p1", "a1"), message("a1", "p1"), message("p2", "a1"), message("a3", "a3")],
        ["p a"],
        {"cycle": 4},
    ),
    "another language ends the path above it": (
        [P, A, message("p2", "a", lang="es"), message("a2", "p2")],
        ["p a"],
        {"not_english": 2},
    ),
    "a deleted message goes with everything below it": (
        [P, A, message("a2", "p", deleted=True), message("p2", "a2", lang="de")],
        ["p a"],
        {"deleted": 2},
    ),
    "replies to a blank message answer the one above": (
        [P, message("a", "p", text=" \n"), message("a2", "a"), message("a3", "p")],
        ["p a2", "p a3"],
        {"blank": 1},
    ),
    "a blank leaf gives no second thread": (
        [P, A, message("p2", "a", text=""), message("p3", "a", text="")],
        ["p a"],
        {"blank": 2},
    ),
    "one role twice in a row drops the thread": (
        [P, A, message("a2", "a"), message("a3", "p")],
        ["p a3"],
        {"same_role_twice": 1},
    ),
    "an unknown role drops the thread": ([P, message("a", "p", role="narrator")], [], {"unknown_role": 1}),
    "the later of two messages with one id": ([P, A, message("a", "p", text="later")], ["p a"], {"duplicate_id": 1}),
    "a message without a text": ([P, message("a", "p", text=None)], [], {"missing_field": 1, "no_assistant_turn": 1}),
}


@pytest.mark.parametrize("name", THREADS)
def test_a_tree_gives_these_threads_and_counts_what_it_drops(name):
    records, expected, counters = THREADS[name]
    assert threads(*records) == (expected, counters)


def test_other_languages_are_kept_on_request_and_a_path_is_cut_once_at_the_longest_length_allowed():
    records, _, _ = THREADS["another language ends the path above it"]
    assert threads(*records, english_only=False) == (["p a p2 a2"], {})
    tree = [P, A, message("p1", "a"), message("p2", "a"), message("a1", "p1")]
    assert threads(*tree, max_messages=2) == (["p a"], {"over_max_messages": 3})
    with refused("E102", "max_messages", "at least 1"):
        threads(*tree, max_messages=0)


def test_a_tokenizer_is_trained_on_each_message_once_and_on_other_languages_by_request(tmp_path):
    spanish = message("p2", "a", lang="es")
    root = mirror(tmp_path, train=[P, A, message("a2", "p"), spanish])

    def texts(english_only):
        settings = Settings(source_root=root, oasst1_english_only=english_only)
        return [text for some in training_texts(settings, ["oasst1"]) for text in some]

    assert texts(True) == [P["text"], A["text"], " a2\n"]
    assert texts(False) == [*texts(True), spanish["text"]]


def test_a_chain_deeper_than_the_recursion_limit_is_read():
    names = [f"{'pa'[depth % 2]}{depth}" for depth in range(5_000)]
    chain = [message(name, above) for name, above in zip(names, [None, *names[:-1]], strict=True)]
    assert threads(*chain, max_messages=10_000)[0] == [" ".join(names)]
    assert threads(*chain)[1] == {"over_max_messages": 5_000 - 32}


def tree(number):
    ids = {"message_tree_id": f"t{number}"}
    return [message(f"p{number}", None, **ids), message(f"a{number}", f"p{number}", **ids)]


def test_trees_come_in_order_of_their_first_message_even_when_interleaved(tmp_path):
    first, second = tree(1), tree(2)
    root = mirror(tmp_path, train=[first[0], second[0], first[1], second[1]])
    found = [[row["message_id"] for row in rows] for rows in iter_oasst1_trees(source_root=root)]
    assert found == [["p1", "a1"], ["p2", "a2"]]


def test_all_reads_both_upstream_splits(tmp_path):
    root = mirror(tmp_path, validation=tree(2), train=tree(1))
    chats = iter_oasst1_sft(split="all", shuffle_trees=False, source_root=root)
    assert [chat.messages[0].content for chat in chats] == ["p1", "p2"]


def test_the_shuffle_is_torchs_permutation_and_take_counts_trees(tmp_path):
    import torch

    root = mirror(tmp_path, train=[row for number in range(20) for row in tree(number)])
    for given, seed in (({}, 42), ({"seed": 7}, 7), ({"seed": 7, "take_trees": 3}, 7)):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(seed)).tolist()
        chats = iter_oasst1_sft(source_root=root, **given)
        expected = [f"t{number}" for number in order[: given.get("take_trees", 20)]]
        assert [chat.meta["message_tree_id"] for chat in chats] == expected


def test_the_threads_of_a_tree_end_with_a_reply_and_none_is_a_part_of_another():
    tree = [P, A, message("p2", "a"), message("p3", "a"), message("a4", "p3"), message("a5", "p"), message("p6", "a5")]
    counters = Counter()
    found = tree_threads(tree, counters=counters)
    assert [" ".join(thread.meta["message_ids"]) for thread in found] == ["p a p3 a4", "p a5"]
    assert [thread.meta["leaf_message_id"] for thread in found] == ["a4", "a5"]
    assert counters == {"cut_messages": 2}  # p2 and p6
    assert tree_threads([P, A, message("p2", "a"), message("p3", "a")])[0].meta["message_ids"] == ["p", "a"]
    assert tree_threads([P]) == []
