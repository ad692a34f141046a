"""A Hugging Face hub with one repository on this machine, which the real client library talks to."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY = "org/zoo"


@contextmanager
def hub_server(revisions: dict[str, tuple[str, Path]]) -> Iterator[tuple[str, list[str]]]:
    """Serves ``REPOSITORY``: for each revision, the commit's 40 digits and the folder with its files.

    Yields:
        The server's address, for ``HF_ENDPOINT``, and a list to which the path of each request is added.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(path)
            if path.startswith(f"/api/models/{REPOSITORY}"):
                kind, _, rest = path.removeprefix(f"/api/models/{REPOSITORY}").strip("/").partition("/")
                if kind == "tree" and rest.rpartition("/")[0] in revisions:  # a folder, which no revision has
                    self.answer(404, X_Error_Code="EntryNotFound")
                else:
                    self.api(kind, rest or "main")
            elif path.startswith(f"/{REPOSITORY}/resolve/"):
                self.file(*path.removeprefix(f"/{REPOSITORY}/resolve/").split("/", 1))
            else:
                self.answer(404, X_Error_Code="RepoNotFound")

        do_HEAD = do_GET

        def found(self, revision: str) -> tuple[str, Path] | None:
            commits = {commit: (commit, folder) for commit, folder in revisions.values()}
            found = (revisions | commits).get(revision)
            if found is None:
                self.answer(404, X_Error_Code="RevisionNotFound")
            return found

        def api(self, kind: str, revision: str) -> None:
            found = self.found(revision)
            if found is None:
                return
            commit, folder = found
            files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            info = {"id": REPOSITORY, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
            self.answer(200, json.dumps(tree if kind == "tree" else info).encode(), Content_Type="application/json")

        def file(self, revision: str, name: str) -> None:
            found = self.found(revision)
            if found is None:
                return
            commit, folder = found
            if not (folder / name).is_file():
                self.answer(404, X_Error_Code="EntryNotFound")
                return
            data = (folder / name).read_bytes()
            self.answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=commit)

        def log_message(self, *_: object) -> None:
            """Writes nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
