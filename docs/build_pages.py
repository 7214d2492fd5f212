"""What mkdocs shows beyond the text of this folder: parts made from the program, and the documents that stand beside the code.

A page says where a part goes by a line such as `<!-- generated: commands -->`; it is made when the pages are built, so it is never old.
`make docs` builds the pages; mkdocs calls `on_files` and `on_page_markdown` (https://www.mkdocs.org/user-guide/configuration/#hooks).
"""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

BESIDE = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "rules/README.md": "writing-rules.md",
    "samples/README.md": "samples/index.md",
    "samples/SCORE.md": "samples/planted.md",
    "samples/styles/SCORE.md": "samples/styles.md",
    "samples/field/SCORE.md": "samples/field.md",
    "tests/benchmarks/RESULTS.md": "benchmarks.md",
}
"""Documents outside this folder, by their path in the checkout -> the page that each becomes."""

MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
TYPE = re.compile(r" <(?:str|path|time|int range|list\[str\])>$")
"""What a help text says where it has no word of its own for a value."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the documents that stand beside the code."""
    from mkdocs.structure.files import File

    for path, page in BESIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the text of a page with its generated parts, and with links that lead to pages."""
    source = Path(page.file.abs_src_path).resolve().relative_to(ROOT).as_posix()
    return lead_links_to_pages(fill_markers(markdown), source)


def fill_markers(markdown: str) -> str:
    """Return the text with each generated part in place of its marker. Raises KeyError for a part that nothing makes."""
    return MARKER.sub(lambda found: PARTS[found[1]](), markdown)


def lead_links_to_pages(markdown: str, source: str) -> str:
    """Return the text of `source`, a path in the checkout, with its links led to pages; a file that is no page is named by its path."""

    def lead(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        path, mark, fragment = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return found[0]
        named = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        page = find_page(named)
        if page is not None:
            here = posixpath.dirname(find_page(source) or "")
            return f"{image}[{text}]({posixpath.relpath(page, here or '.')}{mark}{fragment})"
        if not (ROOT / named).exists():
            return found[0]  # mkdocs names it
        return f"`{named}`" if text.strip("`") in (named, posixpath.basename(named)) else f"{text} (`{named}`)"

    return "".join(part if FENCE.fullmatch(part) else LINK.sub(lead, part) for part in FENCE.split(markdown))


def find_page(path: str) -> str | None:
    """Return the page that a file of the checkout becomes; None where it becomes none."""
    if path in BESIDE:
        return BESIDE[path]
    within = path.startswith("docs/") and not path.endswith(".py") and (ROOT / path).is_file()
    return path.removeprefix("docs/") if within else None


def describe_commands() -> str:
    """Return every command with its arguments and options, as its help has them."""
    import typer

    from gpudiag.cli import app

    group: Any = typer.main.get_command(app)
    return "\n\n".join(_describe_command(f"gpudiag {name}", command) for name, command in sorted(group.commands.items()))


def _describe_command(name: str, command: Any, level: int = 2) -> str:
    context = command.context_class(command, info_name=name)
    found = [one.get_help_record(context) for one in command.params]
    rows = [f"| `{_cell(TYPE.sub('', row[0]))}` | {_cell(_escape(row[1]))} |" for row in found if row is not None]
    table = ["| | |", "|---|---|", *rows] if rows else []
    below = getattr(command, "commands", {})
    parts = [f"{'#' * level} {name}", _escape(inspect.cleandoc(command.help or "")), "\n".join(table)]
    parts += [_describe_command(f"{name} {sub}", one, level + 1) for sub, one in sorted(below.items())]
    return "\n\n".join(filter(None, parts))


def describe_python() -> str:
    """Return every public name with its arguments and its docstring."""
    import gpudiag

    return "\n\n".join(_describe_name(f"gpudiag.{name}", getattr(gpudiag, name)) for name in sorted(gpudiag.__all__, key=str.lower))


def _describe_name(name: str, found: Any) -> str:
    if not callable(found):
        return f"## {name}\n\n`{found}`"
    if not inspect.isclass(found):
        return "\n\n".join((f"## {name}", _show_call(name, found), _show_docstring(found)))
    parts = [f"## {name}", _show_call(name, found), _show_docstring(found)]
    for member, function in _find_members(found):
        parts += [f"### {name}.{member}", _show_call(member, function), _show_docstring(function)]
    return "\n\n".join(filter(None, parts))


def _find_members(found: type) -> Iterator[tuple[str, Any]]:
    for name in dict.fromkeys(name for base in found.__mro__ for name in vars(base) if not name.startswith("_")):
        member = inspect.getattr_static(found, name)
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) and function.__module__.startswith("gpudiag"):
            yield name, member


def _show_call(name: str, found: Any) -> str:
    """Return how it is called, as it stands in the source; of a struct, its fields."""
    function = found.__init__ if inspect.isclass(found) else found
    returned = ""
    if isinstance(found, property):
        tree: Any = ast.parse(textwrap.dedent(inspect.getsource(found.fget or found))).body[0]
        return f"```py\n{name}: {ast.unparse(tree.returns)}\n```"
    if hasattr(found, "__struct_fields__"):
        tree = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
        given = [ast.unparse(line) for line in tree.body if isinstance(line, ast.AnnAssign)]
    elif inspect.isfunction(function):
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        given = [argument for argument in _list_arguments(tree.args) if argument != "self"]
        returned = "" if inspect.isclass(found) or tree.returns is None else f" -> {ast.unparse(tree.returns)}"
    else:  # an exception has no arguments of its own
        return ""
    call = f"{name}({', '.join(given)}){returned}"
    lines = [call] if len(call) <= 100 else [f"{name}(", *(f"    {argument}," for argument in given), f"){returned}"]
    return "\n".join(("```py", *lines, "```"))


def _list_arguments(given: ast.arguments) -> Iterator[str]:
    placed = [*given.posonlyargs, *given.args]
    defaults = [*([None] * (len(placed) - len(given.defaults))), *given.defaults, *given.kw_defaults]
    for number, (argument, default) in enumerate(zip((*placed, *given.kwonlyargs), defaults, strict=True)):
        if number == len(placed):
            yield f"*{ast.unparse(given.vararg)}" if given.vararg else "*"
        yield ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")
    if given.vararg and not given.kwonlyargs:
        yield f"*{ast.unparse(given.vararg)}"
    if given.kwarg:
        yield f"**{ast.unparse(given.kwarg)}"


def _show_docstring(found: Any) -> str:
    """Return a docstring as Markdown: its examples and tables keep their columns."""
    parts = []
    for part in (inspect.getdoc(found) or "").split("\n\n"):
        if part.startswith(">>>") or re.match(r"=+ +=", part):
            parts.append(f"```text\n{part}\n```" if part.startswith("=") else f"```pycon\n{part}\n```")
        else:
            parts.append(_escape(part))
    return "\n\n".join(parts)


def describe_rules() -> str:
    """Return every rule, by category: what `gpudiag rules show` prints, but for its tests."""
    from gpudiag.diagnosis.loader import load_active_rules
    from gpudiag.report.rule_pages import build_rule_topics, name_rule_category

    parts, category = [], ""
    rules = sorted(load_active_rules([], None).all, key=lambda rule: (name_rule_category(rule), rule.id))
    for rule in rules:
        if name_rule_category(rule) != category:
            parts.append(f"## {(category := name_rule_category(rule))}")
        topics = build_rule_topics(rule)
        rows = {label.strip(): _say_in_line(text, code=label in topics.code) for label, text in topics.rows if label != "tests"}
        why = rows.pop("why")
        parts += [f"### {rule.id} {_escape(rule.file.title)}", why, "\n".join(f"* {label}: {text}" for label, text in rows.items())]
    return "\n\n".join(parts)


def _say_in_line(text: str, *, code: bool) -> str:
    joined = "; ".join(" ".join(line.split()) for line in text.splitlines())
    return f"`{joined}`" if code else _escape(joined)


def _escape(text: str) -> str:
    """Return text of the program in which `<name>` and `*` are themselves; code in backticks stays code."""
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(piece if piece.startswith("`") else re.sub(r"([<*\[])", r"\\\1", piece) for piece in pieces)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PARTS: dict[str, Callable[[], str]] = {"commands": describe_commands, "python": describe_python, "rules": describe_rules}
"""What can be generated, by the name in its marker."""
