import enum


class LoadFormat(str, enum.Enum):
    AUTO = "auto"
    SAFETENSORS = "safetensors"


class LoadConfig:
    def __init__(self, load_format="auto", model_loader_extra_config=None):
        self.load_format = load_format
        self.model_loader_extra_config = model_loader_extra_config or {}
        self._verify_load_format()

    def _verify_load_format(self):
        self.load_format = LoadFormat(self.load_format)
