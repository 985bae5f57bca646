"""PowerSGD: gradients travel between copies of the model as low-rank factors (arXiv 1905.13727)."""
