"""Lesson 07: the reference against `tokenizers`; other right and wrong answers."""

import json
import random
import time
from collections import Counter
from itertools import pairwise

import pytest
import regex
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, trainers

from solutions.tokenizer import BPETokenizer, merge_pair, pair_counts, train_bpe
from tests.answers import fails, passes
from utils import real_model, texts
from utils.exercises.tokenizer import GPT2, slow_encode, slow_merge, slow_train
from utils.real_model import gguf_file
from utils.real_model.gguf_file import byte_letters

END, PAD = "<|endoftext|>", "<|pad|>"
SCRIPTS = (
    "the quick fox can't they'll I'm he's we've you're 'll 's café naïve Größe ½ ٣٤ ⅷ "
    "сегодня погода ο καιρός الطقس جميل आज मौसम 今天天气很好孩子们 今日は 오늘은 𝔘 "
    "f(x): x**2 != {} # __init__(*args) => {}; 12 3.14 1,000 0x1F e\u0301 ﬁ ﷽ \u200d "
    "\ufeff Å 🙂 👩‍👩‍👧 👋🏽 🇩🇪 ✈️"
)
SPACES = " ", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u3000"


def mixed_lines(n, special=(), seed=0):
    """Lines of words from several scripts, white space, special tokens, odd signs."""
    draw, words, lines = random.Random(seed), SCRIPTS.split(" "), []
    for _ in range(n):
        parts = []
        for _ in range(draw.randint(1, 14)):
            odd = chr(draw.choice([draw.randrange(0x250), 0x1F600, 0x4E00]))
            choices = [draw.choice(special or words), odd, draw.choice(words)]
            parts += draw.choices(choices, (1, 1, 10)) + draw.choices(SPACES)
        lines.append("".join(parts))
    return lines


# The reference against the package ----------------------------------------------------


LETTERS = byte_letters()
BYTES = {letter: byte for byte, letter in LETTERS.items()}


def to_letters(token):
    return "".join(LETTERS[byte] for byte in token)


def to_bytes(letters):
    return bytes(BYTES[letter] for letter in letters)


def same_as_package(vocab, merges, special, lines, split_digits=False, **options):
    names = {t.encode(): t for t in special}
    letters = {names.get(token, to_letters(token)): i for i, token in vocab.items()}
    theirs = tokenizers.Tokenizer(
        models.BPE(letters, [(to_letters(a), to_letters(b)) for a, b in merges])
    )
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    theirs.pre_tokenizer = pre_tokenizers.Sequence([*digits, level])
    theirs.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    ours = BPETokenizer(vocab, merges, special, **options)
    complete = {bytes([i]) for i in range(256)} <= set(vocab.values())
    whole = "".join(lines)
    for line in [*lines, whole]:
        ids = ours.encode(line)
        assert ids == theirs.encode(line, add_special_tokens=False).ids, repr(line)
        assert ours.decode(ids) == line or not complete
    for chunks in (lines, (whole[i : i + 5] for i in range(0, len(whole), 5))):
        assert list(ours.encode_iterable(chunks)) == ids


def test_own_merges_encode_as_the_package_does():
    text = "\n".join(mixed_lines(600)) + texts.english(60_000)
    vocab, merges = train_bpe(text, 1500, [END, PAD])
    lines = mixed_lines(1000, [END, PAD], seed=1)
    same_as_package(vocab, merges, [END, PAD], lines)
    moved = {(7 * i + 3) % len(vocab): token for i, token in vocab.items()}
    same_as_package(moved, merges, [END, PAD], lines[:200])
    assert slow_encode("".join(lines[:50]), vocab, merges, [END, PAD]) == BPETokenizer(
        vocab, merges, [END, PAD]
    ).encode("".join(lines[:50]))


def trained_by_package(text, size, special):
    theirs = tokenizers.Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=sorted(BYTES),
    )
    theirs.train_from_iterator([text], trainer)
    model = json.loads(theirs.to_str())["model"]
    vocab = {
        i: token.encode() if token in special else to_bytes(token)
        for token, i in model["vocab"].items()
    }
    return vocab, [(to_bytes(a), to_bytes(b)) for a, b in model["merges"]]


def test_merges_of_the_package_encode_as_it_does():
    """Special tokens first, and bytes in another order, as in most models."""
    text = "\n".join(mixed_lines(900, seed=2)) + texts.code(60_000)
    vocab, merges = trained_by_package(text, 2000, [END, PAD])
    assert vocab[0] == END.encode() and vocab[2] != b"\0"
    same_as_package(vocab, merges, [END, PAD], mixed_lines(1000, [END, PAD], seed=3))


def test_training_agrees_with_the_package_up_to_ties():
    """The same counts at each merge: the package breaks ties by id."""
    text = texts.english(100_000)
    ours, theirs = train_bpe(text, 600)[1], trained_by_package(text, 600, [])[1]
    assert set(ours[:30]) == set(theirs[:30])
    assert len(set(ours) & set(theirs)) > 0.95 * len(ours)
    assert train_bpe(text[:9000], 400, [END]) == slow_train(text[:9000], 400, [END], [])


def test_real_model_encodes_as_the_package_does():
    try:
        model = gguf_file.read(real_model.model_file())
    except real_model.ModelProblem as problem:
        pytest.skip(str(problem))
    kit = model.vocab, model.merges, model.special_tokens
    lines = mixed_lines(1500, model.special_tokens, seed=4)
    same_as_package(*kit, lines, split_digits=True, pattern=real_model.PATTERN)


def test_any_unicode_text_comes_back():
    tokenizer = BPETokenizer(*train_bpe(texts.english(30_000), 400, [END]), [END])
    every = list(map(chr, [*range(0xD800), *range(0xE000, 0x110000, 7)]))
    for _ in range(3):
        assert tokenizer.decode(tokenizer.encode("".join(every))) == "".join(every)
        random.Random(5).shuffle(every)


def test_training_and_encoding_are_practical():
    started = time.process_time()
    assert len(train_bpe(texts.english(130_000), 500, [END])[0]) == 500
    assert time.process_time() - started < 1.5
    vocab, _ = train_bpe(texts.code(5_000_000), 1000, [END])
    tokenizer = BPETokenizer(*train_bpe("a" * 4000, 270))
    assert tokenizer.decode(tokenizer.encode("a" * 100_000)) == "a" * 100_000
    assert len(vocab) == 1000 and time.process_time() - started < 60


# Right answers in another form --------------------------------------------------------


def merge_by_flags(ids, pair, new_id, as_slice=tuple, as_pair=tuple):
    out, skip = [], False
    for k, i in enumerate(ids):
        both = not skip and as_slice(ids[k : k + 2]) == as_pair(pair)
        if not skip:
            out.append(new_id if both else i)
        skip = both
    return out


def by_bytes(n, pair, vocab):
    return n, vocab[pair[0]], vocab[pair[1]]


def train_by_ids(text, vocab_size, special_tokens=(), key=by_bytes, pattern=GPT2):
    """Recounts at every merge, as most learners do."""
    room = vocab_size - 256 - len(special_tokens)
    if room < 0:
        raise ValueError(f"{vocab_size} is less than {256 + len(special_tokens)}")
    kept = sorted(special_tokens, key=len, reverse=True)
    pieces = regex.split("|".join(map(regex.escape, kept)), text) if kept else [text]
    found = (word for piece in pieces for word in regex.findall(pattern, piece))
    words = Counter(tuple(word.encode()) for word in found)
    vocab, merges = {i: bytes([i]) for i in range(256)}, []
    while len(merges) < room and (counts := pair_counts(words)):
        a, b = max(counts, key=lambda pair: key(counts[pair], pair, vocab))
        merges.append((vocab[a], vocab[b]))
        words = {tuple(merge_pair(w, (a, b), len(vocab))): n for w, n in words.items()}
        vocab[len(vocab)] = vocab[a] + vocab[b]
    return vocab | {len(vocab) + i: t.encode() for i, t in enumerate(special_tokens)}, (
        merges
    )


class Slow(BPETokenizer):
    """The oracle as a class, to change single things of."""

    def __init__(self, vocab, merges, special_tokens=(), pattern=GPT2):
        super().__init__(vocab, merges, special_tokens, pattern)
        self.given = vocab, merges, special_tokens, pattern

    def encode(self, text):
        return slow_encode(text, *self.given)


class SearchesSpecial(BPETokenizer):
    """Gives away whole special tokens, and words in front of where one may begin."""

    def settled(self, text, limit):
        return self.pattern.findall(text[: max(limit, 0)])[:-2]

    def encode_iterable(self, chunks):
        text = ""
        for chunk in chunks:
            text += chunk
            while (m := self.special.search(text)) and m.end() + self.longest <= len(
                text
            ):
                yield from self.encode(text[: m.end()])
                text = text[m.end() :]
            limit = m.start() if m else len(text) - self.longest + 1
            for word in self.settled(text, limit):
                yield from self.encode(word)
                text = text[len(word) :]
        yield from self.encode(text)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("merge_pair", merge_by_flags),
        ("train_bpe", train_by_ids),
        ("BPETokenizer", Slow),
        ("BPETokenizer", SearchesSpecial),
    ],
)
def test_other_right_answers_pass(name, answer):
    passes(answer, name)


# Wrong answers that no fault lists, or that one names ---------------------------------


def changed(f, **options):
    return lambda *args, **named: f(*args, **named, **options)


def overlapping_at_once(ids, pair, new_id):
    starts = [i for i, each in enumerate(pairwise(ids)) if each == pair]
    merged = [new_id if i in starts else each for i, each in enumerate(ids)]
    return [m for i, m in enumerate(merged) if i in starts or i - 1 not in starts]


def merge_until_stable(ids, pair, new_id):
    while (merged := slow_merge(ids, pair, new_id)) != list(ids):
        ids = merged
    return merged


class OnePass(BPETokenizer):
    def encode_word(self, word):
        ids = [self.ids[bytes([b])] for b in word.encode() if bytes([b]) in self.ids]
        for pair, (_, new_id) in self.merges.items():
            ids = slow_merge(ids, pair, new_id)
        return ids


class LineByLine(Slow):
    def encode_iterable(self, chunks):
        for line in "".join(chunks).splitlines(keepends=True):
            yield from self.encode(line)


class SharedCache(Slow):
    cache = {}  # noqa: RUF012

    def encode(self, text):
        return self.cache.setdefault(text, super().encode(text))


NO_SIGNS = GPT2.replace(r"[^\s\p{L}\p{N}]", r"[^\s\w]")  # _ belongs to \w
NO_LOOKAHEAD = GPT2.replace(r"|\s+(?!\S)", "")


@pytest.mark.parametrize(
    ("name", "answer", "fault"),
    [
        ("pair_counts", lambda words: {**pair_counts(words), (0, 0): 0}, None),
        ("merge_pair", overlapping_at_once, "overlapping"),
        ("merge_pair", merge_until_stable, "merges_its_own"),
        ("merge_pair", changed(merge_by_flags, as_slice=lambda ids: ids,
                               as_pair=lambda pair: pair), "list_against_tuple"),
        ("merge_pair", changed(merge_by_flags, as_slice=lambda ids: ids, as_pair=list),
         "tuple_against_list"),
        ("train_bpe", changed(train_by_ids, pattern=NO_SIGNS), None),
        ("train_bpe", changed(train_by_ids, pattern=NO_LOOKAHEAD), None),
        ("train_bpe", changed(train_by_ids, key=lambda n, pair, vocab: (n, pair)),
         "ids_on_ties"),
        ("train_bpe", changed(train_by_ids, key=lambda n, pair, vocab: (
            n, vocab[pair[1]], vocab[pair[0]])), "right_part_first"),
        # Merges [(ab, c), (a, b)] make abc of abc, not ab and c.
        ("BPETokenizer", OnePass, "one_pass"),
        ("BPETokenizer", LineByLine, None),
        ("BPETokenizer", SharedCache, None),
    ],
)  # fmt: skip
def test_wrong_answers_fail(name, answer, fault):
    assert fails(answer, name).fault in (fault, None if fault else "state")
