"""The benchmark cases of every op, which its ``bench.py`` lists for each kind of run."""

from __future__ import annotations

from holdfast import ops
from holdfast.core.benchmark import Case


def full_cases() -> list[Case]:
    """What a GPU is timed on: every op, configuration and dtype."""
    return [case for module in ops.modules("bench") for case in module.full_cases()]


def cpu_cases() -> list[Case]:
    """What a CPU is timed on: each op and configuration once or twice."""
    return [case for module in ops.modules("bench") for case in module.cpu_cases()]


def quick_cases() -> list[Case]:
    """A handful that shows each op."""
    return [case for module in ops.modules("bench") for case in module.quick_cases()]


def host_cases() -> dict[str, Case]:
    """What the time on the host is measured of."""
    listed = [module.host_cases() for module in ops.modules("bench") if hasattr(module, "host_cases")]
    return {name: case for own in listed for name, case in sorted(own.items(), reverse=True)}
