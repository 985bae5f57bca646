"""Grouped GEMMs as kernels may leave them: NaN in the rows of no group."""


def poisoned(matmul):
    """Return F.grouped_mm, or what stands for it, with NaN in the rows past the last end."""

    def matmul_with_nan(a, b, offs):
        found = matmul(a, b, offs=offs)
        if b.ndim == 3:  # a matmul of rows, and not one of weights
            found[offs[-1] :] = float("nan")
        return found

    return matmul_with_nan
