"""Forms of output compiled for a tokenizer by llguidance, and where in its form each output stands."""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any, Self

from pagedattn_serve.errors import ArgumentError, ArgumentImportError, how_to_install
from pagedattn_serve.sampling import json_schema, structural_tag
from pagedattn_serve.sampling.ebnf import as_lark
from pagedattn_serve.sampling.structural_tag import PartKind
from pagedattn_serve.structured_output import StructuredOutput

_MAX_COMPILED = 64  # forms kept, of a few KB to a few MB each
# llguidance recurses into references: on a thread's usual stack of 8 MiB, a schema of 1,000 references ends the
# process. This stack has room for any text of MAX_CHARACTERS. Memory is taken only for the part that is used.
_STACK_BYTES = 256 * 2**20
# How llguidance's errors begin that do not name the keyword of the schema, and that keyword.
_KEYWORDS = {
    "Pointer ": "$ref",
    "Resource ": "$ref",
    "Unknown format": "format",
    "regex parse error": "pattern",
    "min/maxProperties ": "minProperties, maxProperties",
}
_stack_size_lock = threading.Lock()  # one size holds for all new threads of the process


class TokenMatcher:
    """Where in its form one output stands.

    The matcher follows the output's tokens when it is asked for the next token. So nobody tells it of preemptions or
    drafts. num_mask_words: int32 words of a mask, which has a bit for each token.
    """

    def __init__(self, compiled: Any, num_mask_words: int) -> None:
        self.num_mask_words = num_mask_words
        self._compiled = compiled
        self._state: tuple[Any, int] | None = None  # llguidance's LLMatcher, and how many tokens it has seen

    def fork(self) -> Self:
        """A matcher for another output with the same tokens so far."""
        other = type(self)(self._compiled, self.num_mask_words)
        if self._state is not None:
            matcher, num_tokens = self._state
            other._state = matcher.deep_copy(), num_tokens
        return other

    def advance(self, token_ids: Sequence[int]) -> Any:
        """llguidance's matcher after all tokens of the output, which are token_ids. `error_of` tells its error."""
        matcher, num_tokens = self._state or (self._compiled.deep_copy(), 0)
        if num_tokens < len(token_ids):
            matcher.consume_tokens(list(token_ids[num_tokens:]))
        self._state = matcher, len(token_ids)
        return matcher


@dataclass(frozen=True)
class _Tokens:
    """The tokens of one tokenizer and model.

    all_tokens: llguidance's LLTokenizer. added: the ids of the tokenizer's added tokens, by their texts. in_text: those
    that a text may have.
    """

    all_tokens: Any
    added: dict[str, int]
    in_text: frozenset[int]


class GrammarCompiler:
    """Compiles forms of output, each once, for one tokenizer and model.

    vocab_size: the model's, which may be larger than the tokenizer's. Only tokens of the tokenizer are ever allowed.
    eos_token_ids: the tokens that end an output.

    Raises ImportError where llguidance is not installed, ValueError if it does not take the tokenizer or there is no
    end-of-sequence token.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        if find_spec("llguidance") is None:
            raise ArgumentImportError("structured_output", f"llguidance: {how_to_install('structured')}")
        from llguidance.hf import from_tokenizer

        if not eos_token_ids:
            raise ArgumentError("structured_output", "a model with an end-of-sequence token, which ends the output")
        try:
            num_tokens = max(vocab_size, *(token_id + 1 for token_id in tokenizer.get_vocab().values()))
            tokens = from_tokenizer(tokenizer, num_tokens, sorted(eos_token_ids))
        except Exception as error:  # a tokenizer may raise any type
            raise ArgumentError("structured_output", f"a tokenizer that llguidance can read ({error})") from None
        self._num_mask_words = -(-tokens.vocab_size // 32)
        added = tokenizer.added_tokens_decoder
        in_text = frozenset(token_id for token_id, token in added.items() if not token.special)
        by_text = {token.content: token_id for token_id, token in added.items()}
        self._compile = lru_cache(_MAX_COMPILED)(partial(_compile, _Tokens(tokens, by_text, in_text - eos_token_ids)))

    def matcher(self, form: StructuredOutput) -> TokenMatcher:
        """A matcher at the beginning of an output of this form. Thread-safe. Raises ValueError, with the kind of the
        form and llguidance's message, if no output can be held to the form."""
        return TokenMatcher(self._compile(form), self._num_mask_words)


def error_of(matcher: Any) -> ArgumentError | None:
    """Why llguidance cannot go on, in a line: the form is too complex, or the output does not follow the form."""
    if not matcher.is_error():
        return None
    return ArgumentError(
        "structured_output", "a form that the output can be held to", matcher.get_error().split("\n")[0]
    )


def _compile(tokens: _Tokens, form: StructuredOutput) -> Any:
    """llguidance's LLMatcher for a form."""
    try:
        if form.structural_tag is not None:
            return _compile_structural_tag(tokens, form)
        return _matcher(tokens, _grammar(form), form.kind == "json")
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(form, error) from None


def _compile_structural_tag(tokens: _Tokens, form: StructuredOutput) -> Any:
    def part_grammar(kind: PartKind, value: Any) -> dict[str, Any]:
        if kind is PartKind.GRAMMAR:
            return {"lark_grammar": as_lark(value)}
        if kind is PartKind.REGEX:
            grammar = _grammar(StructuredOutput(regex=value))
        else:
            inner = StructuredOutput(json=value, whitespace_pattern=form.whitespace_pattern)
            grammar = _schema_grammar(inner, is_lenient=kind is PartKind.LENIENT_SCHEMA)
        first: dict[str, Any] = json.loads(grammar)["grammars"][0]
        return first

    assert isinstance(form.structural_tag, str)
    whole, parts = structural_tag.grammars(form.structural_tag, tokens.added, tokens.in_text, part_grammar)
    try:
        return _matcher(tokens, json.dumps({"grammars": [whole, *(part.grammar for part in parts)]}), False)
    except ValueError:
        for part in parts:  # which of them is it?
            try:
                _matcher(tokens, json.dumps({"grammars": [part.grammar]}), part.kind.is_schema)
            except ValueError as error:
                raise ValueError(f"{part.place}: {error}") from None
        raise


def _matcher(tokens: _Tokens, grammar: str, is_schema: bool) -> Any:
    """llguidance's LLMatcher for a grammar. Raises ValueError with llguidance's message, if there is none."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    matcher = _with_deep_stack(partial(LLMatcher, tokens.all_tokens, grammar, log_level=0, limits=limits))
    if not matcher.is_error():
        trial = matcher.deep_copy()
        _with_deep_stack(trial.compute_bitmask)  # some forms fail here first: rather now than in each output
        if not trial.is_error():
            return matcher
        matcher = trial
    reason = matcher.get_error().removesuffix("\n<non-verbose/>").strip()
    keyword = next((word for start, word in _KEYWORDS.items() if is_schema and reason.startswith(start)), None)
    raise ValueError(reason if keyword is None else f"{keyword}: {reason}")


def _refusal(form: StructuredOutput, reason: object) -> ArgumentError:
    return ArgumentError("structured_output", f"a form ({form.kind}) that an output can be held to", reason)


def _grammar(form: StructuredOutput) -> str:
    from llguidance import LLMatcher

    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.grammar is not None:
        return LLMatcher.grammar_from_lark(as_lark(form.grammar))
    if form.choice is not None:
        # One terminal, because llguidance follows at most 2,000 rules at once.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, form.choices)))
    return _schema_grammar(form)


def _schema_grammar(form: StructuredOutput, is_lenient: bool = False) -> str:
    """is_lenient: whether keywords that llguidance does not know count for nothing."""
    from llguidance import LLMatcher

    options: Any = {"lenient": True} if is_lenient else {}
    if form.whitespace_pattern is not None:
        options["whitespace_pattern"] = form.whitespace_pattern
    return LLMatcher.grammar_from_json_schema(json_schema.prepare(form.schema), overrides=options or None)


def _with_deep_stack(function: Callable[[], Any]) -> Any:
    """What the function returns in a thread with a stack of _STACK_BYTES."""
    with ThreadPoolExecutor(max_workers=1) as executor:
        with _stack_size_lock:
            before = threading.stack_size()
            try:
                threading.stack_size(_STACK_BYTES)
                result = executor.submit(function)
            finally:
                threading.stack_size(before)
        return result.result()
