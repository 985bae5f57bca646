"""titan_lite: pretraining for Llama 3, Qwen3 and others around SimpleFSDP (arXiv 2411.00284)."""

__version__ = "0.2.0"
