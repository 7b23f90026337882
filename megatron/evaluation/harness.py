"""Tasks of lm-evaluation-harness on models of this project. Importing this module imports the harness (`lm_eval`).

Contexts and continuations are tokenized, and long texts are cut into windows, by the harness's own rules. The results
therefore equal those of its Hugging Face models (`lm_eval.models.huggingface`, as of 0.4). Texts are read in chunks
through the KV cache: no tensor is length x length, and none is length x vocabulary.

Legend: b batch, s positions, n scored tokens, e hidden size.
"""

import difflib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from kerple.attention import DEFAULT_MODE, AttentionMode
from kerple.positional import PositionsExceeded
from megatron.evaluation.runner import BATCH_TOKENS_CPU, BATCH_TOKENS_GPU, QUERY_CHUNK
from megatron.evaluation.scoring import LOGIT_POSITIONS
from megatron.inference.decoder import as_decoder, inference, model_device
from megatron.inference.generation import generate
from megatron.model.gpt import GPT
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.utils.environment import check_version
from megatron.utils.errors import UserError
from megatron.utils.progress import Progress

check_version("lm-eval")

ROLLING_WINDOW = 16  # longest window of a document, as a multiple of the training length, unless max_length is set
DEFAULT_NEW_TOKENS = 256  # the harness's own default, for tasks that do not set max_gen_toks
MAX_GENERATION_BATCH = 32
SAMPLING = ("temperature", "top_k", "top_p")
# The harness's results that describe the scores, not the machine.
RESULT_KEYS = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples", "higher_is_better", "configs")

Tokens = list[int]


def evaluate_tasks(
    model: GPT,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    train_length: int,
    num_fewshot: int | None = None,
    limit: int | float | None = None,
    include_path: Sequence[str] = (),
    max_length: int | None = None,
    mode: AttentionMode = DEFAULT_MODE,
    seed: int = 1234,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness.

    Args:
        tasks: names, groups, patterns or YAML files, in any form that the harness accepts.
        train_length: in tokens. Documents are read in windows of up to `ROLLING_WINDOW` training lengths.
        num_fewshot: examples before each question; None for the task's default.
        limit: maximum number of documents per task; below 1, a fraction of them.
        include_path: folders with further task files.
        max_length, mode: see `HarnessModel`.
        report: receives a line about the lengths of each type of request.

    Returns:
        The harness's results (`RESULT_KEYS`), and under `lengths` the lengths of each type of request.

    Raises:
        UserError: a task is unknown or cannot be loaded, a text is longer than the positional method supports, or the
            model does not support the mode.
    """
    with _site_packages_first():
        from lm_eval.evaluator import simple_evaluate

        manager, names = _find_tasks(tasks, include_path)
        harness_model = HarnessModel(
            model,
            tokenizer,
            max_length=max_length,
            rolling_length=ROLLING_WINDOW * train_length,
            mode=mode,
            seed=seed,
            report=report,
        )
        try:
            results = simple_evaluate(
                harness_model,
                tasks=names,
                num_fewshot=num_fewshot,
                limit=limit,
                task_manager=manager,
                log_samples=False,
            )
        except (OSError, ValueError, KeyError, ImportError, AssertionError) as error:
            # Task files and datasets can fail in many ways; only the harness's message says how.
            raise UserError(
                f"eval_tasks {' '.join(tasks)}: {type(error).__name__}: {str(error).strip()}. Without a network "
                "connection only tasks on local files run; see docs/evaluation.md"
            ) from error
    lengths = {request_type: asdict(length) for request_type, length in harness_model.lengths.items()}
    return {"lengths": lengths, **{key: results[key] for key in RESULT_KEYS if key in results}}


def _find_tasks(tasks: Sequence[str], include_path: Sequence[str]) -> tuple[Any, list[str]]:
    """The harness's task manager, and the names of the tasks with patterns resolved."""
    from lm_eval.tasks import TaskManager

    folders = list(include_path)
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(f"--include-path {folder}: not a folder")
    if folders:
        manager = TaskManager(include_path=folders, include_defaults=False)
        if set(tasks) <= set(manager.all_tasks):  # indexing the harness's own 14,000 tasks takes seconds
            return manager, list(tasks)
    manager = TaskManager(include_path=folders or None)
    names: list[str] = []
    for name in tasks:
        matches = [name] if Path(name).is_file() else manager.match_tasks([name])
        if not matches:
            similar = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"; similar names: {', '.join(similar)}" if similar else ""
            raise UserError(
                f"eval_tasks: lm-evaluation-harness has no task {name!r}{hint}; add your own with --include-path DIR"
            )
        names += matches
    return manager, names


@contextmanager
def _site_packages_first() -> Iterator[None]:
    """Move the project's root to the end of sys.path: the harness imports Hugging Face's package `evaluate`, which
    evaluate.py in the root would shadow.
    """
    root, path = Path(__file__).resolve().parents[2], sys.path[:]
    sys.path.sort(key=lambda entry: Path(entry).resolve() == root)
    try:
        yield
    finally:
        sys.path[:] = path


@dataclass
class RequestLengths:
    """Lengths of the requests of one type, in tokens.

    Attributes:
        requests: number of requests.
        longest: largest number of tokens that the model read at once.
        max_length: the limit.
        cut: requests that were truncated on the left or (rolling) read in more than one window.
    """

    requests: int
    longest: int
    max_length: int
    cut: int


class HarnessModel(TemplateLM):
    """A model with the harness's interface: `loglikelihood`, `loglikelihood_rolling` and `generate_until`.

    Args:
        max_length: maximum number of tokens read at once. As with the harness's own models, longer prompts are
            truncated on the left and longer documents are read in windows. With None, prompts are never truncated, and
            documents are read in windows of at most `rolling_length`.
        mode: how the model attends. The length for modes that depend on it is the number of tokens that are read at
            once; in tasks that generate, that of the prompt plus the maximum number of tokens to generate.
        report: receives a line about the lengths of each type of request; `lengths` contains the same numbers.

    Raises UserError if the model does not support the mode. Requests raise UserError if a text is longer than the
    positional method supports, or for an unknown generation option.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        max_length: int | None = None,
        rolling_length: int,
        mode: AttentionMode = DEFAULT_MODE,
        seed: int = 1234,
        report: Callable[[str], None] = print,
    ):
        super().__init__()
        self._model = model
        self._decoder = as_decoder(model)
        reason = self._decoder.unsupported_reason(mode)
        if reason is not None:
            raise UserError(f"the inference mode {reason}")
        self._mode = mode
        self._device = model_device(model)
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._rolling_length = max_length or rolling_length
        self._batch_tokens = BATCH_TOKENS_CPU if self._device.type == "cpu" else BATCH_TOKENS_GPU
        self._seed = seed
        self._report = report
        self.lengths: dict[str, RequestLengths] = {}

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        return self._tokenizer.first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> Tokens:
        """A special token at the start is added only if the model's tokenizer does so, as in training."""
        return self._tokenizer.tokenize(string)

    # -- log-likelihoods ----------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Tokens, Tokens]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Requests are ((context, continuation) as text, context tokens, continuation tokens)."""
        pairs = []
        # The harness moves white space at a context's end to the continuation, which may leave no context.
        contexts = [context or [self.prefix_token_id] for _, context, _ in requests]
        needed = [len(context) + len(request[2]) - 1 for context, request in zip(contexts, requests, strict=True)]
        limit = self._max_length or max(needed, default=0)
        for ((context_text, continuation_text), _, continuation), context in zip(requests, contexts, strict=True):
            if not continuation:
                raise UserError(
                    f"a task asks for the probability of {continuation_text!r} after {context_text[-40:]!r}, but it "
                    "adds no token; the choices of the task must not be empty"
                )
            if len(continuation) > limit:
                raise UserError(
                    f"--max-length {limit}: a continuation without its context has {len(continuation)} tokens; choose "
                    "a larger value"
                )
            pairs.append((context[-(limit + 1 - len(continuation)) :], continuation))
        self._record_lengths("loglikelihood", needed, limit, "truncated on the left")
        return self._score(pairs)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, following the tokenizer's first token or the end-of-document token."""
        texts = self._tokenizer.tokenize_batch([request.args[0] for request in requests])
        if self._tokenizer.bos is not None:
            texts = [text[1:] for text in texts]  # `prefix_token_id` replaces it
        longest = max(map(len, texts), default=0)
        limit = self._max_length or min(self._rolling_length, max(longest, 1))
        self._record_lengths("loglikelihood_rolling", list(map(len, texts)), limit, "read in several windows")
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
        """For each (context, continuation), the log-probability of the continuation in nats, and whether each of its
        tokens is the most probable one.

        Pairs with the same input tokens (one context, choices of one token each) are computed once. The longest inputs
        come first, so that running out of memory shows at once.
        """
        pairs_of_input: dict[tuple[int, ...], list[int]] = {}
        for index, (context, continuation) in enumerate(pairs):
            pairs_of_input.setdefault(tuple((context + continuation)[:-1]), []).append(index)
        inputs = sorted(pairs_of_input, key=len, reverse=True)
        values = torch.zeros(len(pairs), dtype=torch.float64)
        greedy = torch.ones(len(pairs), dtype=torch.bool)
        start = 0
        bar = Progress("log-probabilities", len(inputs), log_interval=None)
        with inference(self._model), bar:
            while start < len(inputs):
                batch = inputs[start : start + max(1, self._batch_tokens // len(inputs[start]))]
                if self._mode.length_dependent or not self._decoder.cached:
                    batch = [text for text in batch if len(text) == len(batch[0])]
                scored = []
                for row, text in enumerate(batch):
                    for index in pairs_of_input[text]:
                        numbered = enumerate(pairs[index][1], len(text) - len(pairs[index][1]))
                        scored += [(row, position, target, index) for position, target in numbered]
                rows, positions, targets, owners = torch.tensor(scored).T
                log_probabilities, is_top = self._token_scores(batch, rows, positions, targets)
                values.index_add_(0, owners, log_probabilities)
                greedy[owners[~is_top]] = False
                start += len(batch)
                bar.update(start)
        return list(zip(values.tolist(), greedy.tolist(), strict=True))

    def _token_scores(
        self, texts: Sequence[Sequence[int]], rows: Tensor, positions: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probability (float64 `[n]`) of the target tokens `[n]` after the given rows and positions `[n]` of the
        texts, and whether each is the most probable token. The first text must be the longest; the others are padded on
        the right, where no earlier position attends. If the mode or the positional method depends on the length, all
        texts must have the same one.
        """
        width = len(texts[0])
        tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], device=self._device)
        chunk = QUERY_CHUNK if self._decoder.cached else width
        mode = self._mode.at_length(width)
        cache = self._decoder.new_cache(len(texts), width, mode) if width > chunk else None
        values = torch.full((len(rows),), torch.nan, dtype=torch.float64)  # so that no target can be missed unnoticed
        is_top = torch.zeros(len(rows), dtype=torch.bool)
        for begin in range(0, width, chunk):
            try:
                hidden = self._decoder.hidden(tokens[:, begin : begin + chunk], cache, mode)
            except PositionsExceeded as error:
                raise self._too_long(error) from error
            in_chunk = ((positions >= begin) & (positions < begin + chunk)).nonzero()[:, 0]
            for part in in_chunk.split(LOGIT_POSITIONS):
                states = hidden[rows[part].to(self._device), (positions[part] - begin).to(self._device)]
                logits = self._decoder.logits(states).float()
                part_targets = targets[part].to(self._device)
                values[part] = logits.log_softmax(-1).gather(-1, part_targets[:, None])[:, 0].double().cpu()
                is_top[part] = (logits.argmax(-1) == part_targets).cpu()
        return values, is_top

    # -- generation ---------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to a stop sequence, the end-of-document token, or the maximum number of tokens."""
        # Prompts and options.
        contexts = self._tokenizer.tokenize_batch([request.args[0] for request in requests])
        prompts = [tokens or [self._tokenizer.eod] for tokens in contexts]
        options = [GenerationOptions.parse(request.args[1], self._tokenizer) for request in requests]
        needed = [len(prompt) + option.new_tokens for prompt, option in zip(prompts, options, strict=True)]
        limit = self._max_length or max(needed, default=0)
        self._record_lengths("generate_until", needed, limit, "truncated on the left")

        # Rows of one call have the same options and, if the mode depends on it, length.
        together: dict[tuple[GenerationOptions, int], list[int]] = {}
        for index, option in enumerate(options):
            if option.new_tokens >= limit:
                raise UserError(
                    f"--max-length {limit} leaves no room for a prompt: the task generates {option.new_tokens} tokens"
                )
            prompts[index] = prompts[index][-(limit - option.new_tokens) :]
            length = len(prompts[index]) if self._mode.length_dependent else 0
            together.setdefault((option, length), []).append(index)
        texts = [""] * len(requests)

        # Results in the order of the requests.
        for (option, _), indices in together.items():
            longest = max(len(prompts[index]) for index in indices) + option.new_tokens
            sampling = dict(option.sampling)
            generations = generate(
                self._model,
                [prompts[index] for index in indices],
                maximum_tokens=option.new_tokens,
                temperature=sampling.get("temperature", 0.0),
                top_k=int(sampling.get("top_k", 0)),
                top_p=sampling.get("top_p", 0.0),
                seed=self._seed,
                eod=self._tokenizer.eod,
                vocab_size=self._tokenizer.vocab_size,
                batch_size=max(1, min(MAX_GENERATION_BATCH, self._batch_tokens // longest)),
                recompute=not self._decoder.cached,
                mode=self._mode,
                ended=partial(_ends_with_stop, self._tokenizer, option.until),
            )
            for index, generation in zip(indices, generations, strict=True):
                if generation.message is not None:
                    raise self._too_long(generation.message)
                text = self._tokenizer.detokenize(generation.tokens)
                texts[index] = postprocess_generated_text(text, list(option.until), think_end_token=None)
        return texts

    # -- lengths ------------------------------------------------------------------------------------------------------

    def _record_lengths(self, request_type: str, needed: Sequence[int], limit: int, consequence: str) -> None:
        longest = max(needed, default=0)
        cut = sum(length > limit for length in needed)
        self.lengths[request_type] = RequestLengths(len(needed), min(longest, limit), limit, cut)
        effect = f"{cut:,} of them {consequence}" if cut else "all fit"
        self._report(
            f"{request_type}: {len(needed):,} requests of up to {longest:,} tokens; max_length {limit:,}: {effect}"
        )

    def _too_long(self, reason: object) -> UserError:
        return UserError(
            f"a text is too long for pos_emb {self._model.settings.config.pos_emb}: {reason}. Set --max-length N to "
            "truncate longer prompts on the left and to read longer documents in windows"
        )


@dataclass(frozen=True)
class GenerationOptions:
    """A task's `generation_kwargs`.

    Attributes:
        new_tokens: maximum number of tokens to generate.
        until: stop sequences.
        sampling: (name, value) pairs of `SAMPLING`; empty for greedy decoding.
    """

    new_tokens: int
    until: tuple[str, ...]
    sampling: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, options: dict[str, Any], tokenizer: Tokenizer) -> "GenerationOptions":
        """Raises UserError for an unknown option."""
        remaining = dict(normalize_gen_kwargs(options, DEFAULT_NEW_TOKENS))
        until = handle_stop_sequences(remaining.pop("until", None), eos=tokenizer.detokenize([tokenizer.eod]))
        new_tokens = remaining.pop("max_gen_toks")
        do_sample = remaining.pop("do_sample")
        sampling = tuple((key, remaining.pop(key)) for key in SAMPLING if key in remaining)
        if remaining:
            raise UserError(
                f"generation_kwargs {', '.join(map(repr, remaining))}: not supported; a task may set until, "
                f"max_gen_toks, do_sample, {', '.join(SAMPLING)}"
            )
        if do_sample and not dict(sampling).get("temperature"):
            raise UserError("generation_kwargs do_sample: requires a temperature above 0")
        return cls(new_tokens, tuple(filter(None, until)), sampling if do_sample else ())


def _ends_with_stop(tokenizer: Tokenizer, until: Sequence[str], tokens: Tokens) -> bool:
    """Whether the last token completes a stop sequence.

    Every token has at least one byte, so it suffices to decode as many tokens as the longest stop sequence has bytes,
    and two more, since tokenizers may decode the first token of a text differently.
    """
    window = 2 + max((len(sequence.encode()) for sequence in until), default=0)
    text = tokenizer.detokenize(tokens[-window:])
    return any(sequence in text for sequence in until)
