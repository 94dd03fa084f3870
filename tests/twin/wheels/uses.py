"""What the package uses of vLLM, SGLang, FlashAttention and Liger, read from its own source by ast.

A use is a path from a module of theirs: `vllm.sampling_params.SamplingParams`, and from an object of theirs, which is
written as its class and (): `vllm.entrypoints.llm.LLM().sleep`. Paths follow assignments, aliases of modules, `getattr`
with a constant name, loops over tuples, and what functions of the package return; what an argument is (`llm`,
`scheduler`), nothing in the source tells, so it stands in ROOTS.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_like.plugins.sglang import attention, compat, images
from verl_like.plugins.vllm import versions, vision

THEIRS = ("vllm", "sglang", "flash_attn", "flash_attn_interface", "liger_kernel", "torch_memory_saver")
_BATCH = "sglang.srt.managers.schedule_batch"
_LLM, _WORKER = "vllm.entrypoints.llm.LLM()", "vllm.v1.worker.gpu_worker.Worker()"
_SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner()"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler()"
_FORWARD = {"forward_batch": "sglang.srt.model_executor.forward_batch_info.ForwardBatch()"}
# File below the package -> names that hold an object of theirs wherever they are arguments, or attributes of self.
ROOTS: dict[str, dict[str, str]] = {
    "plugins/vllm/compat": {"llm": _LLM, "worker": _WORKER, "entries": "vllm.logprobs.FlatLogprobs()"},
    "plugins/vllm/lora": {"llm": _LLM, "worker": _WORKER},
    "plugins/vllm/engine": {"self._llm": _LLM, "worker": _WORKER, "output": "vllm.outputs.RequestOutput()"},
    "plugins/sglang/compat": {"scheduler": _SCHEDULER, "request": f"{_BATCH}.Req()"},
    "plugins/sglang/images": {"request": f"{_BATCH}.Req()"},
    "plugins/sglang/engine": {"self._scheduler": _SCHEDULER, **_FORWARD},
    "plugins/sglang/attention": _FORWARD,
}
# File and function -> the class of theirs whose arguments are the keys of the dictionaries that it builds.
ARGUMENTS = {
    ("plugins/vllm/engine", "engine_arguments"): "vllm.engine.arg_utils.EngineArgs",
    ("plugins/vllm/vision", "engine_options"): "vllm.engine.arg_utils.EngineArgs",
    ("plugins/vllm/lora", "engine_options"): "vllm.engine.arg_utils.EngineArgs",
    ("plugins/sglang/engine", "engine_arguments"): "sglang.srt.server_args.ServerArgs",
    ("plugins/reward_models/server", "vllm"): "vllm.engine.arg_utils.AsyncEngineArgs",
    ("plugins/reward_models/server", "sglang"): "sglang.srt.server_args.ServerArgs",
}
_FLAGS = {"no-enable-chunked-prefill", "no-enable-prefix-caching"}  # of a command alone: the opposites of arguments
_SAME = {"vllm.LLM()": _LLM}  # other paths of what a root names
_IMPORTS = ("importlib.import_module", "_import")
_PATHS_THROUGH = {"collective_rpc", "apply_model"}  # a list, of each worker, of what a lambda returns


@dataclass(frozen=True, order=True)
class Use:
    """One name of theirs, and how it is called: the positional arguments, and the keywords.

    keywords: None where it is not called. asked_first: the source goes on without it (getattr with a default, hasattr,
        an import in a try). overridden: a class of ours replaces the method.
    """

    path: str
    positional: int = 0
    keywords: tuple[str, ...] | None = None
    asked_first: bool = False
    overridden: bool = False

    def __str__(self) -> str:
        how = "" if self.keywords is None else f"({', '.join([*['_'] * self.positional, *self.keywords])})"
        return f"{self.path}{how}{' overridden' * self.overridden}{' if there' * self.asked_first}"


@dataclass
class _Module:
    """One file while it is read.

    returns: function of the package -> paths of what it returns.
    given: function of this file -> the keywords that calls in this file give it.
    own: attributes that classes of this file add to those that they inherit from theirs.
    """

    name: str
    roots: dict[str, str]
    returns: dict[str, set[str]]
    given: dict[str, set[str]]
    own: set[str]
    uses: dict[Use, None] = field(default_factory=dict)


class _Reader(ast.NodeVisitor):
    """Reads one scope: names -> paths in `env`, dictionaries with constant keys in `keys`."""

    def __init__(self, module: _Module, env: dict[str, set[str]], asked: bool = False) -> None:
        self.module, self.env, self.asked = module, env, asked
        self.keys: dict[str, set[str]] = {}
        self.function = ""

    # Paths of expressions.

    def paths(self, node: ast.AST | None) -> set[str]:
        """Paths of what an expression is: none where it is nothing of theirs."""
        found: set[str] = set()
        if isinstance(node, ast.Name):
            found = self.env.get(node.id, set())
        elif isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            found = {f"{path}.{node.attr}" for path in self.paths(node.value)} | self.env.get(whole, set())
        elif isinstance(node, ast.Call):
            found = self._called(node)
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):
            name = node.value.func.attr if isinstance(node.value.func, ast.Attribute) else ""
            found = self.paths(node.value) if name in _PATHS_THROUGH else set()
        elif isinstance(node, ast.IfExp):
            found = self.paths(node.body) | self.paths(node.orelse)
        elif isinstance(node, ast.Tuple):
            found = set().union(*map(self.paths, node.elts))
        return found

    def _called(self, node: ast.Call) -> set[str]:
        function, first = ast.unparse(node.func), node.args[0] if node.args else None
        if function in _IMPORTS:
            return self._text(first)
        if function == "_of":
            return {f"{m}.{n}" for m in self._text(first) for n in self._text(node.args[1])}
        if function == "getattr":
            return {f"{path}.{name}" for path in self.paths(first) for name in self._text(node.args[1])}
        own = function if "." in function else f"{self.module.name.rpartition('.')[2]}.{function}"
        if own in self.module.returns:
            return self.module.returns[own]
        if isinstance(node.func, ast.Attribute) and node.func.attr in _PATHS_THROUGH and isinstance(first, ast.Lambda):
            env = self.env | {a.arg: {self.module.roots.get(a.arg, "")} - {""} for a in first.args.args}
            return _Reader(self.module, env).paths(first.body)
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return self.env.get("super()", set())
        return {_SAME.get(f"{path}()", f"{path}()") for path in self.paths(node.func)}

    def _text(self, node: ast.AST | None) -> set[str]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return {node.value}
        return {value[1:] for value in self.env.get(f"text {ast.unparse(node)}", set())} if node else set()

    # Uses.

    def _use(self, path: str, **how: Any) -> None:
        asked = how.pop("asked_first", False) or self.asked
        if path.partition(".")[0] in THEIRS and not path.endswith("()"):
            self.module.uses[Use(path, asked_first=asked, **how)] = None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        for path in self.paths(node):
            self._use(path)
        self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        for path in self.env.get(node.id, set()) if isinstance(node.ctx, ast.Load) else ():
            self._use(path)

    def visit_Call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func)
        if function in ("getattr", "hasattr") and len(node.args) > 1:
            optional = function == "hasattr" or len(node.args) > 2
            for path in self.paths(node.args[0]):
                for name in self._text(node.args[1]):
                    self._use(f"{path}.{name}", asked_first=optional)
        elif function in (*_IMPORTS, "_of"):
            for path in self._called(node):
                self._use(path)
        else:
            self._call(node)
        self._worker_method(node)
        for each in (node.func, *node.args, *(k.value for k in node.keywords)):
            self.visit(each)

    def _call(self, node: ast.Call) -> None:
        own = ast.unparse(node.func).split(".")[-1]
        paths = self.paths(node.func)
        for path in paths:
            words = [k.arg for k in node.keywords if k.arg]
            for star in (k.value for k in node.keywords if k.arg is None):
                words += sorted(self._keys_of(star))
            positional = sum(not isinstance(a, ast.Starred) for a in node.args)
            self._use(path, positional=positional, keywords=tuple(words))
        if not paths and own == "partial" and node.args:
            self.visit(node.args[0])

    def _worker_method(self, node: ast.Call) -> None:
        """collective_rpc("name", kwargs={...}) calls a method of the worker."""
        if isinstance(node.func, ast.Attribute) and node.func.attr == "collective_rpc" and node.args:
            for name in self._text(node.args[0]):
                keys = [k for word in node.keywords if word.arg == "kwargs" for k in sorted(self._keys_of(word.value))]
                self._use(f"{self.module.roots['worker']}.{name}", keywords=tuple(keys))

    def _keys_of(self, node: ast.AST) -> set[str]:
        """Constant keys of a dictionary, of `a | b`, of a conditional and of a name that was given one."""
        if isinstance(node, ast.Dict):
            return {k.value for k in node.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}
        if isinstance(node, ast.BinOp):
            return self._keys_of(node.left) | self._keys_of(node.right)
        if isinstance(node, ast.IfExp):
            return self._keys_of(node.body) | self._keys_of(node.orelse)
        return self.keys.get(node.id, set()) if isinstance(node, ast.Name) else set()

    # Bindings.

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] in THEIRS:
                self._use(alias.name)
                self.env[alias.asname or alias.name] = {alias.name}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level and node.module and node.module.partition(".")[0] in THEIRS:
            for alias in node.names:
                self._use(f"{node.module}.{alias.name}")
                self.env[alias.asname or alias.name] = {f"{node.module}.{alias.name}"}

    def visit_Try(self, node: ast.Try) -> None:
        before = self.asked
        caught = {ast.unparse(h.type) for h in node.handlers if h.type}
        self.asked = before or bool(caught & {"ImportError", "ModuleNotFoundError", "AttributeError"})
        for each in node.body:
            self.visit(each)
        self.asked = before
        for each in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(each)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind(node.target, node.value)
            self.visit(node.value)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for each, of in zip(target.elts, value.elts, strict=True):
                self._bind(each, of)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            self.keys.setdefault(target.value.id, set()).update(self._text(target.slice))
        elif isinstance(target, ast.Name | ast.Attribute):
            name = ast.unparse(target)
            self.keys[name] = self._keys_of(value)
            if paths := self.paths(value):
                self.env[name] = paths
            elif isinstance(target, ast.Name):
                self.env.pop(name, None)
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                self.env[f"text {name}"] = {f" {value.value}"}

    def visit_For(self, node: ast.For) -> None:
        if isinstance(node.target, ast.Name):
            if isinstance(node.iter, ast.Tuple) and all(isinstance(e, ast.Constant) for e in node.iter.elts):
                self.env[f"text {node.target.id}"] = {f" {e.value}" for e in node.iter.elts}  # type: ignore[attr-defined]
            elif isinstance(node.iter, ast.Tuple):
                self.env[node.target.id] = self.paths(node.iter)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if self.function and (found := self.paths(node.value)):
            self.module.returns.setdefault(self.function, set()).update(found)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        env = self.env | {name: {root} for name, root in self.module.roots.items() if name in arguments or "." in name}
        inner = _Reader(self.module, {k: v for k, v in env.items() if k not in arguments or k in self.module.roots})
        inner.keys = dict(self.keys)
        if node.args.kwarg:
            inner.keys[node.args.kwarg.arg] = self.module.given.get(node.name, set()) - set(arguments)
        if base := self.env.get("class", set()):
            inner.env["self"] = inner.env["super()"] = {f"{path}()" for path in base}
        else:
            inner.function = f"{self.module.name.rpartition('.')[2]}.{node.name}"
        for each in node.body:
            inner.visit(each)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = set().union(*map(self.paths, node.bases)) if node.bases else set()
        for base in node.bases:
            self.visit(base)
        inner = _Reader(self.module, {**self.env, "class": bases})
        for each in node.body:
            own = each.name if isinstance(each, ast.FunctionDef) and each.name != "__init__" else ""
            for base in bases if own else ():
                if own not in _NEW:
                    self._use(f"{base}.{own}", overridden=True)
            inner.visit(each)
        if bases:  # an object of ours is one of theirs
            self.env[node.name] = bases


# What we add to theirs: a method of a class that inherits, a name in a module that is found before the builtin one.
_NEW = {"_attend", "vars"}


def uses(package: Path) -> dict[str, list[Use]]:
    """All uses below a folder of Python files, by their first name, each once."""
    trees = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(name in text for name in THEIRS):
            trees[path.relative_to(package).with_suffix("").as_posix()] = ast.parse(text)
    returns: dict[str, set[str]] = {}
    for _ in range(3):  # what functions return is known after the first times
        found: dict[Use, None] = {}
        for name, tree in trees.items():
            module = _Module(name.replace("/", "."), ROOTS.get(name, {}), returns, _given(tree), _own(tree))
            _Reader(module, {}).visit(tree)
            found |= {use: None for use in module.uses if not _new(use.path, module.own)}
    for (name, function), target in ARGUMENTS.items():
        if name in trees:
            found[Use(target, keywords=_built(trees[name], function))] = None
    found |= dict.fromkeys([*declared(), *(_second(use) for use in found if _on_both(use))])
    grouped: dict[str, list[Use]] = {}
    for use in sorted(_without_shorter(found), key=str):
        grouped.setdefault(use.path.partition(".")[0].removesuffix("()"), []).append(use)
    return grouped


def declared() -> Iterator[Use]:
    """Names that the engines' own checks at a start look for, whether or not a use of them was seen."""
    tables = (versions.USED, versions.ON_CPU, versions.OF_SPECULATION, versions.OF_ADAPTERS, versions.OF_IMAGES)
    for line in itertools.chain(*tables):
        module, _, names = line.partition(":")
        yield from (Use(f"{module}.{name}") for name in names.split() or ())
    yield from (Use(f"{_LLM}.llm_engine.{path}") for path in versions.OF_ENGINE)
    yield from (Use(f"{_WORKER}.model_runner.{path}") for path in versions.OF_CPU_RUNNER)
    yield from (Use(f"{module}.{name}") for module, name in (*compat._USED, *attention.USED, *images.USED))
    functional = (
        "liger_kernel.transformers.functional"  # put into transformers' forwards by lean_model.py, and called so
    )
    yield Use(f"{functional}.liger_rope", positional=4, keywords=("unsqueeze_dim",))
    yield from (Use(f"{functional}.{name}", positional=2, keywords=()) for name in ("liger_swiglu", "liger_geglu"))
    models = vision._MODELS.items()
    yield from (Use(f"vllm.model_executor.models.{module}.{name}") for name, module in models)


def _on_both(use: Use) -> bool:
    """True for uses of vLLM's model runner on devices: there its second one runs dense models, the first all others."""
    path = use.path.removeprefix(f"{_WORKER}.model_runner.")
    on_cpu = any(path.startswith(name.partition(".")[0]) for name in versions.OF_CPU_RUNNER if name != "sampler")
    return path != use.path and not on_cpu and "topk_topp_sampler" not in path


def _second(use: Use) -> Use:
    return dataclasses.replace(use, path=use.path.replace(f"{_WORKER}.model_runner", _SECOND_RUNNER))


def _given(tree: ast.Module) -> dict[str, set[str]]:
    """Keywords that calls by a plain name give each function."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.setdefault(node.func.id, set()).update(k.arg for k in node.keywords if k.arg)
    return found


def _own(tree: ast.Module) -> set[str]:
    """Annotated attributes of classes inside functions: those are the ones that inherit from classes of theirs."""
    outer = set(tree.body)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node not in outer]
    return _NEW | {
        each.target.id
        for node in classes
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def _new(path: str, own: set[str]) -> bool:
    return bool(own & {part.removesuffix("()") for part in path.split(".")})


def _built(tree: ast.Module, function: str) -> tuple[str, ...]:
    """Constant keys of the dictionaries that a function builds, those inside other dictionaries left out."""
    (node,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function)
    inner = {
        id(d) for outer in ast.walk(node) if isinstance(outer, ast.Dict) for v in outer.values for d in ast.walk(v)
    }
    asked = [
        each for each in ast.walk(node) if isinstance(each, ast.If) and "__dataclass_fields__" in ast.unparse(each)
    ]
    inner |= {id(d) for each in asked for d in ast.walk(each)}  # given where it is taken
    keys: list[ast.expr | None] = []
    for each in ast.walk(node):
        if id(each) in inner:
            continue
        if isinstance(each, ast.Dict):
            keys += each.keys
        elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Subscript):
            inner |= {id(d) for d in ast.walk(each.value)}
            keys.append(each.targets[0].slice)
    names = {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)} - _FLAGS
    return tuple(sorted(name.replace("-", "_") for name in names))


def _without_shorter(found: Iterable[Use]) -> Iterator[Use]:
    """Leave out what a longer use says already: the name of what is called, a name asked for and then taken."""
    everything = set(found)
    objects = {use.path.replace("()", "") for use in everything if "()" in use.path}
    called = {use.path for use in everything if use.keywords is not None}
    asked = {use.path for use in everything if use.asked_first}
    for use in everything:
        plain = use.keywords is None and not use.overridden
        if plain and use.path in called and not use.asked_first:
            continue
        if not use.asked_first and use.path in asked:
            continue
        if plain and not use.asked_first and _is_prefix(use.path, everything):
            continue
        if plain and "()" not in use.path and use.path in objects:
            continue
        yield use


def _is_prefix(path: str, everything: set[Use]) -> bool:
    return any(u.path.startswith((f"{path}.", f"{path}().")) and not u.asked_first for u in everything)
