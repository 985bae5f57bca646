"""PowerSGD: gradients travel between replicas as low-rank factors (arXiv 1905.13727)."""
