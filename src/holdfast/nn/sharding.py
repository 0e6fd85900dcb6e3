"""Sharding rules of the operators of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.core.sharding import Option, Rule, Whole


def _each_scale(*names: str) -> Callable[[Whole], Iterator[Option]]:
    """Options that split tensors of one shape, one of which may be missing or have one element."""

    def options(whole: Whole) -> Iterator[Option]:
        given = [name for name in names if whole[name] is not None and whole[name].dim()]
        for dim in range(whole[names[0]].dim()):
            if len({whole[name].shape for name in given}) == 1:
                yield Option(dict.fromkeys(given, dim), (dim,))

    return options


RULES = {
    "scale_in_use": Rule(_each_scale("scale", "floor")),
    "scale_in_use_backward": Rule(_each_scale("used_gradient", "scale", "floor")),
}
