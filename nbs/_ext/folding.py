"""Reading mode: which code a page folds, and the one line that stands for it.

Imports, checks, drawing code and long definitions are a click away, in a `<details>` that needs no script.
What a check asserts is counted in its source; that it holds is known because the cell was run without an error.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

LONG = 15
"""Lines of exported code that a page still shows whole."""
WIDE = 90
"""Characters of a signature that still names types."""
EQUAL_CALLS = {"equal", "allclose", "isclose", "is_close"}
DISTANCES = {"abs", "norm", "dist", "error", "relative_error"}


def named(node: ast.expr) -> str:
    """The last name of a call's function: `allclose` of `torch.allclose(...)`."""
    match node:
        case ast.Call(ast.Attribute(attr=name)) | ast.Call(ast.Name(name)):
            return name
    return ""


def conjuncts(test: ast.expr) -> Iterator[ast.expr]:
    """The conditions that `and`, `all(...)` and `.all()` join."""
    match test:
        case ast.BoolOp(ast.And(), values):
            for value in values:
                yield from conjuncts(value)
        case ast.Call(ast.Attribute(value, "all"), []):
            yield from conjuncts(value)
        case ast.Call(ast.Name("all"), [ast.GeneratorExp(elt)]):
            yield from conjuncts(elt)
        case _:
            yield test


def is_distance(node: ast.expr) -> bool:
    """True for the size of a difference, and for what is called an error."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    differs = any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub) for n in ast.walk(node))
    return bool(names & {"error", "relative_error"}) or (differs and bool(names & DISTANCES))


def tolerance(condition: ast.expr) -> float | None:
    """The number to which a condition asks for equality, if it is written there."""
    match condition:
        case ast.Compare(left, [ast.Lt() | ast.LtE()], [ast.Constant(float() as bound)]) if is_distance(left):
            return bound
        case ast.Call(keywords=keywords) if named(condition) in EQUAL_CALLS:
            given = [k.value.value for k in keywords if k.arg in ("atol", "rtol") and isinstance(k.value, ast.Constant)]
            return max((float(value) for value in given if isinstance(value, int | float)), default=None)
    return None


def kind(condition: ast.expr) -> str:
    """What a condition is: an equality, a bound, or another condition."""
    if tolerance(condition) is not None or named(condition) in EQUAL_CALLS:
        return "equality"
    match condition:
        case ast.Compare(ops=ops) if all(isinstance(op, ast.Eq | ast.Is) for op in ops):
            return "equality"
        case ast.Compare(ops=ops) if all(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE | ast.Eq) for op in ops):
            return "bound"
    return "condition"


PLURALS = {"equality": "equalities", "bound": "bounds", "condition": "conditions"}


def count(tree: ast.Module) -> str:
    """Say what a cell asserts: "3 equalities to 1e-09, 1 bound, in a loop"."""
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    conditions = [condition for test in tests for condition in conjuncts(test)]
    numbers = Counter(map(kind, conditions))
    parts = [f"{n} {PLURALS[k] if n > 1 else k}" for k in PLURALS if (n := numbers[k])]
    loosest = max(filter(None, map(tolerance, conditions)), default=None)
    if loosest is not None:
        parts[0] += f" to {loosest:g}" if numbers["equality"] == 1 else f", the loosest to {loosest:g}"
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    looped = any(isinstance(inner, ast.Assert) for loop in loops for inner in ast.walk(loop))
    return ", ".join(parts) + (", in a loop" if looped else "")


def signature(node: ast.stmt) -> str:
    """The head of a definition, and the first line of its docstring below."""
    match node:
        case ast.FunctionDef(name=name, args=args, returns=returns):
            result = f" → {ast.unparse(returns)}" if returns else ""
            head = f"def {name}({ast.unparse(args)}){result}"
            if len(head) > WIDE:
                head = f"def {name}({', '.join(arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs])})"
        case ast.ClassDef(name=name, bases=bases):
            head = f"class {name}({', '.join(map(ast.unparse, bases))})" if bases else f"class {name}"
        case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
            return f"{name} = ..."
        case _:
            return ""
    return "\n    ".join([head, *(ast.get_docstring(node) or "").splitlines()[:1]])


def is_setting(node: ast.stmt) -> bool:
    """True for an import, a name for a value, and the call that sets the style of figures."""
    return isinstance(node, ast.Import | ast.ImportFrom | ast.Assign) or ast.unparse(node) == "use_style()"


def has_run(cell: Any) -> bool:
    """True if the stored cell was executed and none of its outputs is an error."""
    failed = any(output.output_type == "error" for output in cell.get("outputs", []))
    return cell.get("execution_count") is not None and not failed


def exported_line(body: list[ast.stmt], lines: int) -> str | None:
    """The line for exported code: of imports alone, and of what is long."""
    if all(isinstance(node, ast.Import | ast.ImportFrom) for node in body):
        return "exported imports"
    return "\n".join(filter(None, map(signature, body))) or None if lines > LONG else None


def folded_line(cell: Any, directives: Mapping[str, str]) -> str | None:
    """The line that stands for a code cell without its directives; None for one that is shown."""
    try:
        tree = ast.parse(cell.source)
    except SyntaxError:
        return None
    if not tree.body:
        return None
    if "export" in directives:
        return exported_line(tree.body, len(cell.source.splitlines()))
    if isinstance(tree.body[0], ast.Import | ast.ImportFrom) and all(map(is_setting, tree.body)):
        return "imports"
    is_folded = directives.get("code-fold") == "true"
    functions = ", ".join(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    if is_folded and functions:
        return functions
    if any(isinstance(node, ast.Assert) for node in ast.walk(tree)) and not cell.get("outputs"):
        return f"{'checked' if has_run(cell) else 'not run'}: {count(tree)}"
    if is_folded:
        return "code"
    match tree.body[-1]:
        case ast.Expr(ast.Call(ast.Name("explore" | "live" | "recorded"))):
            return "code of the exhibit"
    return None
