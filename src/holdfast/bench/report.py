"""The results of a benchmark, as a table of ratios and as JSON."""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from holdfast import __version__
from holdfast.bench.peers import PEERS
from holdfast.core.benchmark import Case
from holdfast.core.machine import package_versions, processor

NOTE = (
    "Times are medians. A plan writes into given memory; the peers and the hf functions also allocate "
    "their output. 'of copy' is the rate at which the op moves the bytes that it must move, relative to the "
    "rate of copy_ in this run. It may be above 100 %: the tensors of a small case fit in a cache, "
    "and a kernel that reads more than it writes, or writes past the caches, moves its bytes faster than a "
    "copy. The other columns are speed-ups over torch: 'torch op' is torch's operator for the same work "
    "(quantize_per_*, their dequantize(), fake_quantize_per_*_affine and its gradient), 'eager' and "
    "'compiled' are the plain formula."
)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass
class Row:
    """The times of one case and its peers, in seconds. ``reasons``: why a peer has no time."""

    case: Case
    shape: tuple[int, ...]
    sku: str
    bytes_moved: int
    seconds: float
    peers: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def of_copy(self, copy_rate: float) -> float:
        return self.bytes_moved / self.seconds / copy_rate

    def speedup(self, peer: str) -> float | None:
        return self.peers[peer] / self.seconds if peer in self.peers else None

    def to_json(self, copy_rate: float) -> dict[str, Any]:
        case = self.case
        return {
            "name": case.name,
            "op": case.op,
            "granularity": case.label,
            **case.facts(),
            "function": case.function,
            "shape": list(self.shape),
            "sku": self.sku,
            "bytes_moved": self.bytes_moved,
            "seconds": self.seconds,
            "of_copy": self.of_copy(copy_rate),
            "peers": {
                peer: {"seconds": self.peers[peer], "speedup": self.speedup(peer)}
                if peer in self.peers
                else {"reason": self.reasons.get(peer, "")}
                for peer in dict.fromkeys((*PEERS, *self.peers, *self.reasons))
            },
        }


@dataclass
class Report:
    """One run of the benchmark."""

    device: str
    threads: int | None
    copy_rate: float = 0.0
    rows: list[Row] = field(default_factory=list)
    host_microseconds: dict[str, float] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    date: str = field(default_factory=now)
    versions: dict[str, str | None] = field(default_factory=lambda: versions())

    def to_json(self) -> dict[str, Any]:
        made = asdict(self)
        made["copy_bytes_per_second"] = made.pop("copy_rate")
        made["rows"] = [row.to_json(self.copy_rate) for row in self.rows]
        return made

    def print(self, console: Console) -> None:
        threads = "" if self.threads is None else f", {self.threads} threads"
        table = Table(title=f"{self.device}{threads}: copy_ moves {self.copy_rate / 1e9:,.1f} GB/s")
        table.add_column("case", overflow="fold")
        peers = dict.fromkeys((*PEERS, *(peer for row in self.rows for peer in (*row.peers, *row.reasons))))
        for heading in ("time", "of copy", *peers):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            ratios = (row.speedup(peer) for peer in peers)
            table.add_row(
                row.case.name,
                duration(row.seconds),
                f"{100 * row.of_copy(self.copy_rate):.0f} %",
                *("n/a" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
            )
        console.print(table)
        for peer, reason in sorted({(p, r) for row in self.rows for p, r in row.reasons.items()}):
            console.print(f"n/a, {peer}: {reason}.", markup=False)
        console.print(NOTE, style="dim")
        if self.host_microseconds:
            costs = ", ".join(f"{name} {cost:.1f} us" for name, cost in self.host_microseconds.items())
            console.print(f"Host cost of a call on a small tensor: {costs}.", markup=False)
        for sentence in self.refused:
            console.print(sentence, style="bold red", markup=False)


def duration(seconds: float) -> str:
    """A time with three significant digits, in ms or us."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def versions() -> dict[str, str | None]:
    """The versions of holdfast and of the packages that affect speed."""
    return {"holdfast": __version__, **package_versions()}


def device_name(device: torch.device) -> str:
    """The model name of the GPU or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
