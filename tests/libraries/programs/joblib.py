"""joblib: dumped arrays, results kept from one process to the next, and workers that share one."""

from __future__ import annotations

from pathlib import Path

import joblib
import numpy as np

from tests.libraries.programs.frame import main

ARRAY = np.random.default_rng(5).standard_normal((2000, 50))


def power(base: int, exponent: int) -> int:
    """Something slow."""
    return int(base**exponent)


def write(top: Path) -> None:
    joblib.dump({"weights": ARRAY, "epoch": 3}, top / "model.joblib")
    joblib.dump(ARRAY, top / "model.joblib.gz", compress=("gzip", 3))
    joblib.dump(ARRAY, top / "mapped.joblib")
    kept = joblib.Memory(top / "kept", verbose=0).cache(power)
    assert [kept(n, 5) for n in range(5)] == [power(n, 5) for n in range(5)]
    kept(100, 5)
    for n in range(5):
        assert kept.check_call_in_cache(n, 5)
    (top / "workers").mkdir()
    work = joblib.Parallel(n_jobs=2, max_nbytes="1K", temp_folder=top / "workers")
    sums = work(joblib.delayed(np.sum)(ARRAY[n::4]) for n in range(4))
    assert np.allclose(sums, [np.sum(ARRAY[n::4]) for n in range(4)])


def check(top: Path) -> None:
    loaded = joblib.load(top / "model.joblib")
    assert loaded["epoch"] == 3 and np.array_equal(loaded["weights"], ARRAY)
    assert np.array_equal(joblib.load(top / "model.joblib.gz"), ARRAY)
    mapped = joblib.load(top / "mapped.joblib", mmap_mode="r")
    assert isinstance(mapped, np.memmap) and np.array_equal(mapped, ARRAY)
    kept = joblib.Memory(top / "kept", verbose=0, mmap_mode=None).cache(power)
    assert all(kept.check_call_in_cache(n, 5) for n in (0, 1, 2, 3, 4, 100))
    assert not kept.check_call_in_cache(5, 5)


if __name__ == "__main__":
    main(write, check)
