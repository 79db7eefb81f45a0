"""The snippets of the frameworks' guides make the calls of the examples that integration/test_frameworks.py runs."""

from __future__ import annotations

import ast

import pytest

from tests.pages.test_documents import blocks, text


def calls(tree: ast.AST) -> dict[str, set[str]]:
    """Return the calls of a snippet: last part of the function's name → keywords."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            found.setdefault(name, set()).update(word.arg for word in node.keywords if word.arg)
    return found


# In a snippet for the reader's convenience, but not in the example: settings of the framework or loader.
ELSEWHERE = {"DataLoader": {"num_workers"}, "Trainer": {"max_epochs"}}
BY_THE_READER = {"loss_of", "build"}


@pytest.mark.parametrize("framework", ["lightning", "transformers", "accelerate", "torchtitan"])
def test_a_snippet_does_what_its_example_does(framework: str) -> None:
    (block,) = blocks(f"docs/guides/{framework}.md", "python")
    shown, done = calls(ast.parse(block)), calls(ast.parse(text(f"examples/train_{framework}.py")))
    assert set(shown) - BY_THE_READER <= set(done)
    wrong = {
        name: words - done[name] - ELSEWHERE.get(name, set()) for name, words in shown.items() if name in done
    }
    assert {name: words for name, words in wrong.items() if words} == {}
