"""Decides how Triton's kernels run, before Triton is imported by anyone.

With a GPU they are compiled. Without one they are interpreted on the CPU, which Triton
does if `TRITON_INTERPRET=1` is set when it is imported; PyTorch's FLOP counter imports
it too.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
