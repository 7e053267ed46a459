"""What a refusal promises: its code, and the files, keys and figures in its text. Its sentences may change."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from niels_gpt.storage.codes import code_of


class Refused:
    """The error that a block of `refused` ended with."""

    @property
    def value(self):
        """The error, by the name that pytest's ExceptionInfo has for it."""
        return self.error

    def __str__(self):
        return str(self.error)


@contextmanager
def refused(code, *found, kind=Exception):
    """Expect an error of this code whose text has each of these words (file names, keys, figures); `.error` is it.

    An error that is no `kind` passes through, and so does a BaseException that is no Exception.
    """
    caught = Refused()
    try:
        yield caught
    except kind as error:
        caught.error = error
    else:
        raise AssertionError(f"nothing was refused, expected {code} with {found}")
    assert code_of(caught.error) == code, f"{code_of(caught.error)}, expected {code}: {caught.error!r}"
    missing = [word for word in found if str(word) not in str(caught.error)]
    assert not missing, f"{missing} not in {caught.error}"


def template_by_command(error, folder):
    """Run, in a folder, the command in the error of a chat with tools; returns the file of its `--chat-template`."""
    command, flag, file = str(error).split("such as tool_use: ")[1].partition("; --chat-template ")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(command, shell=True, cwd=folder, env={**os.environ, "PATH": path}, check=True)
    assert flag
    return folder / file
