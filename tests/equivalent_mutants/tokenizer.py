"""Lesson 07."""

LENGTHS = "equally long"
EQUIVALENT = {
    "pair_counts": {"17 call dict(counts) → counts": "a Counter is a dict"},
    "merge_pair": {"16 call tuple(pair) → pair": "the pair is a tuple"},
    "train_bpe": {
        "35 call list(word.encode()) → word.encode()": "bytes are numbers too",
        "37 argument zip(words, times, strict=True) → zip(words, times)": LENGTHS,
        "37 constant True → False": LENGTHS,
        "43 loop range(256) → reversed(range(256))": "the order of a dict's keys",
    },
    "BPETokenizer": {
        "57 attribute self.merges → self.vocab": "there are more tokens than merges",
        "57 attribute self.merges → self.ids": "there are more tokens than merges",
    },
}
