from dataclasses import dataclass, field
from pathlib import Path

import tiny_models
from turnstile.text import Tokenizer
from turnstile.text.echo import echo_prompt
from turnstile.text.logprobs import completion_logprobs


@dataclass
class Logprobs:
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


def test_an_echoed_prompt_has_an_entry_for_every_token_and_null_for_the_first(
    tmp_path: Path,
) -> None:
    tiny_models.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    text = "the é🙂<|im_end|> and"
    ids = [tiny_models.TURN_START, *tokenizer.encode(text)]
    assert tokenizer.bos_id == tiny_models.TURN_START
    echo = echo_prompt(tokenizer, ids, [Logprobs(-float(i)) for i in range(1, len(ids))])
    assert echo.text == text
    shape = completion_logprobs(echo.entries)
    assert shape["token_logprobs"] == [None, *(-float(i) for i in range(1, len(ids)))]
    assert len(echo.entries) == len(ids)
    for entry in echo.entries[1:]:
        assert text[entry.offset :].startswith(entry.chosen.data.decode("utf-8", "ignore"))


def test_an_echo_without_log_probabilities_still_has_its_text(tmp_path: Path) -> None:
    tiny_models.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_path(tmp_path / "tokenizer.json")
    assert echo_prompt(tokenizer, tokenizer.encode("a b")).text == "a b"
