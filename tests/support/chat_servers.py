"""A server with the chat-completions API on 127.0.0.1, with faults on request and a log of the questions.

    with ChatServer(tokenizer, says, form="vllm") as server: ... server.url, server.questions

It counts the tokens of a prompt by a tokenizer, and reads the arguments of calls as JSON, as real servers do.
"""

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from niels_gpt.chat import Chat

_KNOWN = {"model", "stream", "messages", "max_tokens", "temperature", "top_p", "seed", "tools"}


class ChatServer:
    """The server; see the module. Use as a context manager.

    says: function of a question that returns a text, or what differs from a usual answer: `text`, `finish`, `ids`,
        `message` (more fields), `usage`, `prompt_ids`, `names`; or `status`, `headers` and `body` of another answer; or
        `write`, a function that gets the handler.
    form: vllm or sglang, which give token ids if asked; plain, which gives none; strict, which refuses the question.
    """

    def __init__(self, tokenizer, says, *, form="plain"):
        self.tokenizer, self.says, self.form = tokenizer, says, form
        self.questions, self.keys = [], []
        self._lock = threading.Lock()

    def __enter__(self):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                outer.answer(self)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, handler):
        question = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.questions.append(copy.deepcopy(question))
            self.keys.append(handler.headers.get("Authorization"))
        assert handler.path == "/v1/chat/completions"
        if self.form == "strict" and (unknown := question.keys() - _KNOWN):
            said = {
                "status": 422,
                "body": json.dumps({"detail": f"Unexpected fields in the request: {unknown}"}).encode(),
            }
        else:
            said = self.says(question)
        said = {"text": said} if isinstance(said, str) else said
        if "write" in said:
            said["write"](handler)
            return
        status, body = said.get("status", 200), said.get("body")
        body = json.dumps(self._usual(question, said)).encode() if body is None else body
        handler.send_response(status)
        for name, value in {"Content-Length": len(body), **said.get("headers", {})}.items():
            handler.send_header(name, str(value))
        handler.end_headers()
        handler.wfile.write(body)

    def _usual(self, question, said):
        for call in (call for message in question["messages"] for call in message.get("tool_calls", [])):
            call["function"] = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
        with self._lock:
            (prompt,) = self.tokenizer.plain_ids([Chat("q", question["messages"], question.get("tools"))], prompt=True)
            ids = said.get("ids") or self.ids_of(said["text"])
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        message = {"role": "assistant", "content": said["text"], **said.get("message", {})}
        choice = {"index": 0, "message": message, "finish_reason": said.get("finish", "stop")}
        names = dict(zip(("model", "system_fingerprint"), said.get("names", ("tiny", "fp_1")), strict=True))
        answer = {**names, "choices": [choice], "usage": said.get("usage", usage)}
        prompt = said.get("prompt_ids", prompt)
        if self.form in ("vllm", "sglang") and question.get("return_token_ids"):
            choice["token_ids"] = ids
            if self.form == "vllm":
                answer["prompt_token_ids"] = prompt
            elif question.get("return_prompt_token_ids"):
                choice["prompt_token_ids"] = prompt
        return answer

    def ids_of(self, text):
        """The ids of a text, and the one that ends a turn."""
        return [*self.tokenizer._backend.encoded([text])[0][0], 3]
