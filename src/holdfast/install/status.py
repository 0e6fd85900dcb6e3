"""``status``: which operators of torch are replaced, and what became of their calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.core.dtypes import FLOATS
from holdfast.install.catalogue import catalogue
from holdfast.install.frame import Frame, devices


@dataclass(frozen=True)
class OperatorStatus:
    """One operator of torch."""

    operator: str
    #: Its name in ``include`` and ``exclude``.
    family: str
    installed: bool
    #: The devices of this build of torch that it is replaced on.
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    sizes: str
    served: int
    #: The number of calls that went to torch's own kernel, by reason.
    passed_on: dict[str, int]
    #: Whether code of torch.compile uses the kernel.
    compiled: str


@dataclass(frozen=True)
class Status:
    """Every operator that can be replaced. ``str`` is a table."""

    operators: tuple[OperatorStatus, ...]

    def __iter__(self) -> Iterator[OperatorStatus]:
        return iter(self.operators)

    def __getitem__(self, operator: str) -> OperatorStatus:
        return {row.operator: row for row in self.operators}[operator.removeprefix("aten::")]

    def __str__(self) -> str:
        head = ("operator", "installed", "devices", "dtypes", "served", "passed on", "compiled")
        rows = [head, *map(_cells, self.operators)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        notes = [
            f"{row.operator}: {count} passed on, {reason}"
            for row in self.operators
            for reason, count in row.passed_on.items()
        ]
        return "\n".join([*lines, *notes])


def _cells(row: OperatorStatus) -> tuple[str, ...]:
    return (
        row.operator, "yes" if row.installed else "no", ", ".join(row.devices), ", ".join(row.dtypes),
        str(row.served), str(sum(row.passed_on.values())), row.compiled.partition(":")[0],
    )  # fmt: skip


def status_of(frame: Frame | None) -> Status:
    dtypes = tuple(FLOATS)
    rows = []
    for name, operator in catalogue().items():
        on = tuple(key for key in operator.devices if key in devices())
        counts = [frame.counts[name, key] for key in on if frame and name in frame.names]
        reasons = sum((count.reasons for count in counts), Counter[str]())
        rows.append(
            OperatorStatus(
                name, operator.family, bool(counts), on, dtypes, operator.sizes,
                sum(count.served for count in counts), dict(reasons), operator.compiled,
            )  # fmt: skip
        )
    return Status(tuple(rows))
