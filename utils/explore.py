"""Sliders above a figure, for notebooks in which somebody can move them."""

import ipywidgets
from IPython.display import display


def explore(draw, **ranges) -> None:
    """Show a slider for each argument of `draw`, which is called at every move.

    ranges: for each argument `(lowest, highest, first)`, whole numbers. `draw` ends
    with `plt.show()`. A stored notebook keeps no sliders, so let a static figure
    follow.
    """
    sliders = {
        name: ipywidgets.IntSlider(
            first, lowest, highest, description=name, continuous_update=False
        )
        for name, (lowest, highest, first) in ranges.items()
    }
    picture = ipywidgets.interactive_output(draw, sliders)
    display(ipywidgets.VBox([ipywidgets.HBox(list(sliders.values())), picture]))
