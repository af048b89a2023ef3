"""Which version a checkout is, and what a release is refused for: in repositories of git."""

import subprocess
from pathlib import Path

import pytest
from deploy.release import source

from llmgw.version import VERSION, of_checkout

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.invalid", "-c", "commit.gpgsign=false", "-C")


def git(root: Path, *words: str) -> str:
    return subprocess.run([*GIT, root, *words], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "README.md").write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    return tmp_path


def head(root: Path) -> str:
    return git(root, "rev-parse", "--short=7", "HEAD")


def test_without_a_tag_all_commits_count(checkout: Path) -> None:
    assert source.look(checkout).version == f"v{VERSION}+1.{head(checkout)}"


def test_the_tag_of_the_version_makes_a_release(checkout: Path) -> None:
    git(checkout, "tag", f"v{VERSION}")
    found = source.look(checkout)
    assert found.version == f"v{VERSION}"
    assert found.epoch_s == int(git(checkout, "log", "-1", "--format=%ct"))


def test_after_the_release_commits_count_from_it(checkout: Path) -> None:
    git(checkout, "tag", f"v{VERSION}")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "two")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "three")
    assert source.look(checkout).version == f"v{VERSION}+2.{head(checkout)}"


def test_a_working_tree_is_no_release_even_where_the_tag_is(checkout: Path) -> None:
    git(checkout, "tag", f"v{VERSION}")
    assert of_checkout(checkout) == f"v{VERSION}+0.{head(checkout)}"


def test_what_is_not_committed_shows(checkout: Path) -> None:
    (checkout / "README.md").write_text("two")
    assert source.look(checkout).version == f"v{VERSION}+1.{head(checkout)}.changed"


def test_a_release_is_what_its_tag_says(checkout: Path) -> None:
    git(checkout, "tag", f"v{VERSION}")
    (checkout / "README.md").write_text("two")
    with pytest.raises(source.SourceRefused, match=r"README\.md\nCommit or undo that"):
        source.look(checkout)


def test_a_tag_that_the_code_contradicts_is_refused(checkout: Path) -> None:
    git(checkout, "tag", "v99.0.0")
    with pytest.raises(source.SourceRefused, match=r"set it to '99\.0\.0', commit, and tag that commit"):
        source.look(checkout)


def test_no_checkout_no_release(tmp_path: Path) -> None:
    with pytest.raises(source.SourceRefused, match="is no checkout that git knows"):
        source.look(tmp_path)
    assert of_checkout(tmp_path) == f"v{VERSION}+unknown"
