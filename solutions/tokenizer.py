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
    ### BEGIN SOLUTION
    n_merges = vocab_size - 256 - len(special_tokens)
    if n_merges < 0:
        raise ValueError(
            f"vocab_size is {vocab_size}; 256 bytes and {len(special_tokens)} special "
            f"tokens need at least {256 + len(special_tokens)}"
        )
    longest_first = sorted(special_tokens, key=len, reverse=True)
    cut = "|".join(map(regex.escape, longest_first)) or "(?!)"  # (?!) is found nowhere
    occurrences = Counter(
        word
        for piece in regex.split(cut, text)
        for word in regex.findall(pattern, piece)
    )
    words = [list(word.encode()) for word in occurrences]  # one list of ids a word
    times = list(occurrences.values())
    counts = pair_counts({tuple(ids): n for ids, n in zip(words, times, strict=True)})
    found_in = defaultdict(set)  # pair → the numbers of the words that may hold it
    for w, ids in enumerate(words):
        for pair in pairwise(ids):
            found_in[pair].add(w)

    vocab, merges = {i: bytes([i]) for i in range(256)}, []
    while len(merges) < n_merges and counts:
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
        vocab: dict from id to bytes, in any order of ids; all 256 bytes are in it.
        merges: list of pairs of bytes; the earlier one comes first in encoding.
        special_tokens: strings that become one id each wherever they stand.
        pattern: how text is cut into words, for the package `regex`.

    Raises:
        ValueError: a special token is not in `vocab`.
    """

    def __init__(
        self,
        vocab,
        merges,
        special_tokens=(),
        pattern=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
        r"|\s+(?!\S)|\s+",
    ):
        ### BEGIN SOLUTION
        self.vocab = dict(vocab)
        ids = {token: i for i, token in self.vocab.items()}
        self.byte_ids = [ids.get(bytes([b])) for b in range(256)]
        self.merges = {}  # pair of ids → (rank, id of both)
        for rank, (left, right) in enumerate(merges):
            pair = ids[left], ids[right]
            self.merges.setdefault(pair, (rank, ids[left + right]))
        for token in special_tokens:
            if token.encode() not in ids:
                raise ValueError(
                    f"the special token {token!r} is not in the vocabulary"
                )
        self.special_ids = {token: ids[token.encode()] for token in special_tokens}
        longest_first = sorted(special_tokens, key=len, reverse=True)
        cut = "|".join(map(regex.escape, longest_first)) or "(?!)"
        self.special = regex.compile(f"({cut})")
        self.longest = len(longest_first[0]) if longest_first else 1
        self.pattern = regex.compile(pattern)
        self._ids = lru_cache(maxsize=2**16)(self._encode_part)
        ### END SOLUTION

    def encode(self, text):
        """The ids of a text: in each word the pair of lowest rank is merged first.

        Args:
            text: str, of any length, in any script.

        Returns:
            List of ids. Special tokens become their own ids.

        Sennrich et al. (2016); Radford et al. (2019).
        """
        ### BEGIN SOLUTION
        return [i for part in self._parts(text) for i in self._ids(part)]

    def _parts(self, text):
        """Words and special tokens, in their order; joined they are the text."""
        parts = []
        for piece in self.special.split(text):
            special = piece in self.special_ids
            parts += [piece] if special else self.pattern.findall(piece)
        return parts

    def _encode_part(self, part):
        if part in self.special_ids:
            return [self.special_ids[part]]
        ids = [self.byte_ids[byte] for byte in part.encode()]
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
        ### BEGIN SOLUTION
        ids = [int(i) for i in ids]
        for i in ids:
            if i not in self.vocab:
                raise ValueError(f"id {i} is not among the {len(self.vocab)} tokens")
        return b"".join(self.vocab[i] for i in ids).decode("utf-8", errors="replace")
        ### END SOLUTION

    def encode_iterable(self, chunks):
        """The ids of a text that comes in chunks, one by one: `encode` of them joined.

        Args:
            chunks: iterable of str, such as an open file. Chunks end anywhere.

        Yields:
            Ids, as soon as no later chunk can change them. What is kept of the text is
            no longer than a chunk, a few words and a special token.
        """
        ### BEGIN SOLUTION
        text = ""
        for chunk in chunks:
            text += chunk
            parts = self._parts(text)
            ends = [0, *accumulate(map(len, parts))]
            # A special token may begin in the last characters. What follows can
            # lengthen the last word, and the one before it: ' and l become 'll.
            certain = len(text) - self.longest + 1
            settled = max(sum(end <= certain for end in ends[1:]) - 2, 0)
            for part in parts[:settled]:
                yield from self._ids(part)
            text = text[ends[settled] :]
        yield from self.encode(text)
        ### END SOLUTION
