//! Tensors of safetensors.
