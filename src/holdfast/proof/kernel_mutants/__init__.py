"""Kernels with one mistake in their source. The cases must tell each from the reference, by its bits.

The mutants of ``holdfast.proof.mutants`` are wrong references: they show what the cases can see. These are
the real kernels, of Numba and of Triton, with one line changed: a tile dropped, a mask forgotten, a scratch
run too short. Each is tried in a process of its own, on the cases of plans that use it.

An op lists them in its ``kernel_mutants.py``.
"""
