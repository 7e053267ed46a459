"""What stopped runs left beside a folder is named, and nothing of it is removed."""

import logging

import pytest

from niels_gpt.storage.fresh_folder import fresh_folder


def test_folders_of_stopped_runs_are_named(tmp_path, caplog):
    out, left = tmp_path / "my [x]", tmp_path / ".my [x].0a1b2c3d.tmp"
    left.mkdir()
    (tmp_path / ".my [x].0000000f.tmp").symlink_to(left)
    for name in (".my x.0a1b2c3d.tmp", ".my [x].0a1b.tmp", ".other.my [x].0a1b2c3d.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / ".my [x].1a1b2c3d.tmp").touch()
    with pytest.raises(KeyError), fresh_folder(out):
        caplog.clear()
        with fresh_folder(out):  # the other one is held
            pass
        raise KeyError
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.__dict__["code"] == "W704"
    assert record.getMessage().endswith(f"remove them: rm -r '{left}'")
    assert left.is_dir() and out.is_dir() and len([*tmp_path.iterdir()]) == 7
