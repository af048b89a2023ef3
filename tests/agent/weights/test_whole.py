"""A model that others have put on this node: whole, or refused in words that name what it lacks."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.weights import whole
from llmgw.agent.weights.whole import Verdicts, complaint
from tests.agent.weights.models import LFS_POINTER, gguf, safetensors, write_folder

INDEX = "model.safetensors.index.json"
BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "short": (lambda content: content[:-1], "is cut short"),
    "long": (lambda content: content + b"x", "is too long"),
    "empty": (lambda content: b"", "is empty"),
    "pointer": (lambda content: LFS_POINTER, "is a pointer of Git LFS"),
    "garbage": (lambda content: b"<html>" + content, "is no safetensors file, or damaged"),
}


def described(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def torch_file(content: bytes = b"weights") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content)
    return file.getvalue()


def write_index(folder: Path, content: object, name: str = INDEX) -> Path:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / name


# -- the folder of a model


@pytest.mark.parametrize("shards", [1, 3])
def test_a_whole_folder(tmp_path: Path, shards: int) -> None:
    write_folder(tmp_path / "m", shards)
    assert complaint(tmp_path / "m") is None


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_each_shard_of_an_index_is_missed(tmp_path: Path, shards: int) -> None:
    for file in write_folder(tmp_path / "m", shards):
        content = file.read_bytes()
        file.unlink()
        assert complaint(tmp_path / "m") == (
            f"the model is not whole: {tmp_path / 'm' / INDEX} names {file.name}, which is not there: "
            "copy or download it again"
        )
        file.write_bytes(content)
        assert complaint(tmp_path / "m") is None


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("how", BROKEN)
def test_each_shard_that_is_broken_is_named(tmp_path: Path, how: str, indexed: bool) -> None:
    files = write_folder(tmp_path / "m", 3)
    if not indexed:
        (tmp_path / "m" / INDEX).unlink()
    damage, words = BROKEN[how]
    for file in files:
        content = file.read_bytes()
        file.write_bytes(damage(content))
        found = complaint(tmp_path / "m")
        assert found is not None
        assert found.startswith(f"{file} {words}")
        file.write_bytes(content)


def test_without_an_index_the_names_of_shards_tell_of_the_others(tmp_path: Path) -> None:
    files = write_folder(tmp_path / "m", 3)
    (tmp_path / "m" / INDEX).unlink()
    (tmp_path / "m" / "._model-00001-of-00003.safetensors").write_bytes(b"of another system")
    assert complaint(tmp_path / "m") is None
    for file in files:
        content = file.read_bytes()
        file.unlink()
        assert f"tells of {file.name}, which is not there" in str(complaint(tmp_path / "m"))
        file.write_bytes(content)


def test_a_hundred_missing_shards_are_not_all_named(tmp_path: Path) -> None:
    files = write_folder(tmp_path / "m", 100)
    for file in files[1:]:
        file.unlink()
    missing = ", ".join(file.name for file in files[1:4])
    assert f"names {missing} and more, which is not there" in str(complaint(tmp_path / "m"))


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "{}", '"x"', "[" * 99999),
        *('{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"t": ["f"]}}'),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, content: str) -> None:
    write_folder(tmp_path / "m")
    index = write_index(tmp_path / "m", content)
    assert complaint(tmp_path / "m") == (
        f"{index} is no index of a model: expected JSON with a weight_map of file names; copy or download it again"
    )


def test_an_index_that_is_a_pointer(tmp_path: Path) -> None:
    write_folder(tmp_path / "m")
    (tmp_path / "m" / INDEX).write_bytes(LFS_POINTER)
    assert f"{INDEX} is a pointer of Git LFS" in str(complaint(tmp_path / "m"))


@pytest.mark.parametrize("name", ["../m/a.safetensors", "/etc/hostname", "a\0b", "\ud800", 7, None])
def test_an_index_names_files_of_its_folder(tmp_path: Path, name: object) -> None:
    described(tmp_path / "m")
    write_index(tmp_path / "m", {"weight_map": {"t": name}})
    assert f"names {name!r}, which is no file of its folder" in str(complaint(tmp_path / "m"))


def test_what_an_index_does_not_name_is_not_looked_at(tmp_path: Path) -> None:
    write_folder(tmp_path / "m")
    (tmp_path / "m" / "consolidated.safetensors").write_bytes(b"half")
    assert complaint(tmp_path / "m") is None


def test_an_index_whose_format_was_not_fetched_says_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    files = write_folder(folder)
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    write_index(folder, {"weight_map": {"a": names[0], "b": names[1]}}, "pytorch_model.bin.index.json")
    assert complaint(folder) is None
    (folder / names[0]).write_bytes(torch_file())  # begun, and of no use beside the others
    assert complaint(folder) is None
    for file in files:
        file.unlink()
    assert f"names {names[1]}, which is not there" in str(complaint(folder))
    (folder / names[1]).write_bytes(torch_file())
    assert complaint(folder) is None
    for name in names:
        (folder / name).unlink()
    assert f"{INDEX} names {files[0].name}, {files[1].name}" in str(complaint(folder))


def test_an_index_of_pytorch_beside_one_safetensors_file(tmp_path: Path) -> None:
    folder = described(tmp_path / "m")
    write_index(folder, {"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}, "pytorch_model.bin.index.json")
    (folder / "training_args.bin").write_bytes(b"settings")
    assert "pytorch_model-00001-of-00001.bin, which is not there" in str(complaint(folder))
    (folder / "model.safetensors").write_bytes(safetensors())
    assert complaint(folder) is None
    (folder / "pytorch_model-00001-of-00001.bin").write_bytes(b"")
    assert complaint(folder) is None
    (folder / "model.safetensors").write_bytes(safetensors()[:-1])
    assert "is cut short" in str(complaint(folder))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", safetensors()),
        ("model.gguf", gguf()),
        ("pytorch_model.bin", torch_file()),
        ("pytorch_model.bin", b"\x80\x02an old pickle"),
        ("consolidated.00.pth", torch_file()),
        ("model.pt", torch_file()),
    ],
)
def test_one_file_of_weights_is_a_model(tmp_path: Path, name: str, content: bytes) -> None:
    folder = described(tmp_path / "m")
    (folder / name).write_bytes(content)
    assert complaint(folder) is None
    (folder / name).write_bytes(b"")
    assert complaint(folder) == f"{folder / name} is empty: copy or download it again"


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = described(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "training_args.bin").write_bytes(b"settings")
    assert complaint(folder) == (
        f"{folder} has a config.json, but no weights (.safetensors, .bin, .pt, .pth, .gguf): copy or download it again"
    )


def test_an_archive_of_pytorch_without_its_end(tmp_path: Path) -> None:
    folder = described(tmp_path / "m")
    content = torch_file()
    (folder / "pytorch_model.bin").write_bytes(content[:-1])
    assert f"is cut short: it has {len(content) - 1} bytes" in str(complaint(folder))


@given(st.binary(max_size=200))
def test_whatever_an_index_holds_ends_in_words(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = described(tmp_path_factory.mktemp("of") / "m")
    (folder / INDEX).write_bytes(content)
    assert complaint(folder) is not None


# -- a file


def test_a_split_gguf_needs_all_its_files_and_each_of_them_whole(tmp_path: Path) -> None:
    files = [tmp_path / f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for file in files:
        file.write_bytes(gguf())
    assert complaint(files[0]) is None
    for file in files[1:]:
        file.unlink()
        assert complaint(files[0]) == (
            f"the model is not whole: {files[0]} tells of {file.name}, which is not there: copy or download it again"
        )
        file.write_bytes(gguf()[:-1])
        assert str(complaint(files[0])).startswith(f"{file} is cut short: it has ")
        file.write_bytes(gguf())
    files[0].unlink()
    assert complaint(files[0]) == f"{files[0]} is not on this node"
    assert f"tells of {files[0].name}" in str(complaint(files[1]))


@pytest.mark.parametrize("name", ["m-00001-of-00000.gguf", "m-00004-of-00003.gguf", "m-1-of-3.gguf", "m.gguf"])
def test_names_that_tell_of_no_others(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gguf())
    assert complaint(tmp_path / name) is None


@pytest.mark.parametrize("name", ["m.gguf", "sha256-0123", "m.safetensors"])
def test_a_file_is_known_by_what_it_begins_with_too(tmp_path: Path, name: str) -> None:
    content = safetensors() if name.endswith("safetensors") else gguf()
    (tmp_path / name).write_bytes(content)
    assert complaint(tmp_path / name) is None
    (tmp_path / name).write_bytes(content[:-1])
    assert f"{name} is cut short: it has {len(content) - 1} bytes" in str(complaint(tmp_path / name))


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    assert complaint(tmp_path / "m.gguf") == f"{tmp_path / 'm.gguf'} is no regular file"
    (tmp_path / "dangling.gguf").symlink_to("gone.gguf")
    assert complaint(tmp_path / "dangling.gguf") == f"{tmp_path / 'dangling.gguf'} is not on this node"
    (tmp_path / "loop").symlink_to("loop")
    assert str(complaint(tmp_path / "loop")).startswith(f"{tmp_path / 'loop'} can't be read: ")
    assert str(complaint(Path("/a\0b"))).endswith("is not on this node")


# -- verdicts that are kept


class Opened(list[Path]):
    """The files that were opened for it."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    files = Opened()
    before = whole.Path.open

    def counted(path: Path, *args: object, **more: object) -> object:
        files.append(path)
        return before(path, *args, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(whole.Path, "open", counted)
    return files


@pytest.mark.parametrize("lost", ["", "absent", "short"])
def test_an_unchanged_model_is_not_read_again(tmp_path: Path, opened: Opened, lost: str) -> None:
    file = write_folder(tmp_path / "m")[1]
    if lost == "absent":
        file.unlink()
    elif lost:
        file.write_bytes(b"\0")
    verdicts = Verdicts()
    first = verdicts.complaint(tmp_path / "m")
    assert (first is None) is (lost == "")
    assert opened
    opened.clear()
    assert verdicts.complaint(tmp_path / "m") == first
    assert opened == []


@pytest.mark.parametrize("how", ["absent", *BROKEN])
def test_a_verdict_is_renewed_when_a_shard_breaks_and_when_it_is_mended(tmp_path: Path, how: str) -> None:
    verdicts = Verdicts()
    for file in write_folder(tmp_path / "m"):
        content = file.read_bytes()
        assert verdicts.complaint(tmp_path / "m") is None
        if how == "absent":
            file.unlink()
        else:
            file.write_bytes(BROKEN[how][0](content))
        assert file.name in str(verdicts.complaint(tmp_path / "m"))
        file.write_bytes(content)
    assert verdicts.complaint(tmp_path / "m") is None


def test_a_verdict_is_renewed_for_a_file_of_the_same_size_and_time(tmp_path: Path) -> None:
    verdicts = Verdicts()
    file, other = tmp_path / "m.safetensors", tmp_path / "other"
    other.write_bytes(safetensors())
    file.write_bytes(b"\xff" * len(safetensors()))
    assert verdicts.complaint(file) is not None
    os.utime(other, ns=(0, file.stat().st_mtime_ns))
    other.replace(file)
    assert verdicts.complaint(file) is None


def test_a_verdict_is_renewed_for_a_file_that_was_written_over(tmp_path: Path) -> None:
    verdicts = Verdicts()
    file = tmp_path / "m.safetensors"
    file.write_bytes(b"\xff" * len(safetensors()))
    os.utime(file, (0, 0))
    assert verdicts.complaint(file) is not None
    file.write_bytes(safetensors())
    assert verdicts.complaint(file) is None


def test_a_verdict_is_renewed_when_the_rest_of_a_split_file_comes_and_goes(tmp_path: Path) -> None:
    verdicts = Verdicts()
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(gguf())
    assert second.name in str(verdicts.complaint(first))
    second.write_bytes(gguf())
    assert verdicts.complaint(first) is None
    second.unlink()
    assert second.name in str(verdicts.complaint(first))


def test_a_verdict_is_renewed_when_weights_come_into_a_folder(tmp_path: Path) -> None:
    verdicts = Verdicts()
    folder = described(tmp_path / "m")
    assert verdicts.complaint(folder) is not None
    (folder / "model.safetensors").write_bytes(safetensors())
    assert verdicts.complaint(folder) is None


def test_a_file_that_can_not_be_read_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = Verdicts()
    (tmp_path / "m.gguf").write_bytes(gguf())

    def denied(path: Path, *args: object) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(whole.Path, "open", denied)
        assert "can't be read by the agent: look at the permissions" in str(verdicts.complaint(tmp_path / "m.gguf"))
    assert verdicts.complaint(tmp_path / "m.gguf") is None
