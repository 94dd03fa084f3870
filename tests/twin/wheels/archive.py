"""Looks names up in a wheel or source archive, by ast: where a path leads, and whether a call would be taken.

Nothing is imported or unpacked. What a module has is what its text binds: definitions, assignments, imports (which are
followed, those for type checkers too: lazy packages say there what they export). What an object has is what its class
and the bases bind, in the class or on self. Its type is told by annotations, by `self.x = Class(...)` and by TYPES.
"""

from __future__ import annotations

import ast
import functools
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tests.twin.wheels.uses import Use

# What an attribute or annotation of theirs is at our place, where their source names an interface, or a choice.
TYPES = {
    "vllm.v1.engine.llm_engine.LLMEngine.engine_core": "vllm.v1.engine.core_client.InprocClient",
    "vllm.v1.engine.core.EngineCore.scheduler": "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm.v1.worker.gpu_worker.Worker.model_runner": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "vllm.entrypoints.llm.LLM.llm_engine": "vllm.v1.engine.llm_engine.LLMEngine",
    **{
        f"vllm.lora.worker_manager.{kind}WorkerLoRAManager._adapter_manager": (
            f"vllm.lora.model_manager.{kind}LoRAModelManager"
        )
        for kind in ("", "LRUCache")
    },
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.discard_request_mask": "vllm.v1.utils.CpuGpuBuffer",
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.req_to_token_pool": (
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
    ),
    "sglang.srt.managers.scheduler.Scheduler.tp_worker": "sglang.srt.managers.tp_worker.TpModelWorker",
}
# A class that its module puts together -> the modules whose classes bring the fields.
FIELDS = {"sglang.srt.server_args.ServerArgs": "sglang.srt.arg_groups.fields."}
_WITHOUT_NAMES = {"ABC", "Protocol", "Generic", "object", "Enum", "IntEnum", "Struct", "NamedTuple"}  # bases
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Missing(LookupError):
    """What a path or call names is not there; the text says what, and where it is now."""


@dataclass(frozen=True)
class Found:
    """Where a path leads. node: a definition, or the statement that binds it; None for a module.

    instance: it is an object of that class. module: dotted name of the file.
    """

    module: str
    node: ast.AST | None
    instance: bool = False
    owner: str = ""  # dotted name of the class that has it

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef) and not self.instance

    @property
    def is_function(self) -> bool:
        return isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef)


class Archive:
    """Python files of a wheel (.whl) or source archive (.tar.gz), by dotted module name."""

    def __init__(self, path: Path) -> None:
        self.read: dict[str, Callable[[], str]] = {}
        self.files: dict[str, str] = {}
        for name, read in _members(path):
            module = _module_of(name)
            self.read[module], self.files[module] = read, name

    @functools.cache  # noqa: B019 (lives as long as the archive)
    def bindings(self, module: str) -> dict[str, list[ast.AST]]:
        """Names that a module's text binds, each with its statements in order."""
        found: dict[str, list[ast.AST]] = {}
        for node in _statements(ast.parse(self.read[module]()).body):
            for name in _names_bound(node):
                found.setdefault(name, []).append(node)
        return found

    def look_up(self, use: Use) -> str:
        """What a table says of a use: where it is, or why not; `untold` where types end that the source does not tell.

        A name that is asked for first may be absent.
        """
        parts = use.path.split(".")
        for count in range(len(parts), 0, -1):
            rest = ".".join(parts[count:])
            try:
                at = self.find(".".join(parts[:count]).removesuffix("()") if rest else use.path)
            except Missing as error:
                return f"absent{'' if use.asked_first else f' MISSING: {error}'}"
            if at is None or (at.module not in self.files):
                continue
            wrong = "" if rest else self.refusal(use, at)
            return f"MISSING: {wrong}" if wrong else f"{self.place(at)}{f' untold: .{rest}' if rest else ''}"
        raise AssertionError(use)

    def find(self, path: str) -> Found | None:
        """Follow a path to its end; None where the way leads out of the archive or its type is not told.

        Raises Missing where a name on the way is not there.
        """
        parts = path.split(".")
        count = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in self.read), 0)
        if not count:
            raise Missing(f"no module {parts[0]}{self._elsewhere(parts[-1])}")
        at: Found | None = Found(".".join(parts[:count]), None)
        for part in parts[count:]:
            name = part.removesuffix("()")
            at = self._step(at, name) if name else at
            for _ in range(part.endswith("()")):
                at = self._result(at) if at else None
            if at is None:
                return None
        return at

    def _step(self, at: Found | None, name: str) -> Found | None:
        assert at is not None
        if at.node is None:
            found = self._in_module(at.module, name)
        elif isinstance(at.node, ast.ClassDef):
            found = self._attribute(at, name)
        else:  # a value: an attribute of its type
            kind = self._type(at)
            return None if kind is None else self._step(kind, name)
        if found is None:
            where = f"{at.module}.{at.node.name}" if isinstance(at.node, ast.ClassDef) else at.module
            raise Missing(f"{where} has no {name}{self._elsewhere(name)}")
        return None if found.module not in self.read else found

    def _in_module(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> Found | None:
        if module in seen:
            return None
        bound = sorted(self.bindings(module).get(name, []), key=lambda node: isinstance(node, Definition))
        for node in reversed(bound):  # a definition first, then the last statement
            target = _imported(node, name, module, self.files[module].endswith("__init__.py"))
            if target is None:
                return Found(module, node)
            if target.partition(".")[0] not in {m.partition(".")[0] for m in self.read}:
                return Found(target, node)  # of another package
            if target in self.read:
                return Found(target, None)
            parent, _, last = target.rpartition(".")
            if parent in self.read and (found := self._in_module(parent, last, seen | {module})):
                return found
        if f"{module}.{name}" in self.read:
            return Found(f"{module}.{name}", None)
        for star in self.bindings(module).get("*", []):
            target = _imported(star, "*", module, self.files[module].endswith("__init__.py"))
            if target in self.read and (found := self._in_module(target, name, seen | {module})):
                return found
        return None

    # Classes.

    def bases(self, at: Found) -> Iterator[Found]:
        """The class itself and those of its bases that are in the archive, the nearest first."""
        yield at
        assert isinstance(at.node, ast.ClassDef)
        for base in at.node.bases:
            found = self._named(base, at.module)
            if found is not None and found.is_class and found.node is not at.node:
                yield from self.bases(found)

    def _attribute(self, at: Found, name: str) -> Found | None:
        whole = True
        for each in self.bases(Found(at.module, at.node)):
            assert isinstance(each.node, ast.ClassDef)
            owner = f"{each.module}.{each.node.name}"
            for node in [*_statements(each.node.body), *_on_self(each.node)]:
                if name in _names_bound(node):
                    return Found(each.module, node, owner=owner)
            first = _own_method(each.node, "__init__")
            if first and name in _parameters(first)[0] + _parameters(first)[1]:  # `_has` of versions.py takes it too
                return Found(each.module, first, owner=owner)
            whole = whole and all(self._known(base, each.module) for base in each.node.bases)
        return None if whole else Found("outside", None)

    def _known(self, base: ast.expr, module: str) -> bool:
        text = ast.unparse(base).partition("[")[0]
        if text.rpartition(".")[2] in (
            "ABC",
            "Protocol",
            "Generic",
            "object",
            "Enum",
            "IntEnum",
            "Struct",
            "NamedTuple",
        ):
            return True
        found = self._named(base, module)
        return found is not None and found.is_class

    def _named(self, node: ast.AST | None, module: str) -> Found | None:
        """What an expression of names is in a module: X, a.X, X[...], X | None, "X"."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):
            sides = [s for s in (node.left, node.right) if ast.unparse(s) != "None"]
            return self._named(sides[0], module) if len(sides) == 1 else None
        if isinstance(node, ast.Subscript):
            outer = ast.unparse(node.value).rpartition(".")[2]
            return self._named(node.slice if outer in ("Optional", "Final", "ClassVar") else node.value, module)
        if isinstance(node, ast.Name | ast.Attribute):
            try:
                at: Found | None = Found(module, None)
                for name in ast.unparse(node).split("."):
                    at = self._step(at, name) if at else None
                return at
            except (Missing, AssertionError):
                return None
        return None

    def _type(self, at: Found) -> Found | None:
        """The class of a value, as an object of it; None where the source does not tell."""
        node, kind = at.node, None
        names = _names_bound(node) if node else set()
        for name in names:
            if given := TYPES.get(f"{at.owner}.{name}"):
                return self._object(self.find(given))
        if isinstance(node, ast.AnnAssign):
            kind = self._named(node.annotation, at.module)
        elif at.is_function and at.owner:  # a property
            kind = self._named(node.returns, at.module)  # type: ignore[union-attr]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            kind = self._named(node.value.func, at.module)
            if kind is not None and kind.is_function:
                kind = self._named(kind.node.returns, kind.module)  # type: ignore[union-attr]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and at.owner:
            kind = self._of_parameter(at, node)
        return self._object(kind)

    def _of_parameter(self, at: Found, node: ast.Assign) -> Found | None:
        holder = self.find(at.owner)
        assert holder is not None and isinstance(holder.node, ast.ClassDef) and isinstance(node.value, ast.Name)
        for method in holder.node.body:
            if isinstance(method, ast.FunctionDef) and any(each is node for each in ast.walk(method)):
                for argument in (*method.args.args, *method.args.kwonlyargs):
                    if argument.arg == node.value.id:
                        return self._named(argument.annotation, at.module)
        return None

    @staticmethod
    def _object(kind: Found | None) -> Found | None:
        return Found(kind.module, kind.node, instance=True) if kind is not None and kind.is_class else None

    def _result(self, at: Found) -> Found | None:
        """What a call gives: an object of a class, what a function says that it returns."""
        if at.is_class:
            return Found(at.module, at.node, instance=True)
        if at.is_function:
            return self._object(self._named(at.node.returns, at.module))  # type: ignore[union-attr]
        return None

    # Calls.

    def refusal(self, use: Use, at: Found) -> str:
        """What a call's arguments do not fit; empty where they do, or the parameters are not told."""
        if use.keywords is None:
            return ""
        taken = self._taken(at)
        if taken is None:
            return ""
        positional, words, star, stars = taken
        unknown = [word for word in use.keywords if word not in words and not stars]
        if unknown:
            return f"takes no argument {', '.join(unknown)} (it takes {', '.join(words)})"
        if use.positional > len(positional) and not star:
            return f"takes {len(positional)} positional arguments, not {use.positional}"
        return ""

    def _taken(self, at: Found) -> tuple[list[str], list[str], bool, bool] | None:
        """Positional parameters, all that can be named, and whether there are *args and **kwargs; None: not told."""
        if at.is_function:
            assert isinstance(at.node, ast.FunctionDef | ast.AsyncFunctionDef)
            positional, words, star, stars = _parameters(at.node)
            kinds = {ast.unparse(d).rpartition(".")[2] for d in at.node.decorator_list}
            bound = bool(at.owner) and "staticmethod" not in kinds
            return positional[bound:], [w for w in words if not bound or w != positional[0]], star, stars
        if not at.is_class:
            return None
        assert isinstance(at.node, ast.ClassDef)
        fields = self._collected(f"{at.module}.{at.node.name}")
        for each in self.bases(Found(at.module, at.node)):
            assert isinstance(each.node, ast.ClassDef)
            if (first := _own_method(each.node, "__init__")) is not None:
                positional, words, star, stars = _parameters(first)
                return positional[1:], [w for w in words if w != positional[0]], star, stars
            if any(not self._known(base, each.module) for base in each.node.bases):
                outside = {ast.unparse(base).partition("[")[0] for base in each.node.bases}
                if not outside <= {"TypedDict", "msgspec.Struct", "PydanticMsgspecMixin", "BaseModel"}:
                    return None
            own = [
                s.target.id for s in each.node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
            ]
            fields = own + fields
        return fields, fields, False, False

    def _collected(self, path: str) -> list[str]:
        """Fields of a class that is put together from the annotations of others (see FIELDS)."""
        folder = FIELDS.get(path)
        bodies = [ast.parse(read()).body for module, read in self.read.items() if folder and module.startswith(folder)]
        classes = [node for body in bodies for node in body if isinstance(node, ast.ClassDef)]
        fields = [each.target for node in classes for each in node.body if isinstance(each, ast.AnnAssign)]
        return [target.id for target in fields if isinstance(target, ast.Name)]

    def _elsewhere(self, name: str) -> str:
        """Where a function, class or method of this name is defined now."""
        if name.startswith("__"):
            return ""
        places = []
        for module, read in self.read.items():
            text = read()
            if f"def {name}(" in text or f"class {name}" in text:
                places += [f"{module}.{p}" for p in _defined(ast.parse(text), name)]
        return f"; now in {', '.join(sorted(places)[:3])}" if places else ""

    def place(self, at: Found) -> str:
        """File, line, and kind of what was found."""
        file = self.files[at.module]
        return file if at.node is None else f"{file}:{at.node.lineno}"  # type: ignore[attr-defined]


def _members(path: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    if path.suffix == ".whl":
        archive = zipfile.ZipFile(path)
        for name in archive.namelist():
            if name.endswith(".py"):
                yield name, functools.cache(lambda name=name: archive.read(name).decode())
    else:
        with tarfile.open(path) as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts[1:]
                if member.name.endswith(".py") and parts and parts[0] in ("flash_attn", "hopper"):
                    file = tar.extractfile(member)
                    assert file is not None
                    text = file.read().decode()
                    yield "/".join(parts), functools.partial(str, text)


def _module_of(name: str) -> str:
    """Dotted name of a file; FlashAttention 3 is installed from a folder of the source archive of 2."""
    name = name.removeprefix("hopper/") if name.startswith("hopper/flash_attn_interface") else name
    return name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def _statements(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Statements of a body, those inside if, try and with included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _names_bound(node: ast.AST | None) -> set[str]:
    if isinstance(node, Definition):
        return {node.name}
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    flat = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return {e.id if isinstance(e, ast.Name) else e.attr for e in flat if isinstance(e, ast.Name | ast.Attribute)}


def _imported(node: ast.AST, name: str, module: str, is_package: bool) -> str | None:
    """Dotted name of what an import binds to a name; None for other statements."""
    if isinstance(node, ast.Import):
        return next(a.name if a.asname else name for a in node.names if name in (a.asname, a.name.partition(".")[0]))
    if not isinstance(node, ast.ImportFrom):
        return None
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package] if node.level else []
    whole = ".".join([*base, *([node.module] if node.module else [])])
    real = next(a.name for a in node.names if name in (a.asname, a.name))
    return whole if real == "*" else f"{whole}.{real}"


def _on_self(node: ast.ClassDef) -> Iterator[ast.AST]:
    """Assignments to attributes of self, in all methods; those that tell a type first."""
    found = []
    for method in node.body:
        for each in ast.walk(method) if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) else ():
            if isinstance(each, ast.Assign):
                targets = each.targets
            elif isinstance(each, ast.AnnAssign):
                targets = [each.target]
            else:
                continue
            flat = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
            if any(isinstance(e, ast.Attribute) and ast.unparse(e.value) == "self" for e in flat):
                found.append(each)
    return iter(sorted(found, key=lambda each: not _tells(each)))


def _tells(node: ast.AST) -> bool:
    value = getattr(node, "value", None)
    return isinstance(node, ast.AnnAssign) or isinstance(value, ast.Call | ast.Name)


def _own_method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == name), None)


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[list[str], list[str], bool, bool]:
    given = node.args
    positional = [a.arg for a in (*given.posonlyargs, *given.args)]
    words = [a.arg for a in (*given.args, *given.kwonlyargs)]
    return positional, words, given.vararg is not None, given.kwarg is not None


def _defined(tree: ast.Module, name: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for m in node.body if isinstance(m, Definition) and m.name == name)
    yield from (name for node in tree.body if isinstance(node, Definition) and node.name == name)
