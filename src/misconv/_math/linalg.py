"""Small dense linear algebra, unrolled: batches of L×L matrices that never make a GPU wait."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cholesky", "triangular_inverse"]


def cholesky(matrix: Tensor) -> Tensor:
    """The lower root of matrices C ⪰ I, unrolled over their few columns.

    Unlike `torch.linalg.cholesky` it neither waits for the GPU nor raises: all pivots of C ⪰ I are at least 1, and a
    pivot that rounding has pushed below is set to 1.
    """
    size = matrix.shape[-1]
    if size == 0:
        return matrix
    identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    below = torch.ones_like(identity).tril(-1)
    columns = []
    for j in range(size):
        pivot = matrix[..., j, j].clamp_min(1).sqrt().unsqueeze(-1)
        column = identity[j] * pivot + below[:, j] * matrix[..., :, j] / pivot
        columns.append(column)
        matrix = matrix - column.unsqueeze(-1) * column.unsqueeze(-2)
    return torch.stack(columns, -1)


def triangular_inverse(root: Tensor) -> Tensor:
    """The inverse of lower triangular matrices by forward substitution."""
    size = root.shape[-1]
    if size == 0:
        return root
    identity = torch.eye(size, dtype=root.dtype, device=root.device)
    rows: list[Tensor] = []
    for j in range(size):
        row = identity[j].expand(root.shape[:-1])
        if rows:
            row = row - (root[..., j : j + 1, :j] @ torch.stack(rows, -2)).squeeze(-2)
        rows.append(row / root[..., j, j].unsqueeze(-1))
    return torch.stack(rows, -2)
