"""What a refusal promises: its code, and the files, keys and figures in its text. Its sentences may change."""

from contextlib import contextmanager

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
