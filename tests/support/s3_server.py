"""A real S3 server on 127.0.0.1, moto's, behind a small proxy that cuts, alters, delays, limits and answers 503."""

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress

SECRET = "geheim-geheim-geheim"
_REFUSAL = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_METHODS = (b"GET ", b"PUT ", b"HEAD", b"POST", b"DELE")


class S3Server:
    """The server; as a context manager. Its attributes are faults, which are used up."""

    def __init__(self):
        self.refuse = 0
        """Requests that are answered with 503."""
        self.cut_after = None
        """Bytes of answers until a connection ends."""
        self.alter = 0
        """Parts of large answers in which a bit is changed."""
        self.delay_s = 0.0
        """Before each request."""
        self.bytes_per_s = None
        """Of all answers together; None: no limit."""
        self.lies = {}
        """What returns an answer, in parts, or None, by the beginning of requests, such as b"GET /team/x/meta.json"."""
        self.requests = self.sent_bytes = 0
        self._free_at, self._line = 0.0, threading.Lock()
        self._port = _free_port()

    def __enter__(self):
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
                break
            time.sleep(0.05)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        self.make_bucket("team")
        return self

    def __exit__(self, *_):
        self._listener.close()
        self._process.kill()
        self._process.wait()

    def clear_faults(self):
        self.refuse, self.alter, self.delay_s, self.lies = 0, 0, 0.0, {}
        self.cut_after = self.bytes_per_s = None

    def make_bucket(self, name):
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}/{name}", method="PUT")
        urllib.request.urlopen(request).close()

    def environment(self):
        """What a client needs to reach it; the library's own retries are left out."""
        return {
            "AWS_ACCESS_KEY_ID": "AKIAGEHEIMGEHEIM",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                threading.Thread(target=self._asks, args=(client, server), daemon=True).start()
                threading.Thread(target=self._answers, args=(server, client), daemon=True).start()

    def _asks(self, client, server):
        with suppress(OSError):
            while content := client.recv(1 << 16):
                if content.startswith(_METHODS):
                    self.requests += 1
                    time.sleep(self.delay_s)
                    lie = next((told for begin, told in self.lies.items() if content.startswith(begin)), lambda: None)
                    if (answer := lie()) is not None:
                        for part in answer:
                            client.sendall(part)
                        break
                    if self.refuse > 0:
                        self.refuse -= 1
                        client.sendall(_REFUSAL)
                        break
                server.sendall(content)
        _end(client, server)

    def _answers(self, server, client):
        with suppress(OSError):
            while content := server.recv(1 << 16):
                if self.cut_after is not None:
                    if len(content) > self.cut_after:
                        client.sendall(content[: self.cut_after])
                        self.cut_after = None
                        break
                    self.cut_after -= len(content)
                if self.alter > 0 and len(content) > 10_000:
                    self.alter -= 1
                    content = content[:-1] + bytes([content[-1] ^ 1])
                self._wait_for_line(len(content))
                client.sendall(content)
        _end(client, server)

    def _wait_for_line(self, num_bytes):
        with self._line:
            self.sent_bytes += num_bytes
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + (num_bytes / self.bytes_per_s if self.bytes_per_s else 0)
            wait_s = self._free_at - now
        time.sleep(max(wait_s, 0))


def _end(*sockets):
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
