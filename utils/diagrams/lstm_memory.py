"""Lesson 01: one step of an LSTM, its memory a straight line, in numbers."""

import math

from utils.diagrams.drawing import Drawing

Z_I, Z_F, Z_G, Z_O, MEMORY = -1.0, 3.0, 0.5, 0.0, 2.0  # the lesson's one unit
LINE, BOXES, BUS = 84, 216, 286  # the y of the memory, of the gates, of what they read
FORGET, INPUT, CANDIDATE, OUTPUT = 190, 300, 400, 550  # their x


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def draw() -> Drawing:
    i, f, g, o = sigmoid(Z_I), sigmoid(Z_F), math.tanh(Z_G), sigmoid(Z_O)
    new = f * MEMORY + i * g
    shown = o * math.tanh(new)

    d = Drawing(
        *(780, 338),
        "An LSTM's memory as a straight line",
        f"The old memory {MEMORY:g} runs straight through. The forget gate {f:.2f} "
        f"multiplies it, the input gate {i:.2f} lets the candidate {g:.2f} be added, "
        f"which gives {new:.2f}. The output gate {o:.2f} shows {shown:.2f} of it as "
        "the state. Backwards, a step multiplies the memory's gradient by the forget "
        "gate alone.",
    )
    d.stream((104, LINE), (680, LINE))
    d.text(92, LINE - 2, "memory c", "stream", 14, "end", bold=True)
    d.text(92, LINE + 16, f"{MEMORY:.2f}", size=13, at="end")
    d.text(692, LINE - 2, "c'", "stream", 14, "start", bold=True)
    d.text(692, LINE + 16, f"{new:.2f}", size=13, at="start")
    d.arrow((660, LINE - 32), (130, LINE - 32), kind="alarm", width=2)
    d.text(395, LINE - 42, f"the gradient: × f = {f:.2f} a step", "alarm", bold=True)

    gates = (
        (FORGET, f"f = {f:.2f}", "how much\nis kept"),
        (INPUT, f"i = {i:.2f}", "how much\nis written"),
        (CANDIDATE, f"g = {g:.2f}", "what\nis written"),
        (OUTPUT, f"o = {o:.2f}", "how much\nis shown"),
    )
    for x, gate, does in gates:
        d.box(x - 40, BOXES, 80, 26, gate)
        d.arrow((x, BUS), (x, BOXES + 29))
        d.text(x, BUS + 18, does, "plain", 12)
    d.line((104, BUS), (OUTPUT, BUS))
    d.text(92, BUS - 2, "x and h", size=14, at="end", bold=True)

    d.arrow((FORGET, BOXES - 3), (FORGET, LINE + 13))
    d.times(FORGET, LINE)
    middle = (INPUT + CANDIDATE) / 2
    d.arrow((INPUT, BOXES - 3), (INPUT, 160), (middle - 12, 160))
    d.arrow((CANDIDATE, BOXES - 3), (CANDIDATE, 160), (middle + 12, 160))
    d.times(middle, 160)
    d.arrow((middle, 149), (middle, LINE + 13))
    d.text(middle + 8, 130, f"written {i * g:.2f}", size=12, at="start")
    d.plus(middle, LINE)
    d.text((FORGET + middle) / 2, LINE + 20, f"kept {f * MEMORY:.2f}", size=12)

    d.dot(OUTPUT + 60, LINE, radius=4)
    d.arrow((OUTPUT + 60, LINE), (OUTPUT + 60, 149), kind="ink")
    d.text(OUTPUT + 68, 122, "tanh", size=12, at="start")
    d.times(OUTPUT + 60, 160)
    d.arrow((OUTPUT, BOXES - 3), (OUTPUT, 160), (OUTPUT + 48, 160))
    d.arrow((OUTPUT + 71, 160), (684, 160))
    d.text(692, 158, "h'", size=14, at="start", bold=True)
    d.text(692, 176, f"{shown:.2f}", size=13, at="start")
    return d
