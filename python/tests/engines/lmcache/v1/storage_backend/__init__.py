import importlib


def storage_plugin_launcher(config, metadata, loop, local_cpu_backend, dst_device, storage_backends):
    for storage_plugin in config.storage_plugins:
        module = importlib.import_module(config.extra_config[f"storage_plugin.{storage_plugin}.module_path"])
        backend_class = getattr(module, config.extra_config[f"storage_plugin.{storage_plugin}.class_name"])
        storage_backends[storage_plugin] = backend_class(
            config=config, dst_device=dst_device, metadata=metadata, local_cpu_backend=local_cpu_backend, loop=loop
        )
