"""Lesson 07."""

LONGER = "of two that fit at one place the longer one begins with the shorter one"
HOLDS_BACK = "it holds back more of the text than it must"
LENGTHS = "equally long"
TWO_WORDS = "two words are held back, so one character does not matter"
CACHE = "a cache of another size, or none, gives the same ids"
EQUIVALENT = {
    "pair_counts": {"17 call dict(counts) → counts": "a Counter is a dict"},
    "merge_pair": {"16 call tuple(pair) → pair": "the pair is a tuple"},
    "train_bpe": {
        "31 argument special_tokens, key=len, → special_tokens,": LONGER,
        "38 call list(word.encode()) → word.encode()": "bytes are numbers too",
        "40 argument zip(words, times, strict=True) → zip(words, times)": LENGTHS,
        "40 constant True → False": LENGTHS,
        "46 loop range(256) → reversed(range(256))": "the order of a dict's keys",
    },
    "BPETokenizer": {
        "23 call dict(vocab) → vocab": "nobody changes it",
        "25 constant 0 → -1": "the first of one byte is the last",
        "36 argument special_tokens, key=len, → special_tokens,": LONGER,
        "39 constant 1 → 2": HOLDS_BACK,
        "39 constant 1 → 0": TWO_WORDS,
        "41 call lru_cache(maxsize=2 ** 16)(self… → self._encode_part": CACHE,
        "41 argument lru_cache(maxsize=2 ** 16) → lru_cache()": CACHE,
        "41 arithmetic 2 ** 16 → 2 * 16": CACHE,
        "41 arithmetic 2 ** 16 → 16 ** 2": CACHE,
        "41 operand 2 ** 16 → 2": CACHE,
        "41 operand 2 ** 16 → 16": CACHE,
        "41 constant 2 → 3": CACHE,
        "41 constant 2 → 1": CACHE,
        "41 constant 16 → 17": CACHE,
        "41 constant 16 → 15": CACHE,
        "71 attribute self.merges → self.vocab": "there are more tokens than merges",
        "119 arithmetic len(text) - self.longest + 1 → len(text) - self.longest - 1": (
            HOLDS_BACK
        ),
        "119 operand len(text) - self.longest + 1 → len(text) - self.longest": (
            HOLDS_BACK
        ),
        "119 constant 1 → 2": TWO_WORDS,
        "119 constant 1 → 0": HOLDS_BACK,
        "120 argument sum((end <= certain for end in … → 0, sum((end <= certain for end …": (  # noqa: E501
            "the greater of the same two"
        ),
        "120 compare end <= certain → end < certain": HOLDS_BACK,
        "120 constant 1 → 2": HOLDS_BACK,
        "120 constant 2 → 3": HOLDS_BACK,
    },
}
