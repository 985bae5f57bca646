"""Grouped products as kernels may leave them: NaN in the rows of no group."""


def poisoned(product):
    """Return F.grouped_mm, or what stands for it, with NaN in the rows past the last end."""

    def product_with_nan(a, b, offs):
        found = product(a, b, offs=offs)
        if b.ndim == 3:  # a product of rows, and not one of weights
            found[offs[-1] :] = float("nan")
        return found

    return product_with_nan
