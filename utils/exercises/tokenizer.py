"""Lesson 07: counting pairs, merging them, learning merges, and using them."""

import tracemalloc
from collections import Counter
from functools import cache
from itertools import accumulate, islice, pairwise

import regex
import torch

from utils.check.errors import Unmet
from utils.check.wording import short
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


def _counts_agree(case, answer, words):
    given = dict(words)
    counts = case.call_in_place(answer, given)
    case.true(given == words, "It changed `words`: count without taking anything out.")
    case.true(
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
def _(answer, case):
    _counts_agree(case, answer, {(1, 2, 3): 1})
    _counts_agree(case, answer, {(5, 4, 9, 5, 8, 4, 5): 1})


@pair_counts.requires(
    "a word that occurs n times counts n times",
    "The dict says how often each word stands in the text. Its pairs stand there as "
    "often.",
)
def _(answer, case):
    _counts_agree(case, answer, {(1, 2, 3): 4})
    _counts_agree(case, answer, {(1, 2, 3): 4, (2, 3): 10, (3, 2, 1): 7})


@pair_counts.requires("a pair that occurs twice in one word counts twice, overlaps too")
def _(answer, case):
    _counts_agree(case, answer, {(1, 2, 5, 1, 2): 3})
    _counts_agree(case, answer, {(7, 7, 7): 1, (7, 7, 7, 7, 8): 5})


@pair_counts.requires(
    "words of one id or none have no pair, and no words give no pairs"
)
def _(answer, case):
    _counts_agree(case, answer, {(4,): 9, (): 2, (300, 70_000): 2, (6,): 1})
    _counts_agree(case, answer, {})


@pair_counts.requires("many words work as few do")
def _(answer, case):
    ids = (hashed(3000, seed=5) % 40).tolist()
    words = {tuple(ids[i : i + 1 + ids[i] % 7]): 1 + i % 13 for i in range(600)}
    _counts_agree(case, answer, words)


# merge_pair ------------------------------------------------------------------------


def _merge(ids, pair, new_id):
    out = []
    for i in ids:
        out.append((i, False))
        if len(out) > 1 and not out[-2][1] and (out[-2][0], i) == tuple(pair):
            out[-2:] = [(new_id, True)]
    return [i for i, _ in out]


def _merge_agrees(case, answer, ids, pair, new_id):
    given = ids[:]
    merged = case.call_in_place(answer, given, pair, new_id)
    case.true(given == ids, "It changed `ids` in place: build a new list.")
    case.true(
        merged is not given, "It returns the list it was given: return a new one."
    )
    case.true(
        isinstance(merged, list),
        f"The result is of type {type(merged).__name__}, expected a list.",
    )
    case.equal(merged, _merge(ids, pair, new_id), f"{short(ids)} with {pair} merged")


@merge_pair.requires("the two ids are replaced by the new one, the rest stays")
def _(answer, case):
    _merge_agrees(case, answer, [5, 1, 2, 6], (1, 2), 9)
    _merge_agrees(case, answer, [3, 4, 6, 7, 8], (3, 4), 300)
    _merge_agrees(case, answer, [6, 7, 8, 3, 4], (3, 4), 256)


@merge_pair.requires("every occurrence is replaced")
def _(answer, case):
    _merge_agrees(case, answer, [1, 2, 3, 1, 2, 1, 2, 5], (1, 2), 9)


@merge_pair.requires(
    "the order of the pair counts, and half a pair is none",
    "Look at both ids before you replace anything.",
)
def _(answer, case):
    _merge_agrees(case, answer, [2, 1, 3, 1, 3, 2, 1], (1, 2), 9)
    _merge_agrees(case, answer, [4, 4, 2, 2, 1], (1, 2), 9)
    _merge_agrees(case, answer, [11, 2, 1, 22, 1, 2], (1, 2), 9)


@merge_pair.requires(
    "occurrences do not overlap, and the left one is taken",
    "After a merge, go on behind both of its ids.",
)
def _(answer, case):
    for n in (2, 3, 4, 5):
        _merge_agrees(case, answer, [7] * n, (7, 7), 8)
    _merge_agrees(case, answer, [1, 7, 7, 7, 1, 7, 7, 7, 7, 2], (7, 7), 8)


@merge_pair.requires("nothing to merge, one id or none: a list with the same ids")
def _(answer, case):
    for ids in ([], [1], [3, 5, 4], [2, 1]):
        _merge_agrees(case, answer, ids, (1, 2), 9)


@merge_pair.requires(
    "what a merge gives is not merged again in the same call",
    "The new id may be equal to one of the pair. Compare ids that were handed in.",
)
def _(answer, case):
    _merge_agrees(case, answer, [1, 2, 2, 2], (1, 2), 1)
    _merge_agrees(case, answer, [1, 1, 2, 5], (1, 2), 2)
    _merge_agrees(case, answer, [9, 1, 2, 9], (1, 2), 9)


@merge_pair.requires("a tuple of ids works too, and so does a long list")
def _(answer, case):
    _merge_agrees(case, answer, (5, 1, 2, 6, 1, 2), (1, 2), 9)
    _merge_agrees(case, answer, (hashed(2000, seed=3) % 3).tolist(), (2, 1), 3)


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


def _learns(case, answer, text, vocab_size, *special):
    given = [list(each) for each in special]
    result = case.call_in_place(answer, text, vocab_size, *given)
    case.true(
        given == [list(each) for each in special],
        "It changed `special_tokens`: leave the caller's list as it is.",
    )
    case.is_tuple(result, 2)
    vocab, merges = result
    expected_vocab, expected = _learn(text, vocab_size, *special)
    case.true(
        isinstance(vocab, dict),
        f"`vocab` is of type {type(vocab).__name__}, expected a dict from id to bytes.",
    )
    case.true(
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
def _(answer, case):
    _learns(case, answer, "low lower", 256)
    _learns(case, answer, "", 256, [])


@train_bpe.requires(
    "the most frequent pair is merged first, and takes the next id",
    "Print the counts of the first round and compare by hand.",
)
def _(answer, case):
    _learns(case, answer, "abcbcbc", 257)
    _learns(case, answer, "zzxyxyxy", 257, [])


@train_bpe.requires(
    "of several most frequent pairs the greater one is merged",
    "`max` takes a key. What must it compare after the count?",
)
def _(answer, case):
    for text in ("abcd", "dcba", "xyaxyaby", "zbazbabz"):
        _learns(case, answer, text, 257)


@train_bpe.requires(
    "later merges count what the earlier ones left, and may build on them",
    "After each merge the words hold fewer ids, and other pairs. Which counts changed?",
)
def _(answer, case):
    _learns(case, answer, "abcabcabcabxbc", 259)
    _learns(case, answer, "a" * 8 + "b", 259)


@train_bpe.requires(
    "where no pair is left it stops, with a smaller vocabulary",
    "A text of two different letters has one pair. What does your search for the most "
    "frequent pair give when none is left, and when a count has become 0?",
)
def _(answer, case):
    _learns(case, answer, "ab", 300)
    _learns(case, answer, "abcab", 300)
    _learns(case, answer, "", 300)


@train_bpe.requires(
    "the text is cut by GPT-2's pattern, and no merge reaches from word to word",
    "A space belongs to the word behind it. Digits, letters and other signs are words "
    "apart.",
)
def _(answer, case):
    _learns(case, answer, "ab ab ab ab", 260)
    _learns(case, answer, "it's 12ab it's 12ab, it's 12ab,\n\n  it's", 280)
    _learns(case, answer, "x==1;x==1;\tx==1;   x  ==1\n\n\n\nx", 270)


@train_bpe.requires(
    "a pair counts as often as its word occurs in the text",
    "Equal words are worth one entry and a count.",
)
def _(answer, case):
    _learns(case, answer, "xyz xyz xyz xyz abq abr abs", 262)


@train_bpe.requires(
    "on equal counts pairs are compared by their bytes, the left part first",
    "Tuples of bytes compare as they should: first part, then second. Ids do not, once "
    "they stand for merges.",
)
def _(answer, case):
    _learns(case, answer, "ab cd", 260)
    _learns(case, answer, "cd ab", 260)
    _learns(case, answer, "abc\nabc\nzq\nzq", 260)
    # (b"a", b"bz") and (b"ab", b"c") are equally frequent and equally long in sum.
    _learns(case, answer, "bz bz bz bz abz abz abc abc ab ab", 264)
    _learns(case, answer, "azb azb aab aab zab zab b b zb ab", 270)


@train_bpe.requires(
    "characters outside ASCII are bytes of UTF-8, and a merge may hold a part of one"
)
def _(answer, case):
    _learns(case, answer, "é è ê é ü é 水 氷 永 水 水 🙂🙃🙂", 275)
    _learns(case, answer, "cafés cafés größer größer вода вода ٣٤ ٣٤ ٣٤", 300)


@train_bpe.requires(
    "special tokens cut the text, come last in `vocab`, and count in `vocab_size`",
    "Cut the text at them before anything is counted. The two sides stay apart.",
)
def _(answer, case):
    _learns(case, answer, f"ab{END}cb ab{END}cb ab{END}cb", 261, [END])
    _learns(case, answer, f"{END}the end{END}{END} the end|> <|end", 268, [END])
    _learns(case, answer, f"ab{END}cb ab{END}cb ab{END}cb", 258, [END])
    _learns(case, answer, "ab a b", 300, [END])
    _learns(case, answer, "", 300, [END, MORE])


@train_bpe.requires(
    "special tokens are plain text, and of two that fit the longer one counts",
    "Signs such as | mean something in a pattern: `regex.escape`. Of alternatives a "
    "pattern takes the first that fits, not the longest.",
)
def _(answer, case):
    _learns(case, answer, f"more{MORE}more{END}x|x|x.x<more|>", 266, [END, MORE])
    _learns(case, answer, "aXb.aXb.aXb a.b a.b a.b (1) (1)", 266, ["a.b", "(1)"])


@train_bpe.requires(
    "a vocab_size below 256 plus the special tokens is a ValueError that names numbers"
)
def _(answer, case):
    for size, special in ((255, []), (0, []), (257, [END, MORE])):
        needed = 256 + len(special)
        case.raises(
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
def _(answer, case):
    _learns(case, answer, _invented_text(300), 310)
    text = _invented_text(60, seed=1) + END + _invented_text(60, seed=2)
    result = case.call_in_place(answer, text=text, vocab_size=280, special_tokens=[END])
    case.is_tuple(result, 2)
    _same_merges(result[1], _learn(text, 280, [END])[1])


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


def _encodes(case, answer, text, expected=None, kit=None, **options):
    vocab, merges, special = kit or _kit()

    def encode(BPETokenizer, text):
        tokenizer = BPETokenizer(dict(vocab), list(merges), list(special), **options)
        return tokenizer.encode(text)

    ids = case.call(encode, answer, text)
    if expected is None:
        expected = _Tokenizer(vocab, merges, special, **options).encode(text)
    _same_ids(case, ids, expected, vocab, f"The ids of {short(text, 60)}")


def _same_ids(case, ids, expected, vocab, what):
    case.true(
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


def _decodes(case, answer, ids, expected, kit=None):
    vocab, merges, special = kit or _kit()

    def decode(BPETokenizer, ids):
        return BPETokenizer(dict(vocab), list(merges), list(special)).decode(ids)

    case.equal(
        case.call(decode, answer, ids), expected, f"the text of {short(ids, 60)}"
    )


def _small(*merges, special=()):
    """256 bytes, some merges and special tokens in the plain order of ids."""
    tokens = [bytes([i]) for i in range(256)]
    tokens += [left + right for left, right in merges]
    return dict(enumerate([*tokens, *(s.encode() for s in special)])), merges, special


@tokenizer.requires("without merges each byte is an id, in the vocabulary's numbers")
def _(answer, case):
    _encodes(case, answer, "low", kit=_small())
    _encodes(case, answer, "", kit=_small())
    shifted = {(i + 77) % 256: bytes([i]) for i in range(256)}
    _encodes(case, answer, "lower", kit=(shifted, [], []))


@tokenizer.requires(
    "the pair of lowest rank is merged first, wherever it stands in the word",
    "Of all pairs in the word that are in `merges`, which stands earliest *in the "
    "list*? Merge it, and look again.",
)
def _(answer, case):
    _encodes(case, answer, "abc", kit=_small((b"b", b"c"), (b"a", b"b")))
    kit = _small((b"b", b"c"), (b"a", b"b"), (b"ab", b"c"))
    _encodes(case, answer, "abc abd abcc", kit=kit)
    kit = _small((b"c", b"d"), (b"b", b"cd"), (b"a", b"b"), (b"a", b"bcd"))
    for text in ("abcd", "abc", "ab", "acd", "abcdabcab"):
        _encodes(case, answer, text, kit=kit)


@tokenizer.requires("of equal pairs that overlap the left one is merged")
def _(answer, case):
    kit = _small((b"a", b"a"), (b"aa", b"aa"), (b"aa", b"a"))
    for n in range(1, 9):
        _encodes(case, answer, "a" * n, kit=kit)
    _encodes(case, answer, "baaab aaa", kit=kit)


@tokenizer.requires(
    "a merge never reaches from word to word, and each word is treated alike",
    "The text is cut by the pattern first, and each word is merged by itself.",
)
def _(answer, case):
    kit = _small((b"b", b" "), (b"b", b"c"), (b"1", b"b"), (b" ", b"b"), (b"b", b"b"))
    _encodes(case, answer, "b b  b bc 1b bc\nb b1b", kit=kit)


@tokenizer.requires(
    "ids are those of `vocab`, in whatever order it numbers its tokens",
    "Models differ: some begin with the special tokens. Look the bytes up.",
)
def _(answer, case):
    _encodes(case, answer, "the tokenizer's there")
    _encodes(case, answer, "to be, or not to be: that is the question")


@tokenizer.requires(
    "a byte that the vocabulary lacks is left out before anything is merged",
    "Real vocabularies may lack a byte that their training text never held.",
)
def _(answer, case):
    vocab, merges, special = _small((b"!", b"!"), (b"a", b"b"))
    del vocab[4], vocab[255], vocab[0xA9]
    _encodes(case, answer, "ab!\4! a\4b \4", kit=(vocab, merges, special))
    _encodes(case, answer, "a café!", kit=(vocab, merges, special))  # é is C3 A9


@tokenizer.requires("scripts, emoji, code, numbers and white space encode exactly")
def _(answer, case):
    _encodes(case, answer, MIXED)
    _encodes(case, answer, MIXED[::-1])
    _encodes(case, answer, _invented_text(300, seed=9))
    _encodes(case, answer, "\r\n\r\n \u00a0 \u3000x\u2028y \0 e\u0301 \u200d ﷽ 𝔘𝔫𝔦")


@tokenizer.requires(
    "special tokens become one id each, wherever they stand, and never a part of a word",
    "Cut the text at them first. The rest of the text knows nothing of them.",
)
def _(answer, case):
    for text in (
        END,
        f"a{END}b",
        f"the {END} the{END}{END}",
        f" {END}\n{END} x",
        "<|end",
    ):
        _encodes(case, answer, text)
    kit = _small((b"b", b"c"), (b"a", b"b"), (b"ab", b"c"), special=[END])
    _encodes(case, answer, f"abc{END}abc", kit=kit)
    vocab, merges, _ = _small(special=[END, MORE, "<pad>"])
    _encodes(case, answer, f"<pad>{MORE}<pad>", kit=(vocab, merges, [END]))


@tokenizer.requires(
    "of two special tokens that fit the longer one counts, and none is a pattern",
    "In a pattern | means “or”, and of alternatives the first that fits is taken.",
)
def _(answer, case):
    _encodes(case, answer, f"x{MORE}y{END}z|end|<|more|>")
    special = ["a.b", "a.b|c", "(x)"]
    _encodes(case, answer, "a.b a.b|c axb xbc (x) x", kit=_small(special=special))


@tokenizer.requires("another pattern than GPT-2's is used where one is given")
def _(answer, case):
    _encodes(case, answer, "the tokens 1234 they're", pattern=r"\s+|\S")
    _encodes(case, answer, "there the there", pattern=r"[^e]+|e+")


@tokenizer.requires(
    "decode gives back the text that was encoded, to the last character",
    "Nothing may be changed on the way: no case, no accent, no space.",
)
def _(answer, case):
    special = f"{END} x{MORE}\n{END}"
    for text in ("", "the café", MIXED, " \n\t e\u0301 ﬁ Å\u212b  ", special):
        _decodes(case, answer, _oracle().encode(text), text)


@tokenizer.requires(
    "characters of several bytes come back whole, however many tokens they are",
    "A token may hold a part of a character. What must be joined before it is text?",
)
def _(answer, case):
    for text in ("水", "🙂🙃", "é" * 5 + "👩‍👩‍👧"):
        _decodes(case, answer, _oracle(False).encode(text), text, _kit(False))


@tokenizer.requires(
    "bytes that are no valid UTF-8 become U+FFFD, as Python's own decoder does it"
)
def _(answer, case):
    for data in (b"\xff", b"a\xe6\xb0b", b"\xe6\xb0\xb4\x80\xf0\x9f\x99"):
        text = data.decode("utf-8", "replace")
        _decodes(case, answer, list(data), text, _small())


@tokenizer.requires(
    "decode takes a tensor of ids as well as a list",
    "A loop over a tensor gives tensors. `int(i)` makes a number of one.",
)
def _(answer, case):
    ids = _oracle().encode("the café")
    _decodes(case, answer, torch.tensor(ids), "the café")


@tokenizer.requires(
    "an id that is not in the vocabulary is a ValueError that names it, and so is a "
    "special token that is not"
)
def _(answer, case):
    def decode(BPETokenizer, ids):
        return BPETokenizer(*_small()).decode(ids)

    def build(BPETokenizer, special_tokens):
        return BPETokenizer(*_small()[:2], special_tokens).encode("a")

    for ids, wrong in (([97, 256], 256), ([-1], -1), ([9, 70_000], 70_000)):
        case.raises(
            ValueError,
            decode,
            answer,
            ids,
            mentions=(wrong,),
            because=f"ids {ids} where the vocabulary ends at 255",
        )
    case.raises(
        ValueError,
        build,
        answer,
        [END],
        mentions=(END,),
        because=f"the special token {END}, which `vocab` does not hold",
    )


def _streams(case, answer, chunks, kit=None):
    vocab, merges, special = kit or _kit()

    def encode_iterable(BPETokenizer, chunks):
        tokenizer = BPETokenizer(dict(vocab), list(merges), list(special))
        return list(tokenizer.encode_iterable(iter(chunks)))

    ids = case.call(encode_iterable, answer, chunks)
    expected = _Tokenizer(vocab, merges, special).encode("".join(chunks))
    _same_ids(case, ids, expected, vocab, f"encode_iterable({short(chunks, 70)})")


def _cut(text, n):
    return [text[i : i + n] for i in range(0, len(text), n)]


@tokenizer.requires(
    "encode_iterable gives the ids of the whole text, wherever the chunks end",
    "A word may go on in the next chunk, and a lone ' may become an ending such as 're. "
    "Keep the end of the text until you know.",
)
def _(answer, case):
    _streams(case, answer, ["the tokens", " there"])
    _streams(case, answer, ["the tok", "ens the", "re"])
    _streams(case, answer, ["", "a", "", " the", ""])
    _streams(case, answer, [])
    for n in (1, 2, 3, 7):
        _streams(case, answer, _cut(MIXED, n))


@tokenizer.requires(
    "special tokens, contractions and white space that a chunk's end cuts stay whole",
    "How many characters must you hold back so that a special token cannot begin among "
    "those you give away? And 'l is two words until another l follows.",
)
def _(answer, case):
    kit = _small(
        (b"'", b"l"), (b"'l", b"l"), (b"\n", b"\t"), (b" ", b" "), special=[END, MORE]
    )
    text = f"they'll  x{END} y {MORE}{END}z \n\tb\n\n\n\t\tc   d'{END}'ll<|end<|end|"
    for n in (1, 2, 4, 5, 11):
        _streams(case, answer, _cut(text, n), kit)
    plain = _small((b"'", b"l"), (b"'l", b"l"))
    _streams(case, answer, ["they'l", "l"], plain)
    _streams(case, answer, _cut("x'll'l'llm 'r're", 1), plain)
    _streams(case, answer, ["a  <|e", "nd|>", " b"], kit)
    _streams(case, answer, [f"a {END}<|mo", "re|> b"], kit)
    start = _small(special=["<|im_start|>"])
    for n in (1, 2, 3):
        _streams(case, answer, _cut("<|im_start|>user\n<|im_start|>", n), start)


@tokenizer.requires(
    "encode_iterable hands out ids before the text has ended, and keeps little of it",
    "Files may be larger than memory. `yield` what is settled, then forget it.",
)
def _(answer, case):
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

    found, early = case.call(chunks_read_for_50_ids, answer)
    text = "".join(f" the{i % 10} " for i in range(60))
    _same_ids(case, found, _oracle().encode(text)[:50], vocab, "The first 50 ids")
    case.true(
        early,
        "It read at least 100 chunks of a word each before it gave 50 ids: the text is "
        "gathered first and encoded at its end.",
    )


@tokenizer.requires(
    "encode_iterable forgets text once its ids are handed out",
    "After the settled part has been encoded, what do you still need of it?",
)
def _(answer, case):
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

    n, little = case.call(kilobytes_kept, answer)
    case.equal(n, 180, "the number of ids of 60 special tokens, spaces and letters")
    case.true(
        little,
        "Over 240 kilobytes of text in 60 chunks it came to hold more than 150 "
        "kilobytes: what is settled is not forgotten.",
    )


@tokenizer.requires("one tokenizer serves many calls, and two do not share anything")
def _(answer, case):
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
    found = case.call(several_calls, answer)
    ids = _oracle().encode("the there")
    plain_ids = _Tokenizer(plain, other, []).encode(f"the there{END}")
    case.equal(list(found), [ids, plain_ids, 1, ids, ids, "the there"], "several calls")
    case.true(
        before == (len(vocab), len(merges), len(special)),
        "It changed the vocabulary, the merges or the special tokens that it was given.",
    )
