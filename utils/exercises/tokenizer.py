"""Lesson 07: counting pairs, merging them, learning merges, and using them."""

import tracemalloc
from collections import Counter
from functools import cache
from itertools import islice, pairwise

import regex
import torch

from utils.check.errors import Explained, Unmet
from utils.check.exercise import Exercise
from utils.check.inputs import fresh
from utils.check.wording import counted, short
from utils.probe import hashed

pair_counts = Exercise("pair_counts", lesson="tokenizer")
merge_pair = Exercise("merge_pair", lesson="tokenizer")
train_bpe = Exercise("train_bpe", lesson="tokenizer")
BPETokenizer = Exercise("BPETokenizer", lesson="tokenizer")

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
END, MORE = "<|end|>", "<|end|><|more|>"
BYTES = [bytes([i]) for i in range(256)]


# What is right, computed slowly -------------------------------------------------------


def slow_counts(words):
    pairs = {pair for ids in words for pair in pairwise(ids)}
    return {
        pair: sum(n * list(pairwise(ids)).count(pair) for ids, n in words.items())
        for pair in pairs
    }


def slow_merge(ids, pair, new_id):
    """Pushes one id after the other; a pair of ids that were handed in is replaced."""
    out = []
    for i in ids:
        out.append((i, False))
        if len(out) > 1 and not out[-2][1] and (out[-2][0], i) == tuple(pair):
            out[-2:] = [(new_id, True)]
    return [i for i, _ in out]


def slow_split(text, special_tokens):
    """Text and special tokens in turn; of two that fit, the longer one cuts."""
    parts, start, i = [], 0, 0
    while i < len(text):
        fitting = [s for s in special_tokens if text.startswith(s, i)]
        if fitting:
            token = max(fitting, key=len)
            parts += [text[start:i], token]
            start = i = i + len(token)
        else:
            i += 1
    return [*parts, text[start:]]


def slow_train(text, vocab_size, special_tokens, history):
    """Recounts everything at each merge, on bytes; `history` gets all the counts."""
    pieces = slow_split(text, special_tokens)[::2]
    words = Counter(word for piece in pieces for word in regex.findall(GPT2, piece))
    held = [([bytes([b]) for b in word.encode()], n) for word, n in words.items()]
    merges = []
    while len(merges) < vocab_size - 256 - len(special_tokens):
        counts = Counter()
        for tokens, times in held:
            for pair in pairwise(tokens):
                counts[pair] += times
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        history.append(counts)
        held = [(slow_merge(tokens, best, best[0] + best[1]), n) for tokens, n in held]
    joined = [left + right for left, right in merges]
    special = [token.encode() for token in special_tokens]
    return dict(enumerate([*BYTES, *joined, *special])), merges


def slow_encode(text, vocab, merges, special_tokens, pattern=GPT2):
    ids = {token: i for i, token in vocab.items()}
    rank = {tuple(pair): n for n, pair in enumerate(merges)}
    found = []
    for n, piece in enumerate(slow_split(text, special_tokens)):
        if n % 2:
            found.append(ids[piece.encode()])
            continue
        for word in regex.findall(pattern, piece):
            tokens = [bytes([b]) for b in word.encode() if bytes([b]) in ids]
            while pairs := [pair for pair in pairwise(tokens) if pair in rank]:
                best = min(pairs, key=rank.get)
                tokens = slow_merge(tokens, best, best[0] + best[1])
            found += [ids[token] for token in tokens]
    return found


# Texts and vocabularies ---------------------------------------------------------------

SYLLABLES = "re|in|the|tor|a|con|st|ing|er|é|ba|no|li|ü|水|do|'s|42"
MIXED = (
    "The tokenizer's there, they're here: it's 1234 or 12.5! naïve café, größer; "
    "привет, мир! 你好世界 水水 👋🏽🙂 def f_x(x):\n    return x**2  # ok\n\n\t\tend "
)


def invented_text(n_words, seed=0):
    """Words of some syllables, short ones often, with punctuation and lines."""
    numbers = hashed(4 * n_words, seed).tolist()
    syllables, out = SYLLABLES.split("|"), []
    for a, b, c, d in zip(*[iter(numbers)] * 4, strict=True):
        chosen = [a % 18, (a // 18) % 6, b % 3][: 1 + c % 3]
        ends = (" ", " ", " ", ", ", ".\n", "  ")[d % 6]
        out.append("".join(syllables[i] for i in chosen) + ends)
    return "".join(out)


def small(*merges, special=()):
    """256 bytes, some merges and special tokens in the plain order of ids."""
    joined = [left + right for left, right in merges]
    tokens = [*BYTES, *joined, *(s.encode() for s in special)]
    return dict(enumerate(tokens)), list(merges), list(special)


@cache
def learned():
    """A vocabulary with merges and special tokens, and ids in another order."""
    vocab, merges = slow_train(invented_text(500) + MIXED * 3, 560, [END, MORE], [])
    moved = {(i * 11 + 5) % len(vocab): token for i, token in vocab.items()}
    return moved, merges, [END, MORE]


def in_chunks(text, n):
    return [text[i : i + n] for i in range(0, len(text), n)]


def require_type(value, kind, what):
    if not isinstance(value, kind):
        yours, wanted = type(value).__name__, kind.__name__
        raise Explained(f"{what} is of type {yours}, expected a {wanted}.")


def first_difference(case, actual, expected, what):
    """Where two lists differ first, or None; how they differ in length is told here."""
    require_type(actual, list, f"the list of {what}s")
    for i, (yours, right) in enumerate(zip(actual, expected, strict=False)):
        if yours != right:
            return i
    case.equal(len(actual), len(expected), f"the number of {what}s")
    return None


# Counting pairs -----------------------------------------------------------------------


def counts_agree(case, answer, words):
    counts, expected = case.call(answer, words), slow_counts(words)
    require_type(counts, dict, "the result")
    for pair in [*expected, *counts]:
        if counts.get(pair) != expected.get(pair):
            raise Unmet(
                f"In {short(words, 80)} the pair {short(pair)} occurs "
                f"{counted(expected.get(pair, 0), 'time')}, and yours says "
                f"{counts.get(pair, 'nothing')}.",
                (counts.get(pair, 0), expected.get(pair, 0)),
            )


@pair_counts.requires(
    "each two neighbours in a word are a pair, in their order; one id is none"
)
def _(answer, case):
    counts_agree(case, answer, {(1, 2, 3): 1})
    counts_agree(case, answer, {(5, 4, 9, 5, 8, 4, 5): 1})
    counts_agree(case, answer, {(4,): 9, (): 2, (300, 70_000): 1, (6,): 1})
    counts_agree(case, answer, {})


@pair_counts.requires(
    "a word that occurs n times counts n times",
    "The dict says how often each word stands in the text. Its pairs stand there as "
    "often.",
)
def _(answer, case):
    counts_agree(case, answer, {(1, 2, 3): 4})
    counts_agree(case, answer, {(1, 2, 3): 4, (2, 3): 10, (3, 2, 1): 7})


@pair_counts.requires("a pair that occurs twice in one word counts twice, overlaps too")
def _(answer, case):
    counts_agree(case, answer, {(1, 2, 5, 1, 2): 3})
    counts_agree(case, answer, {(7, 7, 7): 1, (7, 7, 7, 7, 8): 5})


# Merging a pair -----------------------------------------------------------------------


def merge_agrees(case, answer, ids, pair, new_id):
    merged = case.call(answer, ids, pair, new_id)
    expected = slow_merge(ids, pair, new_id)
    case.equal(merged, expected, f"{short(ids)} with {pair} merged")


@merge_pair.requires(
    "wherever the two ids stand they are replaced by the new one, in a new list"
)
def _(answer, case):
    merge_agrees(case, answer, [5, 1, 2, 6], (1, 2), 9)
    merge_agrees(case, answer, [6, 7, 8, 3, 4], (3, 4), 256)
    for ids in ([], [1], [3, 5, 4], [2, 1]):
        merge_agrees(case, answer, ids, (1, 2), 9)
    same = case.call_in_place(answer, ids, (1, 2), 9) is ids
    case.true(not same, "It returns the list it was given: return a new one.")
    merge_agrees(case, answer, [1, 2, 3, 1, 2, 1, 2, 5], (1, 2), 9)
    merge_agrees(case, answer, (5, 1, 2, 6, 1, 2), (1, 2), 9)


@merge_pair.requires(
    "the order of the pair counts, and half a pair is none",
    "Look at both ids before you replace anything.",
)
def _(answer, case):
    merge_agrees(case, answer, [2, 1, 3, 1, 3, 2, 1], (1, 2), 9)
    merge_agrees(case, answer, [4, 4, 2, 2, 1], (1, 2), 9)
    merge_agrees(case, answer, [11, 2, 1, 22, 1, 2], (1, 2), 9)


@merge_pair.requires(
    "occurrences do not overlap, and the left one is taken",
    "After a merge, go on behind both of its ids.",
)
def _(answer, case):
    for n in (2, 3, 4, 5):
        merge_agrees(case, answer, [7] * n, (7, 7), 8)
    merge_agrees(case, answer, [1, 7, 7, 7, 1, 7, 7, 7, 7, 2], (7, 7), 8)


@merge_pair.requires(
    "what a merge gives is not merged again in the same call",
    "The new id may be equal to one of the pair. Compare ids that were handed in.",
)
def _(answer, case):
    merge_agrees(case, answer, [1, 2, 2, 2], (1, 2), 1)
    merge_agrees(case, answer, [1, 1, 2, 5], (1, 2), 2)
    merge_agrees(case, answer, [9, 1, 2, 9], (1, 2), 9)
    merge_agrees(case, answer, (hashed(2000, seed=3) % 3).tolist(), (2, 1), 3)


# Learning merges ----------------------------------------------------------------------


def learns(case, answer, text, vocab_size, special_tokens=(), by_name=False):
    if by_name:
        named = {"vocab_size": vocab_size, "special_tokens": special_tokens}
        result = case.call(answer, text=text, **named)
    else:
        given = (special_tokens,) if special_tokens else ()
        result = case.call(answer, text, vocab_size, *given)
    case.is_tuple(result, 2)
    vocab, merges = result
    history = []
    vocabulary, expected = slow_train(text, vocab_size, special_tokens, history)
    if isinstance(merges, list):
        merges = [tuple(pair) if isinstance(pair, list) else pair for pair in merges]
    i = first_difference(case, merges, expected, "merge")
    if i is not None:
        yours, right = merges[i], expected[i]
        found = sum(n for pair, n in history[i].items() if pair == yours)
        wanted = history[i][right]
        raise (Unmet if found == wanted else Explained)(
            f"Merge number {i} is {short(yours)}, which then occurs "
            f"{counted(found, 'time')}; expected {short(right)}, which occurs "
            f"{counted(wanted, 'time')}."
        )
    require_type(vocab, dict, "`vocab`")
    for i in [*vocabulary, *vocab]:
        if vocab.get(i) != vocabulary.get(i):
            yours = short(vocab[i]) if i in vocab else "missing"
            right = short(vocabulary[i]) if i in vocabulary else "nothing"
            raise Explained(f"`vocab` at id {i!r} is {yours}, expected {right}.")


@train_bpe.requires(
    "the most frequent pair is merged first, and takes the next id",
    "Print the counts of the first round and compare by hand. With room for no merge "
    "there are the 256 bytes alone.",
)
def _(answer, case):
    learns(case, answer, "low lower", 256)
    learns(case, answer, "abcbcbc", 257)
    learns(case, answer, "zzxyxyxy", 257)


@train_bpe.requires(
    "of several most frequent pairs the greater one is merged",
    "`max` takes a key. What must it compare after the count?",
)
def _(answer, case):
    for text in ("bcdab", "abcd", "dcba", "xyaxyaby", "zbazbabz"):
        learns(case, answer, text, 257)


@train_bpe.requires(
    "later merges count what the earlier ones left, and may build on them",
    "After each merge the words hold fewer ids, and other pairs. Which counts changed?",
)
def _(answer, case):
    learns(case, answer, "abcabcabcabxbc", 259)
    learns(case, answer, "a" * 8 + "b", 259)


@train_bpe.requires(
    "where no pair is left it stops, with a smaller vocabulary",
    "A text of two different letters has one pair. What does your search for the most "
    "frequent pair give when none is left, and when a count has become 0?",
)
def _(answer, case):
    learns(case, answer, "ab", 300)
    learns(case, answer, "abcab", 300)
    learns(case, answer, "", 300)


@train_bpe.requires(
    "the text is cut by GPT-2's pattern, no merge reaches from word to word, and a "
    "pair counts as often as its word occurs in the text",
    "A space belongs to the word behind it. Digits, letters and other signs are words "
    "apart. Equal words are worth one entry and a count.",
)
def _(answer, case):
    learns(case, answer, "ab ab ab ab", 260)
    learns(case, answer, "it's 12ab it's 12ab, it's 12ab,\n\n  it's", 280)
    learns(case, answer, "x==1;x==1;\tx==1;   x  ==1\n\n\n\nx", 270)
    learns(case, answer, "a_b __init__ a_b x_1 __", 270)
    learns(case, answer, "xyz xyz xyz xyz abq abr abs", 262)


@train_bpe.requires(
    "on equal counts pairs are compared by their bytes, the left part first",
    "Tuples of bytes compare as they should: first part, then second. Ids do not, "
    "once they stand for merges.",
)
def _(answer, case):
    learns(case, answer, "ab cd", 260)
    learns(case, answer, "cd ab", 260)
    learns(case, answer, "abc\nabc\nzq\nzq", 260)
    # (b"a", b"bz") and (b"ab", b"c") are equally frequent and equally long in sum.
    learns(case, answer, "bz bz bz bz abz abz abc abc ab ab", 264)
    learns(case, answer, "azb azb aab aab zab zab b b zb ab", 270)


@train_bpe.requires(
    "characters outside ASCII are bytes of UTF-8, and a merge may hold a part of one"
)
def _(answer, case):
    learns(case, answer, "é è ê é ü é 水 氷 永 水 水 🙂🙃🙂", 275)
    learns(case, answer, "cafés cafés größer größer вода вода ٣٤ ٣٤ ٣٤", 300)


@train_bpe.requires(
    "special tokens cut the text, come last in `vocab`, and count in `vocab_size`",
    "Cut the text at them before anything is counted. The two sides stay apart.",
)
def _(answer, case):
    learns(case, answer, f"ab{END}cb ab{END}cb ab{END}cb", 261, [END])
    learns(case, answer, f"{END}the end{END}{END} the end|> <|end", 268, [END])
    learns(case, answer, f"ab{END}cb ab{END}cb ab{END}cb", 258, [END])
    learns(case, answer, "ab a b", 300, [END])
    learns(case, answer, "", 300, [END, MORE])


@train_bpe.requires(
    "special tokens are plain text, and of two that fit the longer one counts",
    "Signs such as | mean something in a pattern: `regex.escape`. Of alternatives a "
    "pattern takes the first that fits, not the longest.",
)
def _(answer, case):
    learns(case, answer, f"more{MORE}more{END}x|x|x.x<more|>", 266, [END, MORE])
    learns(case, answer, "aXb.aXb.aXb a.b a.b a.b (1) (1)", 266, ["a.b", "(1)"])


@train_bpe.requires(
    "a vocab_size below 256 plus the special tokens is a ValueError that names numbers"
)
def _(answer, case):
    for size, special in ((255, []), (257, [END, MORE])):
        needed = 256 + len(special)
        asked = {
            "mentions": (size, needed),
            "because": f"vocab_size {size} where {needed} is the least",
        }
        case.raises(ValueError, answer, "ab", size, special, **asked)


@train_bpe.requires(
    "a longer text with many words, called with names, gives every merge in its order",
    "The first merges are right and a later one is not: is a count out of date, or "
    "one of a pair that is gone?",
)
def _(answer, case):
    learns(case, answer, invented_text(300), 310)
    text = invented_text(60, seed=1) + END + invented_text(60, seed=2)
    learns(case, answer, text, 280, [END], by_name=True)


# The tokenizer ------------------------------------------------------------------------


def encodes(case, answer, text, kit, **options):
    def encode(BPETokenizer, text):
        return BPETokenizer(*fresh(kit), **options).encode(text)

    ids = case.call(encode, answer, text)
    require_ids(case, ids, slow_encode(text, *kit, **options), kit)


def decodes(case, answer, ids, expected, kit):
    def decode(BPETokenizer, ids):
        return BPETokenizer(*kit).decode(ids)

    case.equal(case.call(decode, answer, ids), expected, "the text")


def streams(case, answer, chunks, kit):
    def encode_iterable(BPETokenizer, chunks):
        return list(BPETokenizer(*kit).encode_iterable(iter(chunks)))

    ids = case.call(encode_iterable, answer, chunks)
    require_ids(case, ids, slow_encode("".join(chunks), *kit), kit)


def require_ids(case, ids, expected, kit):
    i = first_difference(case, ids, expected, "id")
    if i is None:
        return
    yours, right = ids[i], expected[i]
    if not isinstance(yours, int):
        raise Explained(f"Id number {i} is {short(yours)}, expected a number.")
    raise Unmet(
        f"Id number {i} is {yours}, {kit[0].get(yours, 'no token')!r}, expected {right}, "
        f"{kit[0][right]!r}.",
        (ids, expected),
    )


@BPETokenizer.requires("without merges each byte is an id, in the vocabulary's numbers")
def _(answer, case):
    encodes(case, answer, "low", small())
    encodes(case, answer, "", small())
    shifted = {(i + 77) % 256: token for i, token in enumerate(BYTES)}
    encodes(case, answer, "lower", (shifted, [], []))


@BPETokenizer.requires(
    "the pair of lowest rank is merged first, wherever it stands in the word, until "
    "none is left",
    "Of all pairs in the word that are in `merges`, which stands earliest *in the "
    "list*? Merge it, and look again.",
)
def _(answer, case):
    four = (b"b", b"c"), (b"c", b"d"), (b"a", b"b"), (b"d", b"e")
    encodes(case, answer, "abcde", small(*four, (b"b", b"cd"), (b"a", b"bcd")))
    kit = small((b"b", b"c"), (b"a", b"b"), (b"ab", b"c"))
    encodes(case, answer, "abc abd abcc", kit)
    kit = small((b"c", b"d"), (b"b", b"cd"), (b"a", b"b"), (b"a", b"bcd"))
    for text in ("abcd", "abc", "ab", "acd", "abcdabcab"):
        encodes(case, answer, text, kit)
    encodes(case, answer, "abc", small((b"ab", b"c"), (b"a", b"b")))


@BPETokenizer.requires("of equal pairs that overlap the left one is merged")
def _(answer, case):
    kit = small((b"a", b"a"), (b"aa", b"aa"), (b"aa", b"a"))
    for n in range(1, 9):
        encodes(case, answer, "a" * n, kit)
    encodes(case, answer, "baaab aaa", kit)


@BPETokenizer.requires(
    "a merge never reaches from word to word, and each word is treated alike",
    "The text is cut by the pattern first, and each word is merged by itself.",
)
def _(answer, case):
    kit = small((b"b", b" "), (b"b", b"c"), (b"1", b"b"), (b" ", b"b"), (b"b", b"b"))
    encodes(case, answer, "b b  b bc 1b bc\nb b1b", kit)
    encodes(case, answer, "the tokens 1234 they're", learned(), pattern=r"\s+|\S")
    encodes(case, answer, "there the there", learned(), pattern=r"[^e]+|e+")


@BPETokenizer.requires(
    "ids are those of `vocab`, in whatever order it numbers its tokens",
    "Models differ: some begin with the special tokens. Look the bytes up.",
)
def _(answer, case):
    vocab, merges, _ = small((b"b", b"c"), (b"a", b"b"))
    encodes(case, answer, "abc", ({300 - i: t for i, t in vocab.items()}, merges, []))
    encodes(case, answer, "the tokenizer's there", learned())
    encodes(case, answer, "to be, or not to be: that is the question", learned())


@BPETokenizer.requires(
    "a byte that the vocabulary lacks is left out before anything is merged",
    "Real vocabularies may lack a byte that their training text never held.",
)
def _(answer, case):
    vocab, merges, special = small((b"!", b"!"), (b"a", b"b"))
    lacking = b"\4", b"\xff", b"\xa9"
    vocab = {i + 300: token for i, token in vocab.items() if token not in lacking}
    encodes(case, answer, "ab!\4! a\4b \4", (vocab, merges, special))
    encodes(case, answer, "a café!", (vocab, merges, special))  # é is C3 A9


@BPETokenizer.requires("scripts, emoji, code, numbers and white space encode exactly")
def _(answer, case):
    odd = "\r\n\r\n \u00a0 \u3000x\u2028y \0 e\u0301 \u200d ﷽ 𝔘𝔫𝔦"
    long = invented_text(300, seed=9)
    for text in (MIXED, MIXED[::-1], long, long.replace(" ", ""), odd):
        encodes(case, answer, text, learned())


@BPETokenizer.requires(
    "special tokens become one id each, wherever they stand, and never a part of a "
    "word",
    "Cut the text at them first. The rest of the text knows nothing of them.",
)
def _(answer, case):
    texts = END, f"a{END}b", f"the {END} the{END}{END}", f" {END}\n{END} x", "<|end"
    for text in texts:
        encodes(case, answer, text, learned())
    kit = small((b"b", b"c"), (b"a", b"b"), (b"ab", b"c"), special=[END])
    encodes(case, answer, f"abc{END}abc", kit)
    vocab, merges, _ = small(special=[END, MORE, "<pad>"])
    encodes(case, answer, f"<pad>{MORE}<pad>", (vocab, merges, [END]))


@BPETokenizer.requires(
    "of two special tokens that fit the longer one counts, and none is a pattern",
    "In a pattern | means “or”, and of alternatives the first that fits is taken.",
)
def _(answer, case):
    encodes(case, answer, f"x{MORE}y{END}z|end|<|more|>", learned())
    kit = small(special=["a.b", "a.b|c", "(x)"])
    encodes(case, answer, "a.b a.b|c axb xbc (x) x", kit)


@BPETokenizer.requires(
    "decode gives back the text that was encoded, to the last character, from a list "
    "or a tensor of ids",
    "A token may hold a part of a character: what must be joined before it is text? "
    "And a loop over a tensor gives tensors; `int(i)` makes a number of one.",
)
def _(answer, case):
    special, signs = f"{END} x{MORE}\n{END}", "水🙂🙃" + "é" * 5 + "👩‍👩‍👧"
    for text in ("", "the café", signs, MIXED, " \n\t e\u0301 ﬁ Å\u212b  ", special):
        ids = slow_encode(text, *learned())
        decodes(case, answer, ids, text, learned())
    decodes(case, answer, torch.tensor(ids), text, learned())


@BPETokenizer.requires(
    "bytes that are no valid UTF-8 become U+FFFD, as Python's own decoder does it"
)
def _(answer, case):
    for data in (b"\xff", b"a\xe6\xb0b", b"\xe6\xb0\xb4\x80\xf0\x9f\x99"):
        text = data.decode("utf-8", "replace")
        decodes(case, answer, list(data), text, small())


@BPETokenizer.requires(
    "an id that is not in the vocabulary is a ValueError that names it, and so is a "
    "special token that is not"
)
def _(answer, case):
    def decode(BPETokenizer, ids):
        return BPETokenizer(*small()).decode(ids)

    def build(BPETokenizer, special_tokens):
        return BPETokenizer(*small()[:2], special_tokens).encode("a")

    for f, given, wrong in (
        (decode, [97, 256], 256),
        (decode, [-1], -1),
        (build, [END], END),
    ):
        reason = f"{wrong}, which `vocab` does not hold"
        case.raises(ValueError, f, answer, given, mentions=(wrong,), because=reason)


@BPETokenizer.requires(
    "encode_iterable gives the ids of the whole text, wherever the chunks end",
    "A word may go on in the next chunk, and a lone ' may become an ending such as "
    "'re. Keep the end of the text until you know.",
)
def _(answer, case):
    streams(case, answer, ["the tokens", " there"], learned())
    streams(case, answer, ["the tok", "ens the", "re"], learned())
    streams(case, answer, ["", "a", "", " the", ""], learned())
    streams(case, answer, [], learned())
    for n in (1, 2, 3, 7):
        streams(case, answer, in_chunks(MIXED, n), learned())


@BPETokenizer.requires(
    "special tokens, contractions and white space that a chunk's end cuts stay whole",
    "How many characters must you hold back so that a special token cannot begin "
    "among those you give away? And 'l is two words until another l follows.",
)
def _(answer, case):
    contraction = (b"'", b"l"), (b"'l", b"l")
    kit = small(*contraction, (b"\n", b"\t"), (b" ", b" "), special=[END, MORE])
    text = f"they'll  x{END} y {MORE}{END}z \n\tb\n\n\n\t\tc   d'{END}'ll<|end<|end|"
    for n in (1, 2, 4, 5, 11):
        streams(case, answer, in_chunks(text, n), kit)
    plain = small(*contraction)
    streams(case, answer, ["they'l", "l"], plain)
    streams(case, answer, in_chunks("x'll'l'llm 'r're", 1), plain)
    streams(case, answer, ["a  <|e", "nd|>", " b"], kit)
    streams(case, answer, [f"a {END}<|mo", "re|> b"], kit)
    start = small(special=["<|im_start|>", "<s>"])
    for n in (1, 2, 3):
        streams(case, answer, in_chunks("<|im_start|>user\n<|im_start|>", n), start)


@BPETokenizer.requires(
    "encode_iterable hands out ids before the text has ended, and forgets their text",
    "Files may be larger than memory. `yield` what is settled, then forget it: what "
    "do you still need of it?",
)
def _(answer, case):
    def chunks_read_for_50_ids(BPETokenizer):
        read = []

        def chunks():
            for i in range(400):
                read.append(i)
                yield f" the{i % 10} "

        tokenizer = BPETokenizer(*learned())
        return list(islice(tokenizer.encode_iterable(chunks()), 50)), len(read) < 100

    ids, early = case.call(chunks_read_for_50_ids, answer)
    text = "".join(f" the{i % 10} " for i in range(60))
    require_ids(case, ids, slow_encode(text, *learned())[:50], learned())
    if not early:
        raise Explained(
            "It read at least 100 chunks of a word each before it gave 50 ids: the text "
            "is gathered first and encoded at its end."
        )
    long = f"<|{'long' * 1000}|>"

    def kilobytes_kept(BPETokenizer):
        tokenizer = BPETokenizer(*small(special=[long]))
        list(tokenizer.encode_iterable([long, " a", long, " b"]))
        tracemalloc.start()
        try:
            ids = tokenizer.encode_iterable(long + " a" for _ in range(60))
            return sum(1 for _ in ids), tracemalloc.get_traced_memory()[1] < 150_000
        finally:
            tracemalloc.stop()

    n, little = case.call(kilobytes_kept, answer)
    case.equal(n, 180, "the number of ids of 60 special tokens, spaces and letters")
    if not little:
        raise Explained(
            "Over 240 kilobytes of text in 60 chunks it came to hold more than 150 "
            "kilobytes: what is settled is not forgotten."
        )


@BPETokenizer.requires("one tokenizer serves many calls, and two do not share anything")
def _(answer, case):
    kit, plain = fresh(learned()), small((b"t", b"h"), (b"th", b"e"))

    def several_calls(BPETokenizer):
        one, two = BPETokenizer(*kit), BPETokenizer(*plain)
        left = list(islice(one.encode_iterable(["the tokens", " there"]), 1))
        streamed = list(one.encode_iterable(["the", " there"]))
        return one.encode("the there"), two.encode("the there"), len(left), streamed

    ids, others = (slow_encode("the there", *each) for each in (kit, plain))
    case.equal(case.call(several_calls, answer), (ids, others, 1, ids), "several calls")
    case.true(kit == learned(), "It changed the vocabulary or the merges it was given.")
