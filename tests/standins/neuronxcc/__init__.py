"""Stands for neuronx-cc 2.24 of AWS Neuron SDK 2.29.1: that it can be imported is part of an image's build."""

__version__ = "2.24.8799.0+6f62ff7c"
