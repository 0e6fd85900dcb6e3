"""Models of plain torch, which the tests and the benchmark of ``hf.install`` train unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DeformableAttention(nn.Module):
    """Multi-scale deformable attention, as the decoders of Deformable DETR and RT-DETR have it."""

    def __init__(self, width: int, heads: int, levels: int, points: int) -> None:
        super().__init__()
        self.heads, self.levels, self.points = heads, levels, points
        self.offsets = nn.Linear(width, heads * levels * points * 2)
        self.weights = nn.Linear(width, heads * levels * points)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, queries: Tensor, references: Tensor, maps: list[Tensor]) -> Tensor:
        batch, count, width = queries.shape
        shape = batch, count, self.heads, self.levels, self.points
        offsets = self.offsets(queries).view(*shape, 2)
        weights = self.weights(queries).view(*shape[:3], -1).softmax(-1).view(*shape)
        found = []
        for level, image in enumerate(maps):
            value = self.value(image.flatten(2).transpose(1, 2)).transpose(1, 2)
            value = value.reshape(batch * self.heads, width // self.heads, *image.shape[2:])
            size = offsets.new_tensor(image.shape[:1:-1])
            where = references[:, :, None, None] + offsets[:, :, :, level] / size
            grid = (2 * where - 1).transpose(1, 2).flatten(0, 1)
            found.append(F.grid_sample(value, grid, align_corners=False))
        samples = torch.stack(found, dim=-2).flatten(-2)
        mixed = (samples * weights.transpose(1, 2).reshape(batch * self.heads, 1, count, -1)).sum(-1)
        return self.out(mixed.view(batch, width, count).transpose(1, 2))


class Detector(nn.Module):
    """A small backbone with three feature maps, and decoder layers with deformable attention."""

    def __init__(
        self, width: int, queries: int, layers: int, heads: int = 4, points: int = 4, stride: int = 4
    ) -> None:
        super().__init__()
        strides = (stride, 2, 2)
        channels = (3, width, width)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, width, 3, stride=s, padding=1), nn.GroupNorm(4, width), nn.SiLU())
            for c, s in zip(channels, strides, strict=True)
        )
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.references = nn.Linear(width, 2)
        self.attention = nn.ModuleList(DeformableAttention(width, heads, 3, points) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.boxes, self.classes = nn.Linear(width, 4), nn.Linear(width, 20)

    def forward(self, image: Tensor) -> Tensor:
        maps = []
        for stage in self.stages:
            image = stage(image)
            maps.append(image)
        found = self.queries.expand(len(image), -1, -1)
        references = self.references(found).sigmoid()
        for attention, norm in zip(self.attention, self.norms, strict=True):
            found = norm(found + attention(found, references, maps))
        return self.boxes(found).sigmoid().square().mean() + self.classes(found).logsumexp(-1).mean()


class UNet(nn.Module):
    """Convolutions, average pooling down, and bilinear up-sampling; the loss resizes the masks."""

    def __init__(self, width: int, depth: int = 3, mode: str = "bilinear") -> None:
        super().__init__()
        self.mode = mode
        widths = [width * 2**i for i in range(depth)]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(w, 2 * w, 3, padding=1) for w in widths)
        self.up = nn.ModuleList(nn.Conv2d(3 * w, w, 3, padding=1) for w in reversed(widths))
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        x, kept = F.silu(self.first(image)), []
        for layer in self.down:
            kept.append(x)
            x = F.silu(layer(F.avg_pool2d(x, 2)))
        for layer in self.up:
            skip = kept.pop()
            x = F.interpolate(x, size=skip.shape[2:], mode=self.mode, align_corners=False)
            x = F.silu(layer(torch.cat((x, skip), 1)))
        return self.last(x).square().mean()


class GraphNetwork(nn.Module):
    """Messages along the edges of a graph, added up at their targets; means over graphs."""

    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.node = nn.Linear(3, width)
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.out = nn.Linear(width, 1)

    def forward(self, nodes: Tensor, edges: Tensor, graphs: Tensor) -> Tensor:
        x = self.node(nodes)
        source, target = edges
        for layer in self.message:
            message = layer(torch.cat((x[source], x.index_select(0, target)), -1)).tanh() / 50
            index = target[:, None].expand_as(message)
            x = x + torch.zeros_like(x).scatter_add_(0, index, message)
        sums = x.new_zeros(int(graphs.max()) + 1, x.shape[1]).index_add(0, graphs, x)
        means = torch.zeros_like(sums).scatter_reduce(0, graphs[:, None].expand_as(x), x, "mean")
        return self.out(sums * 0.1 + means).square().mean()


class Recommender(nn.Module):
    """Bags of categories, and a network on their sums, means and maxima."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        modes = ("sum", "mean", "max")
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode=mode) for mode in modes)
        self.network = nn.Sequential(nn.Linear(3 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        found = torch.cat([bag(indices, offsets) for bag in self.bags], -1)
        return F.softplus(self.network(found)).mean()


class LanguageModel(nn.Module):
    """Token and position embeddings, attention, and a loss over the vocabulary."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.out(self.layer(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


#: Reasons to pass a call on that say nothing about the model's sums.
HARMLESS = {"nothing is accumulated", "the dtype is torch.int64"}


@dataclass(frozen=True)
class Problem:
    """A model, its inputs, and the operators of torch that its training must find replaced."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    operators: tuple[str, ...]


def _graph() -> tuple[Tensor, ...]:
    edges = torch.randint(0, 200, (2, 3000))
    edges[1, :1000] = 7  # many messages meet at one node
    return torch.randn(200, 3), edges, torch.randint(0, 5, (200,)).sort().values


PROBLEMS: dict[str, Problem] = {
    "detector": Problem(
        lambda: Detector(32, queries=50, layers=2),
        lambda: (torch.randn(2, 3, 64, 64),),
        ("grid_sampler_2d", "grid_sampler_2d_backward"),
    ),
    "unet": Problem(
        lambda: UNet(8),
        lambda: (torch.randn(2, 3, 32, 32),),
        ("upsample_bilinear2d", "upsample_bilinear2d_backward"),
    ),
    "graph": Problem(
        lambda: GraphNetwork(16),
        _graph,
        ("scatter_add_", "index_add", "scatter_reduce.two", "_index_put_impl_"),
    ),
    "recommender": Problem(
        lambda: Recommender(500, 16),
        lambda: (torch.randint(0, 500, (2000,)).div(9).floor().long(), torch.arange(0, 2000, 20)),
        ("_embedding_bag_dense_backward",),
    ),
    "transformer": Problem(
        lambda: LanguageModel(100, 32, 16),
        lambda: (torch.randint(0, 100, (8, 16)).div(5).floor().long(),),
        ("embedding_dense_backward",),
    ),
}


def prepared(name: str, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    problem = PROBLEMS[name]
    return problem.model().to(device), tuple(given.to(device) for given in problem.inputs())


def step(model: nn.Module, optimizer: Any, *inputs: Tensor) -> Tensor:
    """Three training steps; the last loss."""
    for _ in range(3):
        optimizer.zero_grad()
        loss: Tensor = model(*inputs)
        loss.backward()
        optimizer.step()
    return loss.detach()
