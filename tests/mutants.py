"""Runs tests on mutants of a module, and prints which tests notice each.

A mutant is a copy of the source tree in which one small thing is wrong: a comparison, a constant,
a condition, a key, a statement that is missing. One that survives shows what no test checks, or is
a change that makes no difference. ``--old`` runs tests of an earlier revision on the same mutants::

    python tests/mutants.py src/trawl/rollout/moments.py --tests tests/rollout/test_moments.py
    python tests/mutants.py MODULE --tests NEW --old HEAD~3 --old-tests OLD -k "not slow"

Options that are not listed below are pytest's.
"""

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPPOSITES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
NAMES |= {"minimum": "maximum", "maximum": "minimum"}
COPIES = {"clone", "copy", "deepcopy", "detach", "contiguous", "ascontiguousarray"}
LOOKUPS = {"get", "pop", "setdefault"}
NO_CODE = (ast.Import, ast.ImportFrom, ast.Assert, ast.JoinedStr, ast.Global, ast.Nonlocal)


@dataclass(frozen=True)
class Mutant:
    """A changed module: its path, the line and kind of the change, and the whole new source."""

    path: Path
    line: int
    what: str
    source: bytes


class Changes(ast.NodeVisitor):
    """Finds what can be changed: tuples (first node, last node, new text)."""

    def __init__(self) -> None:
        self.found: list[tuple[ast.AST, ast.AST, str]] = []

    def change(self, node: ast.AST, new: ast.AST | str) -> None:
        self.found.append((node, node, new if isinstance(new, str) else ast.unparse(new)))

    def negate(self, test: ast.expr) -> None:
        """Negates a condition, unless a changed comparison does so already."""
        if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], OPPOSITES)):
            self.change(test, f"(not ({ast.unparse(test)}))")

    def drop(self, body: list[ast.stmt]) -> None:
        """Drops statements; a decorated function begins before its node, and stays."""
        if not getattr(body[0], "decorator_list", None) and not isinstance(body[0], ast.Pass):
            self.found.append((body[0], body[-1], "pass"))

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, NO_CODE):
            super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if isinstance(default, ast.Constant) and default.value is None:
                self.change(default, "True")
            elif default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test).endswith(("TYPE_CHECKING", "__name__ == '__main__'")):
            return
        self.negate(node.test)
        self.drop(node.body)
        if node.orelse and not (len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)):
            self.drop(node.orelse)
        self.generic_visit(node)

    def visit_While(self, node: ast.While | ast.IfExp) -> None:
        if not isinstance(node.test, ast.Constant):
            self.negate(node.test)
        self.generic_visit(node)

    visit_IfExp = visit_While

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.negate(test)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.drop([node])
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self.drop([node])
        if not any(ast.unparse(target).startswith("__") for target in node.targets):
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.drop([node])
        if other := OPERATORS.get(type(node.op)):
            self.change(node, ast.AugAssign(node.target, other(), node.value))
        self.generic_visit(node)

    def visit_Jump(self, node: ast.stmt) -> None:
        self.drop([node])

    # What an exception says is no behaviour that a mutant could break.
    visit_Raise = visit_Continue = visit_Break = visit_Delete = visit_Jump

    def visit_Return(self, node: ast.Return) -> None:
        if isinstance(node.value, ast.Constant):
            self.visit(node.value)
        elif node.value is not None:
            self.change(node, "return None")
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        other = COMPARISONS[type(node.ops[0])]()
        self.change(node, ast.Compare(node.left, [other, *node.ops[1:]], node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.change(node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if other := OPERATORS.get(type(node.op)):
            self.change(node, f"({ast.unparse(ast.BinOp(node.left, other(), node.right))})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.change(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self.change(node, repr(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        name = called.rpartition(".")[2]
        if name.endswith(("Error", "Warning", "warn")):
            return
        if name in NAMES:
            self.change(node.func, called.removesuffix(name) + NAMES[name])
        if name in COPIES and node.args:
            self.change(node, node.args[0])
        elif name in COPIES and isinstance(node.func, ast.Attribute):
            self.change(node, node.func.value)
        if name in LOOKUPS:
            self.keys(node.args[:1])
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if ast.unparse(node.value) != "Literal":
            self.keys([node.slice])
            self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        self.keys(node.elts)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        self.keys([key for key in node.keys if key is not None])
        self.generic_visit(node)

    def keys(self, nodes: list[ast.expr]) -> None:
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.change(node, repr(node.value + "_"))


def mutants(path: Path) -> Iterator[Mutant]:
    """Yields all mutants of a module that compile, from its first line to its last."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    changes = Changes()
    changes.visit(ast.parse(source))
    seen = {source}
    for first, last, new in sorted(changes.found, key=lambda change: change[0].lineno):
        begin = starts[first.lineno - 1] + first.col_offset
        end = starts[last.end_lineno - 1] + last.end_col_offset
        mutated = source[:begin] + new.encode() + source[end:]
        try:
            compile(mutated, path, "exec")
        except SyntaxError:
            continue
        if mutated not in seen:
            seen.add(mutated)
            old = " ".join(source[begin:end].decode().split())
            line = source[starts[first.lineno - 1] : starts[first.lineno]].decode().strip()
            what = f"drops `{old}`" if new == "pass" else f"`{old}` -> `{new}`"
            what += f" in `{line}`" if len(old) < 9 else ""
            what = what if len(what) < 110 else f"{what[:107]}..."
            yield Mutant(path, first.lineno, what, mutated)


def spread(found: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Returns ``count`` mutants, one drawn at random from each of as many parts of the module."""
    if not 0 < count < len(found):
        return found
    draw = random.Random(seed)
    bounds = [len(found) * part // count for part in range(count + 1)]
    return [found[draw.randrange(*part)] for part in pairwise(bounds)]


@dataclass(frozen=True)
class Suite:
    """Tests to run: the folder that they lie in, and the arguments for pytest."""

    root: Path
    arguments: list[str]

    def python(self, source: Path, *arguments: str) -> subprocess.Popen[str]:
        """Starts Python with the source tree ``source``, in a group of its own."""
        paths = [str(source), os.environ.get("PYTHONPATH", "")]
        scratch = source.with_name("t")
        scratch.mkdir(exist_ok=True)
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(scratch)}
        # The same examples for every mutant, of which none are kept for other runs.
        variables |= {"CI": "1", "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch)}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        options |= {"cwd": self.root, "env": variables, "start_new_session": True}
        return subprocess.Popen([sys.executable, *arguments], **options)

    def imports(self, source: Path, module: str) -> str:
        """Returns the file that the tests import as ``module``."""
        code = f"import importlib.util; print(importlib.util.find_spec({module!r}).origin)"
        with self.python(source, "-c", code) as found:
            return found.communicate()[0].strip().rpartition("\n")[2]

    def killer(self, source: Path, limit: float | None = None) -> str | None:
        """Returns which test fails with the source tree ``source``, or None."""
        pytest = ["pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", *self.arguments]
        with self.python(source, "-m", *pytest) as tests:
            try:
                output, _ = tests.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                return f"time ({limit:.0f} s)"
            finally:
                # The processes that failed tests leave behind belong to the group.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(tests.pid, signal.SIGKILL)
        if tests.returncode == 0:
            return None
        lines = output.splitlines()
        failed = [
            line.split(" ", 1)[1].split(" - ")[0]
            for line in lines
            if line.startswith(("FAILED ", "ERROR "))
        ]
        return failed[0] if failed else f"exit {tests.returncode}: {lines[-1] if lines else ''}"


def archived(root: Path, revision: str, into: Path) -> Path:
    """Writes the files of a revision, without its sources, and returns their folder."""
    command = ["git", "archive", revision, "--", ".", ":!src"]
    archive = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(into, filter="data")
    return into


def source_root(path: Path) -> Path:
    """Returns the folder from which the module is imported."""
    folder = path.parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def survey(
    base: Path, limits: list[float], suites: list[Suite], mutant: Mutant
) -> list[str | None]:
    """Returns which test of each suite kills the mutant, in its own copy of the sources."""
    with tempfile.TemporaryDirectory(dir=base.parent, prefix="") as folder:
        source = Path(folder, "src")
        shutil.copytree(base, source)
        target = source / mutant.path.relative_to(source_root(mutant.path))
        target.write_bytes(mutant.source)
        # Compiled code counts as current if time and size of its source are the same.
        for compiled in target.parent.glob(f"__pycache__/{target.stem}.*.pyc"):
            compiled.unlink()
        return [suite.killer(source, limit) for suite, limit in zip(suites, limits, strict=True)]


def run(drawn: list[Mutant], suites: list[Suite], base: Path, jobs: int) -> int:
    """Prints which test of each suite kills each mutant; returns the exit status."""
    limits = []
    name = drawn[0].path.relative_to(source_root(drawn[0].path))
    for suite in suites:
        imported = suite.imports(base, ".".join(name.with_suffix("").parts))
        if imported != str(base / name):
            print(f"Tests in {suite.root} import {imported} instead of its copy {base / name}")
            return 2
        begin = time.monotonic()
        if killer := suite.killer(base):
            print(f"{killer} fails without a mutant, in {suite.root}")
            return 2
        limits.append(5 * (time.monotonic() - begin) + 30)
        print(f"{' '.join(suite.arguments)}: pass in {(limits[-1] - 30) / 5:.0f} s", flush=True)
    kills = [0] * len(suites)
    lost = 0
    with ThreadPoolExecutor(jobs) as threads:
        surveys = threads.map(partial(survey, base, limits, suites), drawn)
        for mutant, killers in zip(drawn, surveys, strict=True):
            print(f"{mutant.path.name}:{mutant.line}  {mutant.what}")
            for name, killer in zip(("", "old: "), killers, strict=False):
                print(f"    {name}{f'killed by {killer}' if killer else 'SURVIVED'}", flush=True)
            kills = [k + (killer is not None) for k, killer in zip(kills, killers, strict=True)]
            lost += killers[0] is None and killers[-1] is not None
    figures = [f"{len(drawn)} mutants: {kills[0]} killed, {len(drawn) - kills[0]} survived"]
    if len(suites) > 1:
        figures.append(f"the old tests killed {kills[1]}, and {lost} of them alone")
    print("; ".join(figures))
    return int(lost > 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("modules", nargs="+", type=Path, help="files to change")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="what pytest is to run")
    parser.add_argument("--old", metavar="REV", help="a revision whose tests are run as well")
    parser.add_argument("--old-tests", nargs="+", help="of REV; those of --tests by default")
    parser.add_argument("--count", type=int, default=12, help="mutants per module; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="draws other mutants")
    parser.add_argument("--lines", metavar="A-B", help="changes these lines only")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--list", action="store_true", help="prints the mutants, and runs nothing")
    chosen, options = parser.parse_known_args()

    first, _, last = (chosen.lines or "1-").partition("-")
    lines = range(int(first), int(last or sys.maxsize) + 1)
    drawn = []
    for module in chosen.modules:
        found = [mutant for mutant in mutants(module.resolve()) if mutant.line in lines]
        drawn += spread(found, chosen.count, chosen.seed)
    if chosen.list:
        for mutant in drawn:
            print(f"{mutant.path.name}:{mutant.line}  {mutant.what}")
        return 0
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        suites = [Suite(Path.cwd(), [*chosen.tests, *options])]
        if chosen.old:
            tests = archived(Path.cwd(), chosen.old, Path(folder, "old"))
            suites.append(Suite(tests, [*(chosen.old_tests or chosen.tests), *options]))
        base = Path(folder, "src")
        shutil.copytree(source_root(chosen.modules[0].resolve()), base)
        return run(drawn, suites, base, chosen.jobs)


if __name__ == "__main__":
    sys.exit(main())
