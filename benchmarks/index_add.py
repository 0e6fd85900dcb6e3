"""Times index_add on a GPU: N terms to N / 10 rows of D float32 numbers.

    python benchmarks/index_add.py --json benchmarks/scatter/h200.json

Prints microseconds of torch's index_add and scatter_add, of torch's deterministic mode, and of holdfast.
Results are first compared with those of the CPU, bit by bit. Skewed: a few destinations have most terms.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table

import holdfast as hf

#: Columns and numbers of terms. Widths that are no multiple of 16 are common in graph networks.
COLUMNS = (1, 16, 100, 128, 602, 1024)
TERMS = (10**4, 10**5, 10**6, 10**7)
MOST_ELEMENTS = 1_300_000_000
#: Up to this many elements are compared with the CPU.
COMPARED = 10**7


def microseconds(call: Callable[[], object]) -> float:
    found = triton.testing.do_bench(call, warmup=3, rep=12, return_mode="median")
    return round(float(found) * 1e3, 1)


def measured(terms: int, columns: int, spread: str) -> dict[str, object]:
    generator = torch.Generator("cuda").manual_seed(7)
    rows = terms // 10
    share = torch.rand(terms, dtype=torch.float64, device="cuda", generator=generator)
    index = (rows**share - 1 if spread == "skewed" else rows * share).long().clamp(0, rows - 1)
    source = torch.randn(terms, columns, device="cuda", generator=generator)
    table = torch.randn(rows, columns, device="cuda", generator=generator)
    if source.numel() <= COMPARED:
        of_cpu = hf.index_add(table.cpu(), 0, index.cpu(), source.cpu())
        if not torch.equal(hf.index_add(table, 0, index, source).cpu(), of_cpu):
            raise SystemExit(
                f"N={terms} D={columns} {spread}: the GPU and the CPU differ; nothing was timed."
            )
    elements = index[:, None].expand(-1, columns)
    row: dict[str, object] = {"D": columns, "N": terms, "R": rows, "spread": spread}
    row["index_add"] = microseconds(lambda: torch.index_add(table, 0, index, source))
    row["scatter_add"] = microseconds(lambda: torch.scatter_add(table, 0, elements, source))
    torch.use_deterministic_algorithms(True)
    row["deterministic"] = microseconds(lambda: torch.index_add(table, 0, index, source))
    torch.use_deterministic_algorithms(False)
    row["holdfast"] = microseconds(lambda: hf.index_add(table, 0, index, source))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    path = parser.parse_args().json
    cases = [
        (terms, columns, spread)
        for columns in COLUMNS
        for terms in TERMS
        for spread in ("uniform", "skewed")
        if terms * columns <= MOST_ELEMENTS
    ]
    device = torch.cuda.get_device_name()
    rows: list[dict[str, object]] = []
    found = {
        "device": device,
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "unit": "microseconds",
        "rows": rows,
    }
    for case in track(cases, "index_add", transient=True):
        rows.append(measured(*case))
        if path:  # after each case, so that an interrupted run keeps its results
            path.write_text(json.dumps(found, indent=1) + "\n")
    shown = Table(*rows[0], title=f"{device}, microseconds")
    for row in rows:
        shown.add_row(*(str(value) for value in row.values()))
    Console(width=110).print(shown)


if __name__ == "__main__":
    main()
