"""The machine and package versions of a measurement or verification."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import torch

#: Packages that can change a bit or a speed.
PACKAGES = ("triton", "numba", "numpy")


@dataclass(frozen=True)
class Machine:
    """Processors, system and versions. Missing ones are None."""

    cpu: str
    cores: int
    threads: int
    gpu: str | None
    driver: str | None
    system: str
    versions: dict[str, str | None] = field(default_factory=dict)

    @staticmethod
    def here(**versions: str) -> Machine:
        """This machine. ``versions`` are listed before those of the packages."""
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        return Machine(
            cpu=processor(), cores=os.cpu_count() or 1, threads=torch.get_num_threads(), gpu=gpu,
            driver=_driver() if gpu else None, system=_system(), versions={**versions, **package_versions()},
        )  # fmt: skip

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items() if version)
        gpu = f"{self.gpu}, driver {self.driver}" if self.gpu else "no GPU"
        return f"{self.cpu}, {self.threads} threads; {gpu}; {self.system}; {versions}"


def processor() -> str:
    """The model name of the CPU."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def package_versions() -> dict[str, str | None]:
    """Versions of Python, torch and ``PACKAGES``; None for packages that are not installed."""
    made: dict[str, str | None] = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in PACKAGES:
        try:
            made[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            made[name] = None
    return made


def _system() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):  # not Linux, or no name in os-release
        name = ""
    kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
    return f"{name}, {kernel}" if name else kernel


def _driver() -> str | None:
    """The version of the NVIDIA driver, from nvidia-smi."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return told.partition("\n")[0].strip() or None
