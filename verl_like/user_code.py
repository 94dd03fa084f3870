"""The one loader of users' code: whatever a configuration names by path, in whatever process needs it.

A reference is text: `file.py:name`, `pkg://package.module:name` or `package.module:name`. It is the reference that
travels between processes, never the object, so nothing of a user's has to be picklable; each process loads it for
itself, once. A file must therefore lie under the same path on every machine of the run. It may import files beside it.

Modules of VERL_USE_EXTERNAL_MODULES (verl's variable: names separated by commas) and of *.model.external_lib are
imported at the start of the driver and of every worker; names that they register count as known.

Standard library only: reward workers and the configuration's checks use it.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"
FORMS = "file.py:name or pkg://module:name"
SAMPLER_KEYS = {"path_key": "data.sampler.class_path", "name_key": "data.sampler.class_name"}
_MODULE_PREFIX = "pkg://"
_REFERENCE = re.compile(r"(?:.*\.py|pkg://[A-Za-z_][\w.]*|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
_registered: dict[str, set[str]] = {}
# In place of verl's own modules where verl is not installed: the last folder to be searched, and its `verl` has no
# __init__.py, so that an installed one comes first, and files of a user's own `verl/tools` folder stand beside these.
_STAND_INS = str(Path(__file__).parent / "plugins" / "verl_agents" / "verl_shim")
# Files that no name of their own imports are modules of this one, which is their package. A process that a user's code
# starts imports them by name too, to find what it is to run: it inherits the environment.
__path__: list[str] = []
_FILES = "VERL_LIKE_USER_FILES"  # name of a module -> its file, as JSON


class _UserFiles:
    """Finds such a file, in the process that named it and in those below."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        file = json.loads(os.environ.get(_FILES, "{}")).get(name)
        return None if file is None else importlib.util.spec_from_file_location(name, file)


sys.meta_path.append(_UserFiles)


class UserCodeError(ValueError):
    """Code of the user's cannot be used: no such file or name, a failing import, a wrong signature."""


def is_reference(text: str) -> bool:
    """True where a value names code by path, and not an entry of a menu."""
    return _REFERENCE.fullmatch(text) is not None


def note_registered(menu: str, name: str) -> None:
    """Remember a name that code registered under a menu, so that the configuration's check knows it."""
    _registered.setdefault(menu, set()).add(name)


def registered_names(menu: str) -> set[str]:
    """Names registered under a menu in this process; empty where the menu's module was not imported yet."""
    return _registered.get(menu, set())


def import_modules(names: str | None, key: str) -> None:
    """Import modules separated by commas, each by its name or as a file.py. Raises UserCodeError, which names `key`."""
    for name in (names or "").split(","):
        if name.strip():
            load_module(name.strip(), key)


def external_modules() -> str:
    """Return the value of VERL_USE_EXTERNAL_MODULES in this process."""
    return os.environ.get(EXTERNAL_MODULES, "")


def load(reference: str, key: str) -> Any:
    """The object that a reference names. Raises UserCodeError, which says what is wrong with it and names `key`."""
    path, _, name = reference.rpartition(":")
    if not is_reference(reference):
        raise UserCodeError(f"{key}={reference!r}: write {FORMS}")
    return find(load_module(path, key), name, f"{key}={reference}")


def load_dotted(name: str, key: str) -> Any:
    """Load code as `load` does, also by package.module.Name, as verl's files have it."""
    return load(name if ":" in name else ":".join(name.rsplit(".", 1)), key)


def load_pair(path: str, name: str | None, *, path_key: str, name_key: str) -> Any:
    """The object that two keys name, path and name; or the first alone, as a reference."""
    if name is None:
        if not is_reference(path):
            raise UserCodeError(f"{name_key} is not set: name what {path} holds, or write {path_key}={path}:name")
        return load(path, path_key)
    return find(load_module(path, path_key), name, f"{name_key}={name}")


def load_class(path: str, name: str | None, *, path_key: str, name_key: str) -> type:
    """Load a class as `load_pair` does. Raises UserCodeError for anything else."""
    found = load_pair(path, name, path_key=path_key, name_key=name_key)
    if not isinstance(found, type):
        raise UserCodeError(f"{path_key}={path}: {name or path} is a {type(found).__name__}, not a class")
    return found


def find(module: ModuleType, name: str, setting: str) -> Any:
    """A name of a module.

    Raises UserCodeError, which suggests the nearest one; `setting` is "key=value" for its message.
    """
    if hasattr(module, name):
        return getattr(module, name)
    own = [
        n for n, v in vars(module).items() if not n.startswith("_") and getattr(v, "__module__", "") == module.__name__
    ]
    near = difflib.get_close_matches(name, own, n=1)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    where = module.__dict__.get("__file__", module.__name__)
    raise UserCodeError(f"{setting}: {where} has no such name {name!r} (it has: {', '.join(own) or 'none'}){hint}")


def check_call(function: Any, setting: str, *arguments: str, keywords: Mapping[str, Any] | None = None) -> None:
    """Raise UserCodeError unless `function` can be called with these positional arguments and keywords."""
    if not callable(function):
        raise UserCodeError(f"{setting} is a {type(function).__name__}, which cannot be called")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled functions do not tell
        return
    try:
        signature.bind(*arguments, **(keywords or {}))
    except TypeError as error:
        call = ", ".join([*arguments, *(f"{name}=" for name in keywords or {})])
        name = getattr(function, "__name__", "it")
        raise UserCodeError(
            f"{setting}: {name}{signature} cannot be called as {name}({call}): {error}. Change its arguments"
        ) from error


def takes(function: Callable[..., Any], name: str) -> bool:
    """True where a function or class accepts this keyword."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Select the keywords that a function or class accepts."""
    return {name: value for name, value in offered.items() if takes(function, name)}


def resolve_path(path: str, key: str) -> str:
    """An absolute file path; `pkg://module` and module names as they are.

    Raises UserCodeError if there is no such file.
    """
    if not path.removeprefix(_MODULE_PREFIX).strip():
        raise UserCodeError(f"{key}={path} is empty (a shell variable that is not set?): name a file, or leave it out")
    if path.startswith(_MODULE_PREFIX) or not (path.endswith(".py") or "/" in path):
        return path
    file = Path(path).expanduser().resolve()
    if file.is_dir() or "://" in path:
        what = "is a folder; name the file in it" if file.is_dir() else "is no file of this machine; copy it here"
        raise UserCodeError(f"{key}={path} {what}")
    if not file.is_file():
        raise UserCodeError(
            f"{key}={path}: there is no such file ({file}) on {socket.gethostname()}; files of your own must lie under "
            "the same path on every machine of the run"
        )
    return str(file)


def load_module(path: str, key: str) -> ModuleType:
    """The module in a file, or of that name (`pkg://` may stand before it); imported once in a process.

    UserCodeError shows the line of the user's code that failed.
    """
    path = resolve_path(path, key)
    try:
        try:
            return _imported(path)
        except ImportError as error:
            if not _is_verls(error) or _STAND_INS in sys.path:
                raise  # else: it is a module's, or comes by another file
            find_stand_ins()
            return _imported(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise anything, SystemExit included
        verls = isinstance(error, ImportError) and _is_verls(error)
        hint = "\nverl is not installed here: copy what you need of it beside your file, or install it" if verls else ""
        raise UserCodeError(f"{key}={path} could not be imported:\n{_users_traceback(error)}{hint}") from error


def find_stand_ins() -> None:
    """Make the stand-ins of verl's modules importable; an installed verl comes first."""
    if _STAND_INS not in sys.path:
        sys.path.append(_STAND_INS)


def _is_verls(error: ImportError) -> bool:
    return (error.name or "").split(".")[0] == "verl"


def _imported(path: str) -> ModuleType:
    if os.path.isabs(path):
        return _load_file(Path(path))
    if os.getcwd() not in sys.path:  # a module beside the command line, also where `python -m` did not start it
        sys.path.append(os.getcwd())
    return importlib.import_module(path.removeprefix(_MODULE_PREFIX))


def _load_file(file: Path) -> ModuleType:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__dict__.get("__file__") == str(file):
            return module
    if importlib.util.spec_from_file_location(file.stem, file) is None:
        raise ImportError(f"{file} is not a Python file (.py)")
    text, folder = file.read_text(encoding="utf-8", errors="replace"), str(file.parent)
    if re.search(r"^\s*(?:from|import)\s+verl\b", text, re.MULTILINE):
        find_stand_ins()
    of_itself = re.search(rf"^\s*(?:from|import)\s+{re.escape(file.stem)}\b", text, re.MULTILINE)  # a package is meant
    if of_itself or file.stem in sys.stdlib_module_names:
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != folder]
    if folder not in sys.path:
        sys.path.append(folder)  # helpers beside the file can be imported
    importlib.invalidate_caches()
    name = file.stem
    if not _is_importable_as(name, file):
        digest = hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()
        name = f"{__name__}.{re.sub('[^0-9A-Za-z_]', '_', name)}_{digest}"
        os.environ[_FILES] = json.dumps({**json.loads(os.environ.get(_FILES, "{}")), name: str(file)})
    return importlib.import_module(name)  # other processes can unpickle what it defines


def _is_importable_as(name: str, file: Path) -> bool:
    """True where `import name` gives this file, and no other module has the name."""
    if not name.isidentifier() or name in sys.modules or name in sys.stdlib_module_names:
        return False
    spec = importlib.machinery.PathFinder.find_spec(name)
    return spec is not None and spec.origin == str(file)


def _users_traceback(error: BaseException) -> str:
    """The traceback from the first frame that is not the import machinery's."""
    frame = error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if file != __file__ and "importlib" not in file:
            break
        frame = frame.tb_next
    return own_lines(error.with_traceback(frame), limit=-4).rstrip()


def own_lines(error: BaseException, limit: int | None = None) -> str:
    """An exception of users' code as they are shown it: where it was raised, without the heading of a crash and without
    the frames of this package that led there."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(os.path.dirname(__file__)):
        frame = frame.tb_next
    error = error if frame is None else error.with_traceback(frame)
    return "".join(traceback.format_exception(error, limit=limit)).replace("Traceback (most recent call last):\n", "")
