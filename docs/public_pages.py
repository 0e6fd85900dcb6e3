"""A griffe extension for the API pages."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^>>> .*\n(?:(?!\n).+\n?)*)(?:\n>>> .*\n(?:(?!\n).+\n?)*)*", re.MULTILINE)

#: Names of default values in the sources, and the equivalent public expressions.
DEFAULTS = {"ONE_SCALE": "PerTensor()", "_EACH_TOKEN": "PerToken()"}


class PublicPages(griffe.Extension):
    """Puts each ``>>>`` example in a code block, and shows defaults as public expressions."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value + "\n"
            obj.docstring.value = _EXAMPLE.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", text)

    def on_function_instance(self, *, func: Any, **_: Any) -> None:
        for parameter in func.parameters:
            parameter.default = DEFAULTS.get(str(parameter.default), parameter.default)
