"""numpy: arrays, archives, and arrays in mapped memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.libraries.programs.frame import main

ARRAY = np.random.default_rng(1).standard_normal((3000, 100), dtype=np.float32)


def write(top: Path) -> None:
    np.save(top / "array.npy", ARRAY[:10])
    np.save(top / "array.npy", ARRAY)
    np.savez(top / "arrays.npz", first=ARRAY, second=ARRAY[::2], names=np.array(["a", "b"]))
    np.savez_compressed(top / "packed.npz", first=ARRAY)
    np.savetxt(top / "table.csv", ARRAY[:50], delimiter=",")
    mapped = np.lib.format.open_memmap(
        top / "mapped.npy", mode="w+", dtype=ARRAY.dtype, shape=ARRAY.shape
    )
    mapped[:2000] = ARRAY[:2000]
    mapped.flush()
    mapped[2000:] = ARRAY[2000:]  # and never flushed
    del mapped
    raw = np.memmap(top / "raw.dat", ARRAY.dtype, "w+", shape=ARRAY.shape)
    raw[::2] = ARRAY[::2]
    del raw
    raw = np.memmap(top / "raw.dat", ARRAY.dtype, "r+", shape=ARRAY.shape)
    raw[1::2] = ARRAY[1::2]
    del raw


def check(top: Path) -> None:
    for array in (
        np.load(top / "array.npy"),
        np.load(top / "array.npy", mmap_mode="r"),
        np.load(top / "mapped.npy"),
        np.load(top / "mapped.npy", mmap_mode="c"),
        np.memmap(top / "raw.dat", ARRAY.dtype, "r", shape=ARRAY.shape),
        np.fromfile(top / "raw.dat", ARRAY.dtype).reshape(ARRAY.shape),
    ):
        assert np.array_equal(array, ARRAY)
    with np.load(top / "arrays.npz") as arrays:
        assert np.array_equal(arrays["first"], ARRAY)
        assert np.array_equal(arrays["second"], ARRAY[::2])
        assert arrays["names"].tolist() == ["a", "b"]
    with np.load(top / "packed.npz") as arrays:
        assert np.array_equal(arrays["first"], ARRAY)
    assert np.allclose(np.loadtxt(top / "table.csv", delimiter=","), ARRAY[:50])


if __name__ == "__main__":
    main(write, check)
