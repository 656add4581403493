"""Grading a folder of learners' notebooks: `python -m utils.grade FOLDER`.

What is taken from a submission are its exercise cells; everything else is the
instructor's. `submissions` reads them and `rules` looks at their text. `server` keeps
two kinds of warm processes that fork one confined process (`sandbox`) an exercise:
an *engine* that holds the checks (`examine`), and a *blind* one that holds neither
checks nor reference answers. An answer that passes in the first must give the same
results in the second (`record`, `replay`). `run` goes through a class with both, and
`tables` writes what came of it.
"""
