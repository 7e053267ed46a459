"""Loaders: what each source yields, skips and counts."""

import dataclasses

import pytest
from support.data_files import lines, write, write_parquet
from support.errors import refused

from niels_gpt.data import ChatMessage, PretrainSample
from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.data.gutenberg import iter_gutenberg
from niels_gpt.data.oasst1 import iter_oasst1_sft
from niels_gpt.data.roam import list_roam_paths, load_texts, roam_dir_of, split_roam_paths
from niels_gpt.data.wikitext import iter_wikitext, load_wikitext

pytestmark = pytest.mark.filterwarnings("error")
WEB, WIKI, DOLLY = "HuggingFaceFW/fineweb-edu", "Salesforce/wikitext", "databricks/databricks-dolly-15k"


def qa(instruction="Q", response="A", **more):
    return {"instruction": instruction, "context": "", "response": response, "category": "open_qa"} | more


def test_the_text_is_the_first_of_text_content_document_that_is_a_string(tmp_path, caplog, counters):
    rows = [{"document": "d e", "content": "c", "text": "t"}, {"document": "d e", "content": "c"}]
    rows += [{"text": None, "document": ""}, {"body": "b", "text": 3}]
    path = write(tmp_path / WEB / "a.jsonl", lines(*rows))
    assert [page.text for page in iter_fineweb_edu(source_root=tmp_path, counters=counters)] == ["t", "c", ""]
    assert counters == {"missing_field": 1, "other_text_field": 2}
    assert f"{path}, row 4" in caplog.text and "found int in the field text" in caplog.text


def test_a_mirrors_pages_come_in_file_order_with_small_fields_as_meta(tmp_path):
    write(tmp_path / WEB / "b.jsonl", lines({"text": "", "id": "3"}))
    row = {"text": " one\r\n", "id": "1", "score": 2.5, "long": "x" * 2_000, "nested": {"a": 1}}
    write(tmp_path / WEB / "a.jsonl", lines(row, {"text": "two", "id": "2"}))
    pages = list(iter_fineweb_edu(source_root=tmp_path))
    assert pages[0] == PretrainSample(" one\r\n", "fineweb_edu", {"id": "1", "score": 2.5, "index": 0})
    assert [(page.text, page.meta["index"]) for page in pages[1:]] == [("two", 1), ("", 2)]


def test_take_ends_the_stream_early_without_reading_on(tmp_path):
    write(tmp_path / WEB / "a.jsonl", '{"text": "one"}\nnot json\n')
    assert [page.text for page in iter_fineweb_edu(take=1, source_root=tmp_path)] == ["one"]
    assert list(iter_fineweb_edu(take=0, source_root=tmp_path)) == []
    with refused("E102", "-1"):
        iter_fineweb_edu(take=-1, source_root=tmp_path)


def test_wikitext_lines_keep_their_newline_and_blank_ones_are_counted(tmp_path, counters):
    write(tmp_path / WIKI / "validation.txt", " \n = Title = \n\n Text . \n")
    lines = list(iter_wikitext(split="val", source_root=tmp_path, counters=counters))
    assert [(line.text, line.meta) for line in lines] == [(" = Title = \n", {"index": 1}), (" Text . \n", {"index": 3})]
    assert counters == {"blank": 2}


def test_a_folder_named_like_the_config_is_read_alone(tmp_path):
    write(tmp_path / WIKI / "test.txt", "outside\n")
    write(tmp_path / WIKI / "wikitext-2-raw-v1/test.txt", "inside\n")
    (line,) = iter_wikitext(config="wikitext-2-raw-v1", split="test", source_root=tmp_path)
    assert line.text == "inside\n"


def test_load_wikitext_gives_three_lists():
    splits = load_wikitext(source_root="sample", take=2)
    assert {name: len(lines) for name, lines in splits.items()} == {"train": 2, "val": 2, "test": 2}


def test_notes_are_listed_by_relative_path_without_hidden_ones(tmp_path):
    for name in ("b.md", "a/c.md", ".git/x.md", ".trash.md", "z.txt", "B.md", "é.md"):
        write(tmp_path / name, name)
    assert list_roam_paths(tmp_path) == [str(tmp_path / name) for name in ("B.md", "a/c.md", "b.md", "é.md")]


def test_note_texts_stream_with_bad_bytes_replaced(tmp_path, counters):
    paths = [write(tmp_path / "a.md", b"caf\xe9"), write(tmp_path / "b.md", "b\r\n"), tmp_path / "absent.md"]
    texts = load_texts(paths, counters=counters)
    assert [next(texts), next(texts)] == ["caf\ufffd", "b\r\n"]
    assert counters == {"repaired_utf8": 1}


def test_the_roam_split_is_a_tenth_by_torchs_permutation_in_the_given_order():
    import torch

    paths = [f"{number:02d}.md" for number in range(25)]
    train, val = split_roam_paths(paths, seed=7)
    order = torch.randperm(25, generator=torch.Generator().manual_seed(7))
    assert val == sorted(paths[index] for index in order[:2]) and train == [path for path in paths if path not in val]


def test_fewer_than_two_notes_or_no_share_leave_nothing_for_val():
    assert split_roam_paths([], seed=0) == ([], [])
    assert split_roam_paths(["a"], seed=0) == (["a"], [])
    assert split_roam_paths(["a", "b"], val_frac=0, seed=0) == (["a", "b"], [])
    for val_frac in (-0.1, 1.0, float("nan")):
        with refused("E102", "val_frac", str(val_frac), "at least 0"):
            split_roam_paths(["a", "b"], val_frac=val_frac, seed=0)


def test_the_notes_folder_depends_on_the_source_root(tmp_path):
    (tmp_path / "roam").mkdir()
    assert roam_dir_of(tmp_path, roam_dir="ignored") == tmp_path / "roam"
    assert roam_dir_of("hub", roam_dir=tmp_path) == tmp_path
    with refused("E301", str(tmp_path / "absent"), "--roam-dir", kind=FileNotFoundError):
        roam_dir_of("hub", roam_dir=tmp_path / "absent")


def test_a_text_file_is_one_whole_book_and_a_table_has_one_a_row(tmp_path):
    write(tmp_path / "gutenberg/1342-0.txt", "Line one\r\nLine two\r\n")
    write(tmp_path / "gutenberg/more.jsonl", lines({"content": "Book two", "title": "T"}))
    first, second = iter_gutenberg(source_root=tmp_path)
    assert first == PretrainSample("Line one\r\nLine two\r\n", "gutenberg", {"path": "1342-0.txt", "index": 0})
    assert second == PretrainSample("Book two", "gutenberg", {"title": "T", "index": 1})


def test_dolly_rows_become_a_user_and_an_assistant_turn(tmp_path):
    write(tmp_path / DOLLY / "a.jsonl", lines(qa(" Q? ", "A!\n")))
    (chat,) = iter_dolly_sft(source_root=tmp_path)
    assert chat.messages == [ChatMessage("user", " Q? "), ChatMessage("assistant", "A!\n")]
    assert (chat.source, chat.meta) == ("dolly15k", qa(" Q? ", "A!\n") | {"index": 0})


@pytest.mark.parametrize(("context", "user"), [("C", "Q\n\ncontext:\nC"), (" \n", "Q"), (None, "Q")])
def test_a_context_follows_the_instruction_unless_blank(tmp_path, context, user):
    write(tmp_path / DOLLY / "a.jsonl", lines(qa(context=context)))
    (chat,) = iter_dolly_sft(include_system=True, source_root=tmp_path)
    assert chat.messages[0] == ChatMessage("system", "you are a helpful assistant.")
    assert chat.messages[1] == ChatMessage("user", user)


def test_unusable_dolly_rows_are_counted_and_do_not_shift_the_index(tmp_path, counters):
    rows = [qa(response=" "), qa(instruction=None), {"response": "A"}, qa(context=["C"]), qa()]
    write(tmp_path / DOLLY / "a.jsonl", lines(*rows))
    (chat,) = iter_dolly_sft(shuffle=False, source_root=tmp_path, counters=counters)
    assert chat.meta["index"] == 4
    assert counters == {"blank_field": 1, "missing_field": 3}


def test_dolly_without_shuffle_streams_and_with_it_follows_torch(tmp_path):
    import torch

    write(tmp_path / DOLLY / "a.jsonl", lines(*(qa(response=str(number)) for number in range(9))))
    wanted = torch.randperm(9, generator=torch.Generator().manual_seed(3)).tolist()
    assert [chat.meta["index"] for chat in iter_dolly_sft(seed=3, source_root=tmp_path)] == wanted
    assert [chat.meta["index"] for chat in iter_dolly_sft(shuffle=False, take=2, source_root=tmp_path)] == [0, 1]


def test_samples_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PretrainSample("a", "b").text = "c"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    # After a streamed shuffle the library waits 5 seconds for PyArrow's threads to end.
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.1, raising=False)
    datasets.disable_progress_bars()
    return tmp_path / "repository"


def put_config(hub, name, pattern, split="train"):
    """Name a config as a hub repository does, in the front matter of its card."""
    data_file = f'{{split: {split}, path: "{pattern}"}}'
    write(hub / "README.md", f"---\nconfigs:\n- config_name: {name}\n  data_files:\n  - {data_file}\n---\n")


def test_fineweb_streams_through_the_hub_librarys_own_shuffle(hub):
    import datasets

    put_config(hub, "CC-MAIN-2024-10", "data/*.parquet")
    write_parquet(hub / "data/train-00000.parquet", {"text": [f"page {number}" for number in range(50)]})
    pages = [page.text for page in iter_fineweb_edu(dataset_id=str(hub), shuffle_buffer_size=10, seed=3)]
    rows = datasets.load_dataset(str(hub), "CC-MAIN-2024-10", split="train", streaming=True)
    assert pages == [row["text"] for row in rows.shuffle(seed=3, buffer_size=10)]
    assert pages != sorted(pages) and len(set(pages)) == 50


def test_fineweb_without_shuffle_keeps_upstream_order(hub):
    put_config(hub, "CC", "*.parquet")
    write_parquet(hub / "train.parquet", {"text": ["one", "two", "three"], "id": ["id0", "id1", "id2"]})
    for streaming in (True, False):
        pages = iter_fineweb_edu(name="CC", dataset_id=str(hub), shuffle=False, streaming=streaming, take=2)
        assert [(page.text, page.meta) for page in pages] == [
            ("one", {"id": "id0", "index": 0}),
            ("two", {"id": "id1", "index": 1}),
        ]


def test_fineweb_downloaded_whole_is_shuffled_by_seed_too(hub):
    put_config(hub, "CC", "*.parquet")
    write_parquet(hub / "train.parquet", {"text": [str(number) for number in range(20)]})

    def order(seed):
        return [page.text for page in iter_fineweb_edu(name="CC", dataset_id=str(hub), streaming=False, seed=seed)]

    assert order(1) == order(1) != order(2)


def test_books_and_lines_of_wikitext_with_their_newline_come_from_the_hub(hub):
    write(hub / "train.jsonl", lines({"text": "Book one", "title": "One"}))
    (book,) = iter_gutenberg(dataset_id=str(hub))
    assert book == PretrainSample("Book one", "gutenberg", {"title": "One", "index": 0})
    put_config(hub, "raw", "v.parquet", split="validation")
    write_parquet(hub / "v.parquet", {"text": ["", " = Title = \n"]})
    (line,) = iter_wikitext(config="raw", split="val", dataset_id=str(hub))
    assert (line.text, line.meta) == (" = Title = \n", {"index": 1})


def test_dolly_from_the_hub_equals_dolly_from_a_mirror(hub, tmp_path):
    rows = [qa(f"Q{number}", f"A{number}") for number in range(5)]
    write(hub / "train.jsonl", lines(*rows))
    write(tmp_path / DOLLY / "a.jsonl", lines(*rows))
    assert list(iter_dolly_sft(split="all", dataset_id=str(hub))) == list(iter_dolly_sft(source_root=tmp_path))


def test_oasst1_reads_both_hub_splits(hub):
    for split, number in (("train", 1), ("validation", 2)):
        ids = {"message_tree_id": f"t{number}", "lang": "en", "deleted": False}
        root = {"message_id": f"p{number}", "parent_id": None, "text": "Q", "role": "prompter", **ids}
        reply = {"message_id": f"a{number}", "parent_id": f"p{number}", "text": "A", "role": "assistant", **ids}
        write(hub / f"{split}.jsonl", lines(root, reply))
    chats = list(iter_oasst1_sft(split="all", shuffle_trees=False, dataset_id=str(hub)))
    assert [chat.meta["message_ids"] for chat in chats] == [["p1", "a1"], ["p2", "a2"]]
