"""A small decoder with 4-bit weights in groups of 32, written in the compressed-tensors format and read back.

The decoder has the parts of a current language model: a token embedding that is tied to the head, RMSNorm,
rotary attention and a gated MLP. The compressed-tensors package reads the file. The model that it makes has
the weights and the outputs of the trained one, in every bit. Needs ``holdfast[compressed-tensors]`` and the
package ``compressed-tensors``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import holdfast as hf

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 96, 64, 4, 2, 24


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of [batch, head, position, channel]."""
    half = x.shape[-1] // 2
    rate = 1.0 / 100.0 ** (torch.arange(half) / half)
    angle = torch.arange(x.shape[-2])[:, None] * rate
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(WIDTH), Attention()
        self.post_attention_layernorm, self.mlp = nn.RMSNorm(WIDTH), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        self.lm_head.weight = self.embed_tokens.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def sequences(count: int, generator: torch.Generator) -> torch.Tensor:
    """Tokens that count up by a step that the decoder has to find."""
    start = torch.randint(VOCABULARY, (count, 1), generator=generator)
    step = torch.randint(1, 4, (count, 1), generator=generator)
    return (start + step * torch.arange(LENGTH + 1)) % VOCABULARY


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(steps: int) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = hf.qat.prepare(Decoder(), hf.qat.preset("w4a16-g32"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, sequences(32, generator))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.eval(), losses


def read(directory: Path) -> nn.Module:
    """The model that the compressed-tensors package makes of the files."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from safetensors.torch import load_file

    described = json.loads((directory / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(described)
    model = Decoder().eval()
    model.lm_head.weight = nn.Parameter(model.embed_tokens.weight.detach().clone())  # the file has it twice
    apply_quantization_config(model, config, show_progress=False)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.load_state_dict(load_file(directory / "model.safetensors"))
    compressor.decompress_model(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="train for a few steps only")
    steps = 10 if parser.parse_args().quick else 200
    torch.set_num_threads(1)

    model, losses = train(steps)
    assert losses[-1] < losses[0]
    weights = hf.qat.quantized_weights(model)
    assert weights["lm_head.weight"].codes.equal(weights["embed_tokens.weight"].codes), "no longer tied"
    tokens = sequences(8, torch.Generator().manual_seed(2))[:, :-1]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        hf.export.compressed_tensors(model, folder)
        stored = sum(file.stat().st_size for file in Path(folder).iterdir())
        other = read(Path(folder))
        for name, weight in weights.items():
            assert other.get_parameter(name).equal(weight.dequantize()), name
        assert other(tokens).equal(model(tokens)), "the outputs differ"
    print(f"loss {losses[0]:.3f} before, {losses[-1]:.3f} after {steps} steps")
    codes = sum(weight.codes.numel() for weight in weights.values())
    print(f"{len(weights)} weights of {codes:,} codes, {stored:,} bytes")
    print("read by compressed-tensors: the same weights and the same outputs, in every bit")


if __name__ == "__main__":
    main()
