"""Sliders above a figure, where somebody can move them."""

import os


def explore(draw, **ranges) -> None:
    """Show a slider for each argument of `draw`, which is called at every move.

    ranges: for each argument `(lowest, highest, first)`, whole numbers. `draw` ends
    with `plt.show()`. While the builder executes a notebook nothing is shown: nobody
    moves a slider there, and a static figure stands below.
    """
    if os.environ.get("COURSE_BUILD"):
        return
    import ipywidgets
    from IPython.display import display

    sliders = {
        name: ipywidgets.IntSlider(first, lowest, highest, continuous_update=False)
        for name, (lowest, highest, first) in ranges.items()
    }
    for name, slider in sliders.items():
        slider.description = name
    picture = ipywidgets.interactive_output(draw, sliders)
    display(ipywidgets.VBox([ipywidgets.HBox(list(sliders.values())), picture]))
