"""h5py: a file that is extended, reopened and changed, and one that is read while it is written."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from tests.libraries.programs.frame import main, meet
from tests.waiting import wait_until

ARRAY = np.random.default_rng(2).standard_normal((2000, 64), dtype=np.float32)
ROUNDS = 5
ROWS = 100


def write(top: Path) -> None:
    with h5py.File(top / "data.h5", "w") as file:
        group = file.create_group("train")
        group.create_dataset("plain", data=ARRAY)
        group.create_dataset("packed", data=ARRAY, chunks=(100, 64), compression="gzip")
        group.create_dataset("grown", (0, 64), np.float32, chunks=(50, 64), maxshape=(None, 64))
        group.create_dataset("dropped", data=ARRAY)
        file.flush()
        for start in range(0, len(ARRAY), 500):
            group["grown"].resize(start + 500, axis=0)
            group["grown"][start:] = ARRAY[start : start + 500]
            file.attrs["rows"] = start + 500
    with h5py.File(top / "data.h5", "a") as file:
        del file["train/dropped"]
        file["train/plain"][10:20] = 7
        file["names"] = ["one", "two"]
        file["link"] = h5py.SoftLink("/train/plain")


def check(top: Path) -> None:
    with h5py.File(top / "data.h5", "r") as file:
        plain = ARRAY.copy()
        plain[10:20] = 7
        assert np.array_equal(file["link"][:], plain)
        assert np.array_equal(file["train/packed"][:], ARRAY)
        assert np.array_equal(file["train/grown"][:], ARRAY)
        assert sorted(file["train"]) == ["grown", "packed", "plain"]
        assert file["names"].asstr()[:].tolist() == ["one", "two"]
        assert file.attrs["rows"] == len(ARRAY)


def append(top: Path) -> None:
    """A writer that others may read along with (SWMR)."""
    with h5py.File(top / "live.h5", "w", libver="latest") as file:
        rows = file.create_dataset(
            "rows", (0, 64), np.float32, chunks=(50, 64), maxshape=(None, 64)
        )
        file.swmr_mode = True
        meet("open")
        for n in range(ROUNDS):
            rows.resize((n + 1) * ROWS, axis=0)
            rows[n * ROWS :] = ARRAY[n * ROWS : (n + 1) * ROWS]
            rows.flush()
            meet(f"round {n}")


def follow(top: Path) -> None:
    """The reader of `append`."""
    with h5py.File(top / "live.h5", "r", libver="latest", swmr=True) as file:
        rows = file["rows"]

        def has(count: int) -> bool:
            rows.refresh()
            seen = rows[:]
            assert np.array_equal(seen, ARRAY[: len(seen)])
            return len(seen) >= count

        meet("open")
        for n in range(ROUNDS):
            wait_until(lambda n=n: has((n + 1) * ROWS), f"round {n}")  # type: ignore[misc]
            meet(f"round {n}")


def whole(top: Path) -> None:
    """Whether everything that `append` wrote is there."""
    with h5py.File(top / "live.h5", "r") as file:
        assert np.array_equal(file["rows"][:], ARRAY[: ROUNDS * ROWS])


if __name__ == "__main__":
    main(write, check, append, follow, whole)
