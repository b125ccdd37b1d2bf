"""The layers of decoders and encoders, from a configuration and a platform's operations.

It may import `checkpoint` and `quantization`, and knows no device. Begin with `decoder`; `loader`
fills a model with weights, and `transformers_model` runs what is not written here.
"""
