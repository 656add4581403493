"""Lesson 01."""

EQUIVALENT = {
    "lstm_cell": {
        "19 sign -1 → 1": "there are two dimensions",
    },
    "RNNLanguageModel": {
        "19 function torch.randn(d_model, d_hidden) → torch.rand(d_model, d_hidden)": (
            "drawn at random too, with columns of length 0.58"
        ),
        "29 attribute self.b → self.w_h": "both have H rows",
    },
}
