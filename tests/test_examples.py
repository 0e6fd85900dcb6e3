"""The examples run at a small size and print what they show. ``spatial_transformer.py`` has its own tests."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

#: What each example prints at its end, after it has checked it.
LAST = {
    "cnn_w4a8_onnx": "the same bits in training and in onnxruntime",
    "decoder_w4a16_compressed_tensors": "the same weights and the same outputs, in every bit",
    "lsq_against_ema": "each training ran twice with the same losses, in every bit",
    "qat_with_lora": "the converted model has the same output, in every bit",
}


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    """Examples set the seed and the number of threads."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an example in this process, which has imported torch already."""
    monkeypatch.setattr(sys, "argv", [str(path), "--quick"])
    runpy.run_path(str(path), run_name="__main__")


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*LAST, "qat_ddp_fsdp", "spatial_transformer"}


@pytest.mark.parametrize("name", LAST)
def test_the_example_shows_what_it_says(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(EXAMPLES / f"{name}.py", monkeypatch)
    assert capsys.readouterr().out.endswith(f"{LAST[name]}\n")


def test_two_processes_have_the_same_bits() -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "qat_ddp_fsdp.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the same bits on both ranks, with DDP and FSDP2\n")


def test_a_wrong_example_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The converted model gets another input, so its output differs."""
    text = (EXAMPLES / "qat_with_lora.py").read_text()
    wrong = text.replace("hf.qat.convert(model)(x)", "hf.qat.convert(model)(x.flip(0))")
    assert wrong != text
    (tmp_path / "wrong.py").write_text(wrong)
    with pytest.raises(AssertionError, match="converting changed the output"):
        run(tmp_path / "wrong.py", monkeypatch)
