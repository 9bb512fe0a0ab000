"""A mock of what onehop uses of LMCache, with NumPy's arrays as tensors. `signatures.py` compares it with a real one."""
