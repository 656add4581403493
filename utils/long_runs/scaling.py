"""Loss against size and compute, every point trained on a schedule of its own."""

import torch

from utils.long_runs._characters import losses, size, text, train, transformer

ABOUT = (
    "Transformers of four widths and three depths on four million characters of the "
    "standard library's source, each trained anew for each number of steps and at each "
    "of six peak rates."
)
MINUTES = 30
SHAPES = [[8, 2, 21], [16, 2, 42], [32, 2, 85], [64, 2, 170]]  # d_model, n_layers, d_ff
DEPTHS = [[32, 1, 88], [24, 2, 64], [16, 4, 56]]  # of about the same size
RATES = [0.0025, 0.005, 0.01, 0.02, 0.04, 0.08]
SETTINGS = [
    {"shape": shape, "steps": steps, "peak": peak}
    for steps, shapes in ((150, SHAPES), (600, SHAPES + DEPTHS), (2400, SHAPES))
    for shape in shapes
    for peak in RATES
]


def measure(shape: list[int], steps: int, peak: float) -> dict:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformer(*shape)
    label = f"{shape[1]} layers of {shape[0]}, {steps} steps, peak {peak}"
    ((tokens, loss, _),) = train(model, peak, steps, 0, 1, label)
    return {
        "parameters": size(model),
        "tokens": tokens,
        "loss_to_choose_by": losses(model, text()[1])[0],
        "loss": loss,
    }
