"""Train your own model on a text: `python -m utils.train FILE.txt`.

Lesson 09's loop with what a longer run needs: micro-batches whose gradients add up,
bfloat16, a file to go on from, and samples on the way.
"""

import argparse
import math
import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from utils import texts
from utils.display import any_encoding
from utils.errors import CourseError
from utils.progress import progress

SIZES = {  # d_model, n_layers, n_heads, n_kv_heads, d_head, d_ff
    "tiny": (64, 2, 2, 1, 32, 192),
    "small": (128, 4, 4, 2, 32, 352),
    "medium": (256, 6, 8, 4, 32, 704),
}


def options(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m utils.train",
        description="Train a decoder on a text. Stopped, the same command goes on.",
    )
    parser.add_argument("file", nargs="?", type=Path, help="UTF-8; or built-in prose")
    parser.add_argument("--out", type=Path, default=Path("run"), help="a folder")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--vocabulary", type=int, default=512, help="tokens of its own")
    parser.add_argument("--length", type=int, default=128, help="tokens of a piece")
    parser.add_argument("--batch", type=int, default=16, help="pieces at once")
    parser.add_argument("--accumulate", type=int, default=1, help="batches a step")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--peak", type=float, default=0.003, help="learning rate")
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16"), default="float32"
    )
    parser.add_argument("--device", default=None, help="cuda if there is one, or cpu")
    parser.add_argument("--every", type=int, default=200, help="steps between saves")
    parser.add_argument("--prompt", default="The ", help="what a sample begins with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--parts",
        choices=("mine", "reference"),
        default=os.environ.get("COURSE_PARTS", "mine"),
        help="whose parts train and are trained (COURSE_PARTS, or mine)",
    )
    chosen = parser.parse_args(arguments)
    for name in ("length", "batch", "accumulate", "steps", "every"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if chosen.vocabulary < 257:
        parser.error("--vocabulary must be at least 257: the bytes and the end of text")
    return chosen


@dataclass
class Run:
    """What is trained, on what, and how far it is."""

    model: object
    optimizer: object
    tokenizer: object
    generator: object
    train: object  # token ids (N,)
    test: object
    test_bytes: int
    step: int = 0
    test_loss: float = math.nan

    @property
    def bits_per_byte(self) -> float:
        """Of the held-out text: independent of how the tokenizer cuts it."""
        return self.test_loss / math.log(2) * len(self.test) / self.test_bytes


def read(file: Path | None) -> str:
    """The text of a file, or prose that comes with Python, or a `CourseError`."""
    if file is None:
        return texts.english(1_000_000)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CourseError(
            f"{file} is no UTF-8: byte {error.start:,} begins no character. Save it as "
            "UTF-8 in your editor."
        ) from None
    except OSError as error:
        raise CourseError(f"{file} cannot be read: {error.strerror}.") from None
    if len(text) < 2_000:
        raise CourseError(
            f"{file} holds {len(text):,} characters. Below 2,000 there is nothing to "
            "train on; some 100,000 begin to be interesting."
        )
    return text


def prepare(chosen, text: str) -> Run:
    """A fresh model and its data, on the device: nine tenths to train, one to test."""
    import torch

    from my_transformer import (
        AdamW,
        BPETokenizer,
        Transformer,
        TransformerConfig,
        train_bpe,
    )

    cut = len(text) * 9 // 10
    learned = text[:cut][:200_000]  # more hardly changes 512 tokens
    vocab, merges = train_bpe(learned, chosen.vocabulary, ("<|end|>",))
    tokenizer = BPETokenizer(vocab, merges, ("<|end|>",))
    train, test = (torch.tensor(tokenizer.encode(t)) for t in (text[:cut], text[cut:]))
    if min(len(train), len(test)) <= chosen.length:
        raise CourseError(
            f"The held-out tenth of the text has {len(test):,} tokens, and a piece "
            f"{chosen.length + 1}. Take a longer text, or a smaller --length."
        )
    sizes = SIZES[chosen.size]
    config = TransformerConfig(len(vocab), *sizes, max_len=2 * chosen.length)
    torch.manual_seed(chosen.seed)
    model = Transformer(config)
    for name, p in model.named_parameters():
        if p.ndim > 1:
            deep = name.endswith(("w_o.weight", "w_2.weight"))
            scale = (2 * config.n_layers) ** -0.5 if deep else 1.0
            torch.nn.init.normal_(p, std=scale * p.shape[1] ** -0.5)
    model = model.to(chosen.device)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return Run(
        model,
        AdamW(groups, lr=chosen.peak, betas=(0.9, 0.95), weight_decay=0.1),
        tokenizer,
        torch.Generator().manual_seed(chosen.seed),
        train,
        test,
        len(text[cut:].encode()),
    )


def batch_loss(run: Run, chosen, data, generator):
    """The loss of one batch, computed in the chosen precision, averaged in float32."""
    import torch

    from my_transformer import cross_entropy, get_batch

    pieces = get_batch(data, chosen.batch, chosen.length, generator)
    inputs, targets = (ids.to(chosen.device) for ids in pieces)
    kind = torch.device(chosen.device).type
    lower = chosen.precision == "bfloat16"
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=lower):
        logits = run.model(inputs)
    return cross_entropy(logits.float(), targets)


def take_step(run: Run, chosen) -> None:
    """One update, from the mean gradient of `accumulate` batches."""
    from my_transformer import clip_gradients, learning_rate

    run.step += 1
    warm_up = max(1, min(200, chosen.steps // 10))
    rate = learning_rate(run.step, chosen.peak, chosen.peak / 10, warm_up, chosen.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.zero_grad()
    for _ in range(chosen.accumulate):
        loss = batch_loss(run, chosen, run.train, run.generator) / chosen.accumulate
        loss.backward()  # adds to what earlier batches left
    clip_gradients(run.model.parameters(), 1.0)
    run.optimizer.step()


def measure(run: Run, chosen, n_batches=8) -> None:
    """The loss on held-out text, the same pieces each time."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        losses = [
            batch_loss(run, chosen, run.test, generator).item()
            for _ in range(n_batches)
        ]
    run.test_loss = sum(losses) / n_batches


def sample(run: Run, chosen, n_tokens=80) -> str:
    """How the model goes on from the prompt."""
    import torch

    from my_transformer import generate

    ids = torch.tensor([run.tokenizer.encode(chosen.prompt)], device=chosen.device)
    n_tokens = min(n_tokens, run.model.config.max_len - ids.shape[1])
    if n_tokens < 1:
        raise CourseError(
            "The --prompt leaves no room for a sample. Take a shorter one."
        )
    with torch.no_grad():
        ids = generate(run.model, ids, n_tokens, temperature=0.8, top_p=0.95)
    return run.tokenizer.decode(ids[0].tolist())


# Saving and going on ------------------------------------------------------------------


def identity(chosen, text: str) -> dict:
    """What must be the same for a run to go on."""
    kept = ("size", "vocabulary", "length", "batch", "accumulate", "steps", "peak")
    about = {name: getattr(chosen, name) for name in (*kept, "precision", "seed")}
    return about | {"text": sha256(text.encode()).hexdigest()}


def save(run: Run, file: Path, about: dict) -> None:
    """Beside the file first, so that a full disk leaves the last one as it is."""
    import torch

    state = {
        "about": about,
        "step": run.step,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "generator": run.generator.get_state(),
    }
    beside = file.with_suffix(".part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, beside)
        beside.replace(file)
    except (OSError, RuntimeError) as error:
        beside.unlink(missing_ok=True)
        raise CourseError(
            f"{file} cannot be written ({error}). What was saved before is still "
            "there; make room, or give another --out, and start the same command again."
        ) from None


def go_on(run: Run, file: Path, about: dict) -> None:
    """Take up a saved run where it stopped; refuse one of other settings."""
    import torch

    try:
        state = torch.load(file, weights_only=True, map_location="cpu")
        was = state["about"]
    except Exception as error:
        raise CourseError(
            f"{file} is no saved run, or damaged ({type(error).__name__}). Move it "
            "away, or give another --out."
        ) from None
    differ = [name for name in about if was.get(name) != about[name]]
    if differ:
        named = ", ".join(
            "another text" if n == "text" else f"--{n} {was.get(n)}" for n in differ
        )
        raise CourseError(
            f"{file} is a run with {named}. Give the same again to go on with it, or "
            "another --out to begin anew."
        )
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.generator.set_state(state["generator"])
    run.step = state["step"]


@contextmanager
def whole_steps():
    """Ctrl-C is noted in the list that this gives, so that no step is half taken."""
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def train(run: Run, chosen, file: Path, about: dict, say=print) -> None:
    """All steps that are left; saves and shows a sample every so often."""
    started, first = time.perf_counter(), run.step
    with whole_steps() as stopped:
        for _ in progress(range(run.step, chosen.steps), "training"):
            take_step(run, chosen)
            if stopped:
                save(run, file, about)
                say(
                    f"\nStopped and saved at step {run.step:,}. The same command goes "
                    "on."
                )
                return
            if run.step % chosen.every == 0 or run.step == chosen.steps:
                measure(run, chosen)
                save(run, file, about)
                pace = (time.perf_counter() - started) / (run.step - first)
                say(
                    f"step {run.step:,} of {chosen.steps:,}: held-out loss "
                    f"{run.test_loss:.3f}, {run.bits_per_byte:.3f} bits per byte, "
                    f"{pace:.2f} s a step\n{sample(run, chosen)}\n"
                )


def main(arguments=None) -> int:
    any_encoding()
    chosen = options(arguments)
    os.environ["COURSE_PARTS"] = chosen.parts
    try:
        import torch

        from my_transformer import AdamW, BPETokenizer, Transformer
        from utils.parts import whose

        chosen.device = chosen.device or (
            "cuda" if torch.cuda.is_available() else "cpu"
        )
        text = read(chosen.file)
        print(", ".join(whose(part) for part in (Transformer, AdamW, BPETokenizer)))
        run = prepare(chosen, text)
        file, about = chosen.out / "checkpoint.pt", identity(chosen, text)
        if file.is_file():
            go_on(run, file, about)
        n = sum(p.numel() for p in run.model.parameters())
        print(
            f"{len(text):,} characters, {len(run.train):,} tokens to train on; "
            f"{n:,} parameters on {chosen.device}; step {run.step:,} of "
            f"{chosen.steps:,}"
        )
        if run.step == chosen.steps:
            measure(run, chosen)
            print(f"Done before: {run.bits_per_byte:.3f} bits per byte.")
            print(sample(run, chosen))
        train(run, chosen, file, about)
    except (CourseError, ImportError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
