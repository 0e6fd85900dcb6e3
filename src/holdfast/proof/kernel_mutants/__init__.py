"""Mutation testing of the kernels: Numba and Triton kernels with one line of source changed.

Examples are a dropped tile, a missing mask, a scratch buffer that is too short. At least one case must give
other bits than the reference. Each mutant runs in its own process, on the cases of the plans that use the
kernel. Each op lists its mutants in its ``kernel_mutants.py``. The mutants of ``holdfast.proof.mutants``, in
contrast, are changed references, and test the cases.
"""
