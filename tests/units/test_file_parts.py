"""Which files and units of files a partition has."""

import itertools

import pytest

from niels_gpt.data.files.part import FilePart, Share
from niels_gpt.documents import Partition

TOTALS = (2, 3, 8)


def test_files_go_round_where_there_are_enough_and_else_rows_do():
    enough = [FilePart(Partition(1, 3), files=7).share(file) for file in range(7)]
    assert enough == [None, Share(), None, None, Share(), None, None]
    few = [[FilePart(Partition(number, 3), files=2).share(file) for file in range(2)] for number in range(3)]
    assert few == [[Share(0, 3), Share(2, 3)], [Share(1, 3), Share(0, 3)], [Share(2, 3), Share(1, 3)]]
    assert [*Share(2, 3).numbers(1, 11)] == [3, 6, 9] and [*Share(2, 3).numbers(4, 6)] == []
    documents = [[FilePart(Partition(number, 3), 2).has_document(file) for number in range(3)] for file in range(2)]
    assert documents == [[True, False, False], [False, True, False]]


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("files", [1, 2, 3, 7, 8, 20])
def test_each_unit_is_in_one_partition(files, total):
    for file, unit in itertools.product(range(files), range(2 * total)):
        shares = [FilePart(Partition(number, total), files).share(file) for number in range(total)]
        assert sum(share is not None and share.has(unit) for share in shares) == 1
