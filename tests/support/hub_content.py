"""What a loopback hub holds: repositories with their commits, requests, and the faults to make."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

import yaml


@dataclass(frozen=True)
class Request:
    """One request as the log keeps it."""

    method: str
    path: str
    """Decoded, without the query."""
    range: str | None
    status: int
    """0 where nothing was answered."""


@dataclass
class Fault:
    """What happens to the next `times` requests whose path contains `path`; see the methods of LoopbackHub."""

    kind: str
    """status, foreign, cut, stall, unsized, chunked or whole."""
    path: str = ""
    method: str | None = None
    times: float = 1
    """infinity: for good."""
    passing: int = 0
    """Requests let through first."""
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    after: int = 0
    """Bytes of the body that are still sent."""
    seconds: float = 0.0
    reset: bool = False
    """Whether the connection ends with RST instead of FIN."""

    def fits(self, method, path, *, body):
        about = self.path in path and self.method in (None, method) and (self.kind not in ("status", "foreign")) == body
        return about and self.times > 0


@dataclass
class Repository:
    """A dataset or model on the hub: commits by sha, names of commits, and who may read."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False


def card_data(files):
    found = re.match(r"---\n(.*?)\n---", files.get("README.md", b"").decode(), re.DOTALL)
    return yaml.safe_load(found[1]) if found else None


def git_id(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def file_entry(path, content):
    """Describe a file as the tree does; parquet files, gzip files and weights are LFS files."""
    entry = {"type": "file", "oid": git_id(content), "size": len(content), "path": path}
    if path.endswith((".parquet", ".gz", ".safetensors", ".bin")):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry
