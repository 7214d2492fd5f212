"""The source of a script as a syntax tree that keeps format and comments (libcst): names are resolved, calls found, small edits made.

Imported by what makes patches alone: libcst takes a third of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import libcst as cst
from libcst import metadata

from gpudiag.errors import InputError
from gpudiag.fixes.fix import NoPlaceError

Block = cst.Module | cst.IndentedBlock
"""What holds statements."""

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement

Place = tuple[Block, int]
"""A block, and the index of a statement in it."""

NodeT = TypeVar("NodeT", bound=cst.CSTNode)

_MAX_TRACED = 20
"""Steps from a name to what it stands for: a script that needs more is not understood."""


class Source:
    """One file of the user's. Edits are collected, and made by `render_patched`; each fix sees a source without those of another."""

    def __init__(self, text: str) -> None:
        try:
            wrapper = metadata.MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
            found = wrapper.resolve_many(
                (metadata.ScopeProvider, metadata.QualifiedNameProvider, metadata.ParentNodeProvider, metadata.PositionProvider)
            )
        except cst.ParserSyntaxError as error:
            raise InputError(f"line {error.raw_line}: no Python that can be read: {error.message}") from None
        except RecursionError:
            raise InputError("nested too deeply to be read") from None
        self.module = wrapper.module
        self._scopes = cast("dict[cst.CSTNode, metadata.Scope | None]", found[metadata.ScopeProvider])
        self._names = cast("dict[cst.CSTNode, Any]", found[metadata.QualifiedNameProvider])
        self._parents = cast("dict[cst.CSTNode, cst.CSTNode]", found[metadata.ParentNodeProvider])
        self._positions = cast("dict[cst.CSTNode, metadata.CodeRange]", found[metadata.PositionProvider])
        self._children: dict[cst.CSTNode, Sequence[cst.CSTNode]] = {}
        self.calls: list[cst.Call] = list(self.find_all(cst.Call))
        """All calls, in the order of the text."""
        self._changes: dict[cst.CSTNode, list[Callable[[Any], Any]]] = {}
        self._before: dict[cst.CSTNode, list[str]] = {}
        self._after: dict[cst.CSTNode, list[str]] = {}
        self._regions: list[tuple[cst.CSTNode, cst.CSTNode, str]] = []
        self._imports: list[str] = []
        self._removed: set[cst.CSTNode] = set()

    # -- looking --------------------------------------------------------------------------------------------------------

    def find_all(self, kind: type[NodeT], inside: cst.CSTNode | None = None) -> Iterator[NodeT]:
        """Yield the nodes of a kind in the order of the text."""
        todo: list[cst.CSTNode] = [inside or self.module]
        while todo:
            node = todo.pop()
            if isinstance(node, kind):
                yield node
            if node not in self._children:  # libcst collects them anew each time
                self._children[node] = node.children[::-1]
            todo += self._children[node]

    def line(self, node: cst.CSTNode) -> int:
        """Return the line of the file on which `node` begins."""
        return int(self._positions[node].start.line)

    def render(self, node: cst.CSTNode) -> str:
        """Return `node` as it stands in the file."""
        return self.module.code_for_node(node).strip()

    def qualify(self, node: cst.CSTNode) -> str:
        """Return the full name of what was imported and `node` stands for ('torch.optim.AdamW'); '' for all else, and where the name may
        stand for other things too."""
        names = self._names.get(node) or ()
        names = names() if callable(names) else names
        only = next(iter(names)) if len(names) == 1 else None
        return str(only.name) if only is not None and only.source is metadata.QualifiedNameSource.IMPORT else ""

    def find_calls(self, *names: str) -> list[cst.Call]:
        """Find the calls of imported functions or classes by their full names."""
        return [call for call in self.calls if self.qualify(call.func) in names]

    def list_ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield what `node` stands in, from the inside out."""
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent

    def get_method(self, call: cst.Call) -> str:
        """Return the name of the method that is called, '' where it is none."""
        return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""

    def list_attributes(self) -> list[cst.Attribute]:
        """List all attributes of the file."""
        return list(self.find_all(cst.Attribute))

    def list_set_attributes(self) -> list[cst.Attribute]:
        """List the attributes that the file sets."""
        return [one for one in self.find_all(cst.Attribute) if self.find_target(one) is not None]

    def defines(self, function: str) -> bool:
        """Return whether the file defines a function or method of this name."""
        return any(one.name.value == function for one in self.find_all(cst.FunctionDef))

    def is_plain_name(self, node: cst.CSTNode) -> bool:
        """Return whether `node` is a name, or an attribute of one: reading it twice does nothing."""
        return isinstance(node, cst.Name) or (isinstance(node, cst.Attribute) and self.is_plain_name(node.value))

    def is_conditional(self, node: cst.CSTNode) -> bool:
        """Return whether something in its function decides if `node` is run."""
        for parent in self.list_ancestors(node):
            if isinstance(parent, (cst.FunctionDef, cst.ClassDef)):
                return False
            if isinstance(parent, (cst.If, cst.IfExp, cst.Try, cst.Match, cst.BooleanOperation, cst.Lambda)):
                return not self._is_main_guard(parent)
        return False

    def _is_main_guard(self, node: cst.CSTNode) -> bool:
        return isinstance(node, cst.If) and self.render(node.test).startswith("__name__ ==")

    def find_ancestor(self, node: cst.CSTNode, *kinds: type[NodeT]) -> NodeT | None:
        """Find the inmost node of one of `kinds` that `node` stands in."""
        return next((one for one in self.list_ancestors(node) if isinstance(one, kinds)), None)

    def find_places(self, node: cst.CSTNode) -> list[Place]:
        """Find the statements that `node` stands in, by block and index, from the inside out; of its own function alone."""
        found: list[Place] = []
        inside: cst.CSTNode = node
        for parent in (*self.list_ancestors(node),):
            if isinstance(parent, (cst.Module, cst.IndentedBlock)):
                found.append((parent, next(at for at, one in enumerate(parent.body) if one is inside)))
            if isinstance(parent, (cst.FunctionDef, cst.Lambda, cst.ClassDef)):
                break
            inside = parent
        return found

    # -- names ----------------------------------------------------------------------------------------------------------

    def find_bindings(self, name: cst.CSTNode) -> list[cst.CSTNode]:
        """Find what gives a value to the name: targets, parameters, imports, definitions. Of `self.x` all targets in its class."""
        if isinstance(name, cst.Name):
            scope = self._scopes.get(name)
            found = scope[name.value] if scope is not None else ()
            return [one.node for one in found if isinstance(one, metadata.Assignment)]
        owner = self.find_ancestor(name, cst.ClassDef)
        if not is_own_attribute(name) or owner is None:
            return []
        wanted = cst.ensure_type(name, cst.Attribute).attr.value
        targets = (one for one in self.find_all(cst.Attribute, owner) if is_own_attribute(one) and one.attr.value == wanted)
        return [one for one in targets if self.find_target(one) is not None]

    def find_target(self, node: cst.CSTNode) -> cst.AssignTarget | cst.AnnAssign | cst.AugAssign | cst.For | cst.AsName | None:
        """Find the assignment, loop or `as` of which `node` is the target, or a part of it; None where it is read."""
        inside = node
        for parent in self.list_ancestors(node):
            if isinstance(parent, (cst.AssignTarget, cst.AsName)):
                return parent
            if isinstance(parent, (cst.AnnAssign, cst.AugAssign, cst.For)):
                return parent if parent.target is inside else None
            if not isinstance(parent, (cst.Tuple, cst.List, cst.Element, cst.StarredElement)):
                return None
            inside = parent
        return None

    def find_value(self, binding: cst.CSTNode) -> cst.BaseExpression | None:
        """Find the expression that the target `binding` is given as a whole: of `x = VALUE`, not of `x, y = VALUE`; None: none such."""
        target = self._parents.get(binding)
        if isinstance(target, cst.AssignTarget):
            assignment = self._parents[target]
            return assignment.value if isinstance(assignment, cst.Assign) and len(assignment.targets) == 1 else None
        return target.value if isinstance(target, cst.AnnAssign) and target.target is binding else None

    def find_references(self, function: cst.FunctionDef) -> tuple[list[cst.Call], bool]:
        """Find the calls of a function of this file, and whether there are no other uses, so that these are all."""
        owner = self.find_ancestor(function, cst.ClassDef, cst.FunctionDef)
        if isinstance(owner, cst.ClassDef):
            wanted = function.name.value
            same = [one for one in self.find_all(cst.FunctionDef) if one.name.value == wanted]
            uses: list[cst.CSTNode] = [one for one in self.find_all(cst.Attribute) if one.attr.value == wanted]
        else:
            same, name = [function], function.name
            uses = [
                one
                for one in self.find_all(cst.Name)
                if one.value == name.value and one is not name and function in self.find_bindings(one)
            ]
        calls = [call for call in self.calls if any(call.func is one for one in uses)]
        return calls, len(calls) == len(uses) and len(same) == 1

    def find_given(self, parameter: cst.Param, call: cst.Call) -> cst.BaseExpression | None:
        """Find what a call gives to a parameter of its function; None where that is not written there."""
        holder = self._parents[parameter]
        if not isinstance(holder, cst.Parameters) or any(arg.star for arg in call.args):
            return None
        named = next((arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == parameter.name.value), None)
        ordered = [*holder.posonly_params, *holder.params]
        if named is not None or parameter not in ordered:
            return named
        own = isinstance(call.func, cst.Attribute) and ordered[0].name.value == "self"
        place = ordered.index(parameter) - own
        plain = [arg.value for arg in call.args if arg.keyword is None]
        return plain[place] if 0 <= place < len(plain) else None

    def trace(self, value: cst.BaseExpression) -> cst.BaseExpression:
        """Return what a name stands for, through single assignments and the parameters of functions that are called in one place; `value`
        itself where that is not certain."""
        for _ in range(_MAX_TRACED):
            bindings = self.find_bindings(value)
            following: cst.BaseExpression | None = None
            if len(bindings) == 1 and isinstance(bindings[0], cst.Param):
                function = self.find_ancestor(bindings[0], cst.FunctionDef, cst.Lambda)
                calls, complete = self.find_references(function) if isinstance(function, cst.FunctionDef) else ([], False)
                following = self.find_given(bindings[0], calls[0]) if len(calls) == 1 and complete else None
            elif len(bindings) == 1:
                following = self.find_value(bindings[0])
            if following is None:
                return value
            value = following
        return value

    # -- arguments ------------------------------------------------------------------------------------------------------

    def find_argument(self, call: cst.Call, name: str, place: int = -1) -> cst.Arg | None:
        """Find the argument of a call by its name, or its place among the positional ones. Raises NoPlaceError for *args and **kwargs."""
        star = next((arg for arg in call.args if arg.star), None)
        if star is not None:
            raise NoPlaceError(f"it takes arguments from {star.star}{self.render(star.value)}", self.line(call))
        named = next((arg for arg in call.args if arg.keyword is not None and arg.keyword.value == name), None)
        plain = [arg for arg in call.args if arg.keyword is None]
        return named if named is not None or not 0 <= place < len(plain) else plain[place]

    def read_literal(self, value: cst.BaseExpression | None, default: Any = None) -> Any:
        """Return the number, string, True, False or None that is written as `value`, `default` where there is none. Raises NoPlaceError for
        anything else: what a configuration decides is not decided here."""
        if value is None:
            return default
        text = self.render(value)
        if isinstance(value, cst.Name) and text in ("True", "False", "None"):
            return {"True": True, "False": False, "None": None}[text]
        if isinstance(value, (cst.Integer, cst.SimpleString)):
            return value.evaluated_value
        raise NoPlaceError(f"{text} decides it", self.line(value))

    def set_argument(self, call: cst.Call, name: str, code: str, place: int = -1) -> None:
        """Give a call the argument `name`, or another value where it has it. Raises NoPlaceError as find_argument does."""
        found, value = self.find_argument(call, name, place), cst.parse_expression(code)
        if found is not None:
            self.change(found, lambda arg: arg.with_changes(value=value))
        else:
            self.change(call, lambda made: append_argument(made, name, value))

    def append_call(self, value: cst.BaseExpression, call: str) -> None:
        """Have `value.call` stand in place of `value`."""
        text = self.render(value)
        whole = text if isinstance(value, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)) else f"({text})"
        self.change(value, lambda _: cst.parse_expression(f"{whole}.{call}"))

    def put_in_call(self, call: cst.Call, function: str, *more: str) -> None:
        """Have function(f, ARGS, MORE) stand in place of the call f(ARGS)."""
        given = ", ".join([self.render(call.func), *(self.render(arg).rstrip(",") for arg in call.args), *more])
        self.change(call, lambda _: cst.parse_expression(f"{function}({given})"))

    def remove_statement(self, call: cst.Call) -> None:
        """Remove the statement that is nothing but this call. Raises NoPlaceError where it is a part of another one, or all of a block."""
        place = self.find_places(call)[0]
        statement = place[0].body[place[1]]
        only = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1 else None
        if not isinstance(only, cst.Expr) or only.value is not call or len(place[0].body) == 1:
            raise NoPlaceError(f"{self.render(call)} is a part of another statement, or the only one of its block", self.line(call))
        self._removed.add(statement)

    # -- edits ----------------------------------------------------------------------------------------------------------

    def change(self, node: cst.CSTNode, make: Callable[[Any], Any]) -> None:
        """Have make(node) stand in place of `node`, whose inside may be changed too."""
        self._changes.setdefault(node, []).append(make)

    def insert_before(self, place: Place, *lines: str) -> None:
        """Insert statements before the one at `place`."""
        self._before.setdefault(place[0].body[place[1]], []).extend(lines)

    def insert_after(self, place: Place, *lines: str) -> None:
        """Insert statements after the one at `place`."""
        self._after.setdefault(place[0].body[place[1]], []).extend(lines)

    def put_inside(self, block: Block, first: int, last: int, header: str) -> None:
        """Put the statements `first` to `last` of a block inside a compound one, whose first line is `header`."""
        self._regions.append((block.body[first], block.body[last], header))

    def need_import(self, module: str) -> None:
        """Have the file import `module` under its own name. Raises NoPlaceError where that name, or its first part, is something else."""
        root, scopes = module.partition(".")[0], {scope for scope in self._scopes.values() if scope is not None}
        for bound in (one for scope in scopes for one in scope.assignments if one.name == root):
            node = bound.node if isinstance(bound, metadata.Assignment) else None
            plain = isinstance(node, cst.Import) and all(
                alias.asname is None
                for alias in node.names
                if alias.evaluated_name.partition(".")[0] == root or alias.evaluated_alias == root
            )
            if isinstance(bound, metadata.Assignment) and not plain:
                raise NoPlaceError(f"the name {root} is not that of the module alone", self.line(bound.node))
        top = [name for name, _ in self._list_imports()]
        if module not in top and not (module == root and any(name.partition(".")[0] == root for name in top)):
            self._imports.append(f"import {module}")

    def _list_imports(self) -> list[tuple[str, int]]:
        """List the plain imports at the beginning of the file: the module's name, and the index of the statement."""
        found = []
        for at, statement in enumerate(self.module.body[: self.find_first_place()]):
            for one in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
                if isinstance(one, cst.Import):
                    found += [(alias.evaluated_name, at) for alias in one.names if alias.asname is None]
        return found

    def find_first_place(self) -> int:
        """Find the index behind the imports with which the file begins: the first place at which its own code may stand."""
        last = 0
        for at, statement in enumerate(self.module.body):
            parts = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
            if any(isinstance(one, (cst.Import, cst.ImportFrom)) for one in parts):
                last = at + 1
            elif at == 0 and any(isinstance(one, cst.Expr) and isinstance(one.value, cst.BaseString) for one in parts):
                last = 1
            elif isinstance(statement, (cst.FunctionDef, cst.ClassDef, cst.For, cst.While, cst.With)):
                break
        return last

    def insert_at_start(self, *lines: str) -> None:
        """Insert statements behind the imports with which the file begins."""
        at = self.find_first_place()
        if at:
            self.insert_after((self.module, at - 1), f"\n{lines[0]}", *lines[1:])
        elif self.module.body:
            self.insert_before((self.module, 0), *lines)

    def _insert_import(self, line: str) -> None:
        """Insert an import among those with which the file begins, in the order of their names."""
        plain = self._list_imports()
        later = next((at for name, at in plain if name > line.removeprefix("import ")), None)
        if not plain:
            raise NoPlaceError(f"the file begins with no plain import: `{line}` has to stand above all else")
        if later is not None:
            self.insert_before((self.module, later), line)
        else:
            self.insert_after((self.module, plain[-1][1]), line)

    def render_patched(self) -> str:
        """Return the text with all edits made."""
        for line in dict.fromkeys(self._imports):
            self._insert_import(line)
        return self.module.visit(_Editor(self)).code


class _Editor(cst.CSTTransformer):
    """Makes the edits of a source."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: Any) -> Any:
        source = self._source
        updated: Any = super().on_leave(original_node, updated_node)
        if isinstance(original_node, (cst.Module, cst.IndentedBlock)):
            updated = updated.with_changes(body=self._edit_block(original_node.body, updated.body))
        for make in source._changes.get(original_node, ()):
            updated = make(updated)
        return updated

    def _edit_block(self, before: Sequence[cst.CSTNode], after: Sequence[Any]) -> list[Any]:
        source, made = self._source, list[Any]()
        opened: list[tuple[int, cst.CSTNode, str]] = []
        config = source.module.config_for_parsing
        for old, new in zip(before, after, strict=True):
            lines = [cst.parse_statement(line, config) for line in source._before.get(old, ())]
            if lines and hasattr(new, "leading_lines"):  # comments above a statement stay above what comes before it
                lines[0] = lines[0].with_changes(leading_lines=[one for one in new.leading_lines if one.comment is None][:1])
                new = new.with_changes(leading_lines=[one for one in new.leading_lines if one.comment is not None])
            made += lines
            opened += [(len(made), last, header) for first, last, header in source._regions if first is old]
            made += [] if old in source._removed else [new]
            made += [cst.parse_statement(line, config) for line in source._after.get(old, ())]
            for at, _, header in [one for one in opened if one[1] is old]:
                inside = made[at:]
                leading = inside[0].leading_lines
                inside[0] = inside[0].with_changes(leading_lines=[])
                compound = cast("cst.With", cst.parse_statement(f"{header}\n    pass\n", config))
                made[at:] = [compound.with_changes(leading_lines=leading, body=cst.IndentedBlock(body=inside))]
            opened = [one for one in opened if one[1] is not old]
        return made


def is_own_attribute(node: cst.CSTNode) -> bool:
    """Return whether `node` is `self.x`."""
    return isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == "self"


def append_argument(call: cst.Call, name: str, value: cst.BaseExpression) -> cst.Call:
    """Return the call with one more argument, written as its others are: on a line of its own where they are, comments where they were."""
    new = cst.Arg(value, keyword=cst.Name(name), equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")))
    if not call.args:
        return call.with_changes(args=[new])
    *others, last = call.args
    usual = others[-1].comma.whitespace_after if others and isinstance(others[-1].comma, cst.Comma) else call.whitespace_before_args
    gap: Any = cst.SimpleWhitespace(" ")
    if isinstance(usual, cst.ParenthesizedWhitespace):  # the next argument on a line of its own
        gap = usual.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=[])
    if isinstance(last.comma, cst.Comma):
        ending = last.comma.whitespace_after
        if isinstance(ending, cst.ParenthesizedWhitespace) and isinstance(gap, cst.ParenthesizedWhitespace):
            gap = gap.with_changes(first_line=ending.first_line, empty_lines=ending.empty_lines)  # with its comment
            ending = ending.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=[])
        new = new.with_changes(comma=last.comma.with_changes(whitespace_after=ending))
    elif isinstance(last.whitespace_after_arg, cst.ParenthesizedWhitespace):
        new = new.with_changes(whitespace_after_arg=last.whitespace_after_arg)
    last = last.with_changes(comma=cst.Comma(whitespace_after=gap), whitespace_after_arg=cst.SimpleWhitespace(""))
    return call.with_changes(args=[*others, last, new])
