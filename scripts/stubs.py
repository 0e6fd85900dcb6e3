"""Write the type stubs of ``holdfast`` and ``holdfast.plans``, whose names are found at import.

python scripts/stubs.py            write them
python scripts/stubs.py --check    fail if they are not current
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import holdfast
from holdfast import ops

PACKAGE = Path(holdfast.__file__).parent
HEADER = "# Written by scripts/stubs.py (`make stubs`); do not edit.\n\n"


def exported(module: str, names: list[str]) -> str:
    """An import that exports ``names`` of ``module``."""
    if len(names) == 1:
        return f"from {module} import {names[0]} as {names[0]}\n"
    return f"from {module} import (\n" + "".join(f"    {name} as {name},\n" for name in names) + ")\n"


def home(value: Any, name: str) -> str:
    """The module of holdfast that defines ``name``."""
    if isinstance(value, ModuleType):
        return value.__name__.rpartition(".")[0]
    return str(getattr(value, "__module__", "") or "")


def package_stub() -> str:
    """``__init__.pyi``: what the package lists, each from where it is defined."""
    found: dict[str, list[str]] = {}
    functions = {name: module.__name__ for module in ops.modules("torch_op") for name in _all(module)}
    for name in holdfast.__all__:
        if name in ("__version__", "NUMERICS_VERSION"):
            continue
        found.setdefault(functions.get(name) or home(getattr(holdfast, name), name), []).append(name)
    imports = "".join(exported(module, sorted(names)) for module, names in sorted(found.items()))
    constants = "from holdfast.core.contract import NUMERICS_VERSION as NUMERICS_VERSION\n"
    listed = "".join(f"    {name!r},\n".replace("'", '"') for name in sorted(holdfast.__all__))
    return f"{HEADER}{constants}{imports}\n__version__: str\n\n__all__ = [\n{listed}]\n"


def plans_stub() -> str:
    """``plans.pyi``: every plan, descriptor and args class by its public name."""
    found: dict[str, list[str]] = {}
    generated, spelled_in = "", {"holdfast.ops.affine.plan"}
    for name, plan in sorted(holdfast.plans.all().items()):
        op, base = name.removesuffix("Plan"), plan.__bases__[0]
        if hasattr(base, "Descriptor"):  # a granularity of that plan
            generated += spelled(op, plan, base)
            spelled_in.add(plan.__module__)
        else:
            found.setdefault(plan.__module__, []).extend((name, f"{op}Args", f"{op}Descriptor"))
    imports = "from dataclasses import dataclass\nfrom typing import Any\n\n"
    imports += "".join(f"import {module} as {_op(module)}\n" for module in sorted(spelled_in))
    imports += exported("holdfast.core.descriptor", ["Descriptor"])
    imports += exported("holdfast.core.plan", ["Args", "Plan"])
    imports += "".join(exported(module, sorted(names)) for module, names in sorted(found.items()))
    return f"{HEADER}{imports}\ndef all() -> dict[str, type[Plan[Any, Any]]]: ...\n{generated}"


def spelled(op: str, plan: Any, base: Any) -> str:
    """The classes that ``define_granularities`` makes for one granularity."""
    module = _op(plan.__module__)
    over, descriptor = (kind.__name__ for kind in plan.Descriptor.__bases__)
    return (
        f"\n{op}Args = {module}.{plan.Args.__name__}\n"
        f"\n@dataclass(frozen=True, kw_only=True)\n"
        f"class {op}Descriptor(affine.{over}, {module}.{descriptor}): ...\n"
        f"\nclass {op}Plan({module}.{base.__name__}): ...\n"
    )


def _op(module: str) -> str:
    return module.split(".")[-2]


def _all(module: ModuleType) -> list[str]:
    return list(getattr(module, "__all__", ()))


STUBS = {PACKAGE / "__init__.pyi": package_stub, PACKAGE / "plans.pyi": plans_stub}


def main() -> None:
    check = "--check" in sys.argv[1:]
    for path, make in STUBS.items():
        if check and (not path.exists() or path.read_text() != make()):
            sys.exit(f"{path.name} is not current; run `make stubs`.")
        if not check:
            path.write_text(make())


if __name__ == "__main__":
    main()
