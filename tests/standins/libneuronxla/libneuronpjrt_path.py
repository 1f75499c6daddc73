"""Where torch-xla would load the device's runtime from (torch_xla/_internal/neuron.py); never loaded, because the host computes."""


def libneuronpjrt_path() -> str:
    return "libneuronpjrt.so"
