"""Lesson 07: counting pairs, merging them, learning merges, and using them."""

import tracemalloc
import unicodedata
from collections import Counter
from functools import cache
from itertools import accumulate, islice, pairwise

import regex
import torch

from utils.check.case import Unmet, short
from utils.check.exercise import Exercise
from utils.probe import hashed

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
END, MORE = "<|end|>", "<|end|><|more|>"

pair_counts = Exercise("pair_counts", lesson="tokenizer")
merge_pair = Exercise("merge_pair", lesson="tokenizer")
train_bpe = Exercise("train_bpe", lesson="tokenizer")
tokenizer = Exercise("BPETokenizer", lesson="tokenizer")


# pair_counts -----------------------------------------------------------------------


def _count(words, pairs=pairwise):
    counts = Counter()
    for ids, times in words.items():
        for pair in pairs(ids):
            counts[pair] += times
    return dict(counts)


def _counts_agree(t, answer, words):
    given = dict(words)
    counts = t.mutate(answer, given)
    t.true(given == words, "It changed `words`: count without taking anything out.")
    t.true(
        isinstance(counts, dict),
        f"The result is of type {type(counts).__name__}, expected a dict from pair to "
        "count.",
    )
    expected = _count(words)
    for pair in [*expected, *counts]:
        if counts.get(pair) != expected.get(pair):
            raise Unmet(
                f"In {short(words, 80)} the pair {short(pair)} occurs "
                f"{expected.get(pair, 0)} times, and yours says "
                f"{counts.get(pair, 'nothing')}."
            )


@pair_counts.requires("each two neighbours in a word are a pair, in their order")
def _(answer, t):
    _counts_agree(t, answer, {(1, 2, 3): 1})
    _counts_agree(t, answer, {(5, 4, 9, 5, 8, 4, 5): 1})


@pair_counts.requires(
    "a word that occurs n times counts n times",
    "The dict says how often each word stands in the text. Its pairs stand there as "
    "often.",
)
def _(answer, t):
    _counts_agree(t, answer, {(1, 2, 3): 4})
    _counts_agree(t, answer, {(1, 2, 3): 4, (2, 3): 10, (3, 2, 1): 7})


@pair_counts.requires("a pair that occurs twice in one word counts twice, overlaps too")
def _(answer, t):
    _counts_agree(t, answer, {(1, 2, 5, 1, 2): 3})
    _counts_agree(t, answer, {(7, 7, 7): 1, (7, 7, 7, 7, 8): 5})


@pair_counts.requires(
    "words of one id or none have no pair, and no words give no pairs"
)
def _(answer, t):
    _counts_agree(t, answer, {(4,): 9, (): 2, (300, 70_000): 2, (6,): 1})
    _counts_agree(t, answer, {})


@pair_counts.requires("many words work as few do")
def _(answer, t):
    ids = (hashed(3000, seed=5) % 40).tolist()
    words = {tuple(ids[i : i + 1 + ids[i] % 7]): 1 + i % 13 for i in range(600)}
    _counts_agree(t, answer, words)


@pair_counts.fault(
    "each_word_once",
    "Every word is counted once, however often it occurs. The count that stands beside "
    "the word in the dict must be added, not 1.",
)
def _(words):
    return _count(dict.fromkeys(words, 1))


@pair_counts.fault(
    "across_words",
    "The words are strung together, so that the last id of one and the first of the "
    "next are a pair. They are no neighbours in the text.",
)
def _(words):
    return _count({tuple(i for ids, n in words.items() for i in ids * n): 1})


@pair_counts.fault(
    "no_overlaps",
    "Of three equal ids in a row only one pair is counted. Merging skips overlaps, "
    "counting does not: both pairs are there.",
)
def _(words):
    def pairs(ids):
        last = None
        for i, pair in enumerate(pairwise(ids)):
            if last is not None and last == (i - 1, pair):
                last = None
                continue
            last = i, pair
            yield pair

    return _count(words, pairs)


@pair_counts.fault(
    "once_a_word",
    "A pair that stands twice in one word is counted once for that word.",
)
def _(words):
    return _count(words, lambda ids: dict.fromkeys(pairwise(ids)))


@pair_counts.fault(
    "without_order",
    "(1, 2) and (2, 1) are counted as one pair. Their tokens would be different bytes.",
)
def _(words):
    return _count(words, lambda ids: [tuple(sorted(p)) for p in pairwise(ids)])


@pair_counts.fault("reversed_pairs", "The pairs are turned round: left comes first.")
def _(words):
    return _count(words, lambda ids: [(b, a) for a, b in pairwise(ids)])


@pair_counts.fault(
    "in_steps_of_two",
    "Only every second pair is looked at: ids 0 and 1, then 2 and 3. The pair of 1 and 2 "
    "counts as well.",
)
def _(words):
    return _count(words, lambda ids: list(pairwise(ids))[::2])


@pair_counts.fault(
    "first_pair_missing",
    "The first pair of each word is missing: a word of n ids has n − 1 pairs.",
)
def _(words):
    return _count(words, lambda ids: list(pairwise(ids))[1:])


@pair_counts.fault(
    "last_pair_missing",
    "The last pair of each word is missing: a word of n ids has n − 1 pairs.",
)
def _(words):
    return _count(words, lambda ids: list(pairwise(ids))[:-1])


@pair_counts.fault(
    "wraps_around",
    "The last id of a word and its first are counted as a pair: an index of −1 wraps "
    "around.",
)
def _(words):
    return _count(words, lambda ids: [(ids[i - 1], ids[i]) for i in range(len(ids))])


@pair_counts.fault(
    "overwritten",
    "A word's count replaces what an earlier word gave for the same pair, instead of "
    "being added to it.",
)
def _(words):
    return {pair: n for ids, n in words.items() for pair in pairwise(ids)}


# merge_pair ------------------------------------------------------------------------


def _merge(ids, pair, new_id):
    out = []
    for i in ids:
        out.append((i, False))
        if len(out) > 1 and not out[-2][1] and (out[-2][0], i) == tuple(pair):
            out[-2:] = [(new_id, True)]
    return [i for i, _ in out]


def _merge_agrees(t, answer, ids, pair, new_id):
    given = ids[:]
    merged = t.mutate(answer, given, pair, new_id)
    t.true(given == ids, "It changed `ids` in place: build a new list.")
    t.true(merged is not given, "It returns the list it was given: return a new one.")
    t.true(
        isinstance(merged, list),
        f"The result is of type {type(merged).__name__}, expected a list.",
    )
    t.equal(merged, _merge(ids, pair, new_id), f"{short(ids)} with {pair} merged")


@merge_pair.requires("the two ids are replaced by the new one, the rest stays")
def _(answer, t):
    _merge_agrees(t, answer, [5, 1, 2, 6], (1, 2), 9)
    _merge_agrees(t, answer, [3, 4, 6, 7, 8], (3, 4), 300)
    _merge_agrees(t, answer, [6, 7, 8, 3, 4], (3, 4), 256)


@merge_pair.requires("every occurrence is replaced")
def _(answer, t):
    _merge_agrees(t, answer, [1, 2, 3, 1, 2, 1, 2, 5], (1, 2), 9)


@merge_pair.requires(
    "the order of the pair counts, and half a pair is none",
    "Look at both ids before you replace anything.",
)
def _(answer, t):
    _merge_agrees(t, answer, [2, 1, 3, 1, 3, 2, 1], (1, 2), 9)
    _merge_agrees(t, answer, [4, 4, 2, 2, 1], (1, 2), 9)
    _merge_agrees(t, answer, [11, 2, 1, 22, 1, 2], (1, 2), 9)


@merge_pair.requires(
    "occurrences do not overlap, and the left one is taken",
    "After a merge, go on behind both of its ids.",
)
def _(answer, t):
    for n in (2, 3, 4, 5):
        _merge_agrees(t, answer, [7] * n, (7, 7), 8)
    _merge_agrees(t, answer, [1, 7, 7, 7, 1, 7, 7, 7, 7, 2], (7, 7), 8)


@merge_pair.requires("nothing to merge, one id or none: a list with the same ids")
def _(answer, t):
    for ids in ([], [1], [3, 5, 4], [2, 1]):
        _merge_agrees(t, answer, ids, (1, 2), 9)


@merge_pair.requires(
    "what a merge gives is not merged again in the same call",
    "The new id may be equal to one of the pair. Compare ids that were handed in.",
)
def _(answer, t):
    _merge_agrees(t, answer, [1, 2, 2, 2], (1, 2), 1)
    _merge_agrees(t, answer, [1, 1, 2, 5], (1, 2), 2)
    _merge_agrees(t, answer, [9, 1, 2, 9], (1, 2), 9)


@merge_pair.requires("a tuple of ids works too, and so does a long list")
def _(answer, t):
    _merge_agrees(t, answer, (5, 1, 2, 6, 1, 2), (1, 2), 9)
    _merge_agrees(t, answer, (hashed(2000, seed=3) % 3).tolist(), (2, 1), 3)


def _merging(ids, pair, new_id, skip=2, limit=None):
    merged, i, done = [], 0, 0
    while i < len(ids):
        if tuple(ids[i : i + 2]) == pair and (limit is None or done < limit):
            merged.append(new_id)
            i, done = i + skip, done + 1
        else:
            merged.append(ids[i])
            i += 1
    return merged


@merge_pair.fault("first_only", "Only the first occurrence is replaced.")
def _(ids, pair, new_id):
    return _merging(ids, pair, new_id, limit=1)


@merge_pair.fault(
    "right_stays",
    "The left id becomes the new one, and the right one stays behind it. Both are in "
    "the new id.",
)
def _(ids, pair, new_id):
    return _merging(ids, pair, new_id, skip=1)


@merge_pair.fault("skips_too_far", "After a merge an id is lost: it goes on too far.")
def _(ids, pair, new_id):
    return _merging(ids, pair, new_id, skip=3)


@merge_pair.fault(
    "from_the_right",
    "It works from right to left, so that of three equal ids the last two are merged. "
    "The order is left to right.",
)
def _(ids, pair, new_id):
    return _merging(ids[::-1], pair[::-1], new_id)[::-1]


@merge_pair.fault("either_order", "(2, 1) is merged as well where (1, 2) is asked for.")
def _(ids, pair, new_id):
    merged, i = [], 0
    while i < len(ids):
        both = sorted(ids[i : i + 2]) == sorted(pair)
        merged.append(new_id if both else ids[i])
        i += 2 if both else 1
    return merged


@merge_pair.fault(
    "last_id_lost",
    "The last id is lost where it is in no pair: the loop over pairs ends one early.",
)
def _(ids, pair, new_id):
    merged, i = [], 0
    while i < len(ids) - 1:
        both = (ids[i], ids[i + 1]) == pair
        merged.append(new_id if both else ids[i])
        i += 2 if both else 1
    return merged


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


@merge_pair.fault(
    "in_place",
    "The list that came in is changed. The caller may still need it.",
)
def _(ids, pair, new_id):
    if isinstance(ids, list):
        ids[:] = _merging(ids, pair, new_id)
    return ids


@merge_pair.fault(
    "as_text",
    "The ids are joined to a text and replaced there. The text of 11, 2 holds that of "
    "1, 2: ids are numbers, not digits.",
)
def _(ids, pair, new_id):
    text = " ".join(map(str, ids)).replace(f"{pair[0]} {pair[1]}", str(new_id))
    return [int(word) for word in text.split()]


@merge_pair.fault(
    "list_against_tuple",
    "A slice of a list is compared with a tuple, and these are never equal: "
    "`[1, 2] == (1, 2)` is False. Make both the same kind.",
)
def _(ids, pair, new_id):
    return _merging(ids, pair if isinstance(ids, tuple) else None, new_id)


@merge_pair.fault(
    "tuple_against_list",
    "A slice of a tuple is compared with a list, and these are never equal: "
    "`(1, 2) == [1, 2]` is False. Make both the same kind.",
)
def _(ids, pair, new_id):
    return _merging(ids, pair if isinstance(ids, list) else None, new_id)


@merge_pair.fault("a_tuple", "A tuple is returned; a list is asked for.")
def _(ids, pair, new_id):
    return tuple(_merging(ids, pair, new_id))


@merge_pair.fault("removed", "The pair is taken out, and no new id put in its place.")
def _(ids, pair, new_id):
    gone = object()
    return [i for i in _merging(ids, pair, gone) if i is not gone]


# train_bpe -------------------------------------------------------------------------


def _pieces(text, special_tokens):
    """The text between the special tokens; of two that fit, the longer one cuts."""
    pieces, start, i = [], 0, 0
    while i < len(text):
        fitting = [s for s in special_tokens if text.startswith(s, i)]
        if fitting:
            pieces.append(text[start:i])
            start = i = i + max(map(len, fitting))
        else:
            i += 1
    return [*pieces, text[start:]]


def _words(pieces, pattern=GPT2):
    return [word for piece in pieces for word in regex.findall(pattern, piece)]


def _greater(count, left, right):
    return count, left, right


def _learn(
    text,
    vocab_size,
    special_tokens=(),
    *,
    words=lambda text, special: _words(_pieces(text, special)),
    occurrences=Counter,
    key=_greater,
    pairs=pairwise,
    least=1,
    recount=True,
    room=lambda size, special: size - 256 - len(special),
    cut=lambda word: [bytes([byte]) for byte in word.encode()],
    special_first=False,
    merge=_merge,
):
    """Recounts everything at each merge. The options are the faults' hooks."""
    n_merges = room(vocab_size, special_tokens)
    if n_merges < 0:
        raise ValueError(f"{vocab_size} < {256 + len(special_tokens)}")
    found = occurrences(words(text, special_tokens))
    held = [(cut(word), times) for word, times in found.items()]
    merges, counts = [], None
    while len(merges) < n_merges:
        if counts is None or recount:
            counts = Counter()
            for parts, times in held:
                for pair in pairs(parts):
                    counts[pair] += times
        best = max(counts, key=lambda p: key(counts[p], *p), default=None)
        if best is None or counts[best] < least:
            break
        if not recount:
            del counts[best]
        merges.append(best)
        held = [(merge(parts, best, best[0] + best[1]), n) for parts, n in held]
    special = [token.encode() for token in special_tokens]
    singles = [bytes([i]) for i in range(256)]
    joined = [a + b for a, b in merges]
    tokens = special + singles + joined if special_first else singles + joined + special
    return dict(enumerate(tokens)), merges


def _learns(t, answer, text, vocab_size, *special):
    given = [list(each) for each in special]
    result = t.mutate(answer, text, vocab_size, *given)
    t.true(
        given == [list(each) for each in special],
        "It changed `special_tokens`: leave the caller's list as it is.",
    )
    t.is_tuple(result, 2)
    vocab, merges = result
    expected_vocab, expected = _learn(text, vocab_size, *special)
    t.true(
        isinstance(vocab, dict),
        f"`vocab` is of type {type(vocab).__name__}, expected a dict from id to bytes.",
    )
    t.true(
        isinstance(merges, list),
        f"`merges` is of type {type(merges).__name__}, expected a list.",
    )
    _same_merges(merges, expected)
    for i in [*expected_vocab, *vocab]:
        if vocab.get(i) != expected_vocab.get(i):
            raise Unmet(
                f"`vocab` at id {short(i)} is {short(vocab.get(i, 'missing'))}, expected "
                f"{short(expected_vocab.get(i, 'nothing'))}."
            )


def _same_merges(merges, expected):
    for i, (yours, right) in enumerate(zip(merges, expected, strict=False)):
        if not isinstance(yours, (tuple, list)) or tuple(yours) != right:
            raise Unmet(f"Merge number {i} is {short(yours)}, expected {short(right)}.")
    if len(merges) != len(expected):
        raise Unmet(f"The number of merges is {len(merges)}, expected {len(expected)}.")


def _invented_text(n_words, seed=0):
    """Words of some syllables, short ones often, with punctuation and lines."""
    numbers = hashed(4 * n_words, seed).tolist()
    syllables = [
        "re",
        "in",
        "the",
        "tor",
        "a",
        "con",
        "st",
        "ing",
        "er",
        "é",
        "ba",
        "no",
        "li",
        "ü",
        "水",
        "do",
        "'s",
        "42",
    ]
    out = []
    for a, b, c, d in zip(*[iter(numbers)] * 4, strict=True):
        chosen = [a % 18, (a // 18) % 6, b % 3][: 1 + c % 3]
        ends = (" ", " ", " ", ", ", ".\n", "  ")[d % 6]
        out.append("".join(syllables[i] for i in chosen) + ends)
    return "".join(out)


@train_bpe.requires("with room for no merge there are the 256 bytes, and no merges")
def _(answer, t):
    _learns(t, answer, "low lower", 256)
    _learns(t, answer, "", 256, [])


@train_bpe.requires(
    "the most frequent pair is merged first, and takes the next id",
    "Print the counts of the first round and compare by hand.",
)
def _(answer, t):
    _learns(t, answer, "abcbcbc", 257)
    _learns(t, answer, "zzxyxyxy", 257, [])


@train_bpe.requires(
    "of several most frequent pairs the greater one is merged",
    "`max` takes a key. What must it compare after the count?",
)
def _(answer, t):
    for text in ("abcd", "dcba", "xyaxyaby", "zbazbabz"):
        _learns(t, answer, text, 257)


@train_bpe.requires(
    "later merges count what the earlier ones left, and may build on them",
    "After each merge the words hold fewer ids, and other pairs. Which counts changed?",
)
def _(answer, t):
    _learns(t, answer, "abcabcabcabxbc", 259)
    _learns(t, answer, "a" * 8 + "b", 259)


@train_bpe.requires(
    "where no pair is left it stops, with a smaller vocabulary",
    "A text of two different letters has one pair. What does your search for the most "
    "frequent pair give when none is left, and when a count has become 0?",
)
def _(answer, t):
    _learns(t, answer, "ab", 300)
    _learns(t, answer, "abcab", 300)
    _learns(t, answer, "", 300)


@train_bpe.requires(
    "the text is cut by GPT-2's pattern, and no merge reaches from word to word",
    "A space belongs to the word behind it. Digits, letters and other signs are words "
    "apart.",
)
def _(answer, t):
    _learns(t, answer, "ab ab ab ab", 260)
    _learns(t, answer, "it's 12ab it's 12ab, it's 12ab,\n\n  it's", 280)
    _learns(t, answer, "x==1;x==1;\tx==1;   x  ==1\n\n\n\nx", 270)


@train_bpe.requires(
    "a pair counts as often as its word occurs in the text",
    "Equal words are worth one entry and a count.",
)
def _(answer, t):
    _learns(t, answer, "xyz xyz xyz xyz abq abr abs", 262)


@train_bpe.requires(
    "on equal counts pairs are compared by their bytes, the left part first",
    "Tuples of bytes compare as they should: first part, then second. Ids do not, once "
    "they stand for merges.",
)
def _(answer, t):
    _learns(t, answer, "ab cd", 260)
    _learns(t, answer, "cd ab", 260)
    _learns(t, answer, "abc\nabc\nzq\nzq", 260)
    # (b"a", b"bz") and (b"ab", b"c") are equally frequent and equally long in sum.
    _learns(t, answer, "bz bz bz bz abz abz abc abc ab ab", 264)
    _learns(t, answer, "azb azb aab aab zab zab b b zb ab", 270)


@train_bpe.requires(
    "characters outside ASCII are bytes of UTF-8, and a merge may hold a part of one"
)
def _(answer, t):
    _learns(t, answer, "é è ê é ü é 水 氷 永 水 水 🙂🙃🙂", 275)
    _learns(t, answer, "cafés cafés größer größer вода вода ٣٤ ٣٤ ٣٤", 300)


@train_bpe.requires(
    "special tokens cut the text, come last in `vocab`, and count in `vocab_size`",
    "Cut the text at them before anything is counted. The two sides stay apart.",
)
def _(answer, t):
    _learns(t, answer, f"ab{END}cb ab{END}cb ab{END}cb", 261, [END])
    _learns(t, answer, f"{END}the end{END}{END} the end|> <|end", 268, [END])
    _learns(t, answer, f"ab{END}cb ab{END}cb ab{END}cb", 258, [END])
    _learns(t, answer, "ab a b", 300, [END])
    _learns(t, answer, "", 300, [END, MORE])


@train_bpe.requires(
    "special tokens are plain text, and of two that fit the longer one counts",
    "Signs such as | mean something in a pattern: `regex.escape`. Of alternatives a "
    "pattern takes the first that fits, not the longest.",
)
def _(answer, t):
    _learns(t, answer, f"more{MORE}more{END}x|x|x.x<more|>", 266, [END, MORE])
    _learns(t, answer, "aXb.aXb.aXb a.b a.b a.b (1) (1)", 266, ["a.b", "(1)"])


@train_bpe.requires(
    "a vocab_size below 256 plus the special tokens is a ValueError that names numbers"
)
def _(answer, t):
    for size, special in ((255, []), (0, []), (257, [END, MORE])):
        needed = 256 + len(special)
        t.raises(
            ValueError,
            answer,
            "abc",
            size,
            special,
            mentions=(size, needed),
            because=f"vocab_size {size} where {needed} is the least",
        )


@train_bpe.requires(
    "a longer text with many words, called with names, gives every merge in its order",
    "The first merges are right and a later one is not: is a count out of date, or one "
    "of a pair that is gone?",
)
def _(answer, t):
    _learns(t, answer, _invented_text(300), 310)
    text = _invented_text(60, seed=1) + END + _invented_text(60, seed=2)
    result = t.mutate(answer, text=text, vocab_size=280, special_tokens=[END])
    t.is_tuple(result, 2)
    _same_merges(result[1], _learn(text, 280, [END])[1])


def _training_fault(name, sentence, **options):
    def implementation(text, vocab_size, special_tokens=()):
        return _learn(text, vocab_size, special_tokens, **options)

    train_bpe.fault(name, sentence, implementation)


_training_fault(
    "each_word_once",
    "Each different word counts once, however often it occurs in the text.",
    occurrences=lambda words: dict.fromkeys(words, 1),
)
_training_fault(
    "smaller_on_ties",
    "On equal counts the smaller pair is merged. The greater one is due.",
    key=lambda n, left, right: (
        n,
        [-byte for byte in left] + [1],
        [-byte for byte in right] + [1],
    ),
)
_training_fault(
    "first_on_ties",
    "On equal counts the pair that was seen first is merged. Then the order of the text "
    "decides; the rule is the greater pair of bytes.",
    key=lambda n, left, right: n,
)
_training_fault(
    "joined_on_ties",
    "On equal counts the bytes of both parts are compared as one string. Compare the "
    "left parts first, and the right ones only where these are equal.",
    key=lambda n, left, right: (n, left + right),
)
_training_fault(
    "rarest",
    "The rarest pair is merged instead of the most frequent one.",
    key=lambda n, left, right: (-n, left, right),
)
_training_fault(
    "longest_first",
    "The pair that gives the longest token is merged. What counts is how often it "
    "occurs.",
    key=lambda n, left, right: (len(left) + len(right), n, left, right),
)
_training_fault(
    "longest_on_ties",
    "On equal counts the pair that gives the longest token is merged. The greater pair "
    "is due, compared as a tuple of bytes.",
    key=lambda n, left, right: (n, len(left) + len(right), left, right),
)
_training_fault(
    "right_part_first",
    "On equal counts the right parts are compared before the left ones.",
    key=lambda n, left, right: (n, right, left),
)
_training_fault(
    "across_words",
    "The text is not cut into words, so that merges reach over spaces from word to word.",
    words=lambda text, special: _pieces(text, special),
)
_training_fault(
    "split_at_spaces",
    "The text is cut with `str.split`, which loses white space and leaves signs on the "
    "words. GPT-2's pattern keeps a space with the word behind it.",
    words=lambda text, special: " ".join(_pieces(text, special)).split(),
)
_training_fault(
    "special_as_text",
    "Special tokens are learned from like any text. They must cut it before anything is "
    "counted.",
    words=lambda text, special: _words([text]),
)
_training_fault(
    "special_taken_out",
    "Special tokens are taken out and what stood on their two sides is joined. Then "
    "words are counted that no text holds.",
    words=lambda text, special: _words(["".join(_pieces(text, special))]),
)


def _shortest_first(text, special):
    for token in sorted(special, key=len):
        text = text.replace(token, "\0\0")
    return _words(text.split("\0\0"))


_training_fault(
    "shorter_special_first",
    "Where two special tokens fit, the shorter one cuts, and the rest of the longer one "
    "is learned from as text.",
    words=_shortest_first,
)
_training_fault(
    "special_unescaped",
    "Special tokens stand in a pattern as they are, where | means “or” and . any sign. "
    "`regex.escape` makes plain text of them.",
    words=lambda text, special: _words(
        [
            piece or ""
            for piece in (
                regex.split("|".join(f"(?:{s})" for s in special), text)
                if special
                else [text]
            )
        ]
    ),
)
_training_fault(
    "empty_pattern",
    "Without special tokens the pattern of alternatives is empty, and an empty pattern "
    "cuts the text between all characters.",
    words=lambda text, special: (
        _words(_pieces(text, special)) if special else _words(text)
    ),
)
_training_fault(
    "special_first",
    "The special tokens stand at the front of `vocab`. Here the 256 bytes come first, "
    "then the merges, then the special tokens.",
    special_first=True,
)
_training_fault(
    "special_not_counted",
    "There are as many merges as if there were no special tokens. They take up part of "
    "`vocab_size`.",
    room=lambda size, special: size - 256,
)
_training_fault(
    "vocab_size_is_merges",
    "`vocab_size` merges are made. The 256 bytes are a part of the vocabulary.",
    room=lambda size, special: size,
)
_training_fault(
    "counted_once",
    "The pairs are counted at the start and never again. A merge changes what stands "
    "next to what.",
    recount=False,
)
_training_fault(
    "needs_two",
    "It stops at pairs that occur once. Nothing asks for that: it stops when no pair is "
    "left.",
    least=2,
)
_training_fault(
    "no_overlaps",
    "Of three equal tokens in a row only one pair is counted. Both count.",
    pairs=lambda parts: _apart(parts),
)
_training_fault(
    "characters",
    "The words are cut into characters instead of bytes, so é is one token and has no "
    "place among the 256.",
    cut=lambda word: [sign.encode() for sign in word],
)
_training_fault(
    "lower_case",
    "The text is changed before it is learned from: upper case is gone.",
    words=lambda text, special: _words(_pieces(text.lower(), special)),
)
_training_fault(
    "one_merge_a_word",
    "Only the first occurrence of a pair in each word is merged.",
    merge=lambda parts, pair, new: _merging(parts, pair, new, limit=1),
)


def _apart(parts):
    last = None
    for i, pair in enumerate(pairwise(parts)):
        if last is not None and last == (i - 1, pair):
            last = None
            continue
        last = i, pair
        yield pair


@train_bpe.fault(
    "merges_as_ids",
    "`merges` holds pairs of ids. Pairs of bytes are due, which mean the same under any "
    "numbering.",
)
def _(text, vocab_size, special_tokens=()):
    vocab, merges = _learn(text, vocab_size, special_tokens)
    ids = {token: i for i, token in vocab.items()}
    return vocab, [(ids[a], ids[b]) for a, b in merges]


@train_bpe.fault(
    "ids_on_ties",
    "On equal counts the ids are compared. Those of merges, 256 and on, are greater than "
    "those of all bytes, whatever bytes they stand for: compare the bytes.",
)
def _(text, vocab_size, special_tokens=()):
    numbers = {bytes([i]): i for i in range(256)}

    def merge(parts, pair, new):
        numbers.setdefault(new, len(numbers))
        return _merge(parts, pair, new)

    def key(n, left, right):
        return n, numbers[left], numbers[right]

    return _learn(text, vocab_size, special_tokens, key=key, merge=merge)


@train_bpe.fault(
    "special_sorted",
    "The special tokens are numbered from the longest to the shortest. Sort them for the "
    "pattern alone; in `vocab` they keep the order in which they were given.",
)
def _(text, vocab_size, special_tokens=()):
    in_order = sorted(special_tokens, key=len, reverse=True)
    return _learn(text, vocab_size, in_order)


@train_bpe.fault(
    "special_before_merges",
    "The special tokens come before the merges. Here the 256 bytes come first, then the "
    "merges, then the special tokens.",
)
def _(text, vocab_size, special_tokens=()):
    vocab, merges = _learn(text, vocab_size, special_tokens)
    tokens, n = list(vocab.values()), 256 + len(merges)
    return dict(enumerate([*tokens[:256], *tokens[n:], *tokens[256:n]])), merges


@train_bpe.fault(
    "no_room_unnoticed",
    "A vocab_size that is too small gives no error, but a vocabulary that is larger "
    "than asked for.",
)
def _(text, vocab_size, special_tokens=()):
    vocab_size = max(vocab_size, 256 + len(special_tokens))
    return _learn(text, vocab_size, special_tokens)


@train_bpe.fault("special_missing", "The special tokens are not in `vocab`.")
def _(text, vocab_size, special_tokens=()):
    vocab, merges = _learn(text, vocab_size, special_tokens)
    return dict(islice(vocab.items(), len(vocab) - len(special_tokens))), merges


# BPETokenizer ----------------------------------------------------------------------


class _Tokenizer:
    """Merges one pair at a time, on bytes. The methods are the faults' hooks."""

    def __init__(self, vocab, merges, special_tokens=(), pattern=GPT2):
        self.vocab, self.pattern = dict(vocab), pattern
        self.ids = {token: i for i, token in self.vocab.items()}
        self.rank = {tuple(pair): rank for rank, pair in enumerate(merges)}
        self.special = list(special_tokens)
        self.check_special()

    def check_special(self):
        for token in self.special:
            if token.encode() not in self.ids:
                raise ValueError(f"{token} is not in the vocabulary")

    def fitting(self, text, i):
        """The special token that stands at i, or None."""
        fits = [s for s in self.special if text.startswith(s, i)]
        return max(fits, key=len, default=None)

    def parts(self, text):
        """Words and special tokens: pairs (text, is it special?)."""
        found, start, i = [], 0, 0
        while i < len(text):
            token = self.fitting(text, i)
            if token is None:
                i += 1
                continue
            found += [(word, False) for word in self.words(text[start:i])]
            found.append((text[i : i + len(token)], True))
            start = i = i + len(token)
        return found + [(word, False) for word in self.words(text[start:])]

    def words(self, piece):
        return regex.findall(self.pattern, piece)

    def start(self, word):
        singles = [bytes([byte]) for byte in word.encode()]
        return [byte for byte in singles if byte in self.ids]

    def choose(self, parts):
        """The place of the pair to merge next, or None."""
        places = [i for i, pair in enumerate(pairwise(parts)) if pair in self.rank]
        return min(
            places, key=lambda i: self.rank[parts[i], parts[i + 1]], default=None
        )

    def merge(self, parts):
        while (i := self.choose(parts)) is not None:
            parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]
        return parts

    def number(self, token):
        return self.ids[token]

    def of_part(self, part, special):
        if special:
            return [self.ids[part.encode()]]
        return [self.number(token) for token in self.merge(self.start(part))]

    def encode(self, text):
        return [i for part in self.parts(text) for i in self.of_part(*part)]

    def known(self, ids):
        for i in ids:
            if i not in self.vocab:
                raise ValueError(f"{i} is not among {len(self.vocab)} ids")

    def numbers(self, ids):
        return [int(i) for i in ids]

    def decode(self, ids):
        ids = self.numbers(ids)
        self.known(ids)
        return self.text(b"".join(self.vocab[i] for i in ids))

    def text(self, data):
        return data.decode("utf-8", errors="replace")

    keep_back = 2

    def uncertain(self):
        return max(map(len, self.special), default=1) - 1

    def encode_iterable(self, chunks):
        text = ""
        for chunk in chunks:
            text += chunk
            parts = self.parts(text)
            ends = [0, *accumulate(len(part) for part, _ in parts)]
            certain = len(text) - self.uncertain()
            n = max(sum(end <= certain for end in ends[1:]) - self.keep_back, 0)
            for part in parts[:n]:
                yield from self.of_part(*part)
            text = text[ends[n] :]
        yield from self.rest(text)

    def rest(self, text):
        return self.encode(text)


MIXED = (
    "The tokenizer's there, they're here: it's 1234 or 12.5! naïve café, größer; "
    "привет, мир! 你好世界 水水 👋🏽🙂 def f(x):\n    return x**2  # ok\n\n\t\tend "
)


@cache
def _kit(renumbered=True):
    """A vocabulary with merges and special tokens; ids in another order if asked."""
    vocab, merges = _learn(_invented_text(500) + MIXED * 3, 420, [END, MORE])
    n = len(vocab)
    if renumbered:
        vocab = {(i * 11 + 5) % n: token for i, token in vocab.items()}
        assert len(vocab) == n
    return vocab, merges, [END, MORE]


@cache
def _oracle(renumbered=True, **options):
    return _Tokenizer(*_kit(renumbered), **options)


def _encodes(t, answer, text, expected=None, kit=None, **options):
    vocab, merges, special = kit or _kit()

    def encode(BPETokenizer, text):
        tokenizer = BPETokenizer(dict(vocab), list(merges), list(special), **options)
        return tokenizer.encode(text)

    ids = t.call(encode, answer, text)
    if expected is None:
        expected = _Tokenizer(vocab, merges, special, **options).encode(text)
    _same_ids(t, ids, expected, vocab, f"The ids of {short(text, 60)}")


def _same_ids(t, ids, expected, vocab, what):
    t.true(
        isinstance(ids, list),
        f"{what} come as {type(ids).__name__}, expected a list.",
    )
    if ids == expected:
        return
    for i, (yours, right) in enumerate(zip(ids, expected, strict=False)):
        if yours != right:
            name = vocab.get(yours) if isinstance(yours, int) else None
            raise Unmet(
                f"{what}: number {i} is {short(yours)}"
                f"{f', {name!r}' if name is not None else ''}, expected {right}, "
                f"{vocab[right]!r}."
            )
    raise Unmet(f"{what} are {len(ids)}, expected {len(expected)}.")


def _decodes(t, answer, ids, expected, kit=None):
    vocab, merges, special = kit or _kit()

    def decode(BPETokenizer, ids):
        return BPETokenizer(dict(vocab), list(merges), list(special)).decode(ids)

    t.equal(t.call(decode, answer, ids), expected, f"the text of {short(ids, 60)}")


def _small(*merges, special=()):
    """256 bytes, some merges and special tokens in the plain order of ids."""
    tokens = [bytes([i]) for i in range(256)]
    tokens += [left + right for left, right in merges]
    return dict(enumerate([*tokens, *(s.encode() for s in special)])), merges, special


@tokenizer.requires("without merges each byte is an id, in the vocabulary's numbers")
def _(answer, t):
    _encodes(t, answer, "low", kit=_small())
    _encodes(t, answer, "", kit=_small())
    shifted = {(i + 77) % 256: bytes([i]) for i in range(256)}
    _encodes(t, answer, "lower", kit=(shifted, [], []))


@tokenizer.requires(
    "the pair of lowest rank is merged first, wherever it stands in the word",
    "Of all pairs in the word that are in `merges`, which stands earliest *in the "
    "list*? Merge it, and look again.",
)
def _(answer, t):
    _encodes(t, answer, "abc", kit=_small((b"b", b"c"), (b"a", b"b")))
    kit = _small((b"b", b"c"), (b"a", b"b"), (b"ab", b"c"))
    _encodes(t, answer, "abc abd abcc", kit=kit)
    kit = _small((b"c", b"d"), (b"b", b"cd"), (b"a", b"b"), (b"a", b"bcd"))
    for text in ("abcd", "abc", "ab", "acd", "abcdabcab"):
        _encodes(t, answer, text, kit=kit)


@tokenizer.requires("of equal pairs that overlap the left one is merged")
def _(answer, t):
    kit = _small((b"a", b"a"), (b"aa", b"aa"), (b"aa", b"a"))
    for n in range(1, 9):
        _encodes(t, answer, "a" * n, kit=kit)
    _encodes(t, answer, "baaab aaa", kit=kit)


@tokenizer.requires(
    "a merge never reaches from word to word, and each word is treated alike",
    "The text is cut by the pattern first, and each word is merged by itself.",
)
def _(answer, t):
    kit = _small((b"b", b" "), (b"b", b"c"), (b"1", b"b"), (b" ", b"b"), (b"b", b"b"))
    _encodes(t, answer, "b b  b bc 1b bc\nb b1b", kit=kit)


@tokenizer.requires(
    "ids are those of `vocab`, in whatever order it numbers its tokens",
    "Models differ: some begin with the special tokens. Look the bytes up.",
)
def _(answer, t):
    _encodes(t, answer, "the tokenizer's there")
    _encodes(t, answer, "to be, or not to be: that is the question")


@tokenizer.requires(
    "a byte that the vocabulary lacks is left out before anything is merged",
    "Real vocabularies may lack a byte that their training text never held.",
)
def _(answer, t):
    vocab, merges, special = _small((b"!", b"!"), (b"a", b"b"))
    del vocab[4], vocab[255], vocab[0xA9]
    _encodes(t, answer, "ab!\4! a\4b \4", kit=(vocab, merges, special))
    _encodes(t, answer, "a café!", kit=(vocab, merges, special))  # é is C3 A9


@tokenizer.requires("scripts, emoji, code, numbers and white space encode exactly")
def _(answer, t):
    _encodes(t, answer, MIXED)
    _encodes(t, answer, MIXED[::-1])
    _encodes(t, answer, _invented_text(300, seed=9))
    _encodes(t, answer, "\r\n\r\n \u00a0 \u3000x\u2028y \0 e\u0301 \u200d ﷽ 𝔘𝔫𝔦")


@tokenizer.requires(
    "special tokens become one id each, wherever they stand, and never a part of a word",
    "Cut the text at them first. The rest of the text knows nothing of them.",
)
def _(answer, t):
    for text in (
        END,
        f"a{END}b",
        f"the {END} the{END}{END}",
        f" {END}\n{END} x",
        "<|end",
    ):
        _encodes(t, answer, text)
    kit = _small((b"b", b"c"), (b"a", b"b"), (b"ab", b"c"), special=[END])
    _encodes(t, answer, f"abc{END}abc", kit=kit)
    vocab, merges, _ = _small(special=[END, MORE, "<pad>"])
    _encodes(t, answer, f"<pad>{MORE}<pad>", kit=(vocab, merges, [END]))


@tokenizer.requires(
    "of two special tokens that fit the longer one counts, and none is a pattern",
    "In a pattern | means “or”, and of alternatives the first that fits is taken.",
)
def _(answer, t):
    _encodes(t, answer, f"x{MORE}y{END}z|end|<|more|>")
    special = ["a.b", "a.b|c", "(x)"]
    _encodes(t, answer, "a.b a.b|c axb xbc (x) x", kit=_small(special=special))


@tokenizer.requires("another pattern than GPT-2's is used where one is given")
def _(answer, t):
    _encodes(t, answer, "the tokens 1234 they're", pattern=r"\s+|\S")
    _encodes(t, answer, "there the there", pattern=r"[^e]+|e+")


@tokenizer.requires(
    "decode gives back the text that was encoded, to the last character",
    "Nothing may be changed on the way: no case, no accent, no space.",
)
def _(answer, t):
    special = f"{END} x{MORE}\n{END}"
    for text in ("", "the café", MIXED, " \n\t e\u0301 ﬁ Å\u212b  ", special):
        _decodes(t, answer, _oracle().encode(text), text)


@tokenizer.requires(
    "characters of several bytes come back whole, however many tokens they are",
    "A token may hold a part of a character. What must be joined before it is text?",
)
def _(answer, t):
    for text in ("水", "🙂🙃", "é" * 5 + "👩‍👩‍👧"):
        _decodes(t, answer, _oracle(False).encode(text), text, _kit(False))


@tokenizer.requires(
    "bytes that are no valid UTF-8 become U+FFFD, as Python's own decoder does it"
)
def _(answer, t):
    for data in (b"\xff", b"a\xe6\xb0b", b"\xe6\xb0\xb4\x80\xf0\x9f\x99"):
        text = data.decode("utf-8", "replace")
        _decodes(t, answer, list(data), text, _small())


@tokenizer.requires(
    "decode takes a tensor of ids as well as a list",
    "A loop over a tensor gives tensors. `int(i)` makes a number of one.",
)
def _(answer, t):
    ids = _oracle().encode("the café")
    _decodes(t, answer, torch.tensor(ids), "the café")


@tokenizer.requires(
    "an id that is not in the vocabulary is a ValueError that names it, and so is a "
    "special token that is not"
)
def _(answer, t):
    def decode(BPETokenizer, ids):
        return BPETokenizer(*_small()).decode(ids)

    def build(BPETokenizer, special_tokens):
        return BPETokenizer(*_small()[:2], special_tokens).encode("a")

    for ids, wrong in (([97, 256], 256), ([-1], -1), ([9, 70_000], 70_000)):
        t.raises(
            ValueError,
            decode,
            answer,
            ids,
            mentions=(wrong,),
            because=f"ids {ids} where the vocabulary ends at 255",
        )
    t.raises(
        ValueError,
        build,
        answer,
        [END],
        mentions=(END,),
        because=f"the special token {END}, which `vocab` does not hold",
    )


def _streams(t, answer, chunks, kit=None):
    vocab, merges, special = kit or _kit()

    def encode_iterable(BPETokenizer, chunks):
        tokenizer = BPETokenizer(dict(vocab), list(merges), list(special))
        return list(tokenizer.encode_iterable(iter(chunks)))

    ids = t.call(encode_iterable, answer, chunks)
    expected = _Tokenizer(vocab, merges, special).encode("".join(chunks))
    _same_ids(t, ids, expected, vocab, f"encode_iterable({short(chunks, 70)})")


def _cut(text, n):
    return [text[i : i + n] for i in range(0, len(text), n)]


@tokenizer.requires(
    "encode_iterable gives the ids of the whole text, wherever the chunks end",
    "A word may go on in the next chunk, and a lone ' may become an ending such as 're. "
    "Keep the end of the text until you know.",
)
def _(answer, t):
    _streams(t, answer, ["the tokens", " there"])
    _streams(t, answer, ["the tok", "ens the", "re"])
    _streams(t, answer, ["", "a", "", " the", ""])
    _streams(t, answer, [])
    for n in (1, 2, 3, 7):
        _streams(t, answer, _cut(MIXED, n))


@tokenizer.requires(
    "special tokens, contractions and white space that a chunk's end cuts stay whole",
    "How many characters must you hold back so that a special token cannot begin among "
    "those you give away? And 'l is two words until another l follows.",
)
def _(answer, t):
    kit = _small(
        (b"'", b"l"), (b"'l", b"l"), (b"\n", b"\t"), (b" ", b" "), special=[END, MORE]
    )
    text = f"they'll  x{END} y {MORE}{END}z \n\tb\n\n\n\t\tc   d'{END}'ll<|end<|end|"
    for n in (1, 2, 4, 5, 11):
        _streams(t, answer, _cut(text, n), kit)
    plain = _small((b"'", b"l"), (b"'l", b"l"))
    _streams(t, answer, ["they'l", "l"], plain)
    _streams(t, answer, _cut("x'll'l'llm 'r're", 1), plain)
    _streams(t, answer, ["a  <|e", "nd|>", " b"], kit)
    _streams(t, answer, [f"a {END}<|mo", "re|> b"], kit)
    start = _small(special=["<|im_start|>"])
    for n in (1, 2, 3):
        _streams(t, answer, _cut("<|im_start|>user\n<|im_start|>", n), start)


@tokenizer.requires(
    "encode_iterable hands out ids before the text has ended, and keeps little of it",
    "Files may be larger than memory. `yield` what is settled, then forget it.",
)
def _(answer, t):
    vocab, merges, special = _kit()

    def chunks_read_for_50_ids(BPETokenizer):
        read = []

        def chunks():
            for i in range(400):
                read.append(i)
                yield f" the{i % 10} "

        tokenizer = BPETokenizer(vocab, merges, special)
        found = list(islice(tokenizer.encode_iterable(chunks()), 50))
        return found, len(read) < 100

    found, early = t.call(chunks_read_for_50_ids, answer)
    text = "".join(f" the{i % 10} " for i in range(60))
    _same_ids(t, found, _oracle().encode(text)[:50], vocab, "The first 50 ids")
    t.true(
        early,
        "It read at least 100 chunks of a word each before it gave 50 ids: the text is "
        "gathered first and encoded at its end.",
    )


@tokenizer.requires(
    "encode_iterable forgets text once its ids are handed out",
    "After the settled part has been encoded, what do you still need of it?",
)
def _(answer, t):
    long = f"<|{'long' * 1000}|>"
    kit = _small(special=[long])

    def kilobytes_kept(BPETokenizer):
        tokenizer = BPETokenizer(*kit)
        list(tokenizer.encode_iterable([long, " a", long, " b"]))
        tracemalloc.start()
        try:
            n = sum(
                1 for _ in tokenizer.encode_iterable(long + " a" for _ in range(60))
            )
            return n, tracemalloc.get_traced_memory()[1] < 150_000
        finally:
            tracemalloc.stop()

    n, little = t.call(kilobytes_kept, answer)
    t.equal(n, 180, "the number of ids of 60 special tokens, spaces and letters")
    t.true(
        little,
        "Over 240 kilobytes of text in 60 chunks it came to hold more than 150 "
        "kilobytes: what is settled is not forgotten.",
    )


@tokenizer.requires("one tokenizer serves many calls, and two do not share anything")
def _(answer, t):
    vocab, merges, special = _kit()
    plain, other, _ = _kit(False)

    def several_calls(BPETokenizer):
        one = BPETokenizer(vocab, merges, special)
        two = BPETokenizer(plain, other, [])
        left = islice(one.encode_iterable(["the tokens", " there"]), 1)
        return [
            one.encode("the there"),
            two.encode(f"the there{END}"),
            len(list(left)),
            one.encode("the there"),
            list(one.encode_iterable(["the", " there"])),
            one.decode(one.encode("the there")),
        ]

    before = len(vocab), len(merges), len(special)
    found = t.call(several_calls, answer)
    ids = _oracle().encode("the there")
    plain_ids = _Tokenizer(plain, other, []).encode(f"the there{END}")
    t.equal(list(found), [ids, plain_ids, 1, ids, ids, "the there"], "several calls")
    t.true(
        before == (len(vocab), len(merges), len(special)),
        "It changed the vocabulary, the merges or the special tokens that it was given.",
    )


def _tokenizer_fault(name, sentence):
    return tokenizer.fault(name, sentence)


@_tokenizer_fault(
    "leftmost_pair",
    "The leftmost pair that is in `merges` is merged, not the one of lowest rank. Merges "
    "must be applied in the order in which they were learned.",
)
class _(_Tokenizer):
    def choose(self, parts):
        places = (i for i, pair in enumerate(pairwise(parts)) if pair in self.rank)
        return next(places, None)


@_tokenizer_fault(
    "highest_rank",
    "The pair of highest rank, learned last, is merged first.",
)
class _(_Tokenizer):
    def choose(self, parts):
        places = [i for i, pair in enumerate(pairwise(parts)) if pair in self.rank]
        return max(
            places, key=lambda i: self.rank[parts[i], parts[i + 1]], default=None
        )


@_tokenizer_fault(
    "leftmost_pair_everywhere",
    "The leftmost pair that is in `merges` is merged, in all its places, not the one of "
    "lowest rank. Merges must be applied in the order in which they were learned.",
)
class _(_Tokenizer):
    def merge(self, parts):
        while pair := next((p for p in pairwise(parts) if p in self.rank), None):
            parts = _merge(parts, pair, pair[0] + pair[1])
        return parts


@_tokenizer_fault(
    "joined_bytes",
    "Neighbours are merged wherever their bytes together are a token. Only pairs that "
    "stand in `merges` may be: the same token from another pair is another list of ids.",
)
class _(_Tokenizer):
    def choose(self, parts):
        joined = [self.ids.get(a + b) for a, b in pairwise(parts)]
        places = [i for i, number in enumerate(joined) if number is not None]
        return min(places, key=lambda i: joined[i], default=None)


@_tokenizer_fault(
    "rank_from_id",
    "The pair whose token has the lowest id is merged first. Ids may come in any order; "
    "the rank of a merge is its place in `merges`.",
)
class _(_Tokenizer):
    def choose(self, parts):
        pairs = list(pairwise(parts))
        places = [i for i, pair in enumerate(pairs) if pair in self.rank]
        return min(
            places, key=lambda i: self.ids[parts[i] + parts[i + 1]], default=None
        )


@_tokenizer_fault(
    "longest_token",
    "From the left, the longest token that fits is taken. That is another method "
    "(WordPiece's); here merges are applied in their order.",
)
class _(_Tokenizer):
    def merge(self, parts):
        word, found = b"".join(parts), []
        while word:
            n = next(n for n in range(len(word), 0, -1) if word[:n] in self.ids)
            found.append(word[:n])
            word = word[n:]
        return found


@_tokenizer_fault(
    "from_the_right",
    "Of equal pairs the rightmost is merged first. Go from left to right.",
)
class _(_Tokenizer):
    def choose(self, parts):
        places = [i for i, pair in enumerate(pairwise(parts)) if pair in self.rank]
        best = [(self.rank[parts[i], parts[i + 1]], -i) for i in places]
        return -min(best)[1] if best else None


@_tokenizer_fault(
    "merged_once",
    "One pair of each word is merged and no more. Look again until no pair is left.",
)
class _(_Tokenizer):
    def merge(self, parts):
        i = self.choose(parts)
        return (
            parts
            if i is None
            else [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]
        )


@_tokenizer_fault(
    "missing_byte_last",
    "A byte that the vocabulary lacks is left out after the merges, so it still keeps "
    "its neighbours apart. Leave it out before.",
)
class _(_Tokenizer):
    def start(self, word):
        return [bytes([byte]) for byte in word.encode()]

    def of_part(self, part, special):
        if special:
            return super().of_part(part, special)
        merged = self.merge(self.start(part))
        return [self.ids[token] for token in merged if token in self.ids]


@_tokenizer_fault(
    "character_left_out",
    "A character of which the vocabulary lacks one byte is left out whole. Only the "
    "missing byte is.",
)
class _(_Tokenizer):
    def start(self, word):
        whole = [
            sign
            for sign in word
            if all(bytes([byte]) in self.ids for byte in sign.encode())
        ]
        return super().start("".join(whole))


@_tokenizer_fault(
    "missing_byte_fails",
    "A byte that the vocabulary lacks gives an error. It is left out, as the package "
    "`tokenizers` does.",
)
class _(_Tokenizer):
    def start(self, word):
        for byte in word.encode():
            self.ids[bytes([byte])]
        return super().start(word)


@_tokenizer_fault("not_merged", "The bytes are never merged.")
class _(_Tokenizer):
    def choose(self, parts):
        return None


@_tokenizer_fault(
    "across_words",
    "The text is not cut by the pattern, so that merges reach over spaces.",
)
class _(_Tokenizer):
    def words(self, piece):
        return [piece]


@_tokenizer_fault(
    "whole_words_first",
    "A word that is a token is taken as it stands. Where the merges do not lead to that "
    "token, the model has never seen it there.",
)
class _(_Tokenizer):
    def merge(self, parts):
        word = b"".join(parts)
        return [word] if word in self.ids else super().merge(parts)


@_tokenizer_fault(
    "ids_assumed",
    "It takes for granted that byte b has id b and merge i has id 256 + i. Models number "
    "their tokens in other orders; look the bytes up in `vocab`.",
)
class _(_Tokenizer):
    def number(self, token):
        if len(token) == 1:
            return token[0]
        return 256 + next(i for (a, b), i in self.rank.items() if a + b == token)


@_tokenizer_fault(
    "pattern_ignored",
    "GPT-2's pattern is used whatever `pattern` says.",
)
class _(_Tokenizer):
    def words(self, piece):
        return regex.findall(GPT2, piece)


@_tokenizer_fault(
    "special_as_text",
    "Special tokens are encoded like any text, into several ids.",
)
class _(_Tokenizer):
    def fitting(self, text, i):
        return None


@_tokenizer_fault(
    "every_token_special",
    "A stretch of text that equals a token of `vocab` is taken whole. Only the special "
    "tokens that were given are; everything else is text, which is cut and merged.",
)
class _(_Tokenizer):
    def parts(self, text):
        if not self.special:
            return super().parts(text)
        longest_first = sorted(map(regex.escape, self.special), key=len, reverse=True)
        found = []
        for piece in regex.split(f"({'|'.join(longest_first)})", text):
            if piece.encode() in self.ids:
                found.append((piece, True))
            else:
                found += [(word, False) for word in self.words(piece)]
        return found


@_tokenizer_fault(
    "shorter_special",
    "Where two special tokens fit, the shorter one is taken.",
)
class _(_Tokenizer):
    def fitting(self, text, i):
        fits = [s for s in self.special if text.startswith(s, i)]
        return min(fits, key=len, default=None)


@_tokenizer_fault(
    "special_unescaped",
    "Special tokens stand in a pattern as they are, where | means “or”. `regex.escape` "
    "makes plain text of them.",
)
class _(_Tokenizer):
    def parts(self, text):
        if not self.special:
            return super().parts(text)
        found = []
        for piece in regex.split(f"({'|'.join(self.special)})", text):
            if piece in self.special:
                found.append((piece, True))
            else:
                found += [(word, False) for word in self.words(piece or "")]
        return found


@_tokenizer_fault(
    "space_around_special",
    "White space next to a special token is lost. Then decode cannot give the text back.",
)
class _(_Tokenizer):
    def words(self, piece):
        return regex.findall(self.pattern, piece.strip() if self.special else piece)


@_tokenizer_fault(
    "normalised",
    "The text is brought into Unicode's normal form first. Then other characters come "
    "back than went in.",
)
class _(_Tokenizer):
    def words(self, piece):
        return regex.findall(self.pattern, unicodedata.normalize("NFC", piece))


@_tokenizer_fault("lower_case", "Upper case is lost: the text is changed before it.")
class _(_Tokenizer):
    def words(self, piece):
        return regex.findall(self.pattern, piece.lower())


@_tokenizer_fault(
    "code_points",
    "It starts from the numbers of the characters instead of the bytes of UTF-8. They "
    "are the same only in ASCII.",
)
class _(_Tokenizer):
    def start(self, word):
        return [bytes([ord(sign)]) for sign in word]


@_tokenizer_fault(
    "token_by_token",
    "Each token is turned into text by itself. A token may end in the middle of a "
    "character: join the bytes of all, then decode once.",
)
class _(_Tokenizer):
    def decode(self, ids):
        self.known(ids)
        return "".join(self.vocab[i].decode("utf-8", errors="replace") for i in ids)


@_tokenizer_fault(
    "strict_utf8",
    "Bytes that are no valid UTF-8 raise an error. A model may produce them at any time.",
)
class _(_Tokenizer):
    def text(self, data):
        return data.decode("utf-8")


@_tokenizer_fault(
    "bytes_dropped",
    "Bytes that are no valid UTF-8 vanish. U+FFFD shows that something was there.",
)
class _(_Tokenizer):
    def text(self, data):
        return data.decode("utf-8", errors="ignore")


@_tokenizer_fault("latin_1", "The bytes are read as Latin-1; they are UTF-8.")
class _(_Tokenizer):
    def text(self, data):
        return data.decode("latin-1")


@_tokenizer_fault(
    "special_left_out",
    "decode leaves special tokens out. Here they stand in the text as they were.",
)
class _(_Tokenizer):
    def decode(self, ids):
        self.known(ids)
        special = {token.encode() for token in self.special}
        tokens = [self.vocab[i] for i in ids]
        return self.text(b"".join(each for each in tokens if each not in special))


@_tokenizer_fault(
    "unknown_ids_dropped",
    "An id that is not in the vocabulary is passed over in silence.",
)
class _(_Tokenizer):
    def decode(self, ids):
        return self.text(b"".join(self.vocab.get(i, b"") for i in ids))


@_tokenizer_fault(
    "key_error",
    "An id that is not in the vocabulary gives a bare KeyError. Say in words what is "
    "wrong, with a ValueError.",
)
class _(_Tokenizer):
    def known(self, ids):
        pass


@_tokenizer_fault(
    "special_unchecked",
    "A special token that is not in `vocab` is noticed only when it occurs in a text, or "
    "never. Check it when the tokenizer is made.",
)
class _(_Tokenizer):
    def check_special(self):
        pass


@_tokenizer_fault(
    "tensor_ids",
    "The numbers in a tensor are tensors too, and none of these is a key of a dict of "
    "numbers. Make a number of each first.",
)
class _(_Tokenizer):
    def numbers(self, ids):
        return ids


@_tokenizer_fault(
    "chunk_by_chunk",
    "Each chunk is encoded by itself, so that a word is cut wherever a chunk ends.",
)
class _(_Tokenizer):
    def encode_iterable(self, chunks):
        for chunk in chunks:
            yield from self.encode(chunk)


@_tokenizer_fault(
    "last_word_kept",
    "Only the last word is held back at a chunk's end. ' and l are two words until "
    "another l makes them one.",
)
class _(_Tokenizer):
    keep_back = 1


@_tokenizer_fault(
    "special_cut",
    "A special token that a chunk's end cuts is not recognised: its beginning has been "
    "given away as text.",
)
class _(_Tokenizer):
    def uncertain(self):
        return 0


@_tokenizer_fault(
    "end_forgotten",
    "What was held back is lost when the chunks end.",
)
class _(_Tokenizer):
    def rest(self, text):
        return []


@_tokenizer_fault(
    "line_by_line",
    "The text is cut after each line end. White space goes on across it: a line end and "
    "the white space behind it can be one word.",
)
class _(_Tokenizer):
    def encode_iterable(self, chunks):
        text = ""
        for chunk in chunks:
            whole, end, text = (text + chunk).rpartition("\n")
            yield from self.encode(whole + end)
        yield from self.encode(text)


class _Searching(_Tokenizer):
    """Looks for a whole special token, and gives away words in front of the limit."""

    def encode_iterable(self, chunks):
        text, longest = "", max(map(len, self.special), default=1)
        for chunk in chunks:
            text += chunk
            while (found := self.first(text)) and found[1] + longest <= len(text):
                yield from self.encode(text[: found[1]])
                text = text[found[1] :]
            settled = self.settled(text, found[0] if found else len(text) - longest + 1)
            for word in settled:
                yield from self.of_part(word, False)
            text = text[sum(map(len, settled)) :]
        yield from self.encode(text)

    def first(self, text):
        """Where the first special token begins and ends, or None."""
        places = (i for i in range(len(text)) if self.fitting(text, i))
        i = next(places, None)
        return None if i is None else (i, i + len(self.fitting(text, i)))


@_tokenizer_fault(
    "negative_end",
    "While there is less text than the longest special token has, the end of what is "
    "settled is a negative number, and a slice counts that from the other end.",
)
class _(_Searching):
    def settled(self, text, limit):
        return self.words(text[:limit])[:-2]


@_tokenizer_fault(
    "words_reach_special",
    "Words are cut while the beginning of a special token still stands behind them. "
    "White space in front of it then loses its last space, as if a word followed: cut "
    "only the text in front of where a special token may begin.",
)
class _(_Searching):
    def settled(self, text, limit):
        words = self.words(text)[:-2]
        ends = accumulate(map(len, words))
        return [word for word, end in zip(words, ends, strict=True) if end <= limit]


@_tokenizer_fault(
    "cut_text_again",
    "The settled part of the text is cut into words a second time, without what follows "
    "it. White space at its end then falls together: encode the words you have.",
)
class _(_Tokenizer):
    def encode_iterable(self, chunks):
        text = ""
        for chunk in chunks:
            text += chunk
            parts = self.parts(text)
            ends = [0, *accumulate(len(part) for part, _ in parts)]
            certain = len(text) - self.uncertain()
            n = max(sum(end <= certain for end in ends[1:]) - 2, 0)
            yield from self.encode(text[: ends[n]])
            text = text[ends[n] :]
        yield from self.encode(text)


@_tokenizer_fault(
    "gathered_first",
    "All chunks are joined before anything is encoded. A file that is larger than memory "
    "cannot be.",
)
class _(_Tokenizer):
    def encode_iterable(self, chunks):
        yield from self.encode("".join(chunks))


@_tokenizer_fault(
    "nothing_forgotten",
    "Ids are handed out early, but the text behind them is kept until the end, so memory "
    "grows with the file.",
)
class _(_Tokenizer):
    def encode_iterable(self, chunks):
        text, given = "", 0
        for chunk in chunks:
            text += chunk
            parts = self.parts(text)
            ends = accumulate(len(part) for part, _ in parts)
            certain = len(text) - self.uncertain()
            n = max(sum(end <= certain for end in ends) - 2, given)
            for part in parts[given:n]:
                yield from self.of_part(*part)
            given = n
        for part in self.parts(text)[given:]:
            yield from self.of_part(*part)
