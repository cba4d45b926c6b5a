"""Files that are replaced in one step, and what is no file."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from megafp8.config.publish import publish


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    publish(tmp_path / "new" / "page", "one")
    publish(tmp_path / "new" / "page", b"two")
    assert (tmp_path / "new" / "page").read_text() == "two"
    with pytest.raises(IsADirectoryError) as error:
        publish(tmp_path / "new", "a directory's name")
    assert error.value.filename == str(tmp_path / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "page"]


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    """As /dev/null is: root who names it as output must not lose it."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for name in ("pipe", "link"):
        reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
        reader.start()
        publish(tmp_path / name, name)
        assert stat.S_ISFIFO(pipe.stat().st_mode)
        reader.join(10)
    assert read == ["pipe", "link"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "page")
    for text in ("one", "two"):  # dangling at first
        publish(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "there" / "page").read_text() == text
