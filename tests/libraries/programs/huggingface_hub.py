"""huggingface_hub: a model downloaded into a cache, from a server of this process's own."""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}

from huggingface_hub import scan_cache_dir, snapshot_download

from tests.libraries.programs.frame import main, meet

REPOSITORY = "team/model"
REVISIONS = {"v1": "1" * 40, "main": "2" * 40}
FILES = {
    revision: {
        "config.json": b'{"layers": 2}',
        "model.safetensors": random.Random(1).randbytes(3_000_000),
        "nested/tokenizer.json": random.Random(revision).randbytes(50_000),
    }
    for revision in REVISIONS
}


def hashed(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as a download asks for."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path.startswith(f"api/models/{REPOSITORY}/"):
            what, revision = path.split("/")[4:6]
            revision = self._revision(revision)
            self._answer(revision, json.dumps(self._described(revision, what)).encode())
        else:
            revision, name = path.removeprefix(f"{REPOSITORY}/resolve/").split("/", 1)
            revision = self._revision(revision)
            self._answer(revision, FILES[revision][name])

    def _described(self, revision: str, what: str) -> object:
        if what == "tree":
            return [
                {"type": "file", "path": name, "size": len(data), "oid": hashed(data)}
                for name, data in FILES[revision].items()
            ]
        names = [{"rfilename": name} for name in FILES[revision]]
        return {"id": REPOSITORY, "sha": REVISIONS[revision], "siblings": names}

    def _revision(self, named: str) -> str:
        return named if named in REVISIONS else {v: k for k, v in REVISIONS.items()}[named]

    def _answer(self, revision: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("X-Repo-Commit", REVISIONS[revision])
        self.send_header("ETag", f'"{hashed(body)}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def _hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def write(top: Path) -> None:
    meet("ready")
    with _hub() as endpoint:
        for revision in REVISIONS:
            snapshot_download(
                REPOSITORY, revision=revision, cache_dir=top / "hub", endpoint=endpoint
            )
        snapshot_download(REPOSITORY, local_dir=top / "plain", endpoint=endpoint)


def check(top: Path) -> None:
    for revision, files in FILES.items():
        found = Path(
            snapshot_download(
                REPOSITORY, revision=revision, cache_dir=top / "hub", local_files_only=True
            )
        )
        for name, data in files.items():
            assert (found / name).is_symlink() and (found / name).read_bytes() == data
            assert str((found / name).resolve()).startswith(str(top.resolve()))
    assert all((top / "plain" / n).read_bytes() == data for n, data in FILES["main"].items())
    cache = scan_cache_dir(top / "hub")
    assert not cache.warnings
    (repository,) = cache.repos
    assert len(repository.revisions) == len(REVISIONS)
    blobs = list((top / "hub").glob("models--*/blobs/*"))
    assert len(blobs) == 4  # two of three files are the same in both revisions


if __name__ == "__main__":
    main(write, check)
