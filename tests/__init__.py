from utils import triton_mode  # noqa: F401, before a test imports Triton
