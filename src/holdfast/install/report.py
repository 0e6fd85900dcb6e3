"""What ``hf.status`` returns: which operators of torch are replaced, and what became of their calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby

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


@dataclass(frozen=True, repr=False)
class Status:
    """Every operator that can be replaced. It prints as a table."""

    operators: tuple[OperatorStatus, ...]

    def __iter__(self) -> Iterator[OperatorStatus]:
        return iter(self.operators)

    def __getitem__(self, operator: str) -> OperatorStatus:
        """The row of an operator, by its name with or without that of the overload."""
        found = {_base(row): row for row in reversed(self.operators)}
        found |= {row.operator: row for row in self.operators}
        name = operator.removeprefix("aten::")
        if name not in found:
            family = list(dict.fromkeys(_base(row) for row in self.operators if row.family == name))
            meant = family or get_close_matches(name, list(found), 3)
            advice = f"ask for one, such as {', '.join(meant[:3])}; " if meant else ""
            kind = "a family of operators" if family else "no operator that can be replaced"
            raise KeyError(f"{name!r} is {kind}; {advice}print(hf.status()) lists all operators.")
        return found[name]

    def __repr__(self) -> str:
        head = ("operator", "family", "installed", "dtypes", "sizes", "served", "passed on", "compiled")
        rows = [head, *(_cells(name, list(same)) for name, same in groupby(self.operators, _base))]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        notes = [
            f"{row.operator}: {count} passed on, because {reason}"
            for row in self.operators
            for reason, count in row.passed_on.items()
        ]
        return "\n".join([*lines, *notes])


def _base(row: OperatorStatus) -> str:
    return row.operator.partition(".")[0]


def _cells(name: str, rows: list[OperatorStatus]) -> tuple[str, ...]:
    """The line of an operator; its overloads with an output are counted with it."""
    first = rows[0]
    installed = [row for row in rows if row.installed]
    devices = ", ".join(installed[0].devices) if installed else "no"
    dtypes = " ".join(dtype.replace("bfloat", "bf").replace("float", "f") for dtype in first.dtypes)
    served = sum(row.served for row in rows)
    passed_on = sum(sum(row.passed_on.values()) for row in rows)
    compiled = first.compiled.partition(":")[0]
    return name, first.family, devices, dtypes, first.sizes, str(served), str(passed_on), compiled


def status_of(frame: Frame | None) -> Status:
    rows = []
    for name, operator in catalogue().items():
        on = tuple(key for key in operator.devices if key in devices())
        counts = [frame.counts[name, key] for key in on if frame and name in frame.names]
        reasons = sum((count.reasons for count in counts), Counter[str]())
        rows.append(
            OperatorStatus(
                operator=name,
                family=operator.family,
                installed=bool(counts),
                devices=on,
                dtypes=tuple(FLOATS),
                sizes=operator.sizes,
                served=sum(count.served for count in counts),
                passed_on=dict(reasons),
                compiled=operator.compiled,
            )
        )
    return Status(tuple(rows))
