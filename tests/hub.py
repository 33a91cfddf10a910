"""A hub for models that answers on this machine alone, for tests of uploading."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PLAIN = {"uploadMode": "regular", "shouldIgnore": False}  # no file goes to a storage of its own


class Hub(ThreadingHTTPServer):
    """A hub on this machine: what the client of huggingface_hub asks for when it creates a repository and uploads."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.created: list[str] = []
        self.tokens: set[str] = set()
        self.files: dict[str, bytes] = {}
        self.refuses = False

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class HubRequest(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        hub, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        hub.tokens.add(self.headers["Authorization"])
        if hub.refuses:
            return self.answer(403, {"error": "no right"})
        if self.path == "/api/repos/create":
            hub.created.append(json.loads(body)["name"])
            return self.answer(200, {"url": f"{hub.address}/me/nano"})
        if self.path == "/api/models/me/nano/preupload/main":
            return self.answer(200, {"files": [entry | PLAIN for entry in json.loads(body)["files"]]})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        assert self.path == "/api/models/me/nano/commit/main"
        head, *entries = (json.loads(line) for line in body.splitlines())
        assert head["value"]["summary"] == "Written by grt export"
        hub.files |= {x["value"]["path"]: base64.b64decode(x["value"]["content"]) for x in entries}
        self.answer(200, {"commitUrl": f"{hub.address}/me/nano/commit/1", "commitOid": "1"})

    def do_GET(self) -> None:
        self.answer(200, {"id": "me/nano", "siblings": []})

    def answer(self, status: int, document: dict) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
