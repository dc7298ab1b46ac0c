import errno
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_models
from budget import examples
from turnstile.text import GrammarError, Tokenizer
from turnstile.text import grammar_request as request
from turnstile.text.errors import UncheckedGrammarError
from turnstile.text.grammar import (
    GrammarCompiler,
    GrammarState,
    check_grammar,
    is_checked,
    mask_words,
    unpack_mask,
)
from turnstile.text.heap import heap_bytes

END = tiny_models.TURN_END


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.write_tokenizer(path)
    return Tokenizer.from_directory(path)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def allowed(state: GrammarState, tokenizer: Tokenizer) -> list[int]:
    row = np.full(mask_words(tokenizer.vocab_size + 100), -1, np.int32)
    state.fill_mask(row)
    bits = unpack_mask(row, tokenizer.vocab_size + 100)
    assert not bits[tokenizer.vocab_size :].any()
    return [int(i) for i in np.flatnonzero(bits)]


def wander(state: GrammarState, tokenizer: Tokenizer, seed: int, limit: int = 400) -> str | None:
    """Draw allowed tokens at random until the end token comes; None if it does not."""
    draw, ids = random.Random(seed), []
    for step in range(limit):
        choices = allowed(state, tokenizer)
        # Late in the walk, take the way out where there is one.
        token = END if step > 30 and END in choices else draw.choice(choices)
        state.advance(token)
        if token in tokenizer.stop_ids:
            return tokenizer.decode(ids)
        ids.append(token)
    return None


def follows(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether the grammar takes the whole text and may end there."""
    state = compiler.start(grammar)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    for token in ids:
        if token not in allowed(state, tokenizer):
            return False
        state.advance(token)
    return END in allowed(state, tokenizer)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "é", 3]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(12))
def test_any_walk_through_a_schema_ends_in_json_of_that_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int
) -> None:
    text = wander(compiler.start(request.json_schema(SCHEMA)), tokenizer, seed)
    assert text is not None
    value = json.loads(text)
    assert list(value) == ["a", "b"]
    assert isinstance(value["a"], bool)
    assert value["b"] in ("x", "é", 3)


def test_json_mode_starts_an_object_and_cannot_space_out(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = request.json_object()
    assert follows(compiler, tokenizer, grammar, '{"a": [1, {"b": null}]}')
    assert follows(compiler, tokenizer, grammar, "{}")
    assert not follows(compiler, tokenizer, grammar, "[1]")
    assert not follows(compiler, tokenizer, grammar, "{" + " " * 60 + "}")


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (request.regex(r"\d{2}/[a-c]+"), "12/abc", "1/abc"),
        (request.regex(r"a\/b\nc" + "\n" + "d"), "a/b\nc\nd", "a/b"),
        (request.regex("é+🙂?"), "éé🙂", "e"),
        (request.choice(["yes", "no", 'a "q" \\ \n é🙂']), 'a "q" \\ \n é🙂', "maybe"),
        (request.lark('start: "a" b+\nb: "b" | "c"'), "abcb", "a"),
        (request.lark('root ::= "a" b+\nb ::= "b" | "c"'), "abcb", "b"),
        (request.json_schema({"oneOf": [{"type": "null"}, {"const": 5}]}), "5", "6"),
        (request.json_schema('{"type": "integer"}'), "-12", "x"),
        (request.json_schema(True), '"any"', "nope"),
    ],
)
def test_each_kind_of_grammar_takes_what_it_should_and_nothing_else(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, good: str, bad: str
) -> None:
    check_grammar(grammar)
    assert follows(compiler, tokenizer, grammar, good)
    assert not follows(compiler, tokenizer, grammar, bad)


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5))
@settings(max_examples=examples(60))
def test_a_choice_is_taken_literally(
    compiler: GrammarCompiler, tokenizer: Tokenizer, options: list[str]
) -> None:
    grammar = request.choice(options)
    assert all(follows(compiler, tokenizer, grammar, option) for option in options)


def test_control_tokens_are_not_the_text_they_spell(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.start(request.regex(r"<\|im_start\|>"))
    assert tiny_models.TURN_START not in allowed(state, tokenizer)
    assert follows(compiler, tokenizer, request.regex(r"<\|im_start\|>"), "<|im_start|>")


def test_only_the_end_is_allowed_when_nothing_can_follow(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.start(request.choice(["ab"]))
    for token in tokenizer.encode("ab"):
        assert tokenizer.stop_ids.isdisjoint(allowed(state, tokenizer))
        state.advance(token)
    assert set(allowed(state, tokenizer)) == set(tokenizer.stop_ids)


def test_a_forbidden_token_is_an_error_of_one_sentence(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.start(request.choice(["ab"]))
    with pytest.raises(GrammarError) as caught:
        state.advance(tokenizer.encode("z")[0])
    assert len(str(caught.value)) < 500
    assert "<state>" not in str(caught.value)


def test_a_compiled_grammar_is_not_changed_by_its_samples(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, kept=1)
    first = compiler.start(request.choice(["ab", "cd"]))
    before = allowed(first, tokenizer)
    first.advance(tokenizer.encode("a")[0])
    assert allowed(compiler.start(request.choice(["ab", "cd"])), tokenizer) == before
    compiler.start(request.choice(["xy"]))
    assert compiler.kept == 1


def test_grammars_are_kept_within_bytes_and_the_oldest_go_first(tokenizer: Tokenizer) -> None:
    """Someone can have one compiled to 9 MB: a bound on their number alone would be 600 MB."""
    others = 0

    def heap() -> int:
        return others + (0 if compiler.kept == 0 else 9_000_000 * compiler.kept)

    compiler = GrammarCompiler(tokenizer, kept_bytes=100_000_000, heap=heap)
    for number in range(40):
        compiler.start(request.choice([f"a{number}"]))
        assert heap() <= 100_000_000 + 9_000_000
    assert compiler.kept == 12
    compiler.start(request.choice(["a29"]))  # one of them: the least recently made of all
    compiler.start(request.choice(["b"]))
    assert request.choice(["a29"]) in compiler._compiled
    assert request.choice(["a28"]) not in compiler._compiled
    # What others have the heap grow by does not leave every request to be compiled anew.
    others = 10**9
    for number in range(20):
        compiler.start(request.choice([f"c{number}"]))
    assert compiler.kept == 8


def test_where_the_heap_is_not_told_their_number_is_bounded(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, kept=10, kept_bytes=0, heap=lambda: None)
    for number in range(12):
        compiler.start(request.choice([f"a{number}"]))
    assert compiler.kept == 10


@pytest.mark.skipif(heap_bytes() is None, reason="this C library does not tell")
def test_the_heap_is_counted_with_what_extensions_hold() -> None:
    before = heap_bytes()
    held = np.ones(32 << 20, np.uint8)
    now = heap_bytes()
    assert before is not None
    assert now is not None
    assert now - before > 30 << 20
    del held
    after = heap_bytes()
    assert after is not None
    assert after - before < 2 << 20


@pytest.mark.parametrize(
    ("grammar", "complaint"),
    [
        (request.json_schema({"type": "foo"}), "foo"),
        (request.json_schema({"$ref": "#/nowhere"}), "does not exist"),
        (request.json_schema({"not": {"type": "string"}}), "not"),
        (request.json_schema(json.loads('{"items":' * 300 + "{}" + "}" * 300)), "recursion"),
        (request.regex("("), "unclosed"),
        (request.lark('start: "a" missing'), "missing"),
        (request.lark("start: start"), "matches no text"),
        (request.lark("start: a\na: b\nb: a"), "matches no text"),
        (request.json_schema({"$ref": "#"}), "matches no text"),
        (request.lark("start: " + "(" * 3000 + '"a"' + ")" * 3000), "nested"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_compiler_s_complaint(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, complaint: str
) -> None:
    def start(grammar: str) -> None:
        compiler.start(grammar).fill_mask(np.zeros(mask_words(tokenizer.vocab_size), np.int32))

    for attempt in (check_grammar, start):
        with pytest.raises(GrammarError, match=complaint) as caught:
            attempt(grammar)
        assert len(str(caught.value)) < 600
        assert "<" not in str(caught.value)  # llguidance's debug tail


def chain(length: int) -> str:
    rules = [f"r{i}: r{i + 1}" for i in range(length)]
    return request.lark("\n".join(["start: r0", *rules, f'r{length}: "a"']))


@pytest.mark.parametrize(
    "grammar",
    [
        chain(4000),
        request.json_schema(
            {"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(500)]}
        ),
    ],
    ids=["depth", "time"],
)
def test_a_grammar_that_would_kill_its_compiler_kills_another_process(grammar: str) -> None:
    with pytest.raises(GrammarError, match="too complex"):
        check_grammar(grammar)


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that is run in the checker's place."""
    path = tmp_path / "checker.py"
    monkeypatch.setattr("turnstile.text.grammar_checker.__file__", str(path))
    return path


def test_a_check_nobody_waits_for_is_ended(checker: Path) -> None:
    checker.write_text("import time; time.sleep(600)")
    unwanted = threading.Event()
    threading.Timer(0.1, unwanted.set).start()
    before = psutil.Process().children()  # servers of other tests may live on
    with pytest.raises(UncheckedGrammarError, match="nobody waits"):
        check_grammar("never seen before", unwanted)
    assert not is_checked("never seen before")
    assert not {*psutil.Process().children()} - {*before}


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ("import time; time.sleep(600)", "within 0.3 s"),
        ("import os; os.kill(os.getpid(), 9)", "code -9"),
        ("import a_package_that_is_missing", "code 1"),
        (None, "Resource temporarily unavailable"),
    ],
    ids=["busy", "killed", "broken", "no process"],
)
def test_what_the_machine_has_no_room_for_is_no_verdict_on_the_grammar(
    checker: Path, monkeypatch: pytest.MonkeyPatch, ends: str | None, why: str
) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("turnstile.text.grammar._WALL_SECONDS", 0.3 if "0.3" in why else 30)
    grammar = request.regex("no verdict")
    with monkeypatch.context() as broken:
        checker.write_text(ends or "")
        if ends is None:
            broken.setattr("turnstile.text.grammar.subprocess.Popen", no_process)
        with pytest.raises(UncheckedGrammarError, match=why):
            check_grammar(grammar)
    assert not is_checked(grammar)


def test_what_the_checker_passes_leaves_the_engine_s_stack_room(
    compiler: GrammarCompiler,
) -> None:
    deepest = 0
    for length in (50, 200, 400, 800, 1600):
        try:
            check_grammar(chain(length))
        except GrammarError:
            break
        deepest = length
    assert deepest >= 50
    compiler.start(chain(deepest))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: request.json_schema("{"), "not valid JSON"),
        (lambda: request.json_schema([1]), "must be an object"),
        (lambda: request.json_schema({"enum": ["x" * 200_000]}), "longer than"),
        (lambda: request.regex(5), "must be a string"),
        (lambda: request.choice([]), "at least one"),
        (lambda: request.choice("ab"), "list"),
        (lambda: request.choice(["a", ""]), "not empty"),
        (lambda: request.choice(["a"] * 5000), "at most 1000"),
        (lambda: request.choice(["a\ud800"]), "surrogate"),
        (lambda: request.lark("  "), "not empty"),
        (lambda: request.grammar_of_response_format({"type": "yaml"}), "unknown"),
        (lambda: request.grammar_of_response_format("json"), "must be an object"),
        (lambda: request.grammar_of_response_format({"type": "json_schema"}), "schema is missing"),
        (lambda: request.grammar_of_structured_outputs({}), "exactly one"),
        (lambda: request.grammar_of_structured_outputs({"regex": "a", "json": {}}), "exactly one"),
        (lambda: request.grammar_of_structured_outputs({"structural_tag": {}}), "not supported"),
        (
            lambda: request.grammar_of_structured_outputs({"regex": "a", "whitespace_pattern": ""}),
            r"structured_outputs\.whitespace_pattern is not supported",
        ),
        (lambda: request.json_schema(False), "is false, which no value satisfies"),
        (lambda: request.json_schema("false"), "is false, which no value satisfies"),
    ],
)
def test_a_malformed_request_is_refused_in_words(make: Any, complaint: str) -> None:
    with pytest.raises(GrammarError, match=complaint):
        make()


@pytest.mark.parametrize(
    "spec",
    [
        {"json": {"enum": [[]] * 200_000}},
        {"json": {"enum": ["x" * 200_000]}},
        {"json": {"properties": {"x" * 200_000: {}}}},
        {"json": {"allOf": [{"enum": ["abcdefgh"] * 100}] * 1000}},
        {"json": '{"enum": [' + "1," * 100_000 + "1]}"},
        {"regex": "a" * 200_000},
        {"choice": ["x" * 1000] * 200},
        {"grammar": "::= " * 50_000},
        {"grammar": " " * 200_000},
    ],
    ids=lambda spec: str(spec)[:30],
)
def test_what_is_too_long_is_refused_before_any_of_it_is_worked_on(
    monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("this should not have been called")

    for name in ("json.dumps", "json.loads", "_lark_regex", "_lark_string"):
        monkeypatch.setattr(f"turnstile.text.grammar_request.{name}", never)
    with pytest.raises(GrammarError, match=f"longer than {request.MAX_GRAMMAR_CHARS} characters"):
        request.grammar_of_structured_outputs(spec)


def test_requests_come_down_to_the_same_grammars() -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert request.grammar_of_response_format(wrapped) == request.json_schema(SCHEMA)
    assert request.grammar_of_response_format({"type": "json_object"}) == request.json_object()
    assert request.grammar_of_response_format({"type": "text"}) is None
    assert request.grammar_of_response_format(None) is None
    assert request.grammar_of_structured_outputs({"json": SCHEMA}) == request.json_schema(SCHEMA)
    assert request.grammar_of_structured_outputs({"json_object": True}) == request.json_object()
    assert request.grammar_of_structured_outputs({"choice": ["a"]}) == request.choice(["a"])
    unused = {"choice": ["a"], "json": None, "disable_fallback": False, "whitespace_pattern": None}
    assert request.grammar_of_structured_outputs(unused) == request.choice(["a"])


def test_a_mask_row_of_the_wrong_kind_is_refused(compiler: GrammarCompiler) -> None:
    state = compiler.start(request.choice(["a"]))
    for row in (np.zeros(1, np.int32), np.zeros(100, np.int64), np.zeros(200, np.int32)[::2]):
        with pytest.raises(ValueError, match="mask row"):
            state.fill_mask(row)  # type: ignore[arg-type]


def test_text_needs_neither_torch_nor_transformers_nor_llguidance_at_import() -> None:
    code = (
        "import sys, turnstile.text, turnstile.text.grammar, turnstile.text.grammar_request;"
        "print([m for m in ('torch', 'transformers', 'llguidance') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": "src"},
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
