"""Guards the size of what one has to read at once: short functions, small classes, no circles of files."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import networkx

from tasks.identity import Sources
from tests import shipped

ROOT = Path(__file__).parents[2]
MEDIAN, P95, LONGEST = 7, 26, 70  # Lines of a function, its signature and docstring included.
LARGEST = 250  # Lines of a class.
WALL, TABLE = 20, 10  # Lines without a pause; a longer statement is a table or a call, one item a line.


def _files() -> list[Path]:
    return [path for folder in ("tasks", "flows") for path in shipped.files(folder, "*.py")]


def _sizes(*kinds: type[ast.AST]) -> Iterator[tuple[int, str]]:
    for path in _files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                lines = node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]
                yield lines, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"  # type: ignore[attr-defined]


def test_functions_stay_short() -> None:
    sizes = sorted(_sizes(ast.FunctionDef, ast.AsyncFunctionDef))
    median, p95 = (sizes[int(share * (len(sizes) - 1))][0] for share in (0.5, 0.95))
    assert median <= MEDIAN, f"half of all functions have more than {median} lines"
    assert p95 <= P95, f"one function of twenty has more than {p95} lines"
    assert sizes[-1][0] <= LONGEST, f"cut in two: {[name for lines, name in sizes if lines > LONGEST]}"


def test_classes_stay_small() -> None:
    large = [name for lines, name in _sizes(ast.ClassDef) if lines > LARGEST]
    assert not large, f"more than {LARGEST} lines, so more than one subject: {large}"


def test_no_function_is_a_wall() -> None:
    """A blank line or a comment stands between thoughts. A statement that is a table counts as one line."""
    walls = [wall for path in _files() for wall in _walls(path)]
    assert not walls, f"more than {WALL} lines without a blank line or a comment: {walls}"


def _walls(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    pauses = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    pauses |= {number for number, line in enumerate(text.splitlines(), 1) if not line.strip()}
    tree = ast.parse(text)
    in_table = {line for node in ast.walk(tree) for line in _inside_of_table(node)}

    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = 0
            for line in range(body[0].lineno if body else node.end_lineno + 1, node.end_lineno + 1):
                length = 0 if line in pauses else length + (line not in in_table)
                if length > WALL:
                    yield f"{path.relative_to(ROOT)}:{line} {node.name}"
                    break


def _inside_of_table(node: ast.AST) -> range:
    """Lines of a long simple statement after its first."""
    is_simple = isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return | ast.Raise)
    is_table = is_simple and node.end_lineno - node.lineno >= TABLE
    return range(node.lineno + 1, node.end_lineno + 1) if is_table else range(0)


def test_no_file_imports_another_in_a_circle() -> None:
    """Imports for type checkers count too: a circle of types is a circle of subjects."""
    sources = Sources(ROOT)
    graph = networkx.DiGraph()
    for path in _files():
        for name in _named(path):
            for imported in sources.files_of(name)[-1:]:
                graph.add_edge(path.relative_to(ROOT).as_posix(), imported.relative_to(sources.root).as_posix())
    circles = [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]
    assert not circles, f"files that import each other: {circles}"


def _named(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
