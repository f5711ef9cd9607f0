"""An endless chat.

Talk to a language model for as long as you like, in constant memory: a `SinkCache` keeps the first
tokens and the most recent ones. What has left the window is forgotten. The default model needs no
Hub and is a base model, which continues your text rather than answer it; for a conversation use an
instruction-tuned one, such as `hf:HuggingFaceTB/SmolLM2-135M-Instruct`. An empty line, or the end
of the input, ends the program.
"""

import argparse
import sys
from typing import Any

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

import sinkwise as sw
from sinkwise.hosts.loading.source import source_of

# Every turn goes into the same cache, so only the new words are computed. That needs the tokens of
# one turn at a time. Where the tokenizer has a chat template, we render a conversation with a
# placeholder for the model's answer and keep what follows the placeholder.

ANSWER = "\u00a7answer\u00a7"


def turn(tokenizer: Any, words: str, first: bool, ended: bool) -> list[int]:
    """The tokens of a user's turn; `ended` if the model wrote its own end-of-turn token."""
    if tokenizer.chat_template is None:
        return tokenizer(words + "\n", add_special_tokens=first)["input_ids"]
    messages = [{"role": "user", "content": words}]
    if not first:
        answered = {"role": "assistant", "content": ANSWER}
        messages = [{"role": "user", "content": "?"}, answered, *messages]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if not first:
        text = text.split(ANSWER, 1)[1]
        text = text.lstrip().removeprefix(tokenizer.eos_token) if ended else text
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def ask() -> str:
    """A line from the user; empty at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline().strip()


# `sw.stream` feeds the prompt, then yields one generated token at a time. With a cache it continues
# where the cache is, turn after turn. Sampling uses transformers' own processors.


def answer(model: Any, tokenizer: Any, prompt: list[int], stop: set[int], **options: Any) -> bool:
    """Print the model's answer as it is written; whether it ended by itself."""
    written: list[int] = []
    shown, ended = "", False
    for token in sw.stream(model, prompt, stop=stop, **options):
        ended = token.token in stop
        if token.generated and not ended:
            written.append(token.token)
            text = tokenizer.decode(written)
            if not text.endswith("\ufffd"):  # a character of several tokens is not complete yet
                print(text[len(shown) :], end="", flush=True)
                shown = text
    return ended


def main() -> None:
    """Read turns from the terminal and answer them, all in one cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="pypi:smollm2-135m")
    parser.add_argument("--window-length", type=int, default=1020)
    parser.add_argument("--num-sink-tokens", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=256, help="per answer")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: the most likely token")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    model = sw.load(given.model)
    source = source_of(model)
    if source is None or source.tokenizer is None:
        parser.error(f"{given.model} has no tokenizer; give a language model")
    tokenizer = source.tokenizer
    sample = given.temperature > 0
    warpers = [TemperatureLogitsWarper(given.temperature), TopPLogitsWarper(0.9)] if sample else []
    options = {
        "stop": {token for token in (tokenizer.eos_token_id,) if token is not None},
        "processors": LogitsProcessorList(warpers),
        "sample": sample,
        "generator": torch.Generator().manual_seed(given.seed),
        "max_new_tokens": given.max_new_tokens,
    }
    with sw.SinkCache(model, given.window_length, given.num_sink_tokens) as cache:
        first, ended = True, False
        while words := ask():
            prompt = turn(tokenizer, words, first, ended)
            ended = answer(model, tokenizer, prompt, cache=cache, **options)
            first = False
            print(f"\n[{int(cache.seen)} tokens so far, {int(cache.kept)} in the cache]")


if __name__ == "__main__":
    main()
