"""A training script as source: where its step is, the model that it trains, its loader and its outermost loop.

Where there are several that it could be, or the way there leads out of the file, NoPlaceError says so: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import libcst as cst

from gpudiag.fixes.fix import NoPlaceError
from gpudiag.fixes.source import Block, Place, Source, is_own_attribute

LOADER = "torch.utils.data.DataLoader"

_PASSED_ON = ("enumerate", "iter", "tqdm", "islice", "trange", "track")
"""Functions that give the items of their first argument, by the last part of their names."""

_IN_PLACE = (
    "to", "cuda", "cpu", "float", "double", "half", "bfloat16", "train", "eval", "apply", "load_state_dict", "requires_grad_",
    "init_weights", "resize_token_embeddings",
)  # fmt: skip
"""Methods of a module that change it in place and give it back, or nothing."""

_CONTROL = (cst.Return, cst.Break, cst.Continue, cst.Raise, cst.Del, cst.Yield, cst.Await, cst.Global, cst.Nonlocal)


class TrainingStep(NamedTuple):
    """The statements that make a loss and differentiate it."""

    backward: cst.Call
    loss: cst.BaseExpression
    place: Place
    """Of the statement with the backward pass."""
    parts: tuple[Place, ...]
    """Of the statements before it that the loss depends on, last one first; those of outer blocks too."""
    model: cst.BaseExpression
    """What is called as the model: a name, or self.x."""
    calls: tuple[cst.Call, ...]
    """The calls of it that the loss depends on."""


class TrainingCode(Source):
    """A source with what a training script has."""

    # -- the step -------------------------------------------------------------------------------------------------------

    def find_backward(self) -> tuple[cst.Call, cst.BaseExpression, bool]:
        """Find the backward pass, its loss, and whether that is a plain loss.backward(), which no scaler and no framework makes."""
        found = [call for call in self.calls if self.get_method(call) == "backward" and not self._is_super(call)]
        if len(found) != 1:
            lines = f" (lines {', '.join(str(self.line(one)) for one in found)})" if found else ""
            raise NoPlaceError(f"{len(found)} calls of backward() stand in this file{lines}, not one", self.line(found[0]) if found else 0)
        call, func = found[0], cst.ensure_type(found[0].func, cst.Attribute)
        scaled = func.value if isinstance(func.value, cst.Call) and self.get_method(func.value) == "scale" else None
        if scaled is not None and len(scaled.args) == 1:
            return call, scaled.args[0].value, False
        plain = [arg.value for arg in call.args if arg.keyword is None]
        return (call, plain[0], False) if plain else (call, func.value, True)

    def _is_super(self, call: cst.Call) -> bool:
        holder = call.func.value if isinstance(call.func, cst.Attribute) else None
        return isinstance(holder, cst.Call) and self.render(holder.func) == "super"

    def find_step(self) -> TrainingStep:
        """Find the training step: one backward pass, and the one model that makes its loss. Raises NoPlaceError."""
        backward, loss, _ = self.find_backward()
        places = self.find_places(backward)
        needed, parts, roots = {name.value for name in self._list_names(loss)}, list[Place](), list[cst.CSTNode]([loss])
        for block, at in places:
            for index in range(at - 1, -1, -1):
                names = self._list_names(block.body[index])
                bound = {name.value for name in names if self.find_target(name) is not None}
                if bound & needed:
                    parts.append((block, index))
                    roots.append(block.body[index])
                    needed |= {name.value for name in names}
        called = [call for root in roots for call in self.find_all(cst.Call, root) if self._may_be_model(call.func)]
        by_name: dict[str, list[cst.Call]] = {}
        for call in called:
            by_name.setdefault(self.render(call.func), []).append(call)
        if len(by_name) > 1:  # a loss may be a module too: the model is the one whose parameters are asked for
            by_name = {name: calls for name, calls in by_name.items() if self._gives_parameters(calls[0].func)}
        if len(by_name) != 1:
            said = ", ".join(dict.fromkeys(self.render(call.func) for call in called)) or "none is called beside backward()"
            raise NoPlaceError(f"which model it trains is not certain: {said}", self.line(backward))
        calls = next(iter(by_name.values()))
        return TrainingStep(backward, loss, places[0], tuple(parts), calls[0].func, tuple(calls))

    def _list_names(self, node: cst.CSTNode) -> list[cst.Name]:
        """List the names in `node` that stand for variables, without attributes, keywords and what functions inside of it use."""
        found = []
        for name in self.find_all(cst.Name, node):
            parent = self._parents.get(name)
            attribute = isinstance(parent, cst.Attribute) and parent.attr is name
            keyword = isinstance(parent, cst.Arg) and parent.keyword is name
            if not attribute and not keyword and not (isinstance(parent, cst.FunctionDef) and parent.name is name):
                found.append(name)
        return found

    def _may_be_model(self, func: cst.BaseExpression) -> bool:
        """Return whether what is called is a variable that may hold a module: no function or class, and no loss of torch's."""
        bindings = self.find_bindings(func) if isinstance(func, (cst.Name, cst.Attribute)) else []
        if not bindings or all(isinstance(one, (cst.FunctionDef, cst.ClassDef, cst.Import, cst.ImportFrom)) for one in bindings):
            return False
        value = self.unwrap(self.trace(func))
        if isinstance(value, cst.Lambda) or (isinstance(value, cst.Name) and self._is_definition(value)):
            return False
        name = self.qualify(value.func) if isinstance(value, cst.Call) else ""
        return not (name.startswith("torch.nn.") and name.endswith("Loss")) and not name.startswith(("functools.", "torch.optim."))

    def _is_definition(self, name: cst.Name) -> bool:
        return any(isinstance(one, (cst.FunctionDef, cst.ClassDef)) for one in self.find_bindings(name)) or bool(self.qualify(name))

    def unwrap(self, value: cst.BaseExpression) -> cst.BaseExpression:
        """Return what stands before .to(...), .cuda() and their like."""
        while isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and value.func.attr.value in _IN_PLACE:
            value = value.func.value
        return value

    def _gives_parameters(self, model: cst.BaseExpression) -> bool:
        variable, _ = self.find_variable(model)
        return any(
            isinstance(call.func, cst.Attribute)
            and call.func.attr.value in ("parameters", "named_parameters")
            and self.render(call.func.value) == self.render(variable)
            and set(self.find_bindings(call.func.value)) & set(self.find_bindings(variable))
            for call in self.calls
        )

    # -- the model ------------------------------------------------------------------------------------------------------

    def find_variable(self, name: cst.BaseExpression) -> tuple[cst.BaseExpression, tuple[cst.CSTNode, ...]]:
        """Find the variable that a name stands for, through parameters of functions that this file calls; and where it is used there."""
        uses: tuple[cst.CSTNode, ...] = (name,)
        for _ in range(10):
            bindings = self.find_bindings(name)
            if len(bindings) != 1 or not isinstance(bindings[0], cst.Param):
                break
            function = self.find_ancestor(bindings[0], cst.FunctionDef)
            calls, complete = self.find_references(function) if function is not None else ([], False)
            given = [self.find_given(bindings[0], call) for call in calls]
            known = [one for one in given if isinstance(one, cst.Name) or (one is not None and is_own_attribute(one))]
            if not calls or not complete or len(known) != len(given):
                break
            if any(set(self.find_bindings(one)) != set(self.find_bindings(known[0])) for one in known):
                break
            name, uses = known[0], tuple(calls)
        return name, uses

    def find_model_place(self, step: TrainingStep) -> tuple[Place, str, cst.Call | None]:
        """Find the place behind the last step of the construction of the model, before it trains; its name there; and the call that makes
        it, None where that is not certain.

        What is inserted there runs once for each model that is made, and what holds the model still holds it. Raises NoPlaceError.
        """
        variable, uses = self.find_variable(step.model)
        name, bindings = self.render(variable), self.find_bindings(variable)
        if any(isinstance(one, cst.Param) for one in bindings):
            raise NoPlaceError(f"where {name} is made is not in this file, or in several places of it", self.line(step.calls[0]))
        functions = {self.find_ancestor(one, cst.FunctionDef) for one in bindings}
        if len(functions) != 1:
            lines = ", ".join(str(self.line(one)) for one in bindings)
            raise NoPlaceError(f"{name} is set in several functions (lines {lines})", self.line(bindings[0]))
        function = functions.pop()
        if is_own_attribute(variable):
            if function is None or function.name.value != "__init__":
                raise NoPlaceError(f"{name} is not made in __init__", self.line(bindings[0]))
            if all(len(self.find_places(one)) > 1 for one in bindings):
                raise NoPlaceError(f"{name} is made under a condition", self.line(bindings[0]))
            outer = [self.find_places(one)[-1] for one in bindings]
            place = max(outer, key=lambda one: one[1])
        else:
            place = self._find_place_between(name, bindings, self._lift(uses, function))
        return place, name, self._find_maker(variable)

    def _find_maker(self, variable: cst.BaseExpression) -> cst.Call | None:
        """Find the one call that makes what a variable holds, whatever changes it in place and is given back to it; None: not certain."""
        given = [self.find_value(one) for one in self.find_bindings(variable)]
        values = [self.unwrap(self.trace(self.unwrap(one))) if one is not None else None for one in given]
        others = [one for one in values if one is None or self.render(one) != self.render(variable)]
        return others[0] if len(others) == 1 and isinstance(others[0], cst.Call) else None

    def _lift(self, uses: Sequence[cst.CSTNode], function: cst.FunctionDef | None) -> list[cst.CSTNode]:
        """Return where `function` (None: the file itself) comes to these uses: the calls of the functions that they stand in."""
        found: list[cst.CSTNode] = []
        todo, seen = list(uses), set[cst.CSTNode]()
        while todo:
            use = todo.pop()
            inside = self.find_ancestor(use, cst.FunctionDef)
            if inside is function:
                found.append(use)
            elif inside is None or inside in seen:
                raise NoPlaceError("the order in which its functions run is not certain", self.line(use))
            else:
                seen.add(inside)
                calls, complete = self.find_references(inside)
                if not calls or not complete:
                    raise NoPlaceError(f"who calls {inside.name.value}() is not certain", self.line(inside))
                todo += calls
        return sorted(found, key=self.line)

    def _find_place_between(self, name: str, bindings: Sequence[cst.CSTNode], uses: Sequence[cst.CSTNode]) -> Place:
        made = [dict(self.find_places(one)) for one in bindings]
        for block, at in self.find_places(uses[0]):
            inside = [places[block] for places in made if block in places]
            earlier = [index for index in inside if index < at]
            if earlier and all(block in dict(self.find_places(use)) for use in uses):
                steps = [index for index in range(min(earlier) + 1, at) if self._changes_in_place(block.body[index], name)]
                if steps or any(self._binds_always(block.body[index], name) for index in earlier):
                    return block, max([*earlier, *steps])
            if inside:
                break
        raise NoPlaceError(f"where {name} is complete, and does not train yet, is not certain", self.line(uses[0]))

    def _changes_in_place(self, statement: cst.CSTNode, name: str) -> bool:
        only = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1 else None
        call = only.value if isinstance(only, cst.Expr) else None
        func = call.func if isinstance(call, cst.Call) else None
        return isinstance(func, cst.Attribute) and func.attr.value in _IN_PLACE and self.render(func.value) == name

    def _binds_always(self, statement: cst.CSTNode, name: str) -> bool:
        if isinstance(statement, cst.SimpleStatementLine):
            return True
        if isinstance(statement, cst.If):
            other = statement.orelse
            rest: Sequence[cst.CSTNode] = other.body.body if isinstance(other, cst.Else) else [other] if other is not None else []
            return self._any_binds(statement.body.body, name) and self._any_binds(rest, name)
        return isinstance(statement, cst.With) and self._any_binds(statement.body.body, name)

    def _any_binds(self, statements: Iterable[cst.CSTNode], name: str) -> bool:
        return any(
            self._binds_always(one, name)
            for one in statements
            if any(found.value == name and self.find_target(found) is not None for found in self.find_all(cst.Name, one))
        )

    def find_own_class(self, made: cst.BaseExpression | None) -> cst.ClassDef | None:
        """Find the class of this file that a call makes an object of; None: it is none."""
        func = made.func if isinstance(made, cst.Call) else None
        bindings = self.find_bindings(func) if isinstance(func, cst.Name) else []
        return bindings[0] if len(bindings) == 1 and isinstance(bindings[0], cst.ClassDef) else None

    def is_made_by_torch(self, made: cst.BaseExpression | None) -> bool:
        """Return whether a call makes an object of a class of torch.nn, by itself or by a function of this file."""
        if not isinstance(made, cst.Call):
            return False
        bindings = self.find_bindings(made.func) if isinstance(made.func, cst.Name) else []
        if len(bindings) == 1 and isinstance(bindings[0], cst.FunctionDef):
            given = [one.value for one in self.find_all(cst.Return, bindings[0])]
            values = [self.unwrap(self.trace(one)) for one in given if one is not None]
            return any(isinstance(one, cst.Call) and self.qualify(one.func).startswith("torch.nn.") for one in values)
        return self.qualify(made.func).startswith("torch.nn.") and "parallel" not in self.qualify(made.func)

    def check_wrappable(self, step: TrainingStep, place: Place) -> None:
        """Raise NoPlaceError unless the model, from `place` on, is only called, trained, or asked for its parameters: another object that
        wraps it has other names of weights, and no items."""
        variable, uses = self.find_variable(step.model)
        if not isinstance(variable, cst.Name):
            raise NoPlaceError(f"{self.render(variable)} is of a class of torch's own, and a part of something else", self.line(variable))
        block, at = place
        allowed = {arg.value for use in uses if isinstance(use, cst.Call) for arg in use.args}
        readers = [variable, step.model]
        for name in self.find_all(cst.Name):
            if (
                not any(set(self.find_bindings(name)) & set(self.find_bindings(one)) for one in readers)
                or self.find_target(name) is not None
            ):
                continue
            parent = self._parents[name]
            called = isinstance(parent, cst.Call) and parent.func is name
            method = parent.attr.value if isinstance(parent, cst.Attribute) and parent.value is name else ""
            before = any(where is block and index <= at for where, index in self.find_places(name))
            plain = called or method in ("parameters", "train", "eval", "zero_grad") or isinstance(parent, cst.Param) or name in allowed
            if not plain and not before:
                raise NoPlaceError(f"{name.value} is of a class of torch's own, and is used as more than a model", self.line(name))

    def find_block_call(self, made: cst.BaseExpression | None) -> cst.Call:
        """Find the call of a block in the one loop over a ModuleList in the forward pass of a class of this file. Raises NoPlaceError."""
        owner = self.find_own_class(made)
        forward = [one for one in self.find_all(cst.FunctionDef, owner) if one.name.value == "forward"] if owner is not None else []
        found = []
        for loop in self.find_all(cst.For, forward[0]) if len(forward) == 1 else ():
            values = [self.find_value(one) for one in self.find_bindings(loop.iter)]
            lists = [one for one in values if isinstance(one, cst.Call) and self.qualify(one.func) == "torch.nn.ModuleList"]
            if len(values) == len(lists) == 1 and isinstance(loop.target, cst.Name):
                name = loop.target.value
                calls = [one for one in self.find_all(cst.Call, loop.body) if isinstance(one.func, cst.Name) and one.func.value == name]
                found += calls if not any(arg.star for call in calls for arg in call.args) else []
        if len(found) != 1:
            raise NoPlaceError("no single call of a block of a ModuleList stands in its forward()", self.line(owner) if owner else 0)
        return found[0]

    def find_block_list(self, made: cst.BaseExpression | None) -> str:
        """Find the name of the one nn.ModuleList that a class of this file holds. Raises NoPlaceError."""
        owner = self.find_own_class(made)
        if owner is None:
            raise NoPlaceError("the class of the model is not in this file")
        lists = [one for one in self.find_all(cst.Attribute, owner) if is_own_attribute(one) and self._is_module_list(one)]
        if len(lists) != 1:
            raise NoPlaceError(f"{owner.name.value} has {len(lists)} lists of modules, not one", self.line(owner))
        return lists[0].attr.value

    def _is_module_list(self, target: cst.Attribute) -> bool:
        value = self.find_value(target)
        return isinstance(value, cst.Call) and self.qualify(value.func) == "torch.nn.ModuleList"

    # -- forward pass and loss -------------------------------------------------------------------------------------------

    def find_forward(self, step: TrainingStep) -> tuple[Block, int, int]:
        """Find the statements from the first call of the model to the last that makes the loss, in the block of the backward pass.

        They can be put inside another statement: nothing leaves them, and what they make is not used in another block. Raises NoPlaceError.
        """
        _, loss, plain = self.find_backward()
        block, at = step.place
        if not plain or not isinstance(loss, cst.Name):
            why = "the loss is scaled, or a framework differentiates it" if not plain else "forward and backward pass are one statement"
            raise NoPlaceError(why, self.line(step.backward))
        own = sorted(index for where, index in step.parts if where is block)
        calling = [index for index in own if any(call in self.find_all(cst.Call, block.body[index]) for call in step.calls)]
        if not calling or any(not self._is_inside(call, block) for call in step.calls):
            raise NoPlaceError("model and backward() are not called in one block", self.line(step.calls[0]))
        first, last = calling[0], own[-1]
        for statement in block.body[first : last + 1]:
            if not isinstance(statement, cst.SimpleStatementLine):
                raise NoPlaceError(f"between model and loss stands `{self.render(statement).splitlines()[0]}`", self.line(statement))
            if any(isinstance(part, _CONTROL) for part in statement.body):
                raise NoPlaceError("the step is left between model and loss", self.line(statement))
        self._check_results(block, first, last, at, loss.value)
        return block, first, last

    def _is_inside(self, node: cst.CSTNode, block: Block) -> bool:
        return any(one is block for one in self.list_ancestors(node))

    def _check_results(self, block: Block, first: int, last: int, at: int, loss: str) -> None:
        """Raise NoPlaceError where what the statements make, but the loss, is used later in a way that a short run need not come to."""
        inside = block.body[first : last + 1]
        made = {name.value for one in inside for name in self._list_names(one) if self.find_target(name) is not None} - {loss}
        later = [one for one in block.body[last + 1 :] if not isinstance(one, cst.SimpleStatementLine)]
        function = self.find_ancestor(block, cst.FunctionDef) or self.module
        start, end = self.line(inside[0]), self.line(block.body[-1])
        for name in self._list_names(function):
            if name.value not in made or self.find_target(name) is not None:
                continue
            line = self.line(name)
            in_part = any(self._stands_in(name, one) for one in later)
            outside = not self._is_inside(name, block) and line > start
            if (in_part or (outside and line > end)) and set(self.find_bindings(name)):
                raise NoPlaceError(f"{name.value} is used later, where its type would be another one", line)

    def _stands_in(self, node: cst.CSTNode, statement: cst.CSTNode) -> bool:
        return any(one is statement for one in self.list_ancestors(node))

    def find_device_type(self, step: TrainingStep) -> str:
        """Find an expression for the kind of device of the model, as code at the step."""
        name = self.render(step.model)
        return f"next({name}.parameters()).device.type"

    def refuse_unknown_context(self, step: TrainingStep) -> None:
        """Raise NoPlaceError where the step stands inside a `with` of something that is not called there: it may be autocast."""
        for parent in self.list_ancestors(step.backward):
            items = parent.items if isinstance(parent, cst.With) else ()
            held = next((one for one in items if not isinstance(one.item, cst.Call)), None)
            if held is not None:
                raise NoPlaceError(f"the step stands inside of `with {self.render(held.item)}`, which may be autocast", self.line(parent))

    # -- loaders and loops ------------------------------------------------------------------------------------------------

    def find_training_loader(self) -> cst.Call:
        """Find the constructor of the loader that the training loop goes over; the only one of the file. Raises NoPlaceError."""
        made = self.find_calls(LOADER)
        if not made:
            raise NoPlaceError("no DataLoader is made in this file")
        if len(made) == 1:
            return made[0]
        lines = ", ".join(str(self.line(one)) for one in made)
        try:
            backward, _, _ = self.find_backward()
        except NoPlaceError:
            raise NoPlaceError(f"{len(made)} DataLoaders are made (lines {lines})", self.line(made[0])) from None
        for loop in self.list_ancestors(backward):
            if isinstance(loop, cst.For) and (loader := self._find_loader(loop.iter)) in made and loader is not None:
                return loader
        raise NoPlaceError(f"which of {len(made)} DataLoaders (lines {lines}) it trains on is not certain", self.line(made[0]))

    def _find_loader(self, iterated: cst.BaseExpression) -> cst.Call | None:
        for _ in range(10):
            value = self.trace(iterated)
            if not isinstance(value, cst.Call):
                return None
            if self.qualify(value.func) == LOADER:
                return value
            if self.render(value.func).rpartition(".")[2] not in _PASSED_ON or not value.args or value.args[0].star:
                return None
            iterated = value.args[0].value
        return None

    def find_batch_copies(self) -> list[cst.Call]:
        """Find x.to(device) and x.cuda() of what the training loop is given, in its body."""
        backward, _, _ = self.find_backward()
        loop = self.find_ancestor(backward, cst.For)
        if loop is None:
            return []
        given = {name.value for name in self._list_names(loop.target)}
        found = []
        for call in self.find_all(cst.Call, loop.body):
            func = call.func
            holder = func.value if isinstance(func, cst.Attribute) else None
            holder = holder.value if isinstance(holder, cst.Subscript) else holder
            if not isinstance(holder, cst.Name) or holder.value not in given:
                continue
            plain = [arg for arg in call.args if arg.keyword is None and not arg.star]
            to = self.get_method(call) == "to" and len(plain) == len(call.args) == 1
            value = self.trace(plain[0].value) if to else None
            typed = isinstance(value, cst.Attribute) and self.qualify(value).startswith("torch.")
            if (to and not typed) or (self.get_method(call) == "cuda" and not call.args):
                found.append(call)
        return found

    def find_counter(self, loop: cst.For | cst.While) -> str | None:
        """Find the name that counts the rounds of a loop: of enumerate() or range(); None where there is none."""
        made = loop.iter if isinstance(loop, cst.For) and isinstance(loop.iter, cst.Call) else None
        if not isinstance(loop, cst.For) or made is None or not isinstance(made.func, cst.Name) or self.find_bindings(made.func):
            return None
        counter: cst.BaseExpression | None = None
        if made.func.value == "range" and len(made.args) < 3:  # the third is a step of its own
            counter = loop.target
        elif made.func.value == "enumerate" and isinstance(loop.target, cst.Tuple) and len(loop.target.elements) == 2:
            counter = loop.target.elements[0].value
        return counter.value if isinstance(counter, cst.Name) and counter.value != "_" else None

    def steps_in(self, loop: cst.For | cst.While) -> bool:
        """Return whether each round of a loop round the backward pass makes the optimizer's step too: it is no loop over micro-batches."""
        function = self.find_ancestor(self.find_backward()[0], cst.FunctionDef)
        steps = [call for call in self.calls if self.get_method(call) == "step" and self.find_ancestor(call, cst.FunctionDef) is function]
        apart = self.find_ancestor(loop, cst.FunctionDef) is not function
        return bool(steps) and (apart or any(loop in self.list_ancestors(call) for call in steps))

    def get_first_place(self, loop: cst.For | cst.While) -> Place:
        """Return the place of the first statement of a loop. Raises NoPlaceError where its body stands in one line."""
        if not isinstance(loop.body, cst.IndentedBlock):
            raise NoPlaceError("the loop is one line", self.line(loop))
        return loop.body, 0

    def find_loops(self) -> list[cst.For | cst.While]:
        """Find the loops round the backward pass, from the inside out, through functions that this file calls in one place."""
        node: cst.CSTNode = self.find_backward()[0]
        found: list[cst.For | cst.While] = []
        for _ in range(20):
            function = self.find_ancestor(node, cst.FunctionDef)
            for parent in self.list_ancestors(node):
                if parent is function:
                    break
                if isinstance(parent, (cst.For, cst.While)):
                    found.append(parent)
            if function is None:
                break
            calls, complete = self.find_references(function)
            if len(calls) != 1 or not complete:
                raise NoPlaceError(f"{len(calls)} places of this file call {function.name.value}(), not one", self.line(function))
            node = calls[0]
        if not found:
            raise NoPlaceError("no loop stands round backward() in this file", self.line(node))
        return found
