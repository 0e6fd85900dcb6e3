"""A griffe extension: the ``>>>`` examples of docstrings become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^>>> .*\n(?:(?!\n).+\n?)*)(?:\n>>> .*\n(?:(?!\n).+\n?)*)*", re.MULTILINE)


class DocstringExamples(griffe.Extension):
    """Puts a fence around each example."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value + "\n"
            obj.docstring.value = _EXAMPLE.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", text)
