"""Matrix products are recognised in every form, and nothing else is."""

import pytest
import torch

from sinkwise.interception import matmul


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bhqd,bhkd->bhqk", ((2, 3, 5, 11), (2, 3, 7, 11))),
        ("bqhd,bkhd->bhqk", ((2, 5, 3, 11), (2, 7, 3, 11))),
        ("b q h d, b k h d -> b q k h", ((2, 5, 3, 11), (2, 7, 3, 11))),
        ("id,jd->ij", ((5, 11), (7, 11))),
        ("id,jd->ji", ((5, 11), (7, 11))),
    ],
)
def test_an_einsum_is_a_product(equation: str, shapes: tuple) -> None:
    operands = [torch.randn(shape) for shape in shapes]
    product = matmul.product("einsum", (equation, *operands), {})
    assert product is not None
    result = product.laid_out(torch.einsum(equation, *operands))
    torch.testing.assert_close(product.left @ product.right, result)
    listed = matmul.product("einsum", (equation, operands), {})
    assert listed is not None and torch.equal(listed.left, product.left)


@pytest.mark.parametrize("equation", ["bd,bd->b", "ij->ji", "ab,bc,cd->ad", "...ij,...kj->...ik",
                                      "ijk,jkl->il"])  # fmt: skip
def test_other_einsums_are_not_products(equation: str) -> None:
    count = equation.count(",") + 1
    dims = [len(term.replace("...", "")) for term in equation.split("->")[0].split(",")]
    operands = [torch.randn([2] * dims[i]) for i in range(count)]
    assert matmul.product("einsum", (equation, *operands), {}) is None


def test_vectors_and_other_functions_are_not_products() -> None:
    vector, matrix = torch.randn(5), torch.randn(5, 5)
    assert matmul.product("matmul", (matrix, vector), {}) is None
    assert matmul.product("add", (matrix, matrix), {}) is None
    product = matmul.product("matmul", (matrix,), {"other": matrix})
    assert product is not None and product.left is matrix
