"""lsq_init in NumPy: the definition of its result."""

from __future__ import annotations

import numpy as np

from holdfast.numerics.reference import ReferenceKernel, compute_type, store, widen
from holdfast.ops.lsq_init.plan import LsqInitArgs, LsqInitDescriptor
from holdfast.ops.tree_sum.reference import by_segment, tree_sum


class LsqInit(ReferenceKernel[LsqInitDescriptor]):
    """max(factor * sum of magnitudes, floor) as a kernel."""

    def run(self, args: LsqInitArgs) -> None:
        desc, compute = self.desc, self.desc.real.compute
        number = compute_type(compute)
        total = tree_sum(by_segment(np.abs(widen(args.x, compute)), desc.view))
        with np.errstate(all="ignore"):
            scale = total * number(desc.factor)
        store(args.scale, np.where(scale < number(desc.floor), number(desc.floor), scale))
