"""``ScaleMode``."""

from __future__ import annotations

from enum import StrEnum


class ScaleMode(StrEnum):
    """The source of the scale of a FakeQuantize."""

    #: Computed from each batch, in training and in evaluation.
    PER_BATCH = "per_batch"
    #: Moving average of the scales of the training batches.
    EMA = "ema"
    #: Given by the caller.
    FIXED = "fixed"
    #: A parameter for an optimizer, initialized from the first batch.
    LEARNED = "learned"
