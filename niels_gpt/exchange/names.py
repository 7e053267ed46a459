"""Name the formats, and the call that opens each in its own tool. Loads no numpy, because --help shows the names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

READ_LINES = {
    "nanogpt": 'np.memmap("{file}", dtype="{dtype}", mode="r")',
    "modded-nanogpt": 'np.memmap("{file}", dtype="{dtype}", mode="r", offset=1024)',
    "megatron": 'megatron.core.datasets.indexed_dataset.IndexedDataset("{stem}")',
    "datatrove": 'datatrove.utils.dataset.DatatroveFileDataset("{file}", seq_len=2048, token_size={width})',
    "olmo": 'np.memmap("{file}", dtype="{dtype}", mode="r")  # or olmo_core.data.NumpyFSLDataset("{file}", ...)',
    "litdata": 'litdata.StreamingDataset("{folder}", item_loader=litdata.TokensLoader(block_size=2049))',
    "hf": 'datasets.load_dataset("parquet", data_dir="{out}")',
}
"""A line of Python that opens the first token file, by format."""
FORMAT_NAMES = tuple(READ_LINES)
"""Values of --to and --from: the keys of `formats.FORMATS`, in their order."""
MASK_NAMES = ("loss_mask", "label_mask", "assistant_masks", "completion_mask")
"""Columns of 0 and 1 that tell which tokens carry loss, in rows. An import takes the first that a file has."""


def read_line(out: str, manifest: Mapping[str, Any]) -> str:
    """Return a line of Python that opens the first token file of an export; "" if it has none.

    out: folder of the export. manifest: its niels_gpt.json.
    """
    names = [str(record["name"]) for record in manifest["files"] if record.get("of")]
    if not names:
        return ""
    width = 4 if str(manifest["cache"]["token_dtype"]).startswith("uint32") else 2
    file = f"{out}/{names[0]}"
    about = {"out": out, "file": file, "folder": file.rpartition("/")[0], "stem": file.rpartition(".")[0]}
    return READ_LINES[str(manifest["format"])].format(**about, width=width, dtype=f"uint{8 * width}")
