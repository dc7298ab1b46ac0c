from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import free_port
from tiny_models import make_tiny_llama
from turnstile.cli import serve as serve_module
from turnstile.cli.doctor import check_torch
from turnstile.cli.main import EXIT_USAGE, VERBS, main
from turnstile.cli.settings import SettingsError, normalize, parse_size, read_file, take_config
from turnstile.engine.config import EngineConfig
from turnstile.server.config import ServerConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """``serve`` sets up logging for a process of its own; this one wants to keep its handlers."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """What ``serve`` was about to start with, instead of starting."""
    calls: list[tuple[EngineConfig, ServerConfig]] = []

    def start(engine: EngineConfig, server: ServerConfig) -> int:
        calls.append((engine, server))
        return 0

    monkeypatch.setattr(serve_module, "start", start)
    for name in list(os.environ):
        if name.startswith("TURNSTILE_"):
            monkeypatch.delenv(name)
    return calls


@pytest.mark.parametrize(
    ("text", "digits"),
    [
        ("1k", "1000"), ("32K", "32768"), ("25.6k", "25600"), ("2M", "2097152"),
        ("1g", "1000000000"), ("128MiB", "134217728"), ("5", "5"),
        ("k", "k"), ("1.0001k", "1.0001k"), ("-1", "-1"),
    ],
)  # fmt: skip
def test_sizes_are_read_with_their_suffix(text: str, digits: str) -> None:
    assert parse_size(text) == digits


def test_underscores_and_other_names_mean_the_same_flags() -> None:
    tokens = [
        "--max_num_seqs=4", "--block_size", "8", "--quantization=int8", "name_with_underscore",
        "--", "--a_b",
    ]  # fmt: skip
    assert normalize(tokens) == [
        "--max-num-seqs=4", "--page-size", "8", "--dtype=int8", "name_with_underscore",
        "--", "--a_b",
    ]  # fmt: skip


def test_flags_win_over_environment_over_file_over_default(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('[serve]\nport = 1\nmax_num_seqs = "1k"\npage-size = 32\napi_key = ["f"]\n')
    monkeypatch.setenv("TURNSTILE_SERVE_PORT", "2")
    monkeypatch.setenv("TURNSTILE_SERVE_MAX_NUM_SEQS", "2k")
    code = main(["serve", "some-model", "--config", str(path), "--port", "3", "--uds=x"])
    assert code == 0
    engine, server = started[0]
    assert server.port == 3
    assert engine.max_num_seqs == 2000
    assert engine.page_size == 32
    assert server.api_key == ["f"]
    assert server.host == "127.0.0.1"
    assert engine.model == "some-model"


def test_names_that_are_no_settings_are_told_with_the_nearest_one(
    started: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TURNSTILE_SERVE_PROT", "2")
    monkeypatch.setenv("TURNSTILE_SERVE_BLOCK_SIZE", "2")
    monkeypatch.setenv("TURNSTILE_SERVE_PORT", "4")
    assert main(["serve"]) == 0
    assert started[0][1].port == 4
    assert capsys.readouterr().err.splitlines() == [
        "turnstile: TURNSTILE_SERVE_BLOCK_SIZE is no setting and is ignored. "
        "Did you mean TURNSTILE_SERVE_PAGE_SIZE?",
        "turnstile: TURNSTILE_SERVE_PROT is no setting and is ignored. "
        "Did you mean TURNSTILE_SERVE_PORT?",
    ]
    monkeypatch.delenv("TURNSTILE_SERVE_PROT")
    path = tmp_path / "settings.toml"
    path.write_text("prot = 1\n")
    assert main(["serve", "--config", str(path)]) == EXIT_USAGE
    assert f"no setting prot ({path}). Did you mean port?" in capsys.readouterr().err


def test_a_yaml_file_works_at_its_top_level(started: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("max-model-len: 4k\nenable_prefix_caching: false\nserved-model-name: [a, b]\n")
    assert main(["serve", f"--config={path}"]) == 0
    engine, server = started[0]
    assert engine.max_model_len == 4000
    assert engine.enable_prefix_caching is False
    assert server.served_model_name == ["a", "b"]


def test_flags_repeat_and_negate(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["serve", "--api-key", "a", "--api_key", "b", "--no-enable-prefix-caching"]) == 0
    engine, server = started[0]
    assert server.api_key == ["a", "b"]
    assert engine.enable_prefix_caching is False
    monkeypatch.setenv("TURNSTILE_API_KEY", "from env")
    assert main(["serve"]) == 0
    assert started[1][1].api_key == ["from", "env"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--nonsense"], "--nonsense"),
        (["serve", "--port", "abc"], "--port"),
        (["serve", "--max-num-seqs", "5x"], "--max-num-seqs"),
        (["serve", "--backend", "maybe"], "--backend"),
        (["serve", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype"),
        (["serve", "a", "b"], "b"),
        (["nonsense"], "nonsense"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(
    started: list[Any], capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(arguments) == EXIT_USAGE
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not started


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--port", "99999"], "--port"),
        (["--api-key", "é"], "no HTTP header"),
        (["--admin-api-key", "é"], "no HTTP header"),
        (["--max-queue-wait", "-1"], "--max-queue-wait"),
        (["--neighbour-steps", "-1"], "--neighbour-steps"),
        (["--tenants", "/no/such/tenants.toml"], "/no/such/tenants.toml"),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "5"], "--max-num-batched-tokens"),
        (["--page-size", "0"], "--page-size"),
        (["--gpu-memory-utilization", "2"], "--gpu-memory-utilization"),
        (["--config", "/no/such/settings.toml"], "/no/such/settings.toml"),
    ],
)
def test_settings_that_cannot_work_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["serve", *arguments]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-model", "--port", "0"], "no-such-model"),
        (["--uds", "/no/such/directory/socket"], "/no/such/directory"),
    ],
)
def test_what_the_machine_lacks_is_one_line_and_no_traceback(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["serve", *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_a_context_longer_than_the_model_is_refused_before_an_engine_loads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    words = ["serve", str(model), "--max-model-len", "99999", "--port", "0"]
    assert main(words) == EXIT_USAGE
    assert "--max-model-len 99999 is more than the" in capsys.readouterr().err


def test_a_taken_port_is_told_with_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert f"Port {port}" in error
    assert "--port 0" in error


@pytest.mark.parametrize("name", ["x.toml", "x.yaml"])
def test_a_broken_settings_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(SettingsError, match="Cannot read"):
        read_file(path, "serve")
    path.write_text("a: [\n= =")
    with pytest.raises(SettingsError, match=name):
        read_file(path, "serve")
    with pytest.raises(SettingsError, match="needs a file"):
        take_config(["--config"], "serve")


def test_an_unknown_name_in_a_file_is_refused(
    started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.toml"
    path.write_text("prot = 5\n")
    assert main(["serve", "--config", str(path)]) == EXIT_USAGE
    assert "prot" in capsys.readouterr().err


def test_inspect_and_export_read_a_model_without_loading_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    assert main(["inspect", str(model), "--tensors"]) == 0
    said = capsys.readouterr().out
    assert "llama" in said
    assert "model.norm.weight" in said
    assert main(["export-tokenizer", str(model), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"]
    assert main(["pull", str(model)]) == 0
    assert main(["inspect", str(tmp_path / "none")]) == 1


def test_doctor_fails_where_something_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    port = str(free_port())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(port)))
        taken.listen()
        assert main(["doctor", "--model", str(model), "--port", port]) == 1
        assert "bad" in capsys.readouterr().out
    assert main(["doctor", "--model", str(tmp_path / "none"), "--port", port]) == 1
    assert main(["doctor", "--model", str(model), "--port", port]) == 0
    assert main(["doctor", "--model", str(model), "--port", "99999"]) == 1
    assert "99999 is no port" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "localhost:8000"], "--url localhost:8000 must begin with http://"),
        (["--url", "http://a\nb"], "is no URL"),
        (["--api-key", "é"], "The API key has characters that no HTTP header can carry"),
    ],
)
def test_what_no_request_could_carry_is_told_before_one_is_made(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    for verb in ("chat", "complete"):
        assert main([verb, "hi", *arguments]) == 1
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("kernels", [True, False])
def test_doctor_wants_torch_only_where_nothing_else_computes(
    monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("turnstile.cli.doctor.find_spec", lambda _: object() if kernels else None)
    assert check_torch().verdict == ("note" if kernels else "bad")


def test_a_client_without_a_server_is_told_how_to_start_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        for arguments in (["chat", "hi"], ["complete", "hi"]):
            assert main([*arguments, "--url", url]) == 1
            assert "turnstile serve" in capsys.readouterr().err


def _modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_imports_nothing_heavy() -> None:
    run = "from turnstile.cli.main import main\nmain(['--help'])"
    heavy = {"torch", "numpy", "starlette", "uvicorn", "tokenizers", "httpx", "msgspec"}
    assert not heavy & _modules_after(run)
    run = "from turnstile.cli.main import main\nmain(['serve', '--help'])"
    assert not heavy & _modules_after(run)


def test_the_api_process_never_imports_torch() -> None:
    everything = ["app", "run", "startup", "watch.exposition", "api.docs", "http.binding"]
    imports = "\n".join(f"import turnstile.server.{name}" for name in everything)
    modules = _modules_after(
        f"{imports}\nimport turnstile.cli.serve, turnstile.cli.panel, turnstile.engine.supervisor"
    )
    assert "torch" not in modules
    assert "transformers" not in modules


def test_every_verb_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    for verb in ("serve", "chat", "complete", "pull", "inspect", "doctor", "export-tokenizer"):
        assert verb in VERBS
        assert verb in said
        assert main([verb, "--help"]) == 0


def test_help_can_be_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help=prefix"]) == 0
    said = capsys.readouterr().out
    assert "--enable-prefix-caching" in said
    assert "--prefix-sharing" in said
    assert "--port" not in said
    assert main(["serve", "--help=xyzzy"]) == EXIT_USAGE


def test_no_advice_installs_the_foreign_package_of_our_name() -> None:
    """The public index has another project called turnstile: only the source tree is ours."""
    wrong = re.compile(r"""pip install[^\n]*\s['"]?turnstile""")
    texts = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    found = [path.name for path in texts if wrong.search(path.read_text("utf-8"))]
    assert len(texts) > 100
    assert found == []
