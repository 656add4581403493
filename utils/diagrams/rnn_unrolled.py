"""Lesson 01: one recurrent cell at six steps, and its gradient on the way back."""

import math

from utils.diagrams.drawing import Drawing

INPUTS, W = [0.9, -0.4, 0.6, 0.3, -0.7, 0.5], 0.9
LEFT, STEP, TOP, BAR = 130, 112, 70, 70


def _number(value, digits):
    return f"{value:.{digits}f}".replace("-", "−")


def draw() -> Drawing:
    states = [0.0]
    for x in INPUTS:
        states.append(math.tanh(x + W * states[-1]))
    factors = [W * (1 - h**2) for h in states[2:]]  # from each state to the one before
    left = [math.prod(factors[t:]) for t in range(len(INPUTS))]

    d = Drawing(
        *(800, 290),
        "A recurrent network unrolled, and the gradient on its way back",
        f"One cell with the factor {W} reads {len(INPUTS)} inputs in turn. On the "
        "way back each step multiplies the gradient by the factor and by tanh's slope, "
        f"that is by {', '.join(f'{f:.2f}' for f in reversed(factors))}. Of 1 at the "
        f"last state {left[0]:.2f} is left at the first.",
    )
    d.text(20, TOP + 22, "state h", size=13, at="start", bold=True)
    d.text(20, TOP + 39, "forward →", "plain", 12, "start")
    for t, x in enumerate(INPUTS):
        cell = d.box(LEFT + t * STEP, TOP, 58, 40, _number(states[t + 1], 2))
        d.text(cell.middle, TOP - 37, f"x = {_number(x, 1)}", size=12)
        d.arrow((cell.middle, TOP - 30), (cell.middle, TOP - 3))
        if t < len(factors):
            d.arrow((cell.right + 3, TOP + 20), (LEFT + (t + 1) * STEP - 3, TOP + 20))
            d.text(cell.right + STEP / 2 - 29, TOP + 13, f"· {W}", "plain", 12)
            start = LEFT + (t + 1) * STEP + 20
            d.curve(start, TOP + 45, cell.right - 20, TOP + 45, 30, "alarm", 2)
            middle = (start + cell.right - 20) / 2
            d.text(middle, TOP + 78, f"× {factors[t]:.2f}", "alarm", 13, bold=True)
        height = left[t] * BAR
        d.tensor(
            *(cell.middle - 14, 250 - height, 1, 1, "alarm"),
            strength=lambda r, c: 0.7,
            cell=28,
            height=height,
        )
        d.text(cell.middle, 267, f"{left[t]:.2f}", "alarm", 12)
    d.text(20, TOP + 78, "w · (1 − h²)", "alarm", 12, "start")
    d.text(20, 215, "gradient", "alarm", 13, "start", bold=True)
    d.text(20, 232, "← backward", "plain", 12, "start")
    d.text(20, 267, "what is left", "plain", 12, "start")
    d.line((LEFT - 6, 250), (LEFT + 5 * STEP + 64, 250), width=0.75)
    return d
