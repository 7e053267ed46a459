"""Which files and rows of a source a partition has: decided only by the number of partitions and the source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from niels_gpt.documents import Partition

PARTITION_RULE = (
    "of n files in the loader's order (of each upstream split, where upstream has splits), file f from 0 is in "
    "partition f mod P where n is at least P. Where n is less, unit u from 0 of file f is in partition (u + f) mod P: "
    "a unit is a row, or a row group of a parquet file that has at least P of them, or the whole of a file that is one "
    "document. On the hub, where n is less, row r from 0 of the split is in partition r mod P"
)
"""The rule in words, for plan.json and meta.json."""
_READS_ALL = "; else every partition reads all of them, and "
GROUPS_RULE = (
    "of n files in the loader's order, file f from 0 is in partition f mod P where n is at least P"
    f"{_READS_ALL}group g from 0 of file f is in partition (g + f) mod P, with what was left out before it"
)
"""The rule for recorded rollouts: consecutive rows may be one group, which belongs to one partition."""
TREES_RULE = "every partition reads all messages; tree t from 0, by its first message, is in partition t mod P"
"""The rule for message trees, whose messages may be anywhere."""


class Share(NamedTuple):
    """Every `step`-th unit of a file, from unit `first`: a unit is a row, or a row group of a parquet file."""

    first: int = 0
    """From 0."""
    step: int = 1

    def numbers(self, start: int, stop: int) -> range:
        """Return the row numbers in this share from `start` to before `stop`. Rows are numbered from 1."""
        return range(start + (self.first + 1 - start) % self.step, stop, self.step)

    def has(self, unit: int) -> bool:
        """Return whether a unit, from 0, is in the share. Facts that are counted once in a file belong to unit 0."""
        return unit % self.step == self.first


WHOLE_FILE = Share()


@dataclass(frozen=True)
class FilePart:
    """A partition's part of a list of files; without a partition all of them."""

    partition: Partition | None
    files: int
    """Number of all files in the list."""

    def share(self, file: int) -> Share | None:
        """Return the partition's share of a file, from 0; None for no share."""
        if self.partition is None:
            return WHOLE_FILE
        first = (self.partition.number - file) % self.partition.total
        if self.files < self.partition.total:
            return Share(first, self.partition.total)
        return None if first else WHOLE_FILE

    def has_group(self, file: int, group: int) -> bool:
        """Return whether the partition has a group of rows. file, group: from 0."""
        if self.partition is None or self.reads_alone:
            return True
        return (group + file) % self.partition.total == self.partition.number

    @property
    def reads_alone(self) -> bool:
        """Whether no other partition reads the same files, where partitions share groups of rows."""
        return self.partition is None or self.files >= self.partition.total

    def has_document(self, file: int) -> bool:
        """Return whether the partition has a file, from 0, that is one document."""
        share = self.share(file)
        return share is not None and share.has(0)


def is_first(partition: Partition | None) -> bool:
    """Return whether this partition counts facts that belong to no row: partition 0, or a build without partitions."""
    return partition is None or partition.number == 0
