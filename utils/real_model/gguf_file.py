"""Reads a GGUF file: sizes, weights by the course's names, and the tokenizer."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from utils.real_model.model_package import ModelProblem

# GPT-2's pattern with every digit by itself, as `tokenizer.ggml.pre` "smollm" asks for.
# Spaces before a digit stay together, because digits are cut off before words are.
PATTERN = (
    r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?=\p{N})|\s+(?!\S)|\s+"
)
IN_BLOCK = {  # name of a tensor in the file → in the course
    "attn_norm": "norm_1",
    "attn_q": "attention.w_q",
    "attn_k": "attention.w_k",
    "attn_v": "attention.w_v",
    "attn_output": "attention.w_o",
    "ffn_norm": "norm_2",
    "ffn_gate": "feed_forward.w_1",
    "ffn_up": "feed_forward.w_3",
    "ffn_down": "feed_forward.w_2",
}
OUTSIDE = {"token_embd": "embedding", "output_norm": "norm", "output": "head"}


@dataclass(frozen=True)
class RealModel:
    """What the file holds, in the course's terms."""

    sizes: dict  # the fields of a TransformerConfig
    tensors: dict  # name in the file → what is stored, for `as_float32`
    vocab: dict  # id → bytes
    merges: list  # pairs of bytes
    special_tokens: list

    @property
    def weights(self) -> dict:
        """Name in the course's `Transformer` → float32 tensor, made anew."""
        return {_course_name(n): as_float32(t) for n, t in self.tensors.items()}


def read(path: Path) -> RealModel:
    """Read the verified file: a Llama-type model with a byte-level BPE tokenizer."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelProblem(
            "the package gguf is not installed. Run "
            f"`{sys.executable} -m pip install -r requirements.txt` in a terminal."
        ) from error
    reader = GGUFReader(path)

    def field(name):
        return reader.get_field(name).contents()

    sizes = {
        "vocab_size": field("llama.vocab_size"),
        "d_model": field("llama.embedding_length"),
        "n_layers": field("llama.block_count"),
        "n_heads": field("llama.attention.head_count"),
        "n_kv_heads": field("llama.attention.head_count_kv"),
        "d_head": field("llama.rope.dimension_count"),
        "d_ff": field("llama.feed_forward_length"),
        "max_len": field("llama.context_length"),
        "rope_base": field("llama.rope.freq_base"),
        "norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "tied": not any(t.name == "output.weight" for t in reader.tensors),
        "style": "llama",
    }
    tensors = {t.name: t for t in reader.tensors}
    tokens = field("tokenizer.ggml.tokens")
    kinds = field("tokenizer.ggml.token_type")
    as_byte = {letter: byte for byte, letter in byte_letters().items()}

    def in_bytes(text):
        return bytes(as_byte[letter] for letter in text)

    special = [t for t, k in zip(tokens, kinds, strict=True) if k == 3]
    named = set(special)
    return RealModel(
        sizes,
        tensors,
        {i: t.encode() if t in named else in_bytes(t) for i, t in enumerate(tokens)},
        [tuple(map(in_bytes, m.split(" "))) for m in field("tokenizer.ggml.merges")],
        special,
    )


def _course_name(name: str) -> str:
    """Where a tensor of the file has its place in the course's `Transformer`."""
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"blocks.{parts[1]}.{IN_BLOCK[parts[2]]}"
    return OUTSIDE[parts[0]]


def as_float32(tensor) -> torch.Tensor:
    """The values of a stored tensor; most of them are kept in about 4 bits each."""
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(values.copy()).float()


def byte_letters() -> dict[int, str]:
    """The letter that GPT-2's tokenizer writes for each byte."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in own}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + i) for i, byte in enumerate(others)}
