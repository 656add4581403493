"""Talk to the real model: `python -m utils.chat`. Ctrl-C ends it, or an empty line."""

import argparse
import os
import sys

from utils import real_model
from utils.display import any_encoding
from utils.errors import CourseError


def options(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m utils.chat", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--parts",
        choices=("mine", "reference"),
        default=os.environ.get("COURSE_PARTS", "mine"),
        help="whose model, cache, sample and tokenizer run (COURSE_PARTS, or mine)",
    )
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--max-tokens", type=int, default=200, help="of one answer")
    parser.add_argument("--seed", type=int, help="the same answers each time")
    return parser.parse_args(arguments)


def chat(model, tokenizer, sample, chosen, read=input, write=print, **cache) -> None:
    """Read a question, stream the answer, until an empty line or the end of input.

    cache: the parts of lesson 10 by name, as in `answer_pieces`.
    """
    import torch

    settings = {"temperature": chosen.temperature, "top_p": chosen.top_p}
    if chosen.seed is not None:
        settings["generator"] = torch.Generator().manual_seed(chosen.seed)
    turns = []
    while True:
        try:
            question = read("you: ").strip()
        except EOFError:
            return
        if not question:
            return
        turns.append(("user", question))
        prompt = real_model.chat_prompt(turns)
        said = ""
        write("model: ", end="", flush=True)
        for piece in real_model.answer_pieces(
            model, tokenizer, prompt, chosen.max_tokens, sample, **cache, **settings
        ):
            said += piece
            write(piece, end="", flush=True)
        write()
        turns.append(("assistant", said))


def main(arguments=None) -> int:
    any_encoding()
    chosen = options(arguments)
    os.environ["COURSE_PARTS"] = chosen.parts
    try:
        from my_transformer import (
            BPETokenizer,
            KVCache,
            Transformer,
            TransformerConfig,
            cached_forward,
            sample,
        )
        from utils.parts import whose

        run = [whose(part) for part in (Transformer, cached_forward, BPETokenizer)]
        print(f"{', '.join(run)}. Loading …", flush=True)
        model, tokenizer = real_model.load(
            TransformerConfig, Transformer, BPETokenizer, max_len=2_048
        )
        chat(
            *(model, tokenizer, sample, chosen),
            cache_class=KVCache,
            cached_forward=cached_forward,
        )
    except KeyboardInterrupt:
        print()
    except ValueError as error:  # a setting that `sample` refuses
        print(f"\n{error}", file=sys.stderr)
        return 1
    except (CourseError, ImportError, AttributeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
