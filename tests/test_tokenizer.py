"""Lesson 07: `tokenizers` as oracle, other right answers, wrong ones no fault lists."""

import json
import random
import time
import tracemalloc
from collections import Counter
from functools import cache
from itertools import islice, pairwise

import pytest
import regex
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, trainers

from solutions import tokenizer as reference
from utils import texts
from utils.check import evaluate
from utils.errors import CourseError
from utils.exercises import tokenizer as exercises
from utils.exercises.tokenizer import GPT2

END, PAD = "<|endoftext|>", "<|pad|>"


def accept(answer, name):
    report = evaluate(answer, name)
    assert report.status == "passed", report.message


def reject(answer, name):
    report = evaluate(answer, name)
    assert report.status == "failed", f"a wrong {name} passes"


# Mixed text -------------------------------------------------------------------------

SCRIPTS = (
    "the quick brown fox can't won't they'll I'm he's we've you're 'll 's café naïve",
    "Größe Straße übel heißt schön",
    "сегодня хорошая погода в саду",
    "ο καιρός είναι καλός",
    "الطقس جميل اليوم",
    "आज मौसम अच्छा है",
    "今天天气很好孩子们 在花园里玩",
    "今日は天気が良く 子供たち",
    "오늘은 날씨가 좋고",
    "🙂 👩‍👩‍👧 👋🏽 🏳️‍🌈 🇩🇪 ✈️",
    "def f(x): return x**2 if x != 0 else {} # ok self.__init__(*args) => {};\n",
    "12 3.14 1,000,000 ½ ٣٤ 0x1F 2026-01-02 ⅷ",
    "e\u0301 ﬁ ﷽ 𝔘𝔫𝔦 \u200d \u00ad \ufeff Å",
)
SPACES = (
    " ",
    " ",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    " \n ",
    "\u00a0",
    "\u3000",
)


def mixed_lines(n, special=(), seed=0):
    """Lines of words from several scripts, white space, special tokens, odd signs."""
    draw = random.Random(seed)
    words = [word for script in SCRIPTS for word in script.split(" ")]
    lines = []
    for _ in range(n):
        parts = []
        for _ in range(draw.randint(1, 14)):
            kind = draw.random()
            if special and kind < 0.08:
                parts.append(draw.choice(special))
            elif kind < 0.16:
                parts.append(chr(draw.choice([draw.randrange(0x250), 0x1F600, 0x4E00])))
            else:
                parts.append(draw.choice(words))
            if draw.random() < 0.8:
                parts.append(draw.choice(SPACES))
        lines.append("".join(parts))
    return lines


# The reference against `tokenizers` -------------------------------------------------


@cache
def byte_signs():
    """GPT-2's printable sign for each byte, as vocabularies in files write it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def to_signs(token):
    return "".join(byte_signs()[byte] for byte in token)


def to_bytes(signs):
    back = {sign: byte for byte, sign in byte_signs().items()}
    return bytes(back[sign] for sign in signs)


def of_package(vocab, merges, special, split_digits=False):
    """The same tokenizer made with the package `tokenizers`."""
    names = {t.encode(): t for t in special}
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab={names.get(token, to_signs(token)): i for i, token in vocab.items()},
            merges=[(to_signs(a), to_signs(b)) for a, b in merges],
        )
    )
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*digits, level])
    made.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    return made


def same_as_package(vocab, merges, special, lines, split_digits=False, **options):
    ours = reference.BPETokenizer(vocab, merges, special, **options)
    theirs = of_package(vocab, merges, special, split_digits)
    complete = {bytes([i]) for i in range(256)} <= set(vocab.values())
    for line in lines:
        ids = ours.encode(line)
        assert ids == theirs.encode(line, add_special_tokens=False).ids, repr(line)
        assert ours.decode(ids) == line or not complete
    whole = "".join(lines)
    expected = theirs.encode(whole, add_special_tokens=False).ids
    assert list(ours.encode_iterable(lines)) == expected
    cut = (whole[i : i + 5] for i in range(0, len(whole), 5))
    assert list(ours.encode_iterable(cut)) == expected


def test_own_merges_encode_as_the_package_does():
    special = [END, PAD]
    text = "\n".join(mixed_lines(600)) + texts.english(60_000)
    vocab, merges = reference.train_bpe(text, 1500, special)
    lines = mixed_lines(1500, special, seed=1)
    same_as_package(vocab, merges, special, lines)
    n = len(vocab)
    moved = {(7 * i + 3) % n: token for i, token in vocab.items()}
    assert len(moved) == n
    same_as_package(moved, merges, special, lines[:200])


def trained_by_package(text, size, special):
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=sorted(byte_signs().values()),
    )
    made.train_from_iterator([text], trainer)
    model = json.loads(made.to_str())["model"]
    vocab = {
        i: sign.encode() if sign in special else to_bytes(sign)
        for sign, i in model["vocab"].items()
    }
    return vocab, [(to_bytes(a), to_bytes(b)) for a, b in model["merges"]]


def test_merges_of_the_package_encode_as_it_does():
    """Special tokens first, and bytes in another order, as in most models."""
    special = [END, PAD]
    text = "\n".join(mixed_lines(900, seed=2)) + texts.code(60_000)
    vocab, merges = trained_by_package(text, 2000, special)
    assert vocab[0] == END.encode() and vocab[2] != b"\0"
    same_as_package(vocab, merges, special, mixed_lines(1500, special, seed=3))


def test_training_agrees_with_the_package_up_to_ties():
    """The same counts at each merge: the package breaks ties by id."""
    text = texts.english(100_000)
    ours = reference.train_bpe(text, 600)[1]
    theirs = trained_by_package(text, 600, [])[1]
    assert ours[:30] == theirs[:30] or set(ours[:30]) == set(theirs[:30])
    assert len(set(ours) & set(theirs)) > 0.95 * len(ours)


def test_real_model_encodes_as_the_package_does():
    """SmolLM2's own merges, if the real model is installed."""
    real_model = pytest.importorskip("utils.real_model")
    gguf = pytest.importorskip("gguf")
    try:
        path = real_model.model_file()
    except real_model.ModelProblem as problem:
        pytest.skip(str(problem))
    fields = gguf.GGUFReader(path).fields
    tokens, pairs, kinds = (
        fields[f"tokenizer.ggml.{key}"].contents()
        for key in ("tokens", "merges", "token_type")
    )
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == 3]
    vocab = {
        i: token.encode() if token in special else to_bytes(token)
        for i, token in enumerate(tokens)
    }
    merges = [tuple(to_bytes(part) for part in pair.split(" ")) for pair in pairs]
    lines = mixed_lines(1500, special, seed=4)
    same_as_package(
        vocab, merges, special, lines, split_digits=True, pattern=real_model.PATTERN
    )


# Round trips, sizes, errors ---------------------------------------------------------


def test_any_unicode_text_comes_back():
    draw = random.Random(5)
    vocab, merges = reference.train_bpe(texts.english(30_000), 400, [END])
    tokenizer = reference.BPETokenizer(vocab, merges, [END])
    for _ in range(300):
        points = (draw.randrange(0x110000) for _ in range(60))
        text = "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000, 7)]))
    assert tokenizer.decode(tokenizer.encode(every)) == every


def test_training_is_practical():
    started = time.process_time()
    vocab, _ = reference.train_bpe(texts.english(130_000), 500, [END])
    assert time.process_time() - started < 1.5
    assert len(vocab) == 500


def test_training_on_five_megabytes():
    text = texts.code(5_000_000)
    started = time.process_time()
    vocab, _ = reference.train_bpe(text, 1000, [END])
    assert time.process_time() - started < 60
    assert len(vocab) == 1000


def test_memory_does_not_grow_with_the_text():
    vocab, merges = reference.train_bpe(texts.english(20_000), 300, [END])
    tokenizer = reference.BPETokenizer(vocab, merges, [END])
    line = texts.english(2_000)
    peaks = []
    for n in (50, 500):
        ids = tokenizer.encode_iterable(line for _ in range(n))
        list(islice(ids, 100))
        tracemalloc.start()
        assert sum(1 for _ in ids) > 100
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0] + 100_000


def test_a_repeated_letter_is_no_trouble():
    vocab, merges = reference.train_bpe("a" * 4000, 270)
    tokenizer = reference.BPETokenizer(vocab, merges)
    started = time.process_time()
    ids = tokenizer.encode("a" * 100_000)
    assert time.process_time() - started < 5
    assert tokenizer.decode(ids) == "a" * 100_000


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"257.*258"):
        reference.train_bpe("abc", 257, [END, PAD])
    vocab, merges = reference.train_bpe("abcabc", 258)
    with pytest.raises(ValueError, match=r"endoftext"):
        reference.BPETokenizer(vocab, merges, [END])
    with pytest.raises(ValueError, match=r"999"):
        reference.BPETokenizer(vocab, merges).decode([97, 999])


def test_tensors_of_ids_can_be_decoded():
    torch = pytest.importorskip("torch")
    tokenizer = reference.BPETokenizer(*reference.train_bpe("abcabc", 258))
    assert tokenizer.decode(torch.tensor([97, 98, 257])) == "ababc"


def test_texts_are_long_and_refuse_more_than_there_is():
    assert len(texts.english(130_000)) == 130_000
    assert len(texts.code(200_000)) == 200_000
    assert texts.english(1000) == texts.english(5000)[:1000]
    with pytest.raises(CourseError, match="asked for"):
        texts.code(10**9)


# Right answers in other forms -------------------------------------------------------


def counts_by_index(words):
    found = {}
    for word in words:
        for i in range(len(word) - 1):
            pair = (word[i], word[i + 1])
            found[pair] = found.get(pair, 0) + words[word]
    return found


def counts_by_counter(words):
    total = Counter()
    for word, n in words.items():
        for pair, k in Counter(pairwise(word)).items():
            total[pair] += k * n
    return total


@pytest.mark.parametrize("answer", [counts_by_index, counts_by_counter])
def test_other_right_counts(answer):
    accept(answer, "pair_counts")


def merge_by_iterator(ids, pair, new_id):
    out, rest = [], iter(ids)
    held = next(rest, None)
    for i in rest:
        if held is not None and (held, i) == pair:
            out.append(new_id)
            held = next(rest, None)
            if held is None:
                return out
            continue
        out.append(held)
        held = i
    return out if held is None else [*out, held]


def merge_recursive_slices(ids, pair, new_id):
    ids, out = list(ids), []
    while ids:
        step = 2 if ids[:2] == list(pair) else 1
        out += [new_id] if step == 2 else ids[:1]
        del ids[:step]
    return out


def merge_flags(ids, pair, new_id):
    out, skip = [], False
    for k, i in enumerate(ids):
        if skip:
            skip = False
        elif k + 1 < len(ids) and i == pair[0] and ids[k + 1] == pair[1]:
            out.append(new_id)
            skip = True
        else:
            out.append(i)
    return out


@pytest.mark.parametrize(
    "answer", [merge_by_iterator, merge_recursive_slices, merge_flags]
)
def test_other_right_merges(answer):
    accept(answer, "merge_pair")


def train_recounting(text, vocab_size, special_tokens=()):
    if vocab_size < 256 + len(special_tokens):
        raise ValueError(f"{vocab_size} is less than {256 + len(special_tokens)}")
    held = Counter()
    pieces = [text]
    if special_tokens:
        order = sorted(special_tokens, key=lambda s: -len(s))
        pieces = regex.split("|".join(regex.escape(s) for s in order), text)
    for piece in pieces:
        for found in regex.finditer(GPT2, piece):
            held[tuple(bytes([b]) for b in found[0].encode())] += 1
    merges = []
    for _ in range(vocab_size - 256 - len(special_tokens)):
        counts = counts_by_index(held)
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        merged = Counter()
        for word, n in held.items():
            merged[tuple(merge_flags(word, best, best[0] + best[1]))] += n
        held = merged
    tokens = [bytes([i]) for i in range(256)] + [a + b for a, b in merges]
    tokens += [s.encode() for s in special_tokens]
    return dict(enumerate(tokens)), merges


def train_every_occurrence(text, vocab_size, special_tokens=()):
    """Each word of the text by itself, the slow way."""
    if vocab_size < 256 + len(special_tokens):
        raise ValueError(f"{vocab_size} is less than {256 + len(special_tokens)}")
    words = [
        list(w.encode())
        for w in exercises._words(exercises._pieces(text, special_tokens))
    ]
    vocab, merges = {i: bytes([i]) for i in range(256)}, []
    while len(vocab) < vocab_size - len(special_tokens):
        counts = Counter(p for w in words for p in pairwise(w))
        if not counts:
            break
        best = max(counts, key=lambda p: (counts[p], vocab[p[0]], vocab[p[1]]))
        merges.append((vocab[best[0]], vocab[best[1]]))
        words = [merge_flags(w, best, len(vocab)) for w in words]
        vocab[len(vocab)] = vocab[best[0]] + vocab[best[1]]
    for token in special_tokens:
        vocab[len(vocab)] = token.encode()
    return vocab, merges


@pytest.mark.parametrize("answer", [train_recounting, train_every_occurrence])
def test_other_right_trainers(answer):
    accept(answer, "train_bpe")


class InRankOrder(exercises._Tokenizer):
    """Applies each merge in turn, wherever it fits."""

    def merge(self, parts):
        for a, b in self.rank:
            parts = merge_flags(parts, (a, b), a + b)
        return parts


class CutBeforeSpace(exercises._Tokenizer):
    """Holds back from the last white space that follows something else."""

    def encode_iterable(self, chunks):
        text = ""
        for chunk in chunks:
            text += chunk
            certain = len(text) - self.uncertain()
            cuts = [m.start() + 1 for m in regex.finditer(r"\S\s", text[:certain])]
            if cuts and not any(s[0].isspace() or " " in s for s in self.special):
                yield from self.encode(text[: cuts[-1]])
                text = text[cuts[-1] :]
        yield from self.encode(text)


@pytest.mark.parametrize("answer", [InRankOrder, CutBeforeSpace, exercises._Tokenizer])
def test_other_right_tokenizers(answer):
    accept(answer, "BPETokenizer")


# Wrong answers that no fault lists --------------------------------------------------


def counts_with_zero(words):
    found = counts_by_index(words)
    return {**found, (0, 0): found.get((0, 0), 0)}


def counts_emptying(words):
    found = counts_by_index(words)
    words.clear()
    return found


def counts_largest_word(words):
    longest = sorted(words, key=len)[-3:]
    return counts_by_index({w: words[w] for w in longest})


@pytest.mark.parametrize(
    "answer", [counts_with_zero, counts_emptying, counts_largest_word]
)
def test_wrong_counts(answer):
    reject(answer, "pair_counts")


def merge_by_set(ids, pair, new_id):
    return [i for i in merge_flags(ids, pair, new_id) if i not in pair]


def merge_until_stable(ids, pair, new_id):
    before, after = None, list(ids)
    while before != after:
        before, after = after, merge_flags(after, pair, new_id)
    return after


def merge_by_bytes(ids, pair, new_id):
    return list(bytes(ids).replace(bytes(pair), bytes([new_id % 256])))


def merge_same_list_if_nothing(ids, pair, new_id):
    merged = merge_flags(ids, pair, new_id)
    return ids if merged == ids else merged


@pytest.mark.parametrize(
    "answer",
    [merge_by_set, merge_until_stable, merge_by_bytes, merge_same_list_if_nothing],
)
def test_wrong_merges(answer):
    reject(answer, "merge_pair")


def trainer(**options):
    def train(text, vocab_size, special_tokens=()):
        return exercises._learn(text, vocab_size, special_tokens, **options)

    return train


def train_python_re(text, vocab_size, special_tokens=()):
    ascii_words = (
        r"'(?:[sdmt]|ll|ve|re)| ?[a-zA-Z]+| ?[0-9]+| ?[^\sa-zA-Z0-9]+|\s+(?!\S)|\s+"
    )
    return exercises._learn(
        text,
        vocab_size,
        special_tokens,
        words=lambda t, s: exercises._words(exercises._pieces(t, s), ascii_words),
    )


def train_no_lookahead(text, vocab_size, special_tokens=()):
    pattern = GPT2.replace(r"|\s+(?!\S)", "")
    return exercises._learn(
        text,
        vocab_size,
        special_tokens,
        words=lambda t, s: exercises._words(exercises._pieces(t, s), pattern),
    )


def train_by_set_of_words(text, vocab_size, special_tokens=()):
    """Never adds up equal words of different pieces."""
    found = []
    for piece in exercises._pieces(text, special_tokens):
        found = exercises._words([piece]) or found
    return exercises._learn("".join(found), vocab_size, special_tokens)


def train_ids_on_ties(text, vocab_size, special_tokens=()):
    seen = {}
    return exercises._learn(
        text,
        vocab_size,
        special_tokens,
        key=lambda n, a, b: (n, seen.setdefault(a + b, len(seen))),
    )


def train_short_on_ties(text, vocab_size, special_tokens=()):
    return exercises._learn(
        text,
        vocab_size,
        special_tokens,
        key=lambda n, a, b: (n, -len(a + b), a, b),
    )


@pytest.mark.parametrize(
    "answer",
    [
        train_python_re,
        train_no_lookahead,
        train_by_set_of_words,
        train_ids_on_ties,
        train_short_on_ties,
        trainer(pairs=lambda parts: set(pairwise(parts))),
        trainer(cut=lambda w: [bytes([b]) for b in w.strip().encode()]),
        trainer(key=lambda n, a, b: (n, b, a)),
        trainer(least=3),
    ],
)
def test_wrong_trainers(answer):
    reject(answer, "train_bpe")


class RankOfResult(exercises._Tokenizer):
    """Lowest id of the result, as if ids were ranks."""

    def choose(self, parts):
        found = [i for i, pair in enumerate(pairwise(parts)) if pair in self.rank]
        return min(found, key=lambda i: self.ids[parts[i] + parts[i + 1]], default=None)


class ShortestToken(exercises._Tokenizer):
    def choose(self, parts):
        found = [i for i, pair in enumerate(pairwise(parts)) if pair in self.rank]
        return min(found, key=lambda i: len(parts[i] + parts[i + 1]), default=None)


class AnyTokenMerges(exercises._Tokenizer):
    """Merges what gives a token, whether or not that pair is in the merges."""

    def choose(self, parts):
        found = [i for i, (a, b) in enumerate(pairwise(parts)) if a + b in self.ids]
        return min(found, key=lambda i: self.ids[parts[i] + parts[i + 1]], default=None)


class PrefixSpace(exercises._Tokenizer):
    def encode(self, text):
        return super().encode(text if text[:1] in ("", " ") else " " + text)


class SpecialStripped(exercises._Tokenizer):
    def decode(self, ids):
        return super().decode(ids).strip()


class IgnoresUnknownBytes(exercises._Tokenizer):
    def start(self, word):
        return [bytes([b]) for b in word.encode("ascii", "ignore")]


class SurrogateDecoding(exercises._Tokenizer):
    def text(self, data):
        return data.decode("utf-8", errors="backslashreplace")


class RestartsAtLines(exercises._Tokenizer):
    def encode_iterable(self, chunks):
        for line in "".join(chunks).splitlines(keepends=True):
            yield from self.encode(line)


class KeepsTextOnSelf(exercises._Tokenizer):
    held = ""

    def encode_iterable(self, chunks):
        for chunk in chunks:
            self.held += chunk
            cut = self.held.rfind(" ", 0, -20)
            if cut > 0:
                head, self.held = self.held[:cut], self.held[cut:]
                yield from self.encode(head)
        yield from self.encode(self.held)


class NegativeIds(exercises._Tokenizer):
    def known(self, ids):
        if ids and max(ids) >= len(self.vocab):
            raise ValueError(f"{max(ids)} is too large")


class SharedCache(exercises._Tokenizer):
    cache = {}  # noqa: RUF012

    def of_part(self, part, special):
        if part not in self.cache:
            self.cache[part] = super().of_part(part, special)
        return self.cache[part]


class ReturnsTuple(exercises._Tokenizer):
    def encode(self, text):
        return tuple(super().encode(text))


@pytest.mark.parametrize(
    "answer",
    [
        RankOfResult,
        ShortestToken,
        AnyTokenMerges,
        PrefixSpace,
        SpecialStripped,
        IgnoresUnknownBytes,
        SurrogateDecoding,
        RestartsAtLines,
        KeepsTextOnSelf,
        NegativeIds,
        SharedCache,
        ReturnsTuple,
    ],
)
def test_wrong_tokenizers(answer):
    reject(answer, "BPETokenizer")


# Named mistakes ---------------------------------------------------------------------


def named(answer, name):
    return evaluate(answer, name).fault


def merge_slices(as_slice, as_pair):
    """Compares a slice with the pair, each as it is converted here."""

    def merge_pair(ids, pair, new_id):
        merged, i = [], 0
        while i < len(ids):
            both = as_slice(ids[i : i + 2]) == as_pair(pair)
            merged.append(new_id if both else ids[i])
            i += 2 if both else 1
        return merged

    return merge_pair


def test_a_list_is_no_tuple():
    as_it_is = merge_slices(lambda ids: ids, lambda pair: pair)
    assert named(as_it_is, "merge_pair") == "list_against_tuple"
    listed = merge_slices(lambda ids: ids, list)
    assert named(listed, "merge_pair") == "tuple_against_list"
    accept(merge_slices(tuple, tuple), "merge_pair")


def train_on_ids(text, vocab_size, special_tokens=(), key=None, sort=None, room=None):
    """Training on ids, with the habits that learners bring."""
    kept = sorted(special_tokens, key=len, reverse=True)
    pieces = regex.split("|".join(map(regex.escape, kept)), text) if kept else [text]
    words = Counter(
        tuple(word.encode()) for piece in pieces for word in regex.findall(GPT2, piece)
    )
    vocab, merges = {i: bytes([i]) for i in range(256)}, []
    if vocab_size < 256 + len(special_tokens):
        raise ValueError(f"{vocab_size} < {256 + len(special_tokens)}")
    for _ in range(room or vocab_size - 256 - len(special_tokens)):
        counts = reference.pair_counts(words)
        if not counts:
            break
        best = max(counts, key=lambda p: key(counts[p], p, vocab))
        new = len(vocab)
        merges.append((vocab[best[0]], vocab[best[1]]))
        vocab[new] = vocab[best[0]] + vocab[best[1]]
        words = {
            tuple(reference.merge_pair(ids, best, new)): n for ids, n in words.items()
        }
    for token in sort(special_tokens) if sort else special_tokens:
        vocab[len(vocab)] = token.encode()
    return vocab, merges


def by_bytes(n, pair, vocab):
    return n, vocab[pair[0]], vocab[pair[1]]


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ("ids_on_ties", {"key": lambda n, pair, vocab: (n, pair)}),
        (
            "longest_on_ties",
            {
                "key": lambda n, pair, v: (
                    n,
                    len(v[pair[0]] + v[pair[1]]),
                    v[pair[0]],
                    v[pair[1]],
                )
            },
        ),
        (
            "right_part_first",
            {"key": lambda n, pair, v: (n, v[pair[1]], v[pair[0]])},
        ),
        ("special_sorted", {"sort": lambda s: sorted(s, key=len, reverse=True)}),
    ],
)
def test_training_mistakes_on_ids_are_named(fault, options):
    def answer(text, vocab_size, special_tokens=()):
        return train_on_ids(
            text, vocab_size, special_tokens, **{"key": by_bytes, **options}
        )

    assert named(answer, "train_bpe") == fault


def test_training_on_ids_is_right():
    def answer(text, vocab_size, special_tokens=()):
        return train_on_ids(text, vocab_size, special_tokens, key=by_bytes)

    accept(answer, "train_bpe")


def test_special_tokens_not_counted_are_noticed_before_the_long_text():
    report = evaluate(trainer(room=lambda size, special: size - 256), "train_bpe")
    assert report.fault == "special_not_counted"
    assert "special tokens cut the text" in report.lines[0]


class Leftmost(reference.BPETokenizer):
    """Merges in words by a choice of its own, with `merge_pair`."""

    def __init__(self, vocab, merges, special_tokens=(), pattern=GPT2):
        super().__init__(vocab, merges, special_tokens, pattern)
        self.pattern, self.special = pattern, sorted(special_tokens, key=len)[::-1]
        self.pairs = {tuple(pair): rank for rank, pair in enumerate(merges)}
        self.of = {token: i for i, token in vocab.items()}

    def choose(self, parts):
        return next((p for p in pairwise(parts) if p in self.pairs), None)

    def encode(self, text):
        cut = "|".join(map(regex.escape, self.special)) or "(?!)"
        ids = []
        for piece in regex.split(f"({cut})", text):
            if piece in self.special:
                ids.append(self.of[piece.encode()])
                continue
            for word in regex.findall(self.pattern, piece):
                parts = [bytes([b]) for b in word.encode() if bytes([b]) in self.of]
                while (pair := self.choose(parts)) is not None:
                    parts = reference.merge_pair(parts, pair, pair[0] + pair[1])
                ids += [self.of[part] for part in parts]
        return ids


class JoinedBytes(Leftmost):
    def choose(self, parts):
        pairs = [p for p in pairwise(parts) if p[0] + p[1] in self.of]
        return min(pairs, key=lambda p: self.of[p[0] + p[1]], default=None)


class EveryTokenSpecial(exercises._Tokenizer):
    """Takes a stretch of text that is a token for a special one."""

    def parts(self, text):
        if not self.special:
            return super().parts(text)
        cut = "|".join(map(regex.escape, sorted(self.special, key=len)[::-1]))
        return [
            part
            for piece in regex.split(f"({cut})", text)
            for part in (
                [(piece, True)]
                if piece.encode() in self.ids
                else [(word, False) for word in self.words(piece)]
            )
        ]


class KeysAreTensors(exercises._Tokenizer):
    def numbers(self, ids):
        return ids


class NegativeEnd(reference.BPETokenizer):
    """Holds back as many characters as the longest special token, less one."""

    def __init__(self, vocab, merges, special_tokens=(), pattern=GPT2):
        super().__init__(vocab, merges, special_tokens, pattern)
        self.marks, self.words = list(special_tokens), pattern
        self.longest = max(map(len, special_tokens), default=1)

    limited = staticmethod(lambda text, limit: (text[:limit], limit))

    def encode_iterable(self, chunks):
        text = ""
        for chunk in chunks:
            text += chunk
            while True:
                found = [(text.find(s), -len(s)) for s in self.marks if s in text]
                at, end = min(found, default=(None, None))
                end = None if at is None else at - end
                if end is None or end + self.longest > len(text):
                    break
                yield from self.encode(text[:end])
                text = text[end:]
            limit = len(text) - self.longest + 1 if at is None else at
            seen, limit = self.limited(text, limit)
            done = 0
            for word in regex.findall(self.words, seen)[:-2]:
                if 0 <= limit < done + len(word):
                    break
                yield from self.encode(word)
                done += len(word)
            text = text[done:]
        yield from self.encode(text)


class LimitAtZero(NegativeEnd):
    limited = staticmethod(lambda text, limit: (text[: max(limit, 0)], max(limit, 0)))


class WordsReachSpecial(NegativeEnd):
    limited = staticmethod(lambda text, limit: (text, max(limit, 0)))


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        ("leftmost_pair_everywhere", Leftmost),
        ("joined_bytes", JoinedBytes),
        ("rank_from_id", RankOfResult),
        ("every_token_special", EveryTokenSpecial),
        ("tensor_ids", KeysAreTensors),
        ("negative_end", NegativeEnd),
        ("words_reach_special", WordsReachSpecial),
    ],
)
def test_tokenizer_mistakes_are_named(fault, answer):
    assert named(answer, "BPETokenizer") == fault


def test_searching_for_special_tokens_is_right():
    accept(LimitAtZero, "BPETokenizer")
