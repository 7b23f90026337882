"""Whether a kernel of the distance is conditionally positive definite (CPD), checked numerically on given points.

A kernel k is CPD on points x_1 ... x_n when sum_ij v_i v_j k(|x_i - x_j|) >= 0 for all v whose sum is 0. Then, says
Lemma 1 of the KERPLE paper (arXiv 2205.09921), adding a large enough constant makes it positive definite, and the
softmax takes that constant out again.

    method = KerpleLog(num_heads=12)
    is_cpd(method.bias, range(100))             # bool [12]
    lemma_constant(method.bias, range(100))     # float64 [12]

Legend: h heads (or any leading dimensions), n points.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Kernel = Callable[[Tensor], Tensor]
LARGEST_CONSTANT = 2.0**40


def is_cpd(kernel: Kernel, points: Iterable[float]) -> Tensor:
    """For each head, whether the kernel is CPD on the points, to the rounding of the kernel's own numbers: bool `[h]`.

    kernel: float64 distances `[n, n]` -> `[h, n, n]` or `[n, n]`; a method's `bias` is one. Raises ValueError for fewer
    than two points, points that are not all different, and values that are not finite.
    """
    gram, rounding = _gram(kernel, points)
    return torch.linalg.eigvalsh(_in_basis(gram)[..., 1:, 1:])[..., 0] >= -rounding


def lemma_constant(kernel: Kernel, points: Iterable[float]) -> Tensor:
    """For each head, the first c of 0, 1, 2, 4, 8 ... for which c + k is positive semidefinite: float64 `[h]`.

    Raises ValueError where the kernel is not CPD on the points, and where it is but no constant to 2^40 will do: for
    -δ^2 on three points of a line there is none, however large.
    """
    gram, rounding = _gram(kernel, points)
    if not bool(is_cpd(kernel, points).all()):
        raise ValueError("the kernel is not conditionally positive definite on these points, so no constant helps")
    constant = torch.zeros(gram.shape[:-2], dtype=torch.float64)
    lacking = ~_positive(gram, constant, rounding)
    while lacking.any():
        constant = torch.where(lacking, (2 * constant).clamp(min=1.0), constant)
        if constant.max() > LARGEST_CONSTANT:
            raise ValueError(
                f"no constant to {LARGEST_CONSTANT:.0e} makes the kernel positive definite on these points, although "
                "it is conditionally positive definite: it is a limit case, as -distance^2 is"
            )
        lacking = ~_positive(gram, constant, rounding)
    return constant


@torch.no_grad()
def _gram(kernel: Kernel, points: Iterable[float]) -> tuple[Tensor, Tensor]:
    """k(|x_i - x_j|) float64 `[h, n, n]`, and how far rounding may move an eigenvalue, `[h]`."""
    places = torch.as_tensor([float(point) for point in points], dtype=torch.float64)
    if len(places) < 2 or len(places.unique()) < len(places):
        raise ValueError(f"at least two points, all different, are needed; got {len(places)}")
    values = kernel((places[:, None] - places).abs())
    if not torch.isfinite(values).all():
        raise ValueError("the kernel is not finite at the distances of these points")
    gram = values.double().cpu()
    rounding = len(places) * torch.finfo(values.dtype).eps * gram.abs().amax(dim=(-2, -1))
    return gram, rounding


def _in_basis(gram: Tensor) -> Tensor:
    """The Gram matrix in an orthonormal basis whose first vector is the constant one."""
    n = gram.shape[-1]
    vectors = torch.eye(n, dtype=torch.float64)
    vectors[:, 0] = 1.0
    basis, _ = torch.linalg.qr(vectors)
    return basis.T @ gram @ basis


def _positive(gram: Tensor, constant: Tensor, rounding: Tensor) -> Tensor:
    """Whether constant + k has no negative eigenvalue, bool `[h]`.

    In the basis the constant c adds n c to one diagonal element. With that row and column divided by sqrt(max(1, n c)),
    which changes no sign, the rounding does not grow with c.
    """
    moved = _in_basis(gram)
    added = gram.shape[-1] * constant
    scale = added.clamp(min=1.0).rsqrt()
    moved[..., 0, 0] += added
    moved[..., 0, :] *= scale[..., None]
    moved[..., :, 0] *= scale[..., None]
    return torch.linalg.eigvalsh(moved)[..., 0] >= -rounding
