"""User-defined rollouts: the forms of a row, which rows are one group, what is counted, and how reading resumes."""

import logging
from collections import Counter

import pytest
from support.data_files import groups_of_at_most, lines, write, write_parquet
from support.errors import refused

from niels_gpt.data import open_files, source_id


def groups_of(folder, *rows, counters=None):
    """Stream the groups of the folder, with the rows, if any, written to rows.jsonl in it first."""
    if rows:
        write(folder / "rows.jsonl", lines(*rows))
    return list(open_files(str(folder), rows_only=True).rollouts(source="own", counters=counters))


def plain(sample):
    """Return the fields of a sample that are given, as lists."""
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in vars(sample).items()}
    return {name: value for name, value in values.items() if value is not None}


ONE = {"ids": [1, 2, 7, 8], "prompt_length": 2, "loss_mask": [False, False, True, True]}
SCORED = {"logprobs": [-0.5, -1.0], "advantage": [0.25, 0.5], "reward": 2.0}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt_ids": [1, 2], "completions": [[7, 8]]}, ONE),
        ({"prompt_ids": [1, 2], "completion_ids": [7, 8], "ids": None}, ONE),
        ({"ids": [1, 2, 7, 8], "prompt_length": 2}, ONE),
        ({"ids": [1, 2, 7, 8]}, {"ids": [1, 2, 7, 8], "prompt_length": -1}),
        ({"ids": [1, 2, 7, 8], "mask": [0, 0, 1, 1]}, ONE | {"prompt_length": -1}),
        ({"prompt_ids": [], "completions": [[7, 8]]}, {"ids": [7, 8], "prompt_length": 0, "loss_mask": [True, True]}),
        (
            {"prompt_ids": [1, 2], "completions": [{"ids": [7, 8], "mask": [True, False]}]},
            ONE | {"loss_mask": [False, False, True, False]},
        ),
        (
            {
                "prompt_ids": [1, 2],
                "completions": [
                    {"ids": [7, 8], "logprobs": [-0.5, -1], "advantages": [0.25, 0.5], "reward": 2, "text": "x"}
                ],
            },
            ONE | SCORED,
        ),
        (
            {
                "prompt_ids": [1, 2],
                "completions": [[7, 8]],
                "logprobs": [[-0.5, -1.0]],
                "advantages": [[0.25, 0.5]],
                "rewards": [2.0],
                "mask": None,
            },
            ONE | SCORED,
        ),
        ({"prompt_ids": [1, 2], "completion_ids": [7, 8], "advantage": 0.5}, ONE | {"advantage": 0.5}),
    ],
)
def test_every_known_form_is_read(tmp_path, row, expected):
    ((sample,),) = (group.samples for group in groups_of(tmp_path, row))
    assert plain(sample) == expected


GROUP = {"prompt_ids": [1], "completions": [[2], [3]]}


@pytest.mark.parametrize(
    ("row", "reason", "found"),
    [
        ({"text": "Hi"}, "missing_field", "the fields text"),
        ({"prompt_ids": [1]}, "missing_field", "only prompt_ids"),
        ({"completions": [[1]]}, "missing_field", "only completions"),
        ({"ids": [1], "prompt_ids": [1]}, "missing_field", "only ids, prompt_ids"),
        ({**GROUP, "completion_ids": [1]}, "malformed", "both completions and completion_ids"),
        ({"prompt_ids": [1], "completions": []}, "malformed", "a list of 0 in the field completions"),
        ({"prompt_ids": [1], "completions": [[]]}, "malformed", "a list of 0 in place of the ids of completions[0]"),
        ({"prompt_ids": [1], "completions": [[2], "x"]}, "malformed", "a value of type str in place of the ids"),
        ({"ids": [1, True]}, "malformed", "True among the ids of ids"),
        ({"ids": [1, 2.0]}, "malformed", "2.0 among the ids"),
        ({"ids": [2**31]}, "malformed", "2147483648 among the ids"),
        ({"ids": [-1]}, "malformed", "-1 among the ids"),
        ({"ids": [1, 2], "mask": [1]}, "malformed", "a list of 1 in mask, for 2 ids"),
        ({"ids": [1, 2], "mask": [1, 2]}, "malformed", "2 in mask, not 0 or 1"),
        ({"ids": [1, 2], "mask": [0, 1], "loss_mask": [0, 1]}, "malformed", "both mask and loss_mask"),
        ({"ids": [1, 2], "prompt_length": 3}, "malformed", "prompt_length 3 for 2 ids"),
        ({"ids": [1, 2], "prompt_length": 1, "logprobs": [0, 0]}, "malformed", "a list of 2 in the field logprobs"),
        ({"ids": [1], "logprobs": [1e39]}, "malformed", "1e+39 in the field logprobs"),
        ({"ids": [1], "logprobs": [float("nan")]}, "malformed", "nan in the field logprobs"),
        ({"ids": [1], "advantage": 10**400}, "malformed", "in the field advantage"),
        ({"ids": [1], "advantage": "high"}, "malformed", "a value of type str in the field advantage"),
        ({**GROUP, "advantages": [1.0]}, "malformed", "a list of 1 in the field advantage for 2 completions"),
        ({**GROUP, "advantage": 1.0}, "malformed", "1.0 in the field advantage for 2 completions"),
        (
            {"prompt_ids": [1], "completions": [{"ids": [2], "reward": 1}], "rewards": [1]},
            "malformed",
            "reward in completions[0] and beside completions",
        ),
        ({**GROUP, "group": [1]}, "malformed", "a list of 1 in the field group"),
    ],
)
def test_other_rows_are_dropped_with_what_was_found(tmp_path, row, reason, found):
    with refused("E303", f"(1 {reason})", "rows.jsonl, row 1", found):
        groups_of(tmp_path, row)


def test_a_short_row_that_asks_for_many_tokens_is_dropped_before_they_are_allocated(
    tmp_path,
):
    with groups_of_at_most(100):
        (group,) = groups_of(tmp_path, {"prompt_ids": [1] * 49, "completions": [[2]] * 2})
        assert len(group.samples) == 2
        with refused("E303", "(1 too_large)"):
            groups_of(tmp_path, {"prompt_ids": [1] * 50, "completions": [[2]] * 2})


ROWS = [
    {"group": "a", "prompt_ids": [1], "completion_ids": [2]},
    {"group": "a", "prompt_ids": [1], "completion_ids": [3]},
    {"group": 7, "ids": [1, 4]},
    {"ids": "none"},
    {"group": 7, "ids": [1, 5]},
    {"id": "own", "prompt_ids": [1], "completions": [[2], [3]]},
    {"group": "own", "ids": [9]},
    {"ids": [9]},
    {"ids": [9]},
    {"ids": None},
]
NAMES = [("a", 2), ("7", 2), ("own", 2), ("own", 1), ("rows.jsonl#8", 1), ("rows.jsonl#9", 1)]


def names(groups):
    return [(source_id(group), len(group.samples)) for group in groups]


def test_consecutive_rows_of_a_group_are_gathered_and_bad_rows_counted(tmp_path, caplog):
    counters = Counter()
    assert names(groups_of(tmp_path, *ROWS, counters=counters)) == NAMES
    assert counters == {"malformed": 1, "missing_field": 1}
    first = f"{tmp_path}/rows.jsonl, row 4: found a value of type str in place of the ids of ids"
    assert caplog.records[0].getMessage().partition(". Counted")[0] == first
    assert caplog.records[0].levelno == logging.WARNING


def test_a_group_ends_with_its_file_and_parquet_is_the_same(tmp_path):
    both = tmp_path / "both"
    write(both / "a.jsonl", lines(*ROWS[:1]))
    write(both / "b.jsonl", lines(*ROWS[1:2]))
    assert names(groups_of(both)) == [("a", 1), ("a", 1)]
    rows = [{**row, "group": "a"} for row in ROWS[:2]]
    write_parquet(tmp_path / "table" / "rows.parquet", {name: [row[name] for row in rows] for name in rows[0]})
    (group,) = groups_of(tmp_path / "table")
    assert [plain(sample) for sample in group.samples] == [plain(one.samples[0]) for one in groups_of(both)]


def test_reading_resumes_behind_every_group_with_the_same_counts(tmp_path):
    write(tmp_path / "rows.jsonl", lines(*ROWS))
    found = open_files(str(tmp_path), rows_only=True)

    def read(counters, position):
        return found.rollouts(source="own", counters=counters, position=position)

    counters, position = Counter[str](), dict[str, int]()
    states = [(source_id(group), Counter(counters), dict(position)) for group in read(counters, position)]
    for at, (_, before, place) in enumerate(states, 1):
        again = Counter(before)
        assert names(list(read(again, dict(place)))) == NAMES[at:]
        assert again == counters


def test_nothing_usable_is_an_error_with_the_forms(tmp_path):
    with refused("E303", "1 rows", '"prompt_ids"'):
        groups_of(tmp_path, {"text": "Hi"})
    with refused("E303", "2 rows", "row 1: ", "of 2 in the field logprobs"):
        groups_of(tmp_path, {"ids": [1], "logprobs": [0, 0]}, {"text": "Hi"})
