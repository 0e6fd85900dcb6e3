"""Draws the import graph of the package."""

from __future__ import annotations

import ast
import graphlib
from functools import cache
from pathlib import Path

from drawings import svg

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "holdfast"

Graph = dict[str, set[str]]

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 132.0, 34.0, 22.0, 40.0


@cache
def imported_modules(source: str) -> frozenset[str]:
    """The modules of holdfast that ``source`` imports, including imports in functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                raise ValueError(f"line {node.lineno} has a relative import; imports are absolute here.")
            if node.module in ("holdfast", "holdfast.ops"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return frozenset(name for name in found if name.split(".")[0] == "holdfast")


def package_graph(package: Path = PACKAGE) -> Graph:
    """The imports between the parts (folders and files) of the package.

    ``holdfast`` is the ``__init__`` of the package, which has the public names. ``__main__`` only starts the
    command line, so it is left out.
    """
    files = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    graph: Graph = {part: set() for part in files | folders | {"holdfast"}}
    for path in sorted(package.rglob("*.py")):
        first = path.relative_to(package).with_suffix("").parts[0]
        if first == "__main__":
            continue
        own = "holdfast" if first == "__init__" else first
        for module in imported_modules(path.read_text()):
            part = [*module.split("."), "holdfast"][1]
            graph[own].add(part if part in graph else "holdfast")
    return {part: others - {part} for part, others in graph.items()}


def op_graph(package: Path = PACKAGE) -> Graph:
    """The imports between the folders of ``ops``."""
    folders = {path.parent.name for path in (package / "ops").glob("*/__init__.py")}
    graph: Graph = {folder: set() for folder in folders}
    for path in sorted((package / "ops").glob("*/**/*.py")):
        own = path.relative_to(package / "ops").parts[0]
        for module in imported_modules(path.read_text()):
            names = module.split(".")
            if names[1:2] == ["ops"] and len(names) > 2 and names[2] in folders - {own}:
                graph[own].add(names[2])
    return graph


def levels(graph: Graph) -> list[list[str]]:
    """The nodes in rows, each node below all nodes that import it. Raises graphlib.CycleError on a cycle."""
    row: dict[str, int] = dict.fromkeys(graph, 0)
    for node in reversed(list(graphlib.TopologicalSorter(graph).static_order())):
        for other in graph[node]:
            row[other] = max(row[other], row[node] + 1)
    return [sorted(node for node in graph if row[node] == n) for n in range(max(row.values()) + 1)]


def reduced(graph: Graph) -> Graph:
    """The transitive reduction of the graph."""
    above: Graph = {}
    for node in graphlib.TopologicalSorter(graph).static_order():
        above[node] = graph[node].union(*(above[other] for other in graph[node]))
    return {
        node: {other for other in others if not any(other in above[between] for between in others)}
        for node, others in graph.items()
    }


def drawings() -> dict[str, str]:
    """The drawings, by file name."""
    return {
        "imports.svg": _draw(package_graph(), "Which part of holdfast imports which"),
        "imports_ops.svg": _draw(op_graph(), "Which op imports which"),
    }


def _draw(graph: Graph, title: str) -> str:
    rows = levels(graph)
    edges = reduced(graph)
    widest = max(map(len, rows))
    width = widest * (_WIDTH + _GAP_X) + _GAP_X
    places: dict[str, svg.Point] = {}
    for number, row in enumerate(rows):
        row = sorted(row, key=lambda node: _middle(node, edges, places, width))
        left = (width - len(row) * (_WIDTH + _GAP_X) + _GAP_X) / 2
        for column, node in enumerate(row):
            places[node] = (left + column * (_WIDTH + _GAP_X), 16 + number * (_HEIGHT + _GAP_Y))
    parts = []
    for node, others in sorted(edges.items()):
        for other in sorted(others):
            (x0, y0), (x1, y1) = places[node], places[other]
            aside = max(-0.42, min(0.42, (x0 - x1) / 400)) * _WIDTH  # arrows to one box end side by side
            start, end = x0 + _WIDTH / 2 - aside / 2, x1 + _WIDTH / 2 + aside
            parts.append(svg.arrow((start, y0 + _HEIGHT), (end, y1 - 2)))
    for node, (x, y) in places.items():
        parts.append(svg.box(x, y, _WIDTH, _HEIGHT, radius=5))
        parts.append(svg.text(x + _WIDTH / 2, y + _HEIGHT / 2 + 4, node, anchor="middle", size=11))
    return svg.drawing(width, 16 + len(rows) * (_HEIGHT + _GAP_Y), title, parts)


def _middle(node: str, edges: Graph, places: dict[str, svg.Point], width: float) -> tuple[float, str]:
    """Sort key of a node in its row: the mean position of the nodes that import it."""
    users = [places[user][0] for user, others in edges.items() if node in others and user in places]
    return (sum(users) / len(users) if users else width / 2, node)
