"""`verl-like report RUN`: one HTML file about a run, finished or not."""

from __future__ import annotations

import argparse

from verl_like.config.errors import input_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run's folder, and where the file goes."""
    parser.add_argument("run_folder", metavar="RUN", help="the run's folder: trainer.log_dir, or default_local_dir")
    parser.add_argument("--out", metavar="FILE", help="where to write it; default: RUN/report.html")


def run(arguments: argparse.Namespace) -> None:
    """Write the file and print its path; raises ConfigError, hence exit status 1, where there is no run."""
    from verl_like.kit.report.page import write_report

    with input_errors():
        print(write_report(arguments.run_folder, arguments.out))
