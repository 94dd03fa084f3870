from __future__ import annotations

import io
import json
import logging.config
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from verl_like.observe.logs import setup_driver_logging


@pytest.fixture(autouse=True)
def _restore_package_logger():
    logger = logging.getLogger("verl_like")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = before


def test_driver_log_goes_to_console_at_its_level_and_to_the_file_in_full(tmp_path: Path) -> None:
    screen = io.StringIO()
    setup_driver_logging(tmp_path / "new", level="INFO", console=Console(file=screen))
    log = logging.getLogger("verl_like.trainer")
    log.debug("details")
    log.info("started [0/3]")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO started \[0/3\]\n", screen.getvalue())
    text = (tmp_path / "new" / "verl_like.log").read_text()
    assert "DEBUG verl_like.trainer: details" in text and "INFO verl_like.trainer: started" in text


def test_setting_up_twice_does_not_double_lines_and_the_file_is_continued(tmp_path: Path) -> None:
    first, second = io.StringIO(), io.StringIO()
    setup_driver_logging(tmp_path, console=Console(file=first))
    logging.getLogger("verl_like").info("one")
    setup_driver_logging(tmp_path, console=Console(file=second))
    logging.getLogger("verl_like").info("two")
    assert "two" not in first.getvalue() and second.getvalue().count("two") == 1
    assert re.findall(r"one|two", (tmp_path / "verl_like.log").read_text()) == ["one", "two"]


@pytest.mark.parametrize("as_json", [True, False])
def test_a_name_that_is_no_utf8_loses_no_line(as_json: bool, tmp_path: Path) -> None:
    setup_driver_logging(tmp_path, console=Console(file=io.StringIO()), as_json=as_json)
    logging.getLogger("verl_like").info("it is \udcff, a\u2028b\nand more")
    (line, *more) = (tmp_path / "verl_like.log").read_bytes().decode().rstrip("\n").split("\n")
    if as_json:
        assert json.loads(line)["message"] == "it is \udcff, a\u2028b\nand more" and not more
    else:
        assert "it is \\udcff" in line


def test_lines_do_not_reach_the_root_logger_that_hydra_configures(tmp_path: Path) -> None:
    root_screen = io.StringIO()
    handler = logging.StreamHandler(root_screen)
    logging.getLogger().addHandler(handler)
    try:
        setup_driver_logging(tmp_path, console=Console(file=io.StringIO()))
        logging.getLogger("verl_like").warning("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert root_screen.getvalue() == ""


@pytest.mark.parametrize("gone", [False, True])
def test_a_library_that_closes_the_handlers_of_all_takes_no_later_line(gone: bool, tmp_path: Path) -> None:
    """As vLLM's import does. When the run's folder is gone by then, as `verl-like replay`'s, nobody fails."""
    folder = tmp_path / "run"
    setup_driver_logging(folder, console=Console(file=io.StringIO()))
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    if gone:
        shutil.rmtree(folder)
    logging.getLogger("verl_like").info("goes on")
    assert folder.exists() is not gone
    assert gone or "goes on" in (folder / "verl_like.log").read_text()
