"""PowerSGD: gradients travel between copies of the model as two thin factors (arXiv 1905.13727)."""
