"""Where the scale of a FakeQuantize comes from."""

from __future__ import annotations

from enum import StrEnum


class ScaleMode(StrEnum):
    """Where the scale comes from."""

    #: From each batch alone, in training and in evaluation.
    PER_BATCH = "per_batch"
    #: From a moving average of the scales of training batches.
    EMA = "ema"
    #: From the caller.
    FIXED = "fixed"
    #: From an optimizer: the scale is a parameter that begins with what the first batch suggests.
    LEARNED = "learned"
