"""The standard library: rotated logs, shards of tar files as data loaders read them, and archives,
databases and pickles that are changed in place."""

from __future__ import annotations

import dbm
import io
import json
import logging
import logging.handlers
import pickle
import random
import shelve
import tarfile
import zipfile
from pathlib import Path

from tests.libraries.programs.frame import main

LINES = 600
SAMPLES = 40


def _sample(n: int) -> bytes:
    return random.Random(n).randbytes(3000 + n)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def write(top: Path) -> None:
    logger = logging.getLogger("training")
    logger.setLevel(logging.INFO)
    handler = logging.handlers.RotatingFileHandler(top / "run.log", maxBytes=2000, backupCount=99)
    logger.addHandler(handler)
    for n in range(LINES):
        logger.info("step %d of %d", n, LINES)
    handler.close()
    for shard in range(3):
        with tarfile.open(top / f"shard-{shard:06}.tar", "w|") as archive:
            for n in range(shard * SAMPLES, (shard + 1) * SAMPLES):
                _add(archive, f"{n:08}.bin", _sample(n))
                _add(archive, f"{n:08}.json", json.dumps({"label": n % 10}).encode())
    with tarfile.open(top / "shard-000002.tar", "a") as archive:
        _add(archive, "last.bin", _sample(999))
    with zipfile.ZipFile(top / "archive.zip", "w") as packed:
        packed.writestr("a", _sample(1))
    with zipfile.ZipFile(top / "archive.zip", "a", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("b", _sample(2))
    with shelve.open(str(top / "shelf")) as shelf:
        for n in range(100):
            shelf[str(n)] = {"value": _sample(n)}
        for n in range(0, 100, 2):
            del shelf[str(n)]
    with open(top / "state.pkl", "wb") as file:
        for n in range(20):
            pickle.dump(_sample(n), file)


def check(top: Path) -> None:
    logs = sorted(top.glob("run.log*"), key=lambda path: -int(path.suffix[1:].replace("log", "0")))
    lines = [line for log in logs for line in log.read_text().splitlines()]
    assert len(logs) > 2
    assert lines == [f"step {n} of {LINES}" for n in range(LINES)]
    for shard in range(3):
        found = {}
        with tarfile.open(top / f"shard-{shard:06}.tar", "r|") as archive:
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
        for n in range(shard * SAMPLES, (shard + 1) * SAMPLES):
            assert found.pop(f"{n:08}.bin") == _sample(n)
            assert json.loads(found.pop(f"{n:08}.json")) == {"label": n % 10}
        assert found == ({"last.bin": _sample(999)} if shard == 2 else {})
    with zipfile.ZipFile(top / "archive.zip") as packed:
        assert packed.testzip() is None
        assert packed.read("a") == _sample(1) and packed.read("b") == _sample(2)
    assert dbm.whichdb(str(top / "shelf"))
    with shelve.open(str(top / "shelf"), "r") as shelf:
        assert sorted(map(int, shelf)) == list(range(1, 100, 2))
        assert all(shelf[str(n)] == {"value": _sample(n)} for n in range(1, 100, 2))
    with open(top / "state.pkl", "rb") as pickled:
        assert [pickle.load(pickled) for _ in range(20)] == [_sample(n) for n in range(20)]


if __name__ == "__main__":
    main(write, check)
