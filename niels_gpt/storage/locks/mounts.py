"""Whether a folder's file system passes flock(2) on to other machines, by its entry in /proc/self/mountinfo."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_MAX_BYTES = 1 << 24  # of mountinfo: a machine of 10,000 containers has about 8 MiB
_ESCAPE = re.compile(r"\\([0-7]{3})")
_LOCAL = frozenset(
    (
        *("apfs", "bcachefs", "btrfs", "ecryptfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "fuseblk"),
        *("fuse.fuse-overlayfs", "hfsplus", "jfs", "msdos", "ntfs3", "overlay", "ramfs", "reiserfs", "rootfs"),
        *("tmpfs", "udf", "ufs", "vfat", "xfs", "zfs"),
    )
)
_ALL_MACHINES = frozenset(
    ("ceph", "fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs", "gfs2", "gpfs", "lustre", "nfs", "nfs4", "ocfs2")
)
_ONE_MACHINE = {
    "nfs": ("nolock", "local_lock=flock", "local_lock=all"),
    "nfs4": ("local_lock=flock", "local_lock=all"),
    "lustre": ("localflock", "noflock"),
    "gfs2": ("localflocks",),
    "ocfs2": ("localflocks",),
}
"""Mount options with which only the machine that took a flock knows it."""
_NEEDED = {"lustre": "flock"}
"""Mount option without which other machines do not see a flock."""


class Mount(NamedTuple):
    """The file system of a folder, and the reach of its locks."""

    kind: str
    """The kernel's name for it: ext4, nfs4, fuse.sshfs; "" if the system does not say."""
    is_local: bool
    """Whether only one machine has it."""
    hidden: str
    """Why flock may not reach other machines, with the mount option; "" if it does, or if the file system is local."""


def mount_of(folder: Path) -> Mount:
    """Return the file system of a folder, or of the nearest folder above it that exists."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            lines = file.read(_MAX_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return Mount("", False, "")
    return mount_in(lines, os.path.realpath(folder))


def mount_in(lines: list[str], path: str) -> Mount:
    """Return the mount of a path from the lines of a mountinfo. path: absolute, without links."""
    longest, found = -1, Mount("", False, "")
    for line in lines:
        left, _, right = line.partition(" - ")
        parts, about = left.split(" "), right.split(" ")
        if len(parts) < 6 or not about[0]:
            continue
        place = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), parts[4]).rstrip("/")
        if (path + "/").startswith(place + "/") and len(place) >= longest:  # a later mount hides an earlier one
            longest, found = len(place), _judged(about[0], f"{parts[5]},{about[-1]}".split(","))
    return found


def _judged(kind: str, options: list[str]) -> Mount:
    if kind in _LOCAL:
        return Mount(kind, True, "")
    if kind not in _ALL_MACHINES:
        return Mount(kind, False, f"{kind} is not known to pass flock on to other machines")
    for option in _ONE_MACHINE.get(kind, ()):
        if option in options:
            return Mount(kind, False, f"{kind} is mounted with {option}, so flock does not leave the machine")
    needed = _NEEDED.get(kind)
    if needed and needed not in options:
        return Mount(kind, False, f"{kind} is mounted without {needed}, so flock does not leave the machine")
    return Mount(kind, False, "")
