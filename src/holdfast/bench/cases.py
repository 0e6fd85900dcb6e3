"""The benchmark cases of every op, from its ``bench.py``."""

from __future__ import annotations

from holdfast import ops
from holdfast.core.benchmark import Case


def full_cases() -> list[Case]:
    """Cases for a GPU: every op, configuration and dtype."""
    return [case for module in ops.modules("bench") for case in module.full_cases()]


def cpu_cases() -> list[Case]:
    """Cases for a CPU: each op and configuration with one or two dtypes."""
    return [case for module in ops.modules("bench") for case in module.cpu_cases()]


def quick_cases() -> list[Case]:
    """A few cases of the common ops."""
    listed = [module for module in ops.modules("bench") if hasattr(module, "quick_cases")]
    return [case for module in listed for case in module.quick_cases()]


def host_cases() -> dict[str, Case]:
    """Cases for measuring the time that a call takes on the host."""
    listed = [module.host_cases() for module in ops.modules("bench") if hasattr(module, "host_cases")]
    return {name: case for own in listed for name, case in sorted(own.items(), reverse=True)}
