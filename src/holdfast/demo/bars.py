"""Progress of the demo: a bar for each stage on a terminal, else a line."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Bars:
    """A bar for each stage. A stage ends when the next one begins."""

    def __init__(self, console: Console) -> None:
        columns = TextColumn("{task.description:<42}"), BarColumn(30), TimeElapsedColumn()
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.console, self.stage, self.task = console, "", TaskID(0)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._end()
        self.progress.stop()

    def tell(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` steps of ``stage`` are done."""
        if stage != self.stage:
            self._end()
            self.stage, self.task = stage, self.progress.add_task(stage, total=total)
            if not self.console.is_terminal:
                self.console.print(stage, highlight=False)
        self.progress.update(self.task, completed=done, total=total)

    def step(self) -> None:
        """Show that one more step of the stage is done."""
        self.progress.advance(self.task)

    def _end(self) -> None:
        for task in self.progress.tasks:
            if task.id == self.task:
                self.progress.update(task.id, completed=task.total)
                self.progress.stop_task(task.id)
