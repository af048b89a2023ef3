from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.client import Context, ContextError, default_context_path, find_context, write_context

ENV = {"LLMGW_SERVER": "http://env:1", "LLMGW_TOKEN": "env"}


def test_options_win_over_variables_and_those_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "context.json"
    write_context(Context("http://file:1", "file", "/ca.pem"), path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert find_context(path=path, env={}) == Context("http://file:1", "file", "/ca.pem")
    assert find_context(path=path, env=ENV) == Context("http://env:1", "env")
    assert find_context("http://option:1", "option", path=path, env=ENV) == Context("http://option:1", "option")
    assert find_context(token="option", path=path, env={}) == Context("http://file:1", "option", "/ca.pem")


def test_the_files_token_goes_to_the_files_server_alone(tmp_path: Path) -> None:
    path = tmp_path / "context.json"
    write_context(Context("http://file:1", "file"), path)
    assert find_context("http://file:1/", path=path, env={}).token == "file"
    with pytest.raises(ContextError, match="no token for http://other:1"):
        find_context("http://other:1", path=path, env={})


@pytest.mark.parametrize(
    ("server", "missing"), [(None, "the control plane's address"), ("http://x", "the admin token")]
)
def test_what_is_missing_is_named(tmp_path: Path, server: str | None, missing: str) -> None:
    with pytest.raises(ContextError, match=missing):
        find_context(server, path=tmp_path / "none.json", env={})


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "7", '{"server": "http://x"}', '{"server": null, "token": "t"}', "\udcff"]
)
def test_a_spoilt_file_is_refused_in_words_that_hold_no_token(tmp_path: Path, text: str) -> None:
    path = tmp_path / "context.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ContextError, match=r"context\.json can't be read"):
        find_context(path=path, env={})
    path.write_text('{"server": 7, "token": "very-secret"}')
    with pytest.raises(ContextError) as error:
        find_context(path=path, env={})
    assert "very-secret" not in str(error.value)


def test_where_it_lies() -> None:
    assert default_context_path({"LLMGW_CONTEXT": "/x"}) == Path("/x")
    assert default_context_path({"XDG_CONFIG_HOME": "/c", "HOME": "/h"}) == Path("/c/llmgw/context.json")
    assert default_context_path({"HOME": "/h"}) == Path("/h/.config/llmgw/context.json")
