"""What all tests share: without a GPU, Triton's kernels run in its interpreter, so that each is tested."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
