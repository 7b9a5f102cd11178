"""pandas and pyarrow: Parquet files, a partitioned data set, and a table read through a mapping."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tests.libraries.programs.frame import main

ROWS = 5000
FRAME = pd.DataFrame(
    {
        "n": np.arange(ROWS),
        "value": np.random.default_rng(8).standard_normal(ROWS),
        "label": [f"class {n % 7}" for n in range(ROWS)],
    }
)


def write(top: Path) -> None:
    FRAME.head(10).to_parquet(top / "frame.parquet")
    FRAME.to_parquet(top / "frame.parquet")
    FRAME.to_csv(top / "frame.csv", index=False)
    for start in range(0, ROWS, 1000):
        part = FRAME.iloc[start : start + 1000]
        part.to_csv(top / "appended.csv", mode="a", header=start == 0, index=False)
    table = pa.Table.from_pandas(FRAME)
    with pq.ParquetWriter(top / "grown.parquet", table.schema) as writer:
        for start in range(0, ROWS, 1000):
            writer.write_table(table.slice(start, 1000))
    ds.write_dataset(
        table, top / "parts", format="parquet", partitioning=["label"], partitioning_flavor="hive"
    )
    with (
        pa.OSFile(str(top / "table.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as file,
    ):
        file.write_table(table, max_chunksize=500)
    FRAME.to_pickle(top / "frame.pkl.gz")


def check(top: Path) -> None:
    frames = [
        pd.read_parquet(top / "frame.parquet"),
        pd.read_csv(top / "frame.csv"),
        pd.read_csv(top / "appended.csv"),
        pq.read_table(top / "grown.parquet", memory_map=True).to_pandas(),
        pd.read_pickle(top / "frame.pkl.gz"),
    ]
    parts = ds.dataset(top / "parts", format="parquet", partitioning="hive").to_table()
    frames.append(parts.to_pandas().astype({"label": str}).sort_values("n", ignore_index=True))
    with pa.memory_map(str(top / "table.arrow")) as source:
        frames.append(pa.ipc.open_file(source).read_all().to_pandas())
    for frame in frames:
        assert list(frame["n"]) == list(FRAME["n"])
        assert np.allclose(frame["value"], FRAME["value"], rtol=1e-15)
        assert list(frame["label"]) == list(FRAME["label"])


if __name__ == "__main__":
    main(write, check)
