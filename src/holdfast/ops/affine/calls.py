"""Arguments shared by the example calls of the quantization ops."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.granularity import PerChannel

X = (torch.arange(24.0).reshape(4, 6) - 11.3) / 7
ROWS = torch.tensor([0.25, 0.5, 0.125, 0.3])
ZEROS = torch.tensor([0, 1, -1, 2], dtype=torch.int32)
CODES = (torch.arange(24).reshape(4, 6) % 15 - 7).to(torch.int8)
BYTES = (torch.arange(12).reshape(4, 3) * 37 % 256).to(torch.uint8)
CHANNELS: dict[str, Any] = {"granularity": PerChannel(0)}
INT8: dict[str, Any] = {"dtype": torch.int8, "q_min": -8, "q_max": 7}
