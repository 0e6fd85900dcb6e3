"""interpolate on the CPU: sums of runs times their weights, as those over y and z."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from holdfast.backends.cpu import jit, pointer


@jit
def add(total, weight, terms, count, is_first):
    """total += weight * terms, or without the sum if ``is_first``."""
    if is_first:
        for i in range(count):
            total[i] = weight * terms[i]
    else:
        for i in range(count):
            total[i] = total[i] + weight * terms[i]


@jit
def add_all(total, weights, start, terms, taps, count, like):
    """The sum of one to four runs times their weights. ``terms`` has four addresses of runs."""
    a, b = pointer(terms[0], like), pointer(terms[1], like)
    c, d = pointer(terms[2], like), pointer(terms[3], like)
    u, v = weights[start], weights[start + min(1, taps - 1)]
    w, x = weights[start + min(2, taps - 1)], weights[start + taps - 1]
    if taps == 1:
        add(total, u, a, count, True)
    elif taps == 2:
        for i in range(count):
            total[i] = u * a[i] + v * b[i]
    elif taps == 3:
        for i in range(count):
            total[i] = (u * a[i] + v * b[i]) + w * c[i]
    else:
        for i in range(count):
            total[i] = ((u * a[i] + v * b[i]) + w * c[i]) + x * d[i]
