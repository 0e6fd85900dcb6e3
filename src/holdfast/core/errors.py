"""The errors of this library. Each is also a subclass of the matching builtin error."""

from __future__ import annotations


class HoldfastError(Exception):
    """Base class of all errors that this library raises."""


class InvalidDescriptor(HoldfastError, ValueError):
    """The descriptor describes no valid problem."""


class InvalidArgs(HoldfastError, ValueError, TypeError):
    """An argument has a wrong type, dtype, shape, device, memory or value."""


class InvalidIndex(HoldfastError, IndexError, RuntimeError):
    """An index or an offset is out of range. torch raises an IndexError or a RuntimeError."""


class Unsupported(HoldfastError, NotImplementedError):
    """No kernel supports the problem; the message gives the reason for each candidate."""


class WorkspaceTooSmall(HoldfastError, ValueError):
    """The workspace given to ``run`` has fewer bytes than ``workspace_size()``."""


class CollectiveFailed(HoldfastError, RuntimeError):
    """The processes that share a batch did not all take part in a collective operation."""


class NotReproducible(HoldfastError, AssertionError):
    """A repeated step gave different bits; the message says which tensor, where, and between which runs."""
