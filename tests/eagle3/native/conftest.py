"""The command precompute for native caches."""

from collections.abc import Callable

import pytest

from niels_gpt.commands.eagle3 import precompute

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def native_run(model, chats, tmp_path, capsys):
    """Runs precompute --format native into tmp_path / "c"; returns status, output and errors without progress."""

    def done(*more):
        capsys.readouterr()
        what = ["--target-model", str(model), "--input-data", str(chats), "--output-dir", str(tmp_path / "c")]
        status = precompute.main([*what, "--format", "native", "--seq-length", "40", "--threads", "1", *more])
        out, errors = capsys.readouterr()
        lines = [
            line for line in errors.splitlines(True) if not line.startswith(("target: ", "tokenizing: ", "hint: "))
        ]
        return status, out, "".join(lines)

    return done
