"""Writes the generated parts of the documentation: tables between markers, and drawings.

A table stands between ``<!-- generated: NAME WORDS -->`` and ``<!-- /generated -->``. NAME is a key of
TABLES, and WORDS are its arguments. Run this after a change of a plan, a descriptor, an error, an import or
a stored benchmark:

    python docs/generate.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import model_results
import torch
from drawings import estimators, imports, model_steps, speed, sums, svg

import holdfast as hf
from holdfast.core import errors
from holdfast.core.contract import printed_bound
from holdfast.core.dtypes import dtype_name
from holdfast.proof.catalogue import Entry, catalogue

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ASSETS = DOCS / "assets"
#: Documents that may have generated parts or code.
DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

_PART = re.compile(r"(<!-- generated: ([^>]*?) -->\n).*?(<!-- /generated -->)", re.DOTALL)


@cache
def _entries() -> list[Entry]:
    return catalogue()


def _entries_of(ops: tuple[str, ...]) -> list[Entry]:
    """The plans of ``ops``, or of all ops if it is empty."""
    known = {entry.op for entry in _entries()}
    unknown = sorted(set(ops) - known)
    if unknown:
        raise SystemExit(f"no plan has the op {unknown[0]}; known are {', '.join(sorted(known))}.")
    return [entry for entry in _entries() if not ops or entry.op in ops]


def plan_table(*ops: str) -> str:
    """A table of the results and guarantees of each plan."""
    entries = _entries_of(ops)
    lines = ["| plan | result | same bits | error, ULP |", "|---|---|---|---|"]
    for entry in entries:
        cells = (
            f"`{entry.plan}`",
            _code(_result(hf.plans.all()[entry.plan])),
            entry.bit_stable if entry.deterministic else "no",
            "<br>".join(f"{name}: {printed_bound(ulp)}" for name, ulp in entry.ulp.items()),
        )
        lines.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(sorted({str(entry.numerics_version) for entry in entries}))
    return "\n".join([*lines, "", f"{_backends(entries)} Numerics version {versions}."])


def _code(text: str) -> str:
    """Code in a table cell, with ``|`` escaped."""
    return f"`{text}`" if "|" not in text else f"<code>{escape(text).replace('|', '&#124;')}</code>"


def _backends(entries: list[Entry]) -> str:
    """The backends of the plans, one sentence per set of backends."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        found.setdefault(", ".join(sorted(entry.backends)), []).append(f"`{entry.plan}`")
    if len(found) == 1:
        return f"Backends: {next(iter(found))}."
    return " ".join(f"Backends of {', '.join(plans)}: {backends}." for backends, plans in found.items())


def _result(plan: type[Any]) -> str:
    """The formula of the plan: the start of the docstring of its op."""
    described = next(base for base in plan.__mro__ if "op" in vars(base) and base.__doc__)
    return re.split(r"[;.] |\.$", str(described.__doc__).strip().splitlines()[0])[0]


def field_tables(*ops: str) -> str:
    """Tables of the descriptor fields and args of each plan."""
    parts = []
    for entry in _entries_of(ops):
        plan = hf.plans.all()[entry.plan]
        dtypes = {name: ", ".join(accepted) for name, accepted in entry.dtypes.items()}
        parts += [f"## {entry.plan}", ""]
        for kind, known in ((plan.Descriptor, dtypes), (plan.Args, {})):
            parts += [f"`{kind.__name__}`{_described(kind)}", "", _fields(kind, known), ""]
    return "\n".join(parts).rstrip()


def _described(kind: type[Any]) -> str:
    """The docstring of a dataclass as one paragraph, or an empty string."""
    doc = inspect.cleandoc(kind.__doc__ or "")
    return "" if not doc or doc.startswith(f"{kind.__name__}(") else f": {' '.join(doc.split())}"


def _fields(kind: type[Any], dtypes: dict[str, str]) -> str:
    hints = typing.get_type_hints(kind)
    lines = ["| field | type | default |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        shown = dtypes.get(field.name) or _type(hints[field.name])
        lines.append(f"| `{field.name}` | {shown} | {_default(field)} |")
    return "\n".join(lines)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "required"
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if isinstance(value, torch.dtype):
        return f"`{dtype_name(value)}`"
    return f"`{value if isinstance(value, str) else repr(value)}`".replace("|", "\\|")


def _type(hint: Any) -> str:
    """A type as a Python user would write it."""
    if hint is type(None):
        return "None"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_type(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "tuple of int"
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(f'"{option}"' for option in typing.get_args(hint))
    if isinstance(hint, type):
        return {torch.Tensor: "Tensor", torch.dtype: "dtype"}.get(hint, hint.__name__)
    return _escaped(str(hint))


def error_table() -> str:
    """A table of the errors, their builtin base classes and meanings."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    lines = ["| error | is also a | meaning |", "|---|---|---|"]
    for kind in kinds:
        builtins = [base.__name__ for base in kind.__bases__ if base.__module__ == "builtins"]
        lines.append(f"| `hf.{kind.__name__}` | {', '.join(f'`{b}`' for b in builtins)} | {kind.__doc__} |")
    return "\n".join(lines)


@cache
def _sentences() -> list[list[str]]:
    """For each code block in errors.md, the messages of the errors that it raises."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / "errors.md").read_text(), re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(blocks[0], "errors.md", "exec"), namespace)
    message: Callable[[Callable[[], object]], str] = namespace["message"]
    found: list[list[str]] = [[]]

    def recorded(call: Callable[[], object]) -> str:
        found[-1].append(message(call))
        return found[-1][-1]

    namespace["message"] = recorded
    for block in blocks[1:]:
        found.append([])
        exec(compile(block, "errors.md", "exec"), namespace)
    return found


def error_sentences(block: str) -> str:
    """The error messages of one code block of errors.md, quoted."""
    return "\n>\n".join("> " + sentence.replace("\n", "\n> ") for sentence in _sentences()[int(block)])


def machine_table() -> str:
    """A table of the stored benchmark runs."""
    lines = [
        "| machine | torch | Triton | Numba | date | a copy moves | cases |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in speed.machines():
        report = speed.stored(name)
        versions = report["versions"]
        threads = f", {report['threads']} threads" if report["threads"] else ""
        cells = (
            f"[{report['device']}{threads}](#{_anchor(report)})",
            *(str(versions[part]) for part in ("torch", "triton", "numba")),
            report["date"][:10],
            f"{report['copy_bytes_per_second'] / 1e9:,.0f} GB/s",
            str(len(report["rows"])),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _anchor(report: speed.Report) -> str:
    return re.sub(r"[^a-z0-9]+", "-", report["device"].lower())


def measured() -> str:
    """All cases of the stored runs: a chart and a table for each page of ops."""
    return "\n\n".join(_machine(name) for name in speed.machines())


def _machine(name: str) -> str:
    report = speed.stored(name)
    parts = [f"## {report['device']}", "", f"{speed.where(report)}."]
    if report["host_microseconds"]:
        costs = ", ".join(f"{call} {cost:.1f} µs" for call, cost in report["host_microseconds"].items())
        parts += ["", f"Host cost of one call on a small tensor: {costs}."]
    for page, rows in speed.by_page(report).items():
        title = f"{page}, {report['device']}"
        parts += [
            "",
            f"### {title}",
            "",
            f"![Measured: {title}](assets/speed_{name}_{page}.svg)",
            "",
            '<details markdown="1">',
            "<summary>All numbers</summary>",
            "",
            measured_table(rows),
            "",
            "</details>",
        ]
    return "\n".join(parts)


def measured_table(rows: list[speed.Row]) -> str:
    """A table of cases with their sizes, times and ratios."""
    lines = ["| case | dtypes | size | time | of copy | torch.compile | torch's operator |"]
    lines.append("|---|---|---|---:|---:|---:|---:|")
    for row in rows:
        ratios = (speed.speedup(row, peer) for peer in (speed.COMPILED, speed.TORCH))
        cells = (
            speed.label(row),
            speed.dtypes(row),
            "x".join(map(str, row["shape"])),
            speed.duration(row["seconds"]),
            f"{100 * row['of_copy']:.0f} %",
            *("n/a" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def charts(page: str) -> str:
    """The charts of one page of ops."""
    parts = []
    for name in speed.machines():
        report = speed.stored(name)
        if page in speed.by_page(report):
            parts.append(f"![Measured on {report['device']}](assets/speed_{name}_{page}.svg)")
    if not parts:
        raise SystemExit(f"no stored benchmark has cases of {page}.")
    return "\n\n".join([*parts, "Every number, and how it was measured: [measured results](results.md)."])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


TABLES: dict[str, Callable[..., str]] = {
    "plans": plan_table,
    "fields": field_tables,
    "errors": error_table,
    "said": error_sentences,
    "machines": machine_table,
    "measured": measured,
    "models": model_results.section,
    "charts": charts,
}


def regenerated(text: str) -> str:
    """``text`` with its generated parts updated."""

    def made(match: re.Match[str]) -> str:
        name, *words = match[2].split()
        return f"{match[1]}{TABLES[name](*words)}\n{match[3]}"

    return _PART.sub(made, text)


def drawn() -> dict[Path, str]:
    """Every generated file of docs/assets, and its content."""
    made = {"drawings.css": svg.stylesheet()}
    for module in (estimators, imports, model_steps, speed, sums):
        made |= module.drawings()
    return {ASSETS / name: text for name, text in made.items()}


def main() -> None:
    for path in DOCUMENTS:
        path.write_text(regenerated(path.read_text()))
    wanted = drawn()
    for path, text in wanted.items():
        path.write_text(text)
    for path in ASSETS.glob("*.svg"):
        if path not in wanted:
            path.unlink()


if __name__ == "__main__":
    main()
