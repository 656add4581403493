"""What an answer must satisfy and the faults it can name, one module a lesson."""

from utils import triton_mode  # noqa: F401, some of them import Triton
