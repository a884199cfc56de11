"""Reads the rows of a table: CSV, TSV and other text columns, JSONL or Parquet."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..runtime.errors import DataError
from ..suggestions import shell_word

# the first bytes of .xlsx and .ods, and of .xls
_WORKBOOKS = b"PK\3\4", b"\xd0\xcf\x11\xe0"
_UTF16 = b"\xff\xfe", b"\xfe\xff"
# prints the path and label of each image
_FROM_COCO = (
    "INDEX(.images[]; .id) as $images | .annotations[] | "
    '[$images["\\(.image_id)"].file_name, .category_id] | @csv'
)


def records(path: str) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yields each row's number and values; the first row contains the column names.

    In text formats, the names are row 1, as in a spreadsheet; in JSONL and Parquet, they are not
    counted.

    Raises:
        DataError: the table cannot be read; the message includes the row number.
    """
    number = 0
    word = shell_word(path)
    rows: Iterable[tuple[int, Sequence[Any]]]
    try:
        with open(path, "rb") as file:
            head = file.readline(1 << 16)
            file.seek(3 * head.startswith(b"\xef\xbb\xbf"))
            lines = map(bytes.decode, file)
            if head.startswith(_WORKBOOKS):
                raise DataError(
                    f"{path}: workbooks are not supported; save the sheet as CSV UTF-8, or run "
                    f"libreoffice --convert-to csv {word}, and set data.table to that file"
                )
            if head.startswith(b"PAR1"):
                parquet = importlib.import_module("pyarrow.parquet")
                rows = _named(parquet.read_table(path).to_pylist())
            elif head.lstrip(b"\xef\xbb\xbf ").startswith((b"{", b"[")):
                rows = _named(map(json.loads, lines))
            else:
                rows = enumerate(csv.reader(lines, **_dialect(head.decode(errors="ignore"))), 1)
            for number, row in rows:
                if not number and "annotations" in row:
                    raise DataError(
                        f"{path}: COCO files are not supported; convert them to a table, and set "
                        f"data.table to it: jq -r {shell_word(_FROM_COCO)} {word} > {word}.csv"
                    )
                yield number, row
        if not number:
            raise DataError(f"{path} is empty; write a path,label header and one row per image")
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet needs pyarrow; run pip install pyarrow, or save the table as CSV"
        ) from error
    except UnicodeDecodeError as error:
        name = "UTF-16" if head.startswith(_UTF16) else "WINDOWS-1252"
        raise DataError(
            f"{path}: row {number + 1} is not UTF-8; if it is {name}, run iconv -f {name} "
            f"-t UTF-8 {word} > {word}.csv, and set data.table to that file"
        ) from error
    except (csv.Error, ValueError, AttributeError) as error:
        raise DataError(
            f"{path}: row {number + 1} cannot be read: {error}; CSV may lack a quote; JSONL "
            f"needs one object per line, which jq -c '.[]' {word} prints from a list"
        ) from error


def text(value: Any) -> str:
    """Returns a table value as text; empty if it is missing or a list."""
    if value is None or value != value or isinstance(value, list | dict):
        return ""
    # an integer column with missing values
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _dialect(first: str) -> dict[str, Any]:
    """Returns the ``csv`` options for text whose first line is ``first``."""
    widths = {
        each: len(next(csv.reader([first], delimiter=each, skipinitialspace=True), []))
        for each in "\t,;|"
    }
    best = max(widths, key=widths.__getitem__)
    delimiter = best if widths[best] > 1 else " "
    return {"delimiter": delimiter, "skipinitialspace": True, "strict": True}


def _named(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[int, Sequence[Any]]]:
    names: list[str] = []
    for number, row in enumerate(rows, 1):
        if not names:
            names = [*row.keys()]
            yield 0, names
        yield number, [*map(row.get, names)]
