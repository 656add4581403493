"""Lesson 07: mistakes in counting, merging, learning merges, and the tokenizer."""

from utils.exercises.tokenizer import BPETokenizer, merge_pair, pair_counts, train_bpe

# Counting pairs -----------------------------------------------------------------------

PAIRS = "pairwise(ids)"
LAST = """last = None if pair == last else pair
            if last:
                counts[pair] +="""

pair_counts.fault(
    "each_word_once",
    "Every word is counted once, however often it occurs. The count that stands "
    "beside the word in the dict must be added, not 1.",
    ("+= times", "+= 1"),
)
pair_counts.fault(
    "across_words",
    "The words are strung together, so that the last id of one and the first of the "
    "next are a pair. They are no neighbours in the text.",
    ("words.items()", "[(sum((w * n for w, n in words.items()), ()), 1)]"),
)
pair_counts.fault(
    "no_overlaps",
    "Of three equal ids in a row only one pair is counted. Merging skips overlaps, "
    "counting does not: both pairs are there.",
    ("for pair", "last = None\n        for pair"),
    ("counts[pair] +=", LAST),
)
pair_counts.fault(
    "once_a_word",
    "A pair that stands twice in one word is counted once for that word.",
    (PAIRS, f"set({PAIRS})"),
)
pair_counts.fault(
    "in_steps_of_two",
    "Only every second pair is looked at: ids 0 and 1, then 2 and 3. The pair of 1 "
    "and 2 counts as well.",
    (PAIRS, "zip(ids[::2], ids[1::2])"),
)
pair_counts.fault(
    "wraps_around",
    "The last id of a word and its first are counted as a pair: an index of −1 wraps "
    "around.",
    (PAIRS, "zip((*ids[-1:], *ids), ids)"),
)
pair_counts.fault(
    "overwritten",
    "A word's count replaces what an earlier word gave for the same pair, instead of "
    "being added to it.",
    ("+= times", "= times"),
)

# Merging a pair -----------------------------------------------------------------------

FITS = "tuple(ids[i : i + 2]) == tuple(pair)"

merge_pair.fault(
    "first_only",
    "Only the first occurrence is replaced.",
    (FITS, f"{FITS} and new_id not in merged"),
)
merge_pair.fault(
    "right_stays",
    "The left id becomes the new one, and the right one stays behind it. Both are in "
    "the new id.",
    ("i += 2", "i += 1"),
)
merge_pair.fault(
    "from_the_right",
    "It works from right to left, so that of three equal ids the last two are merged. "
    "The order is left to right.",
    ("merged, i = [], 0", "merged, i, ids, pair = [], 0, ids[::-1], pair[::-1]"),
    ("return merged", "return merged[::-1]"),
)
merge_pair.fault(
    "last_id_lost",
    "The last id is lost where it is in no pair: the loop over pairs ends one early.",
    ("i < len(ids)", "i < len(ids) - 1"),
)
merge_pair.fault(
    "list_against_tuple",
    "A slice of a list is compared with a tuple, and these are never equal: `[1, 2] "
    "== (1, 2)` is False. Make both the same kind.",
    (FITS, "ids[i : i + 2] == pair"),
)
merge_pair.fault(
    "tuple_against_list",
    "A slice of a tuple is compared with a list, and these are never equal: `(1, 2) "
    "== [1, 2]` is False. Make both the same kind.",
    (FITS, "ids[i : i + 2] == list(pair)"),
)
merge_pair.fault(
    "overlapping",
    "Of three equal ids both pairs are merged, though they share the id in the "
    "middle. An id that has been merged belongs to no further pair.",
    ("merged, i = [], 0", "merged, i, after = [], 0, False"),
    ("            i += 2", "            after = True\n            i += 1"),
    (
        "merged.append(ids[i])",
        "merged += [] if after else [ids[i]]\n            after = False",
    ),
)


@merge_pair.fault(
    "merges_its_own",
    "A new id is compared as if it had been there: with pair (1, 2) and new id 1, the "
    "ids 1, 2, 2 give 1 instead of 1, 2.",
)
def _(ids, pair, new_id):
    merged = []
    for i in ids:
        merged.append(i)
        while tuple(merged[-2:]) == pair:
            merged[-2:] = [new_id]
    return merged


# Learning merges ----------------------------------------------------------------------

BY_BYTES = "key=lambda pair: (vocab[pair[0]], vocab[pair[1]])"
ROOM = "len(vocab) < vocab_size - len(special_tokens)"

train_bpe.fault(
    "each_word_once",
    "Each different word counts once, however often it occurs in the text.",
    ("times = list(occurrences.values())", "times = [1] * len(occurrences)"),
)
train_bpe.fault(
    "smaller_on_ties",
    "On equal counts the smaller pair is merged. The greater one is due.",
    ("best = max(", "best = min("),
)
train_bpe.fault(
    "first_on_ties",
    "On equal counts the pair that was seen first is merged. Then the order of the "
    "text decides; the rule is the greater pair of bytes.",
    (BY_BYTES, "key=lambda pair: 0"),
)
train_bpe.fault(
    "joined_on_ties",
    "On equal counts the bytes of both parts are compared as one string. Compare the "
    "left parts first, and the right ones only where these are equal.",
    (BY_BYTES, "key=lambda pair: vocab[pair[0]] + vocab[pair[1]]"),
)
train_bpe.fault(
    "right_part_first",
    "On equal counts the right parts are compared before the left ones.",
    (BY_BYTES, "key=lambda pair: (vocab[pair[1]], vocab[pair[0]])"),
)
train_bpe.fault(
    "ids_on_ties",
    "On equal counts the ids are compared. Those of merges, 256 and on, are greater "
    "than those of all bytes, whatever bytes they stand for: compare the bytes.",
    (BY_BYTES, "key=lambda pair: pair"),
)
train_bpe.fault(
    "code_points",
    "It starts from the numbers of the characters instead of the bytes of UTF-8. They "
    "are the same only in ASCII.",
    ("list(word.encode())", "list(map(ord, word))"),
)
train_bpe.fault(
    "vocab_size_is_merges",
    "It goes on merging although the vocabulary is full: `vocab_size` counts the 256 "
    "bytes too.",
    (ROOM, "len(merges) < vocab_size"),
)
train_bpe.fault(
    "special_not_counted",
    "There are as many merges as if there were no special tokens. They take up part "
    "of `vocab_size`.",
    (ROOM, "len(vocab) < vocab_size"),
)
train_bpe.fault(
    "special_sorted",
    "The special tokens are numbered from the longest to the shortest. Sort them for "
    "the pattern alone; in `vocab` they keep the order in which they were given.",
    ("for token in special_tokens:", "for token in longest_first:"),
)
train_bpe.fault(
    "needs_two",
    "It stops at pairs that occur once. Nothing asks for that: it stops when no pair is "
    "left.",
    ("and counts:", "and max(counts.values(), default=0) > 1:"),
)
train_bpe.fault(
    "counted_once",
    "The pairs are counted at the start and never again. A merge changes what stands "
    "next to what.",
    ("for w in found_in.pop(best):", "del counts[best]\n        for w in ():"),
)

train_bpe.fault(
    "old_pairs_kept",
    "The pairs that a merge breaks up still count as before. Where b and c have "
    "become one token, the a in front of it no longer stands next to a b.",
    ("counts[pair] -= times[w]", "pass"),
)
train_bpe.fault(
    "new_pairs_missing",
    "The pairs of a new token with its neighbours are not counted.",
    ("counts[pair] = counts.get(pair, 0) + times[w]", "counts.get(pair, 0)"),
)

# The tokenizer ------------------------------------------------------------------------

CHOICE = "min(pairwise(ids), key=lambda pair: self.merges.get(pair, never)[0])"
BYTES = "[self.ids[letter] for letter in letters if letter in self.ids]"
LOOP = f"""while len(ids) > 1:
            pair = {CHOICE}
            if pair not in self.merges:
                break
            ids = merge_pair(ids, pair, self.merges[pair][1])
"""

BPETokenizer.fault(
    "leftmost_pair",
    "The leftmost pair that is in `merges` is merged, not the one of lowest rank. "
    "Merges must be applied in the order in which they were learned.",
    (CHOICE, "next((pair for pair in pairwise(ids) if pair in self.merges), None)"),
)
BPETokenizer.fault(
    "highest_rank",
    "The pair of highest rank, learned last, is merged first.",
    (CHOICE, "max(pairwise(ids), key=lambda pair: self.merges.get(pair, (-1,))[0])"),
)
BPETokenizer.fault(
    "rank_from_id",
    "The pair whose token has the lowest id is merged first. Ids may come in any "
    "order; the rank of a merge is its place in `merges`.",
    ("self.merges.get(pair, never)[0]", "self.merges.get(pair, (0, 1e9))[1]"),
)
BPETokenizer.fault(
    "joined_bytes",
    "Neighbours are merged wherever their bytes together are a token. Only pairs that "
    "stand in `merges` may be: the same token from another pair is another list of "
    "ids.",
    (
        LOOP,
        """while True:
            joined = {(a, b): self.vocab[a] + self.vocab[b] for a, b in pairwise(ids)}
            joined = [(self.ids[t], p) for p, t in joined.items() if t in self.ids]
            if not joined:
                break
            ids = merge_pair(ids, *min(joined)[::-1])
""",
    ),
)
BPETokenizer.fault(
    "one_pass",
    "The list of merges is gone through once. A merge can make a pair that stands "
    "earlier in the list: look again until none is left.",
    (
        LOOP,
        """for pair, (_, new_id) in self.merges.items():
            ids = merge_pair(ids, pair, new_id)
""",
    ),
)
BPETokenizer.fault(
    "longest_token",
    "From the left, the longest token that fits is taken. That is another method "
    "(WordPiece's); here merges are applied in their order.",
    (
        LOOP,
        """rest, ids = word.encode(), []
        while rest:
            n = next((n for n in range(len(rest), 0, -1) if rest[:n] in self.ids), 0)
            ids += [self.ids[rest[:n]]] if n else []
            rest = rest[n or 1 :]
""",
    ),
)
BPETokenizer.fault(
    "not_merged",
    "The bytes are never merged. Are the pairs that you look up of the same kind as "
    "those that you stored: tuples of ids, or tuples of bytes?",
    ("while len(ids) > 1:", "while False:"),
)
BPETokenizer.fault(
    "whole_words_first",
    "A word that is a token is taken as it stands. Where the merges do not lead to "
    "that token, the model has never seen it there.",
    (
        f"ids = {BYTES}",
        f"""if word.encode() in self.ids:
            return [self.ids[word.encode()]]
        ids = {BYTES}""",
    ),
)
BPETokenizer.fault(
    "ids_assumed",
    "It takes for granted that byte b has id b. Models number their tokens in other "
    "orders; look the bytes up in `vocab`.",
    (BYTES, "list(word.encode())"),
)
BPETokenizer.fault(
    "code_points",
    "It starts from the numbers of the characters instead of the bytes of UTF-8. They "
    "are the same only in ASCII.",
    (
        "bytes([b]) for b in word.encode()",
        "bytes([c]) for c in map(ord, word) if c < 256",
    ),
)
BPETokenizer.fault(
    "token_by_token",
    "Each token is turned into text by itself. A token may end in the middle of a "
    "character: join the bytes of all, then decode once.",
    (
        'b"".join(self.vocab[i] for i in ids).decode("utf-8", errors="replace")',
        '"".join(self.vocab[i].decode("utf-8", errors="replace") for i in ids)',
    ),
)
