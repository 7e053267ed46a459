"""Read and write the files of a cache by the words of docs/formats.md: nothing of niels_gpt is imported here.

A test that damages a description, makes a version or looks for one names no function of the product for it.
"""

import hashlib
import json
import os
import re
import shutil
import zlib
from pathlib import Path

META_NAME, VERSIONS_DIR, LOCKS_NAME, LEASES_DIR = "meta.json", ".versions", ".locks.json", ".leases"
BLOCK_BYTES = 65_536
LEASE_BYTES = 1024
_CRC_LINE = re.compile(rb'(?<=\n  "meta_crc32": ")[^\n"]{8}(?=",?\n)')


# --- meta.json --------------------------------------------------------------------------------------------------------


def canonical_json(value):
    """utf-8, keys sorted, indented by 2, a newline at the end; letters beyond ASCII as they are."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def meta_bytes(meta):
    """A meta.json with the `meta_crc32` that fits, whether `meta` has one or not."""
    raw = canonical_json({**meta, "meta_crc32": "0" * 8})
    return _CRC_LINE.sub(b"%08x" % zlib.crc32(raw), raw, count=1)


def crc_fits(raw):
    """Whether the bytes of a meta.json have their `meta_crc32`; also true of one without it."""
    digits = _CRC_LINE.search(raw)
    return digits is None or digits[0] == b"%08x" % zlib.crc32(_CRC_LINE.sub(b"0" * 8, raw, count=1))


def read_meta(cache):
    """The meta.json of a cache: of its public name, a version or any folder."""
    meta = json.loads((cache / META_NAME).read_bytes())
    return meta


def write_meta(cache, meta):
    """Write the meta.json of a folder in the canonical form; a `meta_crc32` in it becomes the one that fits."""
    (cache / META_NAME).write_bytes(meta_bytes(meta) if "meta_crc32" in meta else canonical_json(meta))


def change_meta(cache, **keys):
    """Set keys of a cache's meta.json, as its author would: with a CRC-32 that fits."""
    write_meta(cache, {**read_meta(cache), **keys})


# --- the files that it names ------------------------------------------------------------------------------------------


def sha256(path):
    """The sha256 of a file in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def record_of(folder, name, **more):
    """The record of a file as it is."""
    path = folder / name
    return {"name": name, "bytes": path.stat().st_size, "sha256": sha256(path), **more}


def file_records(meta):
    """The records of all files in the order of their checksums, that of the checksums before `files`."""
    records = [record for split in sorted(meta.get("shards", {})) for record in meta["shards"][split]]
    for group in ("index", "ids", "loss_bits"):
        records += [meta[group][split] for split in sorted(meta.get(group, {}))]
    return records + ([meta["checksums"]] if "checksums" in meta else []) + meta.get("files", [])


def content_sha256(records):
    """The sha256 of the lines `<sha256>  <name>`, sorted by name: of what sha256sum prints."""
    lines = sorted((str(record["name"]), str(record["sha256"])) for record in records)
    return hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in lines).encode()).hexdigest()


def describe(folder, meta):
    """Write a meta.json that fits the files as they are: their records, checksums of blocks and content_sha256.

    Records keep their keys and their lists; what a file holds (`tokens`, `entries`) is the caller's to say.
    """
    checksums = meta.get("checksums")
    records = [record for record in file_records(meta) if record is not checksums]
    for record in records:
        record |= record_of(folder, record["name"])
    if checksums is not None:
        blocks = b"".join(checksums_of((folder / record["name"]).read_bytes()) for record in records)
        (folder / checksums["name"]).write_bytes(blocks)
        checksums |= record_of(folder, checksums["name"])
    meta["content_sha256"] = content_sha256(file_records(meta))
    write_meta(folder, meta)
    return meta


def checksums_of(content):
    """The CRC-32 of each block of a file, as index/crc32.bin has them."""
    blocks = (content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES))
    return b"".join(zlib.crc32(block).to_bytes(4, "little") for block in blocks)


# --- versions and the public link -------------------------------------------------------------------------------------


def versions_dir(path):
    """The folder of the versions, the lock and the unfinished builds of the cache with this public name."""
    return path.parent / VERSIONS_DIR / path.name


def version_path(path, content):
    """The folder of the version with this content_sha256."""
    return versions_dir(path) / content[:12]


def versions_of(path):
    """The names of the finished versions, sorted."""
    return sorted(entry.name for entry in versions_dir(path).iterdir() if re.fullmatch("[0-9a-f]{12}", entry.name))


def link(path, version):
    """Let a public name stand for a version: the link that is there is replaced in one step."""
    new = path.with_name(f".{path.name}.new")
    new.symlink_to(os.path.join(VERSIONS_DIR, path.name, version))
    new.replace(path)


def read_recipe(path):
    """The record of the recipe that made the committed version; {} without one."""
    record = versions_dir(path) / "recipe.json"
    return json.loads(record.read_bytes()) if record.exists() else {}


def unfinished(path):
    """The folders of builds that were not finished, without their journals."""
    return sorted(versions_dir(path).glob("building-" + "[0-9a-f]" * 12))


def journal_of(build):
    """The journal's folder of an unfinished build."""
    return build.with_name(f"{build.name}.journal")


def plan_folders(path):
    """The folders of a cache that is built in partitions and not sealed yet."""
    return sorted(versions_dir(path).glob("partitions-" + "[0-9a-f]" * 12))


def remove(path):
    """Remove a file, a link or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# --- leases -----------------------------------------------------------------------------------------------------------


def lock_by_leases(root):
    """Let the locks of a folder of caches be leases."""
    root.mkdir(parents=True, exist_ok=True)
    (root / LOCKS_NAME).write_bytes(canonical_json({"kind": "locks", "lock": "lease"}))


def lease_path(lock, number=1):
    """The file of a lease of a lock, in the nearest folder of caches above it whose locks are leases."""
    real = Path(os.path.realpath(lock))
    root = next(folder for folder in real.parents if (folder / LOCKS_NAME).exists())
    below = hashlib.sha256(os.fsencode(os.path.relpath(real, root))).hexdigest()[:16]
    return root / LEASES_DIR / f"{below}.{number}"


def lease_bytes(**keys):
    """What a lease's file holds; by default that of a process of a machine that is not there."""
    holder = {"token": "t", "counter": 1, "user": "u", "host": "elsewhere", "boot": "b", "pids": "p", "pid": 1}
    return json.dumps({"kind": "lease", **holder, **keys}).encode().ljust(LEASE_BYTES - 1) + b"\n"


def read_lease(path):
    """The keys of a lease."""
    keys = json.loads(path.read_bytes())
    return keys
