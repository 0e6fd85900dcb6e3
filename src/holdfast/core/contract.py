"""Records that describe a plan: the kernel that was selected, and its guarantees."""

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

#: Version of the shared arithmetic, and of plans that state no other. A change that can change a bit of a
#: plan increments the version of the plan and needs new digests.
NUMERICS_VERSION = 1

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class KernelSku:
    """Identifies a kernel: every property that can change a bit or the speed. Usable as a cache key."""

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
    """What a plan guarantees about its results.

    ``ulp`` bounds the distance of each output from the exact result, in units in the last place (ULP) of the
    output's dtype. For integer codes the unit is one code. For a sum whose terms may cancel it is the ULP of
    the sum of magnitudes.

    The bound holds for results that do not overflow. A product or quotient below the normal range of the
    compute type has an error of up to half the smallest subnormal number instead; in a sum they add up.
    With ``accumulate`` the old value is a further term of the sum, with one more rounding.

    ``per_term`` names outputs whose terms are rounded to multiples of one unit and then summed exactly. Each
    term adds an error of at most this fraction of the largest term, as the plan's docstring defines it.
    """

    compute_dtype: str
    accumulator_dtype: str
    rounding: str = "to nearest, ties to even"
    deterministic: bool = True
    bit_stable: Literal["everywhere", "same_hardware", "no"] = "everywhere"
    numerics_version: int = NUMERICS_VERSION
    ulp: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    per_term: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __hash__(self) -> int:
        return hash((self.compute_dtype, self.accumulator_dtype, self.bit_stable, tuple(self.ulp.items())))


def error_in_ulp(roundings: float, compute: Float, out: Float) -> float:
    """The error bound of a sum in ULP of ``out``, if each term is rounded at most ``roundings`` times.

    Let p be the precision of ``compute`` and u = 2^-p. One operation has a relative error of at most u, so k
    operations change a term by a relative error of at most k u / (1 - k u). The error of the sum is at most
    this times M, the sum of magnitudes. M is less than 2^p ULP of M. Hence k operations have an error of less
    than k / (1 - k u) ULP of ``compute``. Rounding to ``out``, if it is another type, adds half an ULP.
    """
    in_compute = roundings / (1 - roundings * 2.0**-compute.precision)
    return in_compute * 2.0 ** (out.precision - compute.precision) + (0.0 if out is compute else 0.5)


def printed_bound(ulp: float) -> str:
    """A bound with at most four decimals, rounded up, so that the printed number is also a bound."""
    if not math.isfinite(ulp):
        return str(ulp)
    rounded = Decimal(ulp).quantize(Decimal("0.0001"), ROUND_CEILING, Context(prec=400))
    return f"{rounded:f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Verdict:
    """Result of ``can_implement``: true, or false with a reason."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class PlanPreference:
    """Options of ``select``.

    ``backend``: "reference", "cpu" or "gpu"; None allows any. ``max_workspace_bytes``: upper limit of
    ``workspace_size``. ``precompile=False``: compile at the first ``run``, only the variant that it needs.
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
