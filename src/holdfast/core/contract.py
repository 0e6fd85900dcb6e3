"""What a plan says of itself: which kernel it is, and what that kernel promises."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context, Decimal
from types import MappingProxyType
from typing import Literal

from holdfast.core.checks import is_whole, require_bool, shown
from holdfast.core.dtypes import Float
from holdfast.core.errors import InvalidArgs

#: The version of the arithmetic. Whatever can change a bit is a new version, with new digests.
NUMERICS_VERSION = 1

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class KernelSku:
    """Everything that can change a bit or a speed, so that it can be a cache key."""

    op: str
    direction: Direction
    mode: str
    input_dtype: str
    output_dtype: str
    backend: str
    architecture: str
    index_dtype: str = "int64"
    numerics_version: int = NUMERICS_VERSION

    def __str__(self) -> str:
        mode = f"[{self.mode}]" if self.mode else ""
        return (
            f"{self.op}.{self.direction}{mode} {self.input_dtype}->{self.output_dtype} "
            f"on {self.backend}/{self.architecture}, {self.index_dtype} indices, "
            f"numerics {self.numerics_version}"
        )


@dataclass(frozen=True)
class PrecisionGuarantee:
    """What a plan promises of its bits.

    ``ulp`` bounds, for each output, the distance from the exact result in units in the last place of the
    output's dtype; for integer codes the unit is one code, and for a sum that may cancel it is that of the
    sum of magnitudes.

    The bound is for results that do not overflow. A term of a sum that is a product or a quotient below the
    normal range of the compute type is off by up to half of its smallest subnormal number instead; each such
    term may add as much. With ``accumulate`` the old value is one more term, and is rounded once more.
    """

    compute_dtype: str
    accumulator_dtype: str
    rounding: str = "to nearest, ties to even"
    deterministic: bool = True
    bit_stable: Literal["everywhere", "same_hardware", "no"] = "everywhere"
    numerics_version: int = NUMERICS_VERSION
    ulp: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __hash__(self) -> int:
        return hash((self.compute_dtype, self.accumulator_dtype, self.bit_stable, tuple(self.ulp.items())))


def error_in_ulp(roundings: float, compute: Float, out: Float) -> float:
    """The error of a sum whose terms take part in ``roundings`` operations, in ULP of ``out``.

    Let p be the precision of ``compute`` and u = 2^-p. One operation is off by at most u of its result, so
    that k of them change a term by at most k u / (1 - k u) of itself, and the total by as much of the sum of
    magnitudes, M. M is less than 2^p of its own ULP. So k operations are off by less than k / (1 - k u) ULP
    of ``compute``. Rounding to ``out``, if that is another type, adds half an ULP.
    """
    in_compute = roundings / (1 - roundings * 2.0**-compute.precision)
    return in_compute * 2.0 ** (out.precision - compute.precision) + (0.0 if out is compute else 0.5)


def printed_bound(ulp: float) -> str:
    """A bound with four decimals at most, rounded up: the printed number is a bound too."""
    if not math.isfinite(ulp):
        return str(ulp)
    rounded = Decimal(ulp).quantize(Decimal("0.0001"), ROUND_CEILING, Context(prec=400))
    return f"{rounded:f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Verdict:
    """The answer of ``can_implement``: true, or false with the reason."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class PlanPreference:
    """What the caller wants of ``select``.

    ``backend`` names one ("reference", "cpu" or "gpu") or leaves the choice open; ``max_workspace_bytes``
    bounds what ``workspace_size`` may ask for; ``precompile=False`` leaves compilation to the first ``run``,
    which then compiles just the variant that it needs.
    """

    backend: str | None = None
    max_workspace_bytes: int | None = None
    precompile: bool = True

    def __post_init__(self) -> None:
        if self.backend is not None and not isinstance(self.backend, str):
            raise InvalidArgs(f"backend is {shown(self.backend)}; it must be the name of one, or None.")
        if self.max_workspace_bytes is not None and not is_whole(self.max_workspace_bytes):
            raise InvalidArgs(
                f"max_workspace_bytes is {shown(self.max_workspace_bytes)}; it must be a whole number, or "
                "None."
            )
        require_bool("precompile", self.precompile)
