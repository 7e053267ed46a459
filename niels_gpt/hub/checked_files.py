"""Files of the hub's datasets as an fsspec protocol: each read returns the bytes asked for, or raises.

All retries of a file's bytes happen here, with one limit, instead of in three layers of libraries. The library's own
protocol, hf://, is unchanged.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, cast

from niels_gpt.hub.retries import STREAM_ATTEMPTS, Backoff, BrokenAnswer, may_pass

PROTOCOL = "hfchecked"
"""fsspec's name for the hub read through CheckedFile."""
DOWNLOAD_BLOCK_BYTES = 1 << 25
"""Request size when a whole file is downloaded. fsspec's default of 5 MiB (fsspec/spec.py) suits streams."""


@cache
def register_checked_files() -> None:
    """Register PROTOCOL with fsspec.

    It prevents two losses (tests/hub/test_hub_faults.py shows each with datasets 5.2.0 and huggingface_hub 2.4.0):
    - HfFileSystemFile._fetch_range (huggingface_hub/hf_file_system.py) returns any answer. An empty answer without
      Content-Length reads as the end of the file, and the rest of a jsonl shard is lost without an error. An answer
      that ignores Range, or comes from a proxy, has other bytes.
    - http_get (huggingface_hub/file_download.py) resumes after the last whole chunk of 10 MB and removes a failed
      download. If every answer is cut, a dataset that is not streamed never arrives. Here it is fetched like a stream,
      block by block; `datasets` keeps it under HF_DATASETS_CACHE, not in the hub's cache.
    """
    import fsspec
    from fsspec.spec import AbstractFileSystem
    from huggingface_hub import HfFileSystem

    checked_file = _checked_file()

    class CheckedFileSystem(HfFileSystem):
        protocol = PROTOCOL

        def _open(  # never HfFileSystemStreamFile, for any block size
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
    """Define the file class of PROTOCOL. Its base is imported late, as huggingface_hub is heavy."""
    from fsspec.spec import AbstractBufferedFile
    from huggingface_hub.hf_file_system import HfFileSystemFile

    class CheckedFile(HfFileSystemFile):
        def _fetch_range(self, start: int, end: int) -> bytes:
            backoff = Backoff(f"bytes {start} to {end} of {self.path}", STREAM_ATTEMPTS)
            block = bytearray()
            while len(block) < end - start:
                before = len(block)
                try:
                    _append_range(self, block, start, end)
                except Exception as error:
                    if not may_pass(error):
                        raise
                    if len(block) > before:
                        backoff.progress()
                    backoff.wait(error)
            return bytes(block)

        # HfFileSystemFile reads a whole file through another one that it opens: here that would recurse without end.
        def read(self, length: int = -1) -> bytes:
            return cast(bytes, AbstractBufferedFile.read(self, length))

    return CheckedFile


def _append_range(file: Any, block: bytearray, start: int, end: int) -> None:
    """Append the missing bytes of start to end (exclusive) to `block`, as far as they arrive.

    Raises: BrokenAnswer E603 if the answer has other bytes, which are not appended, or ends early; the client's errors.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]

    first = start + len(block)
    # Without identity a CDN may compress the answer, and then it ignores Range.
    asked = {"Range": f"bytes={first}-{end - 1}", "Accept-Encoding": "identity"}
    headers = {**file.fs._api._build_hf_headers(), **asked}
    how: dict[str, Any] = {"headers": headers, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT, "follow_redirects": True}
    with get_session().stream("GET", file.url(), **how) as response:
        hf_raise_for_status(response)
        _check_range(response, first, end, file.size)
        for chunk in response.iter_bytes():
            block += chunk[: end - start - len(block)]
            if response.status_code == 200 and len(block) == end - start:
                break  # the rest of the file follows
    if len(block) != end - start:
        received = len(block) - (first - start)
        raise BrokenAnswer(f"asked for {end - first} bytes from byte {first}, and the answer ended after {received}")


def _check_range(response: Any, first: int, end: int, size: int) -> None:
    """Check that an answer's headers promise bytes first to end (exclusive) of a file of `size` bytes.

    A server may send fewer bytes of the range (RFC 9110 14.4). It may ignore Range and send the whole file with status
    200, which fits if the range begins at byte 0.
    Raises: BrokenAnswer E603 if the headers promise other bytes.
    """
    content_range, length = response.headers.get("Content-Range", ""), response.headers.get("Content-Length", "")
    span = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", content_range)
    if response.headers.get("Content-Encoding", "identity") != "identity":
        fits = False
    elif response.status_code == 206 and span:
        fits = int(span[1]) == first and int(span[2]) < end and int(span[3]) == size
    else:
        fits = response.status_code == 200 and first == 0 and length == str(size)
    if not fits:
        raise BrokenAnswer(
            f"asked for bytes {first} to {end - 1} of a file of {size}, and got status {response.status_code} with "
            f"Content-Range {content_range or 'none'} and Content-Length {length or 'none'}: a proxy may "
            "ignore the header Range, or answer instead of the hub"
        )
