"""The check of the documents finds what is wrong in them."""

from __future__ import annotations

from pathlib import Path

import check_docs
import pytest


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[there](nowhere.md)", "the link to nowhere.md leads nowhere"),
        ("[there](#nowhere)", "#nowhere: there is no such heading"),
        ("`make coffee`", "there is no `make coffee`"),
        ("```sh\nmake coffee   # black\n```", "there is no `make coffee`"),
        ("`turnstile fly`", "there is no `turnstile fly`"),
        ("`turnstile serve --wings 2`", "`turnstile serve` has no --wings"),
        ("`test_pigs_fly`", "there is no test_pigs_fly"),
        ("`core/pigs.py`", "there is no file core/pigs.py"),
        ("`python scripts/pigs.py --fly`", "there is no file scripts/pigs.py"),
    ],
)
def test_what_leads_nowhere_in_a_document_is_named(text: str, found: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n{text}\n")
    assert list(check_docs.wrong_in(page)) == [found]


def test_what_is_there_is_not_complained_of(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# The title\n[up](#the-title) `make test` `turnstile serve --port 8000 --no-exact`\n"
        "`test_what_is_there_is_not_complained_of` `core/gate.py` `core/gate` `try.py`\n"
        "[elsewhere](https://example.org/nothing) `turnstile bench serve --num-prompts 5`\n"
    )
    assert list(check_docs.wrong_in(page)) == []


def test_a_page_or_a_module_that_is_listed_nowhere_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list(check_docs.unlisted()) == []
    here = check_docs.tracked

    def with_one_more(pattern: str) -> list[Path]:
        return [*here(pattern), check_docs.ROOT / pattern.replace("*", "pigs")]

    monkeypatch.setattr(check_docs, "tracked", with_one_more)
    assert list(check_docs.unlisted()) == [
        "docs/README.md has no link to pigs.md",
        "docs/http.md does not say what server/pigs.py is",
        "docs/text.md does not say what text/pigs.py is",
    ]
