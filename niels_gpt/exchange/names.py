"""The names of the formats, and how their own tools read them. Nothing here loads numpy: `--help` names them."""

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
"""By format: a line of Python that opens the first file of tokens."""
FORMAT_NAMES = tuple(READ_LINES)
"""What --to and --from take: the keys of `formats.FORMATS`, in their order."""


def read_line(out: str, manifest: Mapping[str, Any]) -> str:
    """Return the line of Python that opens the first file of tokens of an export; "" of one without tokens.

    out: the folder. manifest: its niels_gpt.json.
    """
    names = [str(record["name"]) for record in manifest["files"] if record.get("of")]
    if not names:
        return ""
    width = 4 if str(manifest["cache"]["token_dtype"]).startswith("uint32") else 2
    file = f"{out}/{names[0]}"
    about = {"out": out, "file": file, "folder": file.rpartition("/")[0], "stem": file.rpartition(".")[0]}
    return READ_LINES[str(manifest["format"])].format(**about, width=width, dtype=f"uint{8 * width}")
