"""``torch.nn`` modules: fake quantization for quantization-aware training, and embeddings."""

from __future__ import annotations

from holdfast.nn.embedding import Embedding
from holdfast.nn.embedding_bag import EmbeddingBag
from holdfast.nn.fake_quantize import FakeQuantize
from holdfast.nn.scale_mode import ScaleMode

__all__ = ["Embedding", "EmbeddingBag", "FakeQuantize", "ScaleMode"]
