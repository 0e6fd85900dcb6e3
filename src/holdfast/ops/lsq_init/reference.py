"""lsq_init in NumPy: the definition of its result."""

from __future__ import annotations

import numpy as np

from holdfast.core.plan import Launch
from holdfast.numerics.reference import compute_type, store, widen
from holdfast.ops.affine.plan import AffineKernel
from holdfast.ops.lsq_init.plan import LsqInitArgs, LsqInitDescriptor
from holdfast.ops.tree_sum.reference import by_segment, tree_sum


class LsqInit(AffineKernel[LsqInitDescriptor]):
    """max(factor * sum of magnitudes, floor) as a kernel."""

    def prepare(self, args: LsqInitArgs) -> Launch[LsqInitArgs]:
        desc, compute = self.desc, self.desc.real.compute
        number = compute_type(compute)

        def launch(stream: object, workspace: object, args: LsqInitArgs, addresses: object) -> None:
            total = tree_sum(by_segment(np.abs(widen(args.x, compute)), desc.view))
            with np.errstate(all="ignore"):
                scale = total * number(desc.factor)
            store(args.scale, np.where(scale < number(desc.floor), number(desc.floor), scale))

        return launch
