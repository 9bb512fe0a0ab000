def safetensors_weights_iterator(hf_weights_files, disable_mmap=False):
    raise AssertionError("SGLang's own iterator was called")


def buffered_multi_thread_safetensors_weights_iterator(hf_weights_files, max_workers, disable_mmap=False):
    raise AssertionError("SGLang's own iterator was called")
