"""What is left on a disk after a record of operations was cut anywhere: by kill -9, or by a loss of power.

A file system is modelled by what POSIX says of fsync, and by a rename that is one step. What a file holds is durable up
to its last fsync. What a folder holds, that is which name stands for what, is durable up to the folder's last fsync.
Three models of a cut behind operation n:

    kill    every one of the n operations has happened: the kernel lives on
    power   what is durable, and nothing else
    mixed   what is durable, and of the rest some operations, by a seed: kernels write back when they like. A name that
            changed twice has not the second change without the first; a file that lost a write in its middle has zeros
            there, and of its last write perhaps only a half
"""

from __future__ import annotations

import os
import random
from contextlib import contextmanager
from dataclasses import dataclass, field

from niels_gpt.storage import fileio

MODELS = ("kill", "power", "mixed")
Tree = dict[str, bytes | str | None]
"""Relative path -> bytes of a file, target of a symlink, None for a folder."""


@dataclass(eq=False)
class File:
    """What a file holds now, what it held at its last fsync, and (offset, bytes) or (size, None) since then."""

    content: bytes = b""
    synced: bytes = b""
    since: list[tuple[int, bytes | None]] = field(default_factory=list)

    def change(self, offset, content):
        self.content = _changed(self.content, offset, content)
        self.since.append((offset, content))

    def sync(self):
        self.synced, self.since = self.content, []

    def left(self, model, chance):
        if model == "kill":
            return self.content
        found = self.synced
        for number, (offset, content) in enumerate(self.since if model == "mixed" else []):
            kept = chance.random()
            if content is not None and number == len(self.since) - 1 and kept < 1 / 3:
                found = _changed(found, offset, content[: len(content) // 2])  # torn
            elif kept < 2 / 3:
                found = _changed(found, offset, content)
        return found


@dataclass(eq=False)
class Link:
    """A symlink."""

    target: str


@dataclass(eq=False)
class Folder:
    """What each name stands for now, and what it stands for after a loss of power."""

    names: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)


Node = File | Link | Folder
Change = list[tuple[Folder, str, Node | None]]
"""What one operation does to names, in one step: a rename changes two."""


class Disk:
    """A folder on a disk, to which operations of a record are applied."""

    def __init__(self, before):
        """before: what there is before the first operation; all of it is durable."""
        self._top = Folder()
        self._waiting = []
        for path, content in sorted(before.items()):
            folder, name = self._place(path)
            node = File(content, content) if isinstance(content, bytes) else Folder()
            folder.names[name] = folder.durable[name] = Link(content) if isinstance(content, str) else node

    def apply(self, operations):
        """Do to the model what was done to the disk. Paths are relative: see `below`."""
        for verb, path, *rest in operations:
            if verb == "fsync_dir":
                self._sync_names(path)
            elif verb in ("write", "cut", "fsync"):
                file = self._node(path)
                assert isinstance(file, File), path
                if verb == "fsync":
                    file.sync()
                else:
                    file.change(rest[0], rest[1] if verb == "write" else None)
            else:
                self._change_names(self._change(verb, path, *rest))

    def left(self, model, seed=0):
        """Return what a cut at this moment leaves."""
        chance = random.Random(seed)
        names = {id(folder): dict(folder.names if model == "kill" else folder.durable) for folder in self._folders()}
        if model == "mixed":
            lost = set()
            for change in self._waiting:
                touched = {(id(folder), name) for folder, name, _ in change}
                if touched & lost or chance.random() < 1 / 2:
                    lost |= touched
                else:
                    for folder, name, node in change:
                        _set(names[id(folder)], name, node)
        tree = {}
        stack = [("", self._top)]
        while stack:
            prefix, folder = stack.pop()
            for name, node in sorted(names[id(folder)].items()):
                if isinstance(node, Folder):
                    tree[prefix + name] = None
                    stack.append((f"{prefix}{name}/", node))
                else:
                    tree[prefix + name] = node.target if isinstance(node, Link) else node.left(model, chance)
        return tree

    def _change(self, verb, path, new=""):
        folder, name = self._place(path)
        if verb == "rename":
            return [(folder, name, None), (*self._place(new), folder.names[name])]
        made = {"create": File(), "mkdir": Folder(), "symlink": Link(new)}
        assert (verb in made) != (name in folder.names), f"{verb} {path}"
        return [(folder, name, made.get(verb))]

    def _change_names(self, change):
        for folder, name, node in change:
            _set(folder.names, name, node)
        self._waiting.append(change)

    def _sync_names(self, path):
        """Make durable what changed in a folder, the other side of a rename, and what came before on these names."""
        folder = self._top if path == "." else self._node(path)
        wanted = {(id(folder), name) for change in self._waiting for where, name, _ in change if where is folder}
        done = []
        for change in reversed(self._waiting):
            touched = {(id(where), name) for where, name, _ in change}
            if touched & wanted:
                wanted |= touched
                done.insert(0, change)
        for change in done:
            self._waiting.remove(change)
            for where, name, node in change:
                _set(where.durable, name, node)

    def _node(self, path):
        folder, name = self._place(path)
        return folder.names[name]

    def _place(self, path):
        *above, name = path.split("/")
        folder = self._top
        for part in above:
            below = folder.names[part]
            assert isinstance(below, Folder), path
            folder = below
        return folder, name

    def _folders(self):
        """Yield all folders that some model may reach."""
        found = [self._top]
        seen = set()
        found += [node for change in self._waiting for folder, _, new in change for node in (folder, new)]
        while found:
            folder = found.pop()
            if isinstance(folder, Folder) and id(folder) not in seen:
                seen.add(id(folder))
                found += [*folder.names.values(), *folder.durable.values()]
                yield folder


def below(root, trace):
    """Return a record with paths that are relative to a folder; the folder itself is "."."""
    return [
        (verb, os.path.relpath(path, root), *(os.path.relpath(new, root) if verb == "rename" else new for new in rest))
        for verb, path, *rest in trace
    ]


def recorded_below(root, build):
    """Return the record of a build, with relative paths as `below` makes them."""
    trace = []
    with fileio.recorded(trace):
        build()
    return below(root, trace)


@contextmanager
def recording():
    """The record of what is done to the disk in the block, with whole paths; it grows meanwhile."""
    trace = []
    with fileio.recorded(trace):
        yield trace


def tree_of(root):
    """Return what a folder holds."""
    return {
        str(path.relative_to(root)): os.readlink(path)
        if path.is_symlink()
        else None
        if path.is_dir()
        else path.read_bytes()
        for path in root.rglob("*")
    }


def put(tree, root):
    """Make a folder that holds what was left."""
    root.mkdir(parents=True)
    for name, content in sorted(tree.items()):
        if content is None:
            (root / name).mkdir()
        elif isinstance(content, str):
            (root / name).symlink_to(content)
        else:
            (root / name).write_bytes(content)


def _set(names, name, node):
    names.pop(name, None)
    if node is not None:
        names[name] = node


def _changed(content, offset, new):
    """Return a file's content after a write at an offset, or after it was cut (or grown by zeros) to that size."""
    if new is None:
        return content[:offset].ljust(offset, b"\0")
    return content[:offset].ljust(offset, b"\0") + new + content[offset + len(new) :]
