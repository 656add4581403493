"""A progress bar for work that takes longer than a second or two."""

import os

from utils.display import in_notebook


def progress(steps, label: str = ""):
    """Iterate over `steps` (an iterable, or a number for a range) with a bar.

    Nothing is drawn where nobody watches: under pytest, and while the builder
    executes a notebook.
    """
    steps = range(steps) if isinstance(steps, int) else steps
    if os.environ.get("COURSE_BUILD") or os.environ.get("PYTEST_VERSION"):
        return steps
    if in_notebook():
        from tqdm.notebook import tqdm
    else:
        from tqdm import tqdm
    return tqdm(steps, desc=label, leave=False)
