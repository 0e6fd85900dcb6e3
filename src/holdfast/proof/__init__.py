"""Proof that the bits hold: conformance, digests, mutants, exhaustive sweeps."""
