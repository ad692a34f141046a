"""Finds in SGLang's source where code looks at a KV pool or an attention backend.

A *look* is an attribute that is read, written or asked for with getattr or hasattr, or a test of the object's class.
Names tell which object is meant: ``token_to_kv_pool``, ``get_attn_backend()``, an annotation with such a class, and any
name or ``self`` attribute that was assigned from one of these.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

POOL, BACKEND = "pool", "backend"
_NAMES = {
    POOL: re.compile(r"(^|_)(token_to_kv_pool|kv_pool|kvcache|token_kv_pool|kvpool|device_pool|mem_pool_device)$"),
    BACKEND: re.compile(r"(^|_)(attn_backends?|attention_backend)$"),
}
_CLASSES = {
    POOL: re.compile(r"(KVCache|KVPool|TokenToKVPool)(MX\w+|FP\w+|\w*Mixin)?$"),
    BACKEND: re.compile(r"(AttentionBackend|AttnBackend)(Base)?$"),
}
_GETTERS = {"get_token_to_kv_pool": POOL, "get_kvcache": POOL, "get_attn_backend": BACKEND}
#: Files without any of these words contain no look.
_WORTH_PARSING = re.compile(
    r"kv_?pool|kvcache|attn_backend|attention_backend|KVCache|KVPool|AttnBackend|AttentionBackend"
)


@dataclass(frozen=True, order=True)
class Look:
    """One place that looks at a pool or a backend.

    Attributes:
        path: the file, below ``sglang/srt``.
        kind: ``POOL`` or ``BACKEND``.
        what: an attribute, followed by ``?`` if it may be missing (hasattr, getattr with a default) or by ``=`` if it
            is written; ``is Class`` for a test of the object's class; ``type()`` if the class itself is taken.
        line: the first place in the file.
    """

    path: str
    kind: str
    what: str
    line: int


def looks(root: Path, skip: tuple[str, ...] = ()) -> list[Look]:
    """Returns every distinct look in the files below ``root``, except in paths that begin with one of ``skip``."""
    found: dict[tuple[str, str, str], int] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(skip):
            continue
        source = path.read_text(encoding="utf-8-sig")
        if not _WORTH_PARSING.search(source):
            continue
        reader = _Reader()
        reader.visit(ast.parse(source))
        for kind, what, line in reader.found:
            found.setdefault((name, kind, what), line)
    return sorted(Look(*key, line) for key, line in found.items())


def _last(node: ast.AST) -> str | None:
    """Returns the last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def _match(patterns: dict[str, re.Pattern], name: str | None) -> str | None:
    return next((kind for kind, pattern in patterns.items() if name and pattern.search(name)), None)


def _classes(node: ast.AST) -> Iterator[str]:
    """Yields the names in an expression that holds classes; annotations may be strings."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield from re.findall(r"\w+", part.value)
        elif (name := _last(part)) is not None:
            yield name


class _Reader(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[tuple[str, str, int]] = []
        self._scopes: list[dict[str, str]] = [{}]
        self._of_self: dict[str, str] = {}

    def kind(self, node: ast.AST | None) -> str | None:
        """Returns the kind of object that an expression gives; None if it is neither."""
        match node:
            case ast.NamedExpr(value=value):
                return self.kind(value)
            case ast.IfExp(body=body, orelse=other):
                return self.kind(body) or self.kind(other)
            case ast.BoolOp(values=values):
                return next((kind for value in values if (kind := self.kind(value))), None)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                return _match(_NAMES, name)
            case ast.Call(func=function):
                return _GETTERS.get(_last(function))
            case ast.Name(id=name):
                return next((scope[name] for scope in reversed(self._scopes) if name in scope), _match(_NAMES, name))
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in self._of_self:
                return self._of_self[name]
            case ast.Attribute(attr=name):
                return _match(_NAMES, name)
        return None

    def _note(self, kind: str | None, what: str, node: ast.AST) -> None:
        if kind:
            self.found.append((kind, what, node.lineno))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._of_self = self._of_self, {}
        for part in ast.walk(node):
            match part:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
                    if kind := self.kind(value):
                        self._of_self[name] = kind
        self.generic_visit(node)
        self._of_self = outer

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self._scopes.append(
            {
                a.arg: kind
                for a in arguments
                if a.annotation is not None
                for name in _classes(a.annotation)
                if (kind := _match(_CLASSES, name))
            }
        )
        self.generic_visit(node)
        self._scopes.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_Assign(self, node: ast.Assign) -> None:
        if kind := self.kind(node.value):
            self._scopes[-1].update({t.id: kind for t in node.targets if isinstance(t, ast.Name)})
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        if kind := self.kind(node.value):
            self._scopes[-1][node.target.id] = kind
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(self.kind(node.value), node.attr + "=" * isinstance(node.ctx, ast.Store), node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        match _last(node.func), node.args:
            case "getattr" | "hasattr" | "setattr" as how, [target, ast.Constant(value=str(name)), *rest]:
                mark = {"setattr": "=", "hasattr": "?"}.get(how, "?" if rest else "")
                self._note(self.kind(target), name + mark, node)
            case "isinstance" | "issubclass", [target, classes]:
                for name in _classes(classes):
                    self._note(_match(_CLASSES, name), f"is {name}", node)
            case "type", [target]:
                self._note(self.kind(target), "type()", node)
        self.generic_visit(node)


# -- calls of attention layers -----------------------------------------------------------------------------------------

#: Names of the arguments in a call that asks for plain attention.
_PLAIN = {"q", "k", "v", "query", "key", "value", "forward_batch"}


@dataclass(frozen=True, order=True)
class Call:
    """An argument in a call of a RadixAttention, other than q, k, v and the batch.

    Attributes:
        path: the file, below ``sglang/srt``.
        what: the name of a keyword argument; ``**`` for arguments not spelled out, ``None`` for keys or values that are
            None, ``more`` for further positional arguments.
        line: the first place in the file.
    """

    path: str
    what: str
    line: int


def calls(root: Path, skip: tuple[str, ...] = ()) -> list[Call]:
    """Returns every distinct such argument in the models below ``root``.

    A layer is an attribute that a class assigns from RadixAttention. In a class without such an assignment,
    ``self.attn`` and the names of layers in the file's other classes count as layers.
    """
    found: dict[tuple[str, str], int] = {}
    for path in sorted((root / "models").rglob("*.py")):
        name, source = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8-sig")
        if name.startswith(skip) or "forward_batch" not in source:
            continue
        classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
        assigned = {node: dict(pair for part in ast.walk(node) for pair in _assigns(part)) for node in classes}
        usual = {"attn"} | {layer for made in assigned.values() for layer, is_layer in made.items() if is_layer}
        for node, made in assigned.items():
            layers = {layer for layer in usual if made.get(layer, True)}
            for part in ast.walk(node):
                if isinstance(part, ast.Call) and _called(part.func) in layers:
                    for what in _besides(part):
                        found.setdefault((name, what), part.lineno)
    return sorted(Call(*key, line) for key, line in found.items())


def _assigns(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yields attributes of self that a statement assigns, and whether they become (lists of) attention layers."""
    match node:
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
            yield name, _makes(value)
        case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=name), attr="append")):
            yield name, any(map(_makes, node.args))


def _makes(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Call) and _last(part.func) == "RadixAttention" for part in ast.walk(node))


def _called(function: ast.AST) -> str | None:
    """Returns ``name`` for ``self.name``, ``self.name[i]`` and ``self.name.forward``."""
    match function:
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id="self"), attr=name)):
            return name
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=name), attr="forward"):
            return name
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return None


def _besides(call: ast.Call) -> Iterator[str]:
    given = [*call.args, *(k.value for k in call.keywords if k.arg in _PLAIN)]
    if any(isinstance(value, ast.Constant) and value.value is None for value in given):
        yield "None"
    if len(call.args) > 4:
        yield "more"
    for keyword in call.keywords:
        if keyword.arg not in _PLAIN:
            yield keyword.arg or "**"
