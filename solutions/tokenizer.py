"""Reference answers of lesson 07."""

from collections import Counter, defaultdict
from functools import lru_cache
from itertools import accumulate, pairwise

import regex


def pair_counts(words):
    """Count how often two ids stand next to each other in a text.

    Args:
        words: dict from a word, a tuple of ids, to how often the word occurs.

    Returns:
        Dict from a pair `(left, right)` of neighbours to how often it occurs in all
        words together. Pairs may overlap: `(7, 7, 7)` holds `(7, 7)` twice. A pair
        never reaches from one word into another.
    """
    ### BEGIN SOLUTION
    counts = Counter()
    for ids, times in words.items():
        for pair in pairwise(ids):
            counts[pair] += times
    return dict(counts)
    ### END SOLUTION


def merge_pair(ids, pair, new_id):
    """Replace each occurrence of a pair by one new id, left to right.

    Args:
        ids: list or tuple of ids; it stays as it is.
        pair: `(left, right)`.
        new_id: the id that stands for both.

    Returns:
        New list. Occurrences do not overlap: of three equal ids in a row the first two
        become one.
    """
    ### BEGIN SOLUTION
    merged, i = [], 0
    while i < len(ids):
        if tuple(ids[i : i + 2]) == tuple(pair):
            merged.append(new_id)
            i += 2
        else:
            merged.append(ids[i])
            i += 1
    return merged
    ### END SOLUTION


def train_bpe(text, vocab_size, special_tokens=()):
    """Learn a byte-level vocabulary: merge the most frequent pair, again and again.

    Args:
        text: the text to learn from.
        vocab_size: how many tokens there are to be, special ones included.
        special_tokens: strings that are a token each. They cut the text, and no merge
            sees them or reaches across them. Where two fit, the longer one counts.

    Returns:
        `(vocab, merges)`. `vocab` is a dict from id to bytes: ids 0 to 255 are the
        single bytes, then come the merges in their order, then the special tokens in
        theirs. `merges` is a list of pairs of bytes. Of several most frequent pairs the
        greater one is merged, compared as a tuple of bytes. Where no pair is left, the
        vocabulary stays smaller than `vocab_size`.

    Raises:
        ValueError: `vocab_size` has no room for the 256 bytes and the special tokens.

    Sennrich et al. (2016), Neural Machine Translation of Rare Words with Subword
    Units; on bytes: Radford et al. (2019), the GPT-2 paper, whose pattern is used.
    """
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    least = 256 + len(special_tokens)
    if vocab_size < least:
        raise ValueError(f"vocab_size is {vocab_size}, and must be at least {least}")
    longest_first = sorted(special_tokens, key=len, reverse=True)
    cut = "|".join(map(regex.escape, longest_first)) or "(?!)"  # (?!) is found nowhere
    occurrences = Counter(
        word
        for piece in regex.split(cut, text)
        for word in regex.findall(pattern, piece)
    )
    ### BEGIN SOLUTION
    words = [list(word.encode()) for word in occurrences]  # one list of ids a word
    times = list(occurrences.values())
    counts = pair_counts({tuple(ids): n for ids, n in zip(words, times, strict=True)})
    found_in = defaultdict(set)  # pair → the numbers of the words that may hold it
    for w, ids in enumerate(words):
        for pair in pairwise(ids):
            found_in[pair].add(w)

    vocab, merges = {i: bytes([i]) for i in range(256)}, []
    while len(vocab) < vocab_size - len(special_tokens) and counts:
        most = max(counts.values())
        best = max(
            (pair for pair, n in counts.items() if n == most),
            key=lambda pair: (vocab[pair[0]], vocab[pair[1]]),
        )
        left, right = vocab[best[0]], vocab[best[1]]
        new_id = len(vocab)
        vocab[new_id] = left + right
        merges.append((left, right))
        for w in found_in.pop(best):
            old, new = words[w], merge_pair(words[w], best, new_id)
            words[w] = new
            for pair in pairwise(old):
                counts[pair] -= times[w]
            for pair in pairwise(new):
                counts[pair] = counts.get(pair, 0) + times[w]
                found_in[pair].add(w)
            for pair in pairwise(old):
                if counts.get(pair) == 0:
                    del counts[pair]
    for token in special_tokens:
        vocab[len(vocab)] = token.encode()
    return vocab, merges
    ### END SOLUTION


class BPETokenizer:
    """Text to ids and back, with a given vocabulary and its merges.

    Args:
        vocab: dict from id to bytes, in any order of ids.
        merges: list of pairs of bytes; the earlier one comes first in encoding.
        special_tokens: strings that become one id each wherever they stand.
        pattern: how text is cut into words, for the package `regex`.

    Raises:
        ValueError: a special token is not in `vocab`.

    Sennrich et al. (2016); Radford et al. (2019).
    """

    def __init__(
        self,
        vocab,
        merges,
        special_tokens=(),
        pattern=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
        r"|\s+(?!\S)|\s+",
    ):
        self.vocab = dict(vocab)
        self.ids = {token: i for i, token in self.vocab.items()}
        for token in special_tokens:
            if token.encode() not in self.ids:
                raise ValueError(
                    f"the special token {token!r} is not in the vocabulary"
                )
        self.special_ids = {token: self.ids[token.encode()] for token in special_tokens}
        longest_first = sorted(special_tokens, key=len, reverse=True)
        cut = "|".join(map(regex.escape, longest_first)) or "(?!)"
        self.special = regex.compile(f"({cut})")
        self.longest = len(longest_first[0]) if longest_first else 1
        self.pattern = regex.compile(pattern)
        self.remembered = lru_cache(maxsize=2**16)(self.encode_word)
        ### BEGIN SOLUTION
        self.merges = {}  # pair of ids → (rank, id of both)
        for rank, (left, right) in enumerate(merges):
            pair = self.ids[left], self.ids[right]
            self.merges.setdefault(pair, (rank, self.ids[left + right]))
        ### END SOLUTION

    def encode_word(self, word):
        """The ids of one word: its bytes, merged by the lowest rank first.

        Args:
            word: str, as the pattern cuts it.

        Returns:
            List of ids. A byte that `vocab` lacks is left out before any merge.
        """
        ### BEGIN SOLUTION
        letters = [bytes([b]) for b in word.encode()]
        ids = [self.ids[letter] for letter in letters if letter in self.ids]
        never = len(self.merges), None
        while len(ids) > 1:
            pair = min(pairwise(ids), key=lambda pair: self.merges.get(pair, never)[0])
            if pair not in self.merges:
                break
            ids = merge_pair(ids, pair, self.merges[pair][1])
        return ids
        ### END SOLUTION

    def decode(self, ids):
        """The text of ids.

        Args:
            ids: list, or tensor of one dimension.

        Returns:
            Str. Bytes that are no valid UTF-8 become U+FFFD; special tokens stand in
            the text as they are.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        ids = [int(i) for i in ids]
        for i in ids:
            if i not in self.vocab:
                raise ValueError(f"id {i} is not among the {len(self.vocab)} tokens")
        ### BEGIN SOLUTION
        return b"".join(self.vocab[i] for i in ids).decode("utf-8", errors="replace")
        ### END SOLUTION

    # What follows is given.

    def parts(self, text):
        """Words and special tokens, in their order; joined they are the text."""
        parts = []
        for piece in self.special.split(text):
            special = piece in self.special_ids
            parts += [piece] if special else self.pattern.findall(piece)
        return parts

    def encode_part(self, part):
        """The ids of a word, or the one of a special token."""
        special = part in self.special_ids
        return [self.special_ids[part]] if special else self.remembered(part)

    def encode(self, text):
        """The ids of a text, as a list; special tokens become their own ids."""
        return [i for part in self.parts(text) for i in self.encode_part(part)]

    def encode_iterable(self, chunks):
        """The ids of `encode` for the chunks joined, without holding all of them."""
        text = ""
        for chunk in chunks:
            text += chunk
            parts = self.parts(text)
            ends = [0, *accumulate(map(len, parts))]
            # A special token may begin in the last characters. What follows can
            # lengthen the last word, and the one before it: ' and l become 'll.
            certain = len(text) - self.longest + 1
            settled = max(sum(end <= certain for end in ends[1:]) - 2, 0)
            for part in parts[:settled]:
                yield from self.encode_part(part)
            text = text[ends[settled] :]
        yield from self.encode(text)
