"""Verification of the bits: conformance tests, pinned digests, mutants, exhaustive sweeps, fuzzing."""
