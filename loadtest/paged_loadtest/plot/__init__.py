"""Plots reports as one PNG, or as one self-contained HTML page.

Begin with `series`, which reads the reports; `picture` and `page` draw them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paged_backend.values.errors import ConfigError
from paged_loadtest.results import load_report

FORMATS = (".png", ".html")


def plot(files: Sequence[Path], output: Path) -> None:
    """Plot several reports in the same panels.

    Raises:
        ConfigError: a file is not a report, or the output cannot be written.
    """
    if output.suffix not in FORMATS:
        raise ConfigError(f"--output: must end in {' or '.join(FORMATS)}, got {output}")
    reports = [load_report(path) for path in files]
    from paged_loadtest.plot.page import page
    from paged_loadtest.plot.picture import picture
    from paged_loadtest.plot.series import make_series

    series = make_series([path.stem for path in files], reports)
    content = picture(series) if output.suffix == ".png" else page(series).encode()
    try:
        output.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--output: cannot write {output}: {error.strerror}") from error
