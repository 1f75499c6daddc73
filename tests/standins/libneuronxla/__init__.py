"""Stands for libneuronxla 2.2 of AWS Neuron SDK 2.29.1: that it can be imported tells torch-xla that it is on a Neuron host."""
