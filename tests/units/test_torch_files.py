"""Files of tensors that other tools wrote: what is no plain tensor, or larger than its file, is refused unread."""

import gzip
import pickle
import zipfile

import pytest
import torch

from niels_gpt.eagle3.format.torch_files import inflate, load_tensors


def test_a_torch_file_never_takes_more_than_its_own_size(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save({"x": torch.zeros(4).expand(1 << 40, 4)}, path)
    with pytest.raises(ValueError, match=r"x is no plain tensor: torch.float32 \[1099511627776, 4\]"):
        load_tensors(path, ("x",))
    torch.save({"x": torch.zeros(1 << 14)}, path)
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "b.ckpt", "w", zipfile.ZIP_DEFLATED) as packed:
        for member in whole.infolist():
            packed.writestr(member.filename, whole.read(member))
        packed.comment = bytes(60_000)  # to be as large as its members
    with pytest.raises(ValueError, match=r"compressed, expected .*, none compressed"):
        load_tensors(tmp_path / "b.ckpt", ("x",))
    with zipfile.ZipFile(tmp_path / "d.ckpt", "w") as made:
        made.writestr("a/data.pkl", b"cbuiltins\nbytearray\n" + pickle.dumps((1 << 40,), 2)[2:-1] + b"R.")
        made.writestr("a/version", "3")
    with pytest.raises(ValueError, match="its pickle names 'builtins bytearray'"):
        load_tensors(tmp_path / "d.ckpt", ("x",))
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(1 << 20)))
    refused = pytest.raises(ValueError, match="bytes of gzip inflate to more than")
    with open(tmp_path / "bomb.gz", "rb") as bomb, open(tmp_path / "out", "wb") as out, refused:
        inflate(bomb, out, ratio_from=1 << 16)
    refused = pytest.raises(OSError, match="No space left")  # no fault of the sample
    with open(tmp_path / "bomb.gz", "rb") as bomb, open("/dev/full", "wb", buffering=0) as out, refused:
        inflate(bomb, out)
    (tmp_path / "c.ckpt.gz").write_bytes(gzip.compress(path.read_bytes())[:-9])
    with pytest.raises(ValueError, match="no whole gzip stream"):
        load_tensors(tmp_path / "c.ckpt.gz", ("x",))
