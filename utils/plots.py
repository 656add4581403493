"""One style for the figures of all lessons."""

import matplotlib.pyplot as plt

# Okabe and Ito's palette: told apart with every common form of colour blindness.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, BLACK = "#CC79A7", "#56B4E9", "#F0E442", "#000000"
PALETTE = [BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK]


def use_course_style() -> None:
    """5 × 3.2 inches, a light grid, no box, the palette above."""
    plt.rcParams.update(
        {
            "figure.figsize": (5, 3.2),
            "figure.dpi": 110,
            "figure.constrained_layout.use": True,
            "axes.prop_cycle": plt.cycler(color=PALETTE),
            "axes.grid": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": "medium",
            "axes.titlelocation": "left",
            "grid.alpha": 0.3,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            "image.cmap": "Blues",
        }
    )


def attention_map(ax, weights, queries, keys=None, title="") -> None:
    """Draw weights `(T_q, T_k)`: queries down, keys across, colours from 0 to 1.

    queries, keys: the tokens as labels; `keys` are the queries if not given.
    """
    keys = queries if keys is None else keys
    image = ax.imshow(weights.detach().cpu(), vmin=0, vmax=1)
    ax.set_xticks(range(len(keys)), keys, rotation=45, ha="right")
    ax.set_yticks(range(len(queries)), queries)
    ax.set(xlabel="key", ylabel="query", title=title)
    ax.grid(False)
    ax.figure.colorbar(image, ax=ax, label="weight", shrink=0.8)
