import importlib


class StorageBackendFactory:
    @classmethod
    def create_backend(cls, backend_name, storage_config, mem_pool_host, **kwargs):
        assert backend_name == "dynamic"
        return cls._create_dynamic_backend(storage_config.extra_config, storage_config, mem_pool_host, **kwargs)

    @classmethod
    def _create_dynamic_backend(cls, backend_config, storage_config, mem_pool_host, **kwargs):
        module = importlib.import_module(backend_config["module_path"])
        backend_class = getattr(module, backend_config["class_name"])
        return backend_class(storage_config, kwargs)
