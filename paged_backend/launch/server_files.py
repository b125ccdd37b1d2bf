"""Finds tritonserver, and prepares the files that it needs to run this interpreter's code."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from paged_backend.launch.backend import install_backend
from paged_backend.values.errors import ConfigError
from paged_backend.values.server_memory import heap_variables


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """A tritonserver, its backend directory (None: the default one), and its library folders."""

    executable: Path
    backend_directory: Path | None
    library_folders: tuple[Path, ...]

    def environment(self) -> dict[str, str]:
        """Return the variables that differ from this process's environment.

        The stub embeds Python, which finds its prefix, and so the site-packages, through the
        first ``python3`` on PATH, which must be the present interpreter.
        """
        changes = {"PATH": _prepend([Path(sys.executable).parent], "PATH")}
        changes |= heap_variables(os.environ)
        if self.library_folders:
            changes["LD_LIBRARY_PATH"] = _prepend(self.library_folders, "LD_LIBRARY_PATH")
        return changes


def find_server_files(directory: Path) -> ServerFiles:
    """Find the tritonserver on PATH, or else the one in the nvidia-pytriton wheel.

    For the wheel, a backend directory with links and with our backends is created in ``directory``.
    Raises ConfigError if there is no server, or none that can load this interpreter.
    """
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return ServerFiles(Path(on_path), None, ())
    package = _wheel_package()
    server = package / "tritonserver"
    libraries = [package.parent / "nvidia_pytriton.libs"]
    python_library = _libpython_folder()
    if python_library is not None:
        libraries.append(python_library)
    backends = directory / "backends"
    _link_python_backend(server, backends / "python")
    install_backend(backends)
    return ServerFiles(server / "bin" / "tritonserver", backends, tuple(libraries))


def _wheel_package() -> Path:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "no tritonserver on PATH and no nvidia-pytriton wheel: "
            "run `pip install 'paged-backend[server]'`"
        )
    numpy_version = version("numpy")
    if int(numpy_version.partition(".")[0]) >= 2:
        raise ConfigError(
            f"the bundled tritonserver needs numpy below 2, found {numpy_version}: "
            "run `pip install 'numpy<2'`"
        )
    return Path(spec.submodule_search_locations[0])


def _link_python_backend(server: Path, target: Path) -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.is_file():
        known = sorted(folder.name for folder in stub.parent.parent.iterdir())
        raise ConfigError(
            f"the bundled tritonserver has no stub for Python {python}; it has {', '.join(known)}"
        )
    shutil.rmtree(target, ignore_errors=True)  # there if another model was written to the folder
    target.mkdir(parents=True)
    for source in (*(server / "backends" / "python").iterdir(), stub):
        if source.suffix == ".so":
            # Backends in Python use this library, if its real path is in the backend directory.
            shutil.copyfile(source, target / source.name)
        elif source.is_file():
            (target / source.name).symlink_to(source)


def _libpython_folder() -> Path | None:
    """Return the folder of the libpython that the stub links to; None if the loader finds it."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = f"lib{python}.so.1.0"
    for folder in (sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib"):
        if folder and (Path(folder) / library).is_file():
            return Path(folder)
    if ctypes.util.find_library(python) is None:
        raise ConfigError(
            f"tritonserver's Python stub needs {library}, which this Python lacks: "
            "install one that was built with --enable-shared"
        )
    return None


def _prepend(folders: list[Path] | tuple[Path, ...], variable: str) -> str:
    present = [os.environ[variable]] if os.environ.get(variable) else []
    return os.pathsep.join([*map(str, folders), *present])
