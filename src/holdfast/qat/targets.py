"""Which layers of a model are quantized: patterns, their precedence, and the layers that they select."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from holdfast.core.checks import kind_of, shown
from holdfast.core.errors import InvalidArgs
from holdfast.qat.config import Config
from holdfast.qat.layers import Layer, layer_of


@dataclass(frozen=True)
class Target:
    """A layer to be quantized, with its qualified name."""

    name: str
    module: nn.Module
    layer: Layer
    config: Config

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the weights; a known layer may lack some of them."""
        return self.config.parameters or self.layer.parameters

    def __str__(self) -> str:
        """The layer in a message; the model itself has no name."""
        return repr(self.name) if self.name else "the model"

    def label(self, parameter: str) -> str:
        """The qualified name of a parameter."""
        return f"{self.name}.{parameter}" if self.name else parameter


def find_targets(model: nn.Module, config: Any) -> list[Target]:
    """The layers that ``config`` selects. Raises if a pattern has no effect."""
    rules = _checked_rules(config)
    found: list[Target] = []
    #: For each rule, whether it matches any module, matches any layer, and decides for any layer.
    matches, matches_layer, decides = ([False] * len(rules) for _ in range(3))
    for name, module, matching in _modules(model, [pattern for pattern, _ in rules]):
        for number in matching:
            matches[number] = True
        layers = {number: _layer(module, rules[number][1]) for number in matching}
        for number, layer in layers.items():
            matches_layer[number] |= layer is not None
        first = matching[0] if matching else None
        if first is None or layers[first] is None:
            continue
        decides[first] = True
        chosen, layer = rules[first][1], layers[first]
        if chosen is not None and layer is not None:
            found.append(Target(name, module, layer, chosen))
    for number, (pattern, chosen) in enumerate(rules):
        if not decides[number] and not (chosen is None and matches[number] and not matches_layer[number]):
            _refuse(model, pattern, chosen, matches[number], matches_layer[number])
    return found


def _checked_rules(config: Any) -> list[tuple[Any, Config | None]]:
    if isinstance(config, Config):
        return [("*", config)]
    if not isinstance(config, Mapping) or not config:
        raise InvalidArgs(
            f"config is {shown(config)}; it must be a hf.qat.Config, such as hf.qat.preset('w8a8'), or a "
            "mapping from patterns to a Config or None."
        )
    for pattern, chosen in config.items():
        if chosen is not None and not isinstance(chosen, Config):
            raise InvalidArgs(
                f"the pattern {shown(pattern)} has {shown(chosen)}; it must have a hf.qat.Config or None."
            )
        if isinstance(pattern, type):
            accepted = issubclass(pattern, nn.Module)
        else:
            accepted = isinstance(pattern, str) or callable(pattern)
        if not accepted:
            raise InvalidArgs(
                f"the pattern {shown(pattern)} is {kind_of(pattern)}; it must be a name of modules "
                "with wildcards, a subclass of torch.nn.Module, or a function of a name and a module."
            )
    return list(config.items())


def _modules(model: nn.Module, patterns: list[Any]) -> list[tuple[str, nn.Module, list[int]]]:
    """Each module with the numbers of the patterns that match it. Parametrizations are left out.

    A module that is in several places has several names. It is one layer: a pattern matches it if it matches
    any of its names. The first name is returned.
    """
    by_name: dict[str, set[int]] = {}
    found: dict[nn.Module, tuple[str, set[int]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, own = name.rpartition(".")
        if own == "parametrizations" or (name and parent not in by_name):
            continue
        inherited = by_name[parent] if name else ()
        by_name[name] = {
            number
            for number, pattern in enumerate(patterns)
            if _matches(pattern, name, module) or (number in inherited and _is_inherited(pattern))
        }
        found.setdefault(module, (name, set()))[1].update(by_name[name])
    return [(name, module, sorted(matching)) for module, (name, matching) in found.items()]


def _matches(pattern: Any, name: str, module: nn.Module) -> bool:
    if isinstance(pattern, str):
        return fnmatchcase(name, pattern)
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    return bool(pattern(name, module))


def _is_inherited(pattern: Any) -> bool:
    """Whether the pattern stands for everything inside a module that it matches."""
    return isinstance(pattern, (str, type))


def _layer(module: nn.Module, config: Config | None) -> Layer | None:
    """The record of a layer that ``config`` can quantize; None for other modules."""
    layer = layer_of(module)
    if config is None:
        return layer
    if config.weight is None and layer is not None and not layer.inputs:
        return None
    if config.parameters is None:
        return layer
    if not any(hasattr(module, name) for name in config.parameters):
        return None
    return layer or Layer(inputs=tuple(inspect.signature(module.forward).parameters)[:1])


def _refuse(
    model: nn.Module, pattern: Any, chosen: Config | None, matches: bool, matches_layer: bool
) -> None:
    if matches_layer:
        reason = "changes nothing: earlier patterns decide for all layers that it matches. Put it before them"
    elif matches:
        named = None if chosen is None else chosen.parameters
        reason = "matches no layer that can be quantized" + (
            f": it matches no module with a parameter {' or '.join(named)}"
            if named
            else ". Name the weights of other modules by Config(parameters=)"
        )
    else:
        names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
        reason = f"matches no module. The modules are {', '.join(names[:20])}{', ...' if names[20:] else ''}"
    raise InvalidArgs(f"the pattern {shown(pattern)} {reason}. The model is unchanged.")
