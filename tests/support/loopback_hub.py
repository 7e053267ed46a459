"""A small Hugging Face hub on 127.0.0.1, with faults on request and a log of the requests.

It answers what huggingface_hub, datasets and transformers ask for to read a dataset or a model: its info, its tree, its
files with ranges, and the hub's own error headers. A test of this process uses the fixture `loopback_hub`: conftest.py
has set HF_ENDPOINT to its port before any library was imported.

    sha = loopback_hub.add("HuggingFaceFW/fineweb-edu", numbered_datasets.fineweb_edu())
    loopback_hub.add_model("somebody/tiny", tmp_path / "tiny")  # a folder written by save_pretrained
    loopback_hub.cut("train-00001", after=10_000)               # the next answer about it ends there
    assert loopback_hub.asked("train-00001")                    # the requests, with method, range and status

A subprocess inherits HF_ENDPOINT, or gets `hub.endpoint` of a hub on its own port, and its own HF_HOME.

`add` commits: the sha is made from id and content, and "main" points to it until the next `add`. The libraries cache by
id and sha within a process, so two tests that expect the same requests need another id or content. A gated repository
lists its files and serves none.
Faults happen in the order in which they were added; the first that fits a request is used up by it. Faults of a body
wait for an answer with a body: not for a redirect or HEAD.
"""

import base64
import gzip
import hashlib
import json
import re
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from support.hub_content import Fault, Repository, Request, card_data, file_entry, git_id

TREE_PAGE = 1_000  # entries in an answer about a tree, as on the hub
MODELS = "models/"  # before the id of a model, where datasets and models are kept together


class LoopbackHub:
    """The hub; see the module. Use as a context manager.

    port: 0 takes a free one. cdn_over: files of more bytes are answered with 302 to another host, as the hub does for
    LFS files; None never does. compressing: if set, clients that accept gzip get whole compressed files for
    any range, as from some CDNs.
    """

    def __init__(self, *, port=0, cdn_over=20_000):
        self.repositories = {}
        self.requests = []
        self.faults = []
        self.cdn_over = cdn_over
        self.compressing = False
        self.unfinished = []
        self.closing = threading.Event()
        self.lock = threading.Lock()
        self.created = {}
        """What was asked for each repository that a client made."""
        self.uploaded = {}
        """LFS objects by their sha256."""
        self._port = port

    def __enter__(self):
        self._server = _Server(("127.0.0.1", self._port), self)
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.end_connections()
        self._server.server_close()

    @property
    def endpoint(self):
        """The value for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._port}"

    def add(
        self,
        repository_id,
        files,
        *,
        ref="main",
        gated=False,
        private=False,
    ):
        """Commit `files` (path -> bytes), let `ref` point there, and return the sha."""
        total = hashlib.sha1(repository_id.encode())
        for path, content in sorted(files.items()):
            total.update(path.encode() + b"\0" + hashlib.sha1(content).digest())
        repository = self.repositories.setdefault(repository_id, Repository())
        repository.commits[total.hexdigest()] = dict(files)
        repository.refs[ref] = total.hexdigest()
        repository.gated, repository.private = gated, private
        return total.hexdigest()

    def add_model(self, model_id, folder, *, ref="main", gated=False, private=False):
        """Commit the files of a folder as a model, let `ref` point there, and return the sha."""
        paths = (path for path in folder.rglob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return self.add(MODELS + model_id, files, ref=ref, gated=gated, private=private)

    def fail(
        self,
        path="",
        *,
        status=503,
        retry_after=None,
        rate_limit=None,
        method=None,
        times=1,
        passing=0,
    ):
        """Answer with a status and {"error": ...}; times=math.inf for good."""
        said = {"Retry-After": retry_after, "RateLimit": rate_limit}
        headers = {name: str(value) for name, value in said.items() if value is not None}
        return self._order(Fault("status", path, method, times=times, passing=passing, status=status, headers=headers))

    def foreign(self, path="", *, times=1, passing=0):
        """Answer with 200 and a web page of somebody else, as a login page or a captive portal does."""
        return self._order(Fault("foreign", path, times=times, passing=passing))

    def cut(self, path="", *, after, times=1, passing=0, reset=False):
        """End the connection after so many bytes of the body; a shorter body stays whole."""
        return self._order(Fault("cut", path, "GET", times=times, passing=passing, after=after, reset=reset))

    def stall(self, path="", *, seconds, after=0, times=1, passing=0):
        """Send nothing for a while after so many bytes of the body."""
        return self._order(Fault("stall", path, "GET", times=times, passing=passing, after=after, seconds=seconds))

    def end_early(self, path="", *, after, chunked=False, times=1, passing=0):
        """Answer without Content-Length and end after so many bytes; `chunked` ends with a proper last chunk."""
        kind = "chunked" if chunked else "unsized"
        return self._order(Fault(kind, path, "GET", times=times, passing=passing, after=after))

    def ignore_range(self, path="", *, times=1, passing=0):
        """Answer a request for a range with 200 and the whole file, as some proxies do."""
        return self._order(Fault("whole", path, "GET", times=times, passing=passing))

    def asked(self, path="", *, method=None):
        """Return the requests so far whose path has `path` in it."""
        with self.lock:
            return [one for one in self.requests if path in one.path and method in (None, one.method)]

    def left_early(self, path):
        """Tell whether somebody closed the connection before he had an answer's whole body; waits 5 s at most."""
        for _ in range(500):
            if any(path in one for one in self.unfinished):
                return True
            self.closing.wait(0.01)
        return False

    def _order(self, fault):
        with self.lock:
            self.faults.append(fault)
        return fault

    def spend(self, method, path, *, body):
        """Return the fault for a request or for its answer's body, if there is one, and count it."""
        with self.lock:
            fault = next((one for one in self.faults if one.fits(method, path, body=body)), None)
            if fault is not None and fault.passing:
                fault.passing -= 1
                return None
            if fault is not None:
                fault.times -= 1
            return fault


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close waits for them
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address, hub):
        self.hub = hub
        self.open_sockets = set()
        self.resetting = set()
        super().__init__(address, _Handler)

    def process_request(self, request, client_address):
        self.open_sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.open_sockets.discard(request)
        if request in self.resetting:
            self.resetting.discard(request)
            self.close_request(request)  # without the FIN of shutdown
        else:
            super().shutdown_request(request)

    def end_connections(self):
        for one in list(self.open_sockets):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # gone by itself

    def handle_error(self, request, client_address):
        return  # a client that went away, which tests of broken connections want


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each body waits 40 ms for the acknowledgement of its headers

    def log_message(self, format, *args): ...

    def _read_body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self):
        address = urlsplit(self.path)
        path = unquote(address.path)
        self.body = self._read_body()
        form = parse_qs(self.body.decode(errors="replace"))
        self.fault = None
        self.asked = path
        if fault := self.server.hub.spend(self.command, path, body=False):
            if fault.kind == "foreign":
                self._send(200, b"<html>Please log in.</html>\n", {"Content-Type": "text/html"})
                return
            self._error(fault.status, None, "ordered by the test", **fault.headers)
            return
        for pattern, answer in _ROUTES:
            if found := re.fullmatch(pattern, path):
                query = {key: values[-1] for key, values in parse_qs(address.query).items()}
                answer(self, *found.groups(), form={**form, **query})
                return
        self._error(404, "EntryNotFound", f"no such page: {path}")

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    def _repository(self, repository_id, revision):
        """Find a commit, or answer with the hub's error."""
        repository = self.server.hub.repositories.get(repository_id)
        if repository is None or repository.private:
            self._error(401, "RepoNotFound", "Repository not found")
            return None
        sha = repository.refs.get(revision, revision)
        if sha not in repository.commits:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repository, sha

    def info(self, repository_id, revision, *, form):
        if found := self._repository(repository_id, revision or "main"):
            repository, sha = found
            files = repository.commits[sha]
            self._json(
                {
                    "_id": "0" * 24,
                    "id": repository_id.removeprefix(MODELS),
                    "author": repository_id.removeprefix(MODELS).split("/")[0],
                    "sha": sha,
                    "lastModified": "2024-01-01T00:00:00.000Z",
                    "private": repository.private,
                    "gated": "auto" if repository.gated else False,
                    "disabled": False,
                    "tags": [],
                    "siblings": [{"rfilename": path} for path in sorted(files)],
                    "cardData": card_data(files),
                }
            )

    def auth_check(self, repository_id, *, form):
        if found := self._repository(repository_id, "main"):
            if found[0].gated:
                self._gated(repository_id)
            else:
                self._json({})

    def tree(self, repository_id, revision, folder, *, form):
        if not (found := self._repository(repository_id, revision)):
            return
        files = found[0].commits[found[1]]
        prefix = f"{folder}/" if folder else ""
        entries = {path: file_entry(path, files[path]) for path in sorted(files) if path.startswith(prefix)}
        if folder and not entries:
            self._error(404, "EntryNotFound", f"{folder} does not exist on {revision!r}")
            return
        listed = {}
        for path, entry in entries.items():
            steps = path.removeprefix(prefix).split("/")
            for depth in range(1, len(steps)) if form.get("recursive") in ("true", "True") else range(1, 2):
                if depth < len(steps):
                    name = prefix + "/".join(steps[:depth])
                    listed[name] = {"type": "directory", "oid": git_id(name.encode()), "size": 0, "path": name}
            if len(steps) == 1 or form.get("recursive") in ("true", "True"):
                listed[path] = entry
        start = int(form.get("cursor", 0))
        more = start + TREE_PAGE < len(listed)
        next_page = f"{self.server.hub.endpoint}{self.path.split('&cursor=')[0]}&cursor={start + TREE_PAGE}"
        self._json(
            list(listed.values())[start : start + TREE_PAGE], **({"Link": f'<{next_page}>; rel="next"'} if more else {})
        )

    def paths_info(self, repository_id, revision, *, form):
        if found := self._repository(repository_id, revision):
            files = found[0].commits[found[1]]
            self._json([file_entry(path, files[path]) for path in form.get("paths", ()) if path in files])

    def resolve(self, repository_id, revision, path, *, form):
        if not (found := self._repository(repository_id, revision)):
            return
        repository, sha = found
        if repository.gated:
            self._gated(repository_id)
            return
        content = repository.commits[sha].get(path)
        if content is None:
            self._error(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": sha})
            return
        entry = file_entry(path, content)
        headers = {"X-Repo-Commit": sha, "ETag": f'"{entry.get("lfs", entry)["oid"]}"'}
        over = self.server.hub.cdn_over
        if over is None or len(content) <= over:
            self._content(content, headers)
            return
        linked = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": headers["ETag"]}
        elsewhere = f"http://localhost:{self.server.server_port}/cdn/{repository_id}/{sha}/{path}"
        self._send(302, b"", {**headers, **linked, "Location": elsewhere})

    def model_file(self, model_id, revision, path, *, form):
        self.resolve(MODELS + model_id, revision, path, form=form)

    def cdn(self, repository_id, sha, path, *, form):
        content = self.server.hub.repositories[repository_id].commits[sha][path]
        self._content(content, {"ETag": f'"{hashlib.md5(content).hexdigest()}"'})

    def create(self, *, form):
        asked = json.loads(self.body)
        repository_id = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
        url = {"url": f"{self.server.hub.endpoint}/datasets/{repository_id}"}
        if repository_id in self.server.hub.repositories:
            self._send(409, json.dumps({"error": "exists", **url}).encode(), {"Content-Type": "application/json"})
            return
        self.server.hub.created[repository_id] = asked
        self.server.hub.add(repository_id, {".gitattributes": b"*.bin filter=lfs\n"})
        self._json(url)

    def validate(self, *, form):
        self._json({"errors": [], "warnings": []})

    def preupload(self, repository_id, revision, *, form):
        files = [{"path": each["path"], "shouldIgnore": False} for each in json.loads(self.body)["files"]]
        modes = {True: "lfs", False: "regular"}
        self._json({"files": [{**each, "uploadMode": modes[each["path"].endswith(".bin")]} for each in files]})

    def lfs_batch(self, repository_id, *, form):
        objects = [{"oid": each["oid"], "size": each["size"]} for each in json.loads(self.body)["objects"]]
        for each in objects:
            if each["oid"] not in self.server.hub.uploaded:
                each["actions"] = {
                    "upload": {"href": f"{self.server.hub.endpoint}/lfs/{each['oid']}?X-Signature=geheim"}
                }
        self._json({"transfer": "basic", "objects": objects})

    def lfs_upload(self, oid, *, form):
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.server.hub.uploaded[oid] = self.body
        self._send(200, b"", {})

    def commit(self, repository_id, revision, *, form):
        hub, lines = self.server.hub, [json.loads(line) for line in self.body.splitlines()]
        repository = hub.repositories[repository_id]
        head = repository.refs[revision]
        files = dict(repository.commits[head])
        for key, value in ((line["key"], line["value"]) for line in lines):
            if key == "header" and value.get("parentCommit") not in (None, head):
                self._error(412, None, "the branch has moved")
                return
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = hub.uploaded[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        sha = hub.add(repository_id, files, ref=revision)
        url = f"{hub.endpoint}/datasets/{repository_id}/commit/{sha}"
        self._json({"success": True, "commitUrl": url, "commitOid": sha, "hookOutput": ""})

    def _content(self, content, headers):
        """Answer with a file or the asked range of it (RFC 9110, section 14)."""
        headers = {**headers, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        self.fault = self.server.hub.spend(self.command, self.asked, body=True)
        if self.server.hub.compressing and "gzip" in self.headers.get("Accept-Encoding", ""):
            self._send(200, gzip.compress(content), {**headers, "Content-Encoding": "gzip"})
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None or (self.fault is not None and self.fault.kind == "whole"):
            self._send(200, content, headers)
            return
        first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        if first > last:
            self._send(416, b"", {**headers, "Content-Range": f"bytes */{len(content)}"})
        else:
            span = f"bytes {first}-{last}/{len(content)}"
            self._send(206, content[first : last + 1], {**headers, "Content-Range": span})

    def _json(self, answer, **headers):
        self.fault = self.server.hub.spend(self.command, self.asked, body=True)
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json; charset=utf-8", **headers})

    def _gated(self, repository_id):
        what = "dataset " + repository_id
        if repository_id.startswith(MODELS):
            what = "model " + repository_id.removeprefix(MODELS)
        self._error(401, "GatedRepo", f"Access to {what} is restricted. You must have access to it.")

    def _error(self, status, code, message, **headers):
        said = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **headers}
        self._send(status, json.dumps({"error": message}).encode(), {"Content-Type": "application/json", **said})

    def _send(self, status, body, headers):
        fault = self.fault
        with self.server.hub.lock:
            self.server.hub.requests.append(Request(self.command, self.asked, self.headers.get("Range"), status))
        unsized = fault is not None and fault.kind in ("unsized", "chunked")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if fault is not None and fault.kind == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        elif unsized:
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            if fault is None or fault.kind == "whole":
                self.wfile.write(body)
            else:
                _FAULTY_BODIES[fault.kind](self, body, fault)
        except OSError:
            self.server.hub.unfinished.append(self.asked)
            raise

    def _cut(self, body, fault):
        self.wfile.write(body[: fault.after])
        if fault.after < len(body) or fault.kind == "unsized":
            if fault.reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.server.resetting.add(self.connection)
            self.close_connection = True

    def _stalled(self, body, fault):
        self.wfile.write(body[: fault.after])
        self.wfile.flush()
        self.server.hub.closing.wait(fault.seconds)
        self.wfile.write(body[fault.after :])

    def _chunked(self, body, fault):
        part = body[: fault.after]
        self.wfile.write((b"%x\r\n%s\r\n" % (len(part), part) if part else b"") + b"0\r\n\r\n")


_ID = rf"((?:{MODELS})?[^/]+/[^/]+)"
_ROUTES = [
    (r"/api/repos/create", _Handler.create),
    (r"/api/validate-yaml", _Handler.validate),
    (rf"/api/datasets/{_ID}/preupload/([^/]+)", _Handler.preupload),
    (rf"/api/datasets/{_ID}/commit/([^/]+)", _Handler.commit),
    (r"/datasets/([^/]+/[^/]+)\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (r"/lfs/([0-9a-f]{64})", _Handler.lfs_upload),
    (rf"/api/(?:datasets/)?{_ID}(?:/revision/(.+))?", _Handler.info),
    (rf"/api/(?:datasets/)?{_ID}/auth-check", _Handler.auth_check),
    (rf"/api/(?:datasets/)?{_ID}/tree/([^/]+)(?:/(.+))?", _Handler.tree),
    (rf"/api/(?:datasets/)?{_ID}/paths-info/([^/]+)", _Handler.paths_info),
    (rf"/datasets/{_ID}/resolve/([^/]+)/(.+)", _Handler.resolve),
    (r"/([^/]+(?:/[^/]+)?)/resolve/([^/]+)/(.+)", _Handler.model_file),
    (rf"/cdn/{_ID}/([^/]+)/(.+)", _Handler.cdn),
]
_FAULTY_BODIES = {
    "cut": _Handler._cut,
    "stall": _Handler._stalled,
    "unsized": _Handler._cut,
    "chunked": _Handler._chunked,
}
