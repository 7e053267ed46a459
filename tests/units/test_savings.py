"""What folding saves, as functions: rows are read one by one, and the curve of the picture."""

import io
import json
import sys
from pathlib import Path

import pytest
from support.errors import refused

from niels_gpt.commands.prefix_tree import read_rollouts
from niels_gpt.prefix_tree import plot, savings
from niels_gpt.prefix_tree.savings import count_savings, forests

# On paper. 1 2 | 10 11 | 20 21 22: 4 + 5 = 9 tokens become 7. Each token sees what stands above it and itself, so
# 10 + 15 = 25 pairs become 3 + (3 + 4) + (3 + 4 + 5) = 22; a dense mask has 7 * 7 = 49.
APART = {"prompt_ids": [1, 2], "completions": [[10, 11], [20, 21, 22]], "rewards": [0.5, 1], "id": "a"}
# 5 7 | 8: a duplicate, and a prefix of both. 3 + 3 + 2 = 8 tokens become 3, 6 + 6 + 3 = 15 pairs 6, of 9.
ALIKE = {"prompt_ids": [5], "completions": [[7, 8], [7, 8], [7]], "id": "b"}
NOTHING = {"prompt_ids": [], "completions": [[1, 2], [3]]}  # shares nothing, and has no first token to lose


def lines_of(content):
    """Return the lines of a content as if it came from the standard input."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return list(read_rollouts(["-"]))


def test_the_curve_falls_from_the_forest_that_gains_most(monkeypatch):
    pytest.importorskip("matplotlib", reason="the extra `plot` brings it")
    figures = []
    monkeypatch.setattr(plot, "png", lambda figure, *_: figures.append(figure) or b"")
    content = "\n".join(map(json.dumps, [APART, ALIKE, NOTHING])).encode()
    plot.plot(count_savings(forests(lines_of(content))), "x")
    tokens, flops, _ = figures[0].axes[0].lines
    assert tokens.get_ydata().tolist() == [8 / 3, 9 / 7, 1]
    assert flops.get_ydata().tolist() == sorted(flops.get_ydata(), reverse=True)
    assert tokens.get_xdata().tolist() == pytest.approx([100 / 6, 50, 500 / 6])


def test_files_are_read_line_by_line_and_tell_how_far(tmp_path):
    path = str(tmp_path / "many.jsonl")
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in [APART, ALIKE] * 300))
    told = []
    folded = forests(read_rollouts([path, path], progress=lambda *progress: told.append(progress)))
    assert next(folded).forest.num_tokens == 7
    assert told == [(1, 9, None)]  # one line further than the forest
    assert sum(1 for _ in folded) == 1199
    assert told[-1] == (1200, 600 * 17, None)


def test_no_forest_has_more_tokens_than_a_group_of_a_cache(monkeypatch):
    monkeypatch.setattr(savings, "MAX_SAMPLE_TOKENS", 10)
    rows = [{"ids": [1, 2, number, 4]} for number in range(5)]
    found = lines_of("\n".join(map(json.dumps, rows)).encode())
    assert [len(each.lines) for each in forests(found, rows=0)] == [2, 2, 1]
    named = lines_of("\n".join(json.dumps({**row, "group": 1}) for row in rows).encode())
    with refused("E804", "-:3: found a group of more than 10 tokens"):
        list(forests(named))
