"""Lesson 06."""

SAME_DTYPE = "weights come in the dtype of x"
EQUIVALENT = {
    "layer_norm": {"20 name x → weight": SAME_DTYPE},
    "rms_norm": {"17 name x → weight": SAME_DTYPE},
}
