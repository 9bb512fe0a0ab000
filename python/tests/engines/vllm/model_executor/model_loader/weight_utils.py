def safetensors_weights_iterator(
    hf_weights_files, use_tqdm_on_load, safetensors_load_strategy=None, local_expert_ids=None
):
    raise AssertionError("vLLM's own iterator was called")


def fastsafetensors_weights_iterator(hf_weights_files, use_tqdm_on_load):
    raise AssertionError("another loader's iterator was called")
