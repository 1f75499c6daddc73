"""Where torch-xla would load the device's runtime from (torch_xla/_internal/neuron.py). Here it is never loaded."""


def libneuronpjrt_path() -> str:
    return "libneuronpjrt.so"
