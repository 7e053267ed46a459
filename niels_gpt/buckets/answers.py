"""Bound the answers of servers of s3:// and gs://: no longer than the request asked for, and no redirect of s3://.

The libraries read a whole answer into memory, whatever its length. Here an answer ends at its limit, and so does a
listing of many pages. s3fs follows a redirect with the headers of the request, which may hold a session's token. Here
the redirect is an answer with its status; botocore itself handles redirects to other regions.
"""

from __future__ import annotations

import re
from typing import Any

from aiohttp import ClientResponse

MAX_ANSWER = 16 << 20
"""Most bytes of an answer to a request without a range. A page of a listing has 1,000 names, below 4 MiB."""
MAX_LISTING = 64 << 20
"""Most bytes of all pages of a listing: at least 50,000 names."""
_MIN_LIMIT = 1 << 20  # of an error's text, where few bytes were asked for
_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{1,19})")
_NEXT_PAGE = frozenset({"continuation-token", "pageToken"})  # of S3, of Google


class AnswerTooLong(ValueError):
    """A server sends more than the request asked for."""


def bounded(kind: str) -> dict[str, Any]:
    """Return settings that make s3fs (kind "s3") or gcsfs ("gs") refuse longer answers and redirects."""

    class Answer(_BoundedResponse):
        """A class of its own for each file system, because `listed` counts for all its instances."""

    if kind == "gs":
        return {"session_kwargs": {"response_class": Answer}}
    from aiobotocore.httpsession import AIOHTTPSession

    class Session(AIOHTTPSession):  # type: ignore[misc]  # without types
        async def _get_session(self, proxy_url: Any) -> _WithoutRedirects:
            session = await super()._get_session(proxy_url)
            session._response_class = Answer
            return _WithoutRedirects(session)

    return {"config_kwargs": {"http_session_cls": Session}}


class _WithoutRedirects:
    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, method: str, **how: Any) -> ClientResponse:
        answer: ClientResponse = await self._session.request(method, allow_redirects=False, **how)
        return answer


class _BoundedResponse(ClientResponse):
    listed = 0  # bytes since the first page of the last listing, of a class for each file system

    async def start(self, connection: Any) -> ClientResponse:
        await super().start(connection)
        self.content = _BoundedContent(self)  # type: ignore[assignment]
        return self


class _BoundedContent:
    """The stream of an answer. Raises AnswerTooLong after the requested number of bytes."""

    def __init__(self, response: _BoundedResponse) -> None:
        self._response, self._stream, self._read = response, response.content, 0
        asked = _RANGE.fullmatch(response.request_info.headers.get("Range", ""))
        self._most = max(int(asked[2]) - int(asked[1]) + 1, _MIN_LIMIT) if asked else MAX_ANSWER
        self._is_next_page = not _NEXT_PAGE.isdisjoint(response.request_info.url.query)
        if not self._is_next_page:
            type(response).listed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def read(self, n: int = -1) -> bytes:
        """Return at most n bytes; by default all that are left."""
        if n >= 0:
            return self._counted(await self._stream.read(n))
        parts = []
        while part := self._counted(await self._stream.readany()):
            parts.append(part)
        return b"".join(parts)

    def _counted(self, part: bytes) -> bytes:
        self._read += len(part)
        type(self._response).listed += len(part)
        if self._read > self._most:
            self._end(f"the answer has more than {self._most:,} bytes, and no more were asked for")
        if self._is_next_page and self._response.listed > MAX_LISTING:
            self._end(f"the listing has more than {MAX_LISTING:,} bytes")
        return part

    def _end(self, found: str) -> None:
        self._response.close()
        raise AnswerTooLong(found)
