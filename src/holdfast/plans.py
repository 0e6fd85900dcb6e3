"""Every plan by name, each with its descriptor and its args.

``plans.QuantizePerTensorPlan`` takes a ``plans.QuantizePerTensorDescriptor`` and runs on
``plans.QuantizePerTensorArgs``. ``all()`` gives the plans by name. They are found in the ops; type checkers
read ``plans.pyi``.
"""

from __future__ import annotations

from typing import Any

from holdfast import ops
from holdfast.core.descriptor import Descriptor
from holdfast.core.plan import Args, Plan
from holdfast.core.registry import plans as _registered

ops.modules("plan")  # a plan is registered when its module is imported


def all() -> dict[str, type[Plan[Any, Any]]]:
    """Every plan by name."""
    return _registered()


def _named() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, plan in _registered().items():
        op = name.removesuffix("Plan")
        found |= {name: plan, f"{op}Descriptor": plan.Descriptor, f"{op}Args": plan.Args}
    return found


globals().update(_named())

__all__ = ["Args", "Descriptor", "Plan", "all", *sorted(_named())]
