"""zarr 3: groups and arrays of many small files, and a store in a zip file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import zarr

from tests.libraries.programs.frame import main

ARRAY = np.random.default_rng(3).standard_normal((300, 60), dtype=np.float32)


def write(top: Path) -> None:
    root = zarr.open_group(top / "data.zarr", mode="w", attributes={"made": "here"})
    grown = root.create_array("grown", shape=(100, 60), chunks=(50, 30), dtype="f4")
    grown[:] = 0
    grown[:] = ARRAY[:100]
    grown.append(ARRAY[100:])
    sharded = root.create_group("deep").create_array(
        "sharded", shape=(300, 60), chunks=(10, 30), shards=(100, 60), dtype="f4"
    )
    sharded[:] = ARRAY
    sharded[5, 5] = 7
    root.create_array("dropped", shape=(100,), chunks=(10,), dtype="i8")[:] = np.arange(100)
    del root["dropped"]
    root.attrs["epoch"] = 12
    zarr.consolidate_metadata(top / "data.zarr")
    with zarr.storage.ZipStore(top / "data.zip", mode="w") as store:
        zarr.create_array(store, name="a", shape=(300, 60), chunks=(100, 60), dtype="f4")[:] = ARRAY


def check(top: Path) -> None:
    root = zarr.open_group(top / "data.zarr", mode="r")
    assert sorted(root) == ["deep", "grown"]
    assert root.attrs.asdict() == {"made": "here", "epoch": 12}
    assert np.array_equal(root["grown"][:], ARRAY)
    patched = ARRAY.copy()
    patched[5, 5] = 7
    assert np.array_equal(root["deep/sharded"][:], patched)
    with zarr.storage.ZipStore(top / "data.zip", mode="r") as store:
        assert np.array_equal(zarr.open_array(store, path="a", mode="r")[:], ARRAY)


if __name__ == "__main__":
    main(write, check)
