"""The hub's files as an fsspec protocol of our own: each read gives the bytes asked for, or an error.

All retrying of a file's bytes happens here, in one place and with one bound, instead of in three layers of libraries.
Nothing of the libraries is replaced: whoever opens hf:// gets what he always got.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, cast

from niels_gpt.data.hub_network import STREAM_ATTEMPTS, BrokenAnswer, Patience, may_pass

PROTOCOL = "hfchecked"
"""fsspec's name for the hub read through CheckedFile."""
DOWNLOAD_BLOCK_BYTES = 1 << 25
"""Asked for at once where a whole file is fetched; fsspec's own 5 MiB (fsspec/spec.py) is for streams."""


@cache
def register_checked_files() -> None:
    """Tell fsspec about PROTOCOL.

    What this prevents; tests/test_hub_faults.py shows each, with datasets 5.2.0 and huggingface_hub 2.4.0:
    - HfFileSystemFile._fetch_range (huggingface_hub/hf_file_system.py) returns whatever the answer holds. An empty
      answer without Content-Length reads as the end of the file, and the rest of a jsonl shard is lost without an
      error; an answer that ignores Range, or is somebody else's, puts other bytes in the place of the asked ones.
    - http_get (huggingface_hub/file_download.py) goes on after the last whole chunk of 10 MB, and what a failed
      download had is removed: where every answer is cut, a dataset that is not streamed never comes. Here it is fetched
      like a stream, block by block, and kept by `datasets` under HF_DATASETS_CACHE, not in the hub's cache.
    """
    import fsspec
    from fsspec.spec import AbstractFileSystem
    from huggingface_hub import HfFileSystem

    checked_file = _checked_file()

    class CheckedFileSystem(HfFileSystem):
        protocol = PROTOCOL

        def _open(  # never HfFileSystemStreamFile, whatever the block size
            self,
            path: str,
            mode: str = "rb",
            block_size: int | None = None,
            revision: str | None = None,
            **kwargs: Any,
        ) -> Any:
            return checked_file(self, path, revision, mode=mode, block_size=block_size or "default", **kwargs)

        def get_file(self, rpath: Any, lpath: Any = None, *args: Any, **kwargs: Any) -> None:
            AbstractFileSystem.get_file(self, rpath, lpath, *args, block_size=DOWNLOAD_BLOCK_BYTES, **kwargs)

    fsspec.register_implementation(PROTOCOL, CheckedFileSystem, clobber=True)


def _checked_file() -> type:
    """Make the class whose files give the bytes asked for or an error."""
    from fsspec.spec import AbstractBufferedFile
    from huggingface_hub.hf_file_system import HfFileSystemFile

    class CheckedFile(HfFileSystemFile):
        def _fetch_range(self, start: int, end: int) -> bytes:
            patience = Patience(f"bytes {start} to {end} of {self.path}", STREAM_ATTEMPTS)
            block = bytearray()
            while len(block) < end - start:
                before = len(block)
                try:
                    _append_range(self, block, start, end, super()._fetch_range)
                except Exception as error:
                    if not may_pass(error):
                        raise
                    if len(block) > before:
                        patience.progress()
                    patience.wait(error)
            return bytes(block)

        # HfFileSystemFile reads a whole file through another that it opens: here that would be this class, without end.
        def read(self, length: int = -1) -> bytes:
            return cast(bytes, AbstractBufferedFile.read(self, length))

    return CheckedFile


def _append_range(file: Any, block: bytearray, start: int, end: int, fetch_whole: Callable[[int, int], bytes]) -> None:
    """Append what is missing of bytes start to end (exclusive), as far as it comes.

    fetch_whole: the library's own way, for a huggingface_hub before 1.0, whose client cannot stream like this.
    Raises: the client's errors; BrokenAnswer for an answer that is not those bytes, of which nothing is appended, or
        ends before them.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]

    first = start + len(block)
    session = get_session()
    if not hasattr(session, "stream"):
        whole = fetch_whole(first, end)
        block += whole if len(whole) == end - first else b""
    else:
        # Without identity a CDN may compress, and then it ignores Range.
        asked = {"Range": f"bytes={first}-{end - 1}", "Accept-Encoding": "identity"}
        headers = {**file.fs._api._build_hf_headers(), **asked}
        with session.stream(
            "GET", file.url(), headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
        ) as response:
            hf_raise_for_status(response)
            _check_range(response, first, end, file.size)
            for chunk in response.iter_bytes():
                block += chunk[: end - start - len(block)]
                if response.status_code == 200 and len(block) == end - start:
                    break  # the rest of the file follows, and may be long
    if len(block) != end - start:
        found = len(block) - (first - start)
        raise BrokenAnswer(f"asked for {end - first} bytes from byte {first}, and the answer ended after {found}")


def _check_range(response: Any, first: int, end: int, size: int) -> None:
    """Raise BrokenAnswer unless an answer says that it has bytes first to end (exclusive) of a file of `size` bytes.

    A server may answer with fewer bytes of the range (RFC 9110 14.4), or ignore Range and answer 200 with the whole
    file, which serves where the range begins at byte 0.
    """
    said, length = response.headers.get("Content-Range", ""), response.headers.get("Content-Length", "")
    span = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", said)
    if response.headers.get("Content-Encoding", "identity") != "identity":
        fits = False
    elif response.status_code == 206 and span:
        fits = int(span[1]) == first and int(span[2]) < end and int(span[3]) == size
    else:
        fits = response.status_code == 200 and first == 0 and length == str(size)
    if not fits:
        raise BrokenAnswer(
            f"asked for bytes {first} to {end - 1} of a file of {size}, and got status {response.status_code} with "
            f"Content-Range {said or 'none'} and Content-Length {length or 'none'}: a proxy may ignore the header "
            "Range, or answer in the hub's place"
        )
