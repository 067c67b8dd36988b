"""Write a recording's table to a CSV or Parquet file, without ever leaving an incomplete file."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade.caches.files import write_whole
from saccade.recording.table_rows import COLUMNS, TableRow
from saccade.support.errors import missing_extra, value_error
from saccade.support.validation import check_type
from saccade.text import visible


def checked_file(path: object) -> Path:
    """Check that a table can be written to a path, and return the path."""
    check_type("path", path, (str, os.PathLike), "be a path")
    destination = Path(path)  # type: ignore[arg-type]
    if destination.is_dir() or not destination.parent.is_dir():
        raise value_error("path", "name a file in an existing folder", visible(str(path)))
    return destination


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[TableRow]) -> None:
    """Write the rows of a table as CSV in UTF-8, with a header; NaN is an empty cell."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if _is_nan(value) else value for name, value in row.items()} for row in rows)
    write_whole(path, memoryview(text.getvalue().encode()))


def parquet_writer() -> Any:
    """Return a function that converts the columns of a table to the bytes of a Parquet file.

    Raises:
        ImportError: neither pyarrow nor pandas with a Parquet engine is installed.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415  imported when used
    except ModuleNotFoundError:
        return _pandas_writer()

    def by_pyarrow(columns: dict[str, list[Any]]) -> bytes:
        data = io.BytesIO()
        pa.parquet.write_table(pa.table(columns), data)
        return data.getvalue()

    return by_pyarrow


def _pandas_writer() -> Any:
    """Return a Parquet writer that uses pandas and fastparquet, for use without pyarrow."""
    try:
        import fastparquet  # noqa: F401, PLC0415
        import pandas as pd  # noqa: PLC0415
    except ModuleNotFoundError:
        raise missing_extra("pyarrow", "tables") from None

    def by_pandas(columns: dict[str, list[Any]]) -> bytes:
        data = pd.DataFrame(columns).to_parquet(None, engine="fastparquet", index=False)
        return bytes(data)

    return by_pandas


def write_parquet(path: Path, rows: Sequence[TableRow], convert: Any) -> None:
    """Write the rows of a table as Parquet, using the function that `parquet_writer` returns."""
    columns = {name: [row[name] for row in rows] for name in COLUMNS}
    write_whole(path, memoryview(convert(columns)))


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)
