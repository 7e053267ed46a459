"""Sft caches with loss bits, made of caches whose sentinels mark the same tokens, or of masks that a test gives."""

import json
import zlib

import numpy as np

from niels_gpt.cache.formats import target_mask, token_dtype_of
from niels_gpt.cache.meta import write_meta
from niels_gpt.storage.fileio import sha256_file
from support.disk import META_NAME, content_sha256, file_records

TEMPLATE = {"sha256": "ab" * 32, "mask_by": "generation", "loss_on": "assistant"}


def give_bits(cache, pad_id=0, special_token_ids=None):
    """Turn an sft cache of the project's template into one with bits that mark the same tokens; returns its folder.

    special_token_ids: what its meta.json says then; None: as before.
    """
    folder = cache.resolve()
    meta = json.loads((folder / META_NAME).read_bytes())
    sentinels = meta["special_token_ids"]
    masks = {}
    for split in ("train", "val"):
        ids = np.fromfile(folder / f"{split}_tokens.bin", token_dtype_of(meta, META_NAME))
        length = np.array([len(ids)])
        masks[split] = target_mask(ids[None], length, asst_id=sentinels["asst"], eot_id=sentinels["eot"])[0].tolist()
    return put_bits(folder, masks, pad_id, sentinels if special_token_ids is None else special_token_ids)


def put_bits(folder, masks, pad_id, special_token_ids):
    """Write the loss bits of an sft cache, and the keys of its meta.json that follow."""
    meta = json.loads((folder / META_NAME).read_bytes())
    meta["loss_bits"] = {}
    for split, mask in masks.items():
        raw = bytearray(-(-len(mask) // 8))
        for token, has_loss in enumerate(mask):
            raw[token // 8] |= has_loss << token % 8
        (folder / f"{split}_loss.bits").write_bytes(raw)
        meta["loss_bits"][split] = {"name": f"{split}_loss.bits"}
    meta |= {"chat_template": TEMPLATE, "pad_id": pad_id, "special_token_ids": special_token_ids}
    meta["supervised_tokens"] = {split: sum(mask) for split, mask in masks.items()}
    return sealed(folder, meta)


def sealed(folder, meta):
    """Write what follows from the bytes of a cache's files: their records, checksums and meta.json."""
    for record in meta.get("loss_bits", {}).values():
        path = folder / record["name"]
        record |= {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    blocks = b""
    for record in file_records(meta):
        if record["name"] != meta["checksums"]["name"]:
            content = (folder / record["name"]).read_bytes()
            pieces = (content[at : at + 65_536] for at in range(0, len(content), 65_536))
            blocks += b"".join(zlib.crc32(piece).to_bytes(4, "little") for piece in pieces)
    crc = folder / meta["checksums"]["name"]
    crc.write_bytes(blocks)
    meta["checksums"] |= {"bytes": len(blocks), "sha256": sha256_file(crc)}
    meta["content_sha256"] = content_sha256(file_records(meta))
    write_meta(str(folder / META_NAME), meta)
    return folder
