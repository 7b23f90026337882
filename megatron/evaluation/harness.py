"""A model of this project as lm-evaluation-harness's tasks use one (importing this imports the harness).

Pairs of context and continuation are tokenized, and long texts cut into windows, by the harness's own rules, so that a
number here is the number its Hugging Face models give (`lm_eval.models.huggingface`, as of 0.4). What is computed goes
through the key-value cache in chunks: no tensor is length x length, none is length x vocabulary.

Legend: b batch, s positions, n scored tokens, e hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.console import Console
from rich.progress import track
from torch import Tensor

from kerple.positional import PositionsExceeded
from megatron.evaluation.scoring import LOGIT_POSITIONS
from megatron.evaluation.work import BATCH_TOKENS_CPU, BATCH_TOKENS_GPU, QUERY_CHUNK
from megatron.inference.decoder import as_decoder, inference, model_device
from megatron.inference.generation import generate
from megatron.model.gpt import GPT
from megatron.tokenizer import Tokenizer
from megatron.utils.errors import UserError

NEW_TOKENS = 256  # where a task does not say how many to generate; the harness's own default
MOST_ROWS = 32  # generated at once
SAMPLING = ("temperature", "top_k", "top_p")

Tokens = list[int]


@dataclass
class Lengths:
    """What the requests of one kind asked for. `longest`: tokens given to the model at once; `cut`: how many requests
    lost their beginning, or (rolling) were read in more than one window."""

    requests: int
    longest: int
    max_length: int
    cut: int


class HarnessModel(TemplateLM):
    """`loglikelihood`, `loglikelihood_rolling` and `generate_until` of a model.

    model, tokenizer: what the checkpoint holds.
    max_length: most tokens given to the model at once. As with the harness's models, a longer prompt loses its
        beginning and a longer document is read in windows. None: no prompt is cut, however long, and documents are read
        in windows of at most `rolling_length`.
    report: what was asked for and what was cut, a line per kind of request.

    `lengths` holds the same by kind of request. Raises UserError for what cannot be served: a position that the
    positional method has not, an option of generation that is not known.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        max_length: int | None = None,
        rolling_length: int,
        seed: int = 1234,
        report: Callable[[str], None] = print,
    ):
        super().__init__()
        self._model = model
        self._decoder = as_decoder(model)
        self._device = model_device(model)
        self._tokens = tokenizer
        self._max_length = max_length
        self._rolling_length = max_length or rolling_length
        self._batch_tokens = BATCH_TOKENS_CPU if self._device.type == "cpu" else BATCH_TOKENS_GPU
        self._seed = seed
        self._report = report
        self.lengths: dict[str, Lengths] = {}

    @property
    def eot_token_id(self) -> int:
        return self._tokens.eod

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> Tokens:
        """No token is added: documents were not trained on with a beginning of their own."""
        return self._tokens.tokenize(string)

    # -- probabilities of given texts ---------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Tokens, Tokens]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = []
        needed = [len(context) + len(continuation) - 1 for _, context, continuation in requests]
        limit = self._max_length or max(needed, default=0)
        for (context_text, continuation_text), context, continuation in requests:
            if not continuation:
                raise UserError(
                    f"a task asks for the probability of {continuation_text!r} after {context_text[-40:]!r}, which "
                    "adds no token; its choices must not be empty"
                )
            if len(continuation) > limit:
                raise UserError(f"--max-length {limit}: a continuation alone has {len(continuation)} tokens; give more")
            kept = limit + 1 - len(continuation)
            pairs.append((context[-kept:], continuation))
        self._note("loglikelihood", needed, limit, "lose their beginning")
        return self._score(pairs)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text, after the end-of-document token."""
        texts = self._tokens.tokenize_batch([request.args[0] for request in requests])
        longest = max(map(len, texts), default=0)
        limit = self._max_length or min(self._rolling_length, max(longest, 1))
        self._note("loglikelihood_rolling", list(map(len, texts)), limit, "are read in windows")
        pairs, owners = [], []
        for owner, text in enumerate(texts):
            for window in get_rolling_token_windows(text, self.prefix_token_id, limit, context_len=1):
                pairs.append(make_disjoint_window(window))
                owners.append(owner)
        totals = [0.0] * len(texts)
        for owner, (value, _) in zip(owners, self._score(pairs), strict=True):
            totals[owner] += value
        return totals

    def _score(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Of each pair, the continuation's log-probability in nats, and whether each of its tokens is the likeliest.

        Pairs that read the same tokens (choices of one token, after one context) are computed once; the longest texts
        come first, so that what does not fit is found at once.
        """
        readers: dict[tuple[int, ...], list[int]] = {}
        for index, (context, continuation) in enumerate(pairs):
            readers.setdefault(tuple((context + continuation)[:-1]), []).append(index)
        rows = sorted(readers, key=len, reverse=True)
        values = torch.zeros(len(pairs), dtype=torch.float64)
        greedy = torch.ones(len(pairs), dtype=torch.bool)
        with inference(self._model):
            for batch in _shown(list(_batches(rows, self._batch_tokens)), "log-probabilities"):
                scored = [
                    (row, len(text) - len(pairs[index][1]) + place, target, index)
                    for row, text in enumerate(batch)
                    for index in readers[text]
                    for place, target in enumerate(pairs[index][1])
                ]
                where = torch.tensor(scored).T
                found, likeliest = self._token_scores(batch, *where[:3])
                values.index_add_(0, where[3], found)
                greedy[where[3][~likeliest]] = False
        return list(zip(values.tolist(), greedy.tolist(), strict=True))

    def _token_scores(
        self, texts: Sequence[Sequence[int]], rows: Tensor, positions: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probability (float64 `[n]`) of the target tokens `[n]` after the given rows and positions `[n]` of the
        texts, and whether each is the likeliest. Texts are filled up at their end, which no earlier position sees.
        """
        width = len(texts[0])
        tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], device=self._device)
        cache = self._decoder.new_cache(len(texts), width) if width > QUERY_CHUNK else None
        values, likeliest = torch.empty(len(rows), dtype=torch.float64), torch.empty(len(rows), dtype=torch.bool)
        for begin in range(0, width, QUERY_CHUNK):
            try:
                hidden = self._decoder.hidden(tokens[:, begin : begin + QUERY_CHUNK], cache)
            except PositionsExceeded as exceeded:
                raise self._too_long(exceeded) from exceeded
            inside = ((positions >= begin) & (positions < begin + QUERY_CHUNK)).nonzero()[:, 0]
            for part in inside.split(LOGIT_POSITIONS):
                at = hidden[rows[part].to(self._device), (positions[part] - begin).to(self._device)]
                logits = self._decoder.logits(at).float()
                wanted = targets[part].to(self._device)
                chosen = logits.log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
                values[part] = chosen.double().cpu()
                likeliest[part] = (logits.argmax(-1) == wanted).cpu()
        return values, likeliest

    # -- generated texts ----------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its stop words, the end of the document, or enough tokens."""
        prompts = [
            tokens or [self._tokens.eod]
            for tokens in self._tokens.tokenize_batch([request.args[0] for request in requests])
        ]
        asked = [_Generation.read(request.args[1], self._tokens) for request in requests]
        needed = [len(prompt) + wish.new_tokens for prompt, wish in zip(prompts, asked, strict=True)]
        limit = self._max_length or max(needed, default=0)
        self._note("generate_until", needed, limit, "lose their beginning")
        alike: dict[_Generation, list[int]] = {}
        for index, wish in enumerate(asked):
            if wish.new_tokens >= limit:
                raise UserError(
                    f"--max-length {limit} holds no prompt: the task generates {wish.new_tokens} tokens after it"
                )
            alike.setdefault(wish, []).append(index)
        texts = [""] * len(requests)
        for wish, members in alike.items():
            kept = [prompts[index][-(limit - wish.new_tokens) :] for index in members]
            for index, text in zip(members, self._generate(kept, wish), strict=True):
                texts[index] = text
        return texts

    def _generate(self, prompts: Sequence[Tokens], wish: "_Generation") -> list[str]:
        longest = max(map(len, prompts)) + wish.new_tokens
        generations = generate(
            self._model,
            prompts,
            maximum_tokens=wish.new_tokens,
            seed=self._seed,
            eod=self._tokens.eod,
            vocab_size=self._tokens.vocab_size,
            batch_size=max(1, min(MOST_ROWS, self._batch_tokens // longest)),
            ended=partial(_says, self._tokens, wish.until),
            **dict(wish.sampling),
        )
        texts = []
        for generation in generations:
            if generation.message is not None:
                raise self._too_long(generation.message)
            text = self._tokens.detokenize(generation.tokens)
            texts.append(postprocess_generated_text(text, list(wish.until), think_end_token=None))
        return texts

    # -- lengths ------------------------------------------------------------------------------------------------------

    def _note(self, kind: str, needed: Sequence[int], limit: int, consequence: str) -> None:
        longest = max(needed, default=0)
        cut = sum(length > limit for length in needed)
        self.lengths[kind] = Lengths(len(needed), min(longest, limit), limit, cut)
        effect = f"{cut:,} of them {consequence}" if cut else "nothing is cut"
        self._report(f"{kind}: {len(needed):,} requests of up to {longest:,} tokens; max_length {limit:,}: {effect}")

    def _too_long(self, reason: object) -> UserError:
        return UserError(
            f"the tasks' texts are too long for pos_emb {self._model.settings.pos_emb}: {reason}. With --max-length N "
            "longer prompts lose their beginning, and longer documents are read in windows"
        )


@dataclass(frozen=True)
class _Generation:
    """A task's `generation_kwargs`: when a text ends, and how its tokens are drawn."""

    new_tokens: int
    until: tuple[str, ...]
    sampling: tuple[tuple[str, float], ...]

    @classmethod
    def read(cls, options: dict[str, Any], tokenizer: Tokenizer) -> "_Generation":
        """Raises UserError for an option that is not known here."""
        given = dict(normalize_gen_kwargs(options, NEW_TOKENS))
        until = handle_stop_sequences(given.pop("until", None), eos=tokenizer.detokenize([tokenizer.eod]))
        new_tokens = given.pop("max_gen_toks")
        sampled = given.pop("do_sample")
        sampling = tuple((key, given.pop(key)) for key in SAMPLING if key in given)
        if given:
            raise UserError(
                f"generation_kwargs {', '.join(map(repr, given))}: not known here; a task may set until, max_gen_toks, "
                f"do_sample, {', '.join(SAMPLING)}"
            )
        if sampled and not dict(sampling).get("temperature"):
            raise UserError("generation_kwargs do_sample: needs a temperature above 0")
        return cls(new_tokens, tuple(filter(None, until)), sampling if sampled else ())


def _says(tokenizer: Tokenizer, until: Sequence[str], tokens: Tokens) -> bool:
    """Whether the last of the tokens completes a stop word. A token is at least a byte, so few tokens need be read; two
    more are, as tokenizers may treat the first token of a text differently."""
    reach = 2 + max((len(word.encode()) for word in until), default=0)
    text = tokenizer.detokenize(tokens[-reach:])
    return any(word in text for word in until)


def _batches(rows: Sequence[tuple[int, ...]], batch_tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """Rows, the longest first, in batches of up to so many tokens with their filling."""
    start = 0
    while start < len(rows):
        size = max(1, batch_tokens // len(rows[start]))
        yield list(rows[start : start + size])
        start += size


def _shown(batches: list[Any], name: str) -> Any:
    console = Console(stderr=True)
    return track(batches, name, console=console, transient=True, disable=not console.is_terminal)
