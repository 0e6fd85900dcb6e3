"""Constants of exp(v) for v <= 0, in each compute type.

exp(v) = p(r) * 2^k with k = rint(v * log2_e), r = (v - k * ln2_hi) - k * ln2_lo and p(r) = 1 + (r + r^2 * (c2
+ r * (c3 + ...))). ln2_hi has few enough bits that k * ln2_hi is exact. Arguments are clamped to ``floor``
from below, so that the result is a normal number.
"""

from __future__ import annotations

from dataclasses import dataclass

_hex = float.fromhex


@dataclass(frozen=True)
class Exponential:
    """The constants of exp. ``magic`` is 1.5 * 2^(precision - 1): adding it rounds to an integer."""

    floor: float
    log2_e: float
    ln2_hi: float
    ln2_lo: float
    coefficients: tuple[float, ...]
    precision: int

    @property
    def magic(self) -> float:
        return 1.5 * 2.0 ** (self.precision - 1)


#: The polynomials minimize the maximum relative error, which is 2^-27 in float32 and 2^-61.8 in float64.
EXPONENTIALS = {
    "float32": Exponential(
        floor=-80.0,
        log2_e=_hex("0x1.715476p+0"),
        ln2_hi=_hex("0x1.62e4p-1"),
        ln2_lo=_hex("0x1.7f7d1cp-20"),
        coefficients=(
            _hex("0x1.fffffcp-2"), _hex("0x1.555492p-3"), _hex("0x1.5553dcp-5"), _hex("0x1.123234p-7"),
            _hex("0x1.6f193cp-10"),
        ),
        precision=24,
    ),
    "float64": Exponential(
        floor=-700.0,
        log2_e=_hex("0x1.71547652b82fep+0"),
        ln2_hi=_hex("0x1.62e42feep-1"),
        ln2_lo=_hex("0x1.a39ef35793c76p-33"),
        coefficients=(
            _hex("0x1.0p-1"), _hex("0x1.555555555555ap-3"), _hex("0x1.5555555555530p-5"),
            _hex("0x1.111111110f30fp-7"), _hex("0x1.6c16c16c27a9ap-10"), _hex("0x1.a01a01b11c8d0p-13"),
            _hex("0x1.a01a014dfd9cdp-16"), _hex("0x1.71ddf56a1ae23p-19"), _hex("0x1.27e5923300db3p-22"),
            _hex("0x1.af63d76c38182p-26"), _hex("0x1.1e6ce9b86bb0fp-29"),
        ),
        precision=53,
    ),
}  # fmt: skip
